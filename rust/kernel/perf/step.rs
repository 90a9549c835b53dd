// SPDX-License-Identifier: GPL-2.0

//! The user-mode flow of control of x86 tasks, one instruction at a time.
//!
//! C headers:
//! [`include/linux/user-return-notifier.h`](srctree/include/linux/user-return-notifier.h),
//! [`include/linux/kdebug.h`](srctree/include/linux/kdebug.h)
//!
//! A [`Stepper`] runs the tasks of a CPU with the trap flag (`EFLAGS.TF`) set and tells a
//! [`Handler`] what each instruction did. It is what a tracing PMU has in place of tracing
//! hardware.
//!
//! # How it works
//!
//! ```text
//!      kernel mode                                      user mode
//!   ───────────────────────────────────────────────────────────────────────────
//!    user-return notifier:                     ──▶  one instruction
//!      note where, decode it, set TF                      │
//!                                                         ▼
//!    die notifier: ◀─────────────────────────────  #DB (DR6.BS)
//!      Retire{from, insn, to}, swallow the trap
//!            │
//!            └──▶ exit to user mode, user-return notifier, …
//! ```
//!
//! The user-return notifier is the last thing that runs with interrupts off before user mode, after
//! all signal and scheduler work. So it also sees every other way back into user mode. It compares
//! where the task left user mode with where it comes back: a place that moved with a #DB is an
//! instruction retired; one that moved without a #DB was moved by the kernel (a system call, a
//! signal, ...); one that did not move is an interrupt or a fault, and nothing has happened.
//!
//! TF stays set from one instruction to the next. Most steps take a short way through both
//! notifiers: what they can rely on is said at `Stage`. The bytes of each instruction are read
//! before it runs, and nothing is remembered of them, so that code may change at any time.
//!
//! # Whose trap flag
//!
//! Programs and debuggers set the trap flag too, and must go on as if nobody else did.
//!
//! - `TIF_FORCED_TF` with `TIF_SINGLESTEP` clear says that a set TF is the stepper's, see
//!   [`asm/step.h`](srctree/arch/x86/include/asm/step.h). It is set with TF, and cleared with it.
//! - TF is the stepper's only while a task runs: it is cleared from the saved registers when the
//!   task is switched out, when a signal is delivered, when a breakpoint is hit and when a child is
//!   made. So what other kernel code copies out of there (`ptrace(2)`, a core dump, a signal frame,
//!   a new task's registers) is the program's own. `syscall` copies the flags to `r11`; that copy
//!   is mended, and so is the image that `pushf` writes.
//! - TF that is set without `TIF_FORCED_TF` is the program's own, and its trap is left to it. So is
//!   the trap of a debugger's step, and of an instruction that a uprobe executes out of line.
//! - A trap that `TIF_FORCED_TF` marks as a stepper's is swallowed even where none is armed. The
//!   notifier that does so comes with the first event and goes with the last, when no task has such
//!   a TF: those that run were disarmed, and the others lost it when they were switched out.

use super::bindings;
use crate::{
    error::to_result,
    new_mutex,
    nmi::{
        CpuLocal,
        IrqsOff,
        NmiCell,
        NmiLike, //
    },
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Relaxed,
                Release, //
            },
            Atomic, //
        },
        Arc,
        Mutex, //
    },
    types::Opaque, //
};

mod decode;
mod frame;
mod insn;
mod task;

pub use self::insn::{
    Insn,
    Kind, //
};
use self::{
    frame::Event,
    task::Task, //
};

/// How user-mode code is to be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// 64-bit code.
    Bits64,
    /// 32-bit code.
    Bits32,
}

/// Something that happened to the flow of control of the task that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// User mode begins, or goes on, at `ip`.
    Enter {
        /// The address of the first instruction.
        ip: u64,
        /// How it is encoded.
        mode: Mode,
    },
    /// The instruction at `from` has retired, and the next one is at `to`.
    Retire {
        /// Its address.
        from: u64,
        /// What it is.
        insn: Insn,
        /// Where the flow goes on.
        to: u64,
    },
    /// The last instruction retired by entering the kernel. The next event is an `Enter`.
    Exit,
    /// User mode was left before the instruction at `from`, which is not executed for now. The next
    /// event is an `Enter`.
    Leave {
        /// The address of the instruction.
        from: u64,
    },
    /// The flow was lost sight of. The next event is an `Enter`.
    Lost,
}

