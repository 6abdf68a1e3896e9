//! Tests `run --append`: it makes splits of new input files and leaves existing shards byte for byte unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::s3::ADMIN;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, byte_tokenizer, corpus, files, job, repetitions, shards, with};

use crate::resume::{count_shards, uniform_draws};
use crate::stores::{User, shards_in};

/// A job over all files of the folder `in`, without a teacher.
pub(crate) fn small() -> Value {
    let more = json!({
        "input": {"paths": ["in/*.jsonl"], "split_megabytes": 0.0015},
        "tokenizer": {"path": byte_tokenizer()},
        "extract": null
    });
    with(job(), &more)
}

/// Nine speeches to distribute over files.
fn speeches() -> Vec<String> {
    corpus(9, 1300).lines().map(|line| format!("{line}\n")).collect()
}

pub(crate) fn scratch(job: &Value) -> Scratch {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in")).unwrap();
    scratch.write("in/m.jsonl", &speeches()[..3].concat());
    scratch.make(job);
    scratch
}

/// Adds one file that sorts before the existing one, and one after it.
pub(crate) fn grow(scratch: &Scratch) {
    scratch.write("in/a.jsonl", &speeches()[3..5].concat());
    scratch.write("in/z.jsonl", &speeches()[5..8].concat());
}

fn manifest(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("manifest.json")).unwrap()).unwrap()
}

/// Asserts that every earlier shard still exists with the same name and bytes.
#[track_caller]
fn assert_kept(before: &BTreeMap<String, String>, out: &Path) {
    let now = shards(out);
    for (name, sha256) in before {
        assert_eq!(now.get(name), Some(sha256), "{name}");
    }
}

/// The input and content of each shard, without split numbers; omits the first `skip` shards.
fn content(out: &Path, skip: usize) -> Vec<Value> {
    let of = |shard: &Value| json!([shard["input_sha256"], shard["rows"], shard["tokens"], shard["statistics"]]);
    manifest(out)["shards"].as_array().unwrap().iter().skip(skip).map(of).collect()
}

#[test]
fn new_files_become_further_splits_and_nothing_else_changes() {
    let job = with(job(), &json!({"input": {"paths": ["in/*.jsonl"], "split_megabytes": 0.0015}}));
    let scratch = scratch(&job);
    let out = scratch.path("out");
    let (before, was) = (shards(&out), manifest(&out));
    let records: Vec<_> = files(&out.join("_stillhouse/splits")).into_iter().collect();
    grow(&scratch);
    // The input has changed, so a run without `--append` is refused.
    scratch.stillhouse(&["run", "job.yaml"]).expect(2).says(&[
        "another job",
        "input a.jsonl: not there",
        "`run --append`",
    ]);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--overwrite"]).expect(2);
    assert_eq!(shards(&out), before);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    assert_kept(&before, &out);
    let now_records = files(&out.join("_stillhouse/splits"));
    records.iter().for_each(|(name, sha256)| assert_eq!(now_records.get(name), Some(sha256), "{}", name.display()));

    // New splits come after the old ones in number, name and id; their files are in listing order.
    let now = manifest(&out);
    let (old, all) = (was["splits"].as_array().unwrap(), now["splits"].as_array().unwrap());
    assert_eq!(&all[..old.len()], &old[..]);
    let new: Vec<(u64, &str, u64)> = all[old.len()..]
        .iter()
        .map(|s| {
            let file = s["pieces"][0]["file"].as_str().unwrap();
            (s["split"].as_u64().unwrap(), file.rsplit('/').next().unwrap(), s["appended"].as_u64().unwrap())
        })
        .collect();
    let count = all.len() - old.len();
    assert_eq!(new.first().map(|s| (s.0, s.1, s.2)), Some((old.len() as u64, "a.jsonl", 1)), "{new:?}");
    assert_eq!(new.last().map(|s| (s.0, s.1, s.2)), Some(((old.len() + count - 1) as u64, "z.jsonl", 1)), "{new:?}");
    let name = format!("train-{:05}-of-{:05}.parquet", old.len(), all.len());
    assert!(shards(&out).contains_key(&name), "{name} {:?}", shards(&out));
    assert_eq!(now["appended"], json!([{"to": was["job_hash"], "files": ["a.jsonl", "z.jsonl"]}]));
    assert_eq!(now["statistics"]["documents"], 8);

    // the whole is an ordinary data set
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    scratch.stillhouse(&["inspect", "out", "--row", "0"]).expect(0);
    let rows = scratch.stillhouse(&["inspect", "out", "--json"]).expect(0).json();
    assert!(rows.is_object());
    let before = files(&out);
    for arguments in [&["run", "job.yaml"][..], &["run", "job.yaml", "--append"], &["run", "job.yaml", "--check"]] {
        let again = scratch.stillhouse(arguments).expect(0);
        assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    }
    assert_eq!(files(&out), before);
    let plan = scratch.stillhouse(&["plan", "job.yaml", "--json"]).expect(0).json();
    assert_eq!((&plan["output"]["found"], &plan["job_hash"]), (&json!("complete"), &now["job_hash"]));
    assert_eq!(plan["splits"].as_array().unwrap(), all);
}

