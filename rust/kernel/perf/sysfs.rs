// SPDX-License-Identifier: GPL-2.0

//! The files that describe a PMU under `/sys/bus/event_source/devices/<name>/`.
//!
//! A driver lists them as constants. They exist for as long as the PMU is registered; `format/` is
//! made of the [fields](super::Field) that the driver declares.

use super::{
    bindings,
    registration::Registration,
    Field,
    Pmu, //
};
use crate::{
    fmt,
    page::PAGE_SIZE,
    prelude::*, //
};
use core::mem::offset_of;

/// What a file says.
enum Text<T> {
    Fixed(&'static CStr),
    Of(fn(&T, &mut dyn fmt::Write) -> fmt::Result),
}

/// A read-only file.
///
/// What it says is followed by a newline.
pub struct Attribute<T> {
    name: &'static CStr,
    text: Text<T>,
    is_visible: Option<fn(&T) -> bool>,
}

impl<T> Attribute<T> {
    /// A file called `name` that reads as `text`.
    pub const fn new(name: &'static CStr, text: &'static CStr) -> Self {
        Self {
            name,
            text: Text::Fixed(text),
            is_visible: None,
        }
    }

    /// A file called `name` that reads as what `show` writes, each time it is read; up to a page.
    /// May sleep.
    pub const fn show(
        name: &'static CStr,
        show: fn(&T, &mut dyn fmt::Write) -> fmt::Result,
    ) -> Self {
        Self {
            name,
            text: Text::Of(show),
            is_visible: None,
        }
    }

    /// The same file, which exists only if `is_visible` says so when the PMU is registered.
    pub const fn visible_if(self, is_visible: fn(&T) -> bool) -> Self {
        Self {
            name: self.name,
            text: match self.text {
                Text::Fixed(text) => Text::Fixed(text),
                Text::Of(show) => Text::Of(show),
            },
            is_visible: Some(is_visible),
        }
    }
}

/// A directory of [`Attribute`]s, such as `caps` or `events`.
pub struct AttributeGroup<T: 'static> {
    /// The name of the directory; [`None`] if the files are to be in the PMU's own.
    pub name: Option<&'static CStr>,
    /// Its files.
    pub attributes: &'static [Attribute<T>],
}

/// A page that a file's text is written to.
struct Page {
    to: *mut u8,
    len: usize,
}

impl fmt::Write for Page {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte is left for the newline.
        if text.len() > PAGE_SIZE - 1 - self.len {
            return Err(fmt::Error);
        }
        // SAFETY: The page is this value's for as long as it exists, and the text fits.
        unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), self.to.add(self.len), text.len()) };
        self.len += text.len();
        Ok(())
    }
}

/// What a [`File`] shows.
enum Shown<T: 'static> {
    Attribute(&'static Attribute<T>),
    Field(&'static Field),
}

/// What the C side needs for one file.
#[repr(C)]
struct File<T: 'static> {
    attr: bindings::device_attribute,
    shown: Shown<T>,
}

impl<T: Pmu> File<T> {
    fn new(name: &'static CStr, shown: Shown<T>) -> Self {
        let mut attr: bindings::device_attribute = pin_init::zeroed();
        attr.attr.name = name.as_char_ptr();
        attr.attr.mode = 0o444;
        attr.__bindgen_anon_1.show = Some(Self::show);
        #[cfg(CONFIG_DEBUG_LOCK_ALLOC)]
        {
            attr.attr.key = crate::static_lock_class!().as_ptr();
        }
        Self { attr, shown }
    }

    /// # Safety
    ///
    /// `dev` must be the device of a PMU that is or is being registered by a `Registration<T>`.
    unsafe fn driver<'a>(dev: *mut bindings::device) -> &'a T {
        // SAFETY: The core has noted the `struct pmu` with its device. The driver was initialized
        // before it was registered, and the files are gone before it is.
        unsafe { Registration::<T>::of_pmu((*dev).driver_data.cast()) }.driver()
    }

