// SPDX-License-Identifier: GPL-2.0

//! Processes to be observed, and work for them to do.

use crate::error::{
    Error,
    Result, //
};
use crate::ring::page_size;
use std::hint::black_box;
use std::os::fd::{
    AsRawFd,
    FromRawFd,
    OwnedFd, //
};
use std::time::{
    Duration,
    Instant, //
};

/// A forked child, killed and waited for on drop. It starts its work when told to.
pub struct Child {
    pid: libc::pid_t,
    gate: Option<OwnedFd>,
    reaped: bool,
}

impl Child {
    /// Forks a child that runs `work` after [`go`](Self::go) and exits with its result.
    ///
    /// The child has only the calling thread. It dies with this process.
    pub fn new(work: impl FnOnce() -> u8) -> Result<Self> {
        let (wait, gate) = pipe()?;
        // SAFETY: this crate's processes have one thread, so the child may do anything the parent
        // may.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(Error::last_os("fork of a child to be observed")),
            0 => {
                drop(gate);
                // SAFETY: no preconditions.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                let status = match read_byte(&wait) {
                    true => work(),
                    false => 0,
                };
                // SAFETY: ends this process without running what the parent registered for its own
                // exit.
                unsafe { libc::_exit(status.into()) }
            }
            _ => Ok(Child {
                pid,
                gate: Some(gate),
                reaped: false,
            }),
        }
    }

    /// A child that spins in user mode for ever, on one CPU if given.
    pub fn spinning(cpu: Option<usize>) -> Result<Self> {
        Self::new(move || {
            if cpu.is_some_and(|cpu| pin(cpu).is_err()) {
                return 1;
            }
            loop {
                spin(1 << 20);
            }
        })
    }

    /// Its process id.
    pub fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Lets it start.
    pub fn go(&mut self) -> Result<()> {
        let Some(gate) = self.gate.take() else {
            return Ok(());
        };
        // SAFETY: one byte of live memory.
        if unsafe { libc::write(gate.as_raw_fd(), [1u8].as_ptr().cast(), 1) } != 1 {
            return Err(Error::last_os(format!("starting child {}", self.pid)));
        }
        Ok(())
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) -> Result<()> {
        // SAFETY: the child is not reaped before `self` is gone or waited for, so the id is its
        // own.
        if unsafe { libc::kill(self.pid, signal) } < 0 {
            return Err(Error::last_os(format!("kill({}, {signal})", self.pid)));
        }
        Ok(())
    }

    /// Waits for its end: the exit status, or the signal that ended it as an error.
    pub fn wait(mut self) -> Result<u8> {
        self.go()?;
        let status = self.reap()?;
        if libc::WIFSIGNALED(status) {
            return Err(Error::new(format!(
                "child {} was ended by signal {}",
                self.pid,
                libc::WTERMSIG(status)
            )));
        }
        Ok(libc::WEXITSTATUS(status) as u8)
    }

    /// Fails if it has ended, which no signal tells: a zombie takes them too. It is not reaped.
    pub fn check_alive(&self) -> Result<()> {
        // SAFETY: plain data, for which zeros are a value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: `info` is live; the child is ours and not yet waited for.
        if unsafe { libc::waitid(libc::P_PID, self.pid as _, &mut info, options) } < 0 {
            return Err(Error::last_os(format!("waitid({})", self.pid)));
        }
        // SAFETY: of a child that lives the call leaves zeros, and of another it tells the end.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        if pid == 0 {
            return Ok(());
        }
        Err(Error::new(if info.si_code == libc::CLD_EXITED {
            format!("child {pid} exited with {status}")
        } else {
            format!("child {pid} was ended by signal {status}")
        }))
    }

    fn reap(&mut self) -> Result<i32> {
        let mut status = 0;
        loop {
            // SAFETY: `status` is live; the child is ours and not yet waited for.
            if unsafe { libc::waitpid(self.pid, &mut status, 0) } == self.pid {
                self.reaped = true;
                return Ok(status);
            }
            let error = Error::last_os(format!("waitpid({})", self.pid));
            if error.errno() != Some(libc::EINTR) {
                return Err(error);
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = self.signal(libc::SIGKILL);
            let _ = self.reap();
        }
    }
}

