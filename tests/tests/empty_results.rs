//! Proves that an empty result is not a success: what a job may skip, and what it reports if it made nothing.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use stillhouse_tests::{Scratch, with};

use crate::resume::uniform_draws;

/// A job without a teacher, with a tokenizer of six words.
fn small(scratch: &Scratch) -> Value {
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": 0, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"<eos>": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4, "d": 5}}
    });
    scratch.write("tokenizer.json", &tokenizer.to_string());
    json!({
        "version": 1, "name": "nothing",
        "input": {"format": "jsonl", "paths": ["in.jsonl"], "on_error": "skip"},
        "tokenizer": {"path": "tokenizer.json", "bos": "<eos>", "eos": "<eos>", "pad": "<eos>"},
        "pack": {"length": 6},
        "output": {"path": "out"}
    })
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn utf16(text: &str) -> Vec<u8> {
    [0xFEFF].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
}

fn lines(key: &str, n: usize) -> String {
    (0..n).map(|i| format!("{}\n", json!({key: format!("a b c d {i} a b c")}))).collect()
}

#[test]
fn a_job_that_makes_no_sequence_fails_and_leaves_nothing() {
    let scratch = Scratch::new();
    let job = small(&scratch);
    let short = with(job.clone(), &json!({"pack": {"length": 4096}}));
    let cases: [(&str, Vec<u8>, &Value, &[&str]); 6] = [
        ("a wrong key", lines("body", 50).into(), &job, &["50 records skipped (50 missing column)", "`input.text`"]),
        ("gzip bytes", gzip(lines("text", 50).as_bytes()), &job, &["gzip bytes", "`compression: gzip`"]),
        ("UTF-16", utf16(&lines("text", 50)), &job, &["this is text in UTF-16", "valid: UTF-8"]),
        ("blank lines", b"\n\n\n".to_vec(), &job, &["no records"]),
        (
            "empty documents",
            b"{\"text\": \"\"}\n{\"text\":\" \"}\n".to_vec(),
            &job,
            &["2 documents read (2 of them without a token)"],
        ),
        (
            "too short for a sequence",
            lines("text", 9).into(),
            &short,
            &["9 documents read", "tokens dropped by packing", "`pack.remainder"],
        ),
    ];
    for (name, bytes, job, says) in cases {
        fs::write(scratch.path("in.jsonl"), bytes).unwrap();
        scratch.job("job.yaml", job);
        // an error that the first bytes reveal counts as a wrong job file
        let code = if ["gzip bytes", "UTF-16"].contains(&name) { 2 } else { 1 };
        let ran = scratch.stillhouse(&["run", "job.yaml"]).expect(code);
        for part in says {
            assert!(ran.stderr.contains(part), "{name}: {part:?} is not in:\n{}", ran.stderr);
        }
        assert!(!scratch.path("out").exists(), "{name}: {:?}", stillhouse_tests::files(&scratch.path("out")));
    }
}

#[test]
fn what_is_skipped_is_counted_reported_and_bounded() {
    let scratch = Scratch::new();
    let job = with(small(&scratch), &json!({"input": {"split_megabytes": 0.001}}));
    let mut text = lines("text", 97);
    text += "{broken\n{\"text\": null}\n{\"other\": 1}\n{\"text\": \"\"}\n";
    scratch.write("in.jsonl", &text);
    scratch.job("job.yaml", &job);
    // 3 of 101 records are bad
    let says = ["3 of 101 records", "1 broken JSON, 1 missing column, 1 null text", "input.max_skipped: 0.01"];
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(1).says(&says);
    assert!(!scratch.path("out/_SUCCESS").exists());
    let kept = stillhouse_tests::shards(&scratch.path("out"));
    assert!(kept.len() > 1);

    // with a higher limit, nothing is made again and the data set is complete
    scratch.job("job.yaml", &with(job.clone(), &json!({"input": {"max_skipped": 0.03}})));
    let ran = scratch.stillhouse(&["run", "job.yaml", "--json"]).expect(0);
    let events: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!events.iter().any(|e| e["event"] == "split_started"), "{}", ran.stdout);
    let last = events.last().unwrap();
    assert_eq!(last["event"], "job_finished");
    assert_eq!((&last["documents"], &last["empty_documents"]), (&json!(98), &json!(1)));
    assert_eq!(last["skipped"], json!({"broken JSON": 1, "missing column": 1, "null text": 1}));
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("out/manifest.json")).unwrap()).unwrap();
    let statistics = &manifest["statistics"];
    assert_eq!(statistics["skipped"], last["skipped"]);
    assert_eq!(statistics["dropped_tokens"], last["dropped_tokens"]);
    assert_eq!(stillhouse_tests::shards(&scratch.path("out")), kept);
    let card = fs::read_to_string(scratch.path("out/README.md")).unwrap();
    assert!(card.contains("1 broken JSON"), "{card}");
    let shown = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    for part in
        ["98 documents (1 without a token)", "3 records: 1 broken JSON, 1 missing column, 1 null text", "dropped"]
    {
        assert!(shown.stdout.contains(part), "{part:?} is not in:\n{}", shown.stdout);
    }
    // a run on the finished data set gives the same verdict
    scratch.job("job.yaml", &job);
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(1).says(&says);
}

