// SPDX-License-Identifier: GPL-2.0

//! Finding and parsing records, on any ring contents.
//!
//! [`Data`] is the memory of a data ring and [`Data::record`] the record at a position of it, made
//! contiguous when it crosses the ring's end. [`Record::parse`] takes such a record apart by the
//! [`Format`] of the event that wrote it and insists that the parts fill it exactly. Neither trusts
//! the contents: whatever can't be a record is a [`Malformed`].

use crate::abi;
use std::fmt;
use std::sync::atomic::{
    AtomicU64,
    Ordering, //
};

/// Bytes of a record's header.
pub const HEADER: usize = 8;

/// Why bytes are not a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Malformed {}

impl From<Malformed> for crate::Error {
    fn from(malformed: Malformed) -> Self {
        crate::Error::new(malformed.0)
    }
}

/// Memory that the kernel writes while we read it, `2^n` bytes of it, read in 64-bit pieces.
#[derive(Clone, Copy)]
pub struct Data<'a>(&'a [AtomicU64]);

impl<'a> Data<'a> {
    /// Wraps the words of a ring; `None` if their number is not a power of two.
    pub fn new(words: &'a [AtomicU64]) -> Option<Self> {
        words.len().is_power_of_two().then_some(Data(words))
    }

    /// Size in bytes.
    pub fn size(self) -> u64 {
        self.0.len() as u64 * 8
    }

    /// The word at a position that runs past the ring's end any number of times; the low three bits
    /// don't count.
    pub fn word(self, position: u64) -> u64 {
        let index = (position / 8) as usize & (self.0.len() - 1);
        self.0[index].load(Ordering::Relaxed)
    }

    /// `length` bytes from `position` on, across the ring's end, `position` and `length` in whole
    /// words.
    pub fn bytes(self, position: u64, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length);
        for at in (0..length as u64).step_by(8) {
            bytes.extend_from_slice(&self.word(position.wrapping_add(at)).to_ne_bytes());
        }
        bytes
    }

    /// The record at `tail`, `None` if there is none before `head`.
    pub fn record(self, tail: u64, head: u64) -> Result<Option<Raw>, Malformed> {
        let filled = head.wrapping_sub(tail);
        if filled == 0 {
            return Ok(None);
        }
        if tail % 8 != 0 || filled > self.size() || filled < HEADER as u64 {
            return Err(Malformed(format!(
                "no record can lie from {tail:#x} to {head:#x} in a ring of {:#x} bytes",
                self.size()
            )));
        }
        let header = self.word(tail).to_ne_bytes();
        let size = u16::from_ne_bytes([header[6], header[7]]);
        if usize::from(size) < HEADER || size % 8 != 0 || u64::from(size) > filled {
            return Err(Malformed(format!(
                "header.size {size} of the record at {tail:#x}: not a multiple of 8 from 8 to {filled}"
            )));
        }
        Ok(Some(Raw {
            bytes: self.bytes(tail, size.into()),
        }))
    }
}

/// One record, header included, in one piece. At least a header, whose size is that of the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    bytes: Vec<u8>,
}

impl Raw {
    /// The bytes, header included.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// `header.type`, a `PERF_RECORD_*`.
    pub fn kind(&self) -> u32 {
        u32::from_ne_bytes([self.bytes[0], self.bytes[1], self.bytes[2], self.bytes[3]])
    }

    /// `header.misc`.
    pub fn misc(&self) -> u16 {
        u16::from_ne_bytes([self.bytes[4], self.bytes[5]])
    }

    /// `header.size`.
    pub fn size(&self) -> u16 {
        u16::from_ne_bytes([self.bytes[6], self.bytes[7]])
    }
}

/// What of an attribute decides how the event's records are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// `attr.sample_type`.
    pub sample_type: u64,
    /// `attr.read_format`.
    pub read_format: u64,
    /// `attr.sample_regs_user`.
    pub regs_user: u64,
    /// `attr.sample_regs_intr`.
    pub regs_intr: u64,
    /// `attr.sample_id_all`.
    pub id_all: bool,
}

impl Format {
    /// The format of an event with this attribute.
    pub fn of(attr: &abi::perf_event_attr) -> Self {
        Format {
            sample_type: attr.sample_type,
            read_format: attr.read_format,
            regs_user: attr.sample_regs_user,
            regs_intr: attr.sample_regs_intr,
            id_all: attr.sample_id_all() != 0,
        }
    }