    /// # Safety
    ///
    /// `attr` must point to the `attr` of a [`File<T>`], `buf` to a page, and `dev` to the device
    /// of a PMU that is registered by a `Registration<T>`.
    unsafe extern "C" fn show(
        dev: *mut bindings::device,
        attr: *mut bindings::device_attribute,
        buf: *mut c_char,
    ) -> isize {
        // SAFETY: By the safety requirements `attr` is the first field of a `File`, which lives for
        // as long as the PMU is registered.
        let shown = unsafe { &(*attr.cast::<Self>()).shown };
        let mut page = Page {
            to: buf.cast(),
            len: 0,
        };
        let written = match shown {
            Shown::Field(field) => field.describe(&mut page),
            Shown::Attribute(attribute) => match attribute.text {
                Text::Fixed(text) => match text.to_str() {
                    Ok(text) => fmt::Write::write_str(&mut page, text),
                    Err(_) => Err(fmt::Error),
                },
                // SAFETY: By the safety requirements.
                Text::Of(show) => show(unsafe { Self::driver(dev) }, &mut page),
            },
        };
        if written.is_err() {
            return EIO.to_errno() as isize;
        }
        // SAFETY: The page has room for one more byte.
        unsafe { page.to.add(page.len).write(b'\n') };
        (page.len + 1) as isize
    }

    /// # Safety
    ///
    /// `kobj` must be that of the device of a PMU that is being registered by a `Registration<T>`,
    /// and `attr` one of a [`File<T>`].
    unsafe extern "C" fn is_visible(
        kobj: *mut bindings::kobject,
        attr: *mut bindings::attribute,
        _index: c_int,
    ) -> bindings::umode_t {
        // SAFETY: By the safety requirements; `attr` is the first field of the first field.
        let (dev, file) = unsafe {
            (
                crate::container_of!(kobj, bindings::device, kobj),
                &*attr.cast::<Self>(),
            )
        };
        let is_visible = match file.shown {
            Shown::Attribute(attribute) => attribute.is_visible,
            Shown::Field(_) => None,
        };
        // SAFETY: By the safety requirements.
        if is_visible.is_none_or(|is_visible| is_visible(unsafe { Self::driver(dev) })) {
            file.attr.attr.mode
        } else {
            0
        }
    }
}

// A pointer to the one is a pointer to the other.
const _: () = assert!(offset_of!(bindings::device_attribute, attr) == 0);

/// One group and all that it points to.
trait Group: Send + Sync {
    fn raw(&self) -> *const bindings::attribute_group;
}

struct GroupOf<T: 'static> {
    group: bindings::attribute_group,
    _pointers: KVec<*mut bindings::attribute>,
    _files: KVec<File<T>>,
}

// SAFETY: The pointers lead to memory that the group owns and does not change, and to functions.
unsafe impl<T> Send for GroupOf<T> {}
// SAFETY: As above.
unsafe impl<T> Sync for GroupOf<T> {}

impl<T: Pmu> Group for GroupOf<T> {
    fn raw(&self) -> *const bindings::attribute_group {
        &raw const self.group
    }
}

impl<T: Pmu> GroupOf<T> {
    fn boxed(
        name: Option<&'static CStr>,
        files: impl Iterator<Item = (&'static CStr, Shown<T>)>,
    ) -> Result<KBox<dyn Group>> {
        let mut owned = KVec::new();
        for (name, shown) in files {
            owned.push(File::new(name, shown), GFP_KERNEL)?;
        }
        let mut pointers = KVec::with_capacity(owned.len() + 1, GFP_KERNEL)?;
        for file in owned.iter_mut() {
            pointers.push(&raw mut file.attr.attr, GFP_KERNEL)?;
        }
        pointers.push(core::ptr::null_mut(), GFP_KERNEL)?;

        let mut group: bindings::attribute_group = pin_init::zeroed();
        group.name = name.map_or(core::ptr::null(), |name| name.as_char_ptr());
        group.__bindgen_anon_1.is_visible = Some(File::<T>::is_visible);
        group.__bindgen_anon_2.attrs = pointers.as_mut_ptr();
        Ok(KBox::new(
            Self {
                group,
                _pointers: pointers,
                _files: owned,
            },
            GFP_KERNEL,
        )?)
    }
}

/// The `attr_groups` of a `struct pmu`.
///
/// # Invariants
///
/// `pointers` is a null-terminated array of pointers to the groups, whose arrays are
/// null-terminated too. All of it stays in place while `self` exists.
pub(super) struct Groups {
    pointers: KVec<*const bindings::attribute_group>,
    _groups: KVec<KBox<dyn Group>>,
}

// SAFETY: The pointers lead to memory that `Groups` owns and does not change.
unsafe impl Send for Groups {}
// SAFETY: As above.
unsafe impl Sync for Groups {}

impl Groups {
    /// The groups of a driver.
    ///
    /// # Errors
    ///
    /// `EINVAL` if two files or directories have the same name, or one has a name that a file
    /// can't have. (`sysfs` takes both for faults of the kernel, and says so at length.)
    pub(super) fn new<T: Pmu>() -> Result<Self> {
        let mut groups = KVec::new();
        // The files that the core makes for each PMU and each device.
        let mut top = KVec::new();
        for name in [
            c"type",
            c"perf_event_mux_interval_ms",
            c"nr_addr_filters",
            c"cpumask",
            c"power",
            c"subsystem",
            c"uevent",
        ] {
            top.push(name, GFP_KERNEL)?;
        }

        if !T::FORMAT.is_empty() {
            let mut names = KVec::new();
            for field in T::FORMAT {
                add_name(&mut names, field.name())?;
            }
            add_name(&mut top, c"format")?;
            let files = T::FORMAT.iter().map(|f| (f.name(), Shown::<T>::Field(f)));
            groups.push(GroupOf::boxed(Some(c"format"), files)?, GFP_KERNEL)?;
        }
        for group in T::GROUPS {
            let mut names = KVec::new();
            for attribute in group.attributes {
                let names = if group.name.is_some() {
                    &mut names
                } else {
                    &mut top
                };
                add_name(names, attribute.name)?;
            }
            if let Some(name) = group.name {
                add_name(&mut top, name)?;
            }
            let files = group
                .attributes
                .iter()
                .map(|attribute| (attribute.name, Shown::Attribute(attribute)));
            groups.push(GroupOf::<T>::boxed(group.name, files)?, GFP_KERNEL)?;
        }

        let mut pointers = KVec::with_capacity(groups.len() + 1, GFP_KERNEL)?;
        for group in &groups {
            pointers.push(group.raw(), GFP_KERNEL)?;
        }
        pointers.push(core::ptr::null(), GFP_KERNEL)?;

        // INVARIANT: The arrays were built above, and neither a `KVec` that does not grow nor a
        // `KBox` moves what it owns.
        Ok(Self {
            pointers,
            _groups: groups,
        })
    }