/// What a [`Handler`] wants to be told from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Every step.
    All,
    /// Every step but those instructions that surely were no branch: [`Kind::Other`] after which
    /// the flow went on at most [`Insn::MAX_LEN`] bytes ahead. They are most of what programs do.
    ///
    /// The next step after [`Stepping::catch_up`] is told in any case.
    Branches,
    /// None: the CPU is paused (see [`Stepping::pause`]).
    Nothing,
}

/// Whoever wants to know.
pub trait Handler: Send + Sync {
    /// Called on the CPU on which `step` happened, in order. Returns what to be told next.
    fn step(&self, step: Step, cx: &NmiLike<'_>) -> Interest;
}

/// Where a task is about to go on in user mode.
#[derive(Clone, Copy)]
struct Position {
    /// The task, only to be compared.
    task: *mut bindings::task_struct,
    /// The address it resumes at.
    ip: u64,
    /// The address of `insn`: behind `ip` if a `mov` to `%ss` or several are there, else `ip`.
    at: u64,
    /// The instruction, if it could be read.
    insn: Option<Insn>,
    /// The task was let run without a trap flag of the stepper's.
    free: bool,
    /// A trap comes before the instruction has run, of a trap flag that is not the stepper's.
    traps_at_once: bool,
    mode: Mode,
    /// The instruction is a system call that returns from a signal handler.
    sigreturn: bool,
    /// A uprobe executes a copy of the instruction, somewhere else.
    out_of_line: bool,
    /// The instruction is in a page that uprobes add to the address space, of which nobody but
    /// the kernel knows what is in it; it is stepped, but not reported.
    hidden: bool,
    /// A signal was delivered since, and had the instruction entered the kernel before that?
    signalled: Option<bool>,
    stage: Stage,
}

/// How far a task is with an instruction.
///
/// Most steps go from one of the first two to the other and back, and take the short way that
/// their conditions allow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The instruction before was reported, and the task has not been on its way to user mode
    /// since. `insn` is not known yet, and nothing of what makes a position [`Stage::Odd`] is true.
    Retired,
    /// The task is on its way to run the instruction. `insn` is known and stays in user mode, and
    /// nothing of what makes a position odd is true.
    Fetched,
    /// Any of `sigreturn`, `out_of_line`, `hidden`, `signalled` may be set, `at` may not be `ip`,
    /// the address space may have a page of the uprobes, or it is just not one of the above.
    Odd,
}

/// What the stepper knows on one CPU.
struct Cpu {
    /// The [`PerCpu::notifier`].
    notifier: *mut bindings::user_return_notifier,
    registered: bool,
    last: Option<Position>,
    /// Every step is to be reported.
    all: bool,
    /// The instruction whose trap is being handled was retired by [`Stepping::catch_up`] already.
    early: Option<Insn>,
}

// SAFETY: The notifier and the task pointer are only used on the CPU they belong to; the task
// pointer is never dereferenced.
unsafe impl Send for Cpu {}

/// What there is for one CPU.
struct PerCpu {
    notifier: Opaque<bindings::user_return_notifier>,
    paused: Atomic<bool>,
    cpu: NmiCell<Cpu>,
}

// SAFETY: The notifier is only used on the CPU it belongs to.
unsafe impl Send for PerCpu {}
// SAFETY: As above; the rest is `Sync`.
unsafe impl Sync for PerCpu {}

/// What there is for all CPUs.
struct Cpus(CpuLocal<PerCpu>);

impl Cpus {
    fn new() -> Result<Self> {
        Ok(Self(CpuLocal::new(|_| {
            let mut notifier: bindings::user_return_notifier = pin_init::zeroed();
            notifier.on_user_return = Some(on_user_return);
            Ok(PerCpu {
                notifier: Opaque::new(notifier),
                paused: Atomic::new(false),
                cpu: NmiCell::new(Cpu {
                    notifier: core::ptr::null_mut(),
                    registered: false,
                    last: None,
                    all: true,
                    early: None,
                }),
            })
        })?))
    }

    /// Calls `f` with what the stepper knows on this CPU, unless this has interrupted code that is
    /// at it.
    #[inline(always)]
    fn with<R>(&self, cx: &NmiLike<'_>, f: impl FnOnce(&mut Cpu) -> R) -> Option<R> {
        self.0.get(cx)?.cpu.with(f)
    }
}

