// SPDX-License-Identifier: GPL-2.0

//! Registration of a PMU, and its C table.
//!
//! The C callbacks are here. They keep what the core wants of every PMU, so that drivers needn't:
//! the event's state (`hw.state`), its count, its AUX transaction, and the answer to a pause that
//! comes while the event is started.

use super::{
    aux::{
        self,
        Area,
        Transaction, //
    },
    bindings,
    event::{
        Changing,
        Private, //
    },
    field,
    filter::{
        self,
        Synced, //
    },
    pmu::{
        Capability,
        Context,
        Pmu,
        Start,
        Stop, //
    },
    sysfs::{
        self,
        Groups, //
    },
    timer::Timer,
    AddressFilters,
    Attr,
    Current,
    Event,
    OnCpu,
    SampleOutput, //
};
use crate::{
    device::Device,
    error::{
        from_result,
        to_result, //
    },
    module::this_module,
    nmi::{
        IrqsOff,
        NmiCell,
        NmiLike, //
    },
    prelude::*,
    str::CString,
    sync::{
        aref::ARef,
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    },
    types::Opaque, //
};
use core::{
    marker::PhantomData,
    ptr,
    sync::atomic::{
        compiler_fence,
        Ordering::SeqCst, //
    }, //
};

/// `hw.state` of an event that is stopped.
pub(super) const STOPPED: u32 = bindings::PERF_HES_STOPPED;

/// `hw.state` of an event that is being started: what its counter shows is not counted yet.
const STARTING: u32 = bindings::PERF_HES_UPTODATE;

/// `hw.state` of an event that is stopped, with its count up to date and no AUX transaction.
pub(super) const CLOSED: u32 = bindings::PERF_HES_STOPPED | bindings::PERF_HES_UPTODATE;

/// A PMU that the perf core knows.
///
/// The module that implements `T` can not be unloaded while an event of the PMU exists, or a
/// mapping of the ring or the AUX area of one. So a registration in the module's own data is
/// dropped when there is none.
///
/// One that is dropped earlier takes its events from their users: they count and trace no more,
/// and `read(2)` returns what they had counted. AUX areas stay mapped, and keep the module until
/// they are not.
///
/// To drop a registration waits for its callbacks. So it must not be dropped in one of them, which
/// would wait for ever. Nor must a module that goes away leave one behind (`mem::forget`): as with
/// all registrations, the core would call code that is no longer there.
///
/// # Invariants
///
/// `pmu` is registered, and its callbacks are those of `VTable<T>`.
#[pin_data(PinnedDrop)]
pub struct Registration<T: Pmu> {
    owner: u64,
    current: Option<Arc<Current<T>>>,
    groups: Groups,
    name: CString,
    parent: Option<ARef<Device>>,
    #[pin]
    driver: T,
    #[pin]
    pmu: Opaque<bindings::pmu>,
}

// SAFETY: `perf_pmu_unregister()` may be called from any thread that may sleep.
unsafe impl<T: Pmu> Send for Registration<T> {}
// SAFETY: `&Registration` offers the driver, which is `Sync`.
unsafe impl<T: Pmu> Sync for Registration<T> {}

