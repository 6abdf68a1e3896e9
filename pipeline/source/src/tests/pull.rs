//! Pulling batches step by step: the reader returns exactly the batches of a reference and never holds more than one
//! batch in memory.

use std::sync::Arc;

use arrow::array::StringArray;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;

const FORMATS: [&str; 8] = ["jsonl", "jsonl.gz", "jsonl.zst", "text", "blocks", "csv", "parquet", "arrow"];

/// Stores documents in a format: the file name, its bytes and the input. `None` is a bad record.
fn stored(format: &str, documents: &[Option<String>]) -> (&'static str, Vec<u8>, Value) {
    let lines = |bad: &[u8], each: &dyn Fn(&str) -> String| -> Vec<u8> {
        let line = |d: &Option<String>| d.as_ref().map_or(bad.to_vec(), |d| each(d).into_bytes());
        documents.iter().flat_map(line).collect()
    };
    let json = || lines(b"[1]\n", &|d| json!({"id": d.len(), "text": d}).to_string() + "\n");
    match format {
        "jsonl" => ("a.jsonl", json(), json!({})),
        "jsonl.gz" => ("a.jsonl.gz", gzip(&json()), json!({})),
        "jsonl.zst" => ("a.jsonl.zst", zstandard(&json()), json!({})),
        "text" => ("a.txt", lines(b"caf\xe9\n", &|d| format!("{d}\n")), json!({"format": "text"})),
        "blocks" => {
            let blocks = lines(b"caf\xe9\n\n", &|d| format!("{d}\n\n"));
            ("a.txt", blocks, json!({"format": "text", "document": "blank_line"}))
        }
        "csv" => {
            let rows = lines(b"1\n", &|d| format!("1,\"{d}\"\n"));
            ("a.csv", [b"n,text\n".to_vec(), rows].concat(), json!({"format": "csv"}))
        }
        _ => {
            let texts: StringArray = documents.iter().map(Option::as_deref).collect();
            let batch = RecordBatch::try_from_iter_with_nullable([("text", Arc::new(texts) as _, true)]).unwrap();
            if format == "parquet" {
                return ("a.parquet", parquet_bytes(&batch, 700), json!({"format": format}));
            }
            let mut file = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
            for from in (0..batch.num_rows()).step_by(700) {
                file.write(&batch.slice(from, 700.min(batch.num_rows() - from))).unwrap();
            }
            ("a.arrow", file.into_inner().unwrap(), json!({"format": format}))
        }
    }
}

/// The id of a document, a piece of it, and whether it is its last one.
type Row = (u64, String, bool);

/// Returns the batches up to the end, or the full ones before the first bad record; and the checksum of the records.
fn reference(documents: &[Option<String>], piece: usize, fails: bool) -> (Vec<Vec<Row>>, Option<String>) {
    let (mut batches, mut rows, mut sum) = (vec![], Vec::<Row>::new(), Sha256::new());
    let bytes = |rows: &[Row]| rows.iter().map(|row| row.1.len()).sum::<usize>();
    for (i, document) in documents.iter().enumerate() {
        let Some(text) = document else {
            if fails {
                return (batches, None);
            }
            sum.update([0xff; 8]);
            continue;
        };
        sum.update((text.len() as u64).to_le_bytes());
        sum.update(text);
        let mut rest = text.as_str();
        loop {
            let (head, tail) = rest.split_at(rest.floor_char_boundary(piece));
            if !rows.is_empty() && bytes(&rows) + head.len() > 4 << 20 {
                batches.push(std::mem::take(&mut rows));
            }
            rows.push((i as u64, head.into(), tail.is_empty()));
            if rows.len() == 1024 || bytes(&rows) >= 1 << 20 {
                batches.push(std::mem::take(&mut rows));
            }
            if tail.is_empty() {
                break;
            }
            rest = tail;
        }
    }
    if !rows.is_empty() {
        batches.push(rows);
    }
    (batches, Some(hex::encode(sum.finalize())))
}

fn rows(batch: &RecordBatch) -> Vec<Row> {
    let (ids, texts) = (batch.column(0).as_primitive::<UInt64Type>(), batch.column(1).as_string::<i32>());
    let ends = batch.column(2).as_boolean();
    (0..batch.num_rows()).map(|i| (ids.value(i), texts.value(i).to_owned(), ends.value(i))).collect()
}

fn reader(bench: &Bench, input: &Input) -> SplitReader {
    let listing = Listing::new(Arc::new(bench.files(input)));
    let split = bench.plan(input, u64::MAX).unwrap().remove(0);
    SplitReader::new(&bench.store, &listing, split, Arc::new(input.clone()))
}

/// Runs one step on a new thread.
fn step(mut reader: SplitReader) -> (SplitReader, Option<Result<RecordBatch, SourceError>>) {
    std::thread::spawn(move || {
        let batch = reader.next();
        (reader, batch)
    })
    .join()
    .unwrap()
}