/// Steps the tasks of the CPUs on which it is armed.
///
/// There is one at a time. It costs nothing until somebody [uses](Stepper::enable) it.
///
/// # Invariants
///
/// `ACTIVE` points to `shared` while the stepper exists. While there are users, the notifiers and
/// probes are registered.
#[pin_data(PinnedDrop)]
pub struct Stepper {
    shared: KBox<Shared>,
    #[pin]
    users: Mutex<usize>,
}

/// The right to step, which goes with an event that is to be stepped.
///
/// It belongs into the event's [`Pmu::Data`](super::Pmu::Data), which is dropped with the event. A
/// module that goes away must not leave one behind (`mem::forget`): the handler would be called
/// that is no longer there.
pub struct Stepping(Arc<Stepper>);

struct Shared {
    cpus: Cpus,
    handler: Arc<dyn Handler>,
}

/// The stepper that exists, or null.
static ACTIVE: Atomic<*mut Shared> = Atomic::new(core::ptr::null_mut());

/// Keeps a second stepper out while the first is being made or unmade.
static TAKEN: Atomic<bool> = Atomic::new(false);

/// A `notifier_block` that the C side links into its chain.
struct DieNotifier(Opaque<bindings::notifier_block>);

// SAFETY: Only the notifier chain's code, which takes a lock, changes it.
unsafe impl Sync for DieNotifier {}

/// Runs behind the debug-register code, which registers at boot with the same priority, and ahead
/// of the uprobes, which have one less.
static DIE_NOTIFIER: DieNotifier = DieNotifier(Opaque::new(bindings::notifier_block {
    notifier_call: Some(on_die),
    next: core::ptr::null_mut(),
    priority: c_int::MAX,
}));

impl Stepper {
    /// Makes a stepper that reports to `handler`.
    ///
    /// # Errors
    ///
    /// `EBUSY` if there is one. `ENODEV`, and a line in the log, where the way back to user mode is
    /// not that of the processor, but a hypervisor's that does as it likes: in a Xen PV guest.
    #[inline(never)]
    pub fn new(handler: Arc<dyn Handler>) -> Result<Arc<Self>> {
        // SAFETY: It only asks for a feature of the processor.
        if unsafe { bindings::is_xen_pv() } {
            pr_err!("perf: tasks can't be stepped in a Xen PV guest\n");
            return Err(ENODEV);
        }
        let cpus = Cpus::new()?;
        let shared = KBox::new(Shared { cpus, handler }, GFP_KERNEL)?;
        let taken = Taken::take()?;
        let stepper = Arc::pin_init(
            pin_init!(Self {
                shared,
                users <- new_mutex!(0),
            }),
            GFP_KERNEL,
        )?;
        // Its drop gives it back.
        core::mem::forget(taken);
        ACTIVE.store((&raw const *stepper.shared).cast_mut(), Release);
        // INVARIANT: `ACTIVE` was set just now.
        Ok(stepper)
    }

    /// Gets ready to step: an event that is to be stepped exists from now on, until what is
    /// returned is dropped. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    #[inline(never)]
    pub fn enable(self: &Arc<Self>) -> Result<Stepping> {
        let mut users = self.users.lock();
        if *users == 0 {
            // SAFETY: The notifier block is static and not registered: there is one stepper, and
            // its lock is held.
            to_result(unsafe { bindings::register_die_notifier(DIE_NOTIFIER.0.get()) })?;
            task::Probes::register().inspect_err(|_| {
                // SAFETY: It was registered just now. This may sleep.
                unsafe { bindings::unregister_die_notifier(DIE_NOTIFIER.0.get()) };
            })?;
        }
        // INVARIANT: The notifiers and probes are registered.
        *users += 1;
        Ok(Stepping(self.clone()))
    }
}

/// The right to make a stepper.
struct Taken;

impl Taken {
    fn take() -> Result<Self> {
        if TAKEN.xchg(true, Acquire) {
            return Err(EBUSY);
        }
        Ok(Self)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        TAKEN.store(false, Release);
    }
}

