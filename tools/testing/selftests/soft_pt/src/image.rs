// SPDX-License-Identifier: GPL-2.0

//! The executable memory of a program, and what each instruction in it can do.
//!
//! The bytes come from the mapped files, so they are the program's own also where a uprobe or a
//! debugger has put something else into memory. That is what decoders of the trace read, too.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs,
    path::Path, //
};

use iced_x86::{
    Code,
    Decoder,
    DecoderOptions,
    FlowControl,
    Instruction,
    Mnemonic,
    OpKind,
    Register, //
};

/// One executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Map {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub path: String,
}

impl Map {
    /// Reads the executable ones from the text of `/proc/PID/maps`.
    pub fn of_proc_maps(text: &str) -> Vec<Map> {
        text.lines()
            .filter_map(|line| {
                let mut fields = line.split_whitespace();
                let (start, end) = fields.next()?.split_once('-')?;
                let executable = fields.next()?.contains('x');
                let offset = fields.next()?;
                let path = fields.nth(2).unwrap_or("//anon");
                executable.then_some(Map {
                    start: u64::from_str_radix(start, 16).ok()?,
                    end: u64::from_str_radix(end, 16).ok()?,
                    offset: u64::from_str_radix(offset, 16).ok()?,
                    path: path.to_owned(),
                })
            })
            .collect()
    }

    /// Reads one from a line of `perf script --show-mmap-events`, as
    /// `PERF_RECORD_MMAP2 1/1: [0x401000(0x2000) @ 0x1000 00:17 5 0]: r-xp /bin/true`.
    pub fn of_perf_line(line: &str) -> Option<Map> {
        let (_, rest) = line.split_once("PERF_RECORD_MMAP")?;
        let (_, rest) = rest.split_once('[')?;
        let (place, rest) = rest.split_once("]: ")?;
        let (start, rest_of_place) = place.split_once('(')?;
        let (length, rest_of_place) = rest_of_place.split_once(')')?;
        let offset = rest_of_place
            .trim_start()
            .strip_prefix('@')?
            .split_whitespace()
            .next()?;
        let (protection, path) = rest.split_once(' ')?;
        let start = number(start)?;
        protection.contains('x').then_some(Map {
            start,
            end: start + number(length)?,
            offset: number(offset)?,
            path: path.trim().to_owned(),
        })
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The bytes of the vDSO of this kernel; every process has the same.
fn vdso() -> Option<Vec<u8>> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let map = Map::of_proc_maps(&maps)
        .into_iter()
        .find(|map| map.path == "[vdso]")?;
    let length = (map.end - map.start) as usize;
    // SAFETY: The kernel keeps the vDSO mapped and readable for as long as the process lives.
    Some(unsafe { std::slice::from_raw_parts(map.start as *const u8, length) }.to_vec())
}

/// Reads a little-endian number out of an ELF file.
fn field(elf: &[u8], offset: usize, size: usize) -> Option<u64> {
    let mut value = [0; 8];
    value[..size].copy_from_slice(elf.get(offset..offset.checked_add(size)?)?);
    Some(u64::from_le_bytes(value))
}

struct Load {
    executable: bool,
    offset: u64,
    address: u64,
    size: u64,
}

/// The loaded segments of a 64-bit ELF file.
fn loads(elf: &[u8]) -> Option<Vec<Load>> {
    const PT_LOAD: u64 = 1;
    const PF_X: u64 = 1;
    let table = field(elf, 32, 8)? as usize;
    let (size, count) = (field(elf, 54, 2)? as usize, field(elf, 56, 2)? as usize);
    let mut found = Vec::new();
    for header in (0..count).map(|n| table + n * size) {
        if field(elf, header, 4)? == PT_LOAD {
            found.push(Load {
                executable: field(elf, header + 4, 4)? & PF_X != 0,
                offset: field(elf, header + 8, 8)?,
                address: field(elf, header + 16, 8)?,
                size: field(elf, header + 32, 8)?,
            });
        }
    }
    Some(found)
}

/// A symbol of an ELF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Where it is linked to be.
    pub address: u64,
    /// Where it is in the file.
    pub offset: u64,
    /// Its size in bytes, 0 if the file does not tell.
    pub size: u64,
}

