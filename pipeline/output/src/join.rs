//! Several processes at one job: one holds the output, the others work for it.
//!
//! ```text
//!   holder: lock, plan ──ticket──► worker: join ─► splits, each committed as always
//!      └─ ends, or loses the output ─────────────► its workers' next commit is refused
//! ```
//!
//! A worker takes no lock of its own. Before each commit it makes sure that the run it works for still holds the output: on a disk its lock, in
//! a store its lease; each names its holder. So two jobs on one output stay impossible, and a split that two workers made is committed once,
//! as ever.
//!
//! A worker may sleep between the look and the commit, for as long as it likes. In a store the commit itself is conditional. On a disk a
//! worker holds `_stillhouse/commits` (shared) around both, and a run that takes the output over waits, once the lock does not name the one before, until
//! nobody holds it: who comes later sees another name, or none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::time::Duration;

use futures::StreamExt;
use serde::{Deserialize, Serialize};

use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Progress, StageStatus};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;

use super::commit::{CommitRecord, split_record};
use super::{Backend, Output, Pulse, REQUESTS, STATE, disk, lease};

/// What the workers are at.
pub(super) const WORKERS: &str = "_stillhouse/workers";
/// Locked, shared, by workers that commit on a disk.
const COMMITS: &str = "commits";
/// How long a run waits for the commits of others: each takes the time of a few system calls.
const WAIT: Duration = Duration::from_millis(50);
const WAITS: u32 = 200;

/// What a worker needs to work for the run that holds an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Hash of the job.
    pub job_hash: String,
    /// Who holds the output: the lease in a store, the lock on a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// What a worker is at, for whoever looks on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AtWork {
    /// Its name, for a person.
    pub worker: String,
    /// The run that it works for, as the ticket names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// The splits that it makes.
    pub splits: Vec<SplitAtWork>,
    /// Why this process makes nothing of the job, where its machine cannot and others may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cannot: Option<String>,
    /// How often it has told, so that one who stands still is known from one who is dead.
    #[serde(default)]
    pub told: u64,
    /// What it has counted since it joined the run.
    #[serde(default)]
    pub progress: Progress,
    /// What its user should know of; the last of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// Something that a worker warns of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Its number among this worker's, from 1.
    pub number: u64,
    /// In words.
    pub message: String,
}

impl AtWork {
    /// Of a worker that has not begun.
    pub fn new(worker: &str, output: &Output) -> Self {
        Self {
            worker: worker.into(),
            holder: output.ticket().holder,
            splits: Vec::new(),
            cannot: None,
            told: 0,
            progress: Progress::default(),
            warnings: Vec::new(),
        }
    }
}

/// Where a split stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitAtWork {
    /// Which.
    pub split: SplitId,
    /// What it reads.
    pub reads: String,
    /// Its stages, in the order of the pipeline.
    pub stages: Vec<StageStatus>,
    /// What this attempt has counted.
    #[serde(default)]
    pub counts: SplitCounts,
}

/// What is counted of one attempt at a split, and of its shard once that is committed; named as in [`Progress`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitCounts {
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// Tokens of text.
    pub tokens: u64,
    /// Sequences packed.
    pub sequences: u64,
    /// Tokens that the teacher has gone over.
    pub teacher_tokens: u64,
}

impl SplitCounts {
    /// Adds those of another split.
    pub fn add(&mut self, other: &Self) {
        self.documents += other.documents;
        self.text_bytes += other.text_bytes;
        self.tokens += other.tokens;
        self.sequences += other.sequences;
        self.teacher_tokens += other.teacher_tokens;
    }
}

impl SplitAtWork {
    /// Rows that came out of all stages.
    pub fn rows(&self) -> u64 {
        self.stages.iter().map(|stage| stage.rows).sum()
    }
}

