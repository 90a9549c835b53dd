// SPDX-License-Identifier: GPL-2.0

//! The samples of `perf script`, and the paths of branches that led to them.

use regex::Regex;
use std::collections::BTreeMap;

/// What `perf script -F` must be asked for.
pub const FIELDS: &str = "ip,sym,symoff,dso,brstacksym";

/// A place in the code: a symbol, which in C++ and Rust has spaces and slashes, an offset, and the
/// file. Without the file perf would print no space between the sample and its first branch.
const PLACE: &str = r"(\[unknown\]|[^\s].*?\+0x[0-9a-f]+) \(([^)]*)\)";

/// What a place is called: where there is no symbol, by its file.
fn place(symbol: &str, file: &str) -> String {
    // Semicolons are between the frames of a stack.
    match symbol {
        "[unknown]" if file != symbol => format!("[{}]", file.rsplit('/').next().unwrap_or(file)),
        _ => symbol.replace(';', ":"),
    }
}

/// The function that a place is in.
fn function_of(place: &str) -> &str {
    place
        .rsplit_once("+0x")
        .map_or(place, |(function, _)| function)
}

/// The paths to each function that was sampled.
pub struct Paths {
    depth: usize,
    sample: Regex,
    branch: Regex,
    /// For each function its stacks, from the function to the oldest branch, and how many samples
    /// had them.
    functions: BTreeMap<String, BTreeMap<String, u64>>,
    /// Samples that came with branches.
    with_branches: u64,
}

impl Paths {
    /// Keeps `depth` branches of each sample.
    pub fn new(depth: usize) -> Self {
        let regex = |pattern: String| Regex::new(&pattern).expect("the pattern is constant");
        Self {
            depth,
            sample: regex(format!(r"^\s*[0-9a-f]+ {PLACE}\s*")),
            // FROM/TO, and behind more slashes: predicted, in a transaction, abort, cycles, type.
            branch: regex(format!(r"{PLACE}/{PLACE}/\S*")),
            functions: BTreeMap::new(),
            with_branches: 0,
        }
    }

    /// Adds a line of `perf script`.
    pub fn add(&mut self, line: &str) -> Result<(), String> {
        if line.trim().is_empty() {
            return Ok(());
        }
        let sample = self.sample.captures(line).ok_or_else(|| {
            format!(
                "\"{}\" is no sample of perf script -F {FIELDS}",
                line.trim()
            )
        })?;
        let at = place(&sample[1], &sample[2]);
        let mut stack = vec![function_of(&at).to_string()];
        // perf has the newest first.
        let branches = self.branch.captures_iter(&line[sample[0].len()..]);
        stack.extend(branches.take(self.depth).map(|branch| {
            let from = place(&branch[1], &branch[2]);
            let to = place(&branch[3], &branch[4]);
            format!("{from} → {to}")
        }));
        self.with_branches += u64::from(stack.len() > 1);
        let stacks = self.functions.entry(stack[0].clone()).or_default();
        *stacks.entry(stack.join(";")).or_default() += 1;
        Ok(())
    }

    /// How many samples there were.
    pub fn samples(&self) -> u64 {
        self.functions.values().flat_map(BTreeMap::values).sum()
    }

    /// The function of that name, or the one with the most samples.
    pub fn function<'a>(&'a self, wanted: Option<&'a str>) -> Result<&'a str, String> {
        if self.samples() == 0 {
            return Err("there are no samples".into());
        }
        if self.with_branches == 0 {
            return Err(format!(
                "no sample has branches. Record with AUX samples,\n       \
                 perf record -e '{{intel_pt//u,cpu-clock/aux-sample-size=4096/u}}' -- PROGRAM\n       \
                 and print them with perf script --itrace=L16 -F {FIELDS}"
            ));
        }
        let mut by_samples: Vec<(u64, &str)> = self
            .functions
            .iter()
            .map(|(function, stacks)| (stacks.values().sum(), function.as_str()))
            .collect();
        by_samples.sort_by(|a, b| b.cmp(a));
        let Some(wanted) = wanted else {
            // Code without symbols is no function.
            let named = by_samples.iter().find(|(_, name)| !name.starts_with('['));
            return Ok(named.unwrap_or(&by_samples[0]).1);
        };
        if self.functions.contains_key(wanted) {
            return Ok(wanted);
        }
        let most: Vec<String> = by_samples
            .iter()
            .take(5)
            .map(|(samples, function)| format!("{function} ({samples})"))
            .collect();
        Err(format!(
            "no sample is in {wanted}; the most are in {}",
            most.join(", ")
        ))
    }

