// SPDX-License-Identifier: GPL-2.0

//! The AUX area, and the transactions that fill it.
//!
//! The abstraction opens a transaction (`perf_aux_output_begin()`) before it starts an event, and
//! closes it (`perf_aux_output_end()`) when the event is stopped for good or leaves the CPU. In
//! between it lends it to the driver as an [`AuxOutput`], which knows where the next byte goes and
//! how much room there is. So a driver can neither keep a transaction nor leave one open.

use super::{
    bindings,
    OnCpu,
    Pmu, //
};
use crate::{
    bindings::module,
    impl_flags,
    nmi::NmiLike,
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        barrier::{
            smp_mb,
            Write, //
        }, //
    }, //
};
use core::{
    marker::PhantomData,
    ptr::{
        self,
        NonNull, //
    }, //
};

impl_flags!(
    /// What is to be said about an AUX transaction (`PERF_AUX_FLAG_*`).
    ///
    /// `OVERWRITE` is missing: the perf core sets it itself.
    #[derive(Debug, Clone, Default, Copy, PartialEq, Eq)]
    pub struct AuxFlags(u32);

    /// One thing to say about an AUX transaction.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AuxFlag {
        /// Bytes were dropped because there was no room for them. The core stops the event and
        /// wakes user space up.
        Truncated = bindings::PERF_AUX_FLAG_TRUNCATED,

        /// The bytes have a hole.
        Partial = bindings::PERF_AUX_FLAG_PARTIAL,

        /// The bytes collide with those of another event.
        Collision = bindings::PERF_AUX_FLAG_COLLISION,
    }
);

/// What the core keeps for a PMU per AUX area (`aux_priv`), in front of what the driver keeps.
///
/// The core gives it to whatever PMU has an event with the ring, and user space can have events of
/// several PMUs share one. So it says whose it is.
#[repr(C)]
pub(super) struct Area {
    /// The registration that has set it up.
    owner: u64,
    /// The module that `drop` is in, of which this holds a reference: the area can outlive the PMU.
    module: *mut module,
    drop: unsafe fn(*mut Area),
}

/// An [`Area`] and what the driver keeps. Only [`Area::drop`] and [`AuxOutput::data`] know the type
/// of the latter.
#[repr(C)]
struct Owned<T> {
    area: Area,
    data: T,
}

/// The number of the next registration.
static NEXT_OWNER: Atomic<u64> = Atomic::new(1);

/// A number that no other registration has, had, or will have.
pub(super) fn new_owner() -> u64 {
    NEXT_OWNER.fetch_add(1, Relaxed)
}

impl Area {
    /// An area of the registration `owner`.
    pub(super) fn new<T>(data: T, owner: u64, module: *mut module) -> Result<NonNull<Self>> {
        unsafe fn drop_owned<T>(area: *mut Area) {
            // SAFETY: The area is the first field of an `Owned<T>` in a box of its own.
            drop(unsafe { KBox::from_raw(area.cast::<Owned<T>>()) });
        }
        let owned = KBox::new(
            Owned {
                area: Area {
                    owner,
                    module,
                    drop: drop_owned::<T>,
                },
                data,
            },
            GFP_KERNEL,
        )?;
        // SAFETY: The caller's code is in the module, which is alive. (A null module is built in.)
        unsafe { bindings::__module_get(module) };
        // SAFETY: A box is not null.
        Ok(unsafe { NonNull::new_unchecked(KBox::into_raw(owned)) }.cast())
    }
}

/// `pmu::free_aux` of all PMUs. Not generic, so that there is one, in the kernel: by it an [`Area`]
/// is told from what other code keeps, and it returns to the kernel when the driver's module may
/// have gone.
///
/// # Safety
///
/// To be called by the perf core, once, with what `setup_aux` has returned.
#[inline(never)]
pub(super) unsafe extern "C" fn free_aux(aux: *mut c_void) {
    let area: *mut Area = aux.cast();
    // SAFETY: By the safety requirements. The module's code is there until its reference is given
    // back.
    unsafe {
        let module = (*area).module;
        ((*area).drop)(area);
        bindings::module_put(module);
    }
}

