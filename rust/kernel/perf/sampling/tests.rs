// SPDX-License-Identifier: GPL-2.0

//! KUnit tests of AUX sampling: the sizes, and the copy through real buffers.
//!
//! What is entered through the perf core's functions is run in each variant that the kernel has.

use super::{
    copy::{
        Area,
        Output, //
    },
    guard::InSampling,
    perf_aux_rust_output,
    size::{
        Grant,
        Want,
        RECORD_MAX, //
    },
    Sampler, //
};
use crate::{
    cpu::CpuId,
    nmi::irqs_off,
    page::PAGE_SIZE,
    perf::bindings,
    prelude::*, //
};

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

/// A `struct perf_buffer` with its pages.
struct Buffer<'a> {
    words: KVec<u64>,
    pages: &'a [*mut c_void],
}

impl<'a> Buffer<'a> {
    /// A buffer with these data pages, and `aux_nr_pages` AUX pages whose addresses are in an
    /// array.
    fn new(
        pages: &'a [*mut c_void],
        aux_pages: *mut *mut c_void,
        aux_nr_pages: usize,
    ) -> Result<Self> {
        // The C structure ends in an array of pointers to the data pages.
        let count = size_of::<bindings::perf_buffer>().div_ceil(8) + pages.len();
        let mut words = KVec::<u64>::with_capacity(count, GFP_KERNEL)?;
        words.resize(count, 0, GFP_KERNEL)?;
        let mut this = Self { words, pages };
        let rb = this.rb();
        // SAFETY: The allocation is large enough for the structure and its array, and zeroed, which
        // is a valid value of it.
        unsafe {
            (*rb).nr_pages = pages.len() as c_int;
            (*rb).aux_nr_pages = aux_nr_pages as c_int;
            (*rb).aux_pages = aux_pages;
            let array: *mut *mut c_void = (&raw mut (*rb).data_pages).cast();
            for (i, page) in pages.iter().enumerate() {
                array.add(i).write(*page);
            }
        }
        Ok(this)
    }

    fn rb(&mut self) -> *mut bindings::perf_buffer {
        self.words.as_mut_ptr().cast()
    }

    /// An output that goes on at `start` in the ring.
    fn handle(&mut self, start: usize) -> Result<bindings::perf_output_handle> {
        let mut handle: bindings::perf_output_handle = pin_init::zeroed();
        handle.rb = self.rb();
        handle.page = (start / PAGE_SIZE) as c_int;
        handle.size = PAGE_SIZE - start % PAGE_SIZE;
        handle.__bindgen_anon_2.addr = self
            .pages
            .get(start / PAGE_SIZE)
            .ok_or(EINVAL)?
            .wrapping_byte_add(start % PAGE_SIZE);
        Ok(handle)
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

    let mut buffer = Buffer::new(&data_pages, aux_pages.as_mut_ptr(), aux.len())?;
    let mut handle = buffer.handle(start)?;

    // SAFETY: The buffer has an AUX area and data pages that nobody else uses.
    let (area_of, mut out) = unsafe {
        (
            Area::new(buffer.rb()).ok_or(EFAULT)?,
            Output::new(&mut handle),
        )
    };
    let len = area_of.distance(from as u64, to as u64);
    out.copy(&area_of, from as u64, len);
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

fn new_event() -> Result<KBox<bindings::perf_event>> {
    KBox::init(pin_init::init_zeroed::<bindings::perf_event>(), GFP_KERNEL)
}

/// Runs a test with AUX sampling in Rust, then with the C functions, if the kernel has both.
fn in_each_variant(mut test: impl FnMut() -> Result) -> Result {
    let chosen = test();
    #[cfg(CONFIG_PERF_AUX_RUST_COMPARE)]
    {
        let rust = super::is_chosen();
        // SAFETY: Nothing is sampled while the tests run, and it would do no harm.
        unsafe { bindings::perf_aux_choose(!rust) };
        let other = test();
        // SAFETY: As above.
        unsafe { bindings::perf_aux_choose(rust) };
        other?;
    }
    chosen
}

/// An event that takes AUX samples and the sampler that it takes them of, whose area has four pages
/// and whose snapshots are 64 bytes of 0x5a. A transaction is open, in snapshot mode; that the
/// sampler is on this CPU is left to the test.
struct Pair<'a> {
    sampled: KBox<bindings::perf_event>,
    sampler: KBox<bindings::perf_event>,
    _pmu: KBox<bindings::pmu>,
    buffer: Buffer<'a>,
    data: KBox<bindings::perf_sample_data>,
}

impl<'a> Pair<'a> {
    const SIZE: usize = 64;

