//! Tests that rows of images pass unchanged and that invalid rows are refused.

use std::sync::Arc;

use arrow::array::{AsArray, Int32Array, ListArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Int32Type, UInt64Type};

use super::*;
use crate::config::SpecialIds;
use crate::operator_spec::OperatorSpec;
use crate::registry;
use crate::testing::{context, drive, gpt2, statistics};

fn numbers(rows: &[&[u32]], labels: &[Option<i32>]) -> RecordBatch {
    let item = Arc::new(Field::new_list_field(DataType::UInt32, false));
    let offsets = OffsetBuffer::from_lengths(rows.iter().map(|row| row.len()));
    let values = Arc::new(UInt32Array::from(rows.concat()));
    let ids = UInt64Array::from_iter_values((0..rows.len() as u64).map(|i| (3 << 32) + 2 * i));
    let tokens = ListArray::new(item, offsets, values, None);
    let labels = Int32Array::from(labels.to_vec());
    RecordBatch::try_new(numbers_schema(), vec![Arc::new(ids), Arc::new(tokens), Arc::new(labels)]).unwrap()
}

fn job(labels: &str) -> OperatorSpec {
    let job = format!(
        r#"{{"version": 1, "name": "x", "input": {{"format": "images", "paths": ["x"], "images": {{"size": 2{labels}}}}},
            "pack": {{"length": 12, "separator": "none", "boundary": "none"}}, "output": {{"path": "o"}}}}"#
    );
    let spec = serde_json::from_str(&job).unwrap();
    let context = JobContext { spec: &spec, vocab_size: 256, special_ids: SpecialIds::default() };
    let mut specs = registry::operators_for_job(&context).unwrap();
    assert_eq!(specs.len(), 1);
    specs.remove(0)
}

/// Builds two labelled images and the operator of a job with two classes.
pub(crate) fn images() -> (OperatorSpec, RecordBatch) {
    let spec = job(r#", "classes": ["cat", "dog"]"#);
    let batch = numbers(&[&[255; 12], &[7; 12]], &[Some(1), Some(0)]);
    let rows = drive(spec.build(&context(&gpt2())).unwrap().as_mut(), &[batch]).unwrap().remove(0);
    (spec, rows)
}

#[test]
fn a_row_is_an_image() {
    let (spec, rows) = images();
    assert_eq!(rows.schema(), spec.output_schema(&numbers_schema()));
    let values = |name: &str| rows.column_by_name(name).unwrap().clone();
    assert_eq!(values("sequence_id").as_primitive::<UInt64Type>().values(), &[3 << 32, (3 << 32) + 1]);
    let ids = values("input_ids");
    assert_eq!(ids.as_fixed_size_list().value(0).as_primitive::<Int32Type>().values(), &[255; 12]);
    assert_eq!(values("label").as_primitive::<Int32Type>().values(), &[1, 0]);
    let documents = values("document_ids");
    assert_eq!(documents.as_list::<i32>().value(1).as_primitive::<UInt64Type>().values(), &[(3 << 32) + 2]);
    let shown = spec.view(&rows.slice(0, 1)).unwrap().unwrap();
    assert_eq!(shown.facts, [("label".to_owned(), "1 (dog)".to_owned())]);
}

#[test]
fn numbers_go_on_over_batches_and_are_counted() {
    let context = context(&gpt2());
    let spec = job(r#", "labels": "none""#);
    let batch = || numbers(&[&[1; 12], &[2; 12]], &[None, None]);
    let rows = drive(spec.build(&context).unwrap().as_mut(), &[batch(), batch()]).unwrap();
    let ids: Vec<u64> = rows.iter().flat_map(|r| r.column(0).as_primitive::<UInt64Type>().values().to_vec()).collect();
    assert_eq!(ids, [0, 1, 2, 3].map(|row| (3 << 32) + row));
    assert!(rows[0].column_by_name("label").is_none());
    let statistics = statistics(&context);
    assert_eq!((statistics.documents, statistics.text_tokens, statistics.dropped_tokens), (4, 48, 0));
}

#[test]
fn what_is_no_row_of_the_job_is_refused() {
    let fails = |row: &[u32]| {
        let spec = job(r#", "labels": "none""#);
        let batch = numbers(&[row], &[None]);
        drive(spec.build(&context(&gpt2())).unwrap().as_mut(), &[batch]).unwrap_err().to_string()
    };
    assert_eq!(fails(&[1; 11]), "grid: split 3, row 0: got 11 numbers, valid: 12");
    assert_eq!(fails(&[256; 12]), "grid: split 3, row 0: got 256, valid: 0 to 255");
}