impl Drop for Stepping {
    #[inline(never)]
    fn drop(&mut self) {
        /// # Safety
        ///
        /// To be called on each CPU with interrupts off, with a valid [`Shared`].
        unsafe extern "C" fn disarm(shared: *mut c_void) {
            // SAFETY: By the safety requirements. Such calls come by interrupts, not by NMIs.
            unsafe { (*shared.cast::<Shared>()).disarm(&IrqsOff::new()) };
        }

        let mut users = self.0.users.lock();
        *users -= 1;
        if *users > 0 {
            return;
        }
        // The driver has disarmed it where its events were, if it is as it should be. What is
        // behind this relies on it, so this does not.
        let shared: *const Shared = &*self.0.shared;
        // SAFETY: The call waits until all CPUs have done it. The order matters: no task may be
        // stepped without the probes, nor be left with a trap flag without the die notifier.
        unsafe {
            bindings::on_each_cpu(Some(disarm), shared.cast_mut().cast(), 1);
            task::Probes::unregister();
            bindings::unregister_die_notifier(DIE_NOTIFIER.0.get());
        }
    }
}

impl Stepping {
    /// Begins to step the tasks of this CPU; the first event is an `Enter`.
    #[inline(never)]
    pub fn arm(&self, cx: &IrqsOff<'_>) {
        self.set_paused(false, cx);
        let Some(here) = self.0.shared.cpus.0.get(cx) else {
            return;
        };
        here.cpu.with(|cpu| {
            if !cpu.registered {
                cpu.notifier = here.notifier.get();
                cpu.last = None;
                cpu.all = true;
                cpu.early = None;
                // SAFETY: Interrupts are off, the notifier is not registered and stays in place for
                // as long as the stepper exists, which is at least until it is disarmed: whoever
                // is the last to have a `Stepping` disarms it on all CPUs.
                unsafe { bindings::user_return_notifier_register(cpu.notifier) };
                cpu.registered = true;
            }
        });
    }

    /// Steps no more on this CPU. The last event, if any, is a `Leave` or an `Exit`.
    #[inline(never)]
    pub fn disarm(&self, cx: &IrqsOff<'_>) {
        self.0.shared.disarm(cx);
    }

    /// Steps no more on this CPU until [`arm`](Self::arm) or [`resume`](Self::resume), which are
    /// cheap then. What was going on ends with a `Leave` or an `Exit` when the task is about to go
    /// on in user mode; then it runs at full speed.
    #[inline(never)]
    pub fn pause(&self, cx: &NmiLike<'_>) {
        self.set_paused(true, cx);
    }

    /// Ends a [`pause`](Self::pause). The first event is an `Enter`, unless the task was not in
    /// user mode since.
    ///
    /// A task that an NMI interrupts in user mode goes on unstepped until it enters the kernel.
    #[inline(never)]
    pub fn resume(&self, cx: &NmiLike<'_>) {
        self.set_paused(false, cx);
    }

    #[inline]
    fn set_paused(&self, paused: bool, cx: &NmiLike<'_>) {
        self.0.shared.set_paused(paused, cx);
    }

    /// Reports the instruction whose trap is just being handled, if the die notifier has not got to
    /// it yet.
    ///
    /// A debug register that triggers together with the trap is handled first, and may take a
    /// sample: without this, the sample would lack the branch that led there.
    ///
    /// The next step is told whatever the handler's [`Interest`], unless this comes in an NMI that
    /// has interrupted the stepper.
    #[inline(never)]
    pub fn catch_up(&self, cx: &NmiLike<'_>) {
        let task = Task::current();
        let shared = &self.0.shared;
        shared.cpus.with(cx, |cpu| {
            shared.catch_up(cpu, &task, cx);
            cpu.all = true;
        });
    }
}

/// The time-stamp counter.
#[inline]
pub fn timestamp() -> u64 {
    // SAFETY: There is one on all x86-64 processors.
    unsafe { bindings::rdtsc() }
}

/// Who made the processor, as it says itself, to programs too.
#[inline(never)]
pub fn vendor() -> [u8; 12] {
    // SAFETY: All x86-64 processors have the instruction and the leaf.
    let leaf = unsafe { core::arch::x86_64::__cpuid(0) };
    let mut name = [0; 12];
    let words = [leaf.ebx, leaf.edx, leaf.ecx];
    for (to, from) in name
        .iter_mut()
        .zip(words.iter().flat_map(|word| word.to_le_bytes()))
    {
        *to = from;
    }
    name
}

/// The frequency of the time-stamp counter, in units of the 100 MHz bus clock; at most 255.
#[inline]
pub fn bus_ratio() -> u8 {
    // SAFETY: Written when the kernel boots.
    u8::try_from(unsafe { bindings::tsc_khz } / 100_000).unwrap_or(u8::MAX)
}

