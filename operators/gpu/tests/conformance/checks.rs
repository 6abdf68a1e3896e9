//! Properties of the columns of a slice, for every way of extraction.

use stillhouse_gpu::extract::{Dense, ExtractRequest, Extracted, Noise};
use stillhouse_noise::{Correction, NoiseStream, StoredToken, ValueType, measure_accuracy, measure_dense_accuracy};

use crate::extraction::{ExtractFn, Slice, on_cpu};
use crate::signals::{check_signals, same_logprob, ulp_distance};

macro_rules! holds {
    ($condition:expr, $($message:tt)*) => {
        let holds: bool = $condition;
        if !holds {
            return Err(format!($($message)*));
        }
    };
}

/// Extracts the columns of a slice, checks them against the specification, and returns them.
pub fn check(extract: ExtractFn<'_>, slice: &Slice, request: &ExtractRequest) -> Result<Extracted, String> {
    let expected = on_cpu(slice, request);
    let got = match (extract(slice, request), expected.as_ref()) {
        (Ok(got), Ok(_)) => got,
        (Err(got), Err(expected)) if got == *expected => return Err(got),
        (got, expected) => return Err(format!("got {:?}, the CPU {:?}", got.err(), expected.err())),
    };
    let expected = expected?;
    for (row, (a, b)) in got.logprob.iter().zip(&expected.logprob).enumerate() {
        holds!(same_logprob(*a, *b), "row {row}: ln p_x {a:e}, the CPU has {b:e}");
    }
    holds!(got.logprob.len() == slice.rows(), "{} rows", got.logprob.len());
    holds!(got.signals.len() == expected.signals.len(), "{} rows of signals", got.signals.len());
    for (row, (a, b)) in got.signals.iter().zip(&expected.signals).enumerate() {
        check_signals(&request.signals, a, b).map_err(|e| format!("row {row}: {e}"))?;
    }
    match request.noise {
        Some(Noise::Replay { .. }) => check_replay(slice, request, &got)?,
        Some(Noise::Dense { .. }) => check_dense(slice, request, &got, &expected)?,
        None => {}
    }
    Ok(got)
}

fn check_replay(slice: &Slice, request: &ExtractRequest, got: &Extracted) -> Result<(), String> {
    let Some(Noise::Replay { tolerance, value_type, condition }) = request.noise else { return Ok(()) };
    let replay = got.replay.as_ref().ok_or("no corrections")?;
    holds!(replay.logprob == got.logprob && replay.draws == request.keys.len(), "columns do not belong together");
    let (mut sum, mut largest) = (0.0, 0f64);
    for row in 0..slice.rows() {
        for (draw, &key) in request.keys.iter().enumerate() {
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
            let accuracy =
                measure_accuracy(slice.row(row), &StoredToken { token, logprob, corrections: &corrections }, &stream)
                    .map_err(|e| e.to_string())?;
            holds!(accuracy.total_variation <= tolerance.get(), "{at}: {accuracy:?}");
            // The encoder's exponentials are f32, the judge's are not.
            holds!(!condition || accuracy.lead >= 0.9 * tolerance.lead(), "{at}: {accuracy:?}");
            sum += accuracy.total_variation;
            largest = largest.max(accuracy.total_variation);
        }
    }
    let lists = (slice.rows() * request.keys.len()).max(1) as f64;
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

fn check_dense(slice: &Slice, request: &ExtractRequest, got: &Extracted, expected: &Extracted) -> Result<(), String> {
    let Some(Noise::Dense { value_type, condition }) = request.noise else { return Ok(()) };
    let (got, expected) = (got.dense.as_ref().ok_or("no noise")?, expected.dense.as_ref().ok_or("no noise")?);
    let (got, expected) = (widened(got), widened(expected));
    holds!(got.len() == expected.len(), "{} values", got.len());
    // In half precision, a difference in the last bit of f32 may round to the neighbouring value.
    let near = |a: f32, b: f32| match value_type {
        ValueType::F16 => (a - b).abs() <= 2e-3 * b.abs().max(1e-3),
        ValueType::F32 => ulp_distance(a, b) <= 4 || (a - b).abs() < 1e-6,
    };
    let first_difference = got.iter().zip(&expected).position(|(a, b)| !near(*a, *b));
    holds!(
        first_difference.is_none(),
        "ξ differs at {first_difference:?}: {:?} and {:?}",
        first_difference.map(|i| got[i]),
        first_difference.map(|i| expected[i])
    );
    let other = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    let few = value_type == ValueType::F32 || other <= 2 + got.len() / 500;
    holds!(few, "{other} of {} values differ", got.len());
    for (list, xi) in got.chunks(slice.vocab).enumerate() {
        let (row, key) = (list / request.keys.len(), request.keys[list % request.keys.len()]);
        let stream = NoiseStream::new(key, slice.sequence_ids[row], slice.positions[row]);
        let accuracy =
            measure_dense_accuracy(slice.row(row), slice.tokens[row], xi, &stream).map_err(|e| e.to_string())?;
        holds!(!condition || accuracy.lead > 0.0, "list {list}: {accuracy:?}");
    }
    Ok(())
}
