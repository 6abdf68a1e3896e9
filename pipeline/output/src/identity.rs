//! The identity of a job: a hash of everything that decides the bytes of its shards, and the values that it covers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stillhouse_schemas::manifest::Appended;

use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::file_state::FileState;

/// The hash of a job and the values that it covers.
#[derive(Debug, Clone)]
pub struct JobHash {
    /// SHA-256 in hexadecimal.
    pub hash: String,
    /// SHA-256 of the tokenizer as the data set stores it.
    pub tokenizer: String,
    /// SHA-256 of each of the teacher's files, by name.
    pub teacher: BTreeMap<String, String>,
    /// Everything except the input that decides the bytes of the shards.
    pub identity: Value,
    /// The input files in order: those of the first run, then appended ones.
    pub files: Vec<PlannedFile>,
    /// The appends (`--append`). Each covers the next files of `files`.
    pub appended: Vec<Appended>,
    /// State of the teacher's files when they were hashed.
    pub stamps: Vec<Stamp>,
}

impl JobHash {
    /// Hashes an identity and its files, without appends. The tokenizer, teacher and stamps stay empty.
    pub fn of_identity(identity: Value, files: Vec<PlannedFile>) -> Self {
        let hash = hash_of(&identity, &files, &[]);
        let (tokenizer, teacher, appended, stamps) = (String::new(), BTreeMap::new(), Vec::new(), Vec::new());
        Self { hash, tokenizer, teacher, identity, files, appended, stamps }
    }

    /// The same job with other files, or with its files in another order.
    pub fn of_files(&self, hash: String, files: Vec<PlannedFile>, appended: Vec<Appended>) -> Self {
        Self { hash, files, appended, ..self.clone() }
    }

    /// Checks that the teacher's files have not changed since they were hashed.
    ///
    /// # Errors
    /// When a file has changed or cannot be read.
    pub fn teacher_is_still(&self) -> Result<()> {
        self.stamps.iter().try_for_each(Stamp::check)
    }
}

impl JobHash {
    /// Whether a commit with this hash belongs to this job, now or before files were appended.
    pub fn includes_commit(&self, job_hash: &str) -> bool {
        is_hash_of_job(job_hash, &self.hash, self.appended.iter().map(|a| a.to.as_str()))
    }

    /// The same job with these files appended later. `None` if it does not have one of them.
    pub fn arranged(&self, appended: &[Appended]) -> Option<Self> {
        let by_name: BTreeMap<&str, &PlannedFile> = self.files.iter().map(|f| (f.name.as_str(), f)).collect();
        let later: Vec<&str> = appended.iter().flat_map(|a| &a.files).map(String::as_str).collect();
        let names: BTreeSet<&str> = later.iter().copied().collect();
        let later = later.iter().map(|name| by_name.get(name).copied()).collect::<Option<Vec<_>>>()?;
        let first = self.files.iter().filter(|f| !names.contains(f.name.as_str()));
        let files = first.chain(later).cloned().collect();
        Some(self.with_files(files, appended.to_vec()))
    }

    /// The same job with other files, and the hash recomputed.
    pub fn with_files(&self, files: Vec<PlannedFile>, appended: Vec<Appended>) -> Self {
        let hash = hash_of(&self.identity, &files, &appended);
        self.of_files(hash, files, appended)
    }
}

/// Whether the hash in a commit belongs to a job: its current hash, or one that it had before files were appended.
pub(crate) fn is_hash_of_job<'a>(commit: &str, current: &str, mut earlier: impl Iterator<Item = &'a str>) -> bool {
    commit == current || earlier.any(|hash| hash == commit)
}

/// Hashes everything that decides the bytes of the shards. The order of the files is the order in which they were given
/// or appended.
pub fn hash_of(identity: &Value, files: &[PlannedFile], appended: &[Appended]) -> String {
    let names: Vec<Value> = files.iter().map(|f| json!([f.name, f.state.bytes])).collect();
    let mut of = json!({"of": identity, "files": names});
    if !appended.is_empty() {
        of["appended"] = appended.iter().map(|a| a.files.len()).collect();
    }
    hex::encode(Sha256::digest(of.to_string().as_bytes()))
}

/// An input file as the plan records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// Path from the job's path or glob. Splits use this name.
    pub path: String,
    /// Path relative to the common folder of all input files.
    pub name: String,
    /// Size and version according to its store.
    #[serde(flatten)]
    pub state: FileState,
}

/// Size and modification time of a local file, to detect changes.
#[derive(Debug, Clone)]
pub struct Stamp {
    path: PathBuf,
    state: (u64, SystemTime),
}

impl Stamp {
    #[expect(clippy::disallowed_methods, reason = "runs on a thread that may block, as hashing the files did")]
    fn read_state(path: &Path) -> Result<(u64, SystemTime)> {
        let found = fs::metadata(path).and_then(|m| Ok((m.len(), m.modified()?)));
        found.map_err(|e| PipelineError::caused(ErrorKind::Model, format!("cannot access {}", path.display()), e))
    }

    /// Records the current state of a file.
    ///
    /// # Errors
    /// When the file's metadata cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), state: Self::read_state(path)? })
    }

    fn check(&self) -> Result<()> {
        if Self::read_state(&self.path)? == self.state {
            return Ok(());
        }
        let path = self.path.display();
        let message = format!("{path} has changed since the job began; run the job again once it stays as it is");
        Err(PipelineError::new(ErrorKind::Model, message))
    }
}
