// SPDX-License-Identifier: GPL-2.0

//! What procfs, sysfs and the kernel log say about the machine.

use crate::error::{
    Error,
    Result, //
};
use crate::event::Attr;
use crate::ktap::Stop;
use crate::skip;
use std::fs;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{
    Path,
    PathBuf, //
};

const DEVICES: &str = "/sys/bus/event_source/devices";

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path)
        .map(|text| text.trim_end().to_owned())
        .map_err(|e| Error::from_io(format!("reading {}", path.display()), &e))
}

/// A PMU, by its directory in sysfs.
#[derive(Clone, Debug)]
pub struct Pmu {
    name: String,
    kind: u32,
}

impl Pmu {
    /// The PMU of this name, `None` if the kernel has none.
    pub fn find(name: &str) -> Result<Option<Self>> {
        if name.is_empty() || name.contains('/') {
            return Err(Error::new(format!("{name:?} can't be the name of a PMU")));
        }
        let path = Path::new(DEVICES).join(name).join("type");
        if !path.exists() {
            return Ok(None);
        }
        let text = read(&path)?;
        let kind = text
            .parse()
            .map_err(|_| Error::new(format!("{}: {text:?} is not a number", path.display())))?;
        Ok(Some(Pmu {
            name: name.to_owned(),
            kind,
        }))
    }

    /// Every PMU of the kernel.
    pub fn all() -> Result<Vec<Self>> {
        let entries =
            fs::read_dir(DEVICES).map_err(|e| Error::from_io(format!("reading {DEVICES}"), &e))?;
        let mut pmus = Vec::new();
        for name in entries.flatten().map(|entry| entry.file_name()) {
            pmus.extend(Self::find(&name.to_string_lossy())?);
        }
        pmus.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(pmus)
    }

    /// The PMU of this name, which a test can't do without.
    pub fn needed(name: &str) -> std::result::Result<Self, Stop> {
        match Self::find(name)? {
            Some(pmu) => Ok(pmu),
            None => skip!("there is no PMU {name}"),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its type number for `attr.type`.
    pub fn kind(&self) -> u32 {
        self.kind
    }

    fn path(&self, file: &str) -> PathBuf {
        Path::new(DEVICES).join(&self.name).join(file)
    }

    /// A file of its directory, such as `caps/psb_cyc` or `format/pt`; `None` if it has no such
    /// file.
    pub fn file(&self, file: &str) -> Result<Option<String>> {
        let path = self.path(file);
        match path.exists() {
            true => read(&path).map(Some),
            false => Ok(None),
        }
    }

    /// `value` placed where `format/<field>` says, which must be in `config`; `None` if the PMU has
    /// no such field.
    pub fn config(&self, field: &str, value: u64) -> Result<Option<u64>> {
        let Some(format) = self.file(&format!("format/{field}"))? else {
            return Ok(None);
        };
        place(&format, value).map(Some).ok_or_else(|| {
            Error::new(format!(
                "{value:#x} does not fit format/{field} of {}, {format:?}",
                self.name
            ))
        })
    }

    /// A disabled, user-mode event of this PMU on the calling thread.
    pub fn event(&self, config: u64) -> Attr {
        Attr::new(self.kind, config).disabled().user_only()
    }

    /// Whether AUX sampling can be asked of it: the kernel tells by refusing the sampler when there
    /// is no `snapshot_aux`.
    pub fn can_snapshot(&self) -> Result<bool> {
        let leader = self.event(0).open()?;
        let sampler = Attr::cpu_clock(1_000_000)
            .user_only()
            .aux_sample_size(64)
            .sample_type(u64::from(crate::abi::PERF_SAMPLE_AUX))
            .group(&leader)
            .open();
        match sampler {
            Ok(_) => Ok(true),
            Err(e) if e.errno() == Some(libc::EINVAL) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The module that the PMU comes from: the one that `PERF_AUX_MODULE` names the file of, or one
    /// named like it; `None` for what is built in.
    pub fn module(&self) -> Option<String> {
        if let Ok(link) = fs::read_link(self.path("device/driver/module")) {
            return Some(link.file_name()?.to_string_lossy().into_owned());
        }
        let file = std::env::var("PERF_AUX_MODULE").unwrap_or_default();
        let file = Path::new(&file).file_stem().unwrap_or_default();
        let names = [&*file.to_string_lossy(), "soft_pt", self.name.as_str()];
        let mut names = names.into_iter();
        names
            .find(|name| matches!(module_refcount(name), Ok(Some(_))))
            .map(str::to_owned)
    }
}

/// `value` in the bits of a sysfs format such as `config:3-5,8`.
fn place(format: &str, value: u64) -> Option<u64> {
    let bits = format.strip_prefix("config:")?;
    let (mut config, mut value) = (0, value);
    for range in bits.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (low.parse::<u32>().ok()?, high.parse::<u32>().ok()?);
        if low > high || high > 63 {
            return None;
        }
        for bit in low..=high {
            config |= (value & 1) << bit;
            value >>= 1;
        }
    }
    (value == 0).then_some(config)
}

/// Use count of a loaded module, from `/proc/modules`; `None` if it is not loaded.
pub fn module_refcount(name: &str) -> Result<Option<i64>> {
    let path = Path::new("/proc/modules");
    if !path.exists() {
        return Ok(None);
    }
    let modules = read(path)?;
    let line = modules
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&name));
    match line {
        None => Ok(None),
        Some(fields) => match fields.get(2).and_then(|count| count.parse().ok()) {
            Some(count) => Ok(Some(count)),
            // A dash stands there in a kernel without CONFIG_MODULE_UNLOAD.
            None => Err(Error::new(format!(
                "/proc/modules: no use count of {name}: the kernel can't unload modules"
            ))),
        },
    }
}

/// A sysctl under `/proc/sys`, given back its old value on drop.
pub struct Sysctl {
    path: PathBuf,
    old: String,
}

impl Sysctl {
    /// Sets `name`, such as `kernel/perf_event_paranoid`.
    pub fn set(name: &str, value: impl ToString) -> Result<Self> {
        let path = Path::new("/proc/sys").join(name);
        let old = read(&path)?;
        let value = value.to_string();
        fs::write(&path, &value)
            .map_err(|e| Error::from_io(format!("writing {value:?} to {}", path.display()), &e))?;
        Ok(Sysctl { path, old })
    }

