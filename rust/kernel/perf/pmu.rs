// SPDX-License-Identifier: GPL-2.0

//! The PMU trait, its C table, and registration.

use super::{
    bindings,
    filter,
    sysfs::Groups,
    AddressFilters,
    AttributeGroup,
    AuxArea,
    Event,
    IrqsOff,
    NmiLike,
    SampleOutput, //
};
use crate::{
    error::{
        from_result,
        to_result,
        VTABLE_DEFAULT_ERROR, //
    },
    impl_flags,
    module::this_module,
    prelude::*,
    types::{
        ForeignOwnable,
        Opaque, //
    }, //
};
use core::marker::PhantomData;

impl_flags!(
    /// What a PMU can and can not do (`PERF_PMU_CAP_*`).
    #[derive(Debug, Clone, Default, Copy, PartialEq, Eq)]
    pub struct Capabilities(u32);

    /// One thing that a PMU can or can not do.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Capability {
        /// There is no interrupt, hence no sampling.
        NoInterrupt = bindings::PERF_PMU_CAP_NO_INTERRUPT,

        /// The AUX area has to be contiguous in memory.
        AuxNoScatterGather = bindings::PERF_PMU_CAP_AUX_NO_SG,

        /// One event at a time in a context.
        Exclusive = bindings::PERF_PMU_CAP_EXCLUSIVE,

        /// An instruction trace: the core says where it begins (`PERF_RECORD_ITRACE_START`).
        InstructionTrace = bindings::PERF_PMU_CAP_ITRACE,

        /// No `exclude_*` attribute is possible.
        NoExclude = bindings::PERF_PMU_CAP_NO_EXCLUDE,

        /// The AUX area should come in large pieces of contiguous memory.
        AuxPreferLarge = bindings::PERF_PMU_CAP_AUX_PREFER_LARGE,

        /// Other events of the group can pause and resume the trace ([`Stop::Pause`],
        /// [`Start::Resume`], [`Event::aux_paused`]).
        AuxPause = bindings::PERF_PMU_CAP_AUX_PAUSE,
    }
);

impl Capabilities {
    /// The capabilities of both, in constants.
    pub const fn with(self, one: Capability) -> Self {
        Self(self.0 | one as u32)
    }

    /// No capability.
    pub const fn none() -> Self {
        Self(0)
    }
}

/// How a PMU is to start.
pub enum Start<'a> {
    /// The event runs from now on. If an AUX transaction is open it goes on, else one is begun.
    /// While [`Event::aux_paused`] says so, nothing is to be traced all the same.
    Run(&'a IrqsOff<'a>),
    /// Another event of the group resumes the trace. Only a matter for an event that runs: one that
    /// is stopped finds out when it starts. Needs [`Capability::AuxPause`].
    ///
    /// May interrupt the other callbacks, also in the middle.
    Resume(&'a NmiLike<'a>),
}

/// How a PMU is to stop.
pub enum Stop<'a> {
    /// The AUX transaction must be closed when the callback returns.
    Update(&'a IrqsOff<'a>),
    /// The event is throttled: it will probably be started again soon. An AUX transaction in
    /// snapshot mode stays open, so that samples can still be taken.
    Keep(&'a NmiLike<'a>),
    /// Another event of the group pauses the trace. The event goes on running, and an AUX
    /// transaction stays open. Needs [`Capability::AuxPause`].
    ///
    /// May interrupt the other callbacks, also in the middle.
    Pause(&'a NmiLike<'a>),
}

