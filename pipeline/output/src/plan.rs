//! The plan that a run leaves at its output, `_stillhouse/plan.json`: what others go on with, and find the job by.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::manifest::{Appended, SplitRecord, TeacherArithmetic};

use super::commands::repair_command;
use super::{INPUT, Output, disk};
use crate::identity::PlannedFile;

/// Where the plan is.
pub const PLAN: &str = "_stillhouse/plan.json";

/// What a run remembers of its plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Hash of everything that decides the bytes of the shards.
    pub job_hash: String,
    /// Name of the job, for messages.
    pub name: String,
    /// The folder that the job's relative paths are relative to, as seen from the output folder.
    #[serde(default)]
    pub job_folder: String,
    /// The job file in it, where it was a file.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job_file: String,
    /// Everything but the input that decides the bytes of the shards: what the hash is of, for telling what has changed.
    #[serde(default)]
    pub identity: serde_json::Value,
    /// The files of the input, in order, and what their stores said of them.
    #[serde(default)]
    pub files: Vec<PlannedFile>,
    /// The splits.
    pub splits: Vec<SplitRecord>,
    /// The files that were appended after the first run, which are the last ones of `files` (`--append`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub appended: Vec<Appended>,
    /// In which arithmetic the teacher computes, where there is one: a run that goes on takes the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherArithmetic>,
    /// sha256 of each file of rows that `input.sql` gave, where the job has a query: the splits are of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub staged: Vec<String>,
}

impl PlanRecord {
    /// The splits, with the files under the names that they have now.
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

    /// Whether a commit with this hash is of this plan's job: its own, or the job's before files were appended.
    pub fn counts(&self, job_hash: &str) -> bool {
        self.job_hash == job_hash || self.appended.iter().any(|a| a.to == job_hash)
    }

    /// The files of which a store says something else than when the plan was made, by their place in the list.
    pub fn touched(&self, now: &[PlannedFile]) -> BTreeSet<usize> {
        let pairs = self.files.iter().zip(now).enumerate();
        pairs.filter(|(_, (was, is))| !was.state.is_still(&is.state)).map(|(i, _)| i).collect()
    }
}

impl Output {
    /// Writes the plan, where there is none of another job.
    ///
    /// # Errors
    /// When the store does not take it, or when another job has begun here meanwhile.
    pub async fn begin(&self, plan: &PlanRecord) -> Result<()> {
        self.still_ours().await?;
        match self.plan().await? {
            Some(there) if there.job_hash != plan.job_hash => {
                let message = format!("{self}: another job ({}) has begun here meanwhile", there.name);
                Err(PipelineError::new(ErrorKind::Output, message))
            }
            _ => self.put_own_json(PLAN, plan).await,
        }
    }

    /// Writes the plan of a job whose input is another one now, in place of the one that it had.
    ///
    /// # Errors
    /// When the store does not take it, or when something else has begun here meanwhile.
    pub async fn replan(&self, plan: &PlanRecord, was: &str) -> Result<()> {
        self.still_ours().await?;
        match self.plan().await? {
            Some(there) if there.job_hash == was => self.put_own_json(PLAN, plan).await,
            there => {
                let name = there.map(|plan| plan.name).unwrap_or_default();
                let message = format!("{self}: another job ({name}) has begun here meanwhile");
                Err(PipelineError::new(ErrorKind::Output, message))
            }
        }
    }

    /// The plan of the job that writes or wrote here.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub async fn plan(&self) -> Result<Option<PlanRecord>> {
        let Some(bytes) = self.get(PLAN).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            let message = format!("{} is damaged: {e}; `{}` mends it", self.shown(PLAN), repair_command(self, None));
            PipelineError::new(ErrorKind::DataSet, message)
        })
    }

    /// The folder of the job file, as far as it can be found from here.
    pub async fn job_folder(&self) -> Option<PathBuf> {
        let plan = self.plan().await.ok()??;
        Some(self.folder()?.join(plan.job_folder))
    }

    /// The job file, where it is still there.
    pub async fn job_file(&self) -> Option<PathBuf> {
        let plan = self.plan().await.ok()??;
        disk::found(self.folder()?.join(plan.job_folder).join(plan.job_file)).await
    }

    /// Folder for the rows of `input.sql` while the job runs: beside a disk's output, else of this machine. A run whose splits are made elsewhere
    /// puts them beside an output in a store too.
    ///
    /// # Errors
    /// When this machine has no folder for it.
    pub fn sql_folder(&self, job_hash: &str) -> Result<PathBuf> {
        match self.folder() {
            Some(root) => Ok(root.join(INPUT)),
            None => {
                let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
                let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
                let none = || {
                    PipelineError::new(
                        ErrorKind::Output,
                        "input.sql: set HOME or XDG_CACHE_HOME: its rows are kept there while the job runs",
                    )
                };
                let name = hex::encode(Sha256::digest(format!("{job_hash} {self}")));
                Ok(cache.ok_or_else(none)?.join("stillhouse/sql").join(name))
            }
        }
    }
}
