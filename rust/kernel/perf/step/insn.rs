// SPDX-License-Identifier: GPL-2.0

//! What an x86 instruction does to the flow of control, and the short way to find out.
//!
//! Every step asks for that. The kernel's decoder takes some hundred instructions to answer, for
//! it tells much more. Nearly all instructions that programs run are told apart by one or two
//! bytes, which is what [`Insn::quick`] looks at; the others are left to the kernel's decoder.
//! There is no memory of what was decoded before, so there is none to go stale when code changes.
//!
//! This is pure logic: no kernel types, no memory is touched. The same file is tested on the host.

/// The kinds of instruction that matter to whoever follows the flow of control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Execution goes on behind it. (A string instruction with `rep` may also stay.)
    Other,
    /// `jcc`, `loop`, `jrcxz`: to the target in it, or on.
    Conditional,
    /// `jmp` to the target in it.
    Jump,
    /// `call` of the target in it.
    Call,
    /// `jmp` to where a register or memory says, or `jmpabs`, which is traced as such.
    IndirectJump,
    /// `call` of what a register or memory says.
    IndirectCall,
    /// `ret`.
    Return,
    /// `iret`: like a far return, and loads the flags.
    InterruptReturn,
    /// A far `jmp`, `call` or `ret`.
    Far,
    /// `syscall`, `sysenter`.
    Syscall,
    /// `int n`, `into`.
    Interrupt,
    /// `int3`, which the program may contain, or somebody who observes it may have put there.
    Breakpoint,
    /// `int1`, whose trap belongs to the program.
    DebugTrap,
    /// `pushf`.
    PushFlags,
    /// `popf`.
    PopFlags,
    /// `mov` or `pop` to `%ss`, or `lss`: the trap after it may be put off to the end of the next
    /// instruction.
    LoadStackSegment,
}

impl Kind {
    /// Whether the trap of such an instruction does not come, or not right behind it, or in code of
    /// another kind.
    #[inline]
    pub(super) const fn is_odd(self) -> bool {
        matches!(
            self,
            Self::Syscall
                | Self::Interrupt
                | Self::Breakpoint
                | Self::DebugTrap
                | Self::LoadStackSegment
                | Self::Far
                | Self::InterruptReturn
        )
    }
}

/// An instruction, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insn {
    /// What it does.
    pub kind: Kind,
    /// Its length in bytes; 0 for [`Kind::Other`], where nobody asks.
    pub len: u8,
}

impl Insn {
    pub(super) const OTHER: Self = Self {
        kind: Kind::Other,
        len: 0,
    };

    /// The longest x86 instruction, in bytes.
    pub const MAX_LEN: u8 = 15;

    /// Whether what went on at `to` after the instruction at `from` can have been a branch. If not,
    /// it is [`Kind::Other`].
    #[inline]
    pub fn may_branch(&self, from: u64, to: u64) -> bool {
        self.kind != Kind::Other || to.wrapping_sub(from) > u64::from(Self::MAX_LEN)
    }

    /// Decodes an instruction of 64-bit code, whose first eight bytes are `code`, if it is one of
    /// the common ones. All that it looks at is in those eight bytes.
    #[inline(always)]
    pub(super) fn quick(code: u64) -> Option<Self> {
        let (code, rex) = match CLASSES[usize::from(code as u8)] {
            Class::Rex => (code >> 8, 1),
            _ => (code, 0),
        };
        match CLASSES[usize::from(code as u8)] {
            Class::Other => Some(Self::OTHER),
            Class::Branch(kind, len) => Some(Self {
                kind,
                len: rex + len,
            }),
            Class::TwoBytes => match (code >> 8) as u8 {
                0x80..=0x8f => Some(Self {
                    kind: Kind::Conditional,
                    len: rex + 6,
                }),
                second => two_bytes_other(second),
            },
            Class::Group5 => {
                let modrm = (code >> 8) as u8;
                let kind = match (modrm >> 3) & 7 {
                    2 => Kind::IndirectCall,
                    4 => Kind::IndirectJump,
                    3 | 5 => return None,
                    _ => return Some(Self::OTHER),
                };
                Some(Self {
                    kind,
                    len: rex + 1 + operand_len(modrm, (code >> 16) as u8),
                })
            }
            Class::Prefix if rex == 0 => prefixed(code),
            Class::Prefix | Class::Rex | Class::Rare => None,
        }
    }
}