impl<T: Pmu> Registration<T> {
    /// Registers a PMU called `name`, with a type number of the core's choice. May sleep.
    ///
    /// # Errors
    ///
    /// `EEXIST` if a device of that name exists, `EINVAL` if `name`, or one that the driver has
    /// given to a file or directory, can't be the name of one. The kernel log says which.
    pub fn new<'a, E, I>(name: &'a CStr, driver: I) -> impl PinInit<Self, Error> + use<'a, T, E, I>
    where
        I: PinInit<T, E>,
        Error: From<E>,
    {
        Self::with_parent(name, None, driver)
    }

    /// The same for a PMU that is part of the device `parent`: its directory in sysfs is in the
    /// device's.
    ///
    /// The driver of the device drops the registration when it is unbound.
    pub fn with_parent<'a, E, I>(
        name: &'a CStr,
        parent: Option<&'a Device>,
        driver: I,
    ) -> impl PinInit<Self, Error> + use<'a, T, E, I>
    where
        I: PinInit<T, E>,
        Error: From<E>,
    {
        const {
            assert!(T::COUNTER_BITS >= 1 && T::COUNTER_BITS <= 64);
            assert!(
                T::ADDRESS_FILTERS <= 64,
                "that many ranges are looked at each time an event starts"
            );
            assert!(
                T::HAS_SETUP_AUX || !T::HAS_SNAPSHOT_AUX,
                "`snapshot_aux` needs an AUX area"
            );
            assert!(
                T::HAS_VALIDATE_FILTERS == (T::ADDRESS_FILTERS != 0),
                "address filters need `validate_filters`, and it them"
            );
        };
        try_pin_init!(&this in Self {
            owner: aux::new_owner(),
            name: CString::try_from(name)?,
            parent: parent.map(ARef::from),
            groups: Groups::new::<T>()?,
            driver <- driver,
            // SAFETY: The driver was initialized just now.
            current: unsafe { (*this.as_ptr()).driver.current() },
            pmu <- Opaque::try_ffi_init(move |slot: *mut bindings::pmu| {
                // SAFETY: These fields were initialized above; nothing else refers to them yet.
                let (groups, name, parent) = unsafe {
                    let this = this.as_ptr();
                    let parent = (*this).parent.as_deref();
                    (
                        (*this).groups.as_ptr(),
                        &(*this).name,
                        // A `Device` is a `struct device`.
                        parent.map_or(ptr::null_mut(), |parent| {
                            ptr::from_ref::<Device>(parent).cast_mut().cast()
                        }),
                    )
                };
                sysfs::check_name(name, parent)?;
                // SAFETY: The initializer may write to the slot.
                unsafe { slot.write(VTable::<T>::build(groups, parent)) };
                // SAFETY: The table is complete, its callbacks find `driver` initialized, and it
                // stays in place until `drop` unregisters it.
                // INVARIANT: If this returns `Ok`, the PMU is registered.
                to_result(unsafe { bindings::perf_pmu_register(slot, name.as_char_ptr(), -1) })
            }),
        }? Error)
    }

    /// The driver's state.
    pub fn driver(&self) -> &T {
        &self.driver
    }

    /// # Safety
    ///
    /// `pmu` must be registered by a `Registration<T>`, for `'a`.
    #[inline(always)]
    pub(super) unsafe fn of_pmu<'a>(pmu: *mut bindings::pmu) -> &'a Self {
        // SAFETY: By the safety requirements.
        unsafe { &*crate::container_of!(Opaque::cast_from(pmu.cast_const()), Self, pmu) }
    }

    /// # Safety
    ///
    /// `event` must be valid for `'a`, with a `pmu` that is registered by a `Registration<T>`.
    #[inline(always)]
    unsafe fn of<'a>(event: *mut bindings::perf_event) -> &'a Self {
        // SAFETY: By the safety requirements; an event keeps its PMU, until that is taken from it.
        unsafe { Self::of_pmu((*event).pmu) }
    }

    /// # Safety
    ///
    /// As [`of`](Self::of).
    #[inline(always)]
    pub(super) unsafe fn driver_of<'a>(event: *mut bindings::perf_event) -> &'a T {
        // SAFETY: By the safety requirements.
        unsafe { &Self::of(event).driver }
    }
}

#[pinned_drop]
impl<T: Pmu> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: The PMU is registered by the type invariants. Events that still exist are taken
        // off by this call; it does not fail for a PMU without `event_unmapped`.
        unsafe { bindings::perf_pmu_unregister(self.pmu.get()) };
    }
}

/// The callbacks of a PMU, as the C side calls them.
struct VTable<T: Pmu>(PhantomData<T>);

