// SPDX-License-Identifier: GPL-2.0

//! PMUs that do everything wrong that compiles.
//!
//! - `misuse_chaos`: an AUX PMU that, from every callback, nests and ends what it can, writes
//!   without asking, asks for absurd sizes, starts timers, overflows, and reads a counter that
//!   lies.
//! - `misuse_early`: a counter that takes samples and reads itself while it is being started.
//! - `misuse_shared`: an AUX PMU that lets any number of its events be on a CPU, hence on one ring.
//! - `misuse_box`: an AUX PMU whose registration is dropped when an event of `misuse_control` is
//!   made, whoever has an event or a mapping of it.

#![forbid(unsafe_code)]

use kernel::{
    impl_has_work,
    new_mutex,
    new_work,
    nmi::{
        irqs_off,
        IrqsOff,
        NmiLike, //
    },
    perf::{
        Attr,
        AuxFlag,
        AuxOutput,
        Capabilities,
        Capability,
        Current,
        Event,
        Field,
        OnCpu,
        Pmu,
        Registration,
        SampleOutput,
        Start,
        Stop,
        Word, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc,
        Mutex, //
    },
    time::Delta,
    workqueue::{
        self,
        Work,
        WorkItem, //
    }, //
};

module! {
    type: Misuse,
    name: "rust_pmu_misuse",
    authors: ["The perf AUX sampling project"],
    description: "PMUs that do everything wrong that compiles",
    license: "GPL",
}

/// What is done wrong, a bit each.
const WRONG: Field = Field::new(c"wrong", Word::Config, 0, 7);
const RESERVE: u64 = 1 << 0;
const PUT: u64 = 1 << 1;
const FLAG: u64 = 1 << 2;
const NEST: u64 = 1 << 3;
const OVERFLOW: u64 = 1 << 4;
const TIMER: u64 = 1 << 5;
const ADD: u64 = 1 << 6;
const INIT: u64 = 1 << 7;

static LARGE: [u8; 3 * 4096 + 1] = [0x5a; 3 * 4096 + 1];

struct Chaos {
    current: Arc<Current<Self>>,
    calls: Atomic<u64>,
}

impl Chaos {
    /// Everything that needs no more than `cx`.
    fn abuse(&self, event: &OnCpu<Self>, cx: &NmiLike<'_>) {
        let wrong = *event.data();
        let calls = self.calls.fetch_add(1, Relaxed);
        if wrong & NEST != 0 {
            event.with_state(|outer| {
                *outer = outer.wrapping_add(1);
                assert_none(event.with_state(|_| ()));
                assert_none(event.with_aux(|_, _| ()));
            });
            event.with_aux(|_, aux| {
                assert_none(event.with_aux(|_, _| ()));
                if wrong & OVERFLOW != 0 {
                    event.overflow(cx);
                }
                self.fill(wrong, calls, aux, cx);
            });
            // Another way to the same event.
            irqs_off(|cx| {
                self.current
                    .event(cx)
                    .map(|event| event.with_aux(|_, _| ()))
            });
        } else {
            event.with_aux(|_, aux| self.fill(wrong, calls, aux, cx));
        }
        if wrong & OVERFLOW != 0 {
            event.overflow(cx);
            event.add_count(u64::MAX / 3);
            event.overflow(cx);
        }
    }

    fn fill(&self, wrong: u64, calls: u64, aux: &mut AuxOutput<'_, Self>, cx: &NmiLike<'_>) {
        if wrong & PUT != 0 {
            aux.put(&LARGE);
            aux.put(&[]);
            aux.put(&calls.to_le_bytes());
        }
        if wrong & FLAG != 0 {
            aux.flag(AuxFlag::Partial | AuxFlag::Collision);
        }
        if wrong & RESERVE != 0 {
            for size in [0, 1, aux.size(), aux.size() + 1, u64::MAX - 1, u64::MAX] {
                if !aux.reserve(size, cx) {
                    // It is over.
                    if aux.data().is_some() || aux.room() != 0 || aux.put(&[0]) {
                        pr_err!("an ended transaction goes on\n");
                    }
                    aux.put(&[]);
                    aux.flag(AuxFlag::Truncated.into());
                }
            }
        }
    }
}

fn assert_none(value: Option<()>) {
    if value.is_some() {
        pr_err!("a nested visitor was let in\n");
    }
}

#[vtable]
impl Pmu for Chaos {
    type Data = u64;
    type State = u64;
    type Aux = KVec<u8>;

    const CAPABILITIES: Capabilities = Capabilities::none()
        .with(Capability::Exclusive)
        .with(Capability::AuxPause);

    const FORMAT: &'static [Field] = &[WRONG];

    const COUNTER_BITS: u32 = 1;

    fn current(&self) -> Option<Arc<Current<Self>>> {
        Some(self.current.clone())
    }

    fn event_init(&self, attr: &Attr<'_>) -> Result<(u64, u64)> {
        let wrong = attr.get(&WRONG);
        let made = KBox::new(wrong, GFP_KERNEL)?;
        if wrong & INIT != 0 && self.calls.fetch_add(1, Relaxed) % 2 == 0 {
            return Err(ENOSPC);
        }
        Ok((*made, 0))
    }

    fn add(&self, event: &OnCpu<Self>, cx: &IrqsOff<'_>) -> Result {
        self.abuse(event, cx);
        event.start_timer(Delta::from_nanos(0), cx);
        if *event.data() & ADD != 0 && self.calls.load(Relaxed) % 3 == 0 {
            return Err(EBUSY);
        }
        Ok(())
    }

    fn del(&self, event: &OnCpu<Self>, cx: &IrqsOff<'_>) {
        self.abuse(event, cx);
        event.start_timer(Delta::from_nanos(0), cx);
    }

