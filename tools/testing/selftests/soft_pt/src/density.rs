// SPDX-License-Identifier: GPL-2.0

//! How many bytes a trace takes, against the fewest that the format allows for the same flow.
//!
//! A program is recorded whole, its packets are read one by one, and the program's own code is
//! followed along them, so that it is known what each packet stands for. That is then what the
//! model of the fewest bytes is told: see `fewest.rs` of `soft_pt_host`.

use std::{
    collections::HashMap,
    ffi::{
        CString,
        OsStr, //
    },
    os::unix::ffi::OsStrExt,
    path::Path, //
};

use iced_x86::{
    FlowControl,
    Mnemonic, //
};
use perf_aux::{
    abi,
    load::Child,
    ring::{
        AuxMode,
        Ring, //
    },
    sys::Pmu,
    Error,
    Result, //
};

use crate::{
    fewest::{
        fewest,
        Bytes,
        Returns,
        Saying, //
    },
    image::{
        Image,
        Map, //
    }, //
};

/// A packet, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Psb,
    PsbEnd,
    Overflow,
    /// Time, ratio or mode, and its length.
    State(usize),
    /// The bits of a TNT, the oldest uppermost, and their number.
    Tnt(u64, u32),
    To(u64),
    Enabled(u64),
    Disabled,
    From(u64),
}

/// Takes a trace apart.
struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
    last_ip: u64,
}

impl<'a> Reader<'a> {
    fn new(trace: &'a [u8]) -> Self {
        Reader {
            rest: trace,
            length: trace.len(),
            last_ip: 0,
        }
    }

    fn fail<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        let at = self.length - self.rest.len();
        Err(Error::new(format!("packet at byte {at:#x}: {what}")))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        if length > self.rest.len() {
            return self.fail("cut short");
        }
        let (bytes, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(bytes)
    }

    /// The address of an IP packet whose first byte is `first`; `None` if it has none.
    fn ip(&mut self, first: u8) -> Result<Option<u64>> {
        let (length, keep) = match first >> 5 {
            0 => return Ok(None),
            1 => (2, !0xffff),
            2 => (4, !0xffff_ffff),
            3 => (6, 0),
            4 => (6, !0xffff_ffff_ffff),
            6 => (8, 0),
            other => return self.fail(format_args!("IPBytes {other}")),
        };
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(self.take(length)?);
        let mut ip = u64::from_le_bytes(bytes);
        if first >> 5 == 3 {
            ip = ((ip << 16) as i64 >> 16) as u64;
        }
        self.last_ip = (self.last_ip & keep) | ip;
        Ok(Some(self.last_ip))
    }

    fn packet(&mut self) -> Result<Option<Packet>> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let first = self.take(1)?[0];
        let packet = match first {
            0x02 => match self.take(1)?[0] {
                0x82 => {
                    if self.take(14)? != [0x02, 0x82].repeat(7) {
                        return self.fail("no whole PSB");
                    }
                    self.last_ip = 0;
                    Packet::Psb
                }
                0x23 => Packet::PsbEnd,
                0xf3 => Packet::Overflow,
                0x03 => {
                    self.take(2)?;
                    Packet::State(4)
                }
                0xa3 => {
                    let mut bytes = [0; 8];
                    bytes[..6].copy_from_slice(self.take(6)?);
                    tnt(u64::from_le_bytes(bytes))
                }
                other => return self.fail(format_args!("02 {other:02x}")),
            },
            0x19 => {
                self.take(7)?;
                Packet::State(8)
            }
            0x99 => {
                self.take(1)?;
                Packet::State(2)
            }
            byte if byte & 1 == 0 && byte > 2 => tnt(u64::from(byte >> 1)),
            byte => {
                let ip = self.ip(byte)?;
                match (byte & 0x1f, ip) {
                    (0x0d, Some(ip)) => Packet::To(ip),
                    (0x11, Some(ip)) => Packet::Enabled(ip),
                    (0x01, None) => Packet::Disabled,
                    (0x1d, Some(ip)) => Packet::From(ip),
                    _ => return self.fail(format_args!("{byte:02x}")),
                }
            }
        };
        Ok(Some(packet))
    }
}