    pub(super) fn as_ptr(&mut self) -> *mut *const bindings::attribute_group {
        self.pointers.as_mut_ptr()
    }
}

/// Whether a file can be called `name`.
fn is_name(name: &CStr) -> bool {
    let bytes = name.to_bytes();
    !bytes.is_empty()
        && bytes != b"."
        && bytes != b".."
        && bytes.iter().all(|c| c.is_ascii_graphic() && *c != b'/')
}

/// Adds a name to those of a directory.
fn add_name(names: &mut KVec<&'static CStr>, name: &'static CStr) -> Result {
    if !is_name(name) {
        pr_err!("perf: a PMU has a file called {name:?}, which is no name\n");
        return Err(EINVAL);
    }
    if names.contains(&name) {
        pr_err!("perf: a PMU has two files called {name:?}\n");
        return Err(EINVAL);
    }
    Ok(names.push(name, GFP_KERNEL)?)
}

/// Checks that a PMU can be called `name`, as a part of the device `parent`, if that isn't null.
///
/// The driver core would find out that the name is taken too, but it considers that a fault of the
/// kernel, and says so in the log.
///
/// # Errors
///
/// `EINVAL` if that is no name, `EEXIST` if there is a device of that name. The log says so.
#[inline(never)]
pub(super) fn check_name(name: &CStr, parent: *mut bindings::device) -> Result {
    if !is_name(name) {
        pr_err!("perf: a PMU can't be called {name:?}\n");
        return Err(EINVAL);
    }
    // SAFETY: The platform bus and `/sys/devices`, where it and PMUs are, exist from boot on. A
    // parent is a device that the caller has a reference of. The reference that the lookup takes is
    // given back.
    let taken = unsafe {
        let root = (*bindings::platform_bus.kobj.kset).kobj.sd;
        let devices = if parent.is_null() {
            root
        } else {
            (*parent).kobj.sd
        };
        let node = bindings::kernfs_find_and_get_ns(devices, name.as_char_ptr(), core::ptr::null());
        let found = !node.is_null();
        bindings::kernfs_put(node);
        found
    };
    if taken {
        pr_notice!("perf: there is a device called {name:?}, so no PMU can be\n");
        return Err(EEXIST);
    }
    Ok(())
}

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_sysfs)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files() {
        assert!(is_name(c"intel_pt") && is_name(c"a.b-c_1") && is_name(c"..."));
        for no in [c"", c".", c"..", c"a/b", c"a b", c"\n"] {
            assert!(!is_name(no));
        }
    }

    #[test]
    fn names_are_there_once() -> Result {
        let mut names = KVec::new();
        add_name(&mut names, c"a")?;
        add_name(&mut names, c"b")?;
        assert_eq!(add_name(&mut names, c"a"), Err(EINVAL));
        Ok(())
    }
}