    fn new(pages: &'a [*mut c_void]) -> Result<Self> {
        let mut buffer = Buffer::new(pages, core::ptr::null_mut(), 4)?;
        let mut pmu = KBox::init(pin_init::init_zeroed::<bindings::pmu>(), GFP_KERNEL)?;
        pmu.snapshot_aux = Some(snapshot_as_told);
        let (mut sampled, mut sampler) = (new_event()?, new_event()?);
        sampled.aux_event = &raw mut *sampler;
        sampled.attr.sample_type = u64::from(bindings::perf_event_sample_format_PERF_SAMPLE_AUX);
        sampled.attr.aux_sample_size = 4096;
        sampler.pmu = &raw mut *pmu;
        sampler.rb = buffer.rb();
        sampler.state = bindings::perf_event_state_PERF_EVENT_STATE_ACTIVE;
        sampler.attr.config = Self::SIZE as u64;
        sampler.attr.branch_sample_type = Self::SIZE as u64;
        // SAFETY: The buffer belongs to nobody else.
        unsafe {
            let rb = buffer.rb();
            (*rb).refcount.refs.counter = 1;
            (*rb).aux_nest = 1;
            (*rb).aux_overwrite = 1;
        }
        Ok(Self {
            sampled,
            sampler,
            _pmu: pmu,
            buffer,
            data: KBox::init(pin_init::init_zeroed(), GFP_KERNEL)?,
        })
    }

    /// Has the core prepare a sample, and returns the size of its AUX data.
    fn prepare(&mut self) -> u64 {
        self.data.sample_flags = 0;
        self.data.dyn_size = 0;
        self.data.aux_size = 0xdead;
        // SAFETY: All is as when an event overflows. No field is asked for that needs registers.
        unsafe {
            bindings::perf_prepare_sample(
                &raw mut *self.data,
                &raw mut *self.sampled,
                core::ptr::null_mut(),
            )
        };
        self.data.aux_size
    }

    /// Has the core output the sample to the beginning of the data pages.
    fn output(&mut self) -> Result {
        let mut handle = self.buffer.handle(0)?;
        let mut header = bindings::perf_event_header::default();
        // SAFETY: All is as when an event overflows, and the pages have room for it.
        unsafe {
            bindings::perf_output_sample(
                &mut handle,
                &mut header,
                &raw mut *self.data,
                &raw mut *self.sampled,
            )
        };
        Ok(())
    }
}

/// What takes a sampler out of the state in which it can be sampled from.
type Change = fn(&mut bindings::perf_event, &mut bindings::perf_buffer);

const CHANGES: [(&CStr, Change); 6] = [
    (c"stopped", |sampler, _| {
        sampler.state = bindings::perf_event_state_PERF_EVENT_STATE_INACTIVE;
    }),
    (c"on another CPU", |sampler, _| sampler.oncpu += 1),
    (c"without a buffer", |sampler, _| {
        sampler.rb = core::ptr::null_mut()
    }),
    (c"without a transaction", |_, rb| rb.aux_nest = 0),
    (c"in a full trace", |_, rb| rb.aux_overwrite = 0),
    (c"in a snapshot", |_, rb| rb.aux_in_sampling = 1),
];

/// Has a sample output whose `sample_flags` are given, after `change` has happened to the sampler:
/// its AUX field must be `size` bytes that are all `byte`.
fn check_output(flags: u64, change: Change, size: usize, byte: u8) -> Result {
    let mut ring = TestPages::new(&[0, 1], |_| 0xa5)?;
    let pages = ring.addresses()?;
    let mut pair = Pair::new(&pages)?;
    pair.data.type_ = pair.sampled.attr.sample_type;
    pair.data.sample_flags = flags;
    pair.data.aux_size = Pair::SIZE as u64;
    irqs_off(|_| {
        pair.sampler.oncpu = CpuId::current().as_u32() as c_int;
        // SAFETY: The buffer belongs to nobody else.
        change(&mut pair.sampler, unsafe { &mut *pair.buffer.rb() });
        pair.output()
    })?;
    let header = size_of::<bindings::perf_event_header>();
    let mut word = [0; 8];
    for (at, to) in word.iter_mut().enumerate() {
        *to = *ring.at(header + at)?;
    }
    same(u64::from_ne_bytes(word), size as u64)?;
    for at in 0..2 * Pair::SIZE {
        same(
            *ring.at(header + 8 + at)?,
            if at < size { byte } else { 0xa5 },
        )?;
    }
    Ok(())
}

/// A `snapshot_aux` that appends `attr.config` bytes and returns `attr.branch_sample_type`, or an
/// error when the guard is not set.
///
/// # Safety
///
/// To be called as the perf core does, for an event with a buffer.
unsafe extern "C" fn snapshot_as_told(
    event: *mut bindings::perf_event,
    handle: *mut bindings::perf_output_handle,
    _size: usize,
) -> c_long {
    let bytes = [0x5a_u8; 256];
    // SAFETY: By the safety requirements; the record has room for what the tests ask for.
    unsafe {
        if (*(*event).rb).aux_in_sampling == 0 {
            return -1;
        }
        let appends = (*event).attr.config as u32;
        bindings::perf_output_copy(handle, bytes.as_ptr().cast(), appends);
        (*event).attr.branch_sample_type as c_long
    }
}

#[macros::kunit_tests(rust_perf_sampling)]
mod cases {
    use super::*;

