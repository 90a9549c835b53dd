// SPDX-License-Identifier: GPL-2.0

//! The two mappings of an event: the data ring and the AUX area.
//!
//! Both are written by the kernel while we look, so they are read through atomics. `data_head` and
//! `aux_head` are loaded with acquire and the tails stored with release, which pairs with the
//! barriers described in `kernel/events/ring_buffer.c`, `perf_output_put_handle()`.

use crate::abi;
use crate::error::{
    Error,
    Result, //
};
use crate::event::Event;
use crate::record::{
    Data,
    Format,
    Raw,
    Record, //
};
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU64,
    Ordering, //
};

/// Bytes of a page.
pub fn page_size() -> usize {
    // SAFETY: no preconditions.
    (unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) as usize
}

/// A shared mapping of an event, unmapped on drop.
///
/// # Invariants
///
/// `base` is the start of a readable mapping of `length` bytes, `length` a positive multiple of the
/// page size.
pub struct Mapping {
    base: NonNull<AtomicU64>,
    length: usize,
}

impl Mapping {
    /// Maps `length` bytes at `offset` of an event, for writing too if asked.
    pub fn new(event: &Event, offset: u64, length: usize, write: bool) -> Result<Self> {
        let what = || {
            format!(
                "mmap of {length} bytes at offset {offset:#x} of event fd {}, {}",
                event.fd(),
                if write { "read/write" } else { "read-only" }
            )
        };
        if length == 0 || length % page_size() != 0 {
            return Err(Error::new(format!("{}: not whole pages", what())));
        }
        let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                event.fd(),
                offset as libc::off_t,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os(what()));
        }
        let base = NonNull::new(base.cast::<AtomicU64>())
            .ok_or_else(|| Error::new(format!("{}: mapped at address 0", what())))?;
        // INVARIANT: the kernel just made this mapping.
        Ok(Mapping { base, length })
    }

    /// The words of the mapping from byte `from` on.
    fn words(&self, from: usize) -> &[AtomicU64] {
        let from = from.min(self.length) / 8;
        // SAFETY: by the invariant, the words up to `length` are mapped as long as `self` lives,
        // and nothing in this process accesses them but through atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(from), self.length / 8 - from) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: by the invariant this is our mapping, and `&mut self` says that no slice of it is
        // left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// The data ring of an event, with the user page in front.
pub struct Ring {
    mapping: Mapping,
    format: Format,
    data_bytes: usize,
}

impl Ring {
    /// Maps the user page and `pages` pages of records, a power of two.
    pub fn map(event: &Event, pages: usize) -> Result<Self> {
        Self::map_as(event, pages, true)
    }

    /// The same, read-only: nothing is ever read in the kernel's eyes, and new records overwrite
    /// old ones.
    pub fn map_read_only(event: &Event, pages: usize) -> Result<Self> {
        Self::map_as(event, pages, false)
    }

    fn map_as(event: &Event, pages: usize, write: bool) -> Result<Self> {
        if !pages.is_power_of_two() {
            return Err(Error::new(format!(
                "data ring of {pages} pages: not a power of two"
            )));
        }
        let data_bytes = pages * page_size();
        let mapping = Mapping::new(event, 0, page_size() + data_bytes, write)?;
        Ok(Ring {
            mapping,
            format: event.format(),
            data_bytes,
        })
    }

    fn field(&self, offset: usize) -> &AtomicU64 {
        &self.mapping.words(0)[offset / 8]
    }

    fn data(&self) -> Data<'_> {
        // The length was checked to be a power of two when mapped, as `Data` wants it.
        Data::new(&self.mapping.words(page_size())[..self.data_bytes / 8])
            .expect("the ring's length is a power of two")
    }

    /// `data_head`: where the kernel writes next.
    pub fn head(&self) -> u64 {
        self.field(offset_of!(abi::perf_event_mmap_page, data_head))
            .load(Ordering::Acquire)
    }

    /// `data_tail`: what we have read.
    pub fn tail(&self) -> u64 {
        self.field(offset_of!(abi::perf_event_mmap_page, data_tail))
            .load(Ordering::Relaxed)
    }

    /// Gives everything before `tail` back to the kernel.
    pub fn set_tail(&self, tail: u64) {
        self.field(offset_of!(abi::perf_event_mmap_page, data_tail))
            .store(tail, Ordering::Release);
    }

    /// `aux_head`: a running count, or in a snapshot area an offset into it.
    pub fn aux_head(&self) -> u64 {
        self.field(offset_of!(abi::perf_event_mmap_page, aux_head))
            .load(Ordering::Acquire)
    }

    /// Gives every AUX byte before `tail` back to the kernel.
    pub fn set_aux_tail(&self, tail: u64) {
        self.field(offset_of!(abi::perf_event_mmap_page, aux_tail))
            .store(tail, Ordering::Release);
    }

    /// Words of the user page that anybody may write to.
    pub const CONTROL_WORDS: usize = 4096 / 8;

    /// Writes any word of the user page, whatever it is for.
    pub fn scribble(&self, word: usize, value: u64) {
        self.field(word % Self::CONTROL_WORDS * 8)
            .store(value, Ordering::Relaxed);
    }

    /// Bytes of records that the ring holds at most.
    pub fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// The ring as it lies in memory.
    pub fn all(&self) -> Vec<u8> {
        self.data().bytes(0, self.data_bytes)
    }

    /// Takes the next record out of the ring, `None` if there is none yet.
    ///
    /// After an error the ring stays as it is: nothing behind a malformed record can be found.
    pub fn next_raw(&mut self) -> Result<Option<Raw>> {
        let (tail, head) = (self.tail(), self.head());
        let record = self.data().record(tail, head)?;
        if let Some(record) = &record {
            self.set_tail(tail.wrapping_add(record.size().into()));
        }
        Ok(record)
    }

    /// Takes every record out of the ring, parsed as this event's; all of them must be well formed.
    pub fn drain(&mut self) -> Result<Vec<Record>> {
        let format = self.format;
        self.drain_as(|_| format)
    }

    /// Takes every record out of a ring that several events share, with the format that `pick`
    /// finds for each.
    pub fn drain_as(&mut self, pick: impl Fn(&Raw) -> Format) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        // A ring that is filled as fast as it is read must not keep us here: what was there on
        // entry is enough.
        let head = self.head();
        while self.tail() != head {
            let tail = self.tail();
            let Some(raw) = self.data().record(tail, head)? else {
                break;
            };
            records.push(Record::parse(&raw, &pick(&raw))?);
            self.set_tail(tail.wrapping_add(raw.size().into()));
        }
        Ok(records)
    }

    /// Maps the AUX area of `event`, the event of this ring, behind the data pages.
    pub fn map_aux(&self, event: &Event, pages: usize, mode: AuxMode) -> Result<Aux> {
        let offset = page_size() as u64 + self.data_bytes as u64;
        self.map_aux_at(event, offset, pages * page_size(), mode)
    }

    /// Maps an AUX area of any offset and length.
    pub fn map_aux_at(
        &self,
        event: &Event,
        offset: u64,
        length: usize,
        mode: AuxMode,
    ) -> Result<Aux> {
        self.field(offset_of!(abi::perf_event_mmap_page, aux_offset))
            .store(offset, Ordering::Relaxed);
        self.field(offset_of!(abi::perf_event_mmap_page, aux_size))
            .store(length as u64, Ordering::Relaxed);
        let mapping = Mapping::new(event, offset, length, mode == AuxMode::Full)?;
        Ok(Aux { mapping })
    }
}

/// What the AUX area does when it is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxMode {
    /// Mapped read-only: the oldest bytes are overwritten.
    Snapshot,
    /// Mapped writable: the trace stops until `aux_tail` moves.
    Full,
}

/// The AUX area of an event.
pub struct Aux {
    mapping: Mapping,
}

impl Aux {
    /// Size in bytes.
    pub fn size(&self) -> usize {
        self.mapping.length
    }

    /// `length` bytes from `position` on, across the area's end.
    pub fn bytes(&self, position: u64, length: usize) -> Vec<u8> {
        let words = self.mapping.words(0);
        (position..position + length as u64)
            .map(|at| {
                let at = (at % self.size() as u64) as usize;
                words[at / 8].load(Ordering::Relaxed).to_ne_bytes()[at % 8]
            })
            .collect()
    }

    /// The whole area from its first byte.
    pub fn all(&self) -> Vec<u8> {
        self.bytes(0, self.size())
    }
}
