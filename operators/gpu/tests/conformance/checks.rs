//! What must hold for the columns of a slice, however they were made.

use stillhouse_gpu::extract::{Asked, Dense, Extracted, Noise};
use stillhouse_noise::{Correction, NoiseStream, StoredToken, ValueType, judge, judge_dense};

use crate::ways::{Slice, Way, on_cpu};

/// Distance in steps of f32.
fn steps(a: f32, b: f32) -> u32 {
    let ordered = |v: f32| {
        let bits = v.to_bits() as i32;
        if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
    };
    ordered(a).abs_diff(ordered(b))
}

macro_rules! holds {
    ($condition:expr, $($message:tt)*) => {
        let holds: bool = $condition;
        if !holds {
            return Err(format!($($message)*));
        }
    };
}

/// Takes a slice to columns and checks them against the specification; gives them.
pub fn check(way: Way<'_>, slice: &Slice, asked: &Asked) -> Result<Extracted, String> {
    let expected = on_cpu(slice, asked);
    let got = match (way(slice, asked), expected.as_ref()) {
        (Ok(got), Ok(_)) => got,
        (Err(got), Err(expected)) if got == *expected => return Err(got),
        (got, expected) => return Err(format!("got {:?}, the CPU {:?}", got.err(), expected.err())),
    };
    let expected = expected?;
    for (row, (a, b)) in got.logprob.iter().zip(&expected.logprob).enumerate() {
        // where p_x is next to 1, ln Z itself has no more digits
        let near = steps(*a, *b) <= 1 || (a - b).abs() < 1e-15;
        holds!(near, "row {row}: ln p_x {a:e}, the CPU has {b:e}");
    }
    holds!(got.logprob.len() == slice.rows(), "{} rows", got.logprob.len());
    check_topk(&got, &expected)?;
    match asked.noise {
        Some(Noise::Replay { .. }) => check_replay(slice, asked, &got)?,
        Some(Noise::Dense { .. }) => check_dense(slice, asked, &got, &expected)?,
        None => {}
    }
    Ok(got)
}

fn check_topk(got: &Extracted, expected: &Extracted) -> Result<(), String> {
    holds!(got.topk.is_some() == expected.topk.is_some(), "top-k is missing, or not asked for");
    let (Some((indices, logprobs)), Some((exact, of_cpu))) = (&got.topk, &expected.topk) else { return Ok(()) };
    holds!(indices == exact, "top-k differs");
    let far = logprobs.iter().zip(of_cpu).position(|(a, b)| steps(*a, *b) > 1);
    holds!(far.is_none() && logprobs.len() == of_cpu.len(), "ln p of the top-k differ at {far:?}");
    Ok(())
}

fn check_replay(slice: &Slice, asked: &Asked, got: &Extracted) -> Result<(), String> {
    let Some(Noise::Replay { tolerance, value_type, condition }) = asked.noise else { return Ok(()) };
    let replay = got.replay.as_ref().ok_or("no corrections")?;
    holds!(replay.logprob == got.logprob && replay.draws == asked.keys.len(), "columns do not belong together");
    let (mut sum, mut largest) = (0.0, 0f64);
    for row in 0..slice.rows() {
        for (draw, &key) in asked.keys.iter().enumerate() {
            let at = format!("row {row}, draw {draw}, {tolerance:?}, {value_type}, x = {}", slice.tokens[row]);
            let (indices, values) = replay.corrections(row, draw);
            let corrections: Vec<Correction> =
                indices.iter().zip(values).map(|(&index, &logprob)| Correction { index, logprob }).collect();
            let in_order =
                corrections.is_sorted_by(|a, b| a.index < b.index || (a.index == b.index && a.logprob >= b.logprob));
            let stored = |c: &Correction| c.logprob == value_type.round(f64::from(c.logprob)) && c.logprob <= 0.0;
            holds!(in_order, "{at}: {corrections:?}");
            holds!(corrections.iter().all(stored), "{at}: {corrections:?}");
            holds!(corrections.iter().all(|c| c.index != slice.tokens[row]), "{at}: x is corrected");
            let stream = NoiseStream::new(key, slice.sequence_ids[row], slice.positions[row]);
            let (token, logprob) = (slice.tokens[row], got.logprob[row]);
            let judged = judge(slice.row(row), &StoredToken { token, logprob, corrections: &corrections }, &stream)
                .map_err(|e| e.to_string())?;
            holds!(judged.total_variation <= tolerance.get(), "{at}: {judged:?}");
            // the encoder's e is of f32, the judge's is not
            holds!(!condition || judged.lead >= 0.9 * tolerance.lead(), "{at}: {judged:?}");
            sum += judged.total_variation;
            largest = largest.max(judged.total_variation);
        }
    }
    let lists = (slice.rows() * asked.keys.len()).max(1) as f64;
    let (mean, max) = (replay.mean_total_variation, replay.max_total_variation);
    holds!(max >= largest - 2e-6 && max <= tolerance.get(), "says {max:e} at most, judged {largest:e}");
    holds!(mean >= sum / lists - 2e-6, "says {mean:e} on average, judged {:e}", sum / lists);
    Ok(())
}

fn widened(dense: &Dense) -> Vec<f32> {
    match dense {
        Dense::F16(values) => values.iter().map(|v| v.to_f32()).collect(),
        Dense::F32(values) => values.clone(),
    }
}

fn check_dense(slice: &Slice, asked: &Asked, got: &Extracted, expected: &Extracted) -> Result<(), String> {
    let Some(Noise::Dense { value_type, condition }) = asked.noise else { return Ok(()) };
    let (got, expected) = (got.dense.as_ref().ok_or("no noise")?, expected.dense.as_ref().ok_or("no noise")?);
    let (got, expected) = (widened(got), widened(expected));
    holds!(got.len() == expected.len(), "{} values", got.len());
    // in half precision a last bit of f32 may turn a value to its neighbour
    let near = |a: f32, b: f32| match value_type {
        ValueType::F16 => (a - b).abs() <= 2e-3 * b.abs().max(1e-3),
        ValueType::F32 => steps(a, b) <= 4 || (a - b).abs() < 1e-6,
    };
    let far = got.iter().zip(&expected).position(|(a, b)| !near(*a, *b));
    holds!(far.is_none(), "ξ differs at {far:?}: {:?} and {:?}", far.map(|i| got[i]), far.map(|i| expected[i]));
    let other = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    let few = value_type == ValueType::F32 || other <= 2 + got.len() / 500;
    holds!(few, "{other} of {} values differ", got.len());
    for (list, xi) in got.chunks(slice.vocab).enumerate() {
        let (row, key) = (list / asked.keys.len(), asked.keys[list % asked.keys.len()]);
        let stream = NoiseStream::new(key, slice.sequence_ids[row], slice.positions[row]);
        let judged = judge_dense(slice.row(row), slice.tokens[row], xi, &stream).map_err(|e| e.to_string())?;
        holds!(!condition || judged.lead > 0.0, "list {list}: {judged:?}");
    }
    Ok(())
}
