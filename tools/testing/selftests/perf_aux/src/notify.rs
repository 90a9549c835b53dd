// SPDX-License-Identifier: GPL-2.0

//! Overflow notification: `poll(2)` and signals.
//!
//! | | with a ring buffer | without one |
//! |---|---|---|
//! | signal | one per overflow | one per overflow |
//! | `poll(2)` | `POLLIN` once per wake-up | `POLLHUP` at once, each time |
//!
//! So a loop around `poll()` on an event that was never mapped burns the CPU. [`wait`] therefore
//! makes an error of `POLLHUP`; [`poll`] is the bare call.

use crate::error::{
    Error,
    Result, //
};
use crate::event::Event;
use std::time::{
    Duration,
    Instant, //
};

/// What a wait ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// The ring has something new to tell.
    Ready,
    /// Nothing came in time.
    Timeout,
}

/// `poll(2)` for `POLLIN`: the returned events, 0 after the time-out. Interruptions by signals are
/// waited out.
pub fn poll(event: &Event, timeout: Duration) -> Result<i16> {
    let end = Instant::now() + timeout;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut fd = libc::pollfd {
            fd: event.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // Rounded up, so that the last wait is not a row of zero waits.
        let milliseconds = left.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
        // SAFETY: one live pollfd.
        match unsafe { libc::poll(&mut fd, 1, milliseconds) } {
            -1 => {
                let error = Error::last_os(format!("poll of event fd {}", event.fd()));
                if error.errno() != Some(libc::EINTR) {
                    return Err(error);
                }
            }
            0 if !left.is_zero() => continue,
            _ => return Ok(fd.revents),
        }
    }
}

/// Waits for the event's ring buffer to have something new.
///
/// `POLLHUP` and `POLLERR` come back at once however often one asks, so they are errors here.
pub fn wait(event: &Event, timeout: Duration) -> Result<Wake> {
    let revents = poll(event, timeout)?;
    if revents & libc::POLLERR != 0 {
        return Err(Error::new(format!(
            "poll of event fd {}: POLLERR: the event can't be scheduled any more",
            event.fd()
        )));
    }
    if revents & libc::POLLHUP != 0 {
        return Err(Error::new(format!(
            "poll of event fd {}: POLLHUP: either the event has no ring buffer (map one first, or be notified by a \
             signal) or its task has ended; poll would return at once for ever",
            event.fd()
        )));
    }
    if revents == 0 {
        return Ok(Wake::Timeout);
    }
    Ok(Wake::Ready)
}

/// One notification by signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// `si_code`: `POLL_IN`, or `POLL_HUP` for the last one that `PERF_EVENT_IOC_REFRESH` allowed.
    pub code: i32,
    /// `si_fd`.
    pub fd: i32,
}

/// `POLL_IN` of `<asm-generic/siginfo.h>`, which the `libc` crate leaves out.
pub const POLL_IN: i32 = 1;
/// `POLL_HUP` of `<asm-generic/siginfo.h>`.
pub const POLL_HUP: i32 = 6;

/// Overflows of events as a queue of signals, for the calling thread.
///
/// The signal is a real-time one, so that each overflow is queued, and it stays blocked: it is
/// fetched by [`next`](Self::next).
pub struct Signal {
    signal: i32,
    set: libc::sigset_t,
}

impl Signal {
    /// Blocks real-time signal `SIGRTMIN + index` and makes ready to receive it.
    pub fn new(index: i32) -> Result<Self> {
        let signal = libc::SIGRTMIN() + index;
        // SAFETY: a signal set is plain data, which `sigemptyset` makes valid.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is live, and the old mask is not asked for.
        let ret = unsafe {
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, signal);
            libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut())
        };
        if ret < 0 {
            return Err(Error::last_os(format!("blocking signal {signal}")));
        }
        Ok(Signal { signal, set })
    }

    /// Makes overflows of `event` signal the calling thread: `F_SETOWN_EX`, `F_SETSIG`, `O_ASYNC`.
    pub fn attach(&self, event: &Event) -> Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETSIG: libc::c_int = 10;
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_TID: libc::c_int = 0;
        let fd = event.fd();
        // SAFETY: no preconditions.
        let tid = unsafe { libc::gettid() };
        let owner = Owner {
            kind: F_OWNER_TID,
            pid: tid,
        };
        // SAFETY: each command gets the argument it documents, and `owner` outlives its call.
        unsafe {
            if libc::fcntl(fd, F_SETOWN_EX, &owner) < 0 {
                return Err(Error::last_os(format!(
                    "fcntl(fd {fd}, F_SETOWN_EX, {tid})"
                )));
            }
            if libc::fcntl(fd, F_SETSIG, self.signal) < 0 {
                return Err(Error::last_os(format!(
                    "fcntl(fd {fd}, F_SETSIG, {})",
                    self.signal
                )));
            }
            let flags = libc::fcntl(fd, libc::F_GETFL);
            if flags < 0 || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) < 0 {
                return Err(Error::last_os(format!("fcntl(fd {fd}, F_SETFL, O_ASYNC)")));
            }
        }
        Ok(())
    }

    /// The next notification, `None` if none came in time.
    pub fn next(&self, timeout: Duration) -> Result<Option<Overflow>> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let time = libc::timespec {
                tv_sec: left.as_secs() as libc::time_t,
                tv_nsec: left.subsec_nanos() as libc::c_long,
            };
            // SAFETY: a siginfo is plain data.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: all three are live for the call.
            let got = unsafe { libc::sigtimedwait(&self.set, &mut info, &time) };
            if got == self.signal {
                // `si_band` and `si_fd` follow the three leading ints, aligned as a long is.
                #[repr(C)]
                struct Poll {
                    _head: [libc::c_int; 3],
                    _band: libc::c_long,
                    fd: libc::c_int,
                }
                const _: () = assert!(size_of::<Poll>() <= size_of::<libc::siginfo_t>());
                // SAFETY: the signal is raised only by `O_ASYNC` descriptors, for which the kernel
                // fills this part of the union; as plain ints any bytes would do.
                let fd = unsafe { (*std::ptr::addr_of!(info).cast::<Poll>()).fd };
                return Ok(Some(Overflow {
                    code: info.si_code,
                    fd,
                }));
            }
            let error = Error::last_os(format!("waiting for signal {}", self.signal));
            match error.errno() {
                Some(libc::EAGAIN) => return Ok(None),
                Some(libc::EINTR) => continue,
                _ => return Err(error),
            }
        }
    }

    /// The `si_code` of every notification until none comes for `quiet`, at most `most` of them.
    pub fn codes(&self, most: usize, quiet: Duration) -> Result<Vec<i32>> {
        let mut codes = Vec::new();
        while codes.len() < most {
            match self.next(quiet)? {
                Some(overflow) => codes.push(overflow.code),
                None => break,
            }
        }
        Ok(codes)
    }
}