#[pinned_drop]
impl PinnedDrop for Stepper {
    fn drop(self: Pin<&mut Self>) {
        ACTIVE.store(core::ptr::null_mut(), Release);
        // Nobody uses the stepper any more, so nothing but a probe that was unregistered and a die
        // notifier that was read under RCU can still be at it.
        // SAFETY: This may sleep.
        unsafe { bindings::tracepoint_synchronize_unregister() };
        drop(Taken);
    }
}

impl Shared {
    /// The stepper that exists.
    ///
    /// # Safety
    ///
    /// To be called from the notifiers and probes, all of which the drop of `Stepper` waits for.
    unsafe fn active<'a>() -> Option<&'a Self> {
        // SAFETY: The pointer is null or valid, and `drop` waits for the caller before it frees.
        unsafe { ACTIVE.load(Acquire).as_ref() }
    }

    fn set_paused(&self, paused: bool, cx: &NmiLike<'_>) {
        if let Some(here) = self.cpus.0.get(cx) {
            here.paused.store(paused, Relaxed);
        }
    }

    /// Steps no more on this CPU.
    fn disarm(&self, cx: &IrqsOff<'_>) {
        let task = Task::current();
        self.cpus.with(cx, |cpu| {
            if cpu.registered {
                // SAFETY: Interrupts are off, and the notifier was registered on this CPU.
                unsafe { bindings::user_return_notifier_unregister(cpu.notifier) };
                cpu.registered = false;
                self.finish(cpu, &task, cx);
            }
        });
        task.clear_trap_flag();
    }

    /// Tells the handler, and notes in `all` what it wants to be told next.
    #[inline]
    fn report(&self, all: &mut bool, step: Step, cx: &NmiLike<'_>) {
        match self.handler.step(step, cx) {
            Interest::All => *all = true,
            Interest::Branches => *all = false,
            Interest::Nothing => self.set_paused(true, cx),
        }
    }

    /// Ends what this CPU was in the middle of.
    fn finish(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) {
        let Some(last) = cpu.last.take() else { return };
        cpu.early = None;
        if last.hidden {
            return;
        }
        let ours = last.task == task.as_ptr();
        if ours {
            last.settle(task);
        }
        let step = if last.free && !(ours && last.is_here(task)) {
            Step::Lost
        } else if ours && last.entered_kernel(task) {
            Step::Exit
        } else {
            last.leave(task)
        };
        self.report(&mut cpu.all, step, cx);
    }

    /// Reports the instruction whose trap is just being handled.
    fn catch_up(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) {
        let Some(last) = cpu.last else { return };
        let entered = matches!(
            last.insn.map(|insn| insn.kind),
            Some(Kind::Syscall | Kind::Interrupt | Kind::Breakpoint | Kind::DebugTrap)
        );
        if task.is_user()
            && task.trap_pending()
            && last.task == task.as_ptr()
            && last.ip != task.ip()
            && !entered
            && !last.out_of_line
            && last.signalled.is_none()
            && cpu.early.is_none()
        {
            cpu.early = Some(self.retire(cpu, task, cx));
        }
    }

    /// An instruction has retired, and the task goes on at its `ip`.
    #[inline(never)]
    fn retire(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) -> Insn {
        let to = task.ip();
        let (Some(last), all) = (&mut cpu.last, &mut cpu.all) else {
            return Insn::OTHER;
        };
        // What could not be read before it ran can be now.
        let mode = last.mode;
        let mut insn = last.insn.or_else(|| task.decode(last.at, mode));
        // The trap after one of several writes to the stack segment need not be put off.
        if to != last.ip && to.wrapping_sub(last.ip) <= last.at.wrapping_sub(last.ip) {
            if let Some(at) = task.stack_segment_loaded(last.ip, mode, to) {
                last.at = at;
                insn = Some(Insn::OTHER);
            }
        }
        if task.mode().is_none() {
            // A far branch to where an address tells nothing.
            if !last.hidden {
                self.report(all, Step::Lost, cx);
            }
            cpu.last = None;
            return insn.unwrap_or(Insn::OTHER);
        }
        let hidden = task.in_hidden_page();
        match insn {
            _ if last.hidden => {
                if !hidden {
                    self.report(all, Step::Enter { ip: to, mode }, cx);
                }
            }
            // A probe. The call is in no file, nor will a return be seen.
            Some(insn) if hidden && insn.kind == Kind::Call => {
                let from = task.probed(last.at);
                self.report(all, Step::Leave { from }, cx);
            }
            Some(insn) => {
                let from = last.at;
                self.report(all, Step::Retire { from, insn, to }, cx);
                if hidden {
                    self.report(all, Step::Leave { from: to }, cx);
                }
            }
            None => {
                self.report(all, Step::Lost, cx);
                self.report(all, Step::Enter { ip: to, mode }, cx);
            }
        }
        last.stage = match last.signalled {
            None if !hidden => Stage::Retired,
            _ => Stage::Odd,
        };
        last.hidden = hidden;
        last.ip = to;
        last.at = to;
        last.insn = None;
        last.sigreturn = false;
        last.out_of_line = false;
        last.free = false;
        last.traps_at_once = false;
        insn.unwrap_or(Insn::OTHER)
    }

