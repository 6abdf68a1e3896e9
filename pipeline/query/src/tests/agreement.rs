//! Random good and bad records through every format, with and without a query: the results equal those of a reference.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, Int32Array};
use arrow::datatypes::DataType;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Record {
    Good(String),
    /// A bad record: its bytes, and the reason.
    Bad(Vec<u8>, &'static str),
    /// A null text.
    Null,
    NotUtf8,
}

fn cases() -> u32 {
    if std::env::var("STILLHOUSE_SOAK").is_ok() { 400 } else { 20 }
}

/// Returns the texts of the good records in order, and the counts of bad ones by reason.
fn reference(records: &[Record], null: &str) -> (Vec<String>, BTreeMap<String, u64>) {
    let (mut texts, mut bad) = (Vec::new(), BTreeMap::new());
    for record in records {
        let reason = match record {
            Record::Good(text) => {
                texts.push(text.clone());
                continue;
            }
            Record::Bad(_, reason) => reason,
            Record::Null => null,
            Record::NotUtf8 => "invalid UTF-8",
        };
        *bad.entry(reason.to_owned()).or_default() += 1;
    }
    (texts, bad)
}

/// Reads the records with small and large splits, and through a query. With `on_error: fail` the first bad record is
/// reported.
fn assert_records(name: &str, bytes: &[u8], fields: Value, records: &[Record], null: &str) {
    let mut fields = fields;
    fields["on_error"] = json!("skip");
    let bench = Bench::with(&[(name, bytes)]);
    let (texts, bad) = reference(records, null);
    for target in [7, 200, 1 << 20] {
        let got = bench.all(&input(fields.clone()), target);
        assert_eq!((&got.documents, &got.summary.skipped), (&texts, &bad), "{name} {target}");
    }
    let query = with_sql(fields.clone(), "SELECT \"text\" FROM input");
    let (staged, documents) = run(&bench, &query).unwrap();
    assert_eq!(documents, texts, "{name}");
    // in a query a missing key is a null, and nulls of the result are counted when the staged rows are read
    let mut bad = bad;
    let missing = bad.remove("missing column").unwrap_or(0);
    bad.remove("null text");
    let nulls = records.iter().filter(|r| matches!(r, Record::Null)).count() as u64;
    assert_eq!(staged.skipped, bad, "{name}");
    assert_eq!(staged.rows, texts.len() as u64 + missing + if null == "null text" { nulls } else { 0 }, "{name}");
    fields["on_error"] = json!("fail");
    let failed = bench.try_all(&input(fields.clone()), 200);
    match bad.is_empty() && nulls + missing == 0 {
        true => assert_eq!(failed.unwrap().documents, texts),
        false => {
            let read = failed.unwrap_err();
            let SourceError::Record { file, position, reason, .. } = &read else { panic!("{read}") };
            assert_eq!(file, name);
            // the query reports the same record, at the same position, for the same reason
            let query = run(&bench, &with_sql(fields, "SELECT \"text\" FROM input")).unwrap_err();
            match &query {
                SourceError::Record { reason: "null text", .. } if *reason == "missing column" => {}
                SourceError::Record { file: of, position: at, reason: why, .. } if of == name => {
                    assert!(
                        (at, why) == (position, reason) || *reason == "null text" || *reason == "missing column",
                        "{query} {read}"
                    );
                }
                other => assert!(other.to_string().starts_with("sql/part-"), "{other}"),
            }
        }
    }
}

fn text() -> BoxedStrategy<String> {
    prop_oneof![4 => any::<String>(), 2 => "[ -~]{0,40}", 1 => Just("é🎲 \"x\", \\ \n".repeat(900))].boxed()
}

fn json_record() -> BoxedStrategy<Record> {
    let bad = |bytes: &[u8], reason| Just(Record::Bad(bytes.to_vec(), reason)).boxed();
    prop_oneof![
        8 => text().prop_map(Record::Good),
        1 => bad(b"{\"text\": \"a\"", "broken JSON"),
        1 => bad(b"[1]", "broken JSON"),
        1 => bad(b"{\"text\": tru}", "broken JSON"),
        1 => bad(b"{\"texts\": \"a\"}", "missing column"),
        1 => bad(b"{\"text\": 7}", "not a string"),
        1 => bad(b"{\"text\": {\"text\": \"x\"}}", "not a string"),
        1 => Just(Record::Null),
        1 => Just(Record::NotUtf8),
    ]
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn json_lines(records in prop::collection::vec(json_record(), 0..40), mark: bool, compress in 0..3_usize) {
        let mut bytes = if mark { b"\xef\xbb\xbf".to_vec() } else { Vec::new() };
        // at least one good record, so that the query finds the column
        let records: Vec<Record> = [Record::Good("first".into())].into_iter().chain(records).collect();
        for record in &records {
            match record {
                Record::Good(text) => bytes.extend(json!({"n": 1, "text": text, "more": [{"a": null}]}).to_string().bytes()),
                Record::Bad(line, _) => bytes.extend(line),
                Record::Null => bytes.extend(b"{\"text\": null}"),
                Record::NotUtf8 => bytes.extend(b"{\"text\": \"\xff\"}"),
            }
            bytes.extend(b"\r\n \n");
        }
        let (name, bytes) = match compress {
            0 => ("a.jsonl", bytes),
            1 => ("a.jsonl.gz", gzip(&bytes)),
            _ => ("a.jsonl.zst", zstandard(&bytes)),
        };
        assert_records(name, &bytes, json!({}), &records, "null text");
    }

    #[test]
    fn lines_of_text(records in prop::collection::vec(prop_oneof![
        6 => "[^\r\n\u{feff}]{0,40}".prop_map(Record::Good),
        1 => Just(Record::NotUtf8),
    ], 0..40)) {
        let mut bytes = Vec::new();
        for record in &records {
            match record {
                Record::Good(text) => bytes.extend(text.bytes()),
                _ => bytes.extend(b"caf\xe9"),
            }
            bytes.push(b'\n');
        }
        // a short file of alternating zero bytes and letters is detected as UTF-16
        prop_assume!(!bytes.contains(&0));
        assert_records("a.txt", &bytes, json!({"format": "text"}), &records, "");
    }

    #[test]
    fn csv(records in prop::collection::vec(prop_oneof![
        6 => text().prop_map(Record::Good),
        1 => Just(Record::NotUtf8),
        1 => Just(Record::Bad(b"1,2".to_vec(), "wrong number of fields")),
        1 => Just(Record::Bad(b"1,2,3,4".to_vec(), "wrong number of fields")),
    ], 0..40), mark: bool) {
        let mut bytes = if mark { b"\xef\xbb\xbf".to_vec() } else { Vec::new() };
        bytes.extend(b"n,text,m\n");
        for record in &records {
            match record {
                Record::Good(text) => bytes.extend(format!("1,\"{}\",", text.replace('"', "\"\"")).bytes()),
                Record::Bad(line, _) => bytes.extend(line),
                _ => bytes.extend(b"1,caf\xe9,x"),
            }
            bytes.push(b'\n');
        }
        assert_records("a.csv", &bytes, json!({"format": "csv"}), &records, "");
    }

    #[test]
    fn cells_of_bytes(records in prop::collection::vec(prop_oneof![
        6 => text().prop_map(Record::Good),
        1 => Just(Record::NotUtf8),
        1 => Just(Record::Null),
    ], 1..60), group in 1..20_usize, kind in 0..3_usize) {
        let cell = |record: &Record| match record {
            Record::Good(text) => Some(text.clone().into_bytes()),
            Record::Null => None,
            _ => Some(b"caf\xe9".to_vec()),
        };
        let cells: Vec<Option<Vec<u8>>> = records.iter().map(cell).collect();
        let binary = BinaryArray::from_iter(cells.iter().map(Option::as_deref));
        let numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(0..records.len() as i32));
        let kind = &[DataType::Binary, DataType::LargeBinary, DataType::BinaryView][kind];
        let text = arrow::compute::cast(&binary, kind).unwrap();
        let batch = RecordBatch::try_from_iter_with_nullable([("n", numbers, false), ("text", text, true)]).unwrap();
        let parquet = parquet_bytes(&batch, group);
        assert_records("a.parquet", &parquet, json!({"format": "parquet"}), &records, "null text");
        let mut file = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        file.write(&batch).unwrap();
        assert_records("a.arrow", &file.into_inner().unwrap(), json!({"format": "arrow"}), &records, "null text");
    }
}
