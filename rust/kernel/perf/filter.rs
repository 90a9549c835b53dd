// SPDX-License-Identifier: GPL-2.0

//! Address filters: which parts of a program are to be traced.
//!
//! C header: [`include/linux/perf_event.h`](srctree/include/linux/perf_event.h)
//!
//! User space sets the filters of an event with `PERF_EVENT_IOC_SET_FILTER`. The core parses them
//! and asks the PMU whether it can do them ([`Pmu::validate_filters`](super::Pmu)). A filter may
//! name a range of an object file. Where that is in the memory of a task, the core finds out
//! whenever something is mapped there, and after `exec` and `fork`; each time it stops the event
//! and starts it again. So a PMU takes the addresses when it opens an AUX transaction
//! ([`OnCpu::address_ranges`]), and they hold for as long as the transaction.
//!
//! ```text
//!   ioctl ──▶ validate_filters(what user space wants) ──▶ stop(Update), start(Run)
//!                                                                           │
//!   mmap, exec ─────────────────────────────────────────▶ stop(Update), start(Run)
//!                                                                           │
//!   fork ───────────────────────────────────────────────▶ add               ▼
//!                                                         OnCpu::address_ranges(where that is)
//! ```

use super::{
    bindings,
    event::Private,
    OnCpu,
    Pmu, //
};
use crate::{
    nmi::IrqsOff,
    prelude::*, //
};
use core::{
    cell::Cell,
    marker::PhantomData, //
};

/// What to do at the addresses of a filter (`PERF_ADDR_FILTER_ACTION_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FilterAction {
    /// Stop to trace there.
    Stop,
    /// Start to trace there.
    Start,
    /// Trace there, and outside of all such ranges don't.
    Filter,
}

impl FilterAction {
    #[inline]
    fn from_raw(raw: bindings::perf_addr_filter_action_t) -> Self {
        match raw {
            bindings::perf_addr_filter_action_t_PERF_ADDR_FILTER_ACTION_START => Self::Start,
            bindings::perf_addr_filter_action_t_PERF_ADDR_FILTER_ACTION_FILTER => Self::Filter,
            _ => Self::Stop,
        }
    }
}

/// A filter, as user space has set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressFilter {
    /// What to do.
    pub action: FilterAction,
    /// Where the range begins: in the object file, or else in memory.
    pub offset: u64,
    /// Its size in bytes; 0 stands for a single address.
    pub size: u64,
    /// Whether it is a range of an object file.
    pub in_file: bool,
}

/// The filters that user space wants an event to have.
///
/// # Invariants
///
/// The pointer is that to the head of a list of `struct perf_addr_filter`, which doesn't change for
/// `'a`.
pub struct AddressFilters<'a>(*mut bindings::list_head, PhantomData<&'a ()>);

impl AddressFilters<'_> {
    /// # Safety
    ///
    /// The type invariants must hold for `head`.
    #[inline]
    pub(super) unsafe fn new(head: *mut bindings::list_head) -> Self {
        // INVARIANT: By the safety requirements of this function.
        Self(head, PhantomData)
    }

    /// The filters, in the order in which user space gave them.
    pub fn iter(&self) -> impl Iterator<Item = AddressFilter> + '_ {
        // SAFETY: By the type invariants.
        unsafe { entries(self.0) }.map(|filter| {
            // SAFETY: `filter` is an entry of the list, which does not change.
            let filter = unsafe { &*filter };
            AddressFilter {
                action: FilterAction::from_raw(filter.action),
                offset: filter.offset as u64,
                size: filter.size as u64,
                in_file: !filter.path.dentry.is_null(),
            }
        })
    }
}

/// The entries of a list of filters.
///
/// # Safety
///
/// `head` must be the head of a list of `struct perf_addr_filter`, which must not change while the
/// iterator is used.
unsafe fn entries(
    head: *mut bindings::list_head,
) -> impl Iterator<Item = *mut bindings::perf_addr_filter> {
    let mut at = head;
    core::iter::from_fn(move || {
        // SAFETY: `at` is the head or an entry of the list, and the list is circular.
        at = unsafe { (*at).next };
        if at == head {
            return None;
        }
        // SAFETY: What isn't the head is the `entry` of a filter.
        Some(unsafe { crate::container_of!(at, bindings::perf_addr_filter, entry) })
    })
}

