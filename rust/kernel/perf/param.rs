// SPDX-License-Identifier: GPL-2.0

//! A module parameter that names a PMU.
//!
//! `module!`'s own parameters are numbers. A PMU's name is a string, and user space tools go by it.

use super::bindings;
use crate::{
    error::from_result,
    prelude::*, //
};
use core::cell::UnsafeCell;

/// The longest name, in bytes.
const NAME_MAX: usize = 31;

/// A PMU's name, given when the module is loaded.
///
/// It is declared with [`pmu_name_param!`](crate::pmu_name_param).
///
/// # Invariants
///
/// The bytes are NUL-terminated. They are written only by the module loader, before the module's
/// init function runs.
pub struct NameParam(UnsafeCell<[u8; NAME_MAX + 1]>);

// SAFETY: Written only before the module runs, by the type invariants.
unsafe impl Sync for NameParam {}

impl NameParam {
    /// A parameter whose value is `default` unless the user gives another.
    pub const fn new(default: &CStr) -> Self {
        let bytes = default.to_bytes();
        assert!(bytes.len() <= NAME_MAX);
        let mut name = [0; NAME_MAX + 1];
        let mut i = 0;
        while i < bytes.len() {
            name[i] = bytes[i];
            i += 1;
        }
        // INVARIANT: At least the last byte is zero.
        Self(UnsafeCell::new(name))
    }

    /// The name.
    pub fn get(&'static self) -> &'static CStr {
        // SAFETY: Nobody writes any more, by the type invariants.
        CStr::from_bytes_until_nul(unsafe { &*self.0.get() }).unwrap_or(c"")
    }

    /// For [`pmu_name_param!`](crate::pmu_name_param).
    #[doc(hidden)]
    pub const fn as_ptr(&self) -> *mut c_void {
        self.0.get().cast()
    }
}

/// Sets a [`NameParam`].
///
/// # Safety
///
/// `val` must be null or a C string, and the `arg` of `param` must point to a [`NameParam`].
unsafe extern "C" fn set(val: *const c_char, param: *const bindings::kernel_param) -> c_int {
    from_result(|| {
        if val.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: `val` is a C string by the safety requirements.
        let name = unsafe { CStr::from_char_ptr(val) }.to_bytes();
        let named = name
            .iter()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'-' | b'.'));
        if name.is_empty() || name.len() > NAME_MAX || !named || name == b"." || name == b".." {
            pr_err!(
                "pmu name: 1 to {} letters, digits, '_', '-' or '.' are needed\n",
                NAME_MAX
            );
            return Err(EINVAL);
        }
        // SAFETY: By the safety requirements; the loader is alone with the module.
        // INVARIANT: The name is shorter than the array, and a zero follows it.
        unsafe {
            let to: *mut u8 = (*param).__bindgen_anon_1.arg.cast();
            core::ptr::copy_nonoverlapping(name.as_ptr(), to, name.len());
            to.add(name.len()).write(0);
        }
        Ok(0)
    })
}

/// How the module loader sets a [`NameParam`].
#[doc(hidden)]
pub static NAME_PARAM_OPS: bindings::kernel_param_ops = bindings::kernel_param_ops {
    flags: 0,
    set: Some(set),
    get: None,
    free: None,
};

/// Declares a module parameter that holds the name of a PMU.
///
/// ```ignore
/// kernel::pmu_name_param!(NAME, "soft_pt", "name", c"soft_pt");
/// ```
///
/// makes a `static NAME: NameParam`, set by `insmod soft_pt.ko name=…`.
// The module is the one that the macro is used in.
#[allow(clippy::crate_in_macro_def)]
#[macro_export]
macro_rules! pmu_name_param {
    ($static:ident, $module:literal, $param:literal, $default:expr) => {
        static $static: $crate::perf::NameParam = $crate::perf::NameParam::new($default);

        const _: () = {
            #[link_section = "__param"]
            #[used(compiler)]
            static PARAM: $crate::module_param::KernelParam =
                $crate::module_param::KernelParam::new($crate::bindings::kernel_param {
                    name: $crate::str::as_char_ptr_in_const_context(if ::core::cfg!(MODULE) {
                        $crate::c_str!($param)
                    } else {
                        $crate::c_str!(::core::concat!($module, ".", $param))
                    }),
                    #[cfg(MODULE)]
                    mod_: $crate::module::this_module::<crate::LocalModule>().as_ptr(),
                    #[cfg(not(MODULE))]
                    mod_: ::core::ptr::null_mut(),
                    ops: &raw const $crate::perf::NAME_PARAM_OPS,
                    perm: 0,
                    level: -1,
                    flags: 0,
                    __bindgen_anon_1: $crate::bindings::kernel_param__bindgen_ty_1 {
                        arg: $static.as_ptr(),
                    },
                });
        };
    };
}
