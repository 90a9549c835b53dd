// SPDX-License-Identifier: GPL-2.0

//! What the root of a crate has that stands in for the `kernel` crate of a kernel without
//! `kernel::perf`: all of that crate (called `linux` here), `perf`, and the bindings that `perf`
//! needs.

pub use linux::*;

// The directory, so that the parts are looked for where they are.
#[path = "../../rust/kernel"]
mod dir {
    pub mod nmi;
    pub mod perf;

    /// That of the kernel crate, and what it lacks.
    pub mod module_param {
        pub use linux::module_param::*;

        pub mod string;
    }
}
pub use dir::{
    module_param,
    nmi,
    perf, //
};

/// The kernel crate's bindings, and what they lack.
#[allow(
    clippy::all,
    clippy::cast_lossless,
    clippy::ptr_as_ptr,
    clippy::ref_as_ptr,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    improper_ctypes,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_op_in_unsafe_fn,
    reason = "it is generated"
)]
pub mod bindings {
    use linux::ffi;
    use pin_init::{
        MaybeZeroable,
        Zeroable, //
    };

    // What is defined here takes precedence over the glob.
    pub use linux::bindings::*;

    // SAFETY: `__BindgenBitfieldUnit<Storage>` is a newtype around `Storage`.
    unsafe impl<Storage> Zeroable for __BindgenBitfieldUnit<Storage> where Storage: Zeroable {}

    include!(env!("PERF_BINDINGS"));

    /// The kernel's own words on the structures above; it does not compile if they differ.
    mod layouts {
        use super::*;

        include!(env!("PERF_LAYOUTS"));
    }
}

/// Refuses to run on another kernel than the one the module was built for, also where the module
/// loader would not: packages of the same release may differ.
///
/// # Errors
///
/// `ENOEXEC`, and the log says which kernels they are.
pub fn check_kernel() -> error::Result {
    // SAFETY: It compares two strings.
    error::to_result(unsafe { bindings::check_kernel() })
}