/// The bits below the highest one that is set.
fn tnt(bits: u64) -> Packet {
    Packet::Tnt(bits, 63 - bits.leading_zeros())
}

/// How a stretch of code without a decision ends.
#[derive(Clone, Copy)]
enum End {
    Conditional { to: u64, next: u64 },
    Jump { to: u64 },
    Call { to: u64, next: u64 },
    IndirectJump,
    IndirectCall { next: u64 },
    Return,
    Kernel,
}

#[derive(Clone, Copy)]
struct Stretch {
    instructions: u64,
    end: End,
}

/// What a trace has in it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Density {
    /// Instructions retired.
    pub(crate) instructions: u64,
    /// Conditional branches among them.
    pub(crate) branches: u64,
    /// Bytes of the trace.
    pub(crate) bytes: Bytes,
    /// The fewest bytes, if every return is compressed that the SDM allows to compress.
    pub(crate) fewest: Bytes,
}

/// Follows the code along the packets.
struct Follower<'a> {
    image: &'a Image,
    stretches: HashMap<u64, Stretch>,
    packets: std::iter::Peekable<std::slice::Iter<'a, Packet>>,
    /// Bits of the last TNT that stand for branches to come, below a set bit.
    bits: u64,
    bits_left: u32,
    returns: Vec<u64>,
    sayings: Vec<Saying>,
    density: Density,
}

