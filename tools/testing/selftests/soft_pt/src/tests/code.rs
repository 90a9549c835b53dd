// SPDX-License-Identifier: GPL-2.0

//! Code that changes: the trace tells what ran, not what was at the same address before.
//!
//! A function of one address is run over and over. Between two runs its first instruction is made
//! another one, which has other packets, in each way in which code can change. The packets between
//! the call and the return must be those of the instruction that was there.

use std::{
    arch::asm,
    fmt::Debug,
    os::fd::{
        AsRawFd,
        OwnedFd, //
    },
    ptr, //
};

use perf_aux::{
    check,
    check_eq,
    fail,
    load::{
        pin,
        pipe,
        Child, //
    },
    ring::{
        AuxMode,
        Ring, //
    },
    skip,
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::density::{
    packets,
    Packet, //
};

pub const TESTS: &[Test] = &[
    Test::new("code.rewritten_by_the_program", |ctx| {
        rewritten(ctx, by_the_program)
    }),
    Test::new("code.rewritten_through_another_mapping", |ctx| {
        rewritten(ctx, through_another_mapping)
    }),
    Test::new("code.rewritten_by_a_thread", |ctx| {
        rewritten(ctx, by_a_thread)
    }),
    Test::new("code.mapped_anew", |ctx| rewritten(ctx, mapped_anew)),
    Test::new("code.remapped", |ctx| rewritten(ctx, remapped)),
    Test::new("code.of_two_processes", |ctx| {
        rewritten(ctx, of_two_processes)
    }),
    Test::new("code.poked_by_a_debugger", poked_by_a_debugger),
    Test::new("code.across_pages", |ctx| rewritten(ctx, across_pages)),
];

/// Where the function is, unless it is to be on two pages.
const PAGE: usize = 0x10_0000_0000;
const PAGE_SIZE: usize = 4096;

/// The first instruction, of two bytes; a `nop` and a `ret` follow. The register that `jmp` takes
/// holds the address of the `ret`, and the zero flag is set.
const FIRST: [[u8; 2]; 6] = [
    [0xeb, 0x01], // jmp to the ret
    [0x74, 0x01], // jz to the ret
    [0x66, 0x90], // nop
    [0xff, 0xe0], // jmp *%rax
    [0x75, 0x01], // jnz to the ret
    [0x31, 0xc0], // xor %eax, %eax
];

const ROUNDS: usize = 60;

/// What the packets between the call and the return say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    Taken,
    NotTaken,
    /// A TIP to the `ret`.
    Target,
}

/// What the first instruction has to have said in each round.
fn expected() -> Vec<Said> {
    let said = [
        Said::Nothing,
        Said::Taken,
        Said::Nothing,
        Said::Target,
        Said::NotTaken,
        Said::Nothing,
    ];
    (0..ROUNDS).map(|round| said[round % said.len()]).collect()
}

fn first(round: usize) -> [u8; 2] {
    FIRST[round % FIRST.len()]
}

/// Lets no other program run on this CPU until this one sleeps; where that is not allowed, the
/// packets of another may come between.
fn alone(alone: bool) {
    let param = libc::sched_param {
        sched_priority: i32::from(alone),
    };
    let policy = if alone {
        libc::SCHED_FIFO
    } else {
        libc::SCHED_OTHER
    };
    // SAFETY: The parameter is there.
    unsafe { libc::sched_setscheduler(0, policy, &raw const param) };
}

/// Runs the function at `code`.
///
/// The system call ahead of it ends what packets are held back.
#[inline(never)]
fn call(code: usize) {
    alone(true);
    // SAFETY: `code` is a function that changes no register and no memory, and `getpid` has no
    // effect.
    unsafe {
        asm!(
            "mov eax, 39",
            "syscall",
            "lea rax, [r8 + 3]",
            "cmp edx, edx",
            "call r8",
            in("r8") code,
            out("rax") _,
            out("rcx") _,
            out("r11") _,
        );
    }
    alone(false);
}

/// Puts the first instruction of `round`, and the rest of the function, to `at`.
fn put(at: usize, round: usize) {
    let [one, two] = first(round);
    // SAFETY: The callers pass five bytes of writable memory, where no Rust object is.
    unsafe { ptr::copy_nonoverlapping([one, two, 0x90, 0xc3].as_ptr(), at as *mut u8, 4) };
}

