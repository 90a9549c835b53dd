// SPDX-License-Identifier: GPL-2.0

//! Opening events and steering them.

use crate::abi;
use crate::error::{
    Error,
    Result, //
};
use crate::record::Format;
use perf_event_open_sys as sys;
use std::mem;
use std::os::fd::{
    AsRawFd,
    FromRawFd,
    OwnedFd,
    RawFd, //
};

/// A `perf_event_attr` and the other arguments of `perf_event_open()`, filled in call by call.
///
/// A new one asks for the calling thread on any CPU, without a group, with the descriptor closed on
/// exec.
#[derive(Clone)]
pub struct Attr {
    attr: abi::perf_event_attr,
    pid: libc::pid_t,
    cpu: libc::c_int,
    group: RawFd,
    flags: libc::c_ulong,
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        $($(#[$doc])*
        pub fn $name(mut self, value: $type) -> Self {
            self.attr.$name = value;
            self
        })*
    };
}

macro_rules! bits {
    ($($(#[$doc:meta])* $name:ident => $set:ident;)*) => {
        $($(#[$doc])*
        pub fn $name(mut self) -> Self {
            self.attr.$set(1);
            self
        })*
    };
}

impl Attr {
    /// An event of the PMU with this type number.
    pub fn new(pmu_type: u32, config: u64) -> Self {
        let attr = abi::perf_event_attr {
            type_: pmu_type,
            size: mem::size_of::<abi::perf_event_attr>() as u32,
            config,
            ..Default::default()
        };
        Attr {
            attr,
            pid: 0,
            cpu: -1,
            group: -1,
            flags: libc::c_ulong::from(abi::PERF_FLAG_FD_CLOEXEC),
        }
    }

    /// A software event, by its `PERF_COUNT_SW_*` number.
    pub fn software(config: u32) -> Self {
        Self::new(abi::PERF_TYPE_SOFTWARE, u64::from(config))
    }

    /// The clock of the CPU, overflowing every `period_ns` nanoseconds that the event is scheduled.
    pub fn cpu_clock(period_ns: u64) -> Self {
        Self::software(abi::PERF_COUNT_SW_CPU_CLOCK).sample_period(period_ns)
    }

    /// The clock of the task, overflowing every `period_ns` nanoseconds that the task runs.
    pub fn task_clock(period_ns: u64) -> Self {
        Self::software(abi::PERF_COUNT_SW_TASK_CLOCK).sample_period(period_ns)
    }

    /// An execution breakpoint, overflowing each `period` times that the instruction at `address`
    /// is about to run.
    pub fn exec_breakpoint(address: u64, period: u64) -> Self {
        const HW_BREAKPOINT_X: u32 = 4;
        Self::breakpoint(HW_BREAKPOINT_X, address, period)
    }

    /// A data breakpoint, overflowing each `period` times that the word at `address` was written,
    /// or with `reads`, read or written.
    pub fn data_breakpoint(address: u64, reads: bool, period: u64) -> Self {
        const HW_BREAKPOINT_W: u32 = 2;
        const HW_BREAKPOINT_RW: u32 = 3;
        let kind = if reads {
            HW_BREAKPOINT_RW
        } else {
            HW_BREAKPOINT_W
        };
        Self::breakpoint(kind, address, period)
    }

    fn breakpoint(kind: u32, address: u64, period: u64) -> Self {
        let mut event = Self::new(abi::PERF_TYPE_BREAKPOINT, 0).sample_period(period);
        event.attr.bp_type = kind;
        event.attr.bp_addr = address;
        event.attr.bp_len = mem::size_of::<libc::c_long>() as u64;
        event
    }

    fields! {
        /// Units of the event from one overflow to the next.
        sample_period: u64;
        /// What each sample holds: `PERF_SAMPLE_*` bits.
        sample_type: u64;
        /// What `read(2)` and `PERF_SAMPLE_READ` hold: `PERF_FORMAT_*` bits.
        read_format: u64;
        /// Samples from one wake-up of a poller to the next.
        wakeup_events: u32;
        /// Latest bytes of the leader's AUX area to be put into each sample.
        aux_sample_size: u32;
        /// Bytes of AUX data from one wake-up to the next.
        aux_watermark: u32;
        /// Which user registers a sample holds.
        sample_regs_user: u64;
        /// Which registers at the sample's own place a sample holds.
        sample_regs_intr: u64;
        /// Bytes of the user stack to be dumped into each sample.
        sample_stack_user: u32;
        /// Most call chain entries of a sample.
        sample_max_stack: u16;
    }

    bits! {
        /// Opens the event switched off.
        disabled => set_disabled;
        /// Counts children of the task, too.
        inherit => set_inherit;
        /// Asks for the event to be always on the PMU.
        pinned => set_pinned;
        /// Leaves user mode out.
        exclude_user => set_exclude_user;
        /// Leaves kernel mode out.
        exclude_kernel => set_exclude_kernel;
        /// Leaves the hypervisor out.
        exclude_hv => set_exclude_hv;
        /// Switches the event on at the next `exec` of the task.
        enable_on_exec => set_enable_on_exec;
        /// Appends identity fields to every record that is not a sample.
        sample_id_all => set_sample_id_all;
        /// Asks for `PERF_RECORD_MMAP2`.
        mmap2 => set_mmap2;
        /// Asks for `PERF_RECORD_COMM`.
        comm => set_comm;
        /// Asks for `PERF_RECORD_FORK` and `PERF_RECORD_EXIT`.
        task => set_task;
        /// Asks for `PERF_RECORD_SWITCH`.
        context_switch => set_context_switch;
        /// Asks for the event's own data to go into the leader's AUX area.
        aux_output => set_aux_output;
    }

    /// Stops the leader's AUX data at each overflow of this event.
    pub fn aux_pause(self) -> Self {
        self.aux_action(1 << 1)
    }

    /// Continues the leader's AUX data at each overflow of this event.
    pub fn aux_resume(self) -> Self {
        self.aux_action(1 << 2)
    }

    /// Starts with the AUX data held back until an event with [`aux_resume`](Self::aux_resume)
    /// overflows.
    pub fn aux_start_paused(self) -> Self {
        self.aux_action(1 << 0)
    }

    fn aux_action(mut self, bit: u32) -> Self {
        self.attr.aux_action |= bit;
        self
    }

    /// User mode only, which an unprivileged caller needs.
    pub fn user_only(self) -> Self {
        self.exclude_kernel().exclude_hv()
    }

    /// Watches this process; 0 is the calling thread, -1 every process (with [`cpu`](Self::cpu)).
    pub fn pid(mut self, pid: libc::pid_t) -> Self {
        self.pid = pid;
        self
    }

    /// Watches on this CPU only; -1 is any CPU.
    pub fn cpu(mut self, cpu: i32) -> Self {
        self.cpu = cpu;
        self
    }

    /// Joins the group of this leader.
    pub fn group(mut self, leader: &Event) -> Self {
        self.group = leader.fd();
        self
    }

    /// `PERF_FLAG_*` bits in place of the default `PERF_FLAG_FD_CLOEXEC`.
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = libc::c_ulong::from(flags);
        self
    }

    /// The attribute itself, for what has no method here.
    pub fn with(mut self, change: impl FnOnce(&mut abi::perf_event_attr)) -> Self {
        change(&mut self.attr);
        self
    }

    /// The attribute as it stands.
    pub fn raw(&self) -> &abi::perf_event_attr {
        &self.attr
    }

    /// The errno with which opening the event fails; `None` if it succeeds.
    pub fn refusal(&self) -> Option<i32> {
        self.open().err().and_then(|error| error.errno())
    }

    /// Calls `perf_event_open()`.
    pub fn open(&self) -> Result<Event> {
        // The kernel reads `attr.size` bytes and never more than a page, and a test may have set
        // any size.
        #[repr(C, align(8))]
        struct Page([u8; 4096]);
        let mut page = Page([0; 4096]);
        // SAFETY: an attribute is plain data, smaller than the page, and the page is aligned for
        // it.
        let fd = unsafe {
            let attr: *mut abi::perf_event_attr = page.0.as_mut_ptr().cast();
            attr.write(self.attr);
            sys::perf_event_open(attr, self.pid, self.cpu, self.group, self.flags)
        };
        if fd < 0 {
            return Err(Error::last_os(self.to_string()));
        }
        // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Event {
            fd,
            attr: self.attr,
        })
    }
}

