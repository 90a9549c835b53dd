// SPDX-License-Identifier: GPL-2.0

//! The registers of a task, and whose trap flag is in them.

use super::{
    super::bindings,
    decode,
    frame::{
        Frame,
        TF, //
    },
    Insn,
    Kind,
    Mode,
    Shared, //
};
use crate::{
    error::to_result,
    nmi::{
        irqs_off,
        NmiLike, //
    },
    page::PAGE_SIZE,
    prelude::*, //
};

/// How many writes to the stack segment in a row are looked at. Nobody has a use for two.
pub(super) const MAX_LOADS: usize = 64;

/// What a page of `uprobe_trampoline_entry` begins with: `push %rcx; push %r11; push %rax;
/// mov $__NR_uprobe, %rax; syscall; pop %rax`.
const TRAMPOLINE: [u64; 2] = [
    u64::from_le_bytes([0x51, 0x41, 0x53, 0x50, 0x48, 0xc7, 0xc0, 0x50]),
    u64::from_le_bytes([0x01, 0x00, 0x00, 0x0f, 0x05, 0x58, 0x41, 0x5b]),
];

/// `lea -0x80(%rsp), %rsp`, with which a probe that became a call steps over the red zone.
const PROBE_LEA: u64 = u64::from_le_bytes([0x48, 0x8d, 0x64, 0x24, 0x80, 0, 0, 0]);
const PROBE_LEA_LEN: u64 = 5;

/// A task whose user-mode registers nobody else touches: the one that runs, one that is being
/// switched out on this CPU, or one that has not run yet.
///
/// # Invariants
///
/// `task` is valid, and its user-mode registers are this code's to change.
pub(super) struct Task {
    task: *mut bindings::task_struct,
    regs: *mut bindings::pt_regs,
}

impl Task {
    /// The task that runs.
    #[inline]
    pub(super) fn current() -> Self {
        // SAFETY: There always is one. All uses are inside of interrupts-off code on its CPU.
        // INVARIANT: Its saved registers change only by its own doing.
        unsafe { Self::new(bindings::get_current()) }
    }

    /// # Safety
    ///
    /// The type invariants must hold for `task` for as long as the value is used.
    #[inline]
    unsafe fn new(task: *mut bindings::task_struct) -> Self {
        Self {
            task,
            // SAFETY: Every task has a stack, and `task` is valid.
            regs: unsafe { bindings::task_pt_regs(task) },
        }
    }

    #[inline]
    pub(super) fn as_ptr(&self) -> *mut bindings::task_struct {
        self.task
    }

    /// Whether the task ever goes to user mode.
    #[inline]
    pub(super) fn is_user(&self) -> bool {
        // SAFETY: The task is valid by the type invariants.
        let (mm, flags) = unsafe { ((*self.task).mm, (*self.task).flags) };
        !mm.is_null() && flags & (bindings::PF_KTHREAD | bindings::PF_USER_WORKER) == 0
    }

    #[inline]
    fn regs(&self) -> &bindings::pt_regs {
        // SAFETY: By the type invariants.
        unsafe { &*self.regs }
    }

    #[inline]
    fn set_flags(&self, flags: usize) {
        // SAFETY: By the type invariants.
        unsafe { (*self.regs).flags = flags };
    }

    #[inline]
    fn set_r11(&self, r11: usize) {
        // SAFETY: By the type invariants.
        unsafe { (*self.regs).r11 = r11 };
    }

    #[inline]
    fn thread_flags(&self) -> usize {
        // SAFETY: The task is valid by the type invariants; others change the flags at any time.
        unsafe { (&raw const (*self.task).thread_info.flags).read_volatile() }
    }

    /// Where the task goes on in user mode.
    #[inline]
    pub(super) fn ip(&self) -> u64 {
        self.regs().ip as u64
    }

    /// How the code is encoded where the task goes on. [`None`] if its segment or that of its stack
    /// may have a base or be one of 16 bits: then an address in it tells nothing, and the task is
    /// not to be stepped. What there is to know of segments can't be asked in an exception.
    #[inline]
    pub(super) fn mode(&self) -> Option<Mode> {
        // SAFETY: The registers are valid by the type invariants.
        match unsafe { bindings::user_code_bits(self.regs) } {
            64 => Some(Mode::Bits64),
            32 => Some(Mode::Bits32),
            _ => None,
        }
    }

    /// What tells how the task came into the kernel, and how it goes back.
    #[inline(never)]
    pub(super) fn frame(&self) -> Frame {
        let regs = self.regs();
        // SAFETY: The registers are valid by the type invariants. The slot is null or in them.
        let fred = unsafe { bindings::fred_ss(self.regs).as_ref() }.copied();
        Frame {
            fred,
            orig_ax: regs.orig_ax,
            ip: regs.ip,
            flags: regs.flags,
            cx: regs.cx,
            r11: regs.r11,
        }
    }

