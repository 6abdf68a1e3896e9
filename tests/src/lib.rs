//! Fixtures of the end-to-end tests: the program under test, a scratch folder with a small corpus, and job files.
//!
//! ```text
//!   assets/corpus ─► corpus (a few truncated speeches) ─► job (JSON, which is YAML) ─► `stillhouse …` ─► files, text
//! ```
//!
//! The tests start the program as a user does. It is built once per test run, for any number of test processes. This
//! crate links none of it, so `cargo nextest run -p stillhouse-tests` never tests a stale build.
//!
//! Object stores are real servers on this machine: [`seaweed`] (a full S3) and [`rclone`] (an S3 that ignores
//! `If-None-Match`). [`proxy`] sits in between where the network must fail. [`seaweed`] documents their costs. Models
//! come from a [`hub`], data sets of a hub from [`hub_datasets`]. Tests that disconnect hosts run them as network namespaces of this machine: [`network`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a fixture that fails fails its test")]

mod byte_models;
pub mod hub;
pub mod hub_datasets;
pub mod network;
pub mod process_stats;
pub mod proxy;
pub mod rclone;
pub mod s3;
pub mod seaweed;
pub mod server;
pub mod service;
pub mod small_disk;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use flate2::read::MultiGzDecoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

pub use byte_models::{byte_teacher, byte_tokenizer};

/// The root folder of the repository.
pub fn root() -> PathBuf {
    fs::canonicalize(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).unwrap()
}

/// Number of repetitions of a repeated test: `ci`, or `soak` for more confidence under `make soak`
/// (`STILLHOUSE_SOAK=1`).
pub fn repetitions(ci: usize, soak: usize) -> usize {
    if std::env::var_os("STILLHOUSE_SOAK").is_some_and(|value| value != "0") { soak } else { ci }
}

/// A teacher of GPT-2's architecture with the real vocabulary of 50,257 tokens.
pub fn nano_teacher() -> PathBuf {
    root().join("assets/teacher-nano-gpt2")
}

/// The program under test, which is built if it is missing or older than its sources.
///
/// `STILLHOUSE_BIN` names another program. Within one nextest run all test processes share one build, by a file lock
/// and a stamp. They use a hard link to it, so that a concurrent build does not replace the program during a test.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("STILLHOUSE_BIN") {
        Some(path) => PathBuf::from(path),
        None => build(),
    })
}

/// The folder of what all tests share, and that of cargo's profile.
fn build_folders() -> (PathBuf, PathBuf) {
    // <target>/<profile>/deps/<this test>
    let this = std::env::current_exe().unwrap();
    let profile = this.ancestors().nth(2).unwrap();
    (profile.with_file_name("tmp").join("stillhouse-tests"), profile.to_owned())
}

fn build() -> PathBuf {
    let (folder, profile) = build_folders();
    let target = profile.parent().unwrap();
    let run = std::env::var("NEXTEST_RUN_ID").unwrap_or_else(|_| format!("process-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let lock = File::create(folder.join("lock")).unwrap();
    lock.lock().unwrap();
    let program = folder.join(format!("stillhouse-{run}"));
    if program.exists() {
        return program;
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // The selected packages decide the features of dependencies. The tests' own selection avoids a second build.
    cargo.current_dir(root()).args(["build", "--quiet", "--workspace", "--tests", "--bin", "stillhouse"]);
    if cfg!(feature = "distributed") {
        cargo.args(["--features", "stillhouse/distributed,stillhouse-tests/distributed"]);
    }
    cargo.arg("--target-dir").arg(target);
    // Remove what cargo set for this test's package: ring's build script, for example, would see a change and rerun.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|reported| name.to_string_lossy().starts_with(reported)) {
            cargo.env_remove(name);
        }
    }
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.output().expect("cargo starts");
    assert!(built.status.success(), "the program does not build:\n{}", String::from_utf8_lossy(&built.stderr));
    for old in fs::read_dir(&folder).unwrap().filter_map(Result::ok) {
        if old.file_name().to_string_lossy().starts_with("stillhouse-") && is_old(&old.path()) {
            let _ = fs::remove_file(old.path());
        }
    }
    fs::hard_link(profile.join("stillhouse"), &program).unwrap();
    // The link's stamp shows the age of the run; the file itself keeps the age of the build.
    File::create(folder.join(format!("{run}.stamp"))).unwrap();
    program
}

/// Whether a link belongs to a run that began over an hour ago; concurrent runs keep theirs.
fn is_old(link: &Path) -> bool {
    let Some(run) = link.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix("stillhouse-")) else {
        return false;
    };
    let stamp = link.with_file_name(format!("{run}.stamp"));
    let age = fs::metadata(&stamp).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
    let old = age.is_none_or(|age| age.as_secs() > 3600);
    if old {
        let _ = fs::remove_file(stamp);
    }
    old
}

/// The result of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// Exit code, or `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl CommandOutput {
    /// Asserts the exit code; shows the output on failure.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Asserts that standard error contains all of these.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.stderr.contains(part), "{part:?} is missing in:\n{}", self.stderr);
        }
        self
    }

    /// Parses standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}:\n{}", self.stdout))
    }
}