    /// The value of a sysctl.
    pub fn get(name: &str) -> Result<i64> {
        let path = Path::new("/proc/sys").join(name);
        let text = read(&path)?;
        text.parse()
            .map_err(|_| Error::new(format!("{}: {text:?} is not a number", path.display())))
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.old);
    }
}

/// Which of the two variants of AUX sampling a kernel uses that has both, given back its old choice
/// on drop.
pub struct Variant {
    old: Option<String>,
}

impl Variant {
    const PARAMETER: &'static str = "/sys/module/perf/parameters/aux_rust";

    /// The names of the variants that can be chosen; one name for the kernel's only one.
    pub fn names() -> &'static [&'static str] {
        match fs::OpenOptions::new().write(true).open(Self::PARAMETER) {
            Ok(_) => &["Rust", "C"],
            Err(_) => &["the kernel's"],
        }
    }

    /// Chooses one of [`names`](Self::names).
    pub fn choose(name: &'static str) -> Result<Self> {
        let value = match name {
            "Rust" => "Y",
            "C" => "N",
            _ => return Ok(Variant { old: None }),
        };
        let path = Path::new(Self::PARAMETER);
        let old = Some(read(path)?);
        fs::write(path, value)
            .map_err(|e| Error::from_io(format!("writing to {}", path.display()), &e))?;
        Ok(Variant { old })
    }
}

impl Drop for Variant {
    fn drop(&mut self) {
        if let Some(old) = &self.old {
            let _ = fs::write(Self::PARAMETER, old);
        }
    }
}

/// The symbols of the kernel and its modules: address, name, module.
fn kernel_symbols<T>(find: impl Fn(u64, &str, Option<&str>) -> Option<T>) -> Result<Option<T>> {
    let symbols = read(Path::new("/proc/kallsyms"))?;
    Ok(symbols.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let address = u64::from_str_radix(fields.next()?, 16).ok()?;
        let name = fields.nth(1)?;
        let module = fields.next().map(|module| module.trim_matches(['[', ']']));
        find(address, name, module)
    }))
}

