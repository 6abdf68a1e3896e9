//! Columns that stay with their documents (`input.carry`).

use arrow::array::{ArrayRef, Float64Array, Int64Array, StringArray, StructArray};
use arrow::datatypes::{DataType, Field};
use arrow::ipc::writer::FileWriter;
use stillhouse_operators::operator::CarriedValues;

use super::*;

type Values = Vec<Option<String>>;

/// Reads all documents with their values, by text, and the number of bad records.
pub(super) fn carried(bench: &Bench, input: &Input, target: u64) -> (Vec<(String, Values)>, u64) {
    let (files, mut found, mut skipped, mut text) = (bench.files(input), Vec::new(), 0, String::new());
    let listing = Listing::new(Arc::new(files));
    for split in bench.plan(input, target).unwrap() {
        let mut reader = SplitReader::new(&bench.store, &listing, split, Arc::new(input.clone()));
        let values = reader.carried().unwrap();
        for batch in &mut reader {
            let batch = batch.unwrap();
            let (ids, texts) = (batch.column(0).as_primitive::<UInt64Type>(), batch.column(1).as_string::<i32>());
            for row in 0..batch.num_rows() {
                text += texts.value(row);
                if batch.column(2).as_boolean().value(row) {
                    let values = values.of_document(ids.value(row)).unwrap().unwrap();
                    found.push((std::mem::take(&mut text), values.to_vec()));
                }
            }
        }
        skipped += reader.into_summary().skipped.values().sum::<u64>();
    }
    (found, skipped)
}

fn some(value: impl ToString) -> Option<String> {
    Some(value.to_string())
}

const DOCUMENTS: usize = 30;
const NAMES: [&str; 4] = ["url", "_file", "n", "meta.lang"];

fn text(i: usize) -> String {
    format!("text {i} {}", "é".repeat(i * 37 % 90))
}

fn lang(i: usize) -> Option<&'static str> {
    [Some("en"), Some("de"), None][i % 3]
}

/// What every format gives.
fn expected(file: &str) -> Vec<(String, Values)> {
    let values = |i: usize| vec![some(format!("u\"{i}")), some(file), some(i), lang(i).map(str::to_owned)];
    (0..DOCUMENTS).map(|i| (text(i), values(i))).collect()
}

fn table() -> RecordBatch {
    let meta = vec![(
        Arc::new(Field::new("lang", DataType::Utf8, true)),
        Arc::new((0..DOCUMENTS).map(lang).collect::<StringArray>()) as ArrayRef,
    )];
    RecordBatch::try_from_iter([
        ("meta", Arc::new(StructArray::from(meta)) as ArrayRef),
        ("text", Arc::new(StringArray::from_iter_values((0..DOCUMENTS).map(text))) as _),
        ("score", Arc::new(Float64Array::from(vec![0.5; DOCUMENTS])) as _),
        ("n", Arc::new(Int64Array::from_iter_values((0..DOCUMENTS).map(|i| i as i64))) as _),
        ("url", Arc::new(StringArray::from_iter_values((0..DOCUMENTS).map(|i| format!("u\"{i}")))) as _),
    ])
    .unwrap()
}

#[test]
fn every_format_gives_the_same_values_for_every_size_of_split() {
    let line = |i: usize| json!({"n": i, "meta": {"lang": lang(i)}, "text": text(i), "url": format!("u\"{i}")});
    let lines: String = (0..DOCUMENTS).map(|i| format!("{}\n", line(i))).collect();
    let csv_line = |i: usize| format!("{i},\"{}\",\"u\"\"{i}\",{}\n", text(i), lang(i).unwrap_or(""));
    let csv: String = "n,text,url,meta.lang\n".to_owned() + &(0..DOCUMENTS).map(csv_line).collect::<String>();
    let batch = table();
    let mut arrow = FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    (0..DOCUMENTS).step_by(7).for_each(|at| arrow.write(&batch.slice(at, 7.min(DOCUMENTS - at))).unwrap());
    let arrow = arrow.into_inner().unwrap();
    for (format, file, bytes) in [
        ("jsonl", "a.jsonl", lines.clone().into_bytes()),
        ("jsonl", "a.jsonl.gz", gzip(lines.as_bytes())),
        ("csv", "a.csv", csv.into_bytes()),
        ("parquet", "a.parquet", parquet_bytes(&batch, 11)),
        ("arrow", "a.arrow", arrow),
    ] {
        let bench = Bench::with(&[(file, &bytes)]);
        let input = input(json!({"format": format, "carry": NAMES, "piece_kilobytes": 4}));
        assert_eq!(check_columns(&bench.store, &bench.files(&input), &input, &mut |_| {}).unwrap(), [], "{file}");
        assert!(
            check_first_records(&bench.store, &bench.files(&input), &input, &|_, _| {}).unwrap().problems.is_empty()
        );
        let mut wanted = expected(file);
        if format == "csv" {
            // CSV has no nulls
            wanted.iter_mut().for_each(|(_, values)| values[3] = some(values[3].as_deref().unwrap_or("")));
        }
        for target in [1, 300, 1 << 20] {
            assert_eq!(carried(&bench, &input, target), (wanted.clone(), 0), "{file}, {target}");
        }
    }
}

