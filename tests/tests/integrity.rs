//! Proves that a data set matches its job, or that the run reports why not: changed input, damaged files, other jobs,
//! too many splits.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, byte_tokenizer, files, job, shards, with};

/// A fast job without a teacher over `corpus.jsonl`.
fn small() -> Value {
    let more = json!({
        "input": {"split_megabytes": 0.0015},
        "tokenizer": {"path": byte_tokenizer()},
        "extract": null,
        "subtokens": null,
        "partitions": null
    });
    with(job(), &more)
}

fn scratch() -> Scratch {
    Scratch::with_corpus(7, 1300)
}

/// Simulates a crash: removes the manifest and everything written after it, and the last shards.
fn simulate_crash(out: &Path, lost: usize) {
    for name in ["_SUCCESS", "manifest.json", "README.md", "tokenizer.json"] {
        fs::remove_file(out.join(name)).unwrap();
    }
    let names: Vec<String> = shards(out).into_keys().collect();
    for (split, name) in names.iter().enumerate().rev().take(lost) {
        fs::remove_file(out.join("data").join(name)).unwrap();
        fs::remove_file(out.join(format!("_stillhouse/splits/{split:05}.json"))).unwrap();
    }
}

/// Changes the bytes of a file but not its length, and sets a new modification time.
fn rewrite(path: &Path, change: impl Fn(&mut Vec<u8>)) {
    let before = fs::metadata(path).unwrap();
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    assert_eq!(bytes.len() as u64, before.len());
    fs::write(path, bytes).unwrap();
    touch(path);
}

fn touch(path: &Path) {
    let later = fs::metadata(path).unwrap().modified().unwrap() + Duration::from_secs(7);
    File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
}

/// Offset of the first letter of the text in the n-th line.
fn letter_of_line(bytes: &[u8], line: usize) -> usize {
    let start = bytes.split_inclusive(|b| *b == b'\n').take(line).map(<[u8]>::len).sum::<usize>();
    let text = b"\"text\":\"";
    start + bytes[start..].windows(text.len()).position(|w| w == text).unwrap() + text.len()
}

fn other_letter(line: usize) -> impl Fn(&mut Vec<u8>) {
    move |bytes| {
        let at = letter_of_line(bytes, line);
        bytes[at] = if bytes[at] == b'X' { b'Y' } else { b'X' };
    }
}

/// The files that a run leaves, except the plan with its modification times and the lock.
fn lasting_files(out: &Path) -> BTreeMap<PathBuf, String> {
    files(out).into_iter().filter(|(name, _)| !name.ends_with("plan.json") && !name.ends_with("lock")).collect()
}

#[test]
fn a_thousand_splits_at_once_on_128_threads_come_to_their_end() {
    let scratch = Scratch::new();
    let text = |i: u64| format!("word{i:04} and some more text of it, ").repeat(150);
    let lines: String = (0..1024).map(|i| json!({"text": text(i)}).to_string() + "\n").collect();
    scratch.write("corpus.jsonl", &lines);
    let many = with(small(), &json!({"input": {"split_megabytes": 0.0052}, "clean": {"detokenizer": "wikitext"}}));
    scratch.make(&with(many.clone(), &json!({"engine": {"parallel_splits": 4}})));
    let at_once = json!({"engine": {"parallel_splits": 1024}, "output": {"path": "at-once"}});
    scratch.job("job.yaml", &with(many, &at_once));
    scratch.stillhouse(&["run", "job.yaml", "--quiet", "--threads", "128"]).expect(0);
    let expected = shards(&scratch.path("out"));
    assert!(expected.len() >= 1024, "{}", expected.len());
    assert_eq!(shards(&scratch.path("at-once")), expected);
}