impl Output {
    /// Tells what a worker is at.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn report(&self, id: &str, at: &AtWork) -> Result<()> {
        self.put_json(&format!("{WORKERS}/{id}.json"), at).await
    }

    /// What the workers of this run are at, by the names of their reports; those that have died since are among them. One listing, and a
    /// request for each.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn reports(&self) -> Result<BTreeMap<String, AtWork>> {
        let names = self.list(WORKERS).await?.into_keys();
        let report = |name: String| async move { self.get(&name).await.map(|bytes| (name, bytes)) };
        let mut reports = futures::stream::iter(names).map(report).buffered(REQUESTS);
        let mut all = BTreeMap::new();
        while let Some(report) = reports.next().await {
            let (name, bytes) = report?;
            // what is there and no report says nothing, nor does one of a run before this
            let at = bytes.and_then(|bytes| serde_json::from_slice::<AtWork>(&bytes).ok());
            all.extend(at.filter(|at| at.holder.as_ref() == self.holder.get()).map(|at| (name, at)));
        }
        Ok(all)
    }

    /// Says at the output who holds it, so that workers know their run from others: on a disk in its lock; a lease says it anyway. What the
    /// workers of a run before this one have told goes.
    ///
    /// # Errors
    /// When the disk does not take it, or the store does not remove what was told.
    pub async fn let_others_join(&self) -> Result<()> {
        self.remove_under(WORKERS).await?;
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let holder = self.holder.get_or_init(lease::unique).clone();
        let path = root.join(STATE).join("lock");
        let context = format!("cannot write {}", path.display());
        disk::name_holder(path, holder).await.map_err(PipelineError::output(context))
    }

    /// For the workers of the run that holds this output.
    pub fn ticket(&self) -> Ticket {
        Ticket { job_hash: self.job_hash.clone(), holder: self.holder.get().cloned() }
    }

    /// The same output, for a worker of the run that gave the ticket.
    #[must_use]
    pub fn joined(self, ticket: &Ticket) -> Self {
        if let Some(holder) = &ticket.holder {
            let _ = self.holder.set(holder.clone());
        }
        Self { joined: true, ..self.for_job(&ticket.job_hash) }
    }

    /// For a worker that looks now and then: whether its run still holds the output, and is alive. On a disk the kernel tells that; a lease is
    /// there after its holder was killed too, but it is not renewed then.
    ///
    /// # Errors
    /// When it does not, or the store cannot say.
    pub async fn still_alive(&self, pulse: &mut Pulse) -> Result<()> {
        let Some(renewals) = self.renewals().await? else { return Ok(()) };
        let Some(waited) = pulse.ended(renewals) else { return Ok(()) };
        let message = format!(
            "{self}: the run that this worker works for has not renewed its lease for {} s, so it was killed or is cut off; this one stops",
            waited.as_secs()
        );
        // an executor's owner is told: nobody said that the run would end
        tracing::warn!("{message}");
        Err(PipelineError::new(ErrorKind::Output, message))
    }

    /// Whether this is a worker's, of a run in another process.
    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// On a disk: whether the run that this worker works for still holds the lock. A run's own process holds it itself.
    pub(super) async fn is_locked(&self) -> Result<()> {
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let path = root.join(STATE).join("lock");
        let context = format!("cannot look at {}", path.display());
        let holder = disk::lock_holder(path).await;
        let holder = holder.map_err(|e| PipelineError::caused(ErrorKind::Output, context, e))?;
        let why = match (holder, self.holder.get()) {
            (None, _) => "the run that this worker works for has ended",
            (Some(now), Some(ours)) if now != *ours => "another run has taken this output over",
            (Some(_), _) => return Ok(()),
        };
        Err(PipelineError::new(ErrorKind::Output, format!("{self}: {why}; this one stops")))
    }

    /// On a disk: held by a worker around its look at the lock and its commit.
    pub(super) async fn hold_commits(&self) -> Result<Option<File>> {
        match &self.backend {
            Backend::Disk(root) if self.joined => {
                // else one that comes late would leave the file behind
                self.is_locked().await?;
                let path = root.join(STATE).join(COMMITS);
                let context = format!("cannot lock {}", path.display());
                disk::hold(path).await.map(Some).map_err(PipelineError::output(context))
            }
            _ => Ok(None),
        }
    }

    /// Waits until no worker of an earlier run is between its look and its commit.
    pub(super) async fn others_have_committed(&self) -> Result<()> {
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let path = root.join(STATE).join(COMMITS);
        let context = format!("cannot lock {}", path.display());
        for _ in 0..WAITS {
            let free = disk::all_let_go(path.clone(), false).await;
            if free.map_err(PipelineError::output(context.clone()))? {
                return Ok(());
            }
            tokio::time::sleep(WAIT).await;
        }
        let message = format!(
            "{self}: a worker of an earlier run is in the middle of a commit and does not move; stop it and run again"
        );
        Err(PipelineError::new(ErrorKind::Output, message).retryable())
    }

    /// Takes the file away that workers held, unless one still does.
    pub(super) async fn forget_commits(&self) {
        let Backend::Disk(root) = &self.backend else { return };
        if let Err(e) = disk::all_let_go(root.join(STATE).join(COMMITS), true).await {
            tracing::debug!("{self}: {e}");
        }
    }

    /// The record of a split that this job has committed; its shard is there. `None` where there is none, or where its upload is gone.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn committed(&self, split: SplitId) -> Result<Option<ShardRecord>> {
        let Some(record) = self.get_json::<CommitRecord>(&split_record(split)).await? else { return Ok(None) };
        if !self.is_own(&record) {
            return Ok(None);
        }
        let is_there = self.size(&record.shard.path).await? == Some(record.shard.bytes) || self.settle(&record).await?;
        Ok(is_there.then_some(record.shard))
    }

    /// The same, for who only looks on: one whose upload is not complete yet is not there.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn seen(&self, split: SplitId) -> Result<Option<ShardRecord>> {
        let Some(record) = self.get_json::<CommitRecord>(&split_record(split)).await? else { return Ok(None) };
        let is_there = self.is_own(&record) && self.size(&record.shard.path).await? == Some(record.shard.bytes);
        Ok(is_there.then_some(record.shard))
    }

    /// Splits that this job has committed, by the names of their records: one listing.
    ///
    /// # Errors
    /// When the store cannot list them.
    pub async fn committed_splits(&self) -> Result<BTreeSet<SplitId>> {
        let names = self.list(&format!("{STATE}/splits")).await?;
        let number = |name: String| Some(SplitId(name.rsplit_once('/')?.1.strip_suffix(".json")?.parse().ok()?));
        Ok(names.into_keys().filter_map(number).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillhouse_base::events::Silent;

    #[tokio::test]
    async fn a_worker_may_commit_as_long_as_its_run_holds_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let made = Output::on_disk(folder.path()).unwrap().create(&Silent).await.unwrap();
        let run = made.for_job("abc");
        let lock = run.lock(&Silent).await.unwrap();
        run.let_others_join().await.unwrap();
        let sent = serde_json::to_string(&run.ticket()).unwrap();
        let worker = Output::on_disk(folder.path()).unwrap().joined(&serde_json::from_str(&sent).unwrap());
        worker.still_ours().await.unwrap();
        // another run is refused meanwhile, of the same job too
        assert!(Output::on_disk(folder.path()).unwrap().for_job("abc").lock(&Silent).await.is_err());
        lock.release().await;
        let ended = worker.still_ours().await.unwrap_err().to_string();
        assert!(ended.ends_with("the run that this worker works for has ended; this one stops"), "{ended}");
        // and when another one holds the same lock
        let next = Output::on_disk(folder.path()).unwrap().for_job("abc");
        let lock = next.lock(&Silent).await.unwrap();
        next.let_others_join().await.unwrap();
        let refused = worker.still_ours().await.unwrap_err().to_string();
        assert!(refused.ends_with("another run has taken this output over; this one stops"), "{refused}");
        let (ticket, worker) = (next.ticket(), Output::on_disk(folder.path()).unwrap());
        let worker = worker.joined(&ticket);
        worker.still_ours().await.unwrap();
        // one in the middle of its commit is waited for
        let held = worker.hold_commits().await.unwrap();
        lock.release().await;
        let third = Output::on_disk(folder.path()).unwrap().for_job("other");
        let taking = third.lock(&Silent);
        tokio::pin!(taking);
        assert!(tokio::time::timeout(Duration::from_millis(300), &mut taking).await.is_err());
        drop(held);
        taking.await.unwrap().release().await;
    }
}