/// The AUX transaction of an event, which may be open.
///
/// # Invariants
///
/// While `area` is not null, `perf_aux_output_begin()` has filled in `handle` and
/// `perf_aux_output_end()` was not called since. `area` is the `aux_priv` of the handle's buffer,
/// and an [`Area`] of the registration `owner`, which is that of the event's PMU. `pages` points to
/// an array of addresses of whole pages, of which there are `mask + 1` bytes, a power of two; they
/// are those of the buffer's AUX area. While it is null, `limit` is `head`.
pub(super) struct Transaction {
    handle: bindings::perf_output_handle,
    owner: u64,
    area: *mut Area,
    pages: *mut *mut c_void,
    /// The size of the AUX area, less one.
    mask: u64,
    overwrite: bool,
    /// Where the next byte goes, and where the first one of this transaction went.
    head: u64,
    begin: u64,
    /// The head up to which there is room.
    limit: u64,
    /// The head at which user space wants to know.
    wakeup: u64,
}

// SAFETY: The handle points to objects that it keeps alive itself. The abstraction uses it only on
// the CPU that the event is on.
unsafe impl Send for Transaction {}

impl Transaction {
    pub(super) fn closed(owner: u64) -> Self {
        // INVARIANT: `area` is null, and `head` and `limit` are equal.
        Self {
            handle: pin_init::zeroed(),
            owner,
            area: ptr::null_mut(),
            pages: ptr::null_mut(),
            mask: 0,
            overwrite: false,
            head: 0,
            begin: 0,
            limit: 0,
            wakeup: 0,
        }
    }

    #[inline(always)]
    pub(super) fn is_open(&self) -> bool {
        !self.area.is_null()
    }

    /// Opens a transaction on the AUX area of `event` (its parent's, when it is inherited). Returns
    /// whether there is one: there is none without an AUX area of this PMU, when that is being
    /// unmapped, or when it is full. In the last case the core has disabled the event and woken up
    /// its owner.
    ///
    /// Not generic, so that it is compiled into the kernel, to which `struct perf_buffer` is
    /// private.
    ///
    /// # Safety
    ///
    /// `event` must be valid and on this CPU, with interrupts off, and the transaction closed.
    /// `owner` must be the registration of its PMU.
    #[inline(never)]
    pub(super) unsafe fn open(&mut self, event: *mut bindings::perf_event) -> bool {
        // User space can have several events share a buffer. A second transaction of one is a fault
        // of the kernel to the core, which says so in the log.
        // SAFETY: The event is valid, and so is its parent, which it holds a reference to. A buffer
        // is freed after a grace period, which does not end while interrupts are off.
        let busy = unsafe {
            let parent = (*event).parent;
            let event = if parent.is_null() { event } else { parent };
            let rb = (&raw const (*event).rb).read_volatile();
            !rb.is_null() && (&raw const (*rb).aux_nest).read_volatile() != 0
        };
        if busy {
            return false;
        }
        // SAFETY: The event is valid. If the pointer returned is not null, the handle keeps its
        // buffer alive, and with it the AUX area.
        let (area, rb) = unsafe {
            let area: *mut Area = bindings::perf_aux_output_begin(&mut self.handle, event).cast();
            if area.is_null() {
                return false;
            }
            (area, self.handle.rb)
        };
        // SAFETY: The buffer is valid while the handle is open.
        let (free, pages, nr_pages, overwrite) = unsafe {
            (
                (*rb).free_aux,
                (*rb).aux_pages,
                (*rb).aux_nr_pages as u64,
                (*rb).aux_overwrite != 0,
            )
        };
        let ours = free.is_some_and(|free| ptr::fn_addr_eq(free, free_aux as unsafe extern "C" fn(*mut c_void)))
            // SAFETY: What this function frees is an `Area`.
            && unsafe { (*area).owner } == self.owner;
        if !ours {
            // SAFETY: The transaction was opened just now.
            unsafe { bindings::perf_aux_output_end(&mut self.handle, 0) };
            return false;
        }
        // SAFETY: An AUX handle uses the `head` variant of the union.
        let head = (unsafe { self.handle.__bindgen_anon_2.head }) as u64;
        // INVARIANT: The transaction is open, and the area is this registration's, as seen above.
        // The core has as many pages as it says, and only maps powers of two.
        self.area = area;
        self.pages = pages;
        self.mask = (nr_pages * PAGE_SIZE as u64).wrapping_sub(1);
        self.overwrite = overwrite;
        self.head = head;
        self.begin = head;
        (self.limit, self.wakeup) = if overwrite {
            (u64::MAX, u64::MAX)
        } else {
            let room = self.handle.size as u64;
            (head.saturating_add(room), self.handle.wakeup as u64)
        };
        true
    }