#[test]
fn input_that_changed_between_a_crash_and_the_resume_is_refused_by_name() {
    for sql in [None, Some("SELECT text FROM input")] {
        let scratch = scratch();
        let small = with(small(), &json!({"input": {"sql": sql}}));
        let out = scratch.make(&small);
        simulate_crash(&out, 2);
        let before = files(&out);
        rewrite(&scratch.path("corpus.jsonl"), other_letter(0));
        let says = ["output.path", "corpus.jsonl", "other input", "split 0", "--overwrite"];
        scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(2).says(&says);
        // a query's rows are computed again, which is harmless
        let state = |files: BTreeMap<PathBuf, String>| -> BTreeMap<_, _> {
            files.into_iter().filter(|(name, _)| !name.starts_with("_stillhouse/input")).collect()
        };
        assert_eq!(state(files(&out)), state(before), "a refusal changes nothing");
        scratch.stillhouse(&["run", "job.yaml", "--quiet", "--overwrite"]).expect(0);
        let fresh = with(small, &json!({"output": {"path": "fresh"}}));
        scratch.job("fresh.yaml", &fresh);
        scratch.stillhouse(&["run", "fresh.yaml", "--quiet"]).expect(0);
        assert_eq!(shards(&out), shards(&scratch.path("fresh")));
    }
}

