// SPDX-License-Identifier: GPL-2.0
//
// Drivers that must not compile, and next to each one that differs only in the fault and must.
// "compile-fail" splits this file at the lines that begin with "//!":
//
//   //! common            code that all snippets begin with
//   //! fail NAME ERROR    must be refused with this error: a code, or a part of the message
//   //! pass NAME          its twin
//
// "$" in a snippet stands for the callbacks of a PMU: what is in front of it comes before the `impl`.

//! common
#![forbid(unsafe_code)]
#![allow(dead_code, unused_variables, unused_imports)]
use kernel::{
    nmi::{irqs_off, CpuLocal, IrqsOff, NmiCell, NmiLike},
    perf::{
        Attr, AuxOutput, Capabilities, Capability, Current, Event, Field, OnCpu, Pmu, Registration,
        SampleOutput, Start, Stop, Word,
    },
    prelude::*,
    sync::{Arc, Mutex},
    time::Delta,
};

module! {
    type: Snippet,
    name: "snippet",
    authors: ["The perf AUX sampling project"],
    description: "A snippet",
    license: "GPL",
}

struct Snippet;

impl kernel::Module for Snippet {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(Snippet)
    }
}

//! fail keep_aux borrowed data escapes
fn callback(event: &OnCpu<Driver>) {
    let mut kept = None;
    event.with_aux(|_, aux| kept = Some(aux));
}
$
//! pass keep_aux
fn callback(event: &OnCpu<Driver>) {
    let mut kept = None;
    event.with_aux(|_, aux| kept = Some(aux.head()));
}
$

//! fail return_aux lifetime may not live long enough
fn callback(event: &OnCpu<Driver>) {
    event.with_aux(|_, aux| aux);
}
$
//! pass return_aux
fn callback(event: &OnCpu<Driver>) {
    event.with_aux(|_, aux| aux.size());
}
$

//! fail swap_aux borrowed data escapes
fn callback(one: &OnCpu<Driver>, other: &OnCpu<Driver>) {
    one.with_aux(|_, first| other.with_aux(|_, second| core::mem::swap(first, second)));
}
$
//! pass swap_aux
fn callback(one: &OnCpu<Driver>, other: &OnCpu<Driver>) {
    one.with_aux(|first, _| other.with_aux(|second, _| core::mem::swap(first, second)));
}
$

//! fail data_across_reserve E0502
fn callback(event: &OnCpu<Driver>, cx: &NmiLike<'_>) {
    event.with_aux(|_, aux| {
        let data = aux.data();
        aux.reserve(1, cx);
        drop(data);
    });
}
$
//! pass data_across_reserve
fn callback(event: &OnCpu<Driver>, cx: &NmiLike<'_>) {
    event.with_aux(|_, aux| {
        aux.reserve(1, cx);
        drop(aux.data());
    });
}
$

//! fail keep_context lifetime may not live long enough
fn callback() {
    irqs_off(|cx| cx);
}
$
//! pass keep_context
fn callback() {
    irqs_off(|cx| Current::<Driver>::new().map(|current| current.event(cx).is_some()).is_ok());
}
$

//! fail make_context E0423
fn callback(event: &OnCpu<Driver>) {
    let cx = NmiLike(core::marker::PhantomData, kernel::types::NotThreadSafe);
    event.overflow(&cx);
}
$
//! pass make_context
fn callback(event: &OnCpu<Driver>) {
    irqs_off(|cx| event.overflow(cx));
}
$

//! fail make_context_unsafely usage of an `unsafe` block
fn callback(event: &OnCpu<Driver>) {
    event.overflow(&unsafe { NmiLike::new() });
}
$
//! pass make_context_unsafely
fn callback(event: &OnCpu<Driver>, cx: &NmiLike<'_>) {
    event.overflow(cx);
}
$

//! fail timer_in_nmi E0308
fn callback(event: &OnCpu<Driver>, cx: &NmiLike<'_>) {
    event.start_timer(Delta::from_millis(1), cx);
}
$
fn timer(&self, _: &OnCpu<Self>, _: &IrqsOff<'_>) -> Option<Delta> {
    None
}
//! pass timer_in_nmi
fn callback(event: &OnCpu<Driver>, cx: &IrqsOff<'_>) {
    event.start_timer(Delta::from_millis(1), cx);
}
$
fn timer(&self, _: &OnCpu<Self>, _: &IrqsOff<'_>) -> Option<Delta> {
    None
}

