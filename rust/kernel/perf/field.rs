// SPDX-License-Identifier: GPL-2.0

//! The fields of an event's configuration.
//!
//! A driver declares each field once ([`Pmu::FORMAT`](super::Pmu::FORMAT)). The files in the PMU's
//! `format/` directory, by which tools find the fields, are made of the declaration, and what it
//! does not allow is refused before the driver is asked.

use super::bindings;
use crate::{
    fmt,
    prelude::*, //
};

/// The word of `struct perf_event_attr` that a field is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// `attr.config`
    Config,
    /// `attr.config1`
    Config1,
    /// `attr.config2`
    Config2,
    /// `attr.config3`
    Config3,
    /// `attr.config4`
    Config4,
}

impl Word {
    const ALL: [Self; 5] = [
        Self::Config,
        Self::Config1,
        Self::Config2,
        Self::Config3,
        Self::Config4,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Config1 => "config1",
            Self::Config2 => "config2",
            Self::Config3 => "config3",
            Self::Config4 => "config4",
        }
    }

    /// # Safety
    ///
    /// `event` must be valid.
    unsafe fn of(self, event: *mut bindings::perf_event) -> u64 {
        // SAFETY: By the safety requirements; all variants of the unions are integers that fill
        // them, and nobody changes these words.
        unsafe {
            let attr = &raw const (*event).attr;
            match self {
                Self::Config => (*attr).config,
                Self::Config1 => (*attr).__bindgen_anon_3.config1,
                Self::Config2 => (*attr).__bindgen_anon_4.config2,
                Self::Config3 => (*attr).config3,
                Self::Config4 => (*attr).config4,
            }
        }
    }
}

/// A field of an event's configuration.
///
/// # Examples
///
/// ```
/// use kernel::perf::{Field, Word};
///
/// /// How often, in units of 2 KiB; at most 5.
/// const PERIOD: Field = Field::new(c"period", Word::Config, 24, 27).at_most(5);
/// /// A flag.
/// const PRECISE: Field = Field::new(c"precise", Word::Config1, 0, 0);
/// # assert!(PERIOD.max() == 5 && PRECISE.max() == 1);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Field {
    name: &'static CStr,
    word: Word,
    low: u32,
    high: u32,
    max: u64,
}

impl Field {
    /// The bits `low` to `high` of `word`.
    ///
    /// Panics if there are no such bits; in a constant that is an error of the compiler.
    pub const fn new(name: &'static CStr, word: Word, low: u32, high: u32) -> Self {
        assert!(low <= high && high < 64, "no such bits");
        Self {
            name,
            word,
            low,
            high,
            max: u64::MAX >> (63 - (high - low)),
        }
    }

    /// The same field, of which only values up to `max` are allowed.
    pub const fn at_most(self, max: u64) -> Self {
        assert!(max <= self.max, "the field has not that many bits");
        Self { max, ..self }
    }

    /// The largest value allowed.
    pub const fn max(&self) -> u64 {
        self.max
    }

    pub(super) const fn name(&self) -> &'static CStr {
        self.name
    }

    /// All bits of the field, where they are in the word.
    const fn mask(&self) -> u64 {
        (u64::MAX >> (63 - (self.high - self.low))) << self.low
    }

    /// The value of the field.
    ///
    /// # Safety
    ///
    /// `event` must be valid.
    pub(super) unsafe fn of(&self, event: *mut bindings::perf_event) -> u64 {
        // SAFETY: By the safety requirements.
        (unsafe { self.word.of(event) } & self.mask()) >> self.low
    }

    /// Writes what the field's file in `format/` says.
    pub(super) fn describe(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        out.write_str(self.word.name())?;
        if self.low == self.high {
            write!(out, ":{}", self.low)
        } else {
            write!(out, ":{}-{}", self.low, self.high)
        }
    }
}

/// Checks an event's configuration against the fields that it may have.
///
/// # Errors
///
/// `EINVAL` if a bit is set that is in no field, or if a field has a value that is not allowed.
///
/// # Safety
///
/// `event` must be valid.
pub(super) unsafe fn check(fields: &[Field], event: *mut bindings::perf_event) -> Result {
    for word in Word::ALL {
        let known = fields
            .iter()
            .filter(|field| field.word == word)
            .fold(0, |mask, field| mask | field.mask());
        // SAFETY: By the safety requirements.
        if unsafe { word.of(event) } & !known != 0 {
            return Err(EINVAL);
        }
    }
    for field in fields {
        // SAFETY: By the safety requirements.
        if unsafe { field.of(event) } > field.max {
            return Err(EINVAL);
        }
    }
    Ok(())
}
