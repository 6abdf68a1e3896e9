//! The plan file of an output, `_stillhouse/plan.json`. Later runs resume from it, and other commands find the job by
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::manifest::{Appended, SplitRecord, TeacherArithmetic};

use super::commands::repair_command;
use super::{INPUT, Output, disk};
use crate::identity::{PlannedFile, is_hash_of_job};

/// Path of the plan file.
pub const PLAN: &str = "_stillhouse/plan.json";

/// Path of the list of duplicates, of a job with `deduplicate`.
pub const DUPLICATES: &str = "_stillhouse/duplicates.parquet";

/// The documents that are dropped as duplicates. All splits of a job are made with the same list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DuplicatesRecord {
    /// SHA-256 of the values of the list ([`DUPLICATES`]).
    pub sha256: String,
    /// SHA-256 of what it was found in: the state of the input files, and the splits. If a file was touched since, the list
    /// is found again and compared.
    pub input_sha256: String,
}

/// The content of the plan file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Hash of everything that decides the bytes of the shards.
    pub job_hash: String,
    /// Name of the job, for messages.
    pub name: String,
    /// Folder against which the job's relative paths resolve, relative to the output folder.
    #[serde(default)]
    pub job_folder: String,
    /// Name of the job file in that folder; empty if the job did not come from a file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job_file: String,
    /// Everything except the input that decides the bytes of the shards. The hash covers it; kept to report what has
    /// changed.
    #[serde(default)]
    pub identity: serde_json::Value,
    /// The input files in order, with their state in the store.
    #[serde(default)]
    pub files: Vec<PlannedFile>,
    /// The splits.
    pub splits: Vec<SplitRecord>,
    /// The appends after the first run (`--append`); their files are the last of `files`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub appended: Vec<Appended>,
    /// Arithmetic of the teacher, if any. A resumed run must use the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherArithmetic>,
    /// SHA-256 of each file of staged rows. The splits refer to these files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staged: Vec<String>,
    /// The duplicates, in a job with `deduplicate`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duplicates: Option<DuplicatesRecord>,
}

impl PlanRecord {
    /// Returns the splits with the files under their current names.
    pub fn splits_of(&self, now: &[PlannedFile]) -> Vec<SplitRecord> {
        let moved: BTreeMap<&str, &str> = self
            .files
            .iter()
            .zip(now)
            .filter(|(was, is)| was.path != is.path)
            .map(|(was, is)| (was.path.as_str(), is.path.as_str()))
            .collect();
        let mut splits = self.splits.clone();
        for piece in splits.iter_mut().flat_map(|s| &mut s.pieces) {
            if let Some(path) = moved.get(piece.file.as_str()) {
                piece.file = (*path).to_owned();
            }
        }
        splits
    }

    /// Whether a commit with this hash belongs to this plan's job, now or before files were appended.
    pub fn includes_commit(&self, job_hash: &str) -> bool {
        is_hash_of_job(job_hash, &self.job_hash, self.appended.iter().map(|a| a.to.as_str()))
    }

    /// Returns the indices of files whose state has changed since the plan was made.
    pub fn touched(&self, now: &[PlannedFile]) -> BTreeSet<usize> {
        let pairs = self.files.iter().zip(now).enumerate();
        pairs.filter(|(_, (was, is))| !was.state.matches(&is.state)).map(|(i, _)| i).collect()
    }
}

impl Output {
    /// Writes the plan, unless the output has one of another job.
    ///
    /// # Errors
    /// When the store rejects it, or when another job has begun in the meantime.
    pub async fn begin(&self, plan: &PlanRecord) -> Result<()> {
        self.check_ownership().await?;
        match self.plan().await? {
            Some(there) if there.job_hash != plan.job_hash => {
                let message = format!("{self}: another job ({}) has started here in the meantime", there.name);
                Err(PipelineError::new(ErrorKind::Output, message))
            }
            _ => self.put_json_if_owner(PLAN, plan).await,
        }
    }

    /// Replaces the plan of a job whose input has changed; `was` is the hash of the plan to replace.
    ///
    /// # Errors
    /// When the store rejects it, or when another job has begun in the meantime.
    pub async fn replan(&self, plan: &PlanRecord, was: &str) -> Result<()> {
        self.check_ownership().await?;
        match self.plan().await? {
            Some(there) if there.job_hash == was => self.put_json_if_owner(PLAN, plan).await,
            there => {
                let name = there.map(|plan| plan.name).unwrap_or_default();
                let message = format!("{self}: another job ({name}) has started here in the meantime");
                Err(PipelineError::new(ErrorKind::Output, message))
            }
        }
    }

    /// Reads the plan of the output; `None` if there is none.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub async fn plan(&self) -> Result<Option<PlanRecord>> {
        let Some(bytes) = self.get(PLAN).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            let message = format!("{} is damaged: {e}; `{}` repairs it", self.shown(PLAN), repair_command(self, None));
            PipelineError::new(ErrorKind::DataSet, message)
        })
    }

    /// Returns the folder of the job file. `None` for an output in a store.
    pub async fn job_folder(&self) -> Option<PathBuf> {
        let plan = self.plan().await.ok()??;
        Some(self.folder()?.join(plan.job_folder))
    }

    /// Returns the path of the job file if it still exists.
    pub async fn job_file(&self) -> Option<PathBuf> {
        let plan = self.plan().await.ok()??;
        disk::existing_file(self.folder()?.join(plan.job_folder).join(plan.job_file)).await
    }

    /// Folder for the staged rows while the job runs: inside an output on a disk, otherwise in this machine's
    /// cache folder. A run whose splits other processes make also copies the rows to an output in a store.
    ///
    /// # Errors
    /// When this machine has no cache folder.
    pub fn sql_folder(&self, job_hash: &str) -> Result<PathBuf> {
        match self.folder() {
            Some(root) => Ok(root.join(INPUT)),
            None => {
                let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
                let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
                let none = || {
                    PipelineError::new(
                        ErrorKind::Output,
                        "set HOME or XDG_CACHE_HOME: the rows of input.sql or of a mixture are kept there while the job runs",
                    )
                };
                let name = hex::encode(Sha256::digest(format!("{job_hash} {self}")));
                Ok(cache.ok_or_else(none)?.join("stillhouse/sql").join(name))
            }
        }
    }
}
