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
        /// # Safety
        ///
        /// To be called once, with an area that this function's caller has made.
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
///
/// `until` is at most `limit`. For each `at` from `head` up to it, `base + at` is the address of
/// the byte of the area that `at` stands for.
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
    /// The lesser of the two, but never so far ahead that the way there is no `i64`.
    ready: u64,
    /// The page that `head` is in: its address, less the head that its first byte stands for, and
    /// the head up to which it can be written.
    base: *mut u8,
    until: u64,
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
            ready: 0,
            base: ptr::null_mut(),
            until: 0,
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
        let own: unsafe extern "C" fn(*mut c_void) = free_aux;
        let ours = free.is_some_and(|free| ptr::fn_addr_eq(free, own))
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
        self.ready = self
            .limit
            .min(self.wakeup)
            .min(head.wrapping_add(i64::MAX as u64));
        self.until = head;
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
        self.ready = self.head;
        self.until = self.head;
        // SAFETY: The handle is open by the type invariants.
        unsafe { bindings::perf_aux_output_end(&mut self.handle, size) };
    }

    /// Tells user space what there is, and finds out what it has read. The transaction must be
    /// open. Returns whether there is room for `size` bytes then; if not, the trace is truncated
    /// and the transaction closed.
    #[inline(never)]
    fn renew(&mut self, size: u64) -> bool {
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
        if self.until.wrapping_sub(self.head) < len {
            return self.put_apart(bytes);
        }
        // SAFETY: The bytes are up to `until`, so their place is that of the area by the type
        // invariants. Nobody else writes it: the core lets one transaction be open at a time per
        // buffer.
        unsafe { self.append(bytes) };
        true
    }

    /// # Safety
    ///
    /// There must be as many bytes up to `until`.
    #[inline(always)]
    unsafe fn append(&mut self, bytes: &[u8]) {
        let to = self.base.wrapping_add(self.head as usize);
        // SAFETY: By the safety requirements and the type invariants.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.head = self.head.wrapping_add(bytes.len() as u64);
    }

    /// The same where the page ends, or the room. Apart, so that what fits is a store or two where
    /// its length is known.
    #[inline(never)]
    fn put_apart(&mut self, mut bytes: &[u8]) -> bool {
        if self.limit.wrapping_sub(self.head) < bytes.len() as u64 {
            self.flag(AuxFlag::Truncated.into());
            return false;
        }
        while !bytes.is_empty() {
            if self.until == self.head {
                let place = (self.head & self.mask) as usize;
                let offset = place & (PAGE_SIZE - 1);
                // SAFETY: There is room, so the transaction is open. `place` is less than the size
                // of the area, so that its page is one of `pages`.
                let page: *mut u8 = unsafe { *self.pages.add(place / PAGE_SIZE) }.cast();
                let start = self.head.wrapping_sub(offset as u64);
                // INVARIANT: `head` stands for the byte at `offset` of this page, and those behind
                // it for the rest of the page.
                self.base = page.wrapping_sub(start as usize);
                self.until = start.saturating_add(PAGE_SIZE as u64).min(self.limit);
            }
            let here = self.until.wrapping_sub(self.head) as usize;
            let (now, later) = bytes.split_at_checked(here).unwrap_or((bytes, &[]));
            // SAFETY: There are so many bytes, and as for `put`.
            unsafe { self.append(now) };
            bytes = later;
        }
        true
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
/// # Examples
///
/// A PMU that writes down when its events were started:
///
/// ```
/// use kernel::{
///     nmi::NmiLike,
///     perf,
///     prelude::*,
///     time::{Instant, Monotonic}, //
/// };
///
/// struct Diary(Instant<Monotonic>);
///
/// #[vtable]
/// impl perf::Pmu for Diary {
///     type Data = ();
///     /// How many entries there are.
///     type State = u32;
///     type Aux = ();
///
///     fn event_init(&self, _: &perf::Attr<'_>) -> Result<((), u32)> {
///         Ok(((), 0))
///     }
///
///     fn setup_aux(&self, _: &perf::Event<Self>, _size: u64, _overwrite: bool) -> Result {
///         Ok(())
///     }
///
///     fn start(&self, event: &perf::OnCpu<Self>, how: perf::Start<'_>) {
///         if let perf::Start::Run(cx) = how {
///             event.with_aux(|entries, aux| {
///                 if aux.reserve(8, cx) {
///                     aux.put(&self.0.elapsed().as_nanos().to_le_bytes());
///                     *entries += 1;
///                 }
///             });
///         }
///     }
///
///     fn snapshot_aux(
///         &self,
///         event: &perf::OnCpu<Self>,
///         out: &mut perf::SampleOutput<'_>,
///         _: &NmiLike<'_>,
///     ) {
///         event.with_aux(|_, aux| out.copy_aux(aux, out.left()));
///     }
/// }
///
/// let diary = perf::Registration::new(c"rust_doctest_diary", Diary(Instant::now()));
/// let pmu = KBox::pin_init(diary, GFP_KERNEL)?;
/// drop(pmu);
/// # Ok::<(), Error>(())
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

    /// What [`Pmu::setup_aux`] has returned for this area. [`None`] after
    /// [`reserve`](Self::reserve) has ended the trace.
    #[inline(always)]
    pub fn data(&self) -> Option<&P::Aux> {
        let owned = self.transaction.area.cast::<Owned<P::Aux>>();
        if !self.transaction.is_open() {
            return None;
        }
        // SAFETY: While the transaction is open, the core keeps the area. It is one that a
        // `Registration<P>` has set up, with a `P::Aux`.
        Some(unsafe { &(*owned).data })
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
        // Negative behind the wake-up, if more was put than was reserved.
        let ready = self.transaction.ready.wrapping_sub(self.transaction.head) as i64;
        match i64::try_from(size.max(1)) {
            Ok(size) if size <= ready => true,
            _ => self.renew(size),
        }
    }

    /// [`reserve`](Self::reserve) where it takes more.
    #[inline(never)]
    fn renew(&mut self, size: u64) -> bool {
        let event = self.transaction.handle.event;
        if !self.transaction.is_open() {
            return false;
        }
        if self.transaction.head < self.transaction.wakeup
            && self.transaction.limit.wrapping_sub(self.transaction.head) >= size
        {
            return true;
        }
        if self.transaction.renew(size) {
            return true;
        }
        // SAFETY: The event is on this CPU, or there would not have been a transaction.
        unsafe { OnCpu::<P>::from_raw(event) }.set_hw_state(super::registration::CLOSED);
        false
    }

    /// Appends `bytes`. If there is no room for all of them, none is written, the trace is marked
    /// as truncated, and the answer is `false`. With what was [reserved](Self::reserve) that does
    /// not happen.
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

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_aux)]
mod tests {
    use super::*;

