//! Tests the command line: all errors at once, exit codes, JSON, colours, and a schema that matches the code.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_job, root, run_command, with};

#[test]
fn every_problem_of_a_job_file_is_reported_at_once() {
    let scratch = Scratch::with_corpus(1, 200);
    let bad = r#"
version: 2
name: Bad Name
seed: -1
colour: red
input: {format: tsv, paths: [], text: 3, csv_delimiter: "ab", holdout: {validation: {last_documents: 0}}}
pack: {mode: wrap, length: 1, boundary: sometimes, lenght: 5}
extract: {teacher: {path: nowhere, device: tpu, dtype: f64}, noise: {tolerance: 2, draws: 0}, topk: -3}
subtokens: {length: 0}
orders: {kind: zigzag}
output: {path: out, zstd_level: 99}
engine: {kind: cluster}
"#;
    scratch.write("job.yaml", bad);
    for verb in ["run", "plan"] {
        // field, the value it got, what is valid
        let said = scratch.stillhouse(&[verb, "job.yaml"]).expect(2).says(&["job.yaml", "22 problems"]);
        for (field, got, valid) in [
            ("version", "2", "1 or less"),
            ("name", "\"Bad Name\"", "must match"),
            ("seed", "-1", "0 or more"),
            (
                "colour",
                "\"red\"",
                "unknown key; valid keys here: block_urls, chat, clean, decontaminate, deduplicate, engine",
            ),
            ("input.format", "\"tsv\"", "\"jsonl\", \"text\", \"csv\", \"warc\", \"parquet\", \"arrow\""),
            ("input.paths", "[]", "1 or more"),
            ("input.text", "3", "string"),
            ("input.csv_delimiter", "\"ab\"", "must match"),
            ("input.holdout.validation.last_documents", "0", "1 or more"),
            ("pack.length", "1", "2 or more"),
            ("pack.boundary", "\"sometimes\"", "\"bos_eos\", \"none\""),
            ("pack.lenght", "5", "valid keys here: boundary, length"),
            ("extract.teacher.path", "\"nowhere\"", "no file or folder"),
            ("extract.teacher.device", "\"tpu\"", "auto|cpu|all|cuda"),
            ("extract.teacher.dtype", "\"f64\"", "\"f32\", \"bf16\", \"f16\""),
            ("extract.noise.tolerance", "2", "0.5 or less"),
            ("extract.noise.draws", "0", "1 or more"),
            ("extract.topk", "-3", "0 or more"),
            ("subtokens.length", "0", "1 or more"),
            ("orders.kind", "\"zigzag\"", "\"none\", \"progressive\", \"strided\", \"random\""),
            ("output.zstd_level", "99", "22 or less"),
            ("engine.kind", "\"cluster\"", "\"local\", \"ballista\""),
        ] {
            let line = said.stderr.lines().find(|line| line.contains(&format!(": {field}: got {got}: ")));
            let line = line.unwrap_or_else(|| panic!("no line on {field}, {got}:\n{}", said.stderr));
            assert!(line.contains(valid), "{valid:?} is not in {line:?}");
            let place: Vec<&str> = line.trim_start().split(':').take(3).collect();
            let [file, row, column] = place.as_slice() else { panic!("{line}") };
            assert_eq!(*file, "job.yaml");
            let (row, column): (usize, usize) = (row.parse().unwrap(), column.parse().unwrap());
            let key = field.rsplit('.').next().unwrap();
            assert!(bad.lines().nth(row - 1).unwrap()[column - 1..].starts_with(key), "{line}");
        }
    }
    assert!(!scratch.path("out").exists());
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let scratch = Scratch::with_corpus(1, 200);
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "the": 4}}
    });
    scratch.write("tokenizer.json", &tokenizer.to_string());
    let cases: [(Value, &[&str]); 4] = [
        (
            json!({"tokenizer": {"path": "tokenizer.json"}}),
            &[
                "tokenizer.path: got \"tokenizer.json\": is not the teacher's own tokenizer",
                r#"id 0 is "[PAD]", the teacher's "!""#,
            ],
        ),
        (
            json!({"pack": {"length": 2048}, "input": {"paths": ["missing-*.jsonl"]}}),
            &[
                "2 problems",
                "pack.length: got 2048: longer than the teacher's context",
                "1024",
                "input.paths[0]: got \"missing-*.jsonl\": matches no file",
            ],
        ),
        (json!({"input": {"paths": ["corpus.jsonl", "[.jsonl"]}}), &["input.paths[1]", "[.jsonl"]),
        (json!({"pack": {"length": 2}}), &["pack.length: got 2", "3"]),
    ];
    for (patch, says) in cases {
        scratch.job("job.yaml", &with(nano_job(), &patch));
        scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(says);
        assert!(!scratch.path("out").exists(), "{patch}");
    }
    scratch.stillhouse(&["run", "nothing.yaml"]).expect(2).says(&["nothing.yaml"]);
    scratch.write("job.yaml", "version: [1");
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["job.yaml"]);
    scratch.stillhouse(&["distil"]).expect(2).says(&["distil"]);
}