impl<T: Pmu> VTable<T> {
    fn build(
        groups: *mut *const bindings::attribute_group,
        parent: *mut bindings::device,
    ) -> bindings::pmu {
        let mut pmu: bindings::pmu = pin_init::zeroed();
        pmu.module = this_module::<T::OwnerModule>().as_ptr();
        pmu.attr_groups = groups;
        pmu.parent = parent;
        pmu.capabilities = u32::from(T::CAPABILITIES) as c_int;
        (pmu.task_ctx_nr, pmu.scope) = match T::CONTEXT {
            Context::Software => (bindings::perf_event_task_context_perf_sw_context, 0),
            Context::Hardware => (bindings::perf_event_task_context_perf_hw_context, 0),
            Context::Uncore(scope) => (
                bindings::perf_event_task_context_perf_invalid_context,
                scope as u32,
            ),
        };
        pmu.event_init = Some(Self::event_init);
        pmu.add = Some(Self::add);
        pmu.del = Some(Self::del);
        pmu.start = Some(Self::start);
        pmu.stop = Some(Self::stop);
        pmu.read = Some(Self::read);
        if T::HAS_SETUP_AUX {
            pmu.setup_aux = Some(Self::setup_aux);
            pmu.free_aux = Some(aux::free_aux);
        }
        if T::HAS_SNAPSHOT_AUX {
            pmu.snapshot_aux = Some(Self::snapshot_aux);
        }
        if T::ADDRESS_FILTERS != 0 {
            pmu.nr_addr_filters = T::ADDRESS_FILTERS;
            pmu.addr_filters_validate = Some(Self::validate_filters);
            pmu.addr_filters_sync = Some(filter::sync::<T>);
        }
        pmu
    }