/// A symbol of a 64-bit ELF file, by its name.
pub fn symbol(elf: &[u8], name: &str) -> Option<Symbol> {
    const SHT_SYMTAB: u64 = 2;
    const SYMBOL: usize = 24;
    let table = field(elf, 40, 8)? as usize;
    let (size, count) = (field(elf, 58, 2)? as usize, field(elf, 60, 2)? as usize);
    let section = |n: usize| table + n * size;
    let symbols = (0..count)
        .map(section)
        .find(|at| field(elf, at + 4, 4) == Some(SHT_SYMTAB))?;
    let strings = section(field(elf, symbols + 40, 4)? as usize);
    let strings = field(elf, strings + 24, 8)? as usize;
    let start = field(elf, symbols + 24, 8)? as usize;
    let end = start + field(elf, symbols + 32, 8)? as usize;
    let wanted = [name.as_bytes(), b"\0"].concat();
    let (address, size) = (start..end).step_by(SYMBOL).find_map(|at| {
        let text = strings + field(elf, at, 4)? as usize;
        let found = elf.get(text..)?.starts_with(&wanted);
        found.then(|| Some((field(elf, at + 8, 8)?, field(elf, at + 16, 8)?)))?
    })?;
    let load = loads(elf)?
        .into_iter()
        .find(|load| (load.address..load.address + load.size).contains(&address))?;
    Some(Symbol {
        address,
        offset: address - load.address + load.offset,
        size,
    })
}

struct Piece {
    map: Map,
    bytes: Vec<u8>,
}

/// Where control can be after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// At the next instruction only.
    Next,
    /// At the given address only.
    To(u64),
    /// At the next instruction or at the given address.
    Either(u64),
    /// Anywhere that is executable.
    Anywhere,
    /// In the kernel, which goes on after the instruction or where it likes.
    Kernel,
}

/// The executable memory of one address space.
pub struct Image {
    pieces: Vec<Piece>,
    decoded: RefCell<HashMap<u64, Option<Instruction>>>,
}

impl Image {
    /// Reads the files behind `maps`. Mappings without a file are left out.
    pub fn load(maps: &[Map]) -> Self {
        let mut pieces: Vec<Piece> = Vec::new();
        for map in maps {
            if pieces.iter().any(|piece| piece.map == *map) {
                continue;
            }
            let bytes = if map.path == "[vdso]" {
                vdso()
            } else {
                Self::file(map)
            };
            if let Some(bytes) = bytes {
                pieces.push(Piece {
                    map: map.clone(),
                    bytes,
                });
            }
        }
        Image {
            pieces,
            decoded: RefCell::new(HashMap::new()),
        }
    }

    /// The executable memory of a statically linked program at a fixed address.
    pub fn of_static_program(path: &Path) -> Result<Self, String> {
        Ok(Self::load(&Self::maps_of_static_program(path)?))
    }

    /// What will be mapped of a statically linked program at a fixed address.
    pub fn maps_of_static_program(path: &Path) -> Result<Vec<Map>, String> {
        let elf = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let loads =
            loads(&elf).ok_or_else(|| format!("{}: not a complete ELF file", path.display()))?;
        Ok(loads
            .into_iter()
            .filter(|load| load.executable)
            .map(|load| Map {
                start: load.address,
                end: load.address + load.size,
                offset: load.offset,
                path: path.to_string_lossy().into_owned(),
            })
            .collect())
    }

    fn file(map: &Map) -> Option<Vec<u8>> {
        let path = Path::new(&map.path);
        if !path.is_absolute() || !path.is_file() {
            return None;
        }
        let all = fs::read(path).ok()?;
        let from = usize::try_from(map.offset).ok()?;
        let to = all.len().min(from + (map.end - map.start) as usize);
        Some(all.get(from..to)?.to_vec())
    }

