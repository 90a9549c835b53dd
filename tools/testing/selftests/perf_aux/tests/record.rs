// SPDX-License-Identifier: GPL-2.0

//! The record reader on rings made up here: records split at every place, and contents that are no
//! records at all.

use perf_aux::abi;
use perf_aux::record::{
    Data,
    Format,
    Record, //
};
use proptest::prelude::*;
use std::sync::atomic::{
    AtomicU64,
    Ordering, //
};

/// A ring of `2^n` words that records are written into as the kernel would.
struct Writer {
    words: Vec<AtomicU64>,
    head: u64,
}

impl Writer {
    fn new(words: usize, head: u64, fill: u64) -> Self {
        Writer {
            words: (0..words).map(|_| AtomicU64::new(fill)).collect(),
            head,
        }
    }

    fn data(&self) -> Data<'_> {
        Data::new(&self.words).expect("a power of two")
    }

    fn push(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len() % 8, 0);
        for word in bytes.chunks(8) {
            let at = (self.head / 8) as usize % self.words.len();
            let word = u64::from_ne_bytes(word.try_into().unwrap());
            self.words[at].store(word, Ordering::Relaxed);
            self.head += 8;
        }
    }
}

fn record(kind: u32, body: &[u8]) -> Vec<u8> {
    let size = u16::try_from(8 + body.len()).unwrap();
    let mut bytes = kind.to_ne_bytes().to_vec();
    bytes.extend(2u16.to_ne_bytes());
    bytes.extend(size.to_ne_bytes());
    bytes.extend(body);
    bytes
}

fn format(sample_type: u32) -> Format {
    Format {
        sample_type: sample_type.into(),
        read_format: 0,
        regs_user: 0b1011,
        regs_intr: 0b1,
        id_all: true,
    }
}

/// A sample with the AUX bytes last, as G0's sampler writes it.
fn aux_sample(ip: u64, aux: &[u8]) -> Vec<u8> {
    let mut body = ip.to_ne_bytes().to_vec();
    body.extend(7u32.to_ne_bytes());
    body.extend(8u32.to_ne_bytes());
    body.extend(0x1234u64.to_ne_bytes());
    body.extend((aux.len() as u64).to_ne_bytes());
    body.extend(aux);
    record(abi::PERF_RECORD_SAMPLE, &body)
}

const AUX_FORMAT: u32 =
    abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME | abi::PERF_SAMPLE_AUX;

#[test]
fn a_split_record_parses_as_an_unsplit_one() {
    let aux: Vec<u8> = (0..64).collect();
    let bytes = aux_sample(0x4000, &aux);
    // Every start in a ring of 32 words: the end of the ring lies at every 8-byte step of the
    // record, and behind it.
    for start in (0..32 * 8).step_by(8) {
        for lap in [0, 1, 1 << 40] {
            let tail = lap * 32 * 8 + start;
            let mut ring = Writer::new(32, tail, u64::MAX);
            ring.push(&bytes);
            let raw = ring.data().record(tail, ring.head).unwrap().unwrap();
            assert_eq!(raw.bytes(), bytes, "start {start}");
            assert_eq!(tail + u64::from(raw.size()), ring.head);
            let Record::Sample(sample) = Record::parse(&raw, &format(AUX_FORMAT)).unwrap() else {
                panic!("not a sample");
            };
            assert_eq!((sample.ip, sample.pid, sample.tid), (0x4000, 7, 8));
            assert_eq!(sample.aux.as_deref(), Some(&aux[..]));
        }
    }
}

#[test]
fn positions_may_wrap_around_64_bits() {
    let bytes = aux_sample(1, &[9; 16]);
    let tail = 0u64.wrapping_sub(24);
    let ring = Writer::new(32, 0, 0);
    for (i, word) in bytes.chunks(8).enumerate() {
        let at = (tail.wrapping_add(i as u64 * 8) / 8) as usize % 32;
        ring.words[at].store(
            u64::from_ne_bytes(word.try_into().unwrap()),
            Ordering::Relaxed,
        );
    }
    let raw = ring
        .data()
        .record(tail, tail.wrapping_add(bytes.len() as u64))
        .unwrap()
        .unwrap();
    assert_eq!(raw.bytes(), bytes);
}