/// What the first byte of an instruction of 64-bit code says.
#[derive(Clone, Copy)]
enum Class {
    /// Not enough, or something that is rare.
    Rare,
    /// [`Insn::OTHER`], whatever follows.
    Other,
    /// A branch, and its length.
    Branch(Kind, u8),
    /// The second byte tells.
    TwoBytes,
    /// The ModRM byte tells.
    Group5,
    /// The REX prefix, which the opcode follows.
    Rex,
    /// Another prefix.
    Prefix,
}

const CLASSES: [Class; 256] = {
    let mut classes = [Class::Rare; 256];
    let mut byte = 0;
    while byte < classes.len() {
        classes[byte] = match byte as u8 {
            0x0f => Class::TwoBytes,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3 => Class::Prefix,
            0x40..=0x4f => Class::Rex,
            0x70..=0x7f | 0xe0..=0xe3 => Class::Branch(Kind::Conditional, 2),
            0xc2 => Class::Branch(Kind::Return, 3),
            0xc3 => Class::Branch(Kind::Return, 1),
            0xe8 => Class::Branch(Kind::Call, 5),
            0xe9 => Class::Branch(Kind::Jump, 5),
            0xeb => Class::Branch(Kind::Jump, 2),
            0xff => Class::Group5,
            // Not in 64-bit code.
            0x06 | 0x07 | 0x0e | 0x16 | 0x17 | 0x1e | 0x1f | 0x27 | 0x2f | 0x37 | 0x3f => {
                Class::Rare
            }
            0x60 | 0x61 | 0x82 | 0x9a | 0xce | 0xd4 | 0xd6 | 0xea => Class::Rare,
            // `mov` to `%ss`, `pop` or XOP, `pushf`, `popf`.
            0x8e | 0x8f | 0x9c | 0x9d => Class::Rare,
            // Far returns, interrupts, REX2, `int1`.
            0xca..=0xcd | 0xcf | 0xd5 | 0xf1 => Class::Rare,
            // All else, EVEX and VEX among it.
            _ => Class::Other,
        };
        byte += 1;
    }
    classes
};

/// An instruction whose first byte is 0x0f, by the second byte, if it is no conditional branch.
#[inline]
const fn two_bytes_other(second: u8) -> Option<Insn> {
    match second {
        // `syscall`, `sysret`, `sysenter`, `sysexit`, conditional branches, `lss`.
        0x05 | 0x07 | 0x34 | 0x35 | 0x80..=0x8f | 0xb2 => None,
        _ => Some(Insn::OTHER),
    }
}

/// The length of an operand: the ModRM byte and what it asks for.
#[inline]
const fn operand_len(modrm: u8, sib: u8) -> u8 {
    let (mode, register) = (modrm >> 6, modrm & 7);
    let has_sib = mode != 3 && register == 4;
    let displacement = match mode {
        0 if register == 5 || (has_sib && sib & 7 == 5) => 4,
        1 => 1,
        2 => 4,
        _ => 0,
    };
    1 + has_sib as u8 + displacement
}

/// An instruction with one to three legacy prefixes, if it is [`Insn::OTHER`].
#[inline(never)]
fn prefixed(mut code: u64) -> Option<Insn> {
    for _ in 0..3 {
        code >>= 8;
        let class = match CLASSES[usize::from(code as u8)] {
            Class::Prefix => continue,
            Class::Rex => {
                code >>= 8;
                CLASSES[usize::from(code as u8)]
            }
            class => class,
        };
        return match class {
            Class::Other => Some(Insn::OTHER),
            Class::TwoBytes => two_bytes_other((code >> 8) as u8),
            _ => None,
        };
    }
    None
}