impl std::fmt::Display for Attr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let a = &self.attr;
        write!(
            f,
            "perf_event_open(type {}, config {:#x}, period {}, sample_type {:#x}, aux_sample_size {}, pid {}, cpu {}, group {})",
            a.type_,
            a.config,
            a.sample_period,
            a.sample_type,
            a.aux_sample_size,
            self.pid,
            self.cpu,
            self.group
        )
    }
}

/// An open event. Closing happens on drop; mappings of it live on their own.
pub struct Event {
    fd: OwnedFd,
    attr: abi::perf_event_attr,
}

impl Event {
    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// The attribute it was opened with.
    pub fn attr(&self) -> &abi::perf_event_attr {
        &self.attr
    }

    /// How this event's records are laid out.
    pub fn format(&self) -> Format {
        Format::of(&self.attr)
    }

    /// Sets the sampling period, from the next one on.
    pub fn set_period(&self, mut period: u64) -> Result<()> {
        // `_IOW('$', 4, __u64)`, which the bindings lack.
        const PERIOD: libc::c_ulong = 0x4008_2404;
        // SAFETY: the request reads one number, which is live.
        let ret = unsafe { libc::ioctl(self.fd(), PERIOD as _, &raw mut period) };
        if ret < 0 {
            return Err(Error::last_os(format!(
                "ioctl(fd {}, PERF_EVENT_IOC_PERIOD, {period})",
                self.fd()
            )));
        }
        Ok(())
    }

