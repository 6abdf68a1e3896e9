//! Tests of the order between the streams: pass and extraction are correct however early or late each stream runs, and
//! a caller that forgets to wait is detected.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[macro_use]
#[path = "forward/common.rs"]
mod common;
#[path = "order/drops_waits.rs"]
mod drops_waits;

use std::sync::Arc;

use common::{random_below, random_values};
use drops_waits::{DroppedWait, DropsWaits};
use stillhouse_gpu::extract::{DeviceSlice, ExtractRequest, Extracted, Extractor, Noise, Positions};
use stillhouse_gpu::net::{Activation, Architecture, Net, Shape, Source};
use stillhouse_gpu::{Buffer, Device, Element, GpuError, Result, Stream, logits_stride};
use stillhouse_noise::{DrawKey, Signals, Tolerance, ValueType};
use stillhouse_signals::{Entropy, SampledLogits, TopK};

/// Seeds: the host's four stream orders, and several random ones of the fourth.
const SEEDS: u64 = 12;
const VOCAB: usize = 41;
const ROWS: usize = 8;
const TOKENS: usize = 24;

struct Random;

impl Source for Random {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let key = name.bytes().fold(7u64, |key, b| key.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        Ok(random_values(key, shape.iter().product()))
    }
}

fn load(device: &Arc<dyn Device>) -> Result<Net> {
    let shape = Shape {
        architecture: Architecture::Gpt2,
        vocab: VOCAB,
        width: 32,
        layers: 1,
        heads: 2,
        kv_heads: 2,
        head_dim: 16,
        inner: 64,
        activation: Activation::GeluTanh,
        scaled: true,
        scaled_by_layer: false,
        eps: 1e-5,
        positions: TOKENS,
        tied: false,
        attention_bias: true,
        mlp_bias: true,
    };
    Net::load(device, shape, Element::Bf16, None, &mut Random, TOKENS)
}

fn request() -> ExtractRequest {
    let noise = Noise::Replay { tolerance: Tolerance::new(1e-3).unwrap(), value_type: ValueType::F16, condition: true };
    let sampled = SampledLogits { draws: 5, power: 1.0, seed: 9 };
    let signals = Signals::new(vec![Arc::new(TopK { k: 3 }), Arc::new(Entropy), Arc::new(sampled)]);
    let stride = logits_stride(VOCAB);
    ExtractRequest { vocab: VOCAB, stride, keys: DrawKey::draws(3, 2), noise: Some(noise), signals }
}

fn logits(device: &Arc<dyn Device>, count: usize) -> Result<Vec<Buffer>> {
    (0..count).map(|_| Buffer::new(device, ROWS * logits_stride(VOCAB) * 4)).collect()
}

/// Extracts each slice while the next one is computed, with `buffers` buffers in rotation. Two are enough.
fn extracted(device: &Arc<dyn Device>, buffers: usize) -> Result<Vec<Extracted>> {
    let mut net = load(device)?;
    let logits = logits(device, buffers)?;
    // Dropped before the logits, which slices in flight still read.
    let mut extractor = Extractor::new(device, request(), ROWS)?;
    let (mut found, mut ahead) = (Vec::new(), None);
    for slice in 0..8u32 {
        if slice % 2 == 0 {
            net.hidden(&random_below(u64::from(slice), TOKENS, VOCAB as u32), &[0, 10, TOKENS as u32])?;
        }
        // Contiguous rows, and rows that must be gathered.
        let rows: Vec<u32> = (0..ROWS as u32).map(|row| if slice % 2 == 0 { row } else { 2 * row + 1 }).collect();
        let to = logits[slice as usize % buffers].pointer();
        // SAFETY: the buffer holds these rows
        unsafe { net.logits_into(&rows, to, logits_stride(VOCAB))? };
        let ready = device.record(Stream::Pass)?;
        let (tokens, ids) = (random_below(99, ROWS, VOCAB as u32), [u64::from(slice); ROWS]);
        let observed = Positions { tokens: &tokens, positions: &rows, sequence_ids: &ids };
        // SAFETY: with two or more buffers, this slice is collected before its buffer is rewritten
        let begun = extractor.begin_slice(unsafe { DeviceSlice::new(to, ready) }, &observed)?;
        if let Some(before) = ahead.replace(begun) {
            found.push(extractor.collect(before)?);
        }
    }
    found.push(extractor.collect(ahead.unwrap())?);
    Ok(found)
}

/// Logits of passes without a wait in between: more of them than uploads may be in flight.
fn passes(device: &Arc<dyn Device>, net: &mut Net) -> Result<Vec<Vec<u8>>> {
    let logits = logits(device, 7)?;
    for (pass, logits) in logits.iter().enumerate() {
        net.hidden(&random_below(pass as u64, TOKENS, VOCAB as u32), &[0, TOKENS as u32])?;
        // SAFETY: the buffer holds these rows
        unsafe { net.logits_into(&[1, 3, 8 + pass as u32], logits.pointer(), logits_stride(VOCAB))? };
    }
    let used = 3 * logits_stride(VOCAB) * 4;
    logits.iter().map(|logits| Ok(logits.to_host(Stream::Pass)?[..used].to_vec())).collect()
}

