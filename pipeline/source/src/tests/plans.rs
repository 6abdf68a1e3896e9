use stillhouse_schemas::manifest::Range;

use super::*;

/// Returns the documents of all splits of a data set split.
fn documents(bench: &Bench, input: &Input, splits: &[SplitRecord], name: &str) -> Vec<String> {
    let part: Vec<SplitRecord> = splits.iter().filter(|s| s.dataset_split == name).cloned().collect();
    bench.read(&bench.files(input), input, &part).unwrap().documents
}

#[test]
fn the_holdout_is_exact_across_files_and_formats() {
    let line = |i: usize| format!("document {i} {}", "x".repeat(i * 13 % 29));
    let rows = |r: std::ops::Range<usize>| r.map(|i| line(i) + "\n").collect::<String>();
    let json = |r: std::ops::Range<usize>| r.map(|i| json!({"text": line(i)}).to_string() + "\n\n").collect::<String>();
    let csv = |r: std::ops::Range<usize>| {
        "n,text\n".to_string() + &r.map(|i| format!("{i},\"{}\"\n", line(i))).collect::<String>()
    };
    let blocks = |r: std::ops::Range<usize>| r.map(|i| line(i) + "\n\n").collect::<String>();
    let ranges = [0..7, 7..7, 7..8, 8..20];
    type Make<'a> = &'a dyn Fn(std::ops::Range<usize>) -> String;
    let cases: [(&str, &str, Make<'_>); 4] =
        [("text", "line", &rows), ("jsonl", "line", &json), ("csv", "line", &csv), ("text", "blank_line", &blocks)];
    let all: Vec<String> = (0..20).map(line).collect();
    for (format, document, make) in cases {
        for gz in [false, true] {
            let bench = Bench::new();
            for (i, range) in ranges.iter().enumerate() {
                let bytes = make(range.clone()).into_bytes();
                bench.put(&format!("{i}.x{}", if gz { ".gz" } else { "" }), &if gz { gzip(&bytes) } else { bytes });
            }
            for n in [1, 5, 12, 13, 14, 19] {
                let input = input(
                    json!({"format": format, "document": document, "holdout": {"validation": {"last_documents": n}}}),
                );
                for target in [1, 30, 100, 1 << 20] {
                    let splits = bench.plan(&input, target).unwrap();
                    let first_held = splits.iter().position(|s| s.dataset_split == "validation").unwrap();
                    assert!(splits[first_held..].iter().all(|s| s.dataset_split == "validation"));
                    assert!(splits.iter().enumerate().all(|(i, s)| s.split.0 as usize == i));
                    assert_eq!(
                        documents(&bench, &input, &splits, "train"),
                        all[..20 - n],
                        "{format} {gz} {n} {target}"
                    );
                    assert_eq!(
                        documents(&bench, &input, &splits, "validation"),
                        all[20 - n..],
                        "{format} {gz} {n} {target}"
                    );
                }
            }
            for n in [20, 21, 1000] {
                let input = input(
                    json!({"format": format, "document": document, "holdout": {"validation": {"last_documents": n}}}),
                );
                let text = bench.plan(&input, 30).unwrap_err().to_string();
                assert_eq!(
                    text,
                    format!(
                        "input.holdout.validation.last_documents: got {n}, but the input has 20 records; \
                    valid: fewer than that, so that something is left for train"
                    )
                );
            }
        }
    }
}

#[test]
fn bad_records_count_in_the_holdout() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\n{\"text\":\"c\"}\n")]);
    let input = input(json!({"on_error": "skip", "holdout": {"test": {"last_documents": 2}}}));
    let splits = bench.plan(&input, 1 << 20).unwrap();
    assert_eq!(documents(&bench, &input, &splits, "train"), ["a", "b"]);
    assert_eq!(documents(&bench, &input, &splits, "test"), ["c"]);
}

#[test]
fn errors_after_a_holdout_cut_still_know_their_line() {
    let bench = Bench::with(&[("a.jsonl", b"{\"text\":\"a\"}\n\n{\"text\":\"b\"}\n{\"text\":\"c\"}\n{\n")]);
    let input = input(json!({"holdout": {"test": {"last_documents": 2}}}));
    let text = bench.try_all(&input, 1 << 20).unwrap_err().to_string();
    assert!(text.starts_with("a.jsonl: line 5: broken JSON"), "{text}");
}