    fn has(&self, bit: u32) -> bool {
        self.sample_type & u64::from(bit) != 0
    }

    /// Bytes that `sample_id_all` appends to a record other than a sample.
    fn id_bytes(&self) -> usize {
        let fields = abi::PERF_SAMPLE_TID
            | abi::PERF_SAMPLE_TIME
            | abi::PERF_SAMPLE_ID
            | abi::PERF_SAMPLE_STREAM_ID
            | abi::PERF_SAMPLE_CPU
            | abi::PERF_SAMPLE_IDENTIFIER;
        match self.id_all {
            true => (self.sample_type & u64::from(fields)).count_ones() as usize * 8,
            false => 0,
        }
    }
}

/// A parsed record. Only what tests look at is named; the rest is checked for its size.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record {
    /// `PERF_RECORD_SAMPLE`.
    Sample(Box<Sample>),
    /// `PERF_RECORD_AUX`: a piece of the AUX area became readable.
    Aux {
        /// Position of the piece.
        offset: u64,
        /// Bytes of it.
        size: u64,
        /// `PERF_AUX_FLAG_*`.
        flags: u64,
    },
    /// `PERF_RECORD_ITRACE_START`.
    ItraceStart {
        /// Process that the trace is of.
        pid: u32,
        /// Thread that the trace is of.
        tid: u32,
    },
    /// `PERF_RECORD_LOST`: records found no room.
    Lost {
        /// The event that lost them.
        id: u64,
        /// How many.
        lost: u64,
    },
    /// `PERF_RECORD_LOST_SAMPLES`.
    LostSamples {
        /// How many.
        lost: u64,
    },
    /// `PERF_RECORD_THROTTLE`: the event was held back.
    Throttle {
        /// Which event.
        id: u64,
    },
    /// `PERF_RECORD_UNTHROTTLE`: the event goes on.
    Unthrottle {
        /// Which event.
        id: u64,
    },
    /// `PERF_RECORD_FORK` and `PERF_RECORD_EXIT`.
    Task {
        /// True for an exit.
        exit: bool,
        /// Process.
        pid: u32,
        /// Its parent.
        ppid: u32,
        /// Thread.
        tid: u32,
    },
    /// Any other kind, unparsed.
    Other {
        /// `header.type`.
        kind: u32,
    },
}

/// A sample, field by field; a field that the format lacks has its default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// `header.misc`.
    pub misc: u16,
    /// `header.size`.
    pub size: u16,
    /// `PERF_SAMPLE_IDENTIFIER`, or `PERF_SAMPLE_ID`.
    pub id: u64,
    /// Instruction pointer.
    pub ip: u64,
    /// Process.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// Time on the event's clock.
    pub time: u64,
    /// Address.
    pub addr: u64,
    /// The inherited event's own id.
    pub stream_id: u64,
    /// CPU.
    pub cpu: u32,
    /// Period up to this sample.
    pub period: u64,
    /// The counts, as `read(2)` would give them.
    pub read: Vec<u64>,
    /// Call chain, context markers included.
    pub callchain: Vec<u64>,
    /// Raw data.
    pub raw: Vec<u8>,
    /// Number of branch entries.
    pub branches: u64,
    /// User registers by bit of the mask; `None` if there were none.
    pub regs_user: Option<Vec<u64>>,
    /// Dumped user stack, as long as was asked for.
    pub stack_user: Vec<u8>,
    /// How much of the dumped stack is real.
    pub stack_dyn_size: u64,
    /// The AUX bytes; `None` if the format has none.
    pub aux: Option<Vec<u8>>,
}