    /// The task is about to go on in user mode.
    #[inline]
    fn user_return(&self, cpu: &mut Cpu, paused: bool, task: &Task, cx: &NmiLike<'_>) {
        if !cpu.registered {
            return;
        }
        if paused {
            self.finish(cpu, task, cx);
            task.clear_trap_flag();
            return;
        }
        cpu.early = None;
        match &mut cpu.last {
            Some(last)
                if last.stage == Stage::Retired
                    && last.task == task.as_ptr()
                    && last.ip == task.ip()
                    && Some(last.mode) == task.mode() =>
            {
                last.fetch(task);
                last.step(task);
            }
            _ => self.other_return(cpu, task, cx),
        }
    }

    /// The task is about to go on in user mode, and anything may have happened.
    #[inline(never)]
    fn other_return(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) {
        if let Some(last) = cpu.last.filter(|last| last.task == task.as_ptr()) {
            last.settle(task);
        }
        task.mend_r11();

        let frame = task.frame();
        let Some(mode) = task.mode().filter(|_| frame.event() != Event::Unknown) else {
            if let Some(last) = cpu.last.take().filter(|last| !last.hidden) {
                let step = if last.task == task.as_ptr() {
                    Step::Lost
                } else {
                    last.leave(task)
                };
                self.report(&mut cpu.all, step, cx);
            }
            task.clear_trap_flag();
            return;
        };
        let ip = task.ip();
        if task.out_of_line() {
            // A uprobe has put the trap flag there for itself.
            if let Some(last) = cpu.last.as_mut().filter(|last| last.task == task.as_ptr()) {
                last.insn = task.decode(ip, mode);
                last.out_of_line = true;
            }
            return;
        }

        let hidden = task.in_hidden_page();
        let ended = match cpu.last {
            Some(last) if last.hidden => None,
            Some(last) if last.task == task.as_ptr() && last.mode == mode => {
                if last.free {
                    if last.is_here(task) {
                        // A fault.
                        return self.go_on(cpu, task, ip, mode, hidden);
                    }
                    Some(Step::Lost)
                } else if last.entered_kernel(task) {
                    Some(Step::Exit)
                } else if ip == last.ip || ip == last.at {
                    // An interrupt, a fault, or a trap that is all done.
                    return self.go_on(cpu, task, ip, mode, hidden);
                } else if last.out_of_line && last.insn.is_some() {
                    self.retire(cpu, task, cx);
                    return self.go_on(cpu, task, ip, mode, hidden);
                } else {
                    Some(last.leave(task))
                }
            }
            Some(last) if last.free && last.task == task.as_ptr() => Some(Step::Lost),
            Some(last) => Some(last.leave(task)),
            None => None,
        };
        if let Some(step) = ended {
            self.report(&mut cpu.all, step, cx);
        }
        if !hidden {
            let ip = task.probed(ip);
            self.report(&mut cpu.all, Step::Enter { ip, mode }, cx);
        }
        self.go_on(cpu, task, ip, mode, hidden);
    }

    /// Steps the instruction at `ip`, before which all is reported.
    fn go_on(&self, cpu: &mut Cpu, task: &Task, ip: u64, mode: Mode, hidden: bool) {
        let mut here = Position {
            task: task.as_ptr(),
            ip,
            at: ip,
            insn: None,
            free: false,
            traps_at_once: false,
            mode,
            sigreturn: false,
            out_of_line: false,
            hidden,
            signalled: None,
            stage: Stage::Odd,
        };
        here.fetch(task);
        here.step(task);
        task.trap_behind_first();
        here.traps_at_once = task.frame().traps_at_once();
        if hidden || here.traps_at_once {
            here.stage = Stage::Odd;
        }
        cpu.last = Some(here);
    }