    /// Whether the address is in executable memory whose bytes are known.
    pub fn contains(&self, address: u64) -> bool {
        self.bytes(address).is_some()
    }

    fn bytes(&self, address: u64) -> Option<&[u8]> {
        // The last mapping at an address is the one that is there.
        self.pieces.iter().rev().find_map(|piece| {
            let at = address.checked_sub(piece.map.start)?;
            let bytes = piece.bytes.get(usize::try_from(at).ok()?..)?;
            (!bytes.is_empty()).then_some(bytes)
        })
    }

    /// The instruction at an address.
    pub fn instruction(&self, address: u64) -> Option<Instruction> {
        if let Some(known) = self.decoded.borrow().get(&address) {
            return *known;
        }
        let instruction = self.bytes(address).and_then(|bytes| {
            let bytes = &bytes[..bytes.len().min(15)];
            let mut decoder = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE);
            let instruction = decoder.decode();
            (!instruction.is_invalid()).then_some(instruction)
        });
        self.decoded.borrow_mut().insert(address, instruction);
        instruction
    }

    /// Where control can be after the instruction at this address.
    pub fn flow(&self, address: u64) -> Option<Flow> {
        let instruction = self.instruction(address)?;
        let system = matches!(
            instruction.mnemonic(),
            Mnemonic::Syscall | Mnemonic::Sysenter
        );
        Some(match instruction.flow_control() {
            _ if system => Flow::Kernel,
            FlowControl::Next => Flow::Next,
            FlowControl::UnconditionalBranch | FlowControl::Call => {
                Flow::To(instruction.near_branch_target())
            }
            FlowControl::ConditionalBranch => Flow::Either(instruction.near_branch_target()),
            FlowControl::XbeginXabortXend => Flow::Anywhere,
            FlowControl::IndirectBranch | FlowControl::IndirectCall | FlowControl::Return => {
                Flow::Anywhere
            }
            FlowControl::Interrupt | FlowControl::Exception => Flow::Kernel,
        })
    }

    /// Checks that a decoded branch is one that the program can take.
    pub fn check_branch(&self, from: u64, to: u64) -> Result<(), String> {
        let flow = self
            .flow(from)
            .ok_or_else(|| format!("no instruction is known at {from:#x}"))?;
        if !self.contains(to) {
            return Err(format!(
                "{from:#x} -> {to:#x}: the target is not executable"
            ));
        }
        match flow {
            Flow::Next => Err(format!("{from:#x} -> {to:#x}: not a branch instruction")),
            Flow::To(target) | Flow::Either(target) if target != to => Err(format!(
                "{from:#x} -> {to:#x}: the branch goes to {target:#x}"
            )),
            _ => Ok(()),
        }
    }

    /// Checks that `to` can be the instruction run after `from` without the kernel's doing.
    pub fn check_step(&self, from: u64, to: u64) -> Result<(), String> {
        let next = self
            .instruction(from)
            .ok_or_else(|| format!("no instruction is known at {from:#x}"))?
            .next_ip();
        match self.flow(from) {
            Some(Flow::Next) if to != next => {
                Err(format!("{from:#x} -> {to:#x}: not the next instruction"))
            }
            Some(Flow::To(target)) if to != target => Err(format!(
                "{from:#x} -> {to:#x}: the branch goes to {target:#x}"
            )),
            Some(Flow::Either(target)) if to != target && to != next => Err(format!(
                "{from:#x} -> {to:#x}: the branch goes to {target:#x} or {next:#x}"
            )),
            _ if !self.contains(to) => Err(format!(
                "{from:#x} -> {to:#x}: the target is not executable"
            )),
            _ => Ok(()),
        }
    }

    /// Whether the instruction is a string operation that traps once for each repetition.
    pub fn repeats(&self, address: u64) -> bool {
        self.instruction(address).is_some_and(|instruction| {
            (instruction.has_rep_prefix() || instruction.has_repne_prefix())
                && instruction.is_string_instruction()
        })
    }

    /// Whether the instruction is a system call.
    pub fn enters_kernel(&self, address: u64) -> bool {
        self.instruction(address).is_some_and(|instruction| {
            matches!(
                instruction.mnemonic(),
                Mnemonic::Syscall | Mnemonic::Sysenter | Mnemonic::Int
            )
        })
    }

    /// Whether the instruction holds back the trap until after the one that follows it.
    pub fn defers_trap(&self, address: u64) -> bool {
        self.instruction(address).is_some_and(|instruction| {
            let writes_ss = instruction.op0_kind() == OpKind::Register
                && instruction.op0_register() == Register::SS;
            match instruction.mnemonic() {
                Mnemonic::Mov => writes_ss,
                Mnemonic::Pop => {
                    writes_ss || matches!(instruction.code(), Code::Popw_SS | Code::Popd_SS)
                }
                _ => false,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(bytes: &[u8]) -> Image {
        Image {
            pieces: vec![Piece {
                map: Map {
                    start: 0x1000,
                    end: 0x1000 + bytes.len() as u64,
                    offset: 0,
                    path: String::new(),
                },
                bytes: bytes.to_vec(),
            }],
            decoded: RefCell::new(HashMap::new()),
        }
    }

    #[test]
    fn reads_maps() {
        let proc_maps = "00400000-00401000 r--p 00000000 00:17 5 /x\n\
                         00401000-00403000 r-xp 00001000 00:17 5        /x\n\
                         7ffff000-80000000 r-xp 00000000 00:00 0 \n";
        let maps = Map::of_proc_maps(proc_maps);
        let line = "x 1 1.0: PERF_RECORD_MMAP2 1/1: [0x401000(0x2000) @ 0x1000 00:17 5 0]: r-xp /x";
        assert_eq!(Some(&maps[0]), Map::of_perf_line(line).as_ref());
        assert_eq!(maps[1].path, "//anon");
        assert_eq!(
            Map::of_perf_line("x 1 1.0: PERF_RECORD_COMM exec: x:1/1"),
            None
        );
        let line = "PERF_RECORD_MMAP2 1/1: [0x401000(0x2000) @ 0 00:17 5 0]: r--p /x";
        assert_eq!(Map::of_perf_line(line), None);
    }

    #[test]
    fn knows_the_ways() {
        // nop; jz +2; jmp -5; syscall; mov %eax,%ss; rep movsb; ret
        let image = image(&[
            0x90, 0x74, 0x02, 0xeb, 0xfb, 0x0f, 0x05, 0x8e, 0xd0, 0xf3, 0xa4, 0xc3,
        ]);
        assert_eq!(image.flow(0x1000), Some(Flow::Next));
        assert_eq!(image.flow(0x1001), Some(Flow::Either(0x1005)));
        assert_eq!(image.flow(0x1003), Some(Flow::To(0x1000)));
        assert_eq!(image.flow(0x1005), Some(Flow::Kernel));
        assert_eq!(image.flow(0x100b), Some(Flow::Anywhere));
        assert!(image.defers_trap(0x1007) && !image.defers_trap(0x1000));
        assert!(image.repeats(0x1009) && !image.repeats(0x100b));
        assert!(image.check_branch(0x1001, 0x1005).is_ok());
        assert!(image.check_branch(0x1001, 0x1003).is_err());
        assert!(image.check_branch(0x1000, 0x1001).is_err());
        assert!(image.check_branch(0x100b, 0x2000).is_err());
        assert!(image.check_step(0x1001, 0x1003).is_ok());
        assert!(image.check_step(0x1000, 0x1003).is_err());
        assert!(image.check_step(0x1003, 0x1005).is_err());
    }
}
