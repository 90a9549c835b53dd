// SPDX-License-Identifier: GPL-2.0

//! What a driver says of its PMU, and its callbacks.

use super::{
    bindings,
    AddressFilters,
    Attr,
    AttributeGroup,
    Current,
    Event,
    Field,
    OnCpu,
    SampleOutput, //
};
use crate::{
    error::VTABLE_DEFAULT_ERROR,
    impl_flags,
    nmi::{
        IrqsOff,
        NmiLike, //
    },
    prelude::*,
    sync::Arc,
    time::Delta, //
};

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
        /// See [`Current`] for one at a time on a CPU.
        Exclusive = bindings::PERF_PMU_CAP_EXCLUSIVE,

        /// An instruction trace: the core says where it begins (`PERF_RECORD_ITRACE_START`).
        InstructionTrace = bindings::PERF_PMU_CAP_ITRACE,

        /// No `exclude_*` attribute is possible.
        NoExclude = bindings::PERF_PMU_CAP_NO_EXCLUDE,

        /// The AUX area should come in large pieces of contiguous memory.
        AuxPreferLarge = bindings::PERF_PMU_CAP_AUX_PREFER_LARGE,

        /// Other events of the group can pause and resume the trace ([`Stop::Pause`],
        /// [`Start::Resume`], [`OnCpu::aux_paused`]).
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

/// Which events of a PMU there can be, and which the core can have on a CPU at once
/// (`task_ctx_nr`, `scope`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// Events of tasks and of CPUs, of which any number can count at once (`perf_sw_context`).
    Software,
    /// Events of tasks and of CPUs that share limited hardware (`perf_hw_context`): if
    /// [`Pmu::add`] finds no room for one, the core has them take turns.
    Hardware,
    /// Events of CPUs only, which need no particular CPU, but one of each such part of the machine
    /// (`perf_invalid_context`; "uncore"). The core shows in `cpumask` on which CPUs tools should
    /// open them, and moves them when that CPU goes offline. They take no samples.
    Uncore(Scope),
}

/// What the CPUs have in common that an [uncore](Context::Uncore) PMU belongs to
/// (`enum perf_pmu_scope`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Scope {
    /// The threads of a core.
    Core = bindings::perf_pmu_scope_PERF_PMU_SCOPE_CORE,
    /// A die.
    Die = bindings::perf_pmu_scope_PERF_PMU_SCOPE_DIE,
    /// A cluster of cores.
    Cluster = bindings::perf_pmu_scope_PERF_PMU_SCOPE_CLUSTER,
    /// A package.
    Package = bindings::perf_pmu_scope_PERF_PMU_SCOPE_PKG,
    /// The machine.
    System = bindings::perf_pmu_scope_PERF_PMU_SCOPE_SYS_WIDE,
}

/// How a PMU is to start (`PERF_EF_*`).
pub enum Start<'a> {
    /// The event runs from now on. If the PMU has an AUX area, a transaction is open: one that was
    /// opened just now, or, behind a [`Stop::Keep`], the one from before.
    Run(&'a IrqsOff<'a>),
    /// Inside of [`OnCpu::overflow`], behind a [`Stop::Keep`]: the period may have changed.
    ///
    /// Comes in whatever context `overflow` was called in.
    Restart(&'a NmiLike<'a>),
    /// Another event of the group resumes the trace (`PERF_EF_RESUME`). Only for an event that
    /// runs. Needs [`Capability::AuxPause`].
    ///
    /// May interrupt the other callbacks, also in the middle.
    Resume(&'a NmiLike<'a>),
}

