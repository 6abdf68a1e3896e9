//! What makes a job the job that it is: the hash of everything that decides the bytes of its shards, and what went into it.

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

/// The hash of a job, and what went into it.
#[derive(Debug, Clone)]
pub struct JobHash {
    /// sha256, in hexadecimal.
    pub hash: String,
    /// sha256 of the tokenizer as the data set will hold it.
    pub tokenizer: String,
    /// sha256 of the teacher's files, by name.
    pub teacher: BTreeMap<String, String>,
    /// Everything but the input that decides the bytes of the shards.
    pub identity: Value,
    /// The files of the input, in order: those of the first run, then those that were appended.
    pub files: Vec<PlannedFile>,
    /// What was appended, each the next of `files` (`--append`).
    pub appended: Vec<Appended>,
    /// What the teacher's files were when they were hashed.
    pub stamps: Vec<Stamp>,
}

impl JobHash {
    /// The hash of an identity and its files, with nothing appended; of tokenizer and teacher it keeps nothing.
    pub fn of_identity(identity: Value, files: Vec<PlannedFile>) -> Self {
        let hash = hash_of(&identity, &files, &[]);
        let (tokenizer, teacher, appended, stamps) = (String::new(), BTreeMap::new(), Vec::new(), Vec::new());
        Self { hash, tokenizer, teacher, identity, files, appended, stamps }
    }

    /// The same job with other files, or in another order.
    pub fn of_files(&self, hash: String, files: Vec<PlannedFile>, appended: Vec<Appended>) -> Self {
        Self { hash, files, appended, ..self.clone() }
    }

    /// Makes sure that the teacher's files are still those that were hashed.
    ///
    /// # Errors
    /// When one was changed or cannot be looked at.
    pub fn teacher_is_still(&self) -> Result<()> {
        self.stamps.iter().try_for_each(Stamp::check)
    }
}

impl JobHash {
    /// Whether a commit with this hash is of this job: its own, or the job's before files were appended.
    pub fn counts(&self, job_hash: &str) -> bool {
        self.hash == job_hash || self.appended.iter().any(|a| a.to == job_hash)
    }

    /// The same job where these files came later; `None` where it does not have them.
    pub fn arranged(&self, appended: &[Appended]) -> Option<Self> {
        let by_name: BTreeMap<&str, &PlannedFile> = self.files.iter().map(|f| (f.name.as_str(), f)).collect();
        let later: Vec<&str> = appended.iter().flat_map(|a| &a.files).map(String::as_str).collect();
        let names: BTreeSet<&str> = later.iter().copied().collect();
        let later = later.iter().map(|name| by_name.get(name).copied()).collect::<Option<Vec<_>>>()?;
        let first = self.files.iter().filter(|f| !names.contains(f.name.as_str()));
        let files = first.chain(later).cloned().collect();
        Some(self.with_files(files, appended.to_vec()))
    }

    /// The same job with other files, and the hash of that.
    pub fn with_files(&self, files: Vec<PlannedFile>, appended: Vec<Appended>) -> Self {
        let hash = hash_of(&self.identity, &files, &appended);
        self.of_files(hash, files, appended)
    }
}

/// The hash of what decides the bytes of the shards, with the files in the order in which they were given or appended.
pub fn hash_of(identity: &Value, files: &[PlannedFile], appended: &[Appended]) -> String {
    let names: Vec<Value> = files.iter().map(|f| json!([f.name, f.state.bytes])).collect();
    let mut of = json!({"of": identity, "files": names});
    if !appended.is_empty() {
        of["appended"] = appended.iter().map(|a| a.files.len()).collect();
    }
    hex::encode(Sha256::digest(of.to_string().as_bytes()))
}

/// A file of the input, as the plan keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// As the job's path or glob yields it; the splits name it so.
    pub path: String,
    /// Below the common folder of all files of the input.
    pub name: String,
    /// What its store said of it.
    #[serde(flatten)]
    pub state: FileState,
}

/// What a file of this machine was, so that a change is noticed.
#[derive(Debug, Clone)]
pub struct Stamp {
    path: PathBuf,
    state: (u64, SystemTime),
}

impl Stamp {
    #[expect(clippy::disallowed_methods, reason = "runs on a thread that may block, as hashing the files did")]
    fn look(path: &Path) -> Result<(u64, SystemTime)> {
        let found = fs::metadata(path).and_then(|m| Ok((m.len(), m.modified()?)));
        found.map_err(|e| PipelineError::caused(ErrorKind::Model, format!("cannot look at {}", path.display()), e))
    }

    /// That of a file as it is now.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn of(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), state: Self::look(path)? })
    }

    fn check(&self) -> Result<()> {
        if Self::look(&self.path)? == self.state {
            return Ok(());
        }
        let path = self.path.display();
        let message = format!("{path} has changed since the job began; run the job again once it stays as it is");
        Err(PipelineError::new(ErrorKind::Model, message))
    }
}