/// Where a filter is in the memory of the task that is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// What to do there.
    pub action: FilterAction,
    /// The first and the last address; [`None`] if the task has the object file not mapped.
    pub addresses: Option<(u64, u64)>,
}

/// The ranges of an event's filters, as the core had them when the event was last started.
///
/// Only the CPU that does the event gets at them, with interrupts off and outside of NMIs.
pub(super) struct Synced {
    ranges: KVec<Cell<AddressRange>>,
    /// How many of them there are.
    len: Cell<usize>,
}

// SAFETY: The cells are only reached from the CPU that does the event, with interrupts off and
// outside of NMIs.
unsafe impl Sync for Synced {}

impl Synced {
    /// Room for the ranges of as many as `max` filters.
    pub(super) fn new(max: usize) -> Result<Self> {
        let mut ranges = KVec::with_capacity(max, GFP_KERNEL)?;
        for _ in 0..max {
            let nowhere = AddressRange {
                action: FilterAction::Filter,
                addresses: None,
            };
            ranges.push(Cell::new(nowhere), GFP_KERNEL)?;
        }
        Ok(Self {
            ranges,
            len: Cell::new(0),
        })
    }

    #[inline]
    fn iter(&self) -> impl Iterator<Item = AddressRange> + '_ {
        self.ranges.iter().take(self.len.get()).map(Cell::get)
    }

    /// Takes over where the filters of a list are, which the core has found out.
    ///
    /// # Safety
    ///
    /// `head` must be the head of a list of `struct perf_addr_filter`, which must not change
    /// meanwhile, and `ranges` an array with a range for each that there is room for.
    unsafe fn take(
        &self,
        head: *mut bindings::list_head,
        ranges: *const bindings::perf_addr_filter_range,
    ) {
        let mut len = 0;
        // SAFETY: By the safety requirements.
        for (index, filter) in unsafe { entries(head) }.enumerate() {
            let Some(slot) = self.ranges.get(index) else {
                break;
            };
            // SAFETY: The entry is one of the list, and there are as many ranges as slots.
            let (filter, range) = unsafe { (&*filter, &*ranges.add(index)) };
            let start = range.start as u64;
            let in_file = !filter.path.dentry.is_null();
            slot.set(AddressRange {
                action: FilterAction::from_raw(filter.action),
                addresses: if in_file && start == 0 {
                    None
                } else {
                    let last = (range.size as u64).saturating_sub(1);
                    Some((start, start.saturating_add(last)))
                },
            });
            len = index.wrapping_add(1);
        }
        self.len.set(len);
    }
}

/// Takes over where the filters of `event` are now.
///
/// # Safety
///
/// To be called by [`perf_event_addr_filters_sync()`](bindings::perf_event_addr_filters_sync),
/// which has locked the list of filters, on the CPU that does `event`, which is one of `P`.
pub(super) unsafe extern "C" fn sync<P: Pmu>(event: *mut bindings::perf_event) {
    // SAFETY: The event is valid; an inherited one has the list of its parent, which it keeps
    // alive. The list is locked by the caller. The core has as many ranges as the PMU takes
    // filters, for which there is room.
    unsafe {
        let parent = (*event).parent;
        let owner = if parent.is_null() { event } else { parent };
        let private = (*event).pmu_private.cast::<Private<P>>();
        (*private).ranges.take(
            &raw mut (*owner).addr_filters.list,
            (*event).addr_filter_ranges,
        );
    }
}

impl<P: Pmu> OnCpu<P> {
    /// Where the event's address filters are in the memory of the task that runs, at most
    /// [`Pmu::ADDRESS_FILTERS`] ranges.
    ///
    /// To be asked when the event is started: the core has it stopped and started again when the
    /// answer has changed.
    pub fn address_ranges(
        &self,
        _cx: &IrqsOff<'_>,
    ) -> impl Iterator<Item = AddressRange> + use<'_, P> {
        if P::ADDRESS_FILTERS != 0 {
            // SAFETY: The event is valid. Interrupts are off and this is no NMI, as the lock wants
            // it that the function takes.
            unsafe { bindings::perf_event_addr_filters_sync(self.as_raw()) };
        }
        self.private().ranges.iter()
    }
}

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_filter)]
mod tests {
    use super::*;
    use core::{
        mem::MaybeUninit,
        ptr, //
    };