    /// Whatever a PMU does, as many bytes are appended as were promised: its own, or zeros.
    #[test]
    fn output_is_exact() -> Result {
        const SIZE: usize = 64;
        // What the PMU appends, what it says, how many of its bytes are to be there; the last is of
        // a sampler whose buffer went away.
        let table: [(u64, c_long, usize); 8] = [
            (64, 64, 64),
            (40, 40, 40),
            (8, 8, 8),
            (0, 0, 0),
            // An error, after it has appended some.
            (24, -14, 0),
            // It says that it appended more than there was room for.
            (16, 1000, 0),
            (16, c_long::MIN, 0),
            (u64::MAX, 64, 0),
        ];
        for start in [0, PAGE_SIZE - 32, 2 * PAGE_SIZE - 8] {
            for (appends, says, kept) in table {
                let mut ring = TestPages::new(&[1, 0], |_| 0xa5)?;
                let data_pages = ring.addresses()?;
                let mut aux_page = [data_pages[0]];
                let mut buffer = Buffer::new(&data_pages, aux_page.as_mut_ptr(), 1)?;
                let mut handle = buffer.handle(start)?;
                let mut pmu = KBox::init(pin_init::init_zeroed::<bindings::pmu>(), GFP_KERNEL)?;
                pmu.snapshot_aux = Some(snapshot_as_told);
                let (mut sampled, mut sampler) = (new_event()?, new_event()?);
                sampled.aux_event = &raw mut *sampler;
                sampler.pmu = &raw mut *pmu;
                if appends != u64::MAX {
                    sampler.rb = buffer.rb();
                }
                sampler.state = bindings::perf_event_state_PERF_EVENT_STATE_ACTIVE;
                sampler.attr.config = appends;
                sampler.attr.branch_sample_type = says as u64;
                let mut data = KBox::init(
                    pin_init::init_zeroed::<bindings::perf_sample_data>(),
                    GFP_KERNEL,
                )?;
                data.sample_flags = u64::from(bindings::perf_event_sample_format_PERF_SAMPLE_AUX);
                data.aux_size = SIZE as u64;
                irqs_off(|_| {
                    sampler.oncpu = CpuId::current().as_u32() as c_int;
                    // SAFETY: The buffer belongs to nobody else.
                    unsafe {
                        (*buffer.rb()).aux_nest = 1;
                        (*buffer.rb()).aux_overwrite = 1;
                    }
                    // SAFETY: All is as when a sample is output, with interrupts off.
                    unsafe {
                        perf_aux_rust_output(&raw mut *sampled, &raw mut handle, &raw mut *data)
                    };
                });
                // SAFETY: As above.
                same(unsafe { (*buffer.rb()).aux_in_sampling }, 0)?;
                for nth in 0..2 * PAGE_SIZE {
                    let want = match nth {
                        nth if nth < kept => 0x5a,
                        nth if nth < SIZE => 0,
                        _ => 0xa5,
                    };
                    same(*ring.at((start + nth) % (2 * PAGE_SIZE))?, want)?;
                }
                let end = (start + SIZE) % (2 * PAGE_SIZE);
                same(handle.page as usize, end / PAGE_SIZE)?;
                same(handle.size, PAGE_SIZE - end % PAGE_SIZE)?;
            }
        }
        Ok(())
    }

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