#[test]
fn files_of_text_have_their_names() {
    let bench = Bench::with(&[("a.txt", b"one\ntwo\n"), ("b.txt", b"three")]);
    let input = input(json!({"format": "text", "carry": ["_file"]}));
    let of = |text: &str, file| (text.to_owned(), vec![some(file)]);
    let wanted = vec![of("one", "a.txt"), of("two", "a.txt"), of("three", "b.txt")];
    assert_eq!(carried(&bench, &input, 1 << 20), (wanted, 0));
}

#[test]
fn lines_longer_than_the_read_ahead_keep_their_values() {
    let long = "long ".repeat(900_000);
    let line = |url: &str, text: &str| format!("{{\"url\": \"{url}\", \"text\": \"{text}\", \"n\": 1.50}}\n");
    let lines = line("a", "x") + &line("b", &long) + &line("c", "y");
    let bench = Bench::with(&[("a.jsonl", lines.as_bytes())]);
    let input = input(json!({"carry": ["url", "n"]}));
    let (found, skipped) = carried(&bench, &input, u64::MAX);
    let urls: Vec<_> = found.iter().map(|(_, values)| values.clone()).collect();
    assert_eq!((urls, skipped), (["a", "b", "c"].map(|url| vec![some(url), some("1.50")]).to_vec(), 0));
    assert!(found.iter().map(|(text, _)| text.len()).eq([1, long.len(), 1]));
}

#[test]
fn values_that_are_too_long_or_no_text_make_bad_records() {
    let long = "u".repeat(16_385);
    let fits = &long[1..];
    let line = |url: &str| json!({"text": "x", "url": url}).to_string() + "\n";
    let lines = line(fits) + &line(&long);
    let table = RecordBatch::try_from_iter([
        ("text", Arc::new(StringArray::from(vec!["x", "x"])) as ArrayRef),
        ("url", Arc::new(StringArray::from(vec![fits, long.as_str()])) as _),
    ])
    .unwrap();
    for (format, bytes) in [
        ("jsonl", lines.into_bytes()),
        ("csv", format!("text,url\nx,{fits}\nx,{long}\n").into_bytes()),
        ("parquet", parquet_bytes(&table, 2)),
    ] {
        let bench = Bench::with(&[("x", &bytes)]);
        let fields = |on_error| json!({"format": format, "carry": ["url"], "on_error": on_error});
        let (found, skipped) = carried(&bench, &input(fields("skip")), u64::MAX);
        assert_eq!((found, skipped), (vec![("x".to_owned(), vec![some(fits)])], 1), "{format}");
        let error = bench.try_all(&input(fields("fail")), u64::MAX).unwrap_err().to_string();
        assert!(error.contains("too long to carry: the value of \"url\""), "{format}: {error}");
        let place = match format {
            "parquet" => "row 1 (from 0)",
            "csv" => "line 3",
            _ => "line 2",
        };
        assert!(error.starts_with(&format!("x: {place}: ")), "{format}: {error}");
    }
    let bench = Bench::with(&[("a.csv", b"text,url\nx,\xff\nx,\xc3\xa9\n")]);
    let csv = input(json!({"format": "csv", "carry": ["url"], "on_error": "skip"}));
    assert_eq!(carried(&bench, &csv, u64::MAX), (vec![("x".to_owned(), vec![some("é")])], 1));
}

#[test]
fn columns_that_are_not_there_are_named() {
    let batch = table();
    let lines = b"{\"text\": \"x\", \"url\": null}\n{\"text\": \"y\", \"url\": 3}\n{\"text\": \"z\", \"n\": null}\n";
    let csv = b"text,url\nx,y\n";
    for (format, bytes, name, part) in [
        (
            "parquet",
            parquet_bytes(&batch, 9),
            "urls",
            "no such column in x; columns: meta.lang, text, score, n, url; did you mean",
        ),
        ("parquet", parquet_bytes(&batch, 9), "meta", "the column has fields in x; valid: the name of a field"),
        ("csv", csv.to_vec(), "n", "no such column in x; columns: text, url"),
        ("jsonl", lines.to_vec(), "n", "none of the first 3 records has a value of this key; their keys: text, url, n"),
    ] {
        let bench = Bench::with(&[("x", &bytes)]);
        let input = input(json!({"format": format, "carry": ["url", name]}));
        let files = bench.files(&input);
        let mut problems = check_columns(&bench.store, &files, &input, &mut |_| {}).unwrap();
        if problems.is_empty() {
            problems = check_first_records(&bench.store, &files, &input, &|_, _| {}).unwrap().problems;
        }
        let shown = format!("{problems:?}");
        assert!(problems.len() == 1 && shown.contains("input.carry[1]") && shown.contains(part), "{format}: {shown}");
    }
}

#[test]
fn other_values_are_other_input() {
    let checksum = |url: &str, carry: &[&str]| {
        let bench = Bench::with(&[("a.jsonl", json!({"text": "x", "url": url}).to_string().as_bytes())]);
        let input = input(json!({ "carry": carry }));
        let (files, splits) = (bench.files(&input), bench.plan(&input, u64::MAX).unwrap());
        piece_checksums(&bench.store, &files, &splits[0], &input).unwrap()
    };
    assert_eq!(checksum("a", &[]), checksum("b", &[]));
    assert_eq!(checksum("a", &["url"]), checksum("a", &["url"]));
    assert_ne!(checksum("a", &["url"]), checksum("b", &["url"]));
    assert_ne!(checksum("a", &["url"]), checksum("a", &[]));
}