    /// Two filters in a list: of a file, if `in_file`, then of addresses.
    struct List {
        head: bindings::list_head,
        filters: [bindings::perf_addr_filter; 2],
    }

    impl List {
        fn new(in_file: bool) -> Result<KBox<Self>> {
            // SAFETY: All zeros are a value of these plain data.
            let list = unsafe { MaybeUninit::<Self>::zeroed().assume_init() };
            let mut list = KBox::new(list, GFP_KERNEL)?;
            let [first, second] = &mut list.filters;
            first.action = bindings::perf_addr_filter_action_t_PERF_ADDR_FILTER_ACTION_FILTER;
            first.offset = 0x10;
            first.size = 0x20;
            if in_file {
                // Only compared with null.
                first.path.dentry = ptr::dangling_mut();
            }
            second.action = bindings::perf_addr_filter_action_t_PERF_ADDR_FILTER_ACTION_STOP;
            second.offset = 0x1000;
            second.size = 1;
            let ends = [&raw mut first.entry, &raw mut second.entry];
            Self::link(&raw mut list.head, &ends);
            Ok(list)
        }

        fn link(head: *mut bindings::list_head, entries: &[*mut bindings::list_head]) {
            let mut last = head;
            for &entry in entries {
                // SAFETY: The pointers are those of a list that nobody else knows.
                unsafe { (*last).next = entry };
                last = entry;
            }
            // SAFETY: As above.
            unsafe { (*last).next = head };
        }
    }

    #[test]
    fn an_empty_list() -> Result {
        let mut list = List::new(true)?;
        let head = &raw mut list.head;
        List::link(head, &[]);
        // SAFETY: The list stays as it is.
        let filters = unsafe { AddressFilters::new(head) };
        assert!(filters.iter().next().is_none());
        Ok(())
    }

    #[test]
    fn filters_are_what_user_space_gave() -> Result {
        let mut list = List::new(true)?;
        // SAFETY: The list stays as it is.
        let filters = unsafe { AddressFilters::new(&raw mut list.head) };
        let mut filters = filters.iter();
        assert_eq!(
            filters.next(),
            Some(AddressFilter {
                action: FilterAction::Filter,
                offset: 0x10,
                size: 0x20,
                in_file: true,
            })
        );
        assert_eq!(
            filters.next(),
            Some(AddressFilter {
                action: FilterAction::Stop,
                offset: 0x1000,
                size: 1,
                in_file: false,
            })
        );
        assert!(filters.next().is_none());
        Ok(())
    }

    /// The ranges that an event with room for `max` of them gets of the list.
    fn ranges_of(in_file: bool, first: u64, max: usize) -> Result<KVec<AddressRange>> {
        let mut list = List::new(in_file)?;
        let mut ranges = [
            bindings::perf_addr_filter_range {
                start: first as c_ulong,
                size: 0x20,
            },
            bindings::perf_addr_filter_range {
                start: 0x1000,
                size: 1,
            },
        ];
        let [one, two] = &mut list.filters;
        let ends = [&raw mut one.entry, &raw mut two.entry];
        let head = &raw mut list.head;
        List::link(head, &ends);

        let synced = Synced::new(max)?;
        // SAFETY: The list stays as it is, and has as many ranges as filters.
        unsafe { synced.take(head, ranges.as_mut_ptr()) };
        let mut got = KVec::new();
        for range in synced.iter() {
            got.push(range, GFP_KERNEL)?;
        }
        Ok(got)
    }

    #[test]
    fn ranges_are_where_the_filters_are() -> Result {
        let ranges = ranges_of(true, 0x7000_0010, 4)?;
        let filter = AddressRange {
            action: FilterAction::Filter,
            addresses: Some((0x7000_0010, 0x7000_002f)),
        };
        let stop = AddressRange {
            action: FilterAction::Stop,
            addresses: Some((0x1000, 0x1000)),
        };
        assert_eq!(ranges[..], [filter, stop]);
        // No more than there is room for.
        assert_eq!(ranges_of(true, 0x7000_0010, 1)?[..], [filter]);
        Ok(())
    }

    #[test]
    fn a_file_that_is_not_mapped_is_nowhere() -> Result {
        assert_eq!(ranges_of(true, 0, 4)?[0].addresses, None);
        // Without a file it is the address 0.
        assert_eq!(ranges_of(false, 0, 4)?[0].addresses, Some((0, 0x1f)));
        Ok(())
    }
}