    /// When a sample can be taken of a sampler's area, and how large that area is.
    #[test]
    fn sampler_ready() -> Result {
        let (mut event, mut sampled) = (new_event()?, new_event()?);
        let mut buffer = Buffer::new(&[], core::ptr::null_mut(), 4)?;
        let rb = buffer.rb();
        irqs_off(|_| {
            let here = CpuId::current().as_u32() as c_int;
            let active = bindings::perf_event_state_PERF_EVENT_STATE_ACTIVE;
            let inactive = bindings::perf_event_state_PERF_EVENT_STATE_INACTIVE;
            // State, CPU, has it a buffer, is a transaction open, is the area a ring of what came
            // last, is a snapshot under way; what can be sampled.
            let table = [
                (active, here, true, 1, 1, 0, 4 * PAGE_SIZE as u64),
                (inactive, here, true, 1, 1, 0, 0),
                (active, here + 1, true, 1, 1, 0, 0),
                (active, -1, true, 1, 1, 0, 0),
                (active, here, false, 1, 1, 0, 0),
                (active, here, true, 0, 1, 0, 0),
                (active, here, true, 1, 0, 0, 0),
                (active, here, true, 1, 1, 1, 0),
            ];
            for (state, cpu, has_buffer, nest, overwrite, in_sampling, area) in table {
                // SAFETY: The buffer is there, and nobody else's.
                unsafe {
                    (*rb).aux_nest = nest;
                    (*rb).aux_overwrite = overwrite;
                    (*rb).aux_in_sampling = in_sampling;
                }
                event.state = state;
                event.oncpu = cpu;
                event.rb = if has_buffer {
                    rb
                } else {
                    core::ptr::null_mut()
                };
                sampled.aux_event = &raw mut *event;
                // SAFETY: The event and what it refers to exist for longer than the sampler.
                let sampler = unsafe { Sampler::of(&raw const *sampled) }.ok_or(EINVAL)?;
                assert_eq!(sampler.area(), area);
            }
            Ok(())
        })
    }

    /// The size of a sample is 0 unless the sampler can be sampled from.
    #[test]
    fn prepared_size() -> Result {
        let mut ring = TestPages::new(&[0, 1], |_| 0xa5)?;
        let pages = ring.addresses()?;
        in_each_variant(|| {
            for (what, change) in CHANGES {
                let mut pair = Pair::new(&pages)?;
                irqs_off(|_| {
                    pair.sampler.oncpu = CpuId::current().as_u32() as c_int;
                    same(pair.prepare(), 4096)?;
                    // SAFETY: The buffer belongs to nobody else.
                    change(&mut pair.sampler, unsafe { &mut *pair.buffer.rb() });
                    same(pair.prepare(), 0)
                })
                .inspect_err(|_| pr_err!("with a sampler {what:?}\n"))?;
                // SAFETY: As above.
                same(unsafe { (*pair.buffer.rb()).refcount.refs.counter }, 1)?;
            }
            Ok(())
        })
    }

    /// A sampler that has changed since the size was settled is not asked for a snapshot, and what
    /// was not prepared has no size.
    #[test]
    fn output_of_what_was_prepared() -> Result {
        const AUX: u64 = bindings::perf_event_sample_format_PERF_SAMPLE_AUX as u64;
        in_each_variant(|| {
            check_output(AUX, |_, _| (), 64, 0x5a)?;
            for (what, change) in CHANGES {
                check_output(AUX, change, 64, 0)
                    .inspect_err(|_| pr_err!("with a sampler {what:?}\n"))?;
            }
            check_output(0, |_, _| (), 0, 0)
        })
    }

