//! Proves for any damage to a data set, its input or its job file that every verb repairs it or names a command that
//! does. Following these commands always ends at a complete data set.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use stillhouse_tests::{CommandOutput, Scratch, corpus, repetitions, with};

use crate::append::{grow, scratch, small};

/// A state: its name, and a function that brings something into it.
type State<T> = (&'static str, fn(&T));

/// Possible damage to a data set.
const DAMAGES: [State<Path>; 15] = [
    ("whole", |_| {}),
    ("a shard is missing", |out| remove(&nth(out, "data", 1))),
    ("a shard is damaged", |out| flip(&nth(out, "data", 1))),
    ("a record is missing", |out| remove(&nth(out, "_stillhouse/splits", 1))),
    ("a record is damaged", |out| flip(&nth(out, "_stillhouse/splits", 1))),
    ("the manifest is missing", |out| remove(&out.join("manifest.json"))),
    ("the manifest is cut", |out| cut(&out.join("manifest.json"))),
    ("_SUCCESS is missing", |out| remove(&out.join("_SUCCESS"))),
    ("_SUCCESS is another's", |out| fs::write(out.join("_SUCCESS"), "of something else").unwrap()),
    ("the plan is missing", |out| remove(&out.join("_stillhouse/plan.json"))),
    ("the plan is cut", |out| cut(&out.join("_stillhouse/plan.json"))),
    ("the tokenizer is missing", |out| remove(&out.join("tokenizer.json"))),
    ("not finished", |out| {
        ["_SUCCESS", "manifest.json"].iter().for_each(|name| remove(&out.join(name)));
        let shard = nth(out, "data", 1);
        remove(&nth(out, "_stillhouse/splits", 1));
        remove(&shard);
    }),
    ("a shard was being written", |out| {
        fs::create_dir_all(out.join("_stillhouse/staging")).unwrap();
        fs::write(out.join("_stillhouse/staging/00001.parquet"), "PAR1").unwrap();
    }),
    ("a run died", |out| fs::write(out.join("_stillhouse/lock"), "").unwrap()),
];

/// Possible changes of its input and its job file.
const CHANGES: [State<Scratch>; 5] = [
    ("as it was", |_| {}),
    ("new files", grow),
    ("another file", |scratch| drop(scratch.write("in/m.jsonl", &corpus(4, 900)))),
    ("no file", |scratch| remove(&scratch.path("in/m.jsonl"))),
    ("another job", |scratch| drop(scratch.job("job.yaml", &with(small(), &json!({"seed": 7}))))),
];

const RUN: [&str; 2] = ["run", "job.yaml"];
const APPEND: [&str; 3] = ["run", "job.yaml", "--append"];
const OVERWRITE: [&str; 3] = ["run", "job.yaml", "--overwrite"];
const REPAIR: [&str; 3] = ["repair", "out", "job.yaml"];
const VERIFY: [&str; 2] = ["verify", "out"];
const CLEAN: [&str; 2] = ["clean", "out"];

/// Maximum number of commands to follow; more count as a cycle.
const MAX_STEPS: usize = 6;

fn nth(out: &Path, folder: &str, n: usize) -> PathBuf {
    let mut names: Vec<PathBuf> = fs::read_dir(out.join(folder)).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    names.remove(n)
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

fn cut(path: &Path) {
    fs::write(path, &fs::read(path).unwrap()[..100]).unwrap();
}

/// A data set with its input and its job file in a separate folder.
struct DatasetCopy<'a> {
    original: &'a Path,
    scratch: Scratch,
}

impl<'a> DatasetCopy<'a> {
    fn new(original: &'a Path) -> Self {
        let scratch = Scratch::new();
        copy(original, &scratch.path(""));
        Self { original, scratch }
    }

    fn restore_input(&self) {
        for entry in fs::read_dir(self.scratch.path("in")).unwrap() {
            remove(&entry.unwrap().path());
        }
        copy(&self.original.join("in"), &self.scratch.path("in"));
        fs::copy(self.original.join("job.yaml"), self.scratch.path("job.yaml")).unwrap();
    }

    /// Runs the first command that a message suggests, as a person would who wants to keep the data. `None` if it
    /// suggests none.
    fn run_suggested(&self, said: &str) -> Option<CommandOutput> {
        let puts_back = ["that it was made of", "put them back", "matches no file"];
        let steps: [(&[&str], &[&str]); 5] = [
            (&["`stillhouse repair", "stillhouse repair out job.yaml"], &REPAIR),
            (&["`run --append`"], &APPEND),
            (&puts_back, &REPAIR),
            (&["`stillhouse run`"], &RUN),
            (&["`--overwrite`"], &OVERWRITE),
        ];
        let (names, step) = steps.into_iter().find(|(names, _)| names.iter().any(|name| said.contains(name)))?;
        if names == puts_back {
            self.restore_input();
        }
        Some(self.scratch.stillhouse(step))
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// Follows the suggestions to a complete data set that its job considers finished. Fails with all steps if they do not
/// lead there.
fn follow_advice(dataset: &DatasetCopy<'_>, first: &[&str]) -> Result<(), String> {
    let mut transcript = String::new();
    let mut ran = dataset.scratch.stillhouse(first);
    for _ in 0..MAX_STEPS {
        transcript += &format!("\n{}{}", ran.stdout, ran.stderr);
        if ran.code == Some(0) {
            ran = dataset.scratch.stillhouse(&VERIFY);
            if ran.code == Some(0) {
                ran = dataset.scratch.stillhouse(&RUN);
            }
            if ran.code == Some(0) {
                return Ok(());
            }
        }
        let said = format!("{}{}", ran.stdout, ran.stderr);
        transcript += &format!("\n{said}");
        ran = dataset.run_suggested(&said).ok_or(format!("no way out: {transcript}"))?;
    }
    Err(format!("a circle: {transcript}"))
}

/// Verbs to start with: all under `make soak`; in CI only those whose messages lead to the others.
fn verbs(damage: &str, change: &str) -> &'static [&'static [&'static str]] {
    match (repetitions(1, 2) == 1, damage, change) {
        // these messages do not depend on the damage
        (true, "whole", "no file") => &[&RUN],
        (true, _, "no file") => &[],
        (true, _, "another file" | "another job") => &[&APPEND],
        (true, ..) => &[&RUN, &REPAIR],
        (false, ..) => &[&RUN, &APPEND, &OVERWRITE, &REPAIR, &VERIFY, &CLEAN],
    }
}

/// Tests every second damage from `first` on. Each half is a separate test, so that both run in parallel.
fn check_every_verb(first: usize) {
    let original = scratch(&small());
    original.job("job.yaml", &small());
    let folder = original.path("");
    let shards = stillhouse_tests::shards(&original.path("out"));
    assert!(shards.len() > 1, "{shards:?}");
    let mut wrong = Vec::new();
    for (damage, damaged) in DAMAGES.iter().skip(first).step_by(2) {
        for (change, changed) in CHANGES {
            for verb in verbs(damage, change) {
                let dataset = DatasetCopy::new(&folder);
                damaged(&dataset.scratch.path("out"));
                changed(&dataset.scratch);
                if let Err(transcript) = follow_advice(&dataset, verb) {
                    wrong.push(format!("{damage}, {change}: {verb:?}: {transcript}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn whatever_became_of_it_every_verb_leads_to_a_whole_data_set() {
    check_every_verb(0);
}

#[test]
fn and_so_from_every_other_state() {
    check_every_verb(1);
}

#[test]
fn a_repair_never_mixes_two_inputs() {
    let scratch = scratch(&small());
    let before = stillhouse_tests::files(&scratch.path("out"));
    remove(&scratch.path("out/_stillhouse/plan.json"));
    grow(&scratch);
    scratch.job("job.yaml", &small());
    // no committed split belongs to the job of these files
    let says = ["its plan is missing or damaged", "repair it with the job file and the input that it was made of"];
    scratch.stillhouse(&REPAIR).expect(2).says(&says);
    let mut after = stillhouse_tests::files(&scratch.path("out"));
    after.retain(|name, _| before.contains_key(name));
    let kept = before.iter().filter(|(name, _)| !name.ends_with("plan.json"));
    assert!(kept.clone().all(|(name, sha)| after.get(name) == Some(sha)));
    scratch.stillhouse(&VERIFY).expect(0);
}

#[test]
fn a_job_is_not_finished_with_a_file_that_has_changed() {
    let scratch = scratch(&small());
    let (_, unfinished) = DAMAGES.iter().find(|(name, _)| *name == "not finished").unwrap();
    unfinished(&scratch.path("out"));
    let committed = stillhouse_tests::shards(&scratch.path("out"));
    // same size, other words
    let text = fs::read_to_string(scratch.path("in/m.jsonl")).unwrap();
    let changed = text.replace(" the ", " tho ");
    assert_ne!(changed, text);
    scratch.write("in/m.jsonl", &changed);
    grow(&scratch);
    scratch.job("job.yaml", &small());
    scratch.stillhouse(&REPAIR).expect(2).says(&["in/m.jsonl", "put the file back as it was"]);
    assert!(!scratch.path("out/_SUCCESS").exists());
    assert_eq!(stillhouse_tests::shards(&scratch.path("out")), committed);
    // with the file restored, the job is finished with the old files alone
    scratch.write("in/m.jsonl", &text);
    let repaired = scratch.stillhouse(&REPAIR).expect(0);
    assert!(repaired.stdout.contains("with its original input files"), "{}", repaired.stdout);
    scratch.stillhouse(&VERIFY).expect(0);
    scratch.stillhouse(&APPEND).expect(0);
    scratch.stillhouse(&VERIFY).expect(0);
}
