// SPDX-License-Identifier: GPL-2.0

//! KUnit tests of AUX sampling: the sizes, and the copy through real buffers.

use super::{
    copy::{
        Area,
        Output, //
    },
    guard::{
        InSampling,
        IrqsSaved, //
    },
    size::{
        Grant,
        Want,
        RECORD_MAX, //
    },
};
use crate::{
    page::PAGE_SIZE,
    perf::bindings,
    prelude::*, //
};
use core::ptr::NonNull;

/// Pages that are pieces of one allocation, in a given order.
struct TestPages {
    memory: KVVec<u8>,
    order: KVec<usize>,
}

impl TestPages {
    fn new(order: &[usize], fill: impl Fn(usize) -> u8) -> Result<Self> {
        let mut memory = KVVec::with_capacity(order.len() * PAGE_SIZE, GFP_KERNEL)?;
        memory.resize(order.len() * PAGE_SIZE, 0, GFP_KERNEL)?;
        let mut copy = KVec::new();
        copy.extend_from_slice(order, GFP_KERNEL)?;
        let mut pages = Self {
            memory,
            order: copy,
        };
        for at in 0..order.len() * PAGE_SIZE {
            *pages.at(at)? = fill(at);
        }
        Ok(pages)
    }

    /// The byte at `at` in the ring.
    fn at(&mut self, at: usize) -> Result<&mut u8> {
        let page = *self.order.get(at / PAGE_SIZE).ok_or(EINVAL)?;
        self.memory
            .get_mut(page * PAGE_SIZE + at % PAGE_SIZE)
            .ok_or(EINVAL)
    }

    fn addresses(&mut self) -> Result<KVec<*mut c_void>> {
        let mut addresses = KVec::new();
        let base = self.memory.as_mut_ptr();
        for page in self.order.iter() {
            addresses.push(base.wrapping_add(page * PAGE_SIZE).cast(), GFP_KERNEL)?;
        }
        Ok(addresses)
    }
}

/// `assert_eq!` for functions that tests call: it fails the test, where a panic would stop the
/// kernel.
fn same<T: PartialEq + core::fmt::Debug>(is: T, should: T) -> Result {
    if is != should {
        pr_err!("is {:?}, should be {:?}\n", is, should);
        return Err(EINVAL);
    }
    Ok(())
}

/// Copies `from..to` of an AUX area to `start` in a data ring, and compares every byte of the ring.
fn check_copy(aux: &[usize], data: &[usize], from: usize, to: usize, start: usize) -> Result {
    let byte = |at: usize| (at / 7 + at / PAGE_SIZE * 31 + 1) as u8;
    let mut area = TestPages::new(aux, byte)?;
    let mut ring = TestPages::new(data, |_| 0xa5)?;
    let mut aux_pages = area.addresses()?;
    let data_pages = ring.addresses()?;
    let area_size = aux.len() * PAGE_SIZE;
    let ring_size = data.len() * PAGE_SIZE;

    // The C structure ends in an array of `data.len()` pointers.
    let head = size_of::<bindings::perf_buffer>();
    let words = head.div_ceil(8) + data.len();
    let mut buffer = KVec::<u64>::with_capacity(words, GFP_KERNEL)?;
    buffer.resize(words, 0, GFP_KERNEL)?;
    let rb = NonNull::new(buffer.as_mut_ptr())
        .ok_or(ENOMEM)?
        .cast::<bindings::perf_buffer>()
        .as_ptr();
    // SAFETY: The allocation is large enough for the structure and its array, and zeroed, which is
    // a valid value of it.
    unsafe {
        (*rb).nr_pages = data.len() as c_int;
        (*rb).aux_nr_pages = aux.len() as c_int;
        (*rb).aux_pages = aux_pages.as_mut_ptr();
        let array: *mut *mut c_void = (&raw mut (*rb).data_pages).cast();
        for (i, page) in data_pages.iter().enumerate() {
            array.add(i).write(*page);
        }
    }

    let mut handle: bindings::perf_output_handle = pin_init::zeroed();
    handle.rb = rb;
    handle.page = (start / PAGE_SIZE) as c_int;
    handle.size = PAGE_SIZE - start % PAGE_SIZE;
    handle.__bindgen_anon_2.addr = data_pages
        .get(start / PAGE_SIZE)
        .ok_or(EINVAL)?
        .wrapping_byte_add(start % PAGE_SIZE);

    // SAFETY: The buffer has an AUX area and data pages that nobody else uses.
    let (area_of, mut out) = unsafe { (Area::new(rb).ok_or(EFAULT)?, Output::new(&mut handle)) };
    let len = area_of.distance(from as u64, to as u64);
    out.copy(&area_of, from as u64, len)?;
    out.zero(8);

    let len = len as usize;
    same(len, to.wrapping_sub(from).wrapping_sub(1) % area_size + 1)?;
    for at in 0..ring_size {
        let nth = (at + ring_size - start) % ring_size;
        let want = if nth < len {
            byte((from + nth) % area_size)
        } else if nth < len + 8 {
            0
        } else {
            0xa5
        };
        same(*ring.at(at)?, want)?;
    }
    let end = (start + len + 8) % ring_size;
    same(handle.page as usize, end / PAGE_SIZE)?;
    same(handle.size, PAGE_SIZE - end % PAGE_SIZE)?;
    // SAFETY: Outputs use this variant.
    let addr = unsafe { handle.__bindgen_anon_2.addr };
    let page = *data_pages.get(end / PAGE_SIZE).ok_or(EINVAL)?;
    same(addr, page.wrapping_byte_add(end % PAGE_SIZE))
}