#[test]
fn a_touched_file_and_one_that_changed_where_nothing_was_read_go_on() {
    let scratch = scratch();
    let out = scratch.make(&small());
    simulate_crash(&out, 2);
    // the last line belongs to a split that was not committed
    rewrite(&scratch.path("corpus.jsonl"), other_letter(6));
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    scratch.job("fresh.yaml", &with(small(), &json!({"output": {"path": "fresh"}})));
    scratch.stillhouse(&["run", "fresh.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&out), shards(&scratch.path("fresh")));

    // A finished job only records a touched file's new time, so that it compares the content once.
    let before = lasting_files(&out);
    touch(&scratch.path("corpus.jsonl"));
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    assert_eq!(lasting_files(&out), before);
    let plan: Value = serde_json::from_slice(&fs::read(out.join("_stillhouse/plan.json")).unwrap()).unwrap();
    let modified = fs::metadata(scratch.path("corpus.jsonl")).unwrap().modified().unwrap();
    let modified = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
    assert_eq!(plan["files"][0]["modified_ns"].as_u64(), Some(modified as u64));

    // a finished job whose input file has changed
    rewrite(&scratch.path("corpus.jsonl"), other_letter(3));
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&["corpus.jsonl", "other input"]);
    assert_eq!(lasting_files(&out), before);
}

#[test]
fn the_manifest_says_what_every_split_read() {
    use sha2::{Digest, Sha256};
    let scratch = scratch();
    let out = scratch.make(&small());
    let manifest: Value = serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap();
    let corpus = fs::read_to_string(scratch.path("corpus.jsonl")).unwrap();
    let (mut start, mut starts) = (0_u64, Vec::new());
    for line in corpus.split_inclusive('\n') {
        let text = serde_json::from_str::<Value>(line).unwrap()["text"].as_str().unwrap().to_owned();
        starts.push((start, text));
        start += line.len() as u64;
    }
    let mut compared = 0;
    for (shard, split) in manifest["shards"].as_array().unwrap().iter().zip(manifest["splits"].as_array().unwrap()) {
        for (sum, piece) in shard["input_sha256"].as_array().unwrap().iter().zip(split["pieces"].as_array().unwrap()) {
            let range = &piece["range"]["bytes"];
            let (from, to) = (range["start"].as_u64().unwrap(), range["end"].as_u64().unwrap());
            let mut sha = Sha256::new();
            for (_, text) in starts.iter().filter(|(at, _)| (from..to).contains(at)) {
                sha.update((text.len() as u64).to_le_bytes());
                sha.update(text);
            }
            let expected: String = sha.finalize().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(sum, &expected);
            compared += 1;
        }
    }
    assert!(compared >= 6, "{compared}");
}

/// A way to damage a file.
type Damage = (&'static str, fn(&Path));

const DAMAGES: [Damage; 4] = [
    ("removed", |path| fs::remove_file(path).unwrap()),
    ("emptied", |path| fs::write(path, "").unwrap()),
    ("cut off", |path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    }),
    ("flipped", |path| {
        let mut bytes = fs::read(path).unwrap();
        let at = bytes.len() / 3;
        bytes[at] ^= 0x10;
        fs::write(path, bytes).unwrap();
    }),
];

#[test]
fn whatever_is_damaged_in_a_finished_data_set_is_reported_and_mended_to_the_same_bytes() {
    let scratch = scratch();
    let out = scratch.make(&small());
    let whole = lasting_files(&out);
    let first: Vec<&PathBuf> = whole.keys().filter(|name| name.starts_with("data")).take(1).collect();
    let records: Vec<&PathBuf> = whole.keys().filter(|name| name.starts_with("_stillhouse/splits")).take(1).collect();
    let (plan, others) = (PathBuf::from("_stillhouse/plan.json"), ["manifest.json", "README.md", "tokenizer.json"]);
    let others: Vec<PathBuf> = others.iter().map(PathBuf::from).collect();
    for name in first.into_iter().chain(records).chain(&others).chain([&plan]) {
        for (how, harm) in DAMAGES {
            if name.ends_with("README.md") && !["removed", "emptied"].contains(&how) {
                // people edit their card
                continue;
            }
            let shown = format!("{} {how}", name.display());
            harm(&out.join(name));
            if name.starts_with("data") {
                let check = if how == "flipped" { &["run", "job.yaml", "--check"][..] } else { &["run", "job.yaml"] };
                let reported = scratch.stillhouse(check).expect(1);
                reported.says(&[name.to_str().unwrap(), "stillhouse repair", "job.yaml"]);
                let found = scratch.stillhouse(&["verify", "out"]).expect(1);
                assert!(found.stdout.contains("stillhouse repair out job.yaml"), "{shown}: {}", found.stdout);
            }
            let ran = scratch.stillhouse(&["repair", "out", "job.yaml", "--json"]);
            assert_eq!(ran.code, Some(0), "{shown}: {}", ran.stderr);
            if name.starts_with("data") {
                assert_eq!(ran.json()["remade"], json!([name.to_str().unwrap()]), "{shown}");
            }
            assert_eq!(lasting_files(&out), whole, "{shown}");
            assert!(out.join("_stillhouse/plan.json").is_file(), "{shown}");
            scratch.stillhouse(&["run", "job.yaml", "--quiet", "--check"]).expect(0);
        }
    }
    scratch.stillhouse(&["verify", "out"]).expect(0);
    let sound = scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert!(sound.stdout.contains("nothing is damaged"), "{}", sound.stdout);
}

#[test]
fn a_run_does_not_call_a_set_without_its_manifest_complete_and_makes_no_shard_again_for_it() {
    let scratch = scratch();
    let out = scratch.make(&small());
    let whole = lasting_files(&out);
    for (how, harm) in DAMAGES {
        harm(&out.join("manifest.json"));
        scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
        assert_eq!(lasting_files(&out), whole, "{how}");
    }
}

#[test]
fn a_shard_that_was_damaged_before_a_resume_is_made_again_before_the_end() {
    let scratch = scratch();
    let out = scratch.make(&small());
    let whole = lasting_files(&out);
    for (how, harm) in DAMAGES {
        simulate_crash(&out, 2);
        let shard = out.join("data").join(shards(&out).into_keys().next().unwrap());
        harm(&shard);
        let ran = scratch.stillhouse(&["run", "job.yaml", "--json"]).expect(0);
        let events = ran.stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let progress = events.rev().find(|event| event["event"] == "progress").unwrap();
        assert_eq!(progress["splits_done"], progress["splits"], "{how}: {progress}");
        if how == "flipped" {
            let warning = ran.stdout.lines().find(|line| line.contains("warning")).unwrap();
            for part in ["train-00000-of-", "sha256", "made again"] {
                assert!(warning.contains(part), "{part:?} is not in {warning}");
            }
        }
        assert_eq!(lasting_files(&out), whole, "{how}");
    }
}

#[test]
fn a_shard_that_comes_out_otherwise_is_not_published() {
    let scratch = scratch();
    let out = scratch.make(&small());
    let name = shards(&out).into_keys().next().unwrap();
    let shard = out.join("data").join(&name);

    // The records claim other bytes, as if another program had made the shard.
    let replaced = |path: &Path, from: &str, to: &str| {
        fs::write(path, fs::read_to_string(path).unwrap().replace(from, to)).unwrap();
    };
    let truth = shards(&out)[&name].clone();
    let other = truth.chars().rev().collect::<String>();
    for file in ["manifest.json", "_stillhouse/splits/00000.json"] {
        replaced(&out.join(file), &truth, &other);
    }
    fs::remove_file(&shard).unwrap();
    let left = lasting_files(&out);
    let refused = scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(1);
    refused.says(&[&name, &truth, &other, "another type of CPU", "run --overwrite"]);
    assert_eq!(lasting_files(&out), left);
    for file in ["manifest.json", "_stillhouse/splits/00000.json"] {
        replaced(&out.join(file), &other, &truth);
    }

    // the input has changed
    rewrite(&scratch.path("corpus.jsonl"), other_letter(0));
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(1).says(&[&name, "its input has changed"]);
    assert!(!shard.exists());
    rewrite(&scratch.path("corpus.jsonl"), |bytes| {
        let original = fs::read(scratch.path("original.jsonl"));
        bytes.copy_from_slice(&original.unwrap_or_else(|_| stillhouse_tests::corpus(7, 1300).into_bytes()));
    });
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&out)[&name], truth);

    // another job's data set, or none
    scratch.job("other.yaml", &with(small(), &json!({"pack": {"length": 32}})));
    scratch.stillhouse(&["repair", "out", "other.yaml"]).expect(2).says(&["another job", "pack.length: 64 there, 32"]);
    scratch.stillhouse(&["repair", "nowhere", "job.yaml"]).expect(1).says(&["nowhere", "no data set"]);
}