/// Proves that `plan --append` shows what `run --append` makes, and leaves no trace.
#[test]
fn a_plan_with_append_is_what_the_append_makes() {
    let scratch = scratch(&with(small(), &json!({"orders": progressive()})));
    let out = scratch.path("out");
    let plan = || scratch.stillhouse(&["plan", "job.yaml", "--append", "--json"]).expect(0).json();
    // nothing new: the plan of the job
    assert_eq!((&plan()["output"]["found"], &plan()["splits"]), (&json!("complete"), &manifest(&out)["splits"]));
    grow(&scratch);
    let before = files(&scratch.path("."));
    let planned = plan();
    let shown = scratch.stillhouse(&["plan", "job.yaml", "--append"]).expect(0).stdout;
    assert_eq!(files(&scratch.path(".")), before, "plan wrote");
    let old = manifest(&out)["splits"].as_array().unwrap().len();
    let new = planned["splits"].as_array().unwrap().len() - old;
    assert!(
        new > 1 && shown.contains(&format!("a run with --append adds {new} splits to the {old} that are there")),
        "{shown}"
    );
    assert_eq!((&planned["output"]["found"], &planned["output"]["splits_done"]), (&json!("grows"), &json!(old)));
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let now = manifest(&out);
    assert_eq!((&planned["splits"], &planned["job_hash"]), (&now["splits"], &now["job_hash"]));
    // Appended splits have places after the existing ones, which `verify` checks.
    let place = |n: usize| &now["splits"][n]["place"];
    let end = |n: usize| place(n)["first"].as_u64().unwrap() + place(n)["sequences"].as_u64().unwrap();
    (1..old + new).for_each(|n| assert_eq!(place(n)["first"], end(n - 1), "{n}"));
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.stillhouse(&["plan", "job.yaml", "--append", "--overwrite"]).expect(2);
    // a changed old file is reported before anything is planned
    scratch.write("in/m.jsonl", &speeches()[..2].concat());
    scratch.write("in/zz.jsonl", &speeches()[8..].concat());
    scratch.stillhouse(&["plan", "job.yaml", "--append"]).expect(2).says(&["cannot be appended to", "m.jsonl has"]);
}

fn progressive() -> Value {
    json!({"kind": "progressive", "schedule": {"i_ar_sequences": 4, "i_perm_sequences": 40, "rho_max": 8}})
}

#[test]
fn what_is_appended_is_what_a_job_over_the_new_files_makes() {
    let scratch = scratch(&small());
    let old = shards(&scratch.path("out")).len();
    grow(&scratch);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    scratch.write("in/m.jsonl", "");
    scratch.make(&with(small(), &json!({"output": {"path": "alone"}})));
    assert_eq!(content(&scratch.path("out"), old), content(&scratch.path("alone"), 0));
}