impl Follower<'_> {
    fn fail<T>(&self, ip: u64, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::new(format!(
            "{what} at {ip:#x}, after {} instructions; next packets: {:x?}",
            self.density.instructions,
            self.packets.clone().take(4).collect::<Vec<_>>()
        )))
    }

    /// The code from `ip` on up to the next branch.
    fn stretch(&mut self, ip: u64) -> Result<Stretch> {
        if let Some(known) = self.stretches.get(&ip) {
            return Ok(*known);
        }
        let (mut at, mut instructions) = (ip, 0);
        let end = loop {
            let Some(instruction) = self.image.instruction(at) else {
                return self.fail(at, "no code is known");
            };
            instructions += 1;
            let (to, next) = (instruction.near_branch_target(), instruction.next_ip());
            match instruction.flow_control() {
                FlowControl::Next | FlowControl::XbeginXabortXend => at = next,
                FlowControl::Exception | FlowControl::Interrupt => break End::Kernel,
                FlowControl::ConditionalBranch => break End::Conditional { to, next },
                FlowControl::UnconditionalBranch => break End::Jump { to },
                FlowControl::Call if instruction.mnemonic() == Mnemonic::Syscall => {
                    break End::Kernel
                }
                FlowControl::Call if to == next => break End::Jump { to },
                FlowControl::Call => break End::Call { to, next },
                FlowControl::IndirectBranch => break End::IndirectJump,
                FlowControl::IndirectCall => break End::IndirectCall { next },
                FlowControl::Return => break End::Return,
            }
        };
        let stretch = Stretch { instructions, end };
        self.stretches.insert(ip, stretch);
        Ok(stretch)
    }

    /// Where the packets that come next say that the flow is.
    fn place(&self) -> Option<u64> {
        let mut ahead = self.packets.clone();
        let first = ahead.next();
        if let Some(Packet::From(ip)) = first {
            return Some(*ip);
        }
        if first != Some(&Packet::Psb) {
            return None;
        }
        ahead
            .take_while(|packet| **packet != Packet::PsbEnd)
            .find_map(|packet| match packet {
                Packet::From(ip) => Some(*ip),
                _ => None,
            })
    }

    /// How many instructions there are from `from` up to, but without, `to`; `None` if it is not in
    /// the stretch.
    fn distance(&self, from: u64, to: u64, stretch: Stretch) -> Option<u64> {
        let mut at = from;
        for passed in 0..stretch.instructions {
            if at == to {
                return Some(passed);
            }
            at = self.image.instruction(at)?.next_ip();
        }
        None
    }

    fn bit(&mut self, ip: u64) -> Result<bool> {
        if self.bits_left == 0 {
            match self.packets.next() {
                Some(&Packet::Tnt(bits, count)) => (self.bits, self.bits_left) = (bits, count),
                other => return self.fail(ip, format_args!("{other:x?} in place of a TNT")),
            }
        }
        self.bits_left -= 1;
        Ok((self.bits >> self.bits_left) & 1 != 0)
    }

    fn target(&mut self, ip: u64) -> Result<u64> {
        match self.packets.next() {
            Some(&Packet::To(to)) => Ok(to),
            other => self.fail(ip, format_args!("{other:x?} in place of a TIP")),
        }
    }

    fn push(&mut self, next: u64) {
        self.returns.push(next);
        self.sayings.push(Saying::Call(next));
    }

    /// Goes along one stretch; returns where the flow goes on, `None` if it is left.
    fn go(&mut self, ip: u64) -> Result<Option<u64>> {
        let stretch = self.stretch(ip)?;
        if self.bits_left == 0 {
            if let Some(place) = self.place() {
                if let Some(passed) = self.distance(ip, place, stretch) {
                    self.density.instructions += passed;
                    return self.at(place);
                }
            }
        }
        self.density.instructions += stretch.instructions;
        Ok(Some(match stretch.end {
            End::Conditional { to, next } => {
                self.density.branches += 1;
                self.sayings.push(Saying::Branch);
                match self.bit(ip)? {
                    true => to,
                    false => next,
                }
            }
            End::Jump { to } => to,
            End::Call { to, next } => {
                self.push(next);
                to
            }
            End::IndirectJump => {
                let to = self.target(ip)?;
                self.sayings.push(Saying::Indirect(to));
                to
            }
            End::IndirectCall { next } => {
                self.push(next);
                let to = self.target(ip)?;
                self.sayings.push(Saying::Indirect(to));
                to
            }
            End::Return => {
                let compressed =
                    self.bits_left > 0 || matches!(self.packets.peek(), Some(Packet::Tnt(..)));
                let called = self.returns.pop();
                let to = match (compressed, called) {
                    (false, _) => self.target(ip)?,
                    (true, Some(to)) => match self.bit(ip)? {
                        true => to,
                        false => return self.fail(ip, "a return that is not taken"),
                    },
                    (true, None) => return self.fail(ip, "a compressed return without a call"),
                };
                self.sayings.push(Saying::Return(to));
                to
            }
            End::Kernel => match self.packets.next() {
                Some(Packet::Disabled) => {
                    self.sayings.push(Saying::Packet(1));
                    return Ok(None);
                }
                other => return self.fail(ip, format_args!("{other:x?} in place of a TIP.PGD")),
            },
        }))
    }

    /// Takes the packets that are there because the flow is at `ip`.
    fn at(&mut self, ip: u64) -> Result<Option<u64>> {
        if self.packets.peek() == Some(&&Packet::Psb) {
            self.psb()?;
            return Ok(Some(ip));
        }
        self.packets.next();
        self.sayings.push(Saying::Ip(ip));
        match self.packets.next() {
            Some(Packet::Disabled) => {
                self.sayings.push(Saying::Packet(1));
                Ok(None)
            }
            Some(&Packet::To(to)) => {
                self.sayings.push(Saying::Ip(to));
                Ok(Some(to))
            }
            other => self.fail(ip, format_args!("{other:x?} after a FUP")),
        }
    }

    /// Takes a whole PSB+.
    fn psb(&mut self) -> Result<()> {
        self.returns.clear();
        loop {
            self.sayings.push(match self.packets.next() {
                Some(Packet::Psb) => Saying::Psb,
                Some(Packet::State(length)) => Saying::Packet(*length),
                Some(Packet::From(ip)) => Saying::Ip(*ip),
                Some(Packet::PsbEnd) => break,
                other => return self.fail(0, format_args!("{other:x?} in a PSB+")),
            });
        }
        self.sayings.push(Saying::Packet(2));
        Ok(())
    }

    /// Takes the packets up to where the flow goes on; `None` at the end of the trace.
    fn enter(&mut self) -> Result<Option<u64>> {
        loop {
            let saying = match self.packets.peek() {
                None => return Ok(None),
                Some(Packet::Psb) => {
                    self.psb()?;
                    continue;
                }
                Some(Packet::State(length)) => Saying::Packet(*length),
                Some(Packet::Overflow) => {
                    self.returns.clear();
                    Saying::Overflow
                }
                Some(Packet::Enabled(ip)) => Saying::Ip(*ip),
                Some(_) => return self.fail(0, "a packet of the flow outside of it"),
            };
            self.packets.next();
            self.sayings.push(saying);
            if let Saying::Ip(ip) = saying {
                return Ok(Some(ip));
            }
        }
    }
}

