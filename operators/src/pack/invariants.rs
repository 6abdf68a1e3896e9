//! Checks of the columns of `pack`.

use arrow::array::{Array, BooleanArray, Int32Array, RecordBatch, UInt64Array};
use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use stillhouse_schemas::columns;

use super::PackConfig;
use crate::invariants::{CheckContext, Violation};
use crate::rows::{ListRows, sequence_ids};

pub(super) fn check(
    config: &PackConfig,
    batch: &RecordBatch,
    context: &CheckContext,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    check_ids(batch, context, violations)?;
    check_tokens(batch, context, violations)?;
    if config.has_loss_mask {
        check_loss_mask(batch, violations)?;
    }
    check_documents(config, batch, violations)
}

pub(crate) fn check_ids(
    batch: &RecordBatch,
    context: &CheckContext,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    let ids = sequence_ids(batch)?;
    for row in 0..ids.len() {
        let id = ids.value(row);
        if id >> 32 != u64::from(context.split.0) {
            violations.push(Violation::new(row, format!("sequence_id {id} is not of split {}", context.split.0)));
        }
        if row > 0 && id != ids.value(row - 1) + 1 {
            violations.push(Violation::new(row, format!("sequence_id {id} does not follow {}", ids.value(row - 1))));
        }
    }
    Ok(())
}

pub(crate) fn check_tokens(
    batch: &RecordBatch,
    context: &CheckContext,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    let rows = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let values = rows.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let has_short_rows =
        matches!(batch.column_by_name(columns::INPUT_IDS).map(|c| c.data_type()), Some(DataType::List(_)));
    for row in 0..rows.len() {
        let tokens = &values[rows.range(row)];
        if tokens.len() > context.length || (tokens.len() < context.length && !has_short_rows) || tokens.is_empty() {
            violations.push(Violation::new(
                row,
                format!(
                    "{} tokens, valid: {}{}",
                    tokens.len(),
                    context.length,
                    if has_short_rows { " or fewer" } else { "" }
                ),
            ));
        }
        if let Some(id) = tokens.iter().find(|&&id| id < 0 || id as usize >= context.vocab_size) {
            violations.push(Violation::new(row, format!("token {id}, valid: 0 to {}", context.vocab_size - 1)));
        }
    }
    if let Some(mask) = batch.column_by_name(columns::ATTENTION_MASK) {
        let mask = ListRows::new(columns::ATTENTION_MASK, mask)?;
        let values = mask.values::<BooleanArray>(columns::ATTENTION_MASK)?;
        for row in 0..mask.len() {
            let range = mask.range(row);
            let valid = range.clone().take_while(|&i| values.value(i)).count();
            if range.clone().skip(valid).any(|i| values.value(i)) {
                violations.push(Violation::new(
                    row,
                    "attention_mask is true after padding; valid: true for the tokens, then false",
                ));
            }
            if range.len() != rows.range(row).len() {
                violations.push(Violation::new(
                    row,
                    format!("attention_mask has {} values for {} tokens", range.len(), rows.range(row).len()),
                ));
            }
        }
    }
    Ok(())
}

/// Checks that the model is trained on tokens alone, not on padding.
fn check_loss_mask(batch: &RecordBatch, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
    let trained = ListRows::from_batch(batch, columns::LOSS_MASK)?;
    let values = trained.values::<BooleanArray>(columns::LOSS_MASK)?;
    let Some(mask) = batch.column_by_name(columns::ATTENTION_MASK) else { return Ok(()) };
    let mask = ListRows::new(columns::ATTENTION_MASK, mask)?;
    let is_token = mask.values::<BooleanArray>(columns::ATTENTION_MASK)?;
    for row in 0..trained.len() {
        let pairs = trained.range(row).zip(mask.range(row));
        if let Some(at) = pairs.map(|(a, b)| values.value(a) && !is_token.value(b)).position(|wrong| wrong) {
            violations.push(Violation::new(row, format!("loss_mask is true at position {at}, which is padding")));
        }
    }
    Ok(())
}

fn check_documents(
    config: &PackConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let token_values = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let offsets = ListRows::from_batch(batch, columns::DOCUMENT_OFFSETS)?;
    let values = offsets.values::<Int32Array>(columns::DOCUMENT_OFFSETS)?.values();
    let ids = ListRows::from_batch(batch, columns::DOCUMENT_IDS)?;
    let id_values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?.values();
    for row in 0..offsets.len() {
        let row_offsets = &values[offsets.range(row)];
        let row_ids = &id_values[ids.range(row)];
        if row_offsets.len() != row_ids.len() {
            violations.push(Violation::new(
                row,
                format!("{} document offsets, {} document ids", row_offsets.len(), row_ids.len()),
            ));
        }
        let inside = row_offsets.last().is_some_and(|&last| (last as usize) < tokens.range(row).len());
        if row_offsets.first() != Some(&0) || !row_offsets.is_sorted_by(|a, b| a < b) || !inside {
            violations.push(Violation::new(
                row,
                format!("document_offsets {row_offsets:?} do not ascend from 0 within the row"),
            ));
        }
        if !row_ids.is_sorted() {
            violations.push(Violation::new(row, "document_ids do not ascend"));
        }
        let ids = &token_values[tokens.range(row)];
        let starts = row_offsets.iter().skip(1).filter_map(|&start| usize::try_from(start).ok());
        let same = row_ids.windows(2).map(|pair| pair[0] == pair[1]);
        if let Some((start, _)) =
            starts.zip(same).find(|(start, same)| *same && !config.segment_breaks.is_at(ids, *start))
        {
            violations.push(Violation::new(
                row,
                format!("a document is cut at position {start}, where its text has no special token"),
            ));
        }
    }
    Ok(())
}