/// The address of a function or variable of the kernel; `None` if there is none of this name, or if
/// addresses are hidden from this process.
pub fn kernel_symbol(name: &str) -> Result<Option<u64>> {
    kernel_symbols(|address, symbol, _| (symbol == name && address != 0).then_some(address))
}

/// The first name of a symbol that `wanted` likes, which is told the module too.
pub fn find_kernel_symbol(wanted: impl Fn(&str, Option<&str>) -> bool) -> Result<Option<String>> {
    kernel_symbols(|_, name, module| wanted(name, module).then(|| name.to_owned()))
}

/// How many times as long things take on this kernel as on one that is made to be fast: lockdep,
/// which shows in procfs, and what comes with it in a kernel for debugging.
pub fn slowness() -> u32 {
    match fs::exists("/proc/lockdep") {
        Ok(true) => 6,
        _ => 1,
    }
}

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// Makes the calling process the user nobody, without capabilities, for good.
pub fn become_nobody() -> Result<()> {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: plain numbers, and no groups.
    let done = unsafe {
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
            && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
    };
    if !done {
        return Err(Error::last_os(format!("becoming user {NOBODY}")));
    }
    Ok(())
}

/// Number of open descriptors of this process.
pub fn open_fds() -> Result<usize> {
    let entries =
        fs::read_dir("/proc/self/fd").map_err(|e| Error::from_io("reading /proc/self/fd", &e))?;
    // The directory itself is open while it is counted.
    Ok(entries.count() - 1)
}

/// The kernel log from some moment on.
pub struct KernelLog {
    file: fs::File,
}

impl KernelLog {
    /// Follows the log from now on; `None` where it may not be read.
    pub fn from_now() -> Option<Self> {
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .ok()?;
        // SAFETY: a plain seek of an open descriptor.
        let at = unsafe { libc::lseek(std::os::fd::AsRawFd::as_raw_fd(&file), 0, libc::SEEK_END) };
        (at >= 0).then_some(KernelLog { file })
    }

    /// The lines that came since the last call.
    pub fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut record = [0u8; 8192];
        loop {
            match self.file.read(&mut record) {
                Ok(0) => return lines,
                Ok(n) => {
                    let text = String::from_utf8_lossy(&record[..n]);
                    // "priority,sequence,time,flags;text", then lines of key=value.
                    let text = text.split_once(';').map_or("", |(_, text)| text);
                    lines.push(text.lines().next().unwrap_or("").to_owned());
                }
                // Records that were overwritten before we came: the next read goes on behind them.
                Err(e) if e.raw_os_error() == Some(libc::EPIPE) => continue,
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                Err(_) => return lines,
            }
        }
    }

    /// The lines since the last call that tell of a fault of the kernel.
    pub fn faults(&mut self) -> Vec<String> {
        const FAULTS: [&str; 18] = [
            "WARNING: ",
            "BUG: ",
            "Oops",
            "KASAN",
            "UBSAN",
            "KCSAN",
            "refcount_t: ",
            "scheduling while atomic",
            "sleeping function called",
            "possible circular locking",
            "possible recursive locking",
            "possible irq lock inversion",
            "inconsistent lock state",
            "suspicious RCU usage",
            // It also tells which of its own allocations failed, as those of a test do.
            "new suspected memory leaks",
            "general protection fault",
            "unable to handle",
            "Kernel panic",
        ];
        let mut lines = self.lines();
        lines.retain(|line| FAULTS.iter().any(|fault| line.contains(fault)));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn bits_go_where_the_format_says() {
        assert_eq!(place("config:13", 1), Some(1 << 13));
        assert_eq!(place("config:24-27", 5), Some(5 << 24));
        assert_eq!(place("config:0-1,8", 0b110), Some((1 << 8) | 0b10));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(place("config:13", 2), None);
        assert_eq!(place("config1:0", 1), None);
        assert_eq!(place("config:9-3", 1), None);
        assert_eq!(place("config:64", 1), None);
    }
}
