//! What this version does with what earlier versions wrote. `tests/releases/VERSION` holds a sample of each released
//! version: two job files, their inputs, their data sets, and the database of a service.
//!
//! ```text
//!   tests/releases/VERSION/   job files, in/, tokenizer.json, noise/ (with a teacher), packed/ (without), service.sqlite
//!        └─► a copy in a scratch folder ─► plan, run, verify, inspect, derive, append, export; serve
//! ```
//!
//! Before a release, `keep_a_sample_of_this_version` writes the sample of its version. A sample is never changed.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stillhouse_tests::service::Service;
use stillhouse_tests::{Scratch, job, root, shards, with};

/// Environment variable of the samples' job files: the folder of the teacher.
const TEACHER: &str = "STILLHOUSE_SAMPLE_TEACHER";

/// Name of the service's database in its data folder.
const DATABASE: &str = "service.sqlite";

/// The teacher of the samples.
fn teacher() -> PathBuf {
    root().join("operators/teacher/testdata/llama-gqa")
}

fn releases() -> PathBuf {
    root().join("tests/releases")
}

/// The samples, one folder per version.
fn samples() -> Vec<PathBuf> {
    let folders = fs::read_dir(releases()).unwrap().map(|entry| entry.unwrap().path());
    let mut samples: Vec<PathBuf> = folders.filter(|path| path.is_dir()).collect();
    samples.sort();
    assert!(!samples.is_empty(), "no sample below {}", releases().display());
    samples
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Vocabulary of the teacher `llama-gqa`.
const VOCAB: usize = 199;

/// A tokenizer whose token 17 is the word `w17`.
fn tokenizer() -> Value {
    let special = ["<unk>", "<s>", "</s>", "<pad>"];
    let name = |id: usize| special.get(id).map_or_else(|| format!("w{id}"), |name| (*name).to_owned());
    let vocab: serde_json::Map<String, Value> = (0..VOCAB).map(|id| (name(id), json!(id))).collect();
    let added = special.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null, "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    })
}

/// JSON lines of `count` texts of words, from the text `first` on.
fn texts(first: usize, count: usize) -> String {
    let word = |text: usize, n: usize| format!("w{}", 4 + (text * 31 + n * n * 7) % (VOCAB - 4));
    let text = |text: usize| (0..20 + text % 40).map(|n| word(text, n)).collect::<Vec<_>>().join(" ");
    (first..first + count).map(|n| json!({"text": text(n)}).to_string() + "\n").collect()
}

/// A sample in a scratch folder.
struct Copy(Scratch);

impl Copy {
    fn of(sample: &Path) -> Self {
        let scratch = Scratch::new();
        copy(sample, &scratch.path(""));
        Self(scratch)
    }

    fn run(&self, arguments: &[&str]) -> stillhouse_tests::CommandOutput {
        let mut command = self.0.command(arguments);
        command.env(TEACHER, teacher());
        stillhouse_tests::run_command(&mut command)
    }

    #[track_caller]
    fn prints(&self, arguments: &[&str], text: &str) {
        let done = self.run(arguments).expect(0);
        assert!(done.stdout.contains(text), "{text:?} is missing in:\n{}", done.stdout);
    }
}

#[test]
fn data_sets_and_job_files_of_every_release_are_used_as_those_of_this_version() {
    for sample in samples() {
        let copy = Copy::of(&sample);
        let before = shards(&copy.0.path("noise"));
        assert!(!before.is_empty(), "{}", sample.display());
        copy.prints(&["plan", "noise.yaml"], "the data set is complete already");
        copy.run(&["run", "noise.yaml", "--check", "--quiet"]).expect(0);
        assert_eq!(shards(&copy.0.path("noise")), before, "a finished data set stays");
        let teacher = teacher();
        copy.prints(&["verify", "noise", "--teacher", "--teacher-path", teacher.to_str().unwrap()], "passed");
        copy.run(&["inspect", "noise", "--row", "1"]).expect(0);
        copy.0.job(
            "views.json",
            &json!({
                "version": 1, "name": "views", "partitions": {"views": 3}, "output": {"path": "derived"}
            }),
        );
        copy.run(&["derive", "noise", "views.json", "--quiet"]).expect(0);
        copy.prints(&["verify", "derived"], "passed");
        copy.run(&["export", "packed", "exported", "--quiet"]).expect(0);
        copy.prints(&["verify", "exported"], "passed");
    }
}

#[test]
fn a_data_set_of_every_release_grows_and_is_repaired_without_another_byte() {
    for sample in samples() {
        let copy = Copy::of(&sample);
        let before = shards(&copy.0.path("packed"));
        let (lost, _) = before.first_key_value().unwrap();
        fs::remove_file(copy.0.path("packed/data").join(lost)).unwrap();
        copy.run(&["repair", "packed", "packed.yaml"]).expect(0);
        assert_eq!(shards(&copy.0.path("packed")), before, "{}", sample.display());
        copy.0.write("in/z.jsonl", &texts(24, 12));
        copy.run(&["run", "packed.yaml", "--append", "--quiet"]).expect(0);
        assert!(shards(&copy.0.path("packed")).len() > before.len());
        copy.prints(&["verify", "packed"], "passed");
    }
}

#[test]
fn the_database_of_every_release_opens_with_its_jobs() {
    for sample in samples() {
        let mut service = Service::new(&json!({}));
        fs::create_dir_all(service.data()).unwrap();
        fs::copy(sample.join(DATABASE), service.data().join(DATABASE)).unwrap();
        service.launch();
        let jobs = service.api.get("/jobs").expect(200).json();
        let states: Vec<&Value> = jobs["jobs"].as_array().unwrap().iter().map(|job| &job["state"]).collect();
        assert_eq!(states, [&json!("succeeded")], "{}: {jobs}", sample.display());
    }
}

/// Writes the sample of this version, before a release:
/// `cargo nextest run -p stillhouse-tests --run-ignored only -E 'test(keep_a_sample_of_this_version)'`.
#[test]
#[ignore = "writes tests/releases"]
fn keep_a_sample_of_this_version() {
    let sample = releases().join(env!("CARGO_PKG_VERSION"));
    assert!(!sample.exists(), "{} is kept already, and a sample is never changed", sample.display());
    fs::create_dir_all(sample.join("in")).unwrap();
    fs::write(sample.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    fs::write(sample.join("in/a.jsonl"), texts(0, 24)).unwrap();
    let common = with(
        job(),
        &json!({
            "input": {"paths": ["in/*.jsonl"], "split_megabytes": 0.0015},
            "tokenizer": {"path": "tokenizer.json", "bos": "<s>", "eos": "</s>", "pad": "<pad>"},
            "pack": {"length": 32},
            "orders": {"kind": "strided", "streams": [1, 2]}
        }),
    );
    let teacher = json!({"path": format!("${{{TEACHER}}}"), "device": "cpu", "batch_tokens": 512});
    let noise = json!({"name": "noise", "extract": {"teacher": teacher}, "output": {"path": "noise"}});
    let packed = json!({"name": "packed", "extract": null, "output": {"path": "packed"}});
    let copy = Copy::of(&sample);
    for (name, patch) in [("noise", noise), ("packed", packed)] {
        let file = copy.0.job(&format!("{name}.yaml"), &with(common.clone(), &patch));
        copy.run(&["run", file.to_str().unwrap(), "--quiet"]).expect(0);
    }
    let mut service = Service::start(&json!({}));
    service.scratch.write("corpus.jsonl", &texts(0, 3));
    service.scratch.write("tokenizer.json", &tokenizer().to_string());
    let small = json!({
        "extract": null, "pack": {"length": 32}, "tokenizer": {"path": "tokenizer.json", "eos": "</s>"}, "subtokens": null
    });
    let submitted = with(job(), &small);
    let id = service.api.submit(&submitted);
    service.api.wait_for_state(&id, "succeeded");
    assert_eq!(service.terminate(), Some(0));
    fs::copy(service.data().join(DATABASE), copy.0.path(DATABASE)).unwrap();
    self::copy(&copy.0.path(""), &sample);
}
