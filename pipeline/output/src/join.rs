//! Several processes work on one job: one holds the output, the others are its workers.
//!
//! ```text
//!   holder: lock, plan ──ticket──► worker: join ─► splits, each committed as usual
//!      └─ ends, or loses the output ─────────────► the next commit of its workers is refused
//! ```
//!
//! A worker takes no lock of its own. Before each commit it checks that its run still holds the output, by the holder's
//! name in the lock (disk) or the lease (store). Two jobs on one output therefore stay impossible, and a split that two
//! workers make is committed once.
//!
//! A worker may be suspended between the check and the commit for any time. In a store the commit itself is
//! conditional. On a disk a worker holds a shared lock on `_stillhouse/commits` during both. A run that takes over the
//! output first clears the holder's name, then waits until nobody holds that lock. A later worker sees another name, or
//! none.

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
use super::{Backend, LeaseMonitor, MAX_CONCURRENT_REQUESTS, Output, STATE_FOLDER, disk, lease};

/// Folder of the workers' reports.
pub(super) const WORKERS: &str = "_stillhouse/workers";
/// File on which workers hold a shared lock while they commit on a disk.
const COMMITS_LOCK: &str = "commits";
/// Interval at which a run checks for commits in progress. A commit takes a few system calls.
const COMMITS_POLL_INTERVAL: Duration = Duration::from_millis(50);
const MAX_COMMITS_POLLS: u32 = 200;

/// What a worker needs to join the run that holds an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Hash of the job.
    pub job_hash: String,
    /// Name of the holder of the output: of the lease in a store, of the lock on a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// A worker's report of its current work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The worker's name, for display.
    pub worker: String,
    /// Holder of the output for which it works, as in the ticket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// The splits in progress.
    pub splits: Vec<SplitReport>,
    /// Why this machine cannot make splits of the job, if it cannot; others may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cannot: Option<String>,
    /// Number of reports so far. It distinguishes a stalled worker from a dead one.
    #[serde(default)]
    pub told: u64,
    /// Counts since the worker joined the run.
    #[serde(default)]
    pub progress: Progress,
    /// The latest warnings for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
}

/// A warning of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Number of the warning for this worker, from 1.
    pub number: u64,
    /// The message.
    pub message: String,
}

impl WorkerReport {
    /// The report of a worker that has not begun.
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

/// Progress of a split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitReport {
    /// The split's number.
    pub split: SplitId,
    /// The input that it reads.
    pub reads: String,
    /// Its stages in pipeline order.
    pub stages: Vec<StageStatus>,
    /// Counts of this attempt.
    #[serde(default)]
    pub counts: SplitCounts,
}

/// Counts of one attempt at a split, and of its shard once committed. The names match [`Progress`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitCounts {
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// Text tokens.
    pub tokens: u64,
    /// Sequences packed.
    pub sequences: u64,
    /// Tokens processed by the teacher.
    pub teacher_tokens: u64,
}

impl SplitCounts {
    /// Adds the counts of another split.
    pub fn add(&mut self, other: &Self) {
        self.documents += other.documents;
        self.text_bytes += other.text_bytes;
        self.tokens += other.tokens;
        self.sequences += other.sequences;
        self.teacher_tokens += other.teacher_tokens;
    }
}

impl SplitReport {
    /// Sum of the rows that all stages have emitted.
    pub fn rows(&self) -> u64 {
        self.stages.iter().map(|stage| stage.rows).sum()
    }
}

impl Output {
    /// Writes a worker's report.
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn report(&self, id: &str, at: &WorkerReport) -> Result<()> {
        self.put_json(&format!("{WORKERS}/{id}.json"), at).await
    }