    fn ioctl(&self, name: &str, request: u32, arg: libc::c_ulong) -> Result<()> {
        // SAFETY: the requests made through here take a plain number, not a pointer.
        let ret = unsafe { libc::ioctl(self.fd(), libc::c_ulong::from(request) as _, arg) };
        if ret < 0 {
            return Err(Error::last_os(format!(
                "ioctl(fd {}, {name}, {arg})",
                self.fd()
            )));
        }
        Ok(())
    }

    /// Switches the event on. On a leader, its members follow by being schedulable again.
    pub fn enable(&self) -> Result<()> {
        self.ioctl("PERF_EVENT_IOC_ENABLE", abi::ENABLE, 0)
    }

    /// Switches the event off.
    pub fn disable(&self) -> Result<()> {
        self.ioctl("PERF_EVENT_IOC_DISABLE", abi::DISABLE, 0)
    }

    /// Switches every event of the group on.
    pub fn enable_group(&self) -> Result<()> {
        self.ioctl(
            "PERF_EVENT_IOC_ENABLE",
            abi::ENABLE,
            abi::PERF_IOC_FLAG_GROUP.into(),
        )
    }

    /// Switches every event of the group off.
    pub fn disable_group(&self) -> Result<()> {
        self.ioctl(
            "PERF_EVENT_IOC_DISABLE",
            abi::DISABLE,
            abi::PERF_IOC_FLAG_GROUP.into(),
        )
    }

    /// Sets the count to zero.
    pub fn reset(&self) -> Result<()> {
        self.ioctl("PERF_EVENT_IOC_RESET", abi::RESET, 0)
    }

    /// Allows `overflows` more overflows and switches the event on; the last one switches it off
    /// again.
    pub fn refresh(&self, overflows: u32) -> Result<()> {
        self.ioctl("PERF_EVENT_IOC_REFRESH", abi::REFRESH, overflows.into())
    }

    /// Sends this event's records into the ring of `target`.
    pub fn set_output(&self, target: &Event) -> Result<()> {
        self.ioctl(
            "PERF_EVENT_IOC_SET_OUTPUT",
            abi::SET_OUTPUT,
            target.fd() as libc::c_ulong,
        )
    }

    /// Holds back (or lets go on) the output into this event's ring.
    pub fn pause_output(&self, pause: bool) -> Result<()> {
        self.ioctl(
            "PERF_EVENT_IOC_PAUSE_OUTPUT",
            abi::PAUSE_OUTPUT,
            pause.into(),
        )
    }

    /// Sets an address or tracepoint filter.
    pub fn set_filter(&self, filter: &str) -> Result<()> {
        let text = std::ffi::CString::new(filter)
            .map_err(|_| Error::new(format!("filter {filter:?} holds a NUL byte")))?;
        // SAFETY: the request takes a NUL-terminated string, which outlives the call.
        let ret = unsafe { sys::ioctls::SET_FILTER(self.fd(), text.as_ptr().cast_mut()) };
        if ret < 0 {
            return Err(Error::last_os(format!(
                "ioctl(fd {}, PERF_EVENT_IOC_SET_FILTER, {filter:?})",
                self.fd()
            )));
        }
        Ok(())
    }

    /// The event's id, as records carry it.
    pub fn id(&self) -> Result<u64> {
        let mut id = 0u64;
        // SAFETY: the request writes one u64, and `id` is one.
        let ret = unsafe { sys::ioctls::ID(self.fd(), &mut id) };
        if ret < 0 {
            return Err(Error::last_os(format!(
                "ioctl(fd {}, PERF_EVENT_IOC_ID)",
                self.fd()
            )));
        }
        Ok(id)
    }

    /// What `read(2)` gives, as 64-bit words.
    pub fn read(&self) -> Result<Vec<u64>> {
        let mut words = [0u64; 64];
        // SAFETY: the buffer is live and its length in bytes is passed along.
        let got = unsafe {
            libc::read(
                self.fd(),
                words.as_mut_ptr().cast(),
                mem::size_of_val(&words),
            )
        };
        if got < 0 {
            return Err(Error::last_os(format!("read of event fd {}", self.fd())));
        }
        Ok(words[..got as usize / 8].to_vec())
    }

    /// The count: the first word of [`read`](Self::read), or the second of a group's.
    pub fn count(&self) -> Result<u64> {
        let words = self.read()?;
        let group = self.attr.read_format & u64::from(abi::PERF_FORMAT_GROUP) != 0;
        if group {
            // A group's counts follow the number of events and the two optional times.
            let times = u64::from(
                abi::PERF_FORMAT_TOTAL_TIME_ENABLED | abi::PERF_FORMAT_TOTAL_TIME_RUNNING,
            );
            let at = 1 + (self.attr.read_format & times).count_ones() as usize;
            return words.get(at).copied().ok_or_else(|| {
                Error::new(format!(
                    "read of event fd {}: {} words, expected more",
                    self.fd(),
                    words.len()
                ))
            });
        }
        words.first().copied().ok_or_else(|| {
            Error::new(format!(
                "read of event fd {}: end of file (the event is in error state)",
                self.fd()
            ))
        })
    }
}
