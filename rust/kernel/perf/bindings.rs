// SPDX-License-Identifier: GPL-2.0

//! The one way from `kernel::perf` to the C side.
//!
//! Everything here comes from the bindings that are generated for the running configuration. All
//! other files of `kernel::perf` say `super::bindings`, so that the same files can be built against
//! another set of generated bindings, as an external module would have to.

pub(super) use crate::bindings::*;
