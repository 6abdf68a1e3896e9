//! Tests the walk-through of CONTRIBUTING.md that adds an export format: compiles its file and writes lines with it.

mod jsonl;

use std::sync::Arc;

use serde_json::{Value, json};

use self::jsonl::{Jsonl, JsonlWriter};
use crate::card::tests::manifest;
use crate::export::formats::ExportFormat;
use crate::export::sparse::{Entries, Signal, ValueType, tests as sparse_tests};

const PAGE: &str = include_str!("../../../../../../CONTRIBUTING.md");
const FILE: &str = include_str!("jsonl.rs");

#[test]
fn the_page_quotes_the_file() {
    let file = "pipeline/datasets/src/export/formats/tests/jsonl.rs";
    assert!(PAGE.contains(FILE), "CONTRIBUTING.md does not quote {file} as it is");
}

#[test]
fn a_line_has_the_prediction_of_the_next_token_at_each_token() {
    // two rows of 3 tokens with 2 entries each
    let ids = [7, 0, 5, 6, 8, 9].repeat(2);
    let batch = sparse_tests::topk(3, ids, [0.0, -9.0, -0.25, -2.0, -0.5, -1.0].repeat(2));
    let sparse = Arc::new(sparse_tests::sparse(Signal::TopK, 2, 10));
    let read = sparse.batch(&batch).unwrap();
    let writer = JsonlWriter { sparse: Arc::clone(&sparse) };
    let (lines, short) = writer.lines(&read, &mut Entries::new(&sparse)).unwrap();
    assert_eq!((lines.lines().count(), short), (2, 0));
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["ids"], json!([[5, 6], [8, 9]]));
        assert_eq!(line["logprobs"], json!([[-0.25, -2.0], [-0.5, -1.0]]));
        assert_eq!(line["input_ids"].as_array().unwrap().len(), 2);
    }
}

/// A row of one token has no next token to predict.
#[test]
fn a_row_of_one_token_is_counted_and_left_out() {
    let sparse = Arc::new(sparse_tests::sparse(Signal::TopK, 1, 10));
    let batch = sparse_tests::topk(1, vec![3, 4], vec![0.0, 0.0]);
    let writer = JsonlWriter { sparse: Arc::clone(&sparse) };
    let made = writer.lines(&sparse.batch(&batch).unwrap(), &mut Entries::new(&sparse));
    assert_eq!(made.unwrap(), (String::new(), 2));
}

#[test]
fn another_type_of_values_is_refused() {
    let sparse = Arc::new(sparse_tests::sparse(Signal::TopK, 1, 10));
    let manifest = manifest(&json!({"teacher": {"path": "t"}, "topk": 1}), &json!({}));
    let message = Jsonl.writer(&manifest, &sparse, ValueType::Float16).err().unwrap();
    assert_eq!(message, "--dtype: got float16, valid with --format jsonl: float32");
}