/// Returns the result on a device that drops these waits, and the faults that the host found.
fn with_dropped_waits<T>(
    seed: u64,
    dropped: DroppedWait,
    run: impl FnOnce(&Arc<dyn Device>, &DropsWaits) -> Result<T>,
) -> (Result<T>, Vec<String>) {
    let drops_waits = Arc::new(DropsWaits::new(seed, dropped));
    let device: Arc<dyn Device> = drops_waits.clone();
    let result = run(&device, &drops_waits);
    (result, drops_waits.host.faults())
}

/// The seeds with an error, a fault or wrong values.
fn failing_seeds<T: PartialEq>(expected: &T, run: impl Fn(u64) -> (Result<T>, Vec<String>)) -> Vec<u64> {
    let wrong = |seed: &u64| {
        let (result, faults) = run(*seed);
        let same = result.as_ref().is_ok_and(|result| result == expected);
        let error = result.err().map(|e: GpuError| e.to_string());
        println!("seed {seed}: same {same}, {error:?}, {faults:?}");
        !same || !faults.is_empty()
    };
    (0..SEEDS).filter(wrong).collect()
}

#[test]
fn columns_are_the_same_however_early_or_late_streams_are() {
    let (expected, _) = with_dropped_waits(0, DroppedWait::Nothing, |device, _| extracted(device, 2));
    let expected = expected.unwrap();
    assert!(expected.iter().all(|columns| columns.fallbacks == 0));
    assert!(expected.windows(2).all(|pair| pair[0] != pair[1]), "slices that are alike would hide what is overwritten");
    for buffers in [2, 3] {
        let wrong = failing_seeds(&expected, |seed| {
            with_dropped_waits(seed, DroppedWait::Nothing, |device, _| extracted(device, buffers))
        });
        assert!(wrong.is_empty(), "{buffers} buffers: {wrong:?}");
    }
}

#[test]
fn an_extraction_that_does_not_wait_for_the_pass_is_seen() {
    let (expected, _) = with_dropped_waits(0, DroppedWait::Nothing, |device, _| extracted(device, 2));
    let wrong = failing_seeds(&expected.unwrap(), |seed| {
        with_dropped_waits(seed, DroppedWait::WaitIn, |device, _| extracted(device, 2))
    });
    assert!(wrong.contains(&0) && wrong.contains(&2), "{wrong:?}");
}

#[test]
fn a_slice_that_is_overwritten_before_it_was_read_is_seen() {
    let (expected, _) = with_dropped_waits(0, DroppedWait::Nothing, |device, _| extracted(device, 2));
    let wrong = failing_seeds(&expected.unwrap(), |seed| {
        with_dropped_waits(seed, DroppedWait::Nothing, |device, _| extracted(device, 1))
    });
    assert!(wrong.contains(&1), "{wrong:?}");
}

#[test]
fn columns_that_are_read_before_they_came_are_seen() {
    let (expected, _) = with_dropped_waits(0, DroppedWait::Nothing, |device, _| extracted(device, 2));
    let wrong = failing_seeds(&expected.unwrap(), |seed| {
        with_dropped_waits(seed, DroppedWait::Nothing, |device, drops_waits| {
            // Waits during loading still work.
            drops_waits.set_dropped(DroppedWait::WaitFor(Stream::Extract));
            extracted(device, 2)
        })
    });
    assert!(wrong.contains(&0) && wrong.contains(&1), "{wrong:?}");
}

#[test]
fn uploads_are_the_same_however_late_the_pass_is() {
    let run = |seed| with_dropped_waits(seed, DroppedWait::Nothing, |device, _| passes(device, &mut load(device)?));
    let expected = run(0).0.unwrap();
    let wrong = failing_seeds(&expected, run);
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn pinned_memory_that_is_written_again_too_early_is_seen() {
    let run = |seed, dropped| {
        with_dropped_waits(seed, DroppedWait::Nothing, |device, drops_waits| {
            let mut net = load(device)?;
            drops_waits.set_dropped(dropped);
            let logits = passes(device, &mut net);
            drops_waits.set_dropped(DroppedWait::Nothing);
            logits
        })
    };
    let expected = run(0, DroppedWait::Nothing).0.unwrap();
    let (_, faults) = run(0, DroppedWait::WaitFor(Stream::Pass));
    assert!(faults.iter().any(|fault| fault.contains("changed before its copy was done")), "{faults:?}");
    let wrong = failing_seeds(&expected, |seed| run(seed, DroppedWait::WaitFor(Stream::Pass)));
    assert!(wrong.contains(&0) && wrong.contains(&2), "{wrong:?}");
}

#[test]
fn pinned_memory_that_is_given_back_too_early_is_seen() {
    // Weights pass through pinned memory on one stream, and the other stream waits for it.
    let (_, faults) = with_dropped_waits(0, DroppedWait::AnyWait, |device, _| load(device).map(drop));
    assert!(faults.iter().any(|fault| fault.contains("given back with a copy on its way")), "{faults:?}");
}

/// Dropping an extractor waits for slices that nothing collected.
#[test]
fn what_nobody_collects_does_no_harm() {
    for seed in 0..SEEDS {
        let (result, faults) = with_dropped_waits(seed, DroppedWait::Nothing, |device, _| {
            let logits = Buffer::from_bytes(device, &[0; 256])?;
            let mut extractor = Extractor::new(device, request(), 1)?;
            let observed = Positions { tokens: &[1], positions: &[0], sequence_ids: &[5] };
            // SAFETY: the row outlives the extractor
            unsafe { extractor.begin(logits.pointer(), &observed) }.map(drop)
        });
        result.unwrap();
        assert_eq!(faults, [""; 0], "seed {seed}");
    }
}