/// A close-on-exec pipe: reading end, writing end.
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: the array holds two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
        return Err(Error::last_os("pipe2"));
    }
    // SAFETY: both were just made and have no other owner.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

fn read_byte(fd: &OwnedFd) -> bool {
    let mut byte = 0u8;
    // SAFETY: one byte of live memory.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 }
}

/// Keeps the calling thread on one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    // SAFETY: a CPU set is plain data, and `CPU_SET` stays inside it for any CPU it has a bit for.
    let ret = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(Error::new(format!("no such CPU: {cpu}")));
        }
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if ret < 0 {
        return Err(Error::last_os(format!("sched_setaffinity to CPU {cpu}")));
    }
    Ok(())
}

/// The CPUs that the calling thread may run on.
pub fn cpus() -> Result<Vec<usize>> {
    // SAFETY: a CPU set is plain data.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is live and of the given size.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } < 0 {
        return Err(Error::last_os("sched_getaffinity"));
    }
    // SAFETY: only CPUs that the set has a bit for are asked about.
    Ok((0..libc::CPU_SETSIZE as usize)
        .filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) })
        .collect())
}

/// Runs a loop of this many rounds in user mode, two branches a round.
#[inline(never)]
pub fn spin(rounds: u64) -> u64 {
    let mut x = black_box(0x9e37_79b9_7f4a_7c15u64);
    for _ in 0..rounds {
        if black_box(x) & 1 == 0 {
            x >>= 1;
        } else {
            x = x.wrapping_mul(3).wrapping_add(1) | (1 << 63);
        }
    }
    black_box(x)
}

/// Spins in user mode until `done` says so or the time is over; whether it was `done`.
pub fn spin_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        spin(1 << 10);
    }
}

/// Spins in user mode for a while.
pub fn spin_for(time: Duration) {
    spin_until(time, || false);
}

/// CPU time that the calling thread has used.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The time stamp counter, or where there is none the time in nanoseconds.
#[inline]
pub fn timestamp() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction exists on every x86-64 CPU.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `time` is live.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
}

/// One page of a file in memory that faults each time in the same way.
pub struct FaultingPage(*mut u8);

impl FaultingPage {
    /// Maps it.
    pub fn new() -> Result<Self> {
        // SAFETY: the name is a C string; the new mapping touches no existing memory.
        let base = unsafe {
            let fd = libc::memfd_create(c"faulting_page".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 || libc::ftruncate(fd, page_size() as libc::off_t) < 0 {
                return Err(Error::last_os("memfd of one page"));
            }
            let base = libc::mmap(
                std::ptr::null_mut(),
                page_size(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            );
            libc::close(fd);
            base
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os("mmap of a memfd"));
        }
        Ok(FaultingPage(base.cast()))
    }

    fn forget(&self) {
        // SAFETY: our own shared mapping; its contents stay in the file.
        unsafe { libc::madvise(self.0.cast(), page_size(), libc::MADV_DONTNEED) };
    }

    /// Makes a fault.
    pub fn fault(&self) {
        self.forget();
        // SAFETY: inside the mapping.
        unsafe { self.0.read_volatile() };
    }

    /// Makes a fault, and returns how long it took in units of [`timestamp`].
    pub fn touch(&self) -> u64 {
        self.forget();
        let start = timestamp();
        // SAFETY: inside the mapping.
        unsafe { self.0.read_volatile() };
        timestamp().wrapping_sub(start)
    }
}

impl Drop for FaultingPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody else has its address.
        unsafe { libc::munmap(self.0.cast(), page_size()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zombie_is_not_alive() {
        let mut child = Child::new(|| 3).unwrap();
        child.check_alive().unwrap();
        child.go().unwrap();
        assert!(spin_until(Duration::from_secs(10), || {
            child.check_alive().is_err()
        }));
        assert_eq!(child.wait().unwrap(), 3);
    }
}
