// SPDX-License-Identifier: GPL-2.0

//! How large the AUX field of a sample is.
//!
//! Pure logic; the same file is tested on the host.

/// The largest size of a record: `struct perf_event_header`'s `size` has 16 bits, and records are
/// made of words of 8 bytes.
pub(crate) const RECORD_MAX: u64 = u16::MAX as u64 & !7;

/// The `u64 size` at the head of the AUX field.
const SIZE_FIELD: u64 = 8;

/// What a sample has before its AUX field is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Want {
    /// The size of the record without any of the AUX field.
    pub(crate) record: u64,
    /// How much of that is a dump of the user stack, whose size is the kernel's choice.
    pub(crate) stack: u64,
    /// `attr.aux_sample_size`.
    pub(crate) asked: u32,
    /// The size of the AUX area; 0 if no sample can be taken of it now.
    pub(crate) area: u64,
}

/// What a sample is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The size of the AUX data, a multiple of 8.
    pub(crate) aux: u64,
    /// The size of the user stack dump.
    pub(crate) stack: u64,
    /// The size of the record with both.
    pub(crate) record: u64,
}

impl Want {
    /// Settles the sizes.
    #[inline]
    pub(crate) const fn settle(self) -> Grant {
        // Neither sum can overflow: these are the sizes of things in memory.
        let record = self.record.wrapping_add(SIZE_FIELD);
        if record > RECORD_MAX {
            return self.squeeze();
        }
        let mut aux = RECORD_MAX.wrapping_sub(record);
        if aux > self.asked as u64 {
            aux = self.asked as u64;
        }
        if aux > self.area {
            aux = self.area;
        }
        aux &= !7;
        Grant {
            aux,
            stack: self.stack,
            record: record.wrapping_add(aux),
        }
    }

    /// Settles the sizes when there is no room even for the size field.
    ///
    /// The stack dump has taken what room it liked. It gives back what is missing, and nothing for
    /// AUX data. A dump of nothing is laid out in another way than other dumps, so at least one
    /// word of it stays. If that is not enough, the record is too large whatever its AUX field is.
    #[cold]
    const fn squeeze(self) -> Grant {
        let record = self.record.saturating_add(SIZE_FIELD);
        let over = record.saturating_sub(RECORD_MAX);
        let spare = self.stack.saturating_sub(8);
        let cut = if over < spare {
            over.wrapping_add(7) & !7
        } else {
            spare & !7
        };
        // `cut` is at most `stack`, which is a part of `record`.
        Grant {
            aux: 0,
            stack: self.stack.wrapping_sub(cut),
            record: record.wrapping_sub(cut),
        }
    }
}