#[test]
fn every_field_has_its_place() {
    let sample_type = abi::PERF_SAMPLE_IDENTIFIER
        | abi::PERF_SAMPLE_CPU
        | abi::PERF_SAMPLE_READ
        | abi::PERF_SAMPLE_CALLCHAIN
        | abi::PERF_SAMPLE_RAW
        | abi::PERF_SAMPLE_BRANCH_STACK
        | abi::PERF_SAMPLE_REGS_USER
        | abi::PERF_SAMPLE_STACK_USER
        | abi::PERF_SAMPLE_WEIGHT
        | abi::PERF_SAMPLE_REGS_INTR
        | abi::PERF_SAMPLE_CODE_PAGE_SIZE
        | abi::PERF_SAMPLE_AUX;
    let mut format = format(sample_type);
    format.read_format = u64::from(
        abi::PERF_FORMAT_GROUP | abi::PERF_FORMAT_ID | abi::PERF_FORMAT_TOTAL_TIME_ENABLED,
    );
    let words = |words: &[u64]| {
        words
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect::<Vec<u8>>()
    };
    let mut body = words(&[11]);
    body.extend(words(&[3]));
    body.extend(words(&[2, 100, 5, 6, 7, 8]));
    body.extend(words(&[2, 0xa, 0xb]));
    body.extend([4, 0, 0, 0, 1, 2, 3, 4]);
    body.extend(words(&[1, 0xf, 0xe, 0xd]));
    body.extend(words(&[2, 20, 21, 22]));
    body.extend(words(&[16, 30, 31, 8]));
    body.extend(words(&[40]));
    body.extend(words(&[0]));
    body.extend(words(&[4096]));
    body.extend(words(&[8, 50]));
    let ring = {
        let mut ring = Writer::new(64, 0, 0);
        ring.push(&record(abi::PERF_RECORD_SAMPLE, &body));
        ring
    };
    let raw = ring.data().record(0, ring.head).unwrap().unwrap();
    let Record::Sample(s) = Record::parse(&raw, &format).unwrap() else {
        panic!("not a sample");
    };
    assert_eq!((s.id, s.cpu, s.branches), (11, 3, 1));
    assert_eq!(s.read, [2, 100, 5, 6, 7, 8]);
    assert_eq!(s.callchain, [0xa, 0xb]);
    assert_eq!(s.raw, [1, 2, 3, 4]);
    assert_eq!(s.regs_user, Some(vec![20, 21, 22]));
    assert_eq!((s.stack_user.len(), s.stack_dyn_size), (16, 8));
    assert_eq!(s.aux.as_deref(), Some(&50u64.to_ne_bytes()[..]));
    // One word more, and the record no longer is what its header says.
    let mut longer = body;
    longer.extend(words(&[0]));
    let mut ring = Writer::new(64, 0, 0);
    ring.push(&record(abi::PERF_RECORD_SAMPLE, &longer));
    let raw = ring.data().record(0, ring.head).unwrap().unwrap();
    assert!(Record::parse(&raw, &format).is_err());
}

#[test]
fn other_records_end_with_the_identity_fields() {
    let format = format(abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME | abi::PERF_SAMPLE_IP);
    let words = |words: &[u64]| {
        words
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect::<Vec<u8>>()
    };
    let parse = |kind, body: &[u64]| {
        let mut ring = Writer::new(64, 0, 0);
        ring.push(&record(kind, &words(body)));
        let raw = ring.data().record(0, ring.head).unwrap().unwrap();
        Record::parse(&raw, &format)
    };
    assert_eq!(
        parse(abi::PERF_RECORD_AUX, &[64, 32, 1, 0, 0]),
        Ok(Record::Aux {
            offset: 64,
            size: 32,
            flags: 1
        })
    );
    assert_eq!(
        parse(abi::PERF_RECORD_LOST, &[5, 6, 0, 0]),
        Ok(Record::Lost { id: 5, lost: 6 })
    );
    assert!(parse(abi::PERF_RECORD_AUX, &[64, 32, 1]).is_err());
    assert!(parse(abi::PERF_RECORD_AUX, &[64, 32, 1, 0, 0, 0]).is_err());
}