    /// # Safety
    ///
    /// To be called by the perf core, with an event that is being created.
    unsafe extern "C" fn event_init(event: *mut bindings::perf_event) -> c_int {
        // SAFETY: The event is valid, and `pmu` was set before the call.
        let other = unsafe { (*event).attr.type_ != (*(*event).pmu).type_ as u32 };
        if other {
            // The core asks every PMU about an event of a type that nobody registered.
            return ENOENT.to_errno();
        }
        from_result(|| {
            // SAFETY: The core calls this for an event of this PMU that is being created.
            let (this, attr) = unsafe { (Registration::<T>::of(event), Attr::new(event)) };
            // SAFETY: As above.
            unsafe { field::check(T::FORMAT, event)? };
            if let Context::Uncore(_) = T::CONTEXT {
                if attr.is_per_task() || attr.is_sampling() {
                    return Err(EINVAL);
                }
            }
            let ranges = Synced::new(T::ADDRESS_FILTERS as usize)?;
            let (data, state) = this.driver.event_init(&attr)?;
            let private = KBox::new(
                Private::<T> {
                    data,
                    cell: NmiCell::new(Changing {
                        state,
                        transaction: Transaction::closed(this.owner),
                    }),
                    ranges,
                    timer: Timer::new(),
                    in_overflow: Atomic::new(false),
                },
                GFP_KERNEL,
            )?;
            let private = KBox::into_raw(private);
            // SAFETY: The box is not moved any more. Nobody else knows the event yet.
            unsafe {
                #[cfg(not(PERF_IN_MODULE))]
                Timer::init(&raw mut (*private).timer, event);
                (*event).pmu_private = private.cast();
                (*event).destroy = Some(Self::destroy);
                (*event).hw.state = CLOSED as c_int;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the perf core, once, with an event for which
    /// [`event_init`](Self::event_init) has succeeded, that is on no CPU and will never be again.
    unsafe extern "C" fn destroy(event: *mut bindings::perf_event) {
        // SAFETY: The pointer is the one that `event_init` has stored.
        drop(unsafe { KBox::from_raw((*event).pmu_private.cast::<Private<T>>()) });
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that is to do `event`.
    unsafe extern "C" fn add(event: *mut bindings::perf_event, flags: c_int) -> c_int {
        from_result(|| {
            // SAFETY: The core calls `add` with interrupts off, for an initialized event of this
            // PMU, and never from an NMI.
            let (cx, this, event) = unsafe {
                (
                    IrqsOff::new(),
                    Registration::<T>::of(event),
                    OnCpu::<T>::from_raw(event),
                )
            };
            let current = this.current.as_ref();
            if current.is_some_and(|current| !current.take(event, &cx)) {
                return Err(EBUSY);
            }
            event.set_hw_state(CLOSED);
            this.driver.add(event, &cx).inspect_err(|_| {
                current.inspect(|current| current.release(&cx));
            })?;
            if flags & bindings::PERF_EF_START as c_int != 0 {
                Self::run(&this.driver, event, &cx);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn del(event: *mut bindings::perf_event, _flags: c_int) {
        // SAFETY: As in `add`.
        let (cx, this, event) = unsafe {
            (
                IrqsOff::new(),
                Registration::<T>::of(event),
                OnCpu::<T>::from_raw(event),
            )
        };
        Self::close(&this.driver, event, &cx);
        this.driver.del(event, &cx);
        // Whatever the driver has made of it.
        Self::end(event, &cx);
        this.current
            .as_ref()
            .inspect(|current| current.release(&cx));
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn start(event: *mut bindings::perf_event, flags: c_int) {
        // SAFETY: The core calls this for an initialized event of this PMU.
        let (driver, event) = unsafe {
            (
                Registration::<T>::driver_of(event),
                OnCpu::<T>::from_raw(event),
            )
        };
        if flags & bindings::PERF_EF_RESUME as c_int != 0 {
            if event.is_running() {
                // SAFETY: `perf_event_aux_pause()` has switched interrupts off, and may be in an
                // NMI.
                driver.start(event, Start::Resume(&unsafe { NmiLike::new() }));
            }
        } else if event.private().in_overflow.load(Relaxed) {
            if event.hw_state() == STOPPED {
                event.set_hw_state(0);
                // SAFETY: As in `OnCpu::overflow`, which called the core.
                driver.start(event, Start::Restart(&unsafe { NmiLike::new() }));
            }
        } else {
            // SAFETY: The core starts events from the scheduler, from interrupts and from IPIs;
            // only in an overflow, where we are not, it does so from an NMI.
            Self::run(driver, event, &unsafe { IrqsOff::new() });
        }
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn stop(event: *mut bindings::perf_event, flags: c_int) {
        // SAFETY: The core calls this for an initialized event of this PMU.
        let (driver, event) = unsafe {
            (
                Registration::<T>::driver_of(event),
                OnCpu::<T>::from_raw(event),
            )
        };
        let update = flags & bindings::PERF_EF_UPDATE as c_int != 0;
        if flags & bindings::PERF_EF_PAUSE as c_int != 0 {
            if event.is_running() {
                // SAFETY: As in `start`.
                driver.stop(event, Stop::Pause(&unsafe { NmiLike::new() }));
            }
        } else if update && !event.private().in_overflow.load(Relaxed) {
            // SAFETY: As in `start`.
            Self::close(driver, event, &unsafe { IrqsOff::new() });
        } else if event.is_running() {
            // SAFETY: Interrupts are off; a sibling that overflows in an NMI throttles its group.
            let cx = unsafe { NmiLike::new() };
            let state = event.hw_state();
            // In this order, so that no NMI resumes what is stopped here.
            event.set_hw_state(state | STOPPED);
            event.private().timer.disarm();
            driver.stop(event, Stop::Keep(&cx));
            // Whether the core asks for it or not: where the event is started again, its count
            // goes on from there.
            if T::HAS_READ && state == 0 {
                event.count_to(|| driver.read(event, &cx));
            }
        }
    }

    /// Starts `event`, if it does not run.
    #[inline]
    fn run(driver: &T, event: &OnCpu<T>, cx: &IrqsOff<'_>) {
        if event.is_running() {
            return;
        }
        if T::HAS_SETUP_AUX {
            let open = event.private().cell.with(|inner| {
                inner.transaction.is_open()
                    // SAFETY: The event is on this CPU, and one of the PMU that the transaction
                    // was made for.
                    || unsafe { inner.transaction.open(event.as_raw()) }
            });
            if open != Some(true) {
                event.set_hw_state(CLOSED);
                return;
            }
        }
        event.set_hw_state(if T::HAS_READ { STARTING } else { 0 });
        driver.start(event, Start::Run(cx));
        if T::HAS_READ {
            event.count_from(driver.read(event, cx));
            event.replace_hw_state(STARTING, 0);
        }
        if T::CAPABILITIES.contains(Capability::AuxPause) {
            Self::tell_pause(driver, event, cx);
        }
    }

    /// Tells the driver whether the trace is paused. An NMI may pause or resume it at any time, and
    /// tells the driver so, which what is told here must not undo.
    fn tell_pause(driver: &T, event: &OnCpu<T>, cx: &NmiLike<'_>) {
        let mut told = false;
        loop {
            let paused = event.aux_paused();
            if paused != told {
                if paused {
                    driver.stop(event, Stop::Pause(cx));
                } else {
                    driver.start(event, Start::Resume(cx));
                }
                told = paused;
            }
            compiler_fence(SeqCst);
            if event.aux_paused() == told {
                return;
            }
        }
    }

    /// Stops `event`, with its count up to date and without a transaction.
    #[inline]
    fn close(driver: &T, event: &OnCpu<T>, cx: &IrqsOff<'_>) {
        let state = event.hw_state();
        if state == CLOSED {
            return;
        }
        event.set_hw_state(state | STOPPED);
        driver.stop(event, Stop::Update(cx));
        if T::HAS_READ && state == 0 {
            event.count_to(|| driver.read(event, cx));
        }
        Self::end(event, cx);
    }

    /// Ends what belongs to an event that is on a CPU.
    #[inline]
    fn end(event: &OnCpu<T>, cx: &IrqsOff<'_>) {
        let private = event.private();
        private.timer.cancel(cx);
        if T::HAS_SETUP_AUX {
            // Nobody is at it: with interrupts off and outside of an NMI, this has interrupted
            // nothing that could be.
            private.cell.with(|inner| inner.transaction.close());
        }
        event.set_hw_state(CLOSED);
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, for an event that is on this CPU, or on
    /// one of the same scope.
    unsafe extern "C" fn read(event: *mut bindings::perf_event) {
        if T::HAS_READ {
            // SAFETY: The core calls this for an initialized event of this PMU.
            let (driver, event) = unsafe {
                (
                    Registration::<T>::driver_of(event),
                    Event::<T>::from_raw(event),
                )
            };
            // SAFETY: Interrupts are off; a sibling that overflows in an NMI reads its group.
            let cx = unsafe { NmiLike::new() };
            if event.hw_state() == 0 {
                event.count_to(|| driver.read(event, &cx));
            }
        }
    }

    /// # Safety
    ///
    /// To be called by the perf core, with a list of `struct perf_addr_filter` that nobody else
    /// uses.
    unsafe extern "C" fn validate_filters(filters: *mut bindings::list_head) -> c_int {
        from_result(|| {
            // SAFETY: By the safety requirements.
            let filters = unsafe { AddressFilters::new(filters) };
            // The core has room for so many ranges, and leaves it to the PMU to count.
            if filters.iter().count() > T::ADDRESS_FILTERS as usize {
                return Err(EOPNOTSUPP);
            }
            T::validate_filters(&filters)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the perf core, when user space maps an AUX area of `nr_pages` pages.
    unsafe extern "C" fn setup_aux(
        event: *mut bindings::perf_event,
        _pages: *mut *mut c_void,
        nr_pages: c_int,
        overwrite: bool,
    ) -> *mut c_void {
        let area = || -> Result<*mut c_void> {
            // An event whose ring is another one's has mapped nothing. The core takes its area all
            // the same, and counts its mappings wrong.
            // SAFETY: The event is valid, and this is its `mmap()`, which the core's locks protect.
            let mapped = unsafe {
                Atomic::<i32>::from_ptr((&raw mut (*event).mmap_count.refs.counter).cast())
            };
            if mapped.load(Relaxed) == 0 {
                return Err(EINVAL);
            }
            // SAFETY: The core calls this for an initialized event of this PMU.
            let (this, event) =
                unsafe { (Registration::<T>::of(event), Event::<T>::from_raw(event)) };
            let size = u64::try_from(nr_pages)? * crate::page::PAGE_SIZE as u64;
            let data = this.driver.setup_aux(event, size, overwrite)?;
            let module = this_module::<T::OwnerModule>().as_ptr();
            Ok(Area::new(data, this.owner, module)?.as_ptr().cast())
        };
        area().unwrap_or(ptr::null_mut())
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`, with an
    /// open output that has `size` bytes left for the sample.
    unsafe extern "C" fn snapshot_aux(
        event: *mut bindings::perf_event,
        handle: *mut bindings::perf_output_handle,
        size: usize,
    ) -> c_long {
        // SAFETY: `perf_pmu_snapshot_aux()` has switched interrupts off.
        let cx = unsafe { NmiLike::new() };
        // SAFETY: The core calls this for an initialized event of this PMU.
        let (driver, event) = unsafe {
            (
                Registration::<T>::driver_of(event),
                OnCpu::<T>::from_raw(event),
            )
        };
        // SAFETY: By the safety requirements.
        let mut out = unsafe { SampleOutput::new(handle, size, &cx) };
        driver.snapshot_aux(event, &mut out, &cx);
        out.finish();
        // All of it was written: trace, then zeros.
        size as c_long
    }
}