#[test]
fn damaged_state_is_reported_by_file_with_what_mends_it() {
    let scratch = scratch();
    let out = scratch.make(&small());
    simulate_crash(&out, 2);
    let whole = files(&out);
    for name in ["_stillhouse/plan.json", "_stillhouse/splits/00001.json"] {
        fs::write(out.join(name), "{\"job_hash\": ").unwrap();
        let refused = scratch.stillhouse(&["run", "job.yaml"]).expect(1);
        refused.says(&[name, "is damaged", "stillhouse repair ./out JOB.yaml"]);
        scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
        scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
        assert!(whole.keys().all(|name| out.join(name).exists()), "{name}");
        scratch.stillhouse(&["verify", "out"]).expect(0);
        simulate_crash(&out, 2);
    }

    // a record with a wrong checksum: the shard is not published
    let record = out.join("_stillhouse/splits/00000.json");
    let truth = shards(&out).into_values().next().unwrap();
    let other = truth.chars().rev().collect::<String>();
    fs::write(&record, fs::read_to_string(&record).unwrap().replace(&truth, &other)).unwrap();
    scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&["00000", &truth, &other]);
    assert!(!out.join("_SUCCESS").exists());
}

#[test]
fn another_job_is_reported_by_field_and_by_file() {
    let scratch = scratch();
    scratch.write("second.jsonl", &stillhouse_tests::corpus(1, 300));
    let out = scratch.make(&small());
    let before = files(&out);
    let refused = |change: Value, says: &[&str]| {
        scratch.job("other.yaml", &with(small(), &change));
        let ran = scratch.stillhouse(&["run", "other.yaml"]).expect(2);
        let lost = format!("{} shards", shards(&out).len());
        assert!(ran.stderr.lines().count() < 40);
        ran.says(says).says(&["another job", "would be lost", &lost, "--overwrite"]);
        assert_eq!(files(&out), before);
    };
    refused(json!({"seed": 7}), &["seed: 42 there, 7 in this job"]);
    refused(json!({"pack": {"length": 32}}), &["pack.length: 64 there, 32 in this job"]);
    refused(json!({"subtokens": {"length": 4}}), &["subtokens.length: nothing there, 4 in this job"]);
    let paths = json!({"input": {"paths": ["second.jsonl", "corpus.jsonl"]}});
    refused(paths, &["input second.jsonl: not there, ", " bytes in this job"]);
    refused(json!({"input": {"paths": ["second.jsonl"]}}), &["input corpus.jsonl: ", "bytes there, not in this job"]);
    fs::write(scratch.path("corpus.jsonl"), stillhouse_tests::corpus(7, 1200)).unwrap();
    refused(json!({}), &["input corpus.jsonl: ", "bytes there, ", "bytes in this job"]);
}