/// All packets of a trace.
pub(crate) fn packets(trace: &[u8]) -> Result<Vec<Packet>> {
    Ok(parsed(trace)?.0)
}

/// The same, and their bytes.
fn parsed(trace: &[u8]) -> Result<(Vec<Packet>, Bytes)> {
    let mut reader = Reader::new(trace);
    let mut packets = Vec::new();
    let mut bytes = Bytes::default();
    let mut in_psb = false;
    loop {
        let left = reader.rest.len();
        let Some(packet) = reader.packet()? else {
            return Ok((packets, bytes));
        };
        let length = left - reader.rest.len();
        match packet {
            Packet::Tnt(_, 0) => return reader.fail("a TNT that carries nothing"),
            Packet::Tnt(..) => bytes.tnt += length,
            // A TIP that follows a FUP is no indirect branch.
            Packet::To(_) if !matches!(packets.last(), Some(Packet::From(_))) => {
                bytes.tip += length;
            }
            _ => bytes.other += length,
        }
        in_psb = match packet {
            Packet::Psb => true,
            Packet::PsbEnd => false,
            _ => in_psb,
        };
        if in_psb && matches!(packet, Packet::Tnt(..) | Packet::To(_)) {
            return reader.fail("a branch in a PSB+");
        }
        packets.push(packet);
    }
}

/// Follows `image` along `trace`.
pub(crate) fn follow(image: &Image, trace: &[u8]) -> Result<Density> {
    let (packets, bytes) = parsed(trace)?;
    let mut follower = Follower {
        image,
        stretches: HashMap::new(),
        packets: packets.iter().peekable(),
        bits: 1,
        bits_left: 0,
        returns: Vec::new(),
        sayings: Vec::new(),
        density: Density::default(),
    };
    while let Some(mut ip) = follower.enter()? {
        while let Some(next) = follower.go(ip)? {
            ip = next;
        }
    }
    Ok(Density {
        bytes,
        fewest: fewest(follower.sayings, Returns::Sdm),
        ..follower.density
    })
}

/// A program to record.
pub(crate) struct Program {
    /// What sort of program it is.
    pub(crate) what: &'static str,
    /// Its file, and its arguments.
    pub(crate) command: Vec<String>,
}