    fn start(&self, event: &OnCpu<Self>, how: Start<'_>) {
        match how {
            Start::Run(cx) => {
                event.start_timer(Delta::from_nanos(i64::MIN), cx);
                event.start_timer(Delta::from_nanos(i64::MAX), cx);
                event.start_timer(Delta::from_micros(20), cx);
                self.abuse(event, cx);
            }
            Start::Restart(cx) | Start::Resume(cx) => self.abuse(event, cx),
        }
    }

    fn stop(&self, event: &OnCpu<Self>, how: Stop<'_>) {
        match how {
            Stop::Update(cx) => {
                event.start_timer(Delta::from_micros(20), cx);
                self.abuse(event, cx);
                event.start_timer(Delta::from_nanos(0), cx);
            }
            Stop::Keep(cx) | Stop::Pause(cx) => self.abuse(event, cx),
        }
    }

    fn read(&self, event: &Event<Self>, cx: &NmiLike<'_>) -> u64 {
        if *event.data() & OVERFLOW != 0 {
            self.current.event(cx).map(|event| event.overflow(cx));
        }
        // Neither goes only forward, nor has only as many bits as was said.
        self.calls.load(Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn timer(&self, event: &OnCpu<Self>, cx: &IrqsOff<'_>) -> Option<Delta> {
        self.abuse(event, cx);
        if *event.data() & TIMER != 0 {
            event.start_timer(Delta::from_micros(30), cx);
        }
        Some(Delta::from_nanos(-1))
    }

    fn setup_aux(&self, event: &Event<Self>, _size: u64, _overwrite: bool) -> Result<KVec<u8>> {
        event.add_count(1);
        Ok(KVec::new())
    }

    fn snapshot_aux(&self, event: &OnCpu<Self>, out: &mut SampleOutput<'_>, cx: &NmiLike<'_>) {
        // Errors are not looked at.
        let _ = out.copy(&LARGE);
        let _ = out.zero(usize::MAX);
        event.with_aux(|_, aux| {
            let _ = out.copy_aux(aux, usize::MAX);
            let _ = out.copy_aux(aux, out.left() / 2);
            if *event.data() & RESERVE != 0 && !aux.reserve(u64::MAX, cx) {
                // There is nothing to copy from.
                if out.left() != 0 && out.copy_aux(aux, out.left()).is_ok() {
                    pr_err!("an ended transaction is copied from\n");
                }
            }
        });
    }
}

/// Comes to the end of a sampling period while it is being started.
struct Early {
    counter: Atomic<u64>,
}

#[vtable]
impl Pmu for Early {
    type Data = ();
    type State = ();
    type Aux = ();

    fn event_init(&self, _: &Attr<'_>) -> Result<((), ())> {
        Ok(((), ()))
    }

    fn start(&self, event: &OnCpu<Self>, how: Start<'_>) {
        if let Start::Run(cx) = how {
            event.overflow(cx);
        }
    }

    /// Has been counting for long before an event starts.
    fn read(&self, _: &Event<Self>, _: &NmiLike<'_>) -> u64 {
        self.counter.fetch_add(1, Relaxed)
    }
}

/// Lets any number of events be on a CPU.
struct Shared;

#[vtable]
impl Pmu for Shared {
    type Data = ();
    type State = ();
    type Aux = ();

    fn event_init(&self, _: &Attr<'_>) -> Result<((), ())> {
        Ok(((), ()))
    }

    fn setup_aux(&self, _: &Event<Self>, _: u64, _: bool) -> Result<()> {
        Ok(())
    }

    fn start(&self, event: &OnCpu<Self>, _: Start<'_>) {
        event.with_aux(|_, aux| aux.put(b"shared"));
    }
}

type Boxed = Pin<KBox<Registration<Shared>>>;

/// Drops what it holds in a workqueue.
#[pin_data]
struct Remover {
    #[pin]
    boxed: Mutex<Option<Boxed>>,
    #[pin]
    work: Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Remover { self.work }
}

impl WorkItem for Remover {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let boxed = this.boxed.lock().take();
        drop(boxed);
    }
}

struct Control(Arc<Remover>);

#[vtable]
impl Pmu for Control {
    type Data = ();
    type State = ();
    type Aux = ();

    fn event_init(&self, _: &Attr<'_>) -> Result<((), ())> {
        let _ = workqueue::system_highpri().enqueue(self.0.clone());
        Ok(((), ()))
    }
}

#[pin_data]
struct Misuse {
    #[pin]
    _chaos: Registration<Chaos>,
    #[pin]
    _early: Registration<Early>,
    #[pin]
    _shared: Registration<Shared>,
    #[pin]
    _control: Registration<Control>,
}

impl kernel::InPlaceModule for Misuse {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        let remover = || -> Result<Arc<Remover>> {
            let boxed = KBox::pin_init(Registration::new(c"misuse_box", Shared), GFP_KERNEL)?;
            Arc::pin_init(
                pin_init!(Remover {
                    boxed <- new_mutex!(Some(boxed)),
                    work <- new_work!("Remover::work"),
                }),
                GFP_KERNEL,
            )
        };
        try_pin_init!(Self {
            _chaos <- Registration::new(
                c"misuse_chaos",
                Chaos {
                    current: Current::new()?,
                    calls: Atomic::new(0),
                },
            ),
            _early <- Registration::new(
                c"misuse_early",
                Early {
                    counter: Atomic::new(1 << 40),
                },
            ),
            _shared <- Registration::new(c"misuse_shared", Shared),
            _control <- Registration::new(c"misuse_control", Control(remover()?)),
        })
    }
}