#[test]
fn the_schema_has_not_drifted() {
    let scratch = Scratch::new();
    let schema = scratch.stillhouse(&["schema"]).expect(0);
    let committed = fs::read_to_string(root().join("jobs/job.schema.json")).unwrap();
    assert!(schema.stdout == committed, "run `target/debug/stillhouse schema > jobs/job.schema.json`");
    assert_eq!(schema.json()["type"], "object");
}

#[test]
fn example_jobs_are_valid() {
    let scratch = Scratch::new();
    let mut examples = 0;
    for entry in fs::read_dir(root().join("jobs/examples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let plan = scratch.stillhouse(&["plan", path.to_str().unwrap(), "--json", "--overwrite"]).expect(0).json();
        assert_eq!(plan["name"], path.file_stem().unwrap().to_str().unwrap());
        // The rows of a query, and so its splits, are unknown before it has run.
        let query = text.contains("\n  sql: ");
        assert_eq!(plan["splits"].as_array().unwrap().is_empty(), query, "{plan}");
        examples += 1;
    }
    assert!(examples >= 2);
}

#[test]
fn output_for_programs_is_clean() {
    let scratch = Scratch::with_corpus(2, 500);
    scratch.job("job.yaml", &job());
    let run = scratch.stillhouse(&["run", "job.yaml", "--json"]).expect(0);
    let events: Vec<Value> = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    for name in ["job_started", "split_started", "split_committed", "job_finished"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    assert_eq!(names.last(), Some(&"job_finished"));
    let last = &events[names.iter().rposition(|name| *name == "progress").unwrap()];
    let stages = last["stages"].as_array().unwrap();
    let named: Vec<&str> = stages.iter().map(|s| s["name"].as_str().unwrap()).collect();
    let all = ["read", "clean", "tokenize", "pack", "extract", "subtokens", "partitions", "write"];
    assert_eq!(named, all);
    let rows = |i: usize| stages[i]["rows"].as_u64().unwrap();
    assert!((0..named.len()).all(|i| rows(i) > 0 && stages[i]["busy_seconds"].as_f64().unwrap() > 0.0), "{last}");
    let committed = |key: &str| -> u64 {
        let of_splits = events.iter().filter(|e| e["event"] == "split_committed");
        of_splits.map(|e| e[key].as_u64().unwrap()).sum()
    };
    assert_eq!((rows(3), rows(all.len() - 1)), (committed("rows"), committed("rows")));
    assert_eq!(last["bytes"].as_u64(), Some(committed("bytes")));
    assert_eq!((&last["store_requests"], &last["store_retries"]), (&Value::from(0), &Value::from(0)));
    for verb in ["inspect", "verify"] {
        assert!(scratch.stillhouse(&[verb, "out", "--json"]).expect(0).json().is_object());
    }
    for arguments in
        [&["inspect", "out"][..], &["verify", "out"], &["plan", "job.yaml"], &["run", "job.yaml", "--overwrite"]]
    {
        let said = scratch.stillhouse(arguments).expect(0);
        assert!(!said.stdout.is_empty());
        assert!(!(said.stdout + &said.stderr).contains('\x1b'), "{arguments:?}");
    }
    let coloured = scratch.stillhouse(&["--color", "always", "inspect", "out"]).expect(0);
    assert!(coloured.stdout.contains('\x1b'));
    let silent = run_command(scratch.command(&["inspect", "out"]).env("NO_COLOR", "1")).expect(0);
    assert!(!silent.stdout.contains('\x1b'));
}