#[test]
fn it_goes_on_growing_and_kills_change_no_byte() {
    let scratch = scratch(&small());
    let out = scratch.path("out");
    grow(&scratch);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let base = scratch.path("base");
    copy(&out, &base);
    // A second folder changes the names of all files, which are relative to their common folder.
    fs::create_dir_all(scratch.path("in2")).unwrap();
    scratch.write("in2/b.jsonl", &speeches()[3..9].concat());
    let job = with(small(), &json!({"input": {"paths": ["in2/*.jsonl", "in/*.jsonl"]}}));
    scratch.job("job.yaml", &job);
    let began = Instant::now();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let duration = began.elapsed();
    assert_kept(&shards(&base), &out);
    let (expected, whole) = (shards(&out), fs::read(out.join("manifest.json")).unwrap());
    let appended = manifest(&out)["appended"].clone();
    assert_eq!(
        (&appended[0]["files"], &appended[1]["files"]),
        (&json!(["in/a.jsonl", "in/z.jsonl"]), &json!(["in2/b.jsonl"]))
    );
    scratch.stillhouse(&["verify", "out"]).expect(0);

    let (mut kills, mut midway, mut moments) = (0, 0, uniform_draws(5));
    while kills < repetitions(6, 40) {
        fs::remove_dir_all(&out).unwrap();
        copy(&base, &out);
        let arguments = ["run", "job.yaml", "--append", "--quiet"];
        let mut run = scratch.command(&arguments).stdin(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + duration.mul_f64(moments.next().unwrap());
        let before = count_shards(&base);
        // every second kill comes at a random moment, the others right after a commit
        while run.try_wait().unwrap().is_none() {
            let due = if kills % 2 == 0 { Instant::now() >= deadline } else { count_shards(&out) > before };
            if due {
                run.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        kills += 1;
        midway += usize::from((before + 1..expected.len()).contains(&count_shards(&out)));
        assert_kept(&shards(&base), &out);
        // Once the append is in the plan, a run resumes with or without `--append`.
        let planned = hash_of_plan(&out) != manifest(&base)["job_hash"];
        let words = if planned && kills % 2 == 0 { 3 } else { 4 };
        scratch.stillhouse(&["run", "job.yaml", "--quiet", "--append"][..words]).expect(0);
        assert_eq!(shards(&out), expected);
        assert_eq!(fs::read(out.join("manifest.json")).unwrap(), whole);
    }
    assert!(midway > 0, "no kill fell between the first and the last commit");
}

/// The job hash in the plan of an output.
fn hash_of_plan(out: &Path) -> Value {
    let plan: Value = serde_json::from_slice(&fs::read(out.join("_stillhouse/plan.json")).unwrap()).unwrap();
    plan["job_hash"].clone()
}

pub(crate) fn copy(from: &Path, to: &Path) {
    for name in files(from).into_keys() {
        fs::create_dir_all(to.join(&name).parent().unwrap()).unwrap();
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

#[test]
fn an_append_that_failed_is_taken_back_or_made_of_what_is_there_by_then() {
    let strict = with(small(), &json!({"input": {"on_error": "fail"}}));
    let scratch = scratch(&strict);
    let out = scratch.path("out");
    let kept = |out: &Path| {
        let mut kept = files(out);
        // the plan records modification times of files
        kept.retain(|name, _| !name.ends_with("plan.json"));
        kept
    };
    let before = kept(&out);
    scratch.write("in/z.jsonl", &(speeches()[5..8].concat() + "{\"text\": 7}\n"));
    let failed = scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(1);
    assert!(failed.stderr.contains("z.jsonl"), "{}", failed.stderr);
    // without the file, the data set is as before
    fs::rename(scratch.path("in/z.jsonl"), scratch.path("z.bad")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(2).says(&["another job"]);
    scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(0).says(&["taken back"]);
    assert_eq!(kept(&out), before);
    // With the file mended, the bytes equal those of an append that never failed.
    fs::rename(scratch.path("z.bad"), scratch.path("in/z.jsonl")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(1);
    scratch.write("in/z.jsonl", &speeches()[5..8].concat());
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let (mended, whole) = (shards(&out), manifest(&out));
    fs::remove_dir_all(&out).unwrap();
    fs::rename(scratch.path("in/z.jsonl"), scratch.path("z")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    fs::rename(scratch.path("z"), scratch.path("in/z.jsonl")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    assert_eq!((shards(&out), manifest(&out)), (mended, whole));
}

#[test]
fn holdouts_stay_what_the_first_run_made_them() {
    let holdout = json!({"input": {"holdout": {
        "tail": {"last_documents": 1}, "test": {"documents": 1}, "validation": {"share": 0.3}
    }}, "pack": {"length": 16}});
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in")).unwrap();
    let text = |i: u64| {
        json!({"text": format!("document {i} with a few words of its own, and some more, so that it fills a row")})
            .to_string()
            + "\n"
    };
    scratch.write("in/m.jsonl", &(0..40).map(text).collect::<String>());
    let out = scratch.make(&with(small(), &holdout));
    let was = manifest(&out);
    // The same documents again go to the same data set splits as their copies, except the tail.
    fs::copy(scratch.path("in/m.jsonl"), scratch.path("in/n.jsonl")).unwrap();
    let run = scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(0);
    run.says(&["input.holdout.tail.last_documents"]);
    let now = manifest(&out);
    let documents = |manifest: &Value, name: &str| -> u64 {
        let shards = manifest["shards"].as_array().unwrap().iter();
        shards.filter(|s| s["dataset_split"] == name).map(|s| s["statistics"]["documents"].as_u64().unwrap()).sum()
    };
    for name in ["test", "validation"] {
        let was = documents(&was, name);
        assert!((2 * was..=2 * was + 1).contains(&documents(&now, name)), "{name}");
    }
    assert_eq!((documents(&was, "tail"), documents(&now, "tail")), (1, 1));
    let all = |manifest: &Value| manifest["statistics"]["documents"].as_u64().unwrap();
    assert_eq!((all(&was), all(&now)), (40, 80));
    let names: BTreeSet<String> = shards(&out).into_keys().collect();
    assert!(names.contains("tail-00000-of-00001.parquet") && names.iter().any(|n| n.starts_with("test-00001-of-")));
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn what_cannot_be_appended_to_is_refused_and_stays() {
    let scratch = scratch(&small());
    let out = scratch.path("out");
    let before = files(&out);
    grow(&scratch);
    let refused = |says: &[&str]| {
        scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(2).says(says);
        assert_eq!(files(&out), before);
    };
    let text = fs::read_to_string(scratch.path("in/m.jsonl")).unwrap();
    // an old input file that is longer, changed with equal size, or missing
    scratch.write("in/m.jsonl", &(text.clone() + &speeches()[8]));
    refused(&["output.path", "cannot be appended to", "m.jsonl has", "it had"]);
    scratch.write("in/m.jsonl", &text.replacen("the", "eht", 1));
    refused(&["output.path", "made of other input", "m.jsonl"]);
    fs::remove_file(scratch.path("in/m.jsonl")).unwrap();
    refused(&["cannot be appended to", "m.jsonl is not in this job"]);
    scratch.write("in/m.jsonl", &text);
    // another job
    scratch.job("job.yaml", &with(small(), &json!({"seed": 43})));
    refused(&["another job", "seed: 42 there, 43 in this job"]);
    let sql = json!({"input": {"sql": "SELECT text FROM corpus", "paths": null, "format": null, "tables": {"corpus": {"format": "jsonl", "paths": ["in/*.jsonl"]}}}});
    scratch.job("job.yaml", &with(small(), &sql));
    refused(&["--append: input.sql"]);
    // a shard damaged since
    scratch.job("job.yaml", &small());
    let (shard, _) = shards(&out).pop_first().unwrap();
    let bytes = fs::read(out.join("data").join(&shard)).unwrap();
    fs::write(out.join("data").join(&shard), &bytes[1..]).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(1).says(&[&shard, "stillhouse repair"]);
    fs::write(out.join("data").join(&shard), &bytes).unwrap();
    // an unfinished data set
    let success = fs::read(out.join("_SUCCESS")).unwrap();
    fs::remove_file(out.join("_SUCCESS")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(2).says(&["is not finished"]);
    fs::write(out.join("_SUCCESS"), success).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    // Files of different appends may be listed in another order; the first files among themselves may not.
    let reordered = json!({"input": {"paths": ["in/z.jsonl", "in/m.jsonl", "in/a.jsonl"]}});
    scratch.job("job.yaml", &with(small(), &reordered));
    let again = scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
}

#[test]
fn nothing_new_an_empty_file_and_nothing_there() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("in")).unwrap();
    scratch.write("in/m.jsonl", &speeches()[..3].concat());
    scratch.job("job.yaml", &small());
    // the first run of a command that runs every night
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let out = scratch.path("out");
    let before = shards(&out);
    let again = scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
    scratch.write("in/n.jsonl", "");
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    assert_eq!(shards(&out), before);
    assert_eq!(manifest(&out)["appended"][0]["files"], json!(["n.jsonl"]));
    scratch.stillhouse(&["verify", "out"]).expect(0);
    let again = scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    assert!(again.stdout.contains("complete already"), "{}", again.stdout);
}

#[test]
fn what_is_lost_of_a_grown_data_set_is_made_again() {
    let scratch = scratch(&small());
    let out = scratch.path("out");
    grow(&scratch);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let before = files(&out);
    let (all, names) = (shards(&out), shards(&out).into_keys().collect::<Vec<_>>());
    let (first, last) = (&names[0], &names[names.len() - 1]);
    fs::remove_file(out.join("data").join(first)).unwrap();
    fs::remove_file(out.join("data").join(last)).unwrap();
    fs::remove_file(out.join("_stillhouse/splits/00000.json")).unwrap();
    fs::remove_file(out.join("_stillhouse/plan.json")).unwrap();
    scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
    assert_eq!(shards(&out), all);
    let plan = |files: &BTreeMap<std::path::PathBuf, String>| files.get(Path::new("_stillhouse/plan.json")).cloned();
    assert_eq!(plan(&files(&out)), plan(&before));
    scratch.stillhouse(&["run", "job.yaml", "--check", "--quiet"]).expect(0);
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn a_bucket_that_grows_makes_what_a_folder_makes() {
    let scratch = scratch(&small());
    grow(&scratch);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    let expected = shards(&scratch.path("out"));

    let weed = Seaweed::start();
    let s3 = weed.s3();
    weed.create_bucket("corpora");
    weed.create_bucket("shards");
    let put = |name: &str| s3.put("corpora", &format!("in/{name}"), &fs::read(scratch.path("in").join(name)).unwrap());
    let user = User { scratch: &scratch, endpoint: weed.endpoint().to_owned(), keys: ADMIN };
    let remote = json!({
        "input": {"paths": ["s3://corpora/in/*.jsonl"]},
        "output": {"path": "s3://shards/set"},
        "storage": {"endpoint": weed.endpoint(), "path_style": true}
    });
    put("m.jsonl");
    user.job(&with(small(), &remote)).expect(0);
    let before = shards_in(&s3, "shards", "set");
    put("a.jsonl");
    put("z.jsonl");
    user.run(&["run", "job.yaml"]).expect(2).says(&["`run --append`"]);
    assert_eq!(shards_in(&s3, "shards", "set"), before);
    user.run(&["run", "job.yaml", "--append"]).expect(0);
    assert_eq!(shards_in(&s3, "shards", "set"), expected);
    assert_eq!(s3.list_multipart_uploads("shards"), []);
    user.run(&["export", "s3://shards/set", "copy"]).expect(0);
    assert_eq!(shards(&scratch.path("copy")), expected);
    scratch.stillhouse(&["verify", "copy"]).expect(0);
}

#[test]
fn a_lost_shard_and_a_new_file_have_a_way_out() {
    let scratch = scratch(&small());
    let out = scratch.path("out");
    let before = shards(&out);
    grow(&scratch);
    for lost in ["data", "manifest.json"] {
        match lost {
            "data" => {
                let name = before.keys().find(|name| name.contains("train-")).unwrap();
                fs::remove_file(out.join("data").join(Path::new(name).file_name().unwrap())).unwrap();
                // the append's error names the repair command, which the test runs
                scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(1).says(&["repair"]);
            }
            file => fs::remove_file(out.join(file)).unwrap(),
        }
        scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
        assert_eq!(shards(&out), before, "{lost}");
        scratch.stillhouse(&["verify", "out"]).expect(0);
    }
    scratch.stillhouse(&["run", "job.yaml", "--append"]).expect(0);
    assert!(shards(&out).len() > before.len());
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn an_output_that_the_input_would_find_is_refused() {
    let scratch = scratch(&small());
    let inside = with(small(), &json!({"input": {"paths": ["in"]}, "output": {"path": "in/out"}}));
    scratch.job("job.yaml", &inside);
    for verb in [&["plan", "job.yaml"][..], &["run", "job.yaml"][..]] {
        scratch.stillhouse(verb).expect(2).says(&["input.paths[0]", "would find the job's own output"]);
        assert!(!scratch.path("in/out").exists());
    }
}