/// Maps one page of `fd`, or of no file, for good; false if that fails.
fn map(at: usize, fd: i32, protection: i32) -> bool {
    let anonymous = if fd < 0 {
        libc::MAP_ANONYMOUS | libc::MAP_PRIVATE
    } else {
        libc::MAP_SHARED
    };
    // SAFETY: The address is far from all that this program has mapped.
    let got = unsafe {
        libc::mmap(
            at as *mut _,
            PAGE_SIZE,
            protection,
            anonymous | libc::MAP_FIXED,
            fd,
            0,
        )
    };
    got as usize == at
}

const RWX: i32 = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;

fn memory_file() -> i32 {
    // SAFETY: The name is a C string.
    unsafe {
        let fd = libc::memfd_create(c"code".as_ptr(), libc::MFD_CLOEXEC);
        libc::ftruncate(fd, PAGE_SIZE as libc::off_t);
        fd
    }
}

/// Each way runs the function [`ROUNDS`] times at [`PAGE`], rewritten before each; it returns
/// whether it could.
type Way = fn() -> bool;

fn by_the_program() -> bool {
    if !map(PAGE, -1, RWX) {
        return false;
    }
    for round in 0..ROUNDS {
        put(PAGE, round);
        call(PAGE);
    }
    true
}

fn through_another_mapping() -> bool {
    let fd = memory_file();
    let other = PAGE + 16 * PAGE_SIZE;
    if !map(PAGE, fd, RX) || !map(other, fd, RW) {
        return false;
    }
    for round in 0..ROUNDS {
        put(other, round);
        call(PAGE);
    }
    true
}

/// The two sides of a program take turns.
struct Turns {
    wait: OwnedFd,
    pass: OwnedFd,
}

impl Turns {
    fn both() -> Option<(Self, Self)> {
        let (one, two) = (pipe().ok()?, pipe().ok()?);
        let (first, second) = (
            Turns {
                wait: one.0,
                pass: two.1,
            },
            Turns {
                wait: two.0,
                pass: one.1,
            },
        );
        Some((first, second))
    }

    fn wait(&self) -> bool {
        let mut byte = 0u8;
        // SAFETY: One byte of live memory.
        unsafe { libc::read(self.wait.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 }
    }

    fn pass(&self) {
        // SAFETY: One byte of live memory.
        unsafe { libc::write(self.pass.as_raw_fd(), [0u8].as_ptr().cast(), 1) };
    }
}

fn by_a_thread() -> bool {
    let Some((own, other)) = Turns::both() else {
        return false;
    };
    if !map(PAGE, -1, RWX) {
        return false;
    }
    let writer = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            put(PAGE, round);
            other.pass();
            if !other.wait() {
                break;
            }
        }
    });
    for _ in 0..ROUNDS {
        if !own.wait() {
            return false;
        }
        call(PAGE);
        own.pass();
    }
    writer.join().is_ok()
}

fn mapped_anew() -> bool {
    for round in 0..ROUNDS {
        if !map(PAGE, -1, RW) {
            return false;
        }
        put(PAGE, round);
        // SAFETY: The page was mapped just now, and holds no Rust object.
        unsafe {
            if libc::mprotect(PAGE as *mut _, PAGE_SIZE, RX) < 0 {
                return false;
            }
        }
        call(PAGE);
        // SAFETY: As above.
        unsafe { libc::munmap(PAGE as *mut _, PAGE_SIZE) };
    }
    true
}

/// One page for each instruction, moved to the place in turns.
fn remapped() -> bool {
    let files: Vec<i32> = FIRST.iter().map(|_| memory_file()).collect();
    for (round, fd) in files.iter().enumerate() {
        if !map(PAGE, *fd, RW) {
            return false;
        }
        put(PAGE, round);
    }
    for round in 0..ROUNDS {
        if !map(PAGE, files[round % files.len()], RX) {
            return false;
        }
        call(PAGE);
    }
    true
}

/// Two processes in turns, each with the code of every second round at the same address.
fn of_two_processes() -> bool {
    let Some((own, other)) = Turns::both() else {
        return false;
    };
    if !map(PAGE, -1, RWX) {
        return false;
    }
    let every_second = |first: usize, turns: &Turns| {
        (first..ROUNDS).step_by(2).all(|round| {
            if round > 0 && !turns.wait() {
                return false;
            }
            put(PAGE, round);
            call(PAGE);
            turns.pass();
            true
        })
    };
    // SAFETY: The process has one thread.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let done = every_second(1, &other);
        // SAFETY: Ends the child.
        unsafe { libc::_exit(i32::from(!done)) };
    }
    let done = every_second(0, &own);
    let mut status = 0;
    // SAFETY: The child is ours.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    done && status == 0
}