/// Runs a command and waits for its end.
pub fn run_command(command: &mut Command) -> CommandOutput {
    let out = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    CommandOutput {
        code: out.status.code(),
        stdout: String::from_utf8(out.stdout).unwrap(),
        stderr: String::from_utf8(out.stderr).unwrap(),
    }
}

/// A temporary folder for job files, corpora and data sets; removed with the test.
pub struct Scratch(TempDir);

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch {
    /// An empty folder.
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A folder with `corpus.jsonl`: the first speeches, each truncated to `bytes` bytes.
    pub fn with_corpus(speeches: usize, bytes: usize) -> Self {
        let scratch = Self::new();
        scratch.write("corpus.jsonl", &corpus(speeches, bytes));
        scratch
    }

    /// The path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Writes a job file.
    pub fn job(&self, name: &str, job: &Value) -> PathBuf {
        self.write(name, &serde_json::to_string_pretty(job).unwrap())
    }

    /// A command for the program in this folder, without environment variables that change its output.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.current_dir(self.0.path()).args(arguments);
        for name in ["NO_COLOR", "STILLHOUSE_LOG", "RUST_LOG", "CLICOLOR_FORCE", "FORCE_COLOR"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs the program and waits for its end.
    pub fn stillhouse(&self, arguments: &[&str]) -> CommandOutput {
        run_command(&mut self.command(arguments))
    }

    /// Writes a job file and runs it. Returns the folder of the data set, `out` unless the job says otherwise.
    #[track_caller]
    pub fn make(&self, job: &Value) -> PathBuf {
        let file = self.job("job.yaml", job);
        self.stillhouse(&["run", file.to_str().unwrap(), "--quiet"]).expect(0);
        self.path(job["output"]["path"].as_str().unwrap())
    }
}

/// The first speeches of the corpus as JSON lines, each truncated to `bytes` bytes.
pub fn corpus(speeches: usize, bytes: usize) -> String {
    let file = File::open(root().join("assets/corpus/sotu-small.jsonl.gz")).unwrap();
    let lines = BufReader::new(MultiGzDecoder::new(file)).lines();
    let mut out = String::new();
    for line in lines.take(speeches) {
        let speech: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let text = speech["text"].as_str().unwrap();
        let text = &text[..text.floor_char_boundary(bytes)];
        out += &json!({"id": speech["id"], "text": text}).to_string();
        out.push('\n');
    }
    out
}

/// A small job over `corpus.jsonl` with the teacher of bytes and all outputs of this version.
pub fn job() -> Value {
    job_of(byte_teacher())
}

/// [`job`] with the real vocabulary of [`nano_teacher`].
pub fn nano_job() -> Value {
    job_of(&nano_teacher())
}

fn job_of(teacher: &Path) -> Value {
    json!({
        "version": 1,
        "name": "small",
        "seed": 42,
        "input": {"format": "jsonl", "paths": ["corpus.jsonl"]},
        "pack": {"length": 64},
        "extract": {
            "teacher": {"path": teacher, "device": "cpu", "batch_tokens": 512},
            "noise": {"codec": "replay", "tolerance": 1e-3},
            "topk": 4
        },
        "subtokens": {"length": 4},
        "partitions": {"views": 2},
        "output": {"path": "out"}
    })
}

/// Merges a JSON merge patch into `value`; null removes a key.
pub fn with(mut value: Value, patch: &Value) -> Value {
    merge(&mut value, patch);
    value
}

fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    let object = value.as_object_mut().unwrap();
    for (key, patch) in patch {
        if patch.is_null() {
            object.remove(key);
        } else {
            merge(object.entry(key).or_insert(Value::Null), patch);
        }
    }
}

/// SHA-256 of a file in hexadecimal.
pub fn sha256(path: &Path) -> String {
    hex_sha256(&fs::read(path).unwrap())
}

/// SHA-256 of bytes in hexadecimal.
pub fn hex_sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Changes the manifest of a finished data set and updates the files that depend on it, so that the result is
/// consistent.
pub fn with_manifest(dataset: &Path, change: impl FnOnce(&mut Value)) {
    let path = dataset.join("manifest.json");
    let was = fs::read(&path).unwrap();
    let mut manifest: Value = serde_json::from_slice(&was).unwrap();
    change(&mut manifest);
    let now = serde_json::to_vec_pretty(&manifest).unwrap();
    fs::write(&path, &now).unwrap();
    let success = fs::read_to_string(dataset.join("_SUCCESS")).unwrap();
    let sums = [was, now].map(|bytes| hex_sha256(&bytes));
    assert!(success.contains(&sums[0]), "{success}");
    fs::write(dataset.join("_SUCCESS"), success.replace(&sums[0], &sums[1])).unwrap();
}

/// SHA-256 of every shard by name; empty if the data set has none.
pub fn shards(dataset: &Path) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(dataset.join("data")) else { return BTreeMap::new() };
    entries.map(|entry| entry.unwrap()).map(|e| (e.file_name().into_string().unwrap(), sha256(&e.path()))).collect()
}

/// SHA-256 of every file under a folder, by path.
pub fn files(folder: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                found.insert(entry.path().strip_prefix(folder).unwrap().to_owned(), sha256(&entry.path()));
            }
        }
    }
    found
}