    /// A task that was stepped had a debug exception with DR6.BS set. Returns what has retired.
    #[inline]
    fn trapped(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) -> Option<Insn> {
        let position = cpu.last.as_mut();
        if let Some(last) =
            position.filter(|last| last.stage == Stage::Fetched && last.task == task.as_ptr())
        {
            if let Some(insn) = last.insn {
                let (from, to) = (last.ip, task.ip());
                if insn.kind == Kind::Call && to % PAGE_SIZE as u64 == 0 {
                    // To a trampoline of the uprobes, maybe.
                    return self.other_trap(cpu, task, cx);
                }
                last.insn = None;
                last.stage = Stage::Retired;
                last.ip = to;
                last.at = to;
                if cpu.all || insn.may_branch(from, to) {
                    self.report(&mut cpu.all, Step::Retire { from, insn, to }, cx);
                }
                return Some(insn);
            }
        }
        self.other_trap(cpu, task, cx)
    }

    /// The same where anything may have happened.
    #[inline(never)]
    fn other_trap(&self, cpu: &mut Cpu, task: &Task, cx: &NmiLike<'_>) -> Option<Insn> {
        if let Some(insn) = cpu.early.take() {
            return Some(insn);
        }
        let last = cpu.last.as_mut()?;
        if !cpu.registered || last.task != task.as_ptr() || last.out_of_line {
            return None;
        }
        if last.traps_at_once && last.ip == task.ip() {
            // Nothing has run yet.
            last.traps_at_once = false;
            return None;
        }
        Some(self.retire(cpu, task, cx))
    }
}

impl Position {
    /// Finds out about the instruction here.
    #[inline(always)]
    fn fetch(&mut self, task: &Task) {
        self.insn = task.decode(self.ip, self.mode);
        self.stage = match self.insn {
            Some(insn) if !insn.kind.is_odd() && !task.has_uprobes_page() => Stage::Fetched,
            _ => {
                self.fetch_odd(task);
                Stage::Odd
            }
        };
    }

    /// The same for what is not just an instruction after which a trap comes.
    #[inline(never)]
    fn fetch_odd(&mut self, task: &Task) {
        let mut loads = 0;
        while let Some(Insn {
            kind: Kind::LoadStackSegment,
            len,
        }) = self.insn
        {
            loads += 1;
            if loads > task::MAX_LOADS {
                self.insn = None;
                break;
            }
            self.at = self.at.wrapping_add(u64::from(len));
            self.insn = task.decode(self.at, self.mode);
        }
        // The flags would be pushed to a stack that nobody knows yet.
        if loads > 0
            && self.mode == Mode::Bits32
            && matches!(self.insn, Some(insn) if insn.kind == Kind::PushFlags)
        {
            self.insn = None;
        }
        self.sigreturn = self.insn.is_some_and(|insn| task.at_sigreturn(insn.kind));
    }

    /// Lets the instruction here run, with TF if that does no harm.
    #[inline(always)]
    fn step(&mut self, task: &Task) {
        if self.stage == Stage::Fetched {
            task.set_trap_flag();
        } else {
            self.step_odd(task);
        }
    }

    /// The same for what is not just an instruction after which a trap comes.
    #[inline(never)]
    fn step_odd(&mut self, task: &Task) {
        match self.insn.map(|insn| insn.kind) {
            // Its trap, by which the program gets its signal, may say that there was a step too.
            Some(Kind::DebugTrap) => task.clear_trap_flag(),
            Some(_) => task.set_trap_flag(),
            // Its page is not there, and the task comes back before it has run, or it may be
            // executed only: then it may be one that shows the flags to the program.
            None => {
                // In the upper half of the addresses there is only the vsyscall page, whose
                // instructions the kernel carries out itself.
                self.free = self.ip >> 63 == 0;
                task.clear_trap_flag();
            }
        }
    }

    /// Whether `task` is where it was, so that nothing has run that matters.
    fn is_here(&self, task: &Task) -> bool {
        task.ip() == self.ip || task.ip() == self.at
    }

    /// User mode was left before the instruction here.
    fn leave(&self, task: &Task) -> Step {
        let from = if self.task == task.as_ptr() {
            task.probed(self.ip)
        } else {
            self.ip
        };
        Step::Leave { from }
    }

