//! Files that change while they are read, and between two reads.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::StringArray;
use object_store::memory::InMemory;
use object_store::{ObjectStoreExt, PutPayload};

use super::*;

/// A deterministic generator of numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

/// Stores documents in a format: the file name, its bytes and the input that reads it.
fn stored(format: &str, documents: &[String]) -> (String, Vec<u8>, Input) {
    let lines = |each: &dyn Fn(&String) -> String| documents.iter().map(each).collect::<String>().into_bytes();
    let json = |d: &String| json!({"id": d.len(), "text": d}).to_string() + "\n";
    let (name, bytes, fields) = match format {
        "jsonl" => ("a.jsonl", lines(&json), json!({})),
        "jsonl.gz" => ("a.jsonl.gz", gzip(&lines(&json)), json!({})),
        "jsonl.zst" => ("a.jsonl.zst", zstandard(&lines(&json)), json!({})),
        "text" => ("a.txt", lines(&|d| format!("{d}\n")), json!({"format": "text"})),
        "blocks" => ("a.txt", lines(&|d| format!("{d}\n\n")), json!({"format": "text", "document": "blank_line"})),
        "csv" => {
            let rows = std::iter::once("n,text\n".to_owned()).chain(documents.iter().map(|d| format!("1,\"{d}\"\n")));
            ("a.csv", rows.collect::<String>().into_bytes(), json!({"format": "csv"}))
        }
        _ => {
            let texts = StringArray::from_iter_values(documents);
            let batch = RecordBatch::try_from_iter([("text", Arc::new(texts) as _)]).unwrap();
            ("a.parquet", parquet_bytes(&batch, 3), json!({"format": "parquet"}))
        }
    };
    (name.into(), bytes, input(fields))
}

const FORMATS: [&str; 7] = ["jsonl", "jsonl.gz", "jsonl.zst", "text", "blocks", "csv", "parquet"];

/// For every format: a changed letter in one document changes only the checksum of the piece that holds it.
#[test]
fn checksums_report_which_piece_holds_another_document() {
    let rounds = if std::env::var_os("STILLHOUSE_SOAK").is_some() { 200 } else { 8 };
    let mut numbers = Numbers(11);
    for round in 0..rounds {
        let count = 1 + numbers.below(12);
        let letter = |n: &mut Numbers| char::from(b'a' + n.below(26) as u8);
        let mut documents: Vec<String> =
            (0..count).map(|_| (0..1 + numbers.below(300)).map(|_| letter(&mut numbers)).collect()).collect();
        let target = 1 + numbers.below(500) as u64;
        let changed = numbers.below(count);
        let mut sums = Vec::new();
        let mut splits = Vec::new();
        for format in FORMATS {
            let (name, bytes, input) = stored(format, &documents);
            let bench = Bench::with(&[(&name, &bytes)]);
            splits.push(bench.plan(&input, target).unwrap());
            let files = bench.files(&input);
            let all = splits.last().unwrap().iter();
            sums.push(all.map(|s| piece_checksums(&bench.store, &files, s, &input).unwrap()).collect::<Vec<_>>());
        }
        let at = numbers.below(documents[changed].len());
        documents[changed].replace_range(at..=at, "Z");
        for (i, format) in FORMATS.into_iter().enumerate() {
            let (name, bytes, input) = stored(format, &documents);
            let bench = Bench::with(&[(&name, &bytes)]);
            let files = bench.files(&input);
            let mut first = 0;
            for (split, was) in splits[i].iter().zip(&sums[i]) {
                let got = bench.read(&files, &input, std::slice::from_ref(split));
                let Ok(got) = got else { panic!("{format} round {round}: {:?}", got.err()) };
                let holds = (first..first + got.documents.len()).contains(&changed);
                first += got.documents.len();
                let now = piece_checksums(&bench.store, &files, split, &input).unwrap();
                assert_eq!(now.len(), split.pieces.len());
                assert_eq!(now != *was, holds, "{format} round {round}, {split:?}");
            }
            assert_eq!(first, count, "{format}");
        }
    }
}

