//! Tests `plan`: it makes all checks of a run and shows the first rows, without leaving a trace.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::SystemTime;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, corpus, files, job, with};

/// Asserts that `plan` shows the rows of the first documents as a run stores them; returns their number.
#[track_caller]
fn assert_sample_is_what_a_run_stores(scratch: &Scratch, job: &Value, documents: u64) -> usize {
    scratch.job("job.yaml", job);
    let before = files(&scratch.path("."));
    let n = documents.to_string();
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--sample", &n, "--json"]).expect(0).json();
    assert_eq!(files(&scratch.path(".")), before, "plan wrote");
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let rows = plan["sample"]["rows"].as_array().unwrap();
    let some = [0, rows.len() / 2, rows.len() - 1].into_iter().collect::<BTreeSet<_>>();
    for (i, row) in some.into_iter().map(|i| (i, &rows[i])) {
        let stored = scratch.stillhouse(&["inspect", "out", "--row", &i.to_string(), "--json"]).expect(0).json();
        assert_eq!(&stored["row"], row, "row {i} of {job}");
    }
    fs::remove_dir_all(scratch.path("out")).unwrap();
    rows.len()
}

#[test]
fn a_sample_is_the_rows_that_the_run_stores() {
    let scratch = Scratch::with_corpus(4, 500);
    let cut = with(job(), &json!({"input": {"split_megabytes": 0.001}}));
    // The first split has fewer documents than requested, and the sample's last row shares a batch with later ones.
    for (remainder, documents) in [("drop", 2), ("keep", 3)] {
        let job = with(cut.clone(), &json!({"pack": {"remainder": remainder}}));
        let rows = assert_sample_is_what_a_run_stores(&scratch, &job, documents);
        assert!(rows >= 3, "{rows} rows, {remainder}");
    }
    let pad = with(
        job(),
        &json!({"pack": {"mode": "pad", "length": 16}, "extract": {"noise": {"codec": "dense"}, "topk": 0}}),
    );
    assert_eq!(assert_sample_is_what_a_run_stores(&scratch, &pad, 2), 2);
    let sql = json!({"input": {"sql": "SELECT upper(text) AS text FROM input ORDER BY id DESC"}, "extract": null, "tokenizer": {"path": stillhouse_tests::byte_tokenizer()}});
    assert!(assert_sample_is_what_a_run_stores(&scratch, &with(job(), &sql), 2) >= 2);
}

#[test]
fn a_sample_is_shown_decoded_with_its_noise() {
    let scratch = Scratch::with_corpus(2, 700);
    scratch.job("job.yaml", &job());
    let shown = scratch.stillhouse(&["plan", "job.yaml", "--sample", "1"]).expect(0).stdout;
    for part in [
        "in the first 1 document\n",
        "Row 0 of data/train-00000-of-00001.parquet",
        "group 0",
        "ln p",
        "Noise blueprints",
    ] {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    assert!(!scratch.path("out").exists());
}

/// Proves that the idle step ratios match MDM-Prime (Table 2 and A.2.4) for 1,024 tokens, with ℓ = 4 at the elbow.
#[test]
fn idle_steps_are_those_of_the_paper() {
    let scratch = Scratch::with_corpus(2, 700);
    let text = json!({"tokenizer": {"path": stillhouse_tests::nano_teacher()}, "pack": {"length": 1024}, "extract": null, "partitions": null, "subtokens": {"length": 2}});
    let steps = |job: &Value| -> Vec<(u64, u64, f64, bool)> {
        scratch.job("job.yaml", job);
        let plan = scratch.stillhouse(&["plan", "job.yaml", "--json"]).expect(0).json();
        let percent = |ratio: &Value| (1e4 * ratio.as_f64().unwrap()).round() / 100.0;
        let steps = plan["idle_steps"].as_array().unwrap().iter();
        steps
            .map(|at| {
                (
                    at["length"].as_u64().unwrap(),
                    at["base"].as_u64().unwrap(),
                    percent(&at["ratio"]),
                    at["elbow"] == true,
                )
            })
            .collect()
    };
    let published = [
        (1, 50_257, 36.77, false),
        (2, 225, 13.52, false),
        (3, 37, 4.97, false),
        (4, 15, 1.83, true),
        (6, 7, 0.25, false),
        (8, 4, 0.03, false),
    ];
    assert_eq!(steps(&with(job(), &text)), published);
    let shown = scratch.stillhouse(&["plan", "job.yaml"]).expect(0).stdout;
    assert!(shown.contains("ℓ 4 (b 15) 1.8 % (elbow)"), "{shown}");
}

/// Path, size and modification time of everything under a folder, to detect traces.
fn state(folder: &std::path::Path) -> Vec<(PathBuf, u64, SystemTime)> {
    let mut found = Vec::new();
    let mut next = vec![folder.to_owned()];
    while let Some(path) = next.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            next.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        found.push((path, meta.len(), meta.modified().unwrap()));
    }
    found.sort();
    found
}

