//! Fields of objects and structs as the text column.

use arrow::array::{ArrayRef, LargeStringArray, StructArray};
use arrow::datatypes::{DataType, Field, Fields};

use super::*;

#[test]
fn fields_inside_of_objects_and_structs_are_read_by_their_path() {
    let lines = concat!(
        "{\"meta\": {\"text\": \"a\", \"more\": {\"text\": \"deep a\"}}}\n",
        "{\"meta\": {\"text\": \"not this\"}, \"meta.text\": \"b\"}\n",
        "{\"meta.text\": \"c\", \"meta\": {\"text\": \"not this\"}}\n",
        "{\"meta\": {\"more.text\": \"deep d\", \"more\": {\"text\": \"not this\"}, \"text\": \"d\"}}\n",
        "{\"meta\": {}}\n{\"meta\": 3}\n{\"meta\": null}\n{\"meta\": {\"text\": 1}}\n{\"text\": \"x\"}\n",
    );
    let bench = Bench::with(&[("a.jsonl", lines.as_bytes())]);
    let got = bench.all(&input(json!({"text": "meta.text", "on_error": "skip"})), 40);
    assert_eq!(got.documents, ["a", "b", "c", "d"]);
    let bad = [("missing column", 2), ("not a string", 2), ("null text", 1)];
    assert_eq!(got.summary.skipped, bad.map(|(reason, n)| (reason.to_owned(), n)).into());
    let deep = bench.all(&input(json!({"text": "meta.more.text", "on_error": "skip"})), 40);
    assert_eq!(deep.documents, ["deep a", "deep d"]);
    let error = bench.try_all(&input(json!({"text": "meta.text"})), 40).unwrap_err().to_string();
    assert!(error.starts_with("a.jsonl: line 5: missing column: the object has no key \"meta.text\""), "{error}");

    let texts = || -> ArrayRef { Arc::new(LargeStringArray::from(vec![Some("a"), Some("b"), None, Some("d")])) };
    let inner = Fields::from(vec![Field::new("text", DataType::LargeUtf8, true)]);
    let there = arrow::buffer::NullBuffer::from(vec![true, false, true, true]);
    let meta: ArrayRef = Arc::new(StructArray::new(inner, vec![texts()], Some(there)));
    let literal: ArrayRef = Arc::new(LargeStringArray::from(vec!["w", "x", "y", "z"]));
    for (columns, expected) in [
        (vec![("meta", meta.clone())], vec!["a", "d"]),
        (vec![("meta", meta), ("meta.text", literal)], vec!["w", "x", "y", "z"]),
    ] {
        let batch = RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(n, c)| (n, c, true))).unwrap();
        let mut file = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        file.write(&batch).unwrap();
        let files = [("parquet", parquet_bytes(&batch, 3)), ("arrow", file.into_inner().unwrap())];
        for (format, bytes) in files {
            let bench = Bench::with(&[("x", &bytes)]);
            let fields = json!({"format": format, "text": "meta.text", "on_error": "skip"});
            let problems =
                check_columns(&bench.store, &bench.files(&input(fields.clone())), &input(fields.clone()), &mut |_| {});
            assert_eq!(problems.unwrap(), [], "{format}");
            let got = bench.all(&input(fields), 1 << 20);
            assert_eq!(
                (&got.documents[..], got.documents.len() as u64 + got.summary.skipped.values().sum::<u64>()),
                (&expected.iter().map(|t| t.to_string()).collect::<Vec<_>>()[..], 4),
                "{format}"
            );
        }
    }
}