#[test]
fn the_checksum_is_of_the_documents_not_of_how_they_are_stored() {
    let documents: Vec<String> = (0..9).map(|i| format!("document {i}")).collect();
    let sums: std::collections::BTreeSet<Vec<String>> = FORMATS
        .into_iter()
        .map(|format| {
            let (name, bytes, input) = stored(format, &documents);
            let bench = Bench::with(&[(&name, &bytes)]);
            let splits = bench.plan(&input, u64::MAX).unwrap();
            piece_checksums(&bench.store, &bench.files(&input), &splits[0], &input).unwrap()
        })
        .collect();
    assert_eq!(sums.len(), 1, "{sums:?}");
}

#[test]
fn bad_records_count_in_the_checksum() {
    let input = input(json!({"on_error": "skip"}));
    let sum = |content: &[u8]| {
        let bench = Bench::with(&[("a.jsonl", content)]);
        let splits = bench.plan(&input, u64::MAX).unwrap();
        piece_checksums(&bench.store, &bench.files(&input), &splits[0], &input).unwrap()
    };
    let good = sum(b"{\"text\":\"a\"}\n{\"text\":\"b\"}\n");
    let bad = sum(b"{\"text\":\"a\"}\n{\"text\":   1}\n");
    let moved = sum(b"{\"text\":  1}\n{\"text\": \"a\"}\n");
    assert!(good != bad && bad != moved && good != moved);
}

/// A file that is overwritten, replaced, truncated or extended after the listing is reported by name, whatever it
/// contains now.
#[test]
fn a_file_that_changes_while_it_is_read_is_reported_by_name() {
    let document = |i: usize| json!({"text": format!("document {i} {}", "z".repeat(4000))}).to_string() + "\n";
    let content: String = (0..2500).map(document).collect();
    type Change = fn(&std::path::Path, &str);
    let changes: [(&str, Change); 6] = [
        ("same size", |path, content| std::fs::write(path, content.replace("zz", "yy")).unwrap()),
        ("no JSON any more", |path, content| std::fs::write(path, "\n".repeat(content.len())).unwrap()),
        ("cut", |path, content| std::fs::write(path, &content[..content.len() / 2]).unwrap()),
        ("longer", |path, content| std::fs::write(path, content.to_owned() + "{}\n").unwrap()),
        ("replaced", |path, content| {
            let beside = path.with_extension("new");
            std::fs::write(&beside, content).unwrap();
            std::fs::rename(beside, path).unwrap();
        }),
        ("touched", |path, _| {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_modified(file.metadata().unwrap().modified().unwrap() + Duration::from_secs(1)).unwrap();
        }),
    ];
    for (name, change) in changes {
        for early in [true, false] {
            let bench = Bench::with(&[("a.jsonl", content.as_bytes())]);
            let input = input(json!({}));
            let (files, splits) = (bench.files(&input), bench.plan(&input, u64::MAX).unwrap());
            let path = bench.path().join("a.jsonl");
            if early {
                // between the listing and the read
                change(&path, &content);
            }
            let mut batches = 0;
            let read = read_split(&bench.store, &files, &splits[0], &input, &mut |_| {
                batches += 1;
                if !early && batches == 2 {
                    change(&path, &content);
                }
                Ok(())
            });
            let error = read.expect_err(name);
            assert!(matches!(error, SourceError::Changed { .. }), "{name}: {error}");
            let reported = error.to_string();
            assert!(reported.contains("a.jsonl has changed since the job began"), "{name}: {reported}");
        }
    }
}

#[test]
fn an_object_that_changes_while_it_is_read_is_reported_by_name() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let memory = Arc::new(InMemory::new());
    let put = |text: &str| {
        let content = format!("{{\"text\":\"{text}\"}}\n").repeat(400_000);
        let path = object_store::path::Path::from("a.jsonl");
        runtime.block_on(memory.put(&path, PutPayload::from(content))).unwrap();
    };
    put("one");
    let store = with_corpora(runtime.handle(), memory.clone());
    let input = input(json!({"paths": ["s3://corpora/*.jsonl"]}));
    let files = { list(&store, std::path::Path::new("/"), &input).unwrap() };
    let splits = plan_splits(&store, &files, &input, u64::MAX, 0, &|_| {}).unwrap().splits;
    let mut batches = 0;
    let error = read_split(&store, &files, &splits[0], &input, &mut |_| {
        batches += 1;
        if batches == 1 {
            put("two");
        }
        Ok(())
    });
    assert!(matches!(error, Err(SourceError::Changed { .. })), "{error:?}");
}
