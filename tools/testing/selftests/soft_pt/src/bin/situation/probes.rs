// SPDX-License-Identifier: GPL-2.0

//! Probes and breakpoints of perf in a traced program, and traces that end where the program holds
//! an image of its flags.

use std::{
    arch::{
        asm,
        global_asm, //
    },
    ffi::CString,
    fs,
    os::unix::ffi::OsStrExt,
    sync::atomic::{
        AtomicU64,
        Ordering, //
    },
};

use perf_aux::{
    ring::{
        AuxMode,
        Ring, //
    },
    sys::Pmu,
    Attr,
    Event, //
};

use crate::support::*;

global_asm!(
    // The kernel emulates the push that the first one starts with, and steps the second's lea in a
    // slot of its own.
    ".globl situation_emulated",
    "situation_emulated:",
    "push rbx",
    "lea eax, [rdi + 1]",
    "pop rbx",
    "ret",
    ".globl situation_out_of_line",
    "situation_out_of_line:",
    "lea eax, [rdi + 1]",
    "ret",
    ".globl situation_jumping",
    "situation_jumping:",
    "jmp 2f",
    "ud2",
    "2:",
    "lea eax, [rdi + 1]",
    "ret",
    ".globl situation_rip_relative",
    "situation_rip_relative:",
    "lea rax, [rip + situation_rip_relative]",
    "lea eax, [rdi + 1]",
    "ret",
    ".globl situation_system_call",
    "situation_system_call:",
    "mov eax, 39",
    ".globl situation_syscall",
    "situation_syscall:",
    "syscall",
    "lea eax, [rdi + 1]",
    "ret",
    // What <sys/sdt.h> makes of a probe today. The kernel makes a call of it.
    ".globl situation_usdt",
    "situation_usdt:",
    "push rbx",
    ".globl situation_nop10",
    "situation_nop10:",
    ".byte 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0",
    "pop rbx",
    "lea eax, [rdi + 1]",
    "ret",
);

type Site = unsafe extern "C" fn(i32) -> i32;

extern "C" {
    fn situation_emulated(n: i32) -> i32;
    fn situation_out_of_line(n: i32) -> i32;
    fn situation_jumping(n: i32) -> i32;
    fn situation_rip_relative(n: i32) -> i32;
    fn situation_system_call(n: i32) -> i32;
    fn situation_syscall(n: i32) -> i32;
    fn situation_usdt(n: i32) -> i32;
    fn situation_nop10(n: i32) -> i32;
}

fn lacking(error: perf_aux::Error) -> Problem {
    Problem::Lacking(error.to_string())
}

fn wrong(error: perf_aux::Error) -> Problem {
    Problem::Wrong(error.to_string())
}

/// A counting uprobe on a function of this program.
fn uprobe(site: Site, on_return: bool) -> Result<Event, Problem> {
    let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")
        .map_err(|e| Problem::Lacking(format!("no uprobe PMU: {e}")))?;
    let kind = kind
        .trim()
        .parse()
        .map_err(|e| Problem::Wrong(format!("type of the uprobe PMU: {e}")))?;
    let offset = offset_in_program(site as usize as u64)?;
    let program = std::env::current_exe().map_err(|e| Problem::Wrong(format!("own path: {e}")))?;
    let path = CString::new(program.as_os_str().as_bytes())
        .map_err(|e| Problem::Wrong(format!("own path: {e}")))?;
    Attr::new(kind, on_return.into())
        .with(|attr| {
            attr.__bindgen_anon_3.uprobe_path = path.as_ptr() as u64;
            attr.__bindgen_anon_4.probe_offset = offset;
        })
        .open()
        .map_err(lacking)
}

const CALLS: i32 = 100;