#[test]
fn a_held_out_set_without_a_sequence_is_a_failure() {
    let scratch = Scratch::new();
    let job = with(
        small(&scratch),
        &json!({"input": {"holdout": {"validation": {"last_documents": 1}}}, "pack": {"length": 64}}),
    );
    scratch.write("in.jsonl", &lines("text", 99));
    scratch.job("job.yaml", &job);
    scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&["input.holdout.validation", "fill no sequence"]);
}

/// Proves for many invalid and some valid inputs that success means a data set with sequences, from an input that was
/// read.
#[test]
fn success_is_never_nothing() {
    let scratch = Scratch::new();
    let rounds = if std::env::var_os("STILLHOUSE_SOAK").is_some() { 2000 } else { 60 };
    let mut random = uniform_draws(17);
    let mut pick = move |n: usize| (random.next().unwrap() * n as f64) as usize;
    let (mut succeeded, mut failed) = (0, 0);
    for round in 0..rounds {
        let mut text = String::new();
        for i in 0..pick(60) {
            text += &match pick(9) {
                0 => format!("{{broken {i}\n"),
                1 => "\n".into(),
                2 => "{\"text\": null}\n".into(),
                3 => "{\"text\": \"\"}\n".into(),
                4 => lines("body", 1),
                _ => lines("text", 1 + pick(40)),
            };
        }
        let bytes = match pick(7) {
            0 => gzip(text.as_bytes()),
            1 => utf16(&text),
            2 => (0..pick(3000)).map(|_| pick(256) as u8).collect(),
            3 => Vec::new(),
            _ => text.into_bytes(),
        };
        fs::write(scratch.path("in.jsonl"), bytes).unwrap();
        let (format, key) = [("jsonl", "text"), ("jsonl", "body"), ("text", "text"), ("csv", "text")][pick(4)];
        let mode = ["wrap", "pad", "best_fit"][pick(3)];
        let remainder = if mode == "wrap" { ["drop", "pad", "keep"][pick(3)] } else { "drop" };
        let (split, length) = ([0.001, 1.0][pick(2)], [3, 6, 900][pick(3)]);
        let most = [0.0, 0.01, 0.3, 1.0][pick(4)];
        let job = with(
            small(&scratch),
            &json!({
                "input": {"format": format, "text": key, "split_megabytes": split, "max_skipped": most},
                "pack": {"mode": mode, "remainder": remainder, "length": length}
            }),
        );
        scratch.job("job.yaml", &job);
        let _ = fs::remove_dir_all(scratch.path("out"));
        let ran = scratch.stillhouse(&["run", "job.yaml", "--quiet"]);
        let success = scratch.path("out/_SUCCESS").exists();
        let reported = format!("round {round}: {job}\n{}", ran.stderr);
        match ran.code {
            Some(0) => {
                assert!(success, "{reported}");
                let manifest = fs::read(scratch.path("out/manifest.json")).unwrap();
                let manifest: Value = serde_json::from_slice(&manifest).unwrap();
                let s = &manifest["statistics"];
                let skipped: u64 =
                    s["skipped"].as_object().map_or(0, |o| o.values().map(|n| n.as_u64().unwrap()).sum());
                let (documents, empty) = (s["documents"].as_u64().unwrap(), s["empty_documents"].as_u64().unwrap());
                assert!(manifest["totals"]["train"]["rows"].as_u64().unwrap() > 0 && documents > empty, "{reported}");
                assert!(skipped as f64 <= most * (documents + skipped) as f64, "{reported}");
                succeeded += 1;
            }
            Some(1 | 2) => {
                assert!(!success && ran.stderr.starts_with("error: "), "{reported}");
                failed += 1;
            }
            _ => panic!("{reported}"),
        }
    }
    assert!(succeeded > rounds / 10 && failed > rounds / 10, "{succeeded} succeeded, {failed} failed");
}