#[test]
fn small_files_are_grouped_and_large_ones_cut() {
    let bench =
        Bench::with(&[("a.txt", &[b'a'; 10]), ("b.txt", &[b'b'; 10]), ("c.txt", &[b'c'; 100]), ("d.txt", &[b'd'; 10])]);
    let splits = bench.plan(&input(json!({"format": "text"})), 40).unwrap();
    let pieces: Vec<Vec<(String, u64, u64)>> = splits
        .iter()
        .map(|s| {
            s.pieces
                .iter()
                .map(|p| match p.range {
                    Range::Bytes { start, end, .. } => (p.file.clone(), start, end),
                    Range::Rows { .. } => unreachable!(),
                })
                .collect()
        })
        .collect();
    let piece = |f: &str, s, e| (f.to_string(), s, e);
    assert_eq!(
        pieces,
        [
            vec![piece("a.txt", 0, 10), piece("b.txt", 0, 10)],
            vec![piece("c.txt", 0, 33)],
            vec![piece("c.txt", 33, 66)],
            vec![piece("c.txt", 66, 100)],
            vec![piece("d.txt", 0, 10)],
        ]
    );
}

#[test]
fn ranges_of_compressed_files_are_decompressed_bytes_with_lines() {
    let bench = Bench::with(&[("a.txt.gz", &gzip(b"one\ntwo\nthree\nfour\n"))]);
    let splits = bench.plan(&input(json!({"format": "text"})), 8).unwrap();
    let ranges: Vec<Range> = splits.iter().flat_map(|s| &s.pieces).map(|p| p.range).collect();
    assert_eq!(
        ranges,
        [
            Range::Bytes { start: 0, end: 8, line: Some(1) },
            Range::Bytes { start: 8, end: 14, line: Some(3) },
            Range::Bytes { start: 14, end: 19, line: Some(4) },
        ]
    );
}

#[test]
fn progress_ends_with_everything_done() {
    let bench = Bench::with(&[("a.txt", b"1\n"), ("b.txt", b"22\n")]);
    let input = input(json!({"format": "text"}));
    let seen = std::sync::Mutex::new(Vec::new());
    plan_splits(&bench.store, &bench.files(&input), &input, 10, 0, &|p| seen.lock().unwrap().push(p)).unwrap();
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 2);
    assert!(seen.contains(&PlanProgress { files: 2, files_total: 2, bytes: 5, bytes_total: 5 }));
}

#[test]
fn the_first_broken_file_is_reported() {
    let bench = Bench::with(&[("a.txt.gz", &gzip(b"x\n")), ("b.txt.gz", b"bad"), ("c.txt.gz", b"bad")]);
    let text = bench.plan(&input(json!({"format": "text"})), 10).unwrap_err().to_string();
    assert!(text.starts_with("b.txt.gz: "), "{text}");
}

/// The check before a run reads only some of very many files; problems of the others are reported when they are read.
#[test]
fn of_very_many_files_some_are_looked_into() {
    let bench = Bench::new();
    (0..10_050).for_each(|n| bench.put(&format!("f/{n}.txt"), b"text\n"));
    let input = input(json!({"format": "text", "paths": ["f"]}));
    let files = bench.files(&input);
    let found = check_first_records(&bench.store, &files, &input, &|_, _| {}).unwrap();
    assert_eq!((files.len(), found.files, found.problems.len()), (10_050, 5_025, 0));
}

/// A small local read uses no other thread, which would slow down planning of many files: it works after the runtime
/// has ended.
#[test]
fn a_range_of_a_local_file_is_read_by_the_thread_that_asks() {
    let Bench { dir, store, _runtime } = Bench::with(&[("a.txt", b"0123456789")]);
    drop(_runtime);
    let location = object_store::path::Path::from_absolute_path(dir.path().join("a.txt")).unwrap();
    assert_eq!(store.get(&location, 2, 5).unwrap(), "234");
    assert_eq!(store.get(&location, 8, 50).unwrap(), "89");
}
