// SPDX-License-Identifier: GPL-2.0

//! The stepper's short way to tell instructions apart, against an independent decoder.

use crate::insn::{
    Insn,
    Kind, //
};
use iced_x86::{
    Decoder,
    DecoderOptions,
    FlowControl,
    Instruction,
    Mnemonic,
    OpKind,
    Register, //
};
use proptest::prelude::*;

/// What the instruction is; `None` if it is none.
fn kind(instruction: &Instruction) -> Option<Kind> {
    let loads_ss = match instruction.mnemonic() {
        Mnemonic::Lss => true,
        Mnemonic::Mov | Mnemonic::Pop => {
            instruction.op0_kind() == OpKind::Register && instruction.op0_register() == Register::SS
        }
        _ => false,
    };
    if loads_ss {
        return Some(Kind::LoadStackSegment);
    }
    let far = instruction.is_jmp_far()
        || instruction.is_call_far()
        || instruction.is_jmp_far_indirect()
        || instruction.is_call_far_indirect();
    Some(match instruction.mnemonic() {
        Mnemonic::INVALID => return None,
        Mnemonic::Pushf | Mnemonic::Pushfd | Mnemonic::Pushfq => Kind::PushFlags,
        Mnemonic::Popf | Mnemonic::Popfd | Mnemonic::Popfq => Kind::PopFlags,
        Mnemonic::Syscall | Mnemonic::Sysenter => Kind::Syscall,
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => Kind::InterruptReturn,
        Mnemonic::Int => Kind::Interrupt,
        Mnemonic::Int3 => Kind::Breakpoint,
        Mnemonic::Int1 => Kind::DebugTrap,
        Mnemonic::Retf => Kind::Far,
        _ if far => Kind::Far,
        Mnemonic::Ret => Kind::Return,
        Mnemonic::Call => match instruction.flow_control() {
            FlowControl::Call => Kind::Call,
            _ => Kind::IndirectCall,
        },
        Mnemonic::Jmp => match instruction.flow_control() {
            FlowControl::UnconditionalBranch => Kind::Jump,
            _ => Kind::IndirectJump,
        },
        _ if instruction.flow_control() == FlowControl::ConditionalBranch => Kind::Conditional,
        _ => Kind::Other,
    })
}

/// Whether the short way knows the instruction; panics if it is wrong about it.
fn check(bytes: [u8; 15]) -> bool {
    let code = u64::from_le_bytes(bytes[..8].try_into().expect("there are 15"));
    let Some(quick) = Insn::quick(code) else {
        return false;
    };
    // What it can't know are instructions that the stepper has to take care with.
    assert!(!quick.kind.is_odd(), "{bytes:02x?}");
    let ip = 0x40_0000;
    let instruction = Decoder::with_ip(64, &bytes, ip, DecoderOptions::NONE).decode();
    // What is no instruction does not retire.
    if let Some(kind) = kind(&instruction) {
        assert_eq!(quick.kind, kind, "{bytes:02x?}: {instruction:?}");
        let branch = kind != Kind::Other;
        assert_eq!(quick.may_branch(ip, instruction.next_ip()), branch);
        if kind != Kind::Other {
            assert_eq!(usize::from(quick.len), instruction.len(), "{bytes:02x?}");
        }
    }
    true
}

/// Each three first bytes, with what may follow.
#[test]
fn three_bytes() {
    for first in 0..1u32 << 24 {
        for rest in [0x00, 0x25, 0xe8] {
            let mut bytes = [rest; 15];
            bytes[..3].copy_from_slice(&first.to_le_bytes()[..3]);
            check(bytes);
        }
    }
}

/// The instructions that programs run most are among those it knows.
#[test]
fn common_ones_are_known() {
    for code in [
        "4889e5",
        "8b45fc",
        "488d3d00000000",
        "7510",
        "0f8410000000",
        "e800000000",
        "c3",
        "f3c3",
        "ff2500000000",
        "41ffe3",
        "ffd0",
        "31c0",
        "660f6f06",
        "f30f1efa",
        "c5fe6f06",
        "62f17c481006",
        "6690",
        "f3a4",
        "0f1f4000",
        "55",
        "5d",
        "eb05",
        "e900000000",
        "64488b042528000000",
        "f20f5ac0",
        "660f3a0fc108",
        "0fb6c0",
        "90",
        "f390",
        "4c0fafc1",
        "3effe0",
    ] {
        let mut bytes = [0; 15];
        for (byte, digits) in bytes.iter_mut().zip(code.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).expect("digits");
            *byte = u8::from_str_radix(digits, 16).expect("digits");
        }
        // Branches with prefixes are for the kernel's decoder.
        assert_eq!(check(bytes), !["f3c3", "3effe0"].contains(&code), "{code}");
    }
}

proptest! {
    /// Any bytes.
    #[test]
    fn any_bytes(bytes in any::<[u8; 15]>()) {
        check(bytes);
    }

    /// Prefixes, in any order.
    #[test]
    fn any_prefixes(
        prefixes in prop::collection::vec(
            prop::sample::select(
                &b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3\x40\x48\x4f"[..],
            ),
            0..6,
        ),
        rest in any::<[u8; 15]>(),
    ) {
        let mut bytes = rest;
        bytes[..prefixes.len()].copy_from_slice(&prefixes);
        check(bytes);
    }
}
