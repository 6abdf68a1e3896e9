//! Checks of the columns of `extract`.

use arrow::array::{Float32Array, Int32Array, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_schemas::columns;

use super::{ExtractConfig, hidden, signals};
use crate::invariants::{Violation, float_column, unsigned_column};
use crate::rows::ListRows;

pub(super) fn check(
    config: &ExtractConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    check_logprobs(batch, violations)?;
    check_noise(config, batch, violations)?;
    signals::check(config, batch, violations)?;
    hidden::check(config, batch, violations)
}

fn check_logprobs(batch: &RecordBatch, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
    let Some(column) = batch.column_by_name(columns::LOGPROB) else { return Ok(()) };
    let rows = ListRows::new(columns::LOGPROB, column)?;
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let values = rows.values::<Float32Array>(columns::LOGPROB)?.values();
    for row in 0..rows.len() {
        if rows.range(row).len() != tokens.range(row).len() {
            violations.push(Violation::new(
                row,
                format!("{} log-probabilities for {} tokens", rows.range(row).len(), tokens.range(row).len()),
            ));
        }
        if let Some(bad) = values[rows.range(row)].iter().find(|v| !v.is_finite() || **v > 0.0) {
            violations.push(Violation::new(row, format!("logprob {bad}, valid: finite, at most 0")));
        }
    }
    Ok(())
}

fn check_noise(config: &ExtractConfig, batch: &RecordBatch, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
    let draws = config.noise.as_ref().map_or(1, |noise| noise.draws as usize);
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    if batch.column_by_name(columns::NOISE).is_some() {
        let noise = float_column(batch, columns::NOISE)?;
        for row in 0..batch.num_rows() {
            let expected = draws * tokens.range(row).len() * config.vocab_size;
            if noise.row(row).len() != expected || noise.row(row).iter().any(|v| v.is_nan()) {
                violations.push(Violation::new(
                    row,
                    format!("noise has {} values, valid: {expected}, none NaN", noise.row(row).len()),
                ));
            }
        }
    }
    if batch.column_by_name(columns::NOISE_COUNT).is_none() {
        return Ok(());
    }
    let counts = unsigned_column(batch, columns::NOISE_COUNT)?;
    let indices = unsigned_column(batch, columns::NOISE_INDEX)?;
    let logprobs = float_column(batch, columns::NOISE_LOGPROB)?;
    for row in 0..batch.num_rows() {
        let (counts, indices, logprobs) = (counts.row(row), indices.row(row), logprobs.row(row));
        let row_ids = &ids[tokens.range(row)];
        let sum: usize = counts.iter().map(|&c| c as usize).sum();
        if counts.len() != draws * row_ids.len() || sum != indices.len() || sum != logprobs.len() {
            let (of, values) = (counts.len(), logprobs.len());
            let what = format!(
                "{of} counts that add up to {sum}, {} indices, {values} values, for {draws} draws of {} tokens",
                indices.len(),
                row_ids.len()
            );
            violations.push(Violation::new(row, what));
            continue;
        }
        let corrections = check_corrections(counts, indices, row_ids, config.vocab_size);
        violations.extend(corrections.into_iter().map(|what| Violation::new(row, what)));
        if let Some(bad) = logprobs.iter().find(|v| !v.is_finite() || **v > 0.0) {
            violations.push(Violation::new(row, format!("noise_logprob {bad}, valid: finite, at most 0")));
        }
    }
    Ok(())
}

/// Checks the correction lists of a row and returns what is wrong. `counts` holds the length of each list; they add up
/// to `indices.len()`.
fn check_corrections(counts: &[u32], indices: &[u32], ids: &[i32], vocab_size: usize) -> Vec<String> {
    let mut rest = indices;
    let mut wrong = Vec::new();
    for (i, &count) in counts.iter().enumerate() {
        let (list, after) = rest.split_at(count as usize);
        rest = after;
        let position = i % ids.len();
        let token = ids[position] as u32;
        // an entry may occur more than once; its values add up
        let is_sorted = list.is_sorted_by(|a, b| a <= b);
        if !is_sorted || list.iter().any(|&k| k as usize >= vocab_size || k == token) {
            wrong.push(format!(
                "corrections {list:?} of position {position} are not in ascending order below {vocab_size} without {token}"
            ));
        }
    }
    wrong
}