fn assert_steps(format: &str, documents: &[Option<String>], kilobytes: usize, on_error: &str) {
    let (name, bytes, mut fields) = stored(format, documents);
    fields["piece_kilobytes"] = json!(kilobytes);
    fields["on_error"] = json!(on_error);
    let bench = Bench::with(&[(name, &bytes)]);
    let input = input(fields);
    let mut reader = reader(&bench, &input);
    let (expected, sum) = reference(documents, kilobytes * 1000, on_error == "fail");
    for (i, expected) in expected.iter().enumerate() {
        let (next, batch) = step(reader);
        reader = next;
        let got = rows(&batch.unwrap().unwrap());
        assert!(got == *expected, "{format}: batch {i}: {} rows, expected {}", got.len(), expected.len());
    }
    let (next, last) = step(reader);
    reader = next;
    match &sum {
        Some(_) => assert!(last.is_none(), "{format}"),
        None => {
            let Some(Err(SourceError::Record { file, .. })) = &last else { panic!("{format}: {last:?}") };
            assert_eq!(file, name);
        }
    }
    assert!(reader.next().is_none() && reader.next().is_none(), "{format}: something comes after the end");
    if let Some(sum) = sum {
        let bad = documents.iter().filter(|d| d.is_none()).count() as u64;
        let summary = reader.into_summary();
        assert_eq!((summary.documents, summary.sha256), (documents.len() as u64 - bad, vec![sum]), "{format}");
        assert_eq!(summary.text_bytes, documents.iter().flatten().map(|d| d.len() as u64).sum::<u64>());
        assert_eq!(summary.skipped.into_values().sum::<u64>(), bad, "{format}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    /// Batches, ids, checksums and counts of every format equal the reference, whichever thread runs a step.
    #[test]
    fn steps_give_the_batches_of_the_reference(
        records in prop::collection::vec(prop_oneof![
            8 => "[a-z é🎲]{0,30}x".prop_map(Some),
            2 => (1..150_000_usize).prop_map(|n| Some("日本é x".repeat(n))),
            1 => (400_000..500_000_usize).prop_map(|n| Some("🎲y é日".repeat(n))),
            1 => Just(None),
        ], 1..14),
        many: bool,
        kilobytes in prop::sample::select(vec![4_usize, 64, 1500, 5000]),
        fails: bool,
    ) {
        let mut documents = vec![Some("first".to_owned())];
        if many {
            documents.extend((0..2100).map(|i| (i % 500 != 499).then(|| format!("document {i}"))));
        }
        documents.extend(records);
        for format in FORMATS {
            assert_steps(format, &documents, kilobytes, if fails { "fail" } else { "skip" });
        }
    }
}

/// A document of 50 MB: between two batches the reader holds less than a batch, and no batch exceeds its bound.
#[test]
fn a_document_of_any_length_is_never_more_than_a_piece_and_a_batch_in_memory() {
    const PIECE: usize = 64_000;
    let text = "The quick brown fox — naïve 日本語 🎲 jumps. ".repeat(1_000_000);
    let length = text.len();
    assert!(length > 50 << 20);
    let bench = Bench::with(&[("a.txt", text.as_bytes())]);
    let input = input(json!({"format": "text", "document": "file", "piece_kilobytes": 64}));
    let mut reader = reader(&bench, &input);
    drop(text);
    let (mut batches, mut read) = (0, 0);
    while let Some(batch) = reader.next() {
        let bytes = batch.unwrap().column(1).as_string::<i32>().values().len();
        assert!(bytes <= (1 << 20) + PIECE, "{bytes}");
        (batches, read) = (batches + 1, read + bytes);
        assert!(reader.held_bytes() <= PIECE, "{} bytes wait behind a batch that was taken", reader.held_bytes());
    }
    assert_eq!((read, reader.summary().text_bytes), (length, length as u64));
    assert!(batches >= length / ((1 << 20) + PIECE), "{batches}");
    assert_eq!(reader.summary().spooled_to_disk, 1);
}

#[test]
fn nothing_is_opened_before_the_first_step_and_what_the_listing_lacks_is_reported_in_its_place() {
    let bench = Bench::with(&[("a.txt", b"one\n"), ("b.txt", b"two\n")]);
    let input = input(json!({"format": "text"}));
    let (mut files, split) = (bench.files(&input), bench.plan(&input, u64::MAX).unwrap().remove(0));
    let listing = Listing::new(Arc::new(files.clone()));
    let reader = SplitReader::new(&bench.store, &listing, split.clone(), Arc::new(input.clone()));
    std::fs::remove_file(bench.path().join("a.txt")).unwrap();
    drop(reader);
    let mut reader = SplitReader::new(&bench.store, &listing, split.clone(), Arc::new(input.clone()));
    assert!(matches!(reader.next(), Some(Err(SourceError::Store { file, .. })) if file == "a.txt"));
    assert!(reader.next().is_none());
    files.remove(0);
    let listing = Listing::new(Arc::new(files));
    assert!(listing.get("a.txt").is_none() && listing.get("b.txt").is_some() && listing.get("").is_none());
    let mut reader = SplitReader::new(&bench.store, &listing, split, Arc::new(input));
    assert!(matches!(reader.next(), Some(Err(SourceError::Unlisted { file })) if file == "a.txt"));
}