    /// A buffer with an AUX area of one page, and an event that it is the ring of.
    struct Ring {
        event: KBox<bindings::perf_event>,
        rb: KBox<bindings::perf_buffer>,
        _user_page: KBox<bindings::perf_event_mmap_page>,
        page: KBox<[u8; PAGE_SIZE]>,
        pages: KBox<[*mut c_void; 1]>,
    }

    /// # Safety
    ///
    /// All zeros must be a value of `T`.
    unsafe fn zeroed<T>() -> Result<KBox<T>> {
        let mut memory = KBox::<T>::new_uninit(GFP_KERNEL)?;
        // SAFETY: The memory is this function's own; the rest is the caller's promise.
        unsafe {
            memory.as_mut_ptr().write_bytes(0, 1);
            Ok(memory.assume_init())
        }
    }

    /// An area whose data is a number, of nobody's module.
    fn area(owner: u64) -> Result<NonNull<Area>> {
        Area::new(7u64, owner, ptr::null_mut())
    }

    impl Ring {
        /// The area is what `free_aux` frees.
        fn new(
            area: NonNull<Area>,
            free_aux: unsafe extern "C" fn(*mut c_void),
            overwrite: bool,
        ) -> Result<KBox<Self>> {
            // SAFETY: All of them are plain data of C.
            let (event, rb, user_page) = unsafe { (zeroed()?, zeroed()?, zeroed()?) };
            let mut ring = KBox::new(
                Self {
                    event,
                    rb,
                    _user_page: user_page,
                    page: KBox::new([0; PAGE_SIZE], GFP_KERNEL)?,
                    pages: KBox::new([ptr::null_mut(); 1], GFP_KERNEL)?,
                },
                GFP_KERNEL,
            )?;
            ring.pages[0] = ring.page.as_mut_ptr().cast();
            let pages = ring.pages.as_mut_ptr();
            let user_page = &raw mut *ring._user_page;
            let rb = &mut ring.rb;
            rb.refcount.refs.counter = 2;
            rb.aux_mmap_count.refs.counter = 1;
            rb.aux_refcount.refs.counter = 1;
            rb.aux_nr_pages = 1;
            rb.aux_pages = pages;
            rb.aux_overwrite = overwrite.into();
            rb.aux_watermark = PAGE_SIZE as c_long / 2;
            rb.aux_priv = area.as_ptr().cast();
            rb.free_aux = Some(free_aux);
            rb.user_page = user_page;
            ring.event.rb = &raw mut *ring.rb;
            Ok(ring)
        }

