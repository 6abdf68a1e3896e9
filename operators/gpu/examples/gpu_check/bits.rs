//! Bit-exactness: the random words are the CPU's, and columns are the same in every run, whatever the order of the
//! streams.

use stillhouse_gpu::extract::Extracted;
use stillhouse_gpu::net::{Architecture, Shape};
use stillhouse_gpu::{Arg, Buffer, Element, Launch, Stream};
use stillhouse_noise::{DrawKey, NoiseStream, exponentials};

use crate::job::{Job, Schedule};
use crate::nets::{GPT2, TINY_SHAPES, shape};
use crate::{Check, Outcome};

/// Maximum difference between exponentials of the device and the CPU, in units in the last place of f32.
const MAX_ULPS: u32 = 4;

/// Checks words, exponentials and repeated batches.
pub fn run(check: &mut Check) -> Outcome<()> {
    let vocab = if check.host { 1031 } else { 128_257 };
    for (seed, draw, sequence, position) in [(0, 0, 0, 0), (u64::MAX, 3, u64::MAX, u32::MAX), (42, 1, 7 << 40, 1023)] {
        let what = format!("words, seed {seed}, sequence {sequence}, V = {vocab}");
        let stream = NoiseStream::new(DrawKey::new(seed, draw), sequence, position);
        match check_words(check, &stream, vocab) {
            Ok(note) => check.report.verdict(what, true, &note),
            Err(error) => check.report.verdict(what, false, &error.to_string()),
        }
    }
    check_repeatability(check)
}

/// Checks the words of a stream bit for bit, and its exponentials within [`MAX_ULPS`].
fn check_words(check: &Check, stream: &NoiseStream, vocab: usize) -> Outcome<String> {
    let (e, words) = (Buffer::new(&check.device, vocab * 4 + 4)?, Buffer::new(&check.device, vocab * 4)?);
    let [key0, key1] = stream.key.words();
    let args = [
        Arg::U32(key0),
        Arg::U32(key1),
        Arg::U32(stream.position),
        Arg::U64(stream.sequence_id),
        Arg::U32(vocab as u32),
        Arg::Pointer(e.pointer()),
        Arg::Pointer(words.pointer()),
    ];
    let launch = Launch { kernel: "noise_exponentials", grid: [64, 1, 1], block: [256, 1, 1], shared_bytes: 0 };
    // SAFETY: the arguments are the kernel's; the buffers hold this many values
    unsafe { check.device.launch(Stream::Extract, &launch, &args)? };
    let read = |buffer: &Buffer| -> Outcome<Vec<u32>> {
        Ok(buffer.to_host(Stream::Extract)?.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect())
    };
    let (e, words) = (read(&e)?, read(&words)?);
    if let Some(at) = (0..vocab).find(|at| words[*at] != stream.word(*at as u32)) {
        return Err(format!("word {at} is {:#x}, on the CPU {:#x}", words[at], stream.word(at as u32)).into());
    }
    let mut expected = vec![0f32; vocab];
    let e0 = exponentials(stream, &mut expected);
    expected.push(e0);
    // Both are positive, so their bits are ordered like their values.
    let ulps = |at: usize| e[at].abs_diff(expected[at].to_bits());
    let worst = (0..=vocab).max_by_key(|at| ulps(*at)).unwrap_or_default();
    if ulps(worst) > MAX_ULPS {
        return Err(format!("e {worst} is {:e}, on the CPU {:e}", f32::from_bits(e[worst]), expected[worst]).into());
    }
    let other = (0..=vocab).filter(|at| ulps(*at) > 0).count();
    Ok(format!("e: {other} of {} differ, by {} steps at most", vocab + 1, ulps(worst)))
}

/// Runs a job's batch repeatedly: twice as a job does, with two slices in flight, and with a wait after every call.
fn check_repeatability(check: &mut Check) -> Outcome<()> {
    let wide = Shape { tied: false, ..shape(Architecture::Llama, 128_256, 1024, 4, [16, 8, 64], 2816) };
    let shapes = if check.host {
        [(TINY_SHAPES[0].0, TINY_SHAPES[0].1, 16, 48), (TINY_SHAPES[1].0, TINY_SHAPES[1].1, 24, 48)]
    } else {
        [("GPT-2 124M", GPT2, 1024, 4096), ("Llama of 4 layers", wide, 1024, 4096)]
    };
    for (name, shape, length, batch) in shapes {
        for element in [Element::Bf16, Element::F32] {
            let what = format!("the same bytes again, {name}, {}", element.name());
            if !check.has_time(8.0) {
                check.report.unchecked(what);
                continue;
            }
            let mut job = Job::load(&check.device, &check.counting, &shape, element, batch)?;
            job.prepare(length)?;
            let first = job.columns(Schedule::HelperThread)?;
            let mut others = vec![
                ("again", job.columns(Schedule::HelperThread)?),
                ("two slices in flight", job.columns(Schedule::TwoInFlight)?),
            ];
            check.counting.reset(true);
            others.push(("a wait after everything", job.columns(Schedule::TwoInFlight)?));
            check.counting.reset(false);
            let different: Vec<&str> =
                others.iter().filter(|(_, other)| !same(&first, other)).map(|(schedule, _)| *schedule).collect();
            let note = match different.is_empty() {
                true => format!(
                    "{} slices, also {}",
                    first.len(),
                    others.iter().map(|(schedule, _)| *schedule).collect::<Vec<_>>().join(", ")
                ),
                false => format!("not the same: {}", different.join(", ")),
            };
            check.report.verdict(what, different.is_empty(), &note);
        }
    }
    Ok(())
}

/// Whether columns are equal bit for bit.
fn same(one: &[Extracted], other: &[Extracted]) -> bool {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let all = one.iter().zip(other).all(|(one, other)| one == other && bits(&one.logprob) == bits(&other.logprob));
    one.len() == other.len() && all
}