    /// Closes the transaction, if it is open, and tells readers of what was written.
    #[inline(never)]
    pub(super) fn close(&mut self) {
        if !self.is_open() {
            return;
        }
        let size = if self.overwrite {
            self.handle.__bindgen_anon_2.head = (self.head & self.mask) as usize;
            0
        } else {
            self.head.wrapping_sub(self.begin) as usize
        };
        // Readers who see the new head must see the bytes before it. The core leaves that to the
        // PMU.
        smp_mb(Write);
        // INVARIANT: The transaction is closed below, and has no room.
        self.area = ptr::null_mut();
        self.limit = self.head;
        // SAFETY: The handle is open by the type invariants.
        unsafe { bindings::perf_aux_output_end(&mut self.handle, size) };
    }

    /// Tells user space what there is, and finds out what it has read. Returns whether there is
    /// room for `size` bytes then; if not, the trace is truncated and the transaction closed.
    #[inline(never)]
    fn renew(&mut self, size: u64) -> bool {
        if !self.is_open() {
            return false;
        }
        let event = self.handle.event;
        self.close();
        // SAFETY: The event is on this CPU, or there would not have been a transaction; so it is
        // valid, and it is still of the same PMU. The transaction is closed.
        if !unsafe { self.open(event) } {
            return false;
        }
        if self.limit.wrapping_sub(self.head) < size {
            self.flag(AuxFlag::Truncated.into());
            self.close();
            return false;
        }
        true
    }

    #[inline]
    fn flag(&mut self, flags: AuxFlags) {
        if self.is_open() {
            // SAFETY: The handle is open by the type invariants.
            unsafe {
                bindings::perf_aux_output_flag(&mut self.handle, u64::from(u32::from(flags)))
            };
        }
    }

    /// Appends `bytes` if there is room for all of them.
    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        if self.limit.wrapping_sub(self.head) < len {
            self.flag(AuxFlag::Truncated.into());
            return false;
        }
        let place = (self.head & self.mask) as usize;
        let offset = place & (PAGE_SIZE - 1);
        // No bytes, for which there is room even in a closed transaction, count as too many.
        if bytes.len().wrapping_sub(1) >= PAGE_SIZE - offset {
            self.put_apart(bytes);
            return true;
        }
        // SAFETY: There is room for at least one byte, so the transaction is open. `place` is less than the size of the
        // area, so that its page is one of `pages`; the bytes from `offset` on are inside of it.
        // Nobody else writes them: the core lets one transaction be open at a time per buffer.
        unsafe {
            let page = *self.pages.add(place / PAGE_SIZE);
            let to = page.cast::<u8>().add(offset);
            ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        self.head = self.head.wrapping_add(len);
        true
    }

    /// The same for what does not fit into one page. Apart, so that what does fit is a store or two
    /// where its length is known.
    #[inline(never)]
    fn put_apart(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = PAGE_SIZE - (self.head as usize & (PAGE_SIZE - 1));
            let (now, later) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
            self.put(now);
            bytes = later;
        }
    }

    #[inline(always)]
    pub(super) fn as_raw(&mut self) -> *mut bindings::perf_output_handle {
        &mut self.handle
    }
}

/// The open AUX transaction of an event, lent to a driver: where the next byte of the trace goes,
/// and how much room there is.
///
/// A driver calls [`reserve`](Self::reserve) for the most that it is about to write, and then
/// [`put`](Self::put). That is all there is to both ways in which user space can map an AUX area:
///
/// ```text
///     snapshot mode (mapped read-only)          full trace (mapped writable)
///
///       there always is room; what is             room ends where user space has read up to;
///       written goes round the area               reserve() wakes it up when it wants to know,
///                                                 takes over what it has read meanwhile, and if
///                                                 there is no room even then, ends the trace and
///                                                 has the core disable the event (TRUNCATED)
/// ```
///
/// # Invariants
///
/// The transaction is that of an event of a `Registration<P>`, and was open when this was made.
pub struct AuxOutput<'a, P: Pmu> {
    transaction: &'a mut Transaction,
    _pmu: PhantomData<P>,
}