    /// The core's copy from areas of 2, 4 and 8 GiB. Behind the array of their pages is another
    /// page, which a copy that does not go round would take.
    #[test]
    fn copy_goes_round_huge_areas() -> Result {
        let mut pages = TestPages::new(&[0, 1, 2, 3], |at| match at / PAGE_SIZE {
            3 => 0xff,
            _ => (at / 5 % 251) as u8,
        })?;
        let four = pages.addresses()?;
        let (three, beyond) = four.split_at(3);
        for count in [1 << 19, 1 << 20, 1 << 21] {
            let size = count * PAGE_SIZE;
            let mut aux_pages = KVVec::with_capacity(count + 3, GFP_KERNEL)?;
            for page in three.iter().cycle().take(count) {
                aux_pages.push(*page, GFP_KERNEL)?;
            }
            for _ in 0..3 {
                aux_pages.push(beyond[0], GFP_KERNEL)?;
            }
            in_each_variant(|| {
                for (from, len) in [(size - 24, 48), (size - 4100, 9000), (size / 2 - 24, 48)] {
                    let mut ring = TestPages::new(&[1, 0, 3, 2], |_| 0xa5)?;
                    let data_pages = ring.addresses()?;
                    let mut buffer = Buffer::new(&data_pages, aux_pages.as_mut_ptr(), count)?;
                    let mut handle = buffer.handle(0)?;
                    let mut aux = buffer.handle(0)?;
                    // SAFETY: The buffer has an AUX area and data pages that nobody else uses.
                    let copied = unsafe {
                        bindings::perf_output_copy_aux(&mut aux, &mut handle, from, from + len)
                    };
                    same(copied, len as c_long)?;
                    for at in 0..len {
                        let place = (from + at) % size;
                        let want =
                            *pages.at(place / PAGE_SIZE % 3 * PAGE_SIZE + place % PAGE_SIZE)?;
                        same(*ring.at(at)?, want)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// An area of 8 GiB, whose pages are three over and over, copied from across each boundary of
    /// 32 bits.
    #[test]
    fn copy_from_huge_area() -> Result {
        let count = 1 << 21;
        let size = (count * PAGE_SIZE) as u64;
        let mut pages = TestPages::new(&[0, 2, 1], |at| (at / 5 % 251) as u8)?;
        let three = pages.addresses()?;
        let mut aux_pages = KVVec::with_capacity(count, GFP_KERNEL)?;
        for page in 0..count {
            aux_pages.push(*three.get(page % 3).ok_or(EINVAL)?, GFP_KERNEL)?;
        }
        let wraps = [1 << 31, 1 << 32, 3 << 31, size, 5 * size, u64::MAX - 4095];
        for (from, len) in wraps
            .iter()
            .flat_map(|at| [(at - 24, 48), (at - 4100, 9000)])
        {
            let mut ring = TestPages::new(&[1, 0, 3, 2], |_| 0xa5)?;
            let data_pages = ring.addresses()?;
            let mut buffer = Buffer::new(&data_pages, aux_pages.as_mut_ptr(), count)?;
            let mut handle = buffer.handle(0)?;
            // SAFETY: The buffer has an AUX area and data pages that nobody else uses.
            let (area, mut out) = unsafe {
                (
                    Area::new(buffer.rb()).ok_or(EFAULT)?,
                    Output::new(&mut handle),
                )
            };
            same(area.distance(from, from.wrapping_add(len)), len)?;
            same(area.distance(from, from), size)?;
            out.copy(&area, from, len);
            for at in 0..len {
                let place = (from.wrapping_add(at) % size) as usize;
                let want = *pages.at(place / PAGE_SIZE % 3 * PAGE_SIZE + place % PAGE_SIZE)?;
                same(*ring.at(at as usize)?, want)?;
            }
        }
        Ok(())
    }

    /// What `aux_cost` of the selftests compares with.
    #[cfg(CONFIG_X86_64)]
    #[test]
    fn cost_of_memcpy() -> Result {
        const LARGEST: usize = 61440;
        // SAFETY: There is a time-stamp counter on all x86-64 processors.
        let now = || unsafe { bindings::rdtsc() };
        let mut source = KVVec::<u8>::with_capacity(LARGEST, GFP_KERNEL)?;
        source.resize(LARGEST, 1, GFP_KERNEL)?;
        let mut target = KVVec::<u8>::with_capacity(LARGEST, GFP_KERNEL)?;
        target.resize(LARGEST, 0, GFP_KERNEL)?;
        let timed = |len: usize, work: &dyn Fn(*mut u8, *const u8, usize)| {
            let (target, source) = (target.as_ptr().cast_mut(), source.as_ptr());
            (0..64)
                .map(|_| {
                    let start = now();
                    work(target, source, len);
                    now().wrapping_sub(start)
                })
                .min()
        };
        for len in [8, 64, 1024, 4096, 16384, LARGEST] {
            let nothing = timed(len, &|_, _, _| ()).ok_or(EINVAL)?;
            let all = timed(len, &|target, source, len| {
                // SAFETY: Both buffers have at least `LARGEST` bytes, and nobody else uses them.
                unsafe { core::ptr::copy_nonoverlapping(source, target, len) }
            })
            .ok_or(EINVAL)?;
            assert!(all > nothing);
            pr_info!(
                "memcpy of {} bytes: {} cycles\n",
                len,
                all.wrapping_sub(nothing)
            );
        }
        Ok(())
    }

    #[test]
    fn guard_nests() {
        let mut flag: c_int = 0;
        let flag = &raw mut flag;
        irqs_off(|cx| {
            // SAFETY: The flag is there for longer than the guards and the reads.
            let enter = || unsafe { InSampling::enter(flag, cx) };
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
        });
    }
}