/// Runs a program to its end, with all of its flow traced.
pub(crate) fn record(pmu: &Pmu, program: &Program) -> Result<(Image, Vec<u8>)> {
    let command = program
        .command
        .iter()
        .map(|word| CString::new(word.as_str()))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| Error::new(format!("{}: {error}", program.what)))?;
    let child = Child::new(move || {
        let mut argv: Vec<_> = command.iter().map(|word| word.as_ptr()).collect();
        argv.push(std::ptr::null());
        let environment = [
            c"LC_ALL=C".as_ptr(),
            c"PATH=/usr/bin".as_ptr(),
            std::ptr::null(),
        ];
        // SAFETY: Strings and lists that end as exec wants it; the output is not wanted.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
            libc::dup2(null, 0);
            libc::dup2(null, 1);
            libc::execve(argv[0], argv.as_ptr(), environment.as_ptr());
        }
        127
    })?;
    let tsc = pmu.config("tsc", 1)?.unwrap_or(0);
    let event = pmu
        .event(tsc)
        .pid(child.pid())
        .enable_on_exec()
        .mmap2()
        .with(|attr| attr.set_mmap(1))
        .open()?;
    let mut ring = Ring::map(&event, 64)?;
    let aux = ring.map_aux(&event, 8192, AuxMode::Full)?;
    let status = child.wait()?;
    if status != 0 {
        return Err(Error::new(format!(
            "{:?} ended with {status}",
            program.command
        )));
    }
    let size = ring.aux_head() as usize;
    if size == 0 || size >= aux.size() {
        return Err(Error::new(format!(
            "{}: a trace of {size} bytes, where at most {} fit",
            program.what,
            aux.size()
        )));
    }
    let mut maps = Vec::new();
    while let Some(raw) = ring.next_raw()? {
        match raw.kind() {
            abi::PERF_RECORD_MMAP2 => maps.push(map(raw.bytes())?),
            abi::PERF_RECORD_LOST => return Err(Error::new("records of mappings were lost")),
            _ => {}
        }
    }
    Ok((Image::load(&maps), aux.bytes(0, size)))
}

/// The mapping in a PERF_RECORD_MMAP2.
fn map(record: &[u8]) -> Result<Map> {
    let word = |at: usize| {
        record
            .get(at..at + 8)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u64::from_ne_bytes)
            .ok_or_else(|| Error::new("a PERF_RECORD_MMAP2 that is cut short"))
    };
    let (start, length, offset) = (word(16)?, word(24)?, word(32)?);
    let name = record.get(72..).unwrap_or(&[]);
    let name = name.split(|byte| *byte == 0).next().unwrap_or(&[]);
    Ok(Map {
        start,
        end: start + length,
        offset,
        path: Path::new(OsStr::from_bytes(name))
            .to_string_lossy()
            .into_owned(),
    })
}

/// A sort, a compressor, an interpreter and an assembler, with something to do for a second or so;
/// those that are installed. Files that they read are made in `directory`.
pub(crate) fn programs(directory: &Path) -> Result<Vec<Program>> {
    let file = |name: &str, text: String| -> Result<String> {
        let path = directory.join(name);
        std::fs::write(&path, text)
            .map_err(|e| Error::from_io(format!("writing {}", path.display()), &e))?;
        Ok(path.to_string_lossy().into_owned())
    };
    let mut seed = 0x2545_f491_4f6c_dd1du64;
    let mut words = String::new();
    for _ in 0..1200 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let number = seed >> 40;
        words += &format!(
            "{} {:x}\n",
            ["alpha", "beta", "gamma"][number as usize % 3],
            number
        );
    }
    let words = file("words", words)?;
    let script = "my %h; for my $i (1..100) { my $w = join '', map { chr(97 + ($i * $_) % 26) } \
                  1..6; $h{$w} += length $w; $w =~ s/[aeiou]+/-/g; $h{$w}++ } \
                  print join(' ', sort keys %h);";
    let mut source = String::new();
    for n in 0..20 {
        source += &format!(
            "f{n}: push %rbx\n mov ${n}, %ebx\n1: lea (%rdi,%rbx,4), %rax\n cmp %rsi, %rax\n \
             jb 1b\n call f{}\n pop %rbx\n ret\n",
            n / 2
        );
    }
    let source = file("source.s", source)?;
    let programs = [
        ("sort", vec!["/usr/bin/sort".to_owned(), words.clone()]),
        (
            "compressor",
            vec!["/usr/bin/gzip".to_owned(), "-c".to_owned(), words],
        ),
        (
            "interpreter",
            vec![
                "/usr/bin/perl".to_owned(),
                "-e".to_owned(),
                script.to_owned(),
            ],
        ),
        (
            "assembler",
            vec![
                "/usr/bin/as".to_owned(),
                source,
                "-o".to_owned(),
                "/dev/null".to_owned(),
            ],
        ),
    ];
    Ok(programs
        .into_iter()
        .filter(|(_, command)| Path::new(&command[0]).is_file())
        .map(|(what, command)| Program { what, command })
        .collect())
}