    /// Whether the instruction at this position is what brought `task` into the kernel.
    fn entered_kernel(&self, task: &Task) -> bool {
        if let Some(entered) = self.signalled {
            return entered;
        }
        match self.insn.map(|insn| insn.kind) {
            Some(Kind::Syscall | Kind::Interrupt) => task.frame().entered_from(self.ip),
            // One that a debugger or a uprobe has put there leads to no signal.
            _ => false,
        }
    }

    /// The return from a signal handler loads the flags, with whatever TF was the program's then.
    fn settle(&self, task: &Task) {
        if self.sigreturn && self.signalled.is_none() && task.frame().returned_from_signal(self.ip)
        {
            task.trap_behind_first();
            task.keep_trap_flag();
        }
    }

    /// A signal is about to be delivered, which moves the task.
    fn signal(&mut self, task: &Task) {
        self.settle(task);
        self.stage = Stage::Odd;
        if self.is_here(task) {
            self.free = false;
        }
        if self.signalled.is_none() {
            let breakpoint = matches!(self.insn, Some(insn) if insn.kind == Kind::Breakpoint);
            self.signalled =
                Some(self.entered_kernel(task) || (breakpoint && task.ip() != self.ip));
        }
    }
}

/// The user-return notifier.
///
/// # Safety
///
/// To be called by the C side, with interrupts off.
unsafe extern "C" fn on_user_return(_notifier: *mut bindings::user_return_notifier) {
    // SAFETY: User-return notifiers are called with interrupts off.
    let cx = unsafe { NmiLike::new() };
    // SAFETY: A notifier is registered, so events of the PMU exist, and so does its stepper.
    if let Some(shared) = unsafe { Shared::active() } {
        let task = Task::current();
        if let Some(here) = shared.cpus.0.get(&cx) {
            let paused = here.paused.load(Relaxed);
            here.cpu
                .with(|cpu| shared.user_return(cpu, paused, &task, &cx));
        }
    }
}

/// The die notifier. As that of the uprobes it can be probed: of traps in the kernel, which probes
/// and breakpoints make, it only asks where they were.
///
/// # Safety
///
/// To be called by `notify_die()`.
unsafe extern "C" fn on_die(
    _nb: *mut bindings::notifier_block,
    what: usize,
    args: *mut c_void,
) -> c_int {
    // SAFETY: `notify_die()` passes its arguments.
    let args = unsafe { &*args.cast::<bindings::die_args>() };

    // SAFETY: The registers are those of the exception.
    let done = unsafe { bindings::user_mode(args.regs) } != 0
        && match what as c_uint {
            bindings::die_val_DIE_DEBUG => {
                // SAFETY: For `DIE_DEBUG`, `err` is the address of a copy of DR6.
                let dr6 = unsafe { &mut *(args.err as *mut usize) };
                frame::is_step(*dr6) && on_trap(&Task::current(), dr6)
            }
            bindings::die_val_DIE_INT3 => {
                Task::current().clear_trap_flag();
                false
            }
            _ => false,
        };
    if done {
        bindings::NOTIFY_STOP as c_int
    } else {
        bindings::NOTIFY_DONE as c_int
    }
}

/// A debug exception from user mode, with DR6.BS set. Returns whether that was all about it.
#[inline]
fn on_trap(task: &Task, dr6: &mut usize) -> bool {
    // SAFETY: Debug exceptions are taken with interrupts off, and the notifiers run before that
    // changes.
    let cx = unsafe { NmiLike::new() };
    // SAFETY: The die notifier runs in an RCU read-side critical section.
    let retired = unsafe { Shared::active() }.and_then(|shared| {
        shared
            .cpus
            .with(&cx, |cpu| shared.trapped(cpu, task, &cx))
            .flatten()
    });
    if !task.trap_flag_is_ours() {
        return false;
    }

    match retired.map(|insn| insn.kind) {
        // What it popped is the program's.
        Some(Kind::PopFlags | Kind::InterruptReturn) => task.keep_trap_flag(),
        Some(Kind::PushFlags) => task.mend_pushed_flags(),
        // TF stays for the next instruction, as it does when an interrupt comes.
        Some(_) => {}
        None => task.clear_trap_flag(),
    }
    let rest = frame::without_step(*dr6);
    *dr6 = rest.dr6;
    // A debugger's breakpoints are noted there by now, and others have a say too: to end here would
    // keep the debugger from them.
    task.forget_step() && rest.is_empty
}