#[test]
fn plan_makes_the_checks_of_run() {
    let scratch = Scratch::with_corpus(2, 300);
    let tokenizer = json!({"extract": null, "tokenizer": {"path": stillhouse_tests::byte_tokenizer()}});
    let plain = with(job(), &tokenizer);
    scratch.write("second.jsonl", "\n{\"body\": 1}\n");
    scratch.write("third.jsonl.gz", "these are not gzip bytes");
    scratch.write("good.jsonl", &corpus(1, 200));
    scratch.write("file", "");
    let mut read_only = vec![(json!({"output": {"path": "/proc/stillhouse"}}), 1, "/proc")];
    if cfg!(not(target_os = "linux")) {
        read_only.clear();
    }
    let mut cases = vec![
        (json!({"input": {"paths": ["good.jsonl", "second.jsonl"]}}), 2, "second.jsonl: line 2: missing column"),
        (json!({"input": {"paths": ["good.jsonl", "third.jsonl.gz"]}}), 2, "third.jsonl.gz"),
        (json!({"output": {"path": "file"}}), 1, "file"),
        (json!({"output": {"path": "file/out"}}), 1, "file is a file; valid: a folder"),
    ];
    cases.append(&mut read_only);
    for (patch, code, says) in cases {
        scratch.job("job.yaml", &with(plain.clone(), &patch));
        let before = state(&scratch.path("."));
        let planned = scratch.stillhouse(&["plan", "job.yaml"]).expect(code).says(&[says]);
        assert_eq!(state(&scratch.path(".")), before);
        // a run refuses it as well
        let ran = scratch.stillhouse(&["run", "job.yaml"]);
        assert_ne!(ran.code, Some(0), "{}", planned.stderr);
    }

    // Bad records may be skipped, but `plan` warns of a file that begins with nothing else.
    let patch = json!({"input": {"paths": ["good.jsonl", "second.jsonl"], "on_error": "skip", "max_skipped": 0.9}});
    scratch.job("job.yaml", &with(plain.clone(), &patch));
    scratch.stillhouse(&["plan", "job.yaml"]).expect(0).says(&["second.jsonl", "missing column"]);

    // an output in use, another job's output, and one to resume
    scratch.job("job.yaml", &plain);
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let before = state(&scratch.path("out"));
    let complete = scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
    assert!(complete.stdout.contains("complete already"), "{}", complete.stdout);
    scratch.job("job.yaml", &with(plain.clone(), &json!({"pack": {"length": 32}})));
    scratch.stillhouse(&["plan", "job.yaml"]).expect(2).says(&["output.path", "another job"]);
    let other = scratch.stillhouse(&["plan", "job.yaml", "--overwrite"]).expect(0);
    assert!(other.stdout.contains("--overwrite removes"), "{}", other.stdout);
    scratch.job("job.yaml", &plain);
    fs::remove_file(scratch.path("out/_SUCCESS")).unwrap();
    let lock = File::open(scratch.path("out/_stillhouse/lock")).unwrap();
    lock.lock().unwrap();
    scratch.stillhouse(&["plan", "job.yaml"]).expect(1).says(&["another run is working on this output"]);
    lock.unlock().unwrap();
    fs::write(scratch.path("out/_SUCCESS"), "").unwrap();
    let files = |state: Vec<(PathBuf, u64, SystemTime)>| -> Vec<_> {
        state.into_iter().filter(|(path, ..)| path.is_file() && !path.ends_with("_SUCCESS")).collect()
    };
    assert_eq!(files(state(&scratch.path("out"))), files(before));
}