impl Record {
    /// Takes a record apart.
    pub fn parse(raw: &Raw, format: &Format) -> Result<Record, Malformed> {
        let mut body = Body {
            kind: raw.kind(),
            rest: &raw.bytes[HEADER..],
        };
        let record = match raw.kind() {
            abi::PERF_RECORD_SAMPLE => {
                let mut sample = body.sample(format)?;
                sample.misc = raw.misc();
                sample.size = raw.size();
                body.end()?;
                return Ok(Record::Sample(Box::new(sample)));
            }
            abi::PERF_RECORD_AUX => Record::Aux {
                offset: body.u64("aux_offset")?,
                size: body.u64("aux_size")?,
                flags: body.u64("flags")?,
            },
            abi::PERF_RECORD_ITRACE_START => {
                let (pid, tid) = body.pair("pid, tid")?;
                Record::ItraceStart { pid, tid }
            }
            abi::PERF_RECORD_LOST => Record::Lost {
                id: body.u64("id")?,
                lost: body.u64("lost")?,
            },
            abi::PERF_RECORD_LOST_SAMPLES => Record::LostSamples {
                lost: body.u64("lost")?,
            },
            kind @ (abi::PERF_RECORD_THROTTLE | abi::PERF_RECORD_UNTHROTTLE) => {
                body.u64("time")?;
                let id = body.u64("id")?;
                body.u64("stream_id")?;
                match kind {
                    abi::PERF_RECORD_THROTTLE => Record::Throttle { id },
                    _ => Record::Unthrottle { id },
                }
            }
            kind @ (abi::PERF_RECORD_FORK | abi::PERF_RECORD_EXIT) => {
                let (pid, ppid) = body.pair("pid, ppid")?;
                let (tid, _) = body.pair("tid, ptid")?;
                body.u64("time")?;
                Record::Task {
                    exit: kind == abi::PERF_RECORD_EXIT,
                    pid,
                    ppid,
                    tid,
                }
            }
            kind => return Ok(Record::Other { kind }),
        };
        body.take(format.id_bytes(), "sample_id")?;
        body.end()?;
        Ok(record)
    }
}

