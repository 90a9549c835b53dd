// SPDX-License-Identifier: GPL-2.0

//! The kernel's instruction decoder.
//!
//! C header: [`arch/x86/include/asm/insn.h`](srctree/arch/x86/include/asm/insn.h)

use super::{
    super::bindings,
    Insn,
    Kind, //
};
use crate::prelude::*;

pub(super) const MAX_LEN: usize = Insn::MAX_LEN as usize;

/// The prefix of APX.
const REX2: u8 = 0xd5;
/// `REX2.M0`.
const REX2_M: u8 = 1 << 7;

impl Insn {
    /// Decodes the instruction at the start of `bytes`; [`None`] if they do not hold a whole one.
    pub(super) fn decode(bytes: &[u8], long_mode: bool) -> Option<Self> {
        let mut insn: bindings::insn = pin_init::zeroed();

        // SAFETY: `insn` is ours, and the decoder reads no more than `bytes.len()` bytes.
        let (opcode, rex2) = unsafe {
            bindings::insn_init(
                &mut insn,
                bytes.as_ptr().cast(),
                bytes.len() as c_int,
                c_int::from(long_mode),
            );
            if bindings::insn_get_opcode(&mut insn) < 0 {
                return None;
            }
            // All variants of the unions are plain integers.
            if insn.__bindgen_anon_1.vex_prefix.__bindgen_anon_1.value != 0 {
                return Some(Self::OTHER);
            }
            let rex = insn.rex_prefix.__bindgen_anon_1.bytes;
            (
                insn.opcode.__bindgen_anon_1.bytes,
                (rex[0] == REX2).then_some(rex[1]),
            )
        };
        // The prefix says which table the opcode is from, in place of the byte 0x0f.
        let opcode = match rex2 {
            Some(bits) if bits & REX2_M != 0 => [0x0f, opcode[0], 0, 0],
            _ => opcode,
        };

        let kind = match opcode {
            [0xa1, ..] if rex2.is_some() => Kind::IndirectJump,
            [0x0f, 0x05 | 0x34, ..] => Kind::Syscall,
            [0x0f, 0x80..=0x8f, ..] => Kind::Conditional,
            [0x0f, 0xb2, ..] => Kind::LoadStackSegment,
            [0x0f, ..] => Kind::Other,
            [0x70..=0x7f | 0xe0..=0xe3, ..] => Kind::Conditional,
            [0xe9 | 0xeb, ..] => Kind::Jump,
            [0xe8, ..] => Kind::Call,
            [0xc2 | 0xc3, ..] => Kind::Return,
            [0xca | 0xcb | 0xea | 0x9a, ..] => Kind::Far,
            [0xcf, ..] => Kind::InterruptReturn,
            [0xcc, ..] => Kind::Breakpoint,
            [0xcd | 0xce, ..] => Kind::Interrupt,
            [0xf1, ..] => Kind::DebugTrap,
            [0x9c, ..] => Kind::PushFlags,
            [0x9d, ..] => Kind::PopFlags,
            [0x17, ..] if !long_mode => Kind::LoadStackSegment,
            [first @ (0x8e | 0xff), ..] => {
                // SAFETY: As above.
                let modrm = unsafe {
                    if bindings::insn_get_modrm(&mut insn) < 0 {
                        return None;
                    }
                    insn.modrm.__bindgen_anon_1.bytes[0]
                };
                match (first, (modrm >> 3) & 7) {
                    (0x8e, 2) => Kind::LoadStackSegment,
                    (0xff, 2) => Kind::IndirectCall,
                    (0xff, 4) => Kind::IndirectJump,
                    (0xff, 3 | 5) => Kind::Far,
                    _ => Kind::Other,
                }
            }
            _ => Kind::Other,
        };
        if kind == Kind::Other {
            return Some(Self::OTHER);
        }

        // SAFETY: As above.
        if unsafe { bindings::insn_get_length(&mut insn) } < 0 {
            return None;
        }
        Some(Self {
            kind,
            len: insn.length,
        })
    }
}

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_insn)]
mod tests {
    use super::*;

    fn kind(bytes: &[u8]) -> Option<Kind> {
        Insn::decode(bytes, true).map(|insn| insn.kind)
    }

    fn len(bytes: &[u8]) -> Option<u8> {
        Insn::decode(bytes, true).map(|insn| insn.len)
    }