        /// Opens a transaction of the registration `owner`.
        fn open(&mut self, owner: u64) -> Transaction {
            let mut transaction = Transaction::closed(owner);
            let event = &raw mut *self.event;
            crate::nmi::irqs_off(|_| {
                // SAFETY: The event is there, nobody else's, and this is its CPU for now.
                unsafe { transaction.open(event) };
            });
            transaction
        }

        /// Whether a transaction left nothing behind.
        fn is_idle(&self) -> bool {
            self.rb.aux_nest == 0
                && self.rb.refcount.refs.counter == 2
                && self.rb.aux_refcount.refs.counter == 1
        }
    }

    /// # Safety
    ///
    /// None is needed.
    unsafe extern "C" fn someone_elses(_: *mut c_void) {}

    /// Another registration of the same driver, or another driver, gets nothing.
    #[test]
    fn the_area_is_the_registrations_own() -> Result {
        let (owner, other) = (new_owner(), new_owner());
        let area = area(owner)?;
        let mut ring = Ring::new(area, free_aux, true)?;
        assert!(!ring.open(other).is_open());
        assert!(ring.is_idle());

        let mut own = ring.open(owner);
        assert!(own.is_open());
        own.close();
        assert!(ring.is_idle());
        // SAFETY: The area is not used any more.
        unsafe { free_aux(area.as_ptr().cast()) };
        Ok(())
    }

    /// What a PMU in C has for its own is not looked at.
    #[test]
    fn another_pmus_area_is_not_ours() -> Result {
        let owner = new_owner();
        let area = area(owner)?;
        let mut ring = Ring::new(area, someone_elses, true)?;
        assert!(!ring.open(owner).is_open());
        assert!(ring.is_idle());
        // SAFETY: The area is not used any more.
        unsafe { free_aux(area.as_ptr().cast()) };
        Ok(())
    }

    /// A snapshot goes round the area; its end is an offset in it.
    #[test]
    fn snapshots_go_round() -> Result {
        let owner = new_owner();
        let area = area(owner)?;
        let mut ring = Ring::new(area, free_aux, true)?;
        let mut transaction = ring.open(owner);
        for byte in 0..=u8::MAX {
            for _ in 0..3 {
                assert!(transaction.put(&[byte; 7]));
            }
        }
        let written = 256 * 3 * 7;
        assert_eq!(transaction.head, written as u64);
        transaction.close();
        assert_eq!(ring.rb.aux_head as usize, written % PAGE_SIZE);
        assert!(!transaction.put(&[1]));
        // The last page's worth of what was written, in its place.
        for at in written - PAGE_SIZE..written {
            assert_eq!(ring.page[at % PAGE_SIZE], (at / 21) as u8);
        }
        // SAFETY: The area is not used any more.
        unsafe { free_aux(area.as_ptr().cast()) };
        Ok(())
    }

    /// A full trace ends where its room does, whatever is put.
    #[test]
    fn a_full_trace_keeps_to_its_room() -> Result {
        let owner = new_owner();
        let area = area(owner)?;
        let mut ring = Ring::new(area, free_aux, false)?;
        let mut transaction = ring.open(owner);
        assert!(transaction.is_open());
        // One byte is kept free, as in every ring.
        let room = transaction.limit - transaction.head;
        assert_eq!(room, PAGE_SIZE as u64 - 1);
        while transaction.limit - transaction.head >= 8 {
            assert!(transaction.put(&[1; 8]));
        }
        assert!(!transaction.put(&[2; 8]));
        // SAFETY: An AUX handle uses this variant of the union.
        let flags = unsafe { transaction.handle.__bindgen_anon_1.aux_flags };
        assert_eq!(flags, u64::from(bindings::PERF_AUX_FLAG_TRUNCATED));
        assert!(transaction.head <= transaction.limit);
        assert!(!ring.page.contains(&2));
        // What the end says is not of interest here, and there is no ring to say it to.
        transaction.head = transaction.begin;
        transaction.handle.__bindgen_anon_1.aux_flags = 0;
        transaction.close();
        // SAFETY: The area is not used any more.
        unsafe { free_aux(area.as_ptr().cast()) };
        Ok(())
    }
}