    /// Whether an instruction of that kind, to be executed next, asks for the return from a signal
    /// handler.
    #[inline]
    pub(super) fn at_sigreturn(&self, kind: Kind) -> bool {
        const RT_SIGRETURN: usize = 15;
        const X32_RT_SIGRETURN: usize = 0x4000_0000 + 513;
        const IA32_SIGRETURN: usize = 119;
        const IA32_RT_SIGRETURN: usize = 173;

        match kind {
            Kind::Syscall => matches!(self.regs().ax, RT_SIGRETURN | X32_RT_SIGRETURN),
            Kind::Interrupt => matches!(self.regs().ax, IA32_SIGRETURN | IA32_RT_SIGRETURN),
            _ => false,
        }
    }

    /// Whether TF, if it is set, was set by the stepper.
    #[inline]
    pub(super) fn trap_flag_is_ours(&self) -> bool {
        // As `task_has_stepper_tf()`, but once per step, so without a call.
        self.thread_flags() & bindings::STEPPER_TF_MASK as usize == bindings::STEPPER_TF as usize
    }

    /// Sets TF, unless it is set already.
    #[inline]
    pub(super) fn set_trap_flag(&self) {
        let flags = self.regs().flags;
        if flags & TF == 0 {
            self.set_flags(flags | TF);
            // SAFETY: The task is valid by the type invariants.
            unsafe {
                bindings::set_tsk_thread_flag(self.task, bindings::TIF_FORCED_TF as c_int);
            }
        }
    }

    /// Sees to it that the trap comes behind an instruction, not ahead of it.
    ///
    /// With FRED, the way back from what software asked for (a system call, `int n`, `execve(2)`,
    /// a return from a signal handler) traps at once if TF is set. A program's own TF and a
    /// debugger's are left to do that.
    #[inline]
    pub(super) fn trap_behind_first(&self) {
        if self.trap_flag_is_ours() {
            // SAFETY: The registers are valid by the type invariants, and this code's to change.
            // The slot is null or in them.
            if let Some(ss) = unsafe { bindings::fred_ss(self.regs).as_mut() } {
                ss.set_swevent(0);
            }
        }
    }

    /// Says that TF, set or not, is the program's.
    #[inline]
    pub(super) fn keep_trap_flag(&self) {
        // SAFETY: The task is valid by the type invariants.
        unsafe { bindings::clear_tsk_thread_flag(self.task, bindings::TIF_FORCED_TF as c_int) };
    }

    /// Clears a TF that is the stepper's, also where `syscall` copied it to.
    #[inline(never)]
    pub(super) fn clear_trap_flag(&self) {
        if self.trap_flag_is_ours() {
            self.mend_r11();
            self.set_flags(self.regs().flags & !TF);
            self.keep_trap_flag();
        }
    }

    /// Clears a TF of the stepper that `syscall` copied to `r11`.
    #[inline]
    pub(super) fn mend_r11(&self) {
        let regs = self.regs();
        if self.trap_flag_is_ours() && self.frame().r11_is_copy_of(regs.flags) {
            self.set_r11(regs.r11 & !TF);
        }
    }

    /// Clears the TF that `pushf` has just copied to the stack.
    #[inline(never)]
    pub(super) fn mend_pushed_flags(&self) {
        // The second byte of the image holds TF, whatever the size of the image.
        let at = self.regs().sp.wrapping_add(1);
        let mut byte = [0u8; 1];
        // SAFETY: `byte` is one byte long; the functions check the user address and take no fault.
        // That the instruction wrote the page a moment ago makes it almost certain that it is
        // there.
        unsafe {
            if bindings::copy_from_user_nofault(byte.as_mut_ptr().cast(), at as *const c_void, 1)
                == 0
            {
                byte[0] &= !((TF >> 8) as u8);
                bindings::copy_to_user_nofault(at as *mut c_void, byte.as_ptr().cast(), 1);
            }
        }
    }

    /// Whether a single-step trap came and was not handled by anybody yet.
    #[inline]
    pub(super) fn trap_pending(&self) -> bool {
        // SAFETY: The task is valid by the type invariants.
        let dr6 = unsafe { (*self.task).thread.virtual_dr6 };
        dr6 & bindings::DR_STEP as usize != 0
            && self.thread_flags() & (1 << bindings::TIF_FORCED_TF) != 0
    }

    /// Hides the step that was swallowed from whoever reads the task's DR6. Returns whether
    /// nothing else is noted there.
    #[inline]
    pub(super) fn forget_step(&self) -> bool {
        // SAFETY: By the type invariants, and the task is the one that runs.
        let dr6 = unsafe { &mut (*self.task).thread.virtual_dr6 };
        *dr6 &= !(bindings::DR_STEP as usize);
        *dr6 == 0
    }