    #[test]
    fn branches() {
        assert_eq!(kind(&[0x74, 0x10]), Some(Kind::Conditional));
        assert_eq!(kind(&[0x0f, 0x8f, 0, 0, 0, 0]), Some(Kind::Conditional));
        assert_eq!(kind(&[0xe3, 0x00]), Some(Kind::Conditional));
        assert_eq!(kind(&[0xeb, 0xfe]), Some(Kind::Jump));
        assert_eq!(kind(&[0xe8, 0, 0, 0, 0]), Some(Kind::Call));
        assert_eq!(kind(&[0xff, 0xd0]), Some(Kind::IndirectCall));
        assert_eq!(kind(&[0x41, 0xff, 0xe3]), Some(Kind::IndirectJump));
        assert_eq!(kind(&[0xff, 0x35, 0, 0, 0, 0]), Some(Kind::Other));
        assert_eq!(kind(&[0xf3, 0xc3]), Some(Kind::Return));
        assert_eq!(kind(&[0x48, 0xcf]), Some(Kind::InterruptReturn));
        assert_eq!(kind(&[0x0f, 0x05]), Some(Kind::Syscall));
        assert_eq!(kind(&[0xcd, 0x80]), Some(Kind::Interrupt));
        assert_eq!(kind(&[0xcc]), Some(Kind::Breakpoint));
        assert_eq!(kind(&[0xf1]), Some(Kind::DebugTrap));
    }

    #[test]
    fn flags_and_stack_segment() {
        assert_eq!(kind(&[0x9c]), Some(Kind::PushFlags));
        assert_eq!(kind(&[0x66, 0x9c]), Some(Kind::PushFlags));
        assert_eq!(kind(&[0x9d]), Some(Kind::PopFlags));
        assert_eq!(kind(&[0x8e, 0xd0]), Some(Kind::LoadStackSegment));
        assert_eq!(kind(&[0x8e, 0xd8]), Some(Kind::Other));
    }

    #[test]
    fn apx() {
        // jmpabs.
        let jmpabs = [0xd5, 0x00, 0xa1, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(kind(&jmpabs), Some(Kind::IndirectJump));
        assert_eq!(len(&jmpabs), Some(11));
        // setl and setge have no 0x0f ahead with REX2, and are no pushf and popf; nor is lss.
        assert_eq!(kind(&[0xd5, 0x80, 0x9c, 0xc0]), Some(Kind::Other));
        assert_eq!(kind(&[0xd5, 0x80, 0x9d, 0xc0]), Some(Kind::Other));
        assert_eq!(
            kind(&[0xd5, 0x80, 0xb2, 0x00]),
            Some(Kind::LoadStackSegment)
        );
        assert_eq!(kind(&[0xd5, 0x00, 0x9c]), Some(Kind::PushFlags));
        assert_eq!(kind(&[0xd5, 0x11, 0xff, 0xd0]), Some(Kind::IndirectCall));
    }

    #[test]
    fn lengths() {
        assert_eq!(len(&[0xe8, 1, 2, 3, 4]), Some(5));
        assert_eq!(len(&[0x2e, 0x74, 0x00]), Some(3));
        assert_eq!(len(&[0xff, 0x15, 0, 0, 0, 0]), Some(6));
        assert_eq!(len(&[0xc2, 0x08, 0x00]), Some(3));
    }

    #[test]
    fn vector_instructions_are_no_branches() {
        // vmovdqu ymm: its second opcode byte would be `outs`; vpand's is in the `jcc` range.
        assert_eq!(kind(&[0xc5, 0xfe, 0x6f, 0x06]), Some(Kind::Other));
        assert_eq!(kind(&[0xc5, 0xfd, 0x74, 0x06]), Some(Kind::Other));
    }

    #[test]
    fn cut_short() {
        assert_eq!(kind(&[]), None);
        assert_eq!(kind(&[0x0f]), None);
        assert_eq!(kind(&[0xff]), None);
        assert_eq!(kind(&[0xe8, 0, 0]), None);
    }

    /// Each pair of first bytes that the short way knows, with what may follow, the long way too.
    /// What the kernel's decoder knows no instruction for is none that could retire.
    #[test]
    fn quick_agrees() {
        for first in 0..=0xffff_u16 {
            for rest in [0u8, 0x05, 0x24, 0x25, 0x5c, 0x90, 0xd0, 0xe3, 0xff] {
                let mut bytes = [rest; MAX_LEN];
                bytes[..2].copy_from_slice(&first.to_le_bytes());
                let code = bytes
                    .first_chunk()
                    .map_or(0, |code| u64::from_le_bytes(*code));
                if let Some(quick) = Insn::quick(code) {
                    assert_eq!(quick, Insn::decode(&bytes, true).unwrap_or(Insn::OTHER));
                }
            }
        }
    }
}