/// The first instruction begins on one page and ends on the next.
fn across_pages() -> bool {
    let second = PAGE + PAGE_SIZE;
    if !map(PAGE, -1, RWX) || !map(second, -1, RWX) {
        return false;
    }
    for round in 0..ROUNDS {
        put(second - 1, round);
        call(second - 1);
    }
    true
}

/// The packets of each call of the function at `code`.
fn said(trace: &[u8], code: u64) -> Result<Vec<Said>, Stop> {
    let mut all = Vec::new();
    let mut open: Option<Vec<Packet>> = None;
    for packet in packets(trace)? {
        if !matches!(packet, Packet::To(_) | Packet::Tnt(..)) {
            continue;
        }
        match &mut open {
            None => open = (packet == Packet::To(code)).then(Vec::new),
            Some(within) => match (packet, &within[..]) {
                (Packet::Tnt(..), []) => within.push(packet),
                (Packet::To(to), []) if to == code + 3 => within.push(packet),
                // The return.
                (Packet::To(_), _) => {
                    all.push(match within[..] {
                        [] => Said::Nothing,
                        [Packet::Tnt(bits, 1)] if bits & 1 != 0 => Said::Taken,
                        [Packet::Tnt(_, 1)] => Said::NotTaken,
                        [Packet::To(_)] => Said::Target,
                        _ => fail!("a call with the packets {within:x?}"),
                    });
                    open = None;
                }
                _ => fail!("a call with the packets {within:x?} and {packet:x?}"),
            },
        }
    }
    Ok(all)
}

fn compare<T: PartialEq + Debug>(got: &[T], want: &[T]) -> Outcome {
    check_eq!(got.len(), want.len(), "calls in the trace");
    for (round, (got, want)) in got.iter().zip(want).enumerate() {
        check!(got == want, "round {round} says {got:?}, expected {want:?}");
    }
    Ok(())
}

/// Traces `child` while `act` makes it run, and compares what the trace says of the function at
/// `code`.
fn traced(ctx: &Ctx, child: Child, code: usize, act: impl FnOnce(Child) -> Outcome) -> Outcome {
    let pmu = ctx.pmu()?;
    let Some(config) = pmu.config("noretcomp", 1)? else {
        skip!("{} can't leave returns uncompressed", pmu.name());
    };
    let event = pmu.event(config).pid(child.pid()).cpu(0).inherit().open()?;
    let ring = Ring::map(&event, 8)?;
    let aux = ring.map_aux(&event, 2048, AuxMode::Full)?;
    event.enable()?;
    act(child)?;
    let size = ring.aux_head() as usize;
    check!(size < aux.size(), "the trace does not fit into the area");
    compare(&said(&aux.bytes(0, size), code as u64)?, &expected())
}

fn rewritten(ctx: &Ctx, way: Way) -> Outcome {
    let child = Child::new(move || match pin(0).is_ok() && way() {
        true => 0,
        false => 1,
    })?;
    let code = match way as usize == across_pages as usize {
        true => PAGE + PAGE_SIZE - 1,
        false => PAGE,
    };
    traced(ctx, child, code, |child| {
        check_eq!(child.wait()?, 0, "exit code of the traced program");
        Ok(())
    })
}

/// A debugger writes the instruction while the program is stopped.
fn poked_by_a_debugger(ctx: &Ctx) -> Outcome {
    let child = Child::new(|| {
        // SAFETY: Plain numbers.
        let traced = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) } == 0;
        if !traced || pin(0).is_err() || !map(PAGE, -1, RWX) {
            return 1;
        }
        put(PAGE, 0);
        for _ in 0..ROUNDS {
            // SAFETY: Plain numbers.
            unsafe { libc::raise(libc::SIGSTOP) };
            call(PAGE);
        }
        0
    })?;
    traced(ctx, child, PAGE, |mut child| {
        let pid = child.pid();
        child.go()?;
        for round in 0..ROUNDS {
            let mut status = 0;
            // SAFETY: waitpid() writes one status.
            unsafe { libc::waitpid(pid, &raw mut status, 0) };
            check!(libc::WIFSTOPPED(status), "the program ended: {status:#x}");
            let [one, two] = first(round);
            let word = u64::from_le_bytes([one, two, 0x90, 0xc3, 0, 0, 0, 0]);
            // SAFETY: The requests take numbers.
            let done = unsafe {
                libc::ptrace(libc::PTRACE_POKETEXT, pid, PAGE, word) == 0
                    && libc::ptrace(libc::PTRACE_CONT, pid, 0usize, 0usize) == 0
            };
            check!(done, "ptrace in round {round} failed");
        }
        check_eq!(child.wait()?, 0, "exit code of the traced program");
        Ok(())
    })
}