fn call(site: Site) -> Result<(), Problem> {
    for n in 0..CALLS {
        // SAFETY: The function takes and returns a number.
        let next = unsafe { site(n) };
        expect("result of the function", next, n + 1)?;
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

fn probed(site: Site, on_return: bool) -> Result<(), Problem> {
    probed_within(site, site, on_return)
}

/// Probes `place`, which is in the function `site`.
fn probed_within(site: Site, place: Site, on_return: bool) -> Result<(), Problem> {
    let event = uprobe(place, on_return)?;
    call(site)?;
    expect(
        "hits of the probe",
        event.count().map_err(wrong)?,
        CALLS as u64,
    )?;
    drop(event);
    // Without the probe the instruction is its own again.
    call(site)?;
    reaches(site as usize, 2 * CALLS as usize);
    Ok(())
}

/// Probes on instructions that the kernel emulates.
pub fn uprobe_emulated(_: &[String]) -> Result<(), Problem> {
    probed(situation_emulated, false)?;
    probed(situation_jumping, false)
}

/// Probes on instructions that the kernel steps out of line.
pub fn uprobe_stepped(_: &[String]) -> Result<(), Problem> {
    probed(situation_out_of_line, false)?;
    probed(situation_rip_relative, false)
}

/// A probe on a system call.
pub fn uprobe_syscall(_: &[String]) -> Result<(), Problem> {
    probed_within(situation_system_call, situation_syscall, false)
}

/// A probe on a NOP as long as the call, which the kernel puts there.
pub fn uprobe_call(_: &[String]) -> Result<(), Problem> {
    probed_within(situation_usdt, situation_nop10, false)
}

/// A probe on the return of a function.
pub fn uretprobe(_: &[String]) -> Result<(), Problem> {
    probed(situation_out_of_line, true)
}

/// A breakpoint of perf. It counts and takes no samples, which could be throttled.
pub fn exec_breakpoint(_: &[String]) -> Result<(), Problem> {
    let event = Attr::exec_breakpoint(situation_out_of_line as usize as u64, 0)
        .user_only()
        .open()
        .map_err(lacking)?;
    for _ in 0..3 {
        call(situation_out_of_line)?;
    }
    reaches(situation_out_of_line as usize, 3 * CALLS as usize);
    expect_hits(event.count().map_err(wrong)?, 3 * CALLS as u64)
}

/// An event of the tracer on this program, if its PMU is named.
struct Trace {
    event: Event,
    _ring: Ring,
    _aux: perf_aux::ring::Aux,
}

impl Trace {
    /// `args` is empty, or names the PMU.
    fn open(args: &[String]) -> Result<Option<Self>, Problem> {
        let Some(name) = args.first() else {
            return Ok(None);
        };
        let pmu = Pmu::find(name)
            .map_err(wrong)?
            .ok_or_else(|| Problem::Lacking(format!("no PMU {name}")))?;
        let event = pmu.event(0).open().map_err(wrong)?;
        let ring = Ring::map(&event, 8).map_err(wrong)?;
        let aux = ring.map_aux(&event, 64, AuxMode::Snapshot).map_err(wrong)?;
        Ok(Some(Trace {
            event,
            _ring: ring,
            _aux: aux,
        }))
    }
}

fn start(trace: &Option<Trace>) -> Result<(), Problem> {
    trace
        .as_ref()
        .map_or(Ok(()), |trace| trace.event.enable().map_err(wrong))
}

fn stop(trace: &Option<Trace>) -> Result<(), Problem> {
    trace
        .as_ref()
        .map_or(Ok(()), |trace| trace.event.disable().map_err(wrong))
}

/// `stop-before-popf [PMU]`: tracing ends between `pushf` and the `popf` that takes its image.
pub fn stop_before_popf(args: &[String]) -> Result<(), Problem> {
    let trace = Trace::open(args)?;
    for _ in 0..50 {
        start(&trace)?;
        let image: u64;
        // SAFETY: Takes back what it pushes.
        unsafe { asm!("pushfq", "pop {}", out(reg) image) };
        stop(&trace)?;
        expect("TF in the image", image & TF, 0)?;
        // SAFETY: The flags were this program's a moment ago.
        unsafe { asm!("push {}", "popfq", "nop", "nop", in(reg) image) };
    }
    Ok(())
}

/// `stop-before-iret [PMU]`: the same with the frame of an `iretq`.
pub fn stop_before_iret(args: &[String]) -> Result<(), Problem> {
    let trace = Trace::open(args)?;
    for _ in 0..50 {
        start(&trace)?;
        let image: u64;
        // SAFETY: Takes back what it pushes.
        unsafe { asm!("pushfq", "pop {}", out(reg) image) };
        stop(&trace)?;
        expect("TF in the image", image & TF, 0)?;
        // SAFETY: The frame returns to the label with the stack pointer as it was.
        unsafe {
            asm!(
                "mov {sp}, rsp",
                "mov {t:e}, ss", "push {t}", "push {sp}", "push {image}",
                "mov {t:e}, cs", "push {t}", "lea {t}, [rip + 2f]", "push {t}",
                "iretq",
                "2: nop",
                sp = out(reg) _, t = out(reg) _, image = in(reg) image,
            )
        };
    }
    Ok(())
}

static STOP_FD: AtomicU64 = AtomicU64::new(u64::MAX);
static BAD_FRAMES: AtomicU64 = AtomicU64::new(0);

extern "C" fn stop_here(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: Called by the kernel.
    let frame = saved_flags(unsafe { registers(context) });
    BAD_FRAMES.fetch_add(u64::from(frame & TF != 0), Ordering::Relaxed);
    let fd = STOP_FD.load(Ordering::Relaxed);
    if fd != u64::MAX {
        let request = libc::c_ulong::from(perf_aux::abi::DISABLE);
        // SAFETY: The request takes a plain number.
        unsafe { libc::ioctl(fd as i32, request as _, 0) };
    }
}

/// `stop-in-handler [PMU]`: tracing ends in a signal handler, whose frame is restored after it.
pub fn stop_in_handler(args: &[String]) -> Result<(), Problem> {
    let trace = Trace::open(args)?;
    if let Some(trace) = &trace {
        STOP_FD.store(trace.event.fd() as u64, Ordering::Relaxed);
    }
    handle(libc::SIGUSR1, stop_here, 0)?;
    for _ in 0..50 {
        start(&trace)?;
        // SAFETY: Sends this thread a handled signal.
        unsafe {
            libc::syscall(
                libc::SYS_tkill,
                libc::syscall(libc::SYS_gettid),
                libc::SIGUSR1,
            )
        };
        expect("rounds", spin(10), 10)?;
    }
    expect("frames with TF", BAD_FRAMES.load(Ordering::Relaxed), 0)
}