/// Sums of the shards of a data set: tokens, and compressed bytes of all columns.
fn tokens_and_bytes(dataset: &std::path::Path) -> (f64, f64) {
    let manifest: Value = serde_json::from_slice(&fs::read(dataset.join("manifest.json")).unwrap()).unwrap();
    let shards = manifest["shards"].as_array().unwrap();
    let tokens: f64 = shards.iter().map(|shard| shard["tokens"].as_f64().unwrap()).sum();
    let bytes =
        |shard: &Value| shard["column_bytes"].as_object().unwrap().values().filter_map(Value::as_f64).sum::<f64>();
    (tokens, shards.iter().map(bytes).sum())
}

#[test]
fn measured_tokens_are_near_those_of_a_run() {
    let scratch = Scratch::new();
    let speeches = corpus(33, 1 << 20);
    let packs = with(job(), &json!({"extract": null, "tokenizer": {"path": stillhouse_tests::byte_tokenizer()}}));
    // The second corpus is larger than what is measured: four parts of a megabyte, each of about twenty speeches. A part
    // counts the speeches that begin in it, so it is wrong by up to one of them.
    for (copies, most_apart) in [(1, 0.001), (5, 0.1)] {
        scratch.write("corpus.jsonl", &speeches.repeat(copies));
        scratch.job("job.yaml", &packs);
        let plan = scratch.stillhouse(&["plan", "job.yaml", "--json"]).expect(0).json();
        scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
        let (tokens, _) = tokens_and_bytes(&scratch.path("out"));
        let measured = &plan["measured_tokens"];
        let value = |key: &str| measured[key].as_f64().unwrap();
        assert!((value("value") / tokens - 1.0).abs() < most_apart, "{copies}: {measured}, made {tokens}");
        assert_eq!(value("low") == value("high"), copies == 1, "a corpus that was read whole has no range: {measured}");
        assert!(value("low") <= value("value") && value("value") <= value("high"), "{measured}");
        let is_inside = value("low") <= tokens && tokens <= value("high");
        assert!(is_inside || copies == 1, "{measured}, made {tokens}");
        fs::remove_dir_all(scratch.path("out")).unwrap();
    }
}

/// No part fills a sequence, so each would drop all its tokens.
#[test]
fn sequences_longer_than_what_is_measured_are_estimated() {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &corpus(33, 1 << 20).repeat(5));
    let long = json!({"extract": null, "subtokens": null, "partitions": null, "tokenizer": {"path": stillhouse_tests::nano_teacher()}, "pack": {"length": 400_000}});
    scratch.job("job.yaml", &with(job(), &long));
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--json"]).expect(0).json();
    let tokens = plan["measured_tokens"]["value"].as_f64().unwrap();
    // about 1,730,000 tokens of text: four sequences
    assert!((1_400_000.0..1_800_000.0).contains(&tokens), "{tokens}");
}

#[test]
fn a_sample_measures_what_the_job_will_take() {
    let scratch = Scratch::with_corpus(6, 4000);
    scratch.job("job.yaml", &job());
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--sample", "3", "--json"]).expect(0).json();
    let shown =
        scratch.stillhouse(&["plan", "job.yaml", "--sample", "3", "--dollars-per-hour", "2.5"]).expect(0).stdout;
    for part in ["Measured\n", "bytes per token", "tokens per second, with the teacher", "data set", "time", "dollars"]
    {
        assert!(shown.contains(part), "{part:?} is not in:\n{shown}");
    }
    // what was measured takes the place of the range of all teachers, before the rows
    assert!(!shown.contains("  estimate  ") && shown.find("Measured\n") < shown.find("Row 0 of"), "{shown}");
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    let (tokens, bytes) = tokens_and_bytes(&scratch.path("out"));
    let measured = &plan["sample"]["measured"];
    let per_token = |key: &str| measured["bytes_per_token"][key].as_f64().unwrap();
    let made = bytes / tokens;
    assert!((per_token("value") / made - 1.0).abs() < 0.2, "{measured}, made {made}");
    assert!(per_token("low") < made && made < per_token("high"), "{measured}, made {made}");
    assert!(measured["tokens_per_second"]["value"].as_f64().unwrap() > 0.0 && measured["devices"] == 1, "{measured}");
    let wrong = scratch.stillhouse(&["plan", "job.yaml", "--sample", "1", "--dollars-per-hour", "free"]).expect(2);
    wrong.says(&["valid: dollars, such as 2.5"]);
}