    /// The paths to `function` as the folded stacks of flame graphs, with their samples.
    pub fn stacks(&self, function: &str) -> &BTreeMap<String, u64> {
        static NONE: BTreeMap<String, u64> = BTreeMap::new();
        self.functions.get(function).unwrap_or(&NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What perf 7.3 printed of tools/vm/calls.c.
    const RECORDED: &str = include_str!("../tests/calls.script");

    fn paths(text: &str, depth: usize) -> Result<Paths, String> {
        let mut paths = Paths::new(depth);
        text.lines().try_for_each(|line| paths.add(line))?;
        Ok(paths)
    }

    #[test]
    fn newest_branch_is_next_to_the_function() {
        // Offsets end where the file begins: 'f' is a hexadecimal digit too.
        let line = " 401136 f+0x6 (/p)f+0x50 (/p)/f+0x0 (/p)/-/-/-/0/CALL/-  \
                    m+0x98 (/p)/f+0x48 (/p)/-/-/-/0//- ";
        let paths = paths(line, 16).unwrap();
        let stacks: Vec<_> = paths.stacks("f").iter().collect();
        assert_eq!(
            stacks,
            [(&"f;f+0x50 → f+0x0;m+0x98 → f+0x48".to_string(), &1)]
        );
    }

    #[test]
    fn names_have_spaces_slashes_and_semicolons() {
        let line = " 1 operator/(A, B)+0x6 (/p)a<[u8; 4]>::b()+0x5 (/p)/operator/(A, B)+0x0 (/p)\
                    /-/-/-/0//- ";
        let paths = paths(line, 16).unwrap();
        let stacks: Vec<_> = paths.stacks("operator/(A, B)").keys().collect();
        assert_eq!(
            stacks,
            ["operator/(A, B);a<[u8: 4]>::b()+0x5 → operator/(A, B)+0x0"]
        );
    }

    #[test]
    fn code_without_symbols_has_the_name_of_its_file() {
        let line =
            " 7f8e [unknown] (/lib/ld.so)[unknown] ([unknown])/[unknown] (/lib/ld.so)/-/-/-/0//- ";
        let paths = paths(line, 16).unwrap();
        let stacks: Vec<_> = paths.stacks("[ld.so]").keys().collect();
        assert_eq!(stacks, ["[ld.so];[unknown] → [ld.so]"]);
        assert_eq!(paths.function(None), Ok("[ld.so]"));
    }

    #[test]
    fn recorded() {
        let paths = paths(RECORDED, 4).unwrap();
        assert_eq!(paths.samples(), RECORDED.lines().count() as u64);
        assert_eq!(paths.function(None), Ok("fibonacci"));
        let fibonacci = paths.stacks("fibonacci");
        let of_fibonacci = |line: &&str| line[17..].starts_with(" fibonacci+0x");
        let sampled = RECORDED.lines().filter(of_fibonacci).count();
        assert_eq!(fibonacci.values().sum::<u64>(), sampled as u64);
        // Four branches and the function, each branch from where code of the program is.
        for stack in fibonacci.keys() {
            assert_eq!(stack.split(';').count(), 5, "{stack}");
            assert!(!stack.contains('['), "{stack}");
        }
        // The flow goes on where the newer branch leaves: the older one ends in its function.
        for stack in fibonacci.keys() {
            let branches: Vec<(&str, &str)> = stack
                .split(';')
                .skip(1)
                .map(|b| b.split_once(" → ").unwrap())
                .collect();
            assert_eq!(function_of(branches[0].1), "fibonacci");
            for pair in branches.windows(2) {
                assert_eq!(function_of(pair[0].0), function_of(pair[1].1), "{stack}");
            }
        }
    }

    #[test]
    fn bad_input() {
        let error = |text: &str, function| {
            paths(text, 16)
                .and_then(|paths| paths.function(function).map(String::from))
                .unwrap_err()
        };
        assert_eq!(error("", None), "there are no samples");
        assert!(error(" 401136 f+0x6 (/p)", None).contains("aux-sample-size"));
        assert!(error("calls 122 69.382959: cycles:", None).contains("is no sample"));
        let one = " 1 f+0x6 (/p)g+0x1 (/p)/f+0x0 (/p)/-/-/-/0//- ";
        assert_eq!(
            error(one, Some("h")),
            "no sample is in h; the most are in f (1)"
        );
    }

    proptest! {
        /// Each sample is one leaf: of its function, with its branches, and nothing else is there.
        #[test]
        fn leaves_are_samples(
            samples in prop::collection::vec(
                (0..4u8, prop::collection::vec((0..4u8, 0..3u8), 0..6)),
                1..60,
            ),
            depth in 1..8usize,
        ) {
            let mut all = Paths::new(depth);
            let mut naive: Vec<String> = Vec::new();
            for (function, branches) in &samples {
                let mut line = format!("  40{function}000 f{function}+0x4 (/p)");
                let mut stack = format!("f{function}");
                for (at, (from, to)) in branches.iter().enumerate() {
                    line += &format!("f{from}+0x{at:x} (/p)/f{to}+0x10 (/p)/-/-/-/0//- ");
                    if at < depth {
                        stack += &format!(";f{from}+0x{at:x} → f{to}+0x10");
                    }
                }
                all.add(&line).unwrap();
                naive.push(stack);
            }
            prop_assert_eq!(all.samples(), samples.len() as u64);
            for (function, _) in &samples {
                let name = format!("f{function}");
                for (stack, count) in all.stacks(&name) {
                    let same = naive.iter().filter(|other| *other == stack).count();
                    prop_assert_eq!(*count, same as u64);
                }
                let of_function = samples.iter().filter(|(other, _)| other == function).count();
                prop_assert_eq!(all.stacks(&name).values().sum::<u64>(), of_function as u64);
            }
        }
    }
}