impl<'a, P: Pmu> AuxOutput<'a, P> {
    /// [`None`] if the transaction is not open.
    #[inline(always)]
    pub(super) fn new(transaction: &'a mut Transaction) -> Option<Self> {
        if !transaction.is_open() {
            return None;
        }
        // INVARIANT: By those of `Transaction`, which is one of an event of a `Registration<P>`.
        Some(Self {
            transaction,
            _pmu: PhantomData,
        })
    }

    /// What [`Pmu::setup_aux`] has returned for this area. [`None`] after [`reserve`](Self::reserve)
    /// has ended the trace.
    #[inline(always)]
    pub fn data(&self) -> Option<&P::Aux> {
        let owned = self.transaction.area.cast::<Owned<P::Aux>>();
        // SAFETY: While the transaction is open, the core keeps the area. It is one that a
        // `Registration<P>` has set up, with a `P::Aux`.
        self.transaction.is_open().then(|| unsafe { &(*owned).data })
    }

    /// The size of the AUX area in bytes, a power of two.
    #[inline]
    pub fn size(&self) -> u64 {
        self.transaction.mask.wrapping_add(1)
    }

    /// Whether user space has mapped the area read-only: snapshot mode.
    #[inline]
    pub fn overwrite(&self) -> bool {
        self.transaction.overwrite
    }

    /// Whether the transaction is still open, that is, no [`reserve`](Self::reserve) has ended it.
    #[inline(always)]
    pub(super) fn is_open(&self) -> bool {
        self.transaction.is_open()
    }

    /// Where the next byte goes. In snapshot mode that is an offset that counts on beyond the size
    /// of the area, else a running count of all bytes.
    #[inline(always)]
    pub fn head(&self) -> u64 {
        self.transaction.head
    }

    /// How many bytes can be put without asking user space: in snapshot mode any number.
    #[inline]
    pub fn room(&self) -> u64 {
        self.transaction.limit.wrapping_sub(self.transaction.head)
    }

    /// Makes sure that there is room for `size` bytes, and that user space is woken up when it
    /// wants to be. If there is no room, the trace is truncated and the transaction over: the
    /// answer is `false`, the event counts as stopped, and it is up to the driver to stop the unit.
    #[inline(always)]
    pub fn reserve(&mut self, size: u64, _cx: &NmiLike<'_>) -> bool {
        let transaction = &mut *self.transaction;
        if transaction.head < transaction.wakeup
            && transaction.limit.wrapping_sub(transaction.head) >= size
        {
            return true;
        }
        self.renew(size)
    }

    #[inline(never)]
    fn renew(&mut self, size: u64) -> bool {
        let event = self.transaction.handle.event;
        if !self.transaction.is_open() {
            return false;
        }
        if self.transaction.renew(size) {
            return true;
        }
        // SAFETY: The event is on this CPU, or there would not have been a transaction.
        unsafe { OnCpu::<P>::from_raw(event) }.set_hw_state(super::registration::CLOSED);
        false
    }

    /// Appends `bytes`. If there is no room for all of them, none is written, the trace is marked as
    /// truncated, and the answer is `false`. With what was [reserved](Self::reserve) that does not
    /// happen.
    ///
    /// Readers are told of them when the transaction ends, or at [`reserve`](Self::reserve).
    #[inline(always)]
    pub fn put(&mut self, bytes: &[u8]) -> bool {
        self.transaction.put(bytes)
    }

    /// Adds something to say about this transaction. ([`AuxFlag::Truncated`] has the core disable
    /// the event.)
    #[inline]
    pub fn flag(&mut self, flags: AuxFlags) {
        self.transaction.flag(flags);
    }

    #[inline(always)]
    pub(super) fn as_raw(&mut self) -> *mut bindings::perf_output_handle {
        self.transaction.as_raw()
    }
}