    /// Reads the reports of this run's workers, by report name, including those of workers that have died. Costs one
    /// listing and one request per report.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn reports(&self) -> Result<BTreeMap<String, WorkerReport>> {
        let names = self.list(WORKERS).await?.into_keys();
        let report = |name: String| async move { self.get(&name).await.map(|bytes| (name, bytes)) };
        let mut reports = futures::stream::iter(names).map(report).buffered(MAX_CONCURRENT_REQUESTS);
        let mut all = BTreeMap::new();
        while let Some(report) = reports.next().await {
            let (name, bytes) = report?;
            // ignores files that are not reports, and reports to an earlier run
            let at = bytes.and_then(|bytes| serde_json::from_slice::<WorkerReport>(&bytes).ok());
            all.extend(at.filter(|at| at.holder.as_ref() == self.holder.get()).map(|at| (name, at)));
        }
        Ok(all)
    }

    /// Publishes the holder's name so that workers recognise their run: on a disk in the lock; a lease already names
    /// its holder. Removes the reports of an earlier run's workers.
    ///
    /// # Errors
    /// When the name cannot be written, or the old reports cannot be removed.
    pub async fn let_others_join(&self) -> Result<()> {
        self.remove_under(WORKERS).await?;
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let holder = self.holder.get_or_init(lease::unique).clone();
        let path = root.join(STATE_FOLDER).join("lock");
        let context = format!("cannot write {}", path.display());
        disk::name_holder(path, holder).await.map_err(PipelineError::output(context))
    }

    /// Returns the ticket for workers of the run that holds this output.
    pub fn ticket(&self) -> Ticket {
        Ticket { job_hash: self.job_hash.clone(), holder: self.holder.get().cloned() }
    }

    /// Turns this output into one of a worker of the run that issued the ticket.
    #[must_use]
    pub fn joined(self, ticket: &Ticket) -> Self {
        if let Some(holder) = &ticket.holder {
            let _ = self.holder.set(holder.clone());
        }
        Self { joined: true, ..self.for_job(&ticket.job_hash) }
    }

    /// For periodic checks by a worker: whether its run still holds the output and is alive. On a disk the kernel
    /// releases the lock of a dead run. In a store the lease of a killed holder remains but is no longer renewed.
    ///
    /// # Errors
    /// When the run no longer holds the output or is dead, or when the store fails.
    pub async fn check_run_alive(&self, pulse: &mut LeaseMonitor) -> Result<()> {
        let Some(renewals) = self.renewals().await? else { return Ok(()) };
        let Some(waited) = pulse.expired(renewals) else { return Ok(()) };
        let message = format!(
            "{self}: the run that this worker works for has not renewed its lease for {} s, so it was killed or is cut off; this one stops",
            waited.as_secs()
        );
        // Logged as a warning for the executor's operator, because the run ended without notice.
        tracing::warn!("{message}");
        Err(PipelineError::new(ErrorKind::Output, message))
    }

    /// Whether this process is a worker of a run in another process.
    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// On a disk, checks that the run of this worker still holds the lock. The run's own process holds the lock itself
    /// and needs no check.
    pub(super) async fn check_run_holds_lock(&self) -> Result<()> {
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let path = root.join(STATE_FOLDER).join("lock");
        let context = format!("cannot access {}", path.display());
        let holder = disk::lock_holder(path).await;
        let holder = holder.map_err(|e| PipelineError::caused(ErrorKind::Output, context, e))?;
        let reason = match (holder, self.holder.get()) {
            (None, _) => "the run that this worker works for has ended",
            (Some(now), Some(ours)) if now != *ours => "another run has taken this output over",
            (Some(_), _) => return Ok(()),
        };
        Err(PipelineError::new(ErrorKind::Output, format!("{self}: {reason}; this one stops")))
    }

    /// On a disk, takes the shared lock that a worker holds during its check and its commit.
    pub(super) async fn lock_commits(&self) -> Result<Option<File>> {
        match &self.backend {
            Backend::Disk(root) if self.joined => {
                // Without this check a late worker would create the file again and leave it behind.
                self.check_run_holds_lock().await?;
                let path = root.join(STATE_FOLDER).join(COMMITS_LOCK);
                let context = format!("cannot lock {}", path.display());
                disk::lock_shared(path).await.map(Some).map_err(PipelineError::output(context))
            }
            _ => Ok(None),
        }
    }

    /// Waits until no worker of an earlier run is between its check and its commit.
    pub(super) async fn wait_for_commits(&self) -> Result<()> {
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let path = root.join(STATE_FOLDER).join(COMMITS_LOCK);
        let context = format!("cannot lock {}", path.display());
        for _ in 0..MAX_COMMITS_POLLS {
            let free = disk::is_unlocked(path.clone(), false).await;
            if free.map_err(PipelineError::output(context.clone()))? {
                return Ok(());
            }
            tokio::time::sleep(COMMITS_POLL_INTERVAL).await;
        }
        let message = format!(
            "{self}: a worker of an earlier run is in the middle of a commit and does not move; stop it and run again"
        );
        Err(PipelineError::new(ErrorKind::Output, message).retryable())
    }

    /// Removes the lock file of the workers' commits, unless a worker still holds it.
    pub(super) async fn remove_commits_lock(&self) {
        let Backend::Disk(root) = &self.backend else { return };
        if let Err(e) = disk::is_unlocked(root.join(STATE_FOLDER).join(COMMITS_LOCK), true).await {
            tracing::debug!("{self}: {e}");
        }
    }

    /// Returns the record of a split that this job has committed and whose shard exists. Completes the upload if
    /// necessary. `None` if there is no record, or its upload no longer exists.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn committed(&self, split: SplitId) -> Result<Option<ShardRecord>> {
        let Some(record) = self.get_json::<CommitRecord>(&split_record(split)).await? else { return Ok(None) };
        if !self.is_own(&record) {
            return Ok(None);
        }
        let is_there =
            self.size(&record.shard.path).await? == Some(record.shard.bytes) || self.complete_upload(&record).await?;
        Ok(is_there.then_some(record.shard))
    }

    /// Like [`Output::committed`], for observers: does not complete uploads, so a split with an incomplete upload is
    /// `None`.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn committed_readonly(&self, split: SplitId) -> Result<Option<ShardRecord>> {
        let Some(record) = self.get_json::<CommitRecord>(&split_record(split)).await? else { return Ok(None) };
        let is_there = self.is_own(&record) && self.size(&record.shard.path).await? == Some(record.shard.bytes);
        Ok(is_there.then_some(record.shard))
    }

    /// Lists the splits that have a commit record. Costs one listing.
    ///
    /// # Errors
    /// When the store cannot list them.
    pub async fn committed_splits(&self) -> Result<BTreeSet<SplitId>> {
        let names = self.list(&format!("{STATE_FOLDER}/splits")).await?;
        let number = |name: String| Some(SplitId(name.rsplit_once('/')?.1.strip_suffix(".json")?.parse().ok()?));
        Ok(names.into_keys().filter_map(number).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillhouse_base::events::NullObserver;

    #[tokio::test]
    async fn a_worker_may_commit_as_long_as_its_run_holds_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let made = Output::on_disk(folder.path()).unwrap().create(&NullObserver).await.unwrap();
        let run = made.for_job("abc");
        let lock = run.lock(&NullObserver).await.unwrap();
        run.let_others_join().await.unwrap();
        let sent = serde_json::to_string(&run.ticket()).unwrap();
        let worker = Output::on_disk(folder.path()).unwrap().joined(&serde_json::from_str(&sent).unwrap());
        worker.check_ownership().await.unwrap();
        // meanwhile another run is refused, even of the same job
        assert!(Output::on_disk(folder.path()).unwrap().for_job("abc").lock(&NullObserver).await.is_err());
        lock.release().await;
        let ended = worker.check_ownership().await.unwrap_err().to_string();
        assert!(ended.ends_with("the run that this worker works for has ended; this one stops"), "{ended}");
        // another run now holds the same lock
        let next = Output::on_disk(folder.path()).unwrap().for_job("abc");
        let lock = next.lock(&NullObserver).await.unwrap();
        next.let_others_join().await.unwrap();
        let refused = worker.check_ownership().await.unwrap_err().to_string();
        assert!(refused.ends_with("another run has taken this output over; this one stops"), "{refused}");
        let (ticket, worker) = (next.ticket(), Output::on_disk(folder.path()).unwrap());
        let worker = worker.joined(&ticket);
        worker.check_ownership().await.unwrap();
        // a new run waits for a worker in the middle of its commit
        let held = worker.lock_commits().await.unwrap();
        lock.release().await;
        let third = Output::on_disk(folder.path()).unwrap().for_job("other");
        let taking = third.lock(&NullObserver);
        tokio::pin!(taking);
        assert!(tokio::time::timeout(Duration::from_millis(300), &mut taking).await.is_err());
        drop(held);
        taking.await.unwrap().release().await;
    }
}