#[macros::kunit_tests(rust_perf_sampling)]
mod cases {
    use super::*;

    #[test]
    fn settle() {
        let want = |record, stack, asked, area| Want {
            record,
            stack,
            asked,
            area,
        };
        let grant = |aux, stack, record| Grant { aux, stack, record };
        let table = [
            (want(40, 0, 0, 4096), grant(0, 0, 48)),
            (want(40, 0, 1, 4096), grant(0, 0, 48)),
            (want(40, 0, 7, 4096), grant(0, 0, 48)),
            (want(40, 0, 8, 4096), grant(8, 0, 56)),
            (want(40, 0, 9, 4096), grant(8, 0, 56)),
            (want(40, 0, 4095, 8192), grant(4088, 0, 4136)),
            (want(40, 0, 4096, 0), grant(0, 0, 48)),
            (want(40, 0, 65535, 4096), grant(4096, 0, 4144)),
            (want(40, 0, 65535, 1 << 21), grant(65480, 0, 65528)),
            (want(40, 0, 65536, 1 << 33), grant(65480, 0, 65528)),
            (
                want(40, 0, i32::MAX as u32, 1 << 33),
                grant(65480, 0, 65528),
            ),
            (want(40, 0, u32::MAX, 1 << 33), grant(65480, 0, 65528)),
            // Exactly no room for data, then no room for the size field either.
            (want(65520, 0, 4096, 65536), grant(0, 0, 65528)),
            (want(65512, 0, 4096, 65536), grant(8, 0, 65528)),
            (want(65528, 65472, 4096, 65536), grant(0, 65464, 65528)),
            // What comes after the stack dump has gone past the end as well.
            (want(65672, 65472, 4096, 65536), grant(0, 65320, 65528)),
            // A dump that can't give enough keeps a word.
            (want(65544, 16, 4096, 65536), grant(0, 8, 65544)),
            (want(70000, 0, 4096, 65536), grant(0, 0, 70008)),
        ];
        for (want, grant) in table {
            assert_eq!(want.settle(), grant);
        }
        assert_eq!(RECORD_MAX, 65528);
    }

    #[test]
    fn copy() -> Result {
        let p = PAGE_SIZE;
        let one: &[usize] = &[0];
        let joined: &[usize] = &[0, 1, 2, 3];
        let apart: &[usize] = &[3, 1, 2, 0];
        for aux in [one, joined, apart] {
            let size = aux.len() * p;
            for data in [&[0, 1, 2, 3, 4, 5, 6, 7], &[7, 0, 1, 5, 6, 2, 4, 3]] {
                for (from, to) in [
                    (0, 8),
                    (0, size),
                    (8, 8),
                    (size - 8, 8),
                    (size - 8, size),
                    (p / 2, p / 2 + size - 8),
                    (3 * size + 16, 3 * size + p - 8),
                ] {
                    for start in [0, 8, p - 8, 5 * p + 24, 8 * p - 8, 8 * p - 16] {
                        check_copy(aux, data, from, to, start)?;
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn guard_nests() {
        let mut flag: c_int = 0;
        let flag = &raw mut flag;
        let irqs = IrqsSaved::save();
        let cx = irqs.token();
        // SAFETY: The flag is there for longer than the guards and the reads.
        let enter = || unsafe { InSampling::enter(flag, &cx) };
        // SAFETY: As above.
        let is_set = || unsafe { flag.read_volatile() } == 1;

        let outer = enter();
        assert!(outer.is_some());
        assert!(is_set());
        assert!(enter().is_none());
        // The inner visitor has left the flag alone.
        assert!(is_set());
        drop(outer);
        assert!(!is_set());
        assert!(enter().is_some());
        assert!(!is_set());
    }
}
