// SPDX-License-Identifier: GPL-2.0

//! Module parameters that are strings.
//!
//! C header: [`include/linux/moduleparam.h`](srctree/include/linux/moduleparam.h)
//!
//! The parameters of [`module!`](macros::module) are numbers. This is for names.

use crate::{
    bindings,
    error::from_result,
    prelude::*, //
};
use core::cell::UnsafeCell;

/// The longest string, in bytes.
const LEN_MAX: usize = 31;

/// A string that can be given when the module is loaded. It is declared with
/// [`string_param!`](crate::string_param).
///
/// # Invariants
///
/// The bytes are NUL-terminated. They are written only by the module loader, before the module's
/// init function runs.
pub struct StringParam(UnsafeCell<[u8; LEN_MAX + 1]>);

// SAFETY: Written only before the module runs, by the type invariants.
unsafe impl Sync for StringParam {}

impl StringParam {
    /// A parameter whose value is `default`, of at most 31 bytes, unless the user gives another.
    pub const fn new(default: &CStr) -> Self {
        let bytes = default.to_bytes();
        assert!(bytes.len() <= LEN_MAX);
        let mut string = [0; LEN_MAX + 1];
        let mut i = 0;
        while i < bytes.len() {
            string[i] = bytes[i];
            i += 1;
        }
        // INVARIANT: At least the last byte is zero.
        Self(UnsafeCell::new(string))
    }

    /// The string.
    pub fn get(&'static self) -> &'static CStr {
        // SAFETY: Nobody writes any more, by the type invariants.
        CStr::from_bytes_until_nul(unsafe { &*self.0.get() }).unwrap_or(c"")
    }

    /// For [`string_param!`](crate::string_param).
    #[doc(hidden)]
    pub const fn as_ptr(&self) -> *mut c_void {
        self.0.get().cast()
    }
}

/// Sets a [`StringParam`].
///
/// # Safety
///
/// `val` must be null or a C string, and the `arg` of `param` must point to a [`StringParam`].
unsafe extern "C" fn set(val: *const c_char, param: *const bindings::kernel_param) -> c_int {
    from_result(|| {
        if val.is_null() {
            return Err(EINVAL);
        }
        // SAFETY: `val` is a C string by the safety requirements.
        let string = unsafe { CStr::from_char_ptr(val) }.to_bytes();
        if string.is_empty() || string.len() > LEN_MAX {
            // SAFETY: `param` is valid by the safety requirements, and parameters have names.
            let name = unsafe { CStr::from_char_ptr((*param).name) };
            pr_err!("parameter {name:?}: 1 to {LEN_MAX} characters are needed\n");
            return Err(EINVAL);
        }
        // SAFETY: By the safety requirements; the loader is alone with the module.
        // INVARIANT: The string is shorter than the array, and a zero follows it.
        unsafe {
            let to: *mut u8 = (*param).__bindgen_anon_1.arg.cast();
            core::ptr::copy_nonoverlapping(string.as_ptr(), to, string.len());
            to.add(string.len()).write(0);
        }
        Ok(0)
    })
}

/// How the module loader sets a [`StringParam`].
#[doc(hidden)]
pub static STRING_PARAM_OPS: bindings::kernel_param_ops = bindings::kernel_param_ops {
    flags: 0,
    set: Some(set),
    get: None,
    free: None,
};

/// Declares a module parameter that is a string.
///
/// ```ignore
/// kernel::string_param!(NAME, "soft_pt", "name", c"soft_pt");
/// ```
///
/// makes a `static NAME: StringParam`, set by `insmod soft_pt.ko name=…`.
// The module is the one that the macro is used in.
#[allow(clippy::crate_in_macro_def)]
#[macro_export]
macro_rules! string_param {
    ($static:ident, $module:literal, $param:literal, $default:expr) => {
        static $static: $crate::module_param::string::StringParam =
            $crate::module_param::string::StringParam::new($default);

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
                    ops: &raw const $crate::module_param::string::STRING_PARAM_OPS,
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