/// How a PMU is to stop (`PERF_EF_*`).
pub enum Stop<'a> {
    /// The event is stopped and its count brought up to date (`PERF_EF_UPDATE`). The AUX
    /// transaction is closed when the callback has returned; what is held back has to be put now.
    Update(&'a IrqsOff<'a>),
    /// The event is throttled, or its period changes: it will probably be started again soon. The
    /// AUX transaction stays open, so that samples can still be taken.
    Keep(&'a NmiLike<'a>),
    /// Another event of the group pauses the trace (`PERF_EF_PAUSE`). The event goes on running,
    /// and the AUX transaction stays open. Needs [`Capability::AuxPause`].
    ///
    /// May interrupt the other callbacks, also in the middle.
    Pause(&'a NmiLike<'a>),
}

/// A performance monitoring unit.
///
/// The implementing type is the driver's own state; the callbacks of all its events share it. Only
/// [`event_init`](Self::event_init) must be there; a PMU has the other callbacks that it needs:
///
/// | PMU | callbacks |
/// |---|---|
/// | counts | [`read`](Self::read), or [`Event::add_count`] from wherever it counts |
/// | takes samples | [`OnCpu::overflow`] from an interrupt |
/// | counts or takes samples by a clock | [`timer`](Self::timer) |
/// | has limited hardware | [`add`](Self::add), [`del`](Self::del) |
/// | has to be switched on and off | [`start`](Self::start), [`stop`](Self::stop) |
/// | has an AUX area | [`setup_aux`](Self::setup_aux) |
/// | has one that others sample | [`snapshot_aux`](Self::snapshot_aux) |
/// | traces only at some addresses | [`validate_filters`](Self::validate_filters) |
///
/// # Examples
///
/// A PMU that counts nanoseconds, for any task that wants to:
///
/// ```
/// use kernel::{
///     nmi::NmiLike,
///     perf::{self, Field, Word},
///     prelude::*,
///     time::{Instant, Monotonic}, //
/// };
///
/// /// Counts from when it was made.
/// struct Nanoseconds(Instant<Monotonic>);
///
/// #[vtable]
/// impl perf::Pmu for Nanoseconds {
///     type Data = ();
///     type State = ();
///     type Aux = ();
///
///     const FORMAT: &'static [Field] = &[Field::new(c"event", Word::Config, 0, 7).at_most(0)];
///     const CAPABILITIES: perf::Capabilities =
///         perf::Capabilities::none().with(perf::Capability::NoInterrupt);
///
///     fn event_init(&self, _: &perf::Attr<'_>) -> Result<((), ())> {
///         Ok(((), ()))
///     }
///
///     fn read(&self, _: &perf::Event<Self>, _: &NmiLike<'_>) -> u64 {
///         self.0.elapsed().as_nanos() as u64
///     }
/// }
///
/// let register = || {
///     let driver = Nanoseconds(Instant::now());
///     KBox::pin_init(perf::Registration::new(c"rust_doctest", driver), GFP_KERNEL)
/// };
/// let pmu = register()?;
/// // A name is taken once.
/// assert_eq!(register().err(), Some(EEXIST));
/// drop(pmu);
/// # Ok::<(), Error>(())
/// ```
///
/// A PMU with an AUX area is in `samples/rust/rust_pmu_pattern.rs`.
#[vtable]
pub trait Pmu: Sized + Send + Sync + 'static {
    /// What the driver keeps per event and does not change: its configuration, say.
    type Data: Send + Sync;

    /// What the driver keeps per event and changes while the event is on a CPU. See
    /// [`OnCpu::with_state`].
    type State: Send;

    /// What the driver keeps per AUX area.
    type Aux: Send + Sync + 'static;

    /// What the unit can and can not do.
    const CAPABILITIES: Capabilities = Capabilities::none();

    /// Which events there can be.
    const CONTEXT: Context = Context::Software;

    /// The fields of an event's configuration. All that is in no field must be 0.
    const FORMAT: &'static [Field] = &[];

    /// Its sysfs directories besides `format`.
    const GROUPS: &'static [AttributeGroup<Self>] = &[];

    /// The width of what [`read`](Self::read) returns, in bits: 1 to 64.
    const COUNTER_BITS: u32 = 64;

    /// How many address filters an event can have (`nr_addr_filters` in sysfs). A PMU that can't
    /// filter by address has none, and no [`validate_filters`](Self::validate_filters).
    const ADDRESS_FILTERS: u32 = 0;

    /// For a PMU that does one event per CPU at a time: where it keeps which. Asked for once, when
    /// the PMU is registered.
    fn current(&self) -> Option<Arc<Current<Self>>> {
        None
    }

    /// Is this an event that the PMU can do? Makes what the driver keeps for it, which is dropped
    /// with it.
    ///
    /// Called from `perf_event_open(2)`, and when a task that is observed forks. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it makes no sense, `EOPNOTSUPP` if it does but can't be done, `EACCES` if the
    /// caller may not.
    fn event_init(&self, attr: &Attr<'_>) -> Result<(Self::Data, Self::State)>;

    /// Puts `event` on this CPU. It is [started](Self::start) separately.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the unit is taken.
    fn add(&self, _event: &OnCpu<Self>, _cx: &IrqsOff<'_>) -> Result {
        Ok(())
    }

    /// Takes `event` off this CPU. It was [stopped](Stop::Update) before, unless it never ran.
    fn del(&self, _event: &OnCpu<Self>, _cx: &IrqsOff<'_>) {}

    /// Starts `event`, which is on this CPU.
    fn start(&self, _event: &OnCpu<Self>, _how: Start<'_>) {}

    /// Stops `event`, which is on this CPU. Only called for one that runs, but for a
    /// [`Stop::Update`] behind a [`Stop::Keep`].
    fn stop(&self, _event: &OnCpu<Self>, _how: Stop<'_>) {}

    /// The value of the counter behind `event`: how many have been counted, from anywhere on. The
    /// abstraction adds the differences to the event's count.
    ///
    /// It is read from [`start`](Self::start) on until behind [`stop`](Self::stop), on the event's
    /// CPU, or on any CPU of the same [`Scope`]. May interrupt the other callbacks, also in the
    /// middle.
    fn read(&self, _event: &Event<Self>, _cx: &NmiLike<'_>) -> u64 {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// The event's [timer](OnCpu::start_timer) has come. Returns how long it is until it comes
    /// again, if it does.
    ///
    /// Called in a hardware interrupt on the event's CPU, while the event runs.
    fn timer(&self, _event: &OnCpu<Self>, _cx: &IrqsOff<'_>) -> Option<Delta> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Can this PMU do these address filters, which are no more than [`Self::ADDRESS_FILTERS`]?
    /// (`addr_filters_validate`)
    ///
    /// Called from `ioctl(2)`, before an event gets them. Where they are in memory,
    /// [`OnCpu::address_ranges`] tells later.
    ///
    /// # Errors
    ///
    /// `EINVAL` if they make no sense, `EOPNOTSUPP` if they do but can't be done.
    fn validate_filters(_filters: &AddressFilters<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Prepares for an AUX area of `size` bytes, a power of two, that was just allocated. An event
    /// of a PMU that has AUX areas only runs with one: without, it counts nothing either.
    ///
    /// `overwrite` says that user space maps the area read-only, that is, snapshot mode. The area
    /// is zeroed. What is returned is dropped when the last mapping is gone and no transaction is
    /// open, where it may sleep; that can be after the registration. May sleep. The event may be on
    /// another CPU meanwhile.
    ///
    /// # Errors
    ///
    /// User space sees `ENOMEM` whatever the error is; the C interface has no room for another.
    fn setup_aux(&self, _event: &Event<Self>, _size: u64, _overwrite: bool) -> Result<Self::Aux> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Writes the last `out.left()` bytes of the AUX area into a sample, without changing what the
    /// event does.
    ///
    /// May interrupt the other callbacks, also in the middle. What is not written is zeroed.
    fn snapshot_aux(&self, _event: &OnCpu<Self>, _out: &mut SampleOutput<'_>, _cx: &NmiLike<'_>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}