/// What is left of a record while it is taken apart.
struct Body<'a> {
    kind: u32,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    fn malformed<T>(&self, what: fmt::Arguments<'_>) -> Result<T, Malformed> {
        Err(Malformed(format!("record of type {}: {what}", self.kind)))
    }

    fn take(&mut self, bytes: usize, field: &str) -> Result<&'a [u8], Malformed> {
        if bytes > self.rest.len() {
            return self.malformed(format_args!(
                "{field} of {bytes} bytes, {} left",
                self.rest.len()
            ));
        }
        let (field, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        Ok(field)
    }

    fn u64(&mut self, field: &str) -> Result<u64, Malformed> {
        let mut word = [0; 8];
        word.copy_from_slice(self.take(8, field)?);
        Ok(u64::from_ne_bytes(word))
    }

    fn pair(&mut self, fields: &str) -> Result<(u32, u32), Malformed> {
        let b = self.take(8, fields)?;
        let first = u32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
        let second = u32::from_ne_bytes([b[4], b[5], b[6], b[7]]);
        Ok((first, second))
    }

    /// A length that came from the record, as a number of elements of `each` bytes that are still
    /// there.
    fn length(&self, count: u64, each: usize, field: &str) -> Result<usize, Malformed> {
        match usize::try_from(count) {
            Ok(n) if n <= self.rest.len() / each => Ok(n),
            _ => self.malformed(format_args!(
                "{field} {count} of {each} bytes each, {} left",
                self.rest.len()
            )),
        }
    }

    fn words(&mut self, count: u64, field: &str) -> Result<Vec<u64>, Malformed> {
        let count = self.length(count, 8, field)?;
        (0..count).map(|_| self.u64(field)).collect()
    }

    fn end(&self) -> Result<(), Malformed> {
        if !self.rest.is_empty() {
            return self.malformed(format_args!(
                "{} bytes behind the last field",
                self.rest.len()
            ));
        }
        Ok(())
    }

    fn read(&mut self, read_format: u64) -> Result<Vec<u64>, Malformed> {
        let has = |bit: u32| read_format & u64::from(bit) != 0;
        let times = u64::from(has(abi::PERF_FORMAT_TOTAL_TIME_ENABLED))
            + u64::from(has(abi::PERF_FORMAT_TOTAL_TIME_RUNNING));
        let each = 1 + u64::from(has(abi::PERF_FORMAT_ID)) + u64::from(has(abi::PERF_FORMAT_LOST));
        if !has(abi::PERF_FORMAT_GROUP) {
            return self.words(each + times, "read");
        }
        let nr = self.u64("read.nr")?;
        let mut words = vec![nr];
        words.extend(self.words(times, "read times")?);
        let members = self.length(nr, each as usize * 8, "read.nr")? as u64;
        words.extend(self.words(members * each, "read values")?);
        Ok(words)
    }

    fn regs(&mut self, mask: u64, field: &str) -> Result<Option<Vec<u64>>, Malformed> {
        match self.u64(field)? {
            0 => Ok(None),
            _ => Ok(Some(self.words(mask.count_ones().into(), field)?)),
        }
    }

    fn sample(&mut self, format: &Format) -> Result<Sample, Malformed> {
        let mut s = Sample::default();
        if format.has(abi::PERF_SAMPLE_IDENTIFIER) {
            s.id = self.u64("identifier")?;
        }
        if format.has(abi::PERF_SAMPLE_IP) {
            s.ip = self.u64("ip")?;
        }
        if format.has(abi::PERF_SAMPLE_TID) {
            (s.pid, s.tid) = self.pair("pid, tid")?;
        }
        if format.has(abi::PERF_SAMPLE_TIME) {
            s.time = self.u64("time")?;
        }
        if format.has(abi::PERF_SAMPLE_ADDR) {
            s.addr = self.u64("addr")?;
        }
        if format.has(abi::PERF_SAMPLE_ID) {
            s.id = self.u64("id")?;
        }
        if format.has(abi::PERF_SAMPLE_STREAM_ID) {
            s.stream_id = self.u64("stream_id")?;
        }
        if format.has(abi::PERF_SAMPLE_CPU) {
            (s.cpu, _) = self.pair("cpu")?;
        }
        if format.has(abi::PERF_SAMPLE_PERIOD) {
            s.period = self.u64("period")?;
        }
        if format.has(abi::PERF_SAMPLE_READ) {
            s.read = self.read(format.read_format)?;
        }
        if format.has(abi::PERF_SAMPLE_CALLCHAIN) {
            let nr = self.u64("callchain.nr")?;
            s.callchain = self.words(nr, "callchain.nr")?;
        }
        if format.has(abi::PERF_SAMPLE_RAW) {
            let size = self.take(4, "raw.size")?;
            let size = u32::from_ne_bytes([size[0], size[1], size[2], size[3]]);
            let size = self.length(size.into(), 1, "raw.size")?;
            s.raw = self.take(size, "raw")?.to_vec();
        }
        if format.has(abi::PERF_SAMPLE_BRANCH_STACK) {
            s.branches = self.u64("branch.nr")?;
            let nr = self.length(s.branches, 24, "branch.nr")?;
            self.take(nr * 24, "branches")?;
        }
        if format.has(abi::PERF_SAMPLE_REGS_USER) {
            s.regs_user = self.regs(format.regs_user, "regs_user")?;
        }
        if format.has(abi::PERF_SAMPLE_STACK_USER) {
            let size = self.u64("stack_user.size")?;
            let size = self.length(size, 1, "stack_user.size")?;
            s.stack_user = self.take(size, "stack_user")?.to_vec();
            if size != 0 {
                s.stack_dyn_size = self.u64("stack_user.dyn_size")?;
            }
        }
        if format.has(abi::PERF_SAMPLE_WEIGHT | abi::PERF_SAMPLE_WEIGHT_STRUCT) {
            self.u64("weight")?;
        }
        if format.has(abi::PERF_SAMPLE_DATA_SRC) {
            self.u64("data_src")?;
        }
        if format.has(abi::PERF_SAMPLE_TRANSACTION) {
            self.u64("transaction")?;
        }
        if format.has(abi::PERF_SAMPLE_REGS_INTR) {
            self.regs(format.regs_intr, "regs_intr")?;
        }
        if format.has(abi::PERF_SAMPLE_PHYS_ADDR) {
            self.u64("phys_addr")?;
        }
        if format.has(abi::PERF_SAMPLE_CGROUP) {
            self.u64("cgroup")?;
        }
        if format.has(abi::PERF_SAMPLE_DATA_PAGE_SIZE) {
            self.u64("data_page_size")?;
        }
        if format.has(abi::PERF_SAMPLE_CODE_PAGE_SIZE) {
            self.u64("code_page_size")?;
        }
        if format.has(abi::PERF_SAMPLE_AUX) {
            let size = self.u64("aux.size")?;
            let size = self.length(size, 1, "aux.size")?;
            s.aux = Some(self.take(size, "aux")?.to_vec());
        }
        Ok(s)
    }
}