    /// Whether a uprobe makes the task go on in a copy of the probed instruction.
    #[inline]
    pub(super) fn out_of_line(&self) -> bool {
        // SAFETY: The task is valid by the type invariants; `utask` is only changed by the task
        // itself, and not freed while it runs.
        unsafe {
            let utask = (*self.task).utask;
            !utask.is_null()
                && !(*utask).active_uprobe.is_null()
                && (*utask).xol_vaddr == self.regs().ip
        }
    }

    /// Whether uprobes have added a page to the address space. This task must be the one that runs.
    #[inline]
    pub(super) fn has_uprobes_page(&self) -> bool {
        // SAFETY: The task runs and has an address space, whose page stays as long as it does.
        !unsafe {
            (&raw const (*(*self.task).mm).__bindgen_anon_1.uprobes_state.xol_area).read_volatile()
        }
        .is_null()
    }

    /// Whether the task goes on in a page that uprobes have put into its address space, of which
    /// nobody but the kernel knows what is in it. This task must be the one that runs.
    #[inline]
    pub(super) fn in_hidden_page(&self) -> bool {
        let ip = self.ip();
        (self.has_uprobes_page() && {
            // SAFETY: The task runs and has an address space.
            let page = unsafe { bindings::uprobe_get_trampoline_vaddr() };
            ip.wrapping_sub(page as u64) < PAGE_SIZE as u64
        }) || self.is_trampoline(ip)
    }

    /// Whether `ip` is in a page by which a probe that became a call gets to the kernel.
    ///
    /// To look the mapping up takes locks, so it is told by what is in it.
    #[inline]
    fn is_trampoline(&self, ip: u64) -> bool {
        let page = ip & !(PAGE_SIZE as u64 - 1);
        self.read(page) == Some(TRAMPOLINE[0]) && self.read(page + 8) == Some(TRAMPOLINE[1])
    }

    /// The address of the instruction at `ip` in the eyes of who knows the program's file, which
    /// has a NOP where the kernel has put a `lea` and a `call` of a trampoline: that of the NOP.
    #[inline(never)]
    pub(super) fn probed(&self, ip: u64) -> u64 {
        const CALL: u64 = 0xe8;

        let lea = ip.wrapping_sub(PROBE_LEA_LEN);
        let found = self.mode() == Some(Mode::Bits64)
            && self
                .read(lea)
                .is_some_and(|code| code << 24 == PROBE_LEA << 24)
            && self.read(ip).is_some_and(|code| {
                let to = ip.wrapping_add(5).wrapping_add((code >> 8) as i32 as u64);
                code & 0xff == CALL && to % PAGE_SIZE as u64 == 0 && self.is_trampoline(to)
            });
        if found {
            lea
        } else {
            ip
        }
    }

    /// Eight bytes of the program's, if they are there.
    #[inline(always)]
    fn read(&self, at: u64) -> Option<u64> {
        let mut code = 0;
        // SAFETY: The function checks the user address and takes no fault.
        unsafe { bindings::get_user_nofault(&mut code, at as *const u64) }.then_some(code)
    }

    /// The last of the instructions at and behind `ip` that write the stack segment, if the one
    /// behind it is at `to`.
    pub(super) fn stack_segment_loaded(&self, mut ip: u64, mode: Mode, to: u64) -> Option<u64> {
        for _ in 0..MAX_LOADS {
            let next = match self.decode(ip, mode)? {
                Insn {
                    kind: Kind::LoadStackSegment,
                    len,
                } => ip.wrapping_add(u64::from(len)),
                _ => return None,
            };
            if next == to {
                return Some(ip);
            }
            ip = next;
        }
        None
    }

    /// Reads and decodes the instruction at `ip`, if its page is there.
    #[inline(always)]
    pub(super) fn decode(&self, ip: u64, mode: Mode) -> Option<Insn> {
        if mode == Mode::Bits64 {
            if let Some(insn) = self.read(ip).and_then(Insn::quick) {
                return Some(insn);
            }
        }
        self.decode_any(ip, mode)
    }