#[test]
fn what_only_says_where_things_lie_is_not_another_job() {
    let scratch = Scratch::with_corpus(3, 700);
    for name in ["a", "b", "moved", "teachers", "tokenizers"] {
        fs::create_dir(scratch.path(name)).unwrap();
    }
    let lines: Vec<String> = stillhouse_tests::corpus(3, 700).lines().map(|l| format!("{l}\n")).collect();
    fs::write(scratch.path("a/1.jsonl"), &lines[0]).unwrap();
    fs::write(scratch.path("b/2.jsonl"), lines[1..].concat()).unwrap();
    let job = with(job(), &json!({"input": {"paths": ["a/*.jsonl", "b/*.jsonl"]}}));
    let out = scratch.make(&job);
    let whole = lasting_files(&out);
    let same = |change: Value| {
        scratch.job("other.yaml", &with(job.clone(), &change));
        let ran = scratch.stillhouse(&["run", "other.yaml"]).expect(0);
        assert!(ran.stdout.contains("complete already"), "{}", ran.stdout);
        assert_eq!(lasting_files(&out), whole);
    };
    // other spellings of the same paths
    same(json!({"input": {"paths": ["a/1.jsonl", "./b/"]}, "name": "another-name", "engine": {"parallel_splits": 3}}));
    same(json!({"input": {"paths": [scratch.path("a/1.jsonl"), "b/../b/2.jsonl"]}}));
    // teacher and tokenizer at other paths
    let teacher = stillhouse_tests::byte_teacher();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(teacher.join(name), scratch.path("teachers").join(name)).unwrap();
    }
    same(json!({"extract": {"teacher": {"path": "teachers"}}}));
    same(json!({"tokenizer": {"path": teacher.join("tokenizer.json")}}));
    // corpus and output moved, and one shard lost
    for folder in ["a", "b"] {
        fs::rename(scratch.path(folder), scratch.path("moved").join(folder)).unwrap();
    }
    let paths = json!({"input": {"paths": ["moved/a/*", "moved/b/*"]}});
    same(paths.clone());
    simulate_crash(&out, 1);
    scratch.stillhouse(&["run", "other.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&out).len(), whole.keys().filter(|name| name.starts_with("data")).count());
    scratch.stillhouse(&["verify", "out"]).expect(0);

    // but the teacher's content counts
    let config = fs::read_to_string(scratch.path("teachers/config.json")).unwrap();
    fs::write(scratch.path("teachers/config.json"), config.replacen('{', "{ ", 1)).unwrap();
    scratch.job("other.yaml", &with(with(job.clone(), &paths), &json!({"extract": {"teacher": {"path": "teachers"}}})));
    scratch.stillhouse(&["run", "other.yaml"]).expect(2).says(&["teacher.sha256.config.json: "]);
}

#[test]
fn nothing_behind_a_link_in_an_output_is_written_or_removed() {
    let scratch = scratch();
    scratch.job("job.yaml", &small());
    let precious = scratch.path("precious");
    fs::create_dir_all(precious.join("deep")).unwrap();
    for file in ["a.parquet", "part-00000.parquet", "staged.json", "deep/b"] {
        fs::write(precious.join(file), "precious").unwrap();
    }
    let is_whole = |when: &str| {
        let found = files(&precious);
        assert_eq!(found.len(), 4, "{when}: {found:?}");
        assert!(found.keys().all(|file| fs::read(precious.join(file)).unwrap() == b"precious"), "{when}");
    };
    let out = scratch.path("out");
    let verbs: [&[&str]; 6] = [
        &["run", "job.yaml"],
        &["run", "job.yaml", "--overwrite"],
        &["run", "job.yaml", "--append"],
        &["repair", "out", "job.yaml"],
        &["clean", "out"],
        &["export", "copy", "out"],
    ];
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    scratch.stillhouse(&["export", "out", "copy", "--quiet"]).expect(0);
    let folders = [
        "_stillhouse/input",
        "_stillhouse/staging",
        "_stillhouse/splits",
        "_stillhouse/workers",
        "data",
        "_stillhouse",
    ];
    for folder in folders {
        let (inside, aside) = (out.join(folder), scratch.path("aside"));
        if inside.exists() {
            fs::rename(&inside, &aside).unwrap();
        }
        std::os::unix::fs::symlink(&precious, &inside).unwrap();
        // every verb for one folder, and for every folder the verb that removes most
        for verb in verbs.iter().filter(|verb| folder == "_stillhouse/input" || verb.contains(&"--overwrite")) {
            let when = format!("{folder} {verb:?}");
            let ran = scratch.stillhouse(verb);
            is_whole(&when);
            assert_ne!(ran.code, Some(0), "{when}: {}", ran.stderr);
            assert!(folder == "_stillhouse" || ran.stderr.contains("is a link to"), "{when}: {}", ran.stderr);
        }
        fs::remove_file(&inside).unwrap();
        if aside.exists() {
            fs::rename(&aside, &inside).unwrap();
        }
    }
}
