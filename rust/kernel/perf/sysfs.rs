// SPDX-License-Identifier: GPL-2.0

//! The files that describe a PMU under `/sys/bus/event_source/devices/<name>/`.
//!
//! A driver lists them as constants; they exist for as long as the PMU is registered.

use super::bindings;
use crate::{
    page::PAGE_SIZE,
    prelude::*, //
};

/// A read-only file with a fixed text.
///
/// The text is shown followed by a newline.
#[derive(Clone, Copy)]
pub struct Attribute {
    name: &'static CStr,
    text: &'static CStr,
}

impl Attribute {
    /// A file called `name` that reads as `text`.
    pub const fn new(name: &'static CStr, text: &'static CStr) -> Self {
        Self { name, text }
    }
}

/// A directory of [`Attribute`]s, such as `format` or `caps`.
#[derive(Clone, Copy)]
pub struct AttributeGroup {
    /// The name of the directory.
    pub name: &'static CStr,
    /// Its files.
    pub attributes: &'static [Attribute],
}

/// What the C side needs for one file.
#[repr(C)]
struct File {
    attr: bindings::device_attribute,
    text: &'static CStr,
}

/// Shows the text of a [`File`].
///
/// # Safety
///
/// `attr` must point to the `attr` of a [`File`], and `buf` to a page.
unsafe extern "C" fn show(
    _dev: *mut bindings::device,
    attr: *mut bindings::device_attribute,
    buf: *mut c_char,
) -> isize {
    // SAFETY: By the safety requirements `attr` is the first field of a `File`, which lives for as
    // long as the PMU is registered.
    let text = unsafe { (*attr.cast::<File>()).text };
    let bytes = text.to_bytes();
    let len = bytes.len().min(PAGE_SIZE - 1);
    // SAFETY: `buf` is a page, and `len + 1` bytes fit.
    unsafe {
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), len);
        buf.cast::<u8>().add(len).write(b'\n');
    }
    (len + 1) as isize
}

/// One group and all that it points to.
struct Group {
    group: bindings::attribute_group,
    _pointers: KVec<*mut bindings::attribute>,
    _files: KVec<File>,
}

/// The `attr_groups` of a `struct pmu`.
///
/// # Invariants
///
/// `pointers` is a null-terminated array of pointers to the `group`s of `groups`, whose arrays are
/// null-terminated too. All of it stays in place while `self` exists.
pub(super) struct Groups {
    pointers: KVec<*const bindings::attribute_group>,
    _groups: KVec<KBox<Group>>,
}

// SAFETY: The pointers lead to memory that `Groups` owns and does not change.
unsafe impl Send for Groups {}
// SAFETY: As above.
unsafe impl Sync for Groups {}

impl Groups {
    pub(super) fn new(groups: &[AttributeGroup]) -> Result<Self> {
        let mut owned = KVec::with_capacity(groups.len(), GFP_KERNEL)?;
        let mut pointers = KVec::with_capacity(groups.len() + 1, GFP_KERNEL)?;

        for group in groups {
            let mut files = KVec::with_capacity(group.attributes.len(), GFP_KERNEL)?;
            let mut attrs = KVec::with_capacity(group.attributes.len() + 1, GFP_KERNEL)?;
            for attribute in group.attributes {
                let mut attr: bindings::device_attribute = pin_init::zeroed();
                attr.attr.name = attribute.name.as_char_ptr();
                attr.attr.mode = 0o444;
                attr.__bindgen_anon_1.show = Some(show);
                #[cfg(CONFIG_DEBUG_LOCK_ALLOC)]
                {
                    attr.attr.key = crate::static_lock_class!().as_ptr();
                }
                files.push(
                    File {
                        attr,
                        text: attribute.text,
                    },
                    GFP_KERNEL,
                )?;
            }
            for file in files.iter_mut() {
                attrs.push(&raw mut file.attr.attr, GFP_KERNEL)?;
            }
            attrs.push(core::ptr::null_mut(), GFP_KERNEL)?;

            let mut raw: bindings::attribute_group = pin_init::zeroed();
            raw.name = group.name.as_char_ptr();
            raw.__bindgen_anon_2.attrs = attrs.as_mut_ptr();
            let group = KBox::new(
                Group {
                    group: raw,
                    _pointers: attrs,
                    _files: files,
                },
                GFP_KERNEL,
            )?;
            pointers.push(&raw const group.group, GFP_KERNEL)?;
            owned.push(group, GFP_KERNEL)?;
        }
        pointers.push(core::ptr::null(), GFP_KERNEL)?;

        // INVARIANT: The arrays were built above, and neither a `KVec` that does not grow nor a
        // `KBox` moves what it owns.
        Ok(Self {
            pointers,
            _groups: owned,
        })
    }

    pub(super) fn as_ptr(&mut self) -> *mut *const bindings::attribute_group {
        self.pointers.as_mut_ptr()
    }
}