/// A performance monitoring unit.
///
/// The implementing type is the driver's own state; the callbacks of all its events share it.
///
/// # Examples
///
/// A PMU that counts nothing, for any task that wants to:
///
/// ```
/// use kernel::{perf, prelude::*};
///
/// struct Nothing;
///
/// #[vtable]
/// impl perf::Pmu for Nothing {
///     type Aux = KBox<()>;
///
///     const CAPABILITIES: perf::Capabilities = perf::Capabilities::none();
///     const GROUPS: &'static [perf::AttributeGroup] = &[perf::AttributeGroup {
///         name: c"format",
///         attributes: &[perf::Attribute::new(c"nothing", c"config:0")],
///     }];
///
///     fn event_init(&self, event: &perf::Event<Self>) -> Result {
///         if event.config() & !1 != 0 {
///             return Err(EINVAL);
///         }
///         Ok(())
///     }
///
///     fn add(&self, _: &perf::Event<Self>, _start: bool, _: &perf::IrqsOff<'_>) -> Result {
///         Ok(())
///     }
///
///     fn del(&self, _: &perf::Event<Self>, _: &perf::IrqsOff<'_>) {}
///     fn start(&self, _: &perf::Event<Self>, _: perf::Start<'_>) {}
///     fn stop(&self, _: &perf::Event<Self>, _: perf::Stop<'_>) {}
/// }
///
/// let pmu = KBox::pin_init(perf::Registration::new(c"rust_doctest", Nothing), GFP_KERNEL)?;
/// drop(pmu);
/// # Ok::<(), Error>(())
/// ```
#[vtable]
pub trait Pmu: Sized + Send + Sync + 'static {
    /// What the driver keeps per AUX area.
    type Aux: ForeignOwnable + Send + Sync;

    /// What the unit can and can not do.
    const CAPABILITIES: Capabilities;

    /// Its sysfs directories.
    const GROUPS: &'static [AttributeGroup];

    /// How many address filters an event can have (`nr_addr_filters` in sysfs). A PMU that can't
    /// filter by address has none, and no [`validate_filters`](Self::validate_filters).
    const ADDRESS_FILTERS: u32 = 0;

    /// Is `event` one that this PMU can do?
    ///
    /// Called from `perf_event_open(2)`, and when a task that is observed forks.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it makes no sense, `EOPNOTSUPP` if it does but can't be done, `EACCES` if the
    /// caller may not.
    fn event_init(&self, event: &Event<Self>) -> Result;

    /// Puts `event` on this CPU, and starts it if `start` says so.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the unit is taken.
    fn add(&self, event: &Event<Self>, start: bool, cx: &IrqsOff<'_>) -> Result;

    /// Takes `event` off this CPU; stops it as [`Stop::Update`] does.
    fn del(&self, event: &Event<Self>, cx: &IrqsOff<'_>);

    /// Starts `event`, which is on this CPU.
    fn start(&self, event: &Event<Self>, how: Start<'_>);

    /// Stops `event`, which is on this CPU.
    fn stop(&self, event: &Event<Self>, how: Stop<'_>);

    /// Can this PMU do these address filters, which are no more than [`Self::ADDRESS_FILTERS`]?
    ///
    /// Called from `ioctl(2)`, before an event gets them. Where they are in memory,
    /// [`Event::address_ranges`] tells later.
    ///
    /// # Errors
    ///
    /// `EINVAL` if they make no sense, `EOPNOTSUPP` if they do but can't be done.
    fn validate_filters(_filters: &AddressFilters<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Prepares for an AUX area that was just allocated.
    ///
    /// `overwrite` says that user space maps the area read-only, that is, snapshot mode. The area
    /// is zeroed. What is returned is dropped when the last mapping is gone and no transaction is
    /// open.
    ///
    /// # Errors
    ///
    /// User space sees `ENOMEM` whatever the error is; the C interface has no room for another.
    fn setup_aux(
        &self,
        _event: &Event<Self>,
        _area: AuxArea,
        _overwrite: bool,
    ) -> Result<Self::Aux> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Writes the last `out.left()` bytes of the AUX area into a sample, without changing the state
    /// of `event`.
    ///
    /// May interrupt the other callbacks, also in the middle. What is not written is zeroed.
    fn snapshot_aux(&self, _event: &Event<Self>, _out: &mut SampleOutput<'_>, _cx: &NmiLike<'_>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

/// A PMU that the perf core knows.
///
/// The module that implements `T` can not be unloaded while an event of the PMU, or a mapping of
/// one, exists.
///
/// # Invariants
///
/// `pmu` is registered, and its callbacks are those of `VTable<T>`.
#[pin_data(PinnedDrop)]
pub struct Registration<T: Pmu> {
    #[pin]
    pmu: Opaque<bindings::pmu>,
    groups: Groups,
    driver: T,
}

// SAFETY: `perf_pmu_unregister()` may be called from any thread that may sleep.
unsafe impl<T: Pmu> Send for Registration<T> {}
// SAFETY: `&Registration` offers the driver, which is `Sync`.
unsafe impl<T: Pmu> Sync for Registration<T> {}

/// Whether no PMU can be called `name`, because there is a device of that name.
///
/// The driver core would find out too, but it considers that a bug, and says so in the log.
///
/// A module's init function that fails with `EEXIST` fails with `EBUSY` in the end, since the
/// former says that the module is loaded. So a module that lets its user choose the name asks this
/// first, to say what is wrong.
#[inline(never)]
pub fn name_is_taken(name: &CStr) -> bool {
    // SAFETY: The platform bus and `/sys/devices`, where it and PMUs are, exist from boot on. The
    // reference that the lookup takes is given back.
    unsafe {
        let devices = (*bindings::platform_bus.kobj.kset).kobj.sd;
        let node = bindings::kernfs_find_and_get_ns(devices, name.as_char_ptr(), core::ptr::null());
        let found = !node.is_null();
        bindings::kernfs_put(node);
        found
    }
}

impl<T: Pmu> Registration<T> {
    /// Registers a PMU called `name`, with a type number of the core's choice.
    ///
    /// # Errors
    ///
    /// `EEXIST` if a device of that name exists. May sleep.
    pub fn new(name: &'static CStr, driver: T) -> impl PinInit<Self, Error> {
        try_pin_init!(&this in Self {
            groups: Groups::new(T::GROUPS)?,
            driver: driver,
            pmu <- Opaque::try_ffi_init(move |slot: *mut bindings::pmu| {
                if name_is_taken(name) {
                    return Err(EEXIST);
                }
                // SAFETY: `groups` was initialized above; nothing else refers to it yet.
                let groups = unsafe { (*this.as_ptr()).groups.as_ptr() };
                // SAFETY: The initializer may write to the slot.
                unsafe { slot.write(VTable::<T>::build(groups)) };
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
    /// `event` must be a valid event whose `pmu` is registered by a `Registration<T>`.
    #[inline]
    unsafe fn driver_of<'a>(event: *mut bindings::perf_event) -> &'a T {
        // SAFETY: By the safety requirements `pmu` is the field of a `Registration<T>`. The module
        // reference that an event holds keeps the registration alive.
        unsafe {
            let pmu = Opaque::cast_from((*event).pmu.cast_const());
            &(*crate::container_of!(pmu, Registration<T>, pmu)).driver
        }
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
    fn build(groups: *mut *const bindings::attribute_group) -> bindings::pmu {
        let mut pmu: bindings::pmu = pin_init::zeroed();
        pmu.module = this_module::<T::OwnerModule>().as_ptr();
        pmu.attr_groups = groups;
        pmu.capabilities = u32::from(T::CAPABILITIES) as c_int;
        pmu.task_ctx_nr = bindings::perf_event_task_context_perf_sw_context;
        pmu.event_init = Some(Self::event_init);
        pmu.add = Some(Self::add);
        pmu.del = Some(Self::del);
        pmu.start = Some(Self::start);
        pmu.stop = Some(Self::stop);
        pmu.read = Some(Self::read);
        if T::HAS_SETUP_AUX {
            pmu.setup_aux = Some(Self::setup_aux);
            pmu.free_aux = Some(Self::free_aux);
        }
        if T::HAS_SNAPSHOT_AUX {
            pmu.snapshot_aux = Some(Self::snapshot_aux);
        }
        if T::ADDRESS_FILTERS != 0 {
            pmu.nr_addr_filters = T::ADDRESS_FILTERS;
            pmu.addr_filters_validate = Some(Self::validate_filters);
            pmu.addr_filters_sync = Some(filter::sync);
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
            // SAFETY: The core calls this for events of this PMU.
            let driver = unsafe { Registration::<T>::driver_of(event) };
            // SAFETY: As above.
            driver.event_init(unsafe { Event::from_raw(event) })?;
            if T::ADDRESS_FILTERS != 0 {
                // SAFETY: The event is being created, and this is the only code here that uses
                // these fields.
                unsafe { filter::init(event, T::ADDRESS_FILTERS as usize)? };
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that is to do `event`.
    unsafe extern "C" fn add(event: *mut bindings::perf_event, flags: c_int) -> c_int {
        from_result(|| {
            // SAFETY: The core calls `add` with interrupts off, for an initialized event of this
            // PMU, and never from an NMI.
            let (cx, driver, event) = unsafe {
                (
                    IrqsOff::new(),
                    Registration::<T>::driver_of(event),
                    Event::from_raw(event),
                )
            };
            let start = flags & bindings::PERF_EF_START as c_int != 0;
            driver.add(event, start, &cx)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn del(event: *mut bindings::perf_event, _flags: c_int) {
        // SAFETY: As in `add`.
        let (cx, driver, event) = unsafe {
            (
                IrqsOff::new(),
                Registration::<T>::driver_of(event),
                Event::from_raw(event),
            )
        };
        driver.del(event, &cx);
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn start(event: *mut bindings::perf_event, flags: c_int) {
        // SAFETY: The core calls this for an initialized event of this PMU.
        let (driver, event) =
            unsafe { (Registration::<T>::driver_of(event), Event::from_raw(event)) };
        if flags & bindings::PERF_EF_RESUME as c_int != 0 {
            // SAFETY: `perf_event_aux_pause()` has switched interrupts off, and may be in an NMI.
            driver.start(event, Start::Resume(&unsafe { NmiLike::new() }));
        } else {
            // SAFETY: The core starts events from the scheduler, from interrupts and from IPIs.
            driver.start(event, Start::Run(&unsafe { IrqsOff::new() }));
        }
    }

    /// # Safety
    ///
    /// To be called by the perf core, with interrupts off, on the CPU that does `event`.
    unsafe extern "C" fn stop(event: *mut bindings::perf_event, flags: c_int) {
        // SAFETY: The core calls this for an initialized event of this PMU.
        let (driver, event) =
            unsafe { (Registration::<T>::driver_of(event), Event::from_raw(event)) };
        if flags & bindings::PERF_EF_PAUSE as c_int != 0 {
            // SAFETY: As in `start`.
            driver.stop(event, Stop::Pause(&unsafe { NmiLike::new() }));
        } else if flags & bindings::PERF_EF_UPDATE as c_int != 0 {
            // SAFETY: The core updates counts from the scheduler, from interrupts and from IPIs.
            driver.stop(event, Stop::Update(&unsafe { IrqsOff::new() }));
        } else {
            // SAFETY: Interrupts are off; a sibling that overflows in an NMI throttles its group.
            driver.stop(event, Stop::Keep(&unsafe { NmiLike::new() }));
        }
    }

    /// # Safety
    ///
    /// To be called by the perf core.
    unsafe extern "C" fn read(_event: *mut bindings::perf_event) {
        // A PMU with an AUX area counts nothing.
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
        pages: *mut *mut c_void,
        nr_pages: c_int,
        overwrite: bool,
    ) -> *mut c_void {
        let aux = || -> Result<T::Aux> {
            // SAFETY: The core passes an array that it keeps until it has called `free_aux`.
            let area = unsafe { AuxArea::new(pages, usize::try_from(nr_pages)?)? };
            // SAFETY: The core calls this for an initialized event of this PMU.
            let (driver, event) =
                unsafe { (Registration::<T>::driver_of(event), Event::from_raw(event)) };
            driver.setup_aux(event, area, overwrite)
        };
        aux().map_or(core::ptr::null_mut(), T::Aux::into_foreign)
    }

    /// # Safety
    ///
    /// To be called by the perf core, with what [`Self::setup_aux`] returned, once.
    unsafe extern "C" fn free_aux(aux: *mut c_void) {
        // SAFETY: By the safety requirements.
        drop(unsafe { T::Aux::from_foreign(aux) });
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
        let (driver, event) =
            unsafe { (Registration::<T>::driver_of(event), Event::from_raw(event)) };
        // SAFETY: By the safety requirements.
        let mut out = unsafe { SampleOutput::new(handle, size, &cx) };
        driver.snapshot_aux(event, &mut out, &cx);
        out.finish();
        // All of it was written: trace, then zeros.
        size as c_long
    }
}