//! fail timer_without_callback E0080
fn callback(event: &OnCpu<Driver>, cx: &IrqsOff<'_>) {
    event.start_timer(Delta::from_millis(1), cx);
}
pub static CALLBACK: fn(&OnCpu<Driver>, &IrqsOff<'_>) = callback;
$
//! pass timer_without_callback
fn callback(event: &OnCpu<Driver>, cx: &IrqsOff<'_>) {
    event.start_timer(Delta::from_millis(1), cx);
}
pub static CALLBACK: fn(&OnCpu<Driver>, &IrqsOff<'_>) = callback;
$
fn timer(&self, _: &OnCpu<Self>, _: &IrqsOff<'_>) -> Option<Delta> {
    None
}

//! fail ranges_in_nmi E0308
fn callback(event: &OnCpu<Driver>, cx: &NmiLike<'_>) {
    event.address_ranges(cx).count();
}
$
//! pass ranges_in_nmi
fn callback(event: &OnCpu<Driver>, cx: &IrqsOff<'_>) {
    event.address_ranges(cx).count();
}
$

//! fail state_in_setup_aux E0599
$
fn setup_aux(&self, event: &Event<Self>, _: u64, _: bool) -> Result<()> {
    event.with_state(|_| ());
    Ok(())
}
//! pass state_in_setup_aux
$
fn setup_aux(&self, event: &Event<Self>, _: u64, _: bool) -> Result<()> {
    event.data();
    Ok(())
}

//! fail send_event E0277
fn send<T: Send>(_: T) {}
fn callback(event: &OnCpu<Driver>) {
    send(event);
}
$
//! pass send_event
fn send<T: Send>(_: T) {}
fn callback(event: &OnCpu<Driver>) {
    send(event.data());
}
$

//! fail send_sample_output E0277
fn send<T: Send>(_: T) {}
fn callback(out: &mut SampleOutput<'_>) {
    send(out);
}
$
//! pass send_sample_output
fn send<T: Send>(_: T) {}
fn callback(out: &mut SampleOutput<'_>) {
    send(out.left());
}
$

//! fail send_context E0277
fn send<T: Send>(_: T) {}
fn callback(cx: &IrqsOff<'_>) {
    send(cx);
}
$
//! pass send_context
fn send<T: Send>(_: T) {}
fn callback(cx: &IrqsOff<'_>) {
    send(());
}
$

//! fail keep_event lifetime may not live long enough
fn callback(current: &Current<Driver>) {
    irqs_off(|cx| current.event(cx));
}
$
//! pass keep_event
fn callback(current: &Current<Driver>) {
    irqs_off(|cx| current.event(cx).is_some());
}
$

//! fail field_bits E0080
const FIELD: Field = Field::new(c"field", Word::Config, 60, 64);
$
//! pass field_bits
const FIELD: Field = Field::new(c"field", Word::Config, 60, 63);
$

//! fail field_max E0080
const FIELD: Field = Field::new(c"field", Word::Config, 0, 1).at_most(4);
$
//! pass field_max
const FIELD: Field = Field::new(c"field", Word::Config, 0, 1).at_most(3);
$

//! fail counter_of_no_bits E0080
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const COUNTER_BITS: u32 = 0;
//! pass counter_of_no_bits
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const COUNTER_BITS: u32 = 1;

//! fail counter_of_too_many_bits E0080
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const COUNTER_BITS: u32 = 65;
//! pass counter_of_too_many_bits
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const COUNTER_BITS: u32 = 64;

//! fail snapshot_of_nothing E0080
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
fn snapshot_aux(&self, _: &OnCpu<Self>, _: &mut SampleOutput<'_>, _: &NmiLike<'_>) {}
//! pass snapshot_of_nothing
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
fn setup_aux(&self, _: &Event<Self>, _: u64, _: bool) -> Result<()> {
    Ok(())
}
fn snapshot_aux(&self, _: &OnCpu<Self>, _: &mut SampleOutput<'_>, _: &NmiLike<'_>) {}

//! fail filters_without_check E0080
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const ADDRESS_FILTERS: u32 = 2;
//! pass filters_without_check
pub fn register() -> Result<Pin<KBox<Registration<Driver>>>> {
    KBox::pin_init(Registration::new(c"snippet", Driver), GFP_KERNEL)
}
$
const ADDRESS_FILTERS: u32 = 2;
fn validate_filters(_: &kernel::perf::AddressFilters<'_>) -> Result {
    Ok(())
}