    /// The same for instructions that are not so common, or at the end of a page.
    #[inline(never)]
    fn decode_any(&self, ip: u64, mode: Mode) -> Option<Insn> {
        let mut bytes = [0u8; decode::MAX_LEN];
        let long_mode = mode == Mode::Bits64;
        // SAFETY: The buffer is that long; the function checks the user address and takes no fault.
        let whole = unsafe {
            bindings::copy_from_user_nofault(
                bytes.as_mut_ptr().cast(),
                ip as *const c_void,
                bytes.len(),
            )
        } == 0;
        if whole {
            return Insn::decode(&bytes, long_mode);
        }

        // The next page may not be there, and may not be needed.
        let len = PAGE_SIZE - (ip as usize & (PAGE_SIZE - 1));
        let part = bytes.get_mut(..len)?;
        // SAFETY: As above.
        let copied = unsafe {
            bindings::copy_from_user_nofault(
                part.as_mut_ptr().cast(),
                ip as *const c_void,
                part.len(),
            )
        } == 0;
        if copied {
            Insn::decode(part, long_mode)
        } else {
            None
        }
    }
}

/// Registers or unregisters the probe of a tracepoint.
macro_rules! probe {
    ($call:ident, $probe:ident) => {
        // SAFETY: The probe is part of the kernel, and has the type that its tracepoint wants.
        to_result(unsafe { bindings::$call(Some($probe), core::ptr::null_mut()) })
    };
}

/// The tracepoints that tell when a task's registers are about to be seen by others.
pub(super) struct Probes;

impl Probes {
    /// Registers all probes, or none if that fails. May sleep.
    pub(super) fn register() -> Result {
        probe!(register_trace_sched_switch, on_switch)?;
        probe!(register_trace_signal_deliver, on_signal)
            .inspect_err(|_| Self::unregister_switch())?;
        probe!(register_trace_sched_process_fork, on_fork).inspect_err(|_| {
            Self::unregister_signal();
            Self::unregister_switch();
        })
    }

    /// Unregisters all probes, which may still run until an RCU grace period is over. May sleep.
    ///
    /// They must be registered: the kernel warns of one that is not.
    pub(super) fn unregister() {
        // That a probe which is registered can't be found does not happen.
        let _ = probe!(unregister_trace_sched_process_fork, on_fork);
        Self::unregister_signal();
        Self::unregister_switch();
    }

    fn unregister_signal() {
        let _ = probe!(unregister_trace_signal_deliver, on_signal);
    }

    fn unregister_switch() {
        let _ = probe!(unregister_trace_sched_switch, on_switch);
    }
}

/// A task is switched out.
///
/// # Safety
///
/// To be called by the `sched_switch` tracepoint.
unsafe extern "C" fn on_switch(
    _data: *mut c_void,
    _preempt: bool,
    prev: *mut bindings::task_struct,
    _next: *mut bindings::task_struct,
    _prev_state: c_uint,
) {
    // SAFETY: `prev` is the task that runs, and the scheduler has interrupts off.
    // INVARIANT: As in `Task::current`.
    let task = unsafe { Task::new(prev) };
    if !task.is_user() {
        return;
    }
    // SAFETY: The scheduler has interrupts off.
    let cx = unsafe { NmiLike::new() };
    // SAFETY: The probe is registered.
    if let Some(shared) = unsafe { Shared::active() } {
        shared.cpus.with(&cx, |cpu| {
            if cpu.registered {
                shared.finish(cpu, &task, &cx);
            }
        });
    }
    task.clear_trap_flag();
}

/// A signal is delivered.
///
/// # Safety
///
/// To be called by the `signal_deliver` tracepoint.
unsafe extern "C" fn on_signal(
    _data: *mut c_void,
    _sig: c_int,
    _info: *mut bindings::kernel_siginfo,
    _action: *mut bindings::k_sigaction,
) {
    let task = Task::current();
    // The task delivers its signals with interrupts on, and may move to another CPU before it goes
    // on in user mode; then it was switched out, and there is no position left to mark.
    irqs_off(|cx| {
        // SAFETY: The probe is registered.
        if let Some(shared) = unsafe { Shared::active() } {
            shared.cpus.with(cx, |cpu| {
                if let Some(last) = cpu.last.as_mut().filter(|last| last.task == task.as_ptr()) {
                    last.signal(&task);
                }
            });
        }
        task.clear_trap_flag();
    });
}

/// A task was made, as a copy of the one that runs.
///
/// # Safety
///
/// To be called by the `sched_process_fork` tracepoint.
unsafe extern "C" fn on_fork(
    _data: *mut c_void,
    _parent: *mut bindings::task_struct,
    child: *mut bindings::task_struct,
) {
    // SAFETY: The child is valid, and has not run yet.
    // INVARIANT: Nobody else knows its registers yet.
    let child = unsafe { Task::new(child) };
    if !child.is_user() {
        return;
    }
    // The flags of the child are clean, since `TIF_FORCED_TF` says what to do; its `r11` is not.
    // What it says of its parent's may be long over: the parent may have been switched out since.
    let flags = child.regs().flags;
    if flags & TF == 0 && child.frame().r11_is_copy_of(flags | TF) {
        child.set_r11(flags);
    }
}