#[test]
fn a_header_that_cannot_be_is_refused() {
    for size in [0u16, 1, 7, 9, 12, 264, 65535] {
        let mut ring = Writer::new(32, 0, 0);
        let mut bytes = abi::PERF_RECORD_SAMPLE.to_ne_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(size.to_ne_bytes());
        ring.push(&bytes);
        assert!(ring.data().record(0, 256).is_err(), "size {size}");
    }
    let ring = Writer::new(32, 0, 0);
    assert!(ring.data().record(0, 257).is_err());
    assert!(ring.data().record(4, 36).is_err());
    assert!(ring.data().record(8, 0).is_err());
    assert_eq!(ring.data().record(8, 8), Ok(None));
}

proptest! {
    /// Whatever a ring holds, reading it ends, in order and without a panic.
    #[test]
    fn hostile_rings_end(
        words in (0u32..8).prop_flat_map(|n| prop::collection::vec(any::<u64>(), 1usize << n)),
        small_sizes in any::<bool>(),
        tail in any::<u64>(),
        filled in 0u64..2048,
        sample_type in 0u32..1 << 25,
        read_format in 0u64..32,
    ) {
        let words: Vec<AtomicU64> = words
            .into_iter()
            // A random header.size is nearly never possible; small multiples of 8 get further.
            .map(|word| if small_sizes { word & 0x0038_ffff_0000_000f } else { word })
            .map(AtomicU64::new)
            .collect();
        let data = Data::new(&words).unwrap();
        let mut format = format(sample_type);
        format.read_format = read_format;
        let (mut tail, head) = (tail, tail.wrapping_add(filled));
        let mut rounds = 0;
        while let Ok(Some(raw)) = data.record(tail, head) {
            prop_assert_eq!(raw.bytes().len(), usize::from(raw.size()));
            prop_assert!(raw.size() >= 8 && raw.size() % 8 == 0);
            let _ = Record::parse(&raw, &format);
            tail = tail.wrapping_add(raw.size().into());
            rounds += 1;
            prop_assert!(rounds <= 2048 / 8);
        }
    }

    /// Any row of AUX samples comes out as it went in, whatever the ring's size and position.
    #[test]
    fn what_was_written_is_read(
        sizes in prop::collection::vec(0usize..80, 1..40),
        start in 0u64..1 << 20,
        log2 in 7u32..10,
    ) {
        let mut ring = Writer::new(1 << log2, start * 8, 0x5555_5555_5555_5555);
        let mut tail = ring.head;
        for (i, words) in sizes.into_iter().enumerate() {
            let aux: Vec<u8> = (0..words * 8).map(|b| (b + i) as u8).collect();
            ring.push(&aux_sample(i as u64, &aux));
            let raw = ring.data().record(tail, ring.head).unwrap().unwrap();
            let parsed = Record::parse(&raw, &format(AUX_FORMAT)).unwrap();
            let Record::Sample(sample) = parsed else { panic!("not a sample") };
            prop_assert_eq!(sample.ip, i as u64);
            prop_assert_eq!(sample.aux, Some(aux));
            tail += u64::from(raw.size());
        }
        prop_assert_eq!(tail, ring.head);
    }

    /// A record cut short anywhere is an error, never another record.
    #[test]
    fn a_truncated_body_is_refused(cut in 1usize..12) {
        let bytes = aux_sample(1, &[3; 64]);
        let kept = bytes.len() - cut * 8;
        let mut ring = Writer::new(32, 0, 0);
        ring.push(&bytes[..kept]);
        let header = u64::from_ne_bytes(bytes[..8].try_into().unwrap()) & 0x0000_ffff_ffff_ffff;
        ring.words[0].store(header | ((kept as u64) << 48), Ordering::Relaxed);
        let raw = ring.data().record(0, kept as u64).unwrap().unwrap();
        prop_assert!(Record::parse(&raw, &format(AUX_FORMAT)).is_err());
    }
}
