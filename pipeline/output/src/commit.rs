//! The commit protocol, on a disk and in an object store.
//!
//! ```text
//!   disk    staged file ── sync, link ──► data/X ── sync of data/ ──► splits/N.json             record last
//!   store   parts of X uploaded ──► splits/N.json (If-None-Match: *) ── complete upload ──► data/X   record first
//! ```
//!
//! In a store only one writer can create the record, and the record names the one upload that may become `data/X`. If
//! two workers make a split, the second one finds the record and aborts its own upload, however late it comes. If a
//! worker crashes between the record and the completion, the next process that finds the record completes the upload:
//! the record contains everything needed.

use std::io;
use std::time::Duration;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::{Deserialize, Serialize};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::storage;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;

use super::upload::{Staged, StagedKind, UploadRecord};
use super::{Backend, Output, STATE_FOLDER};

/// Interval at which the second worker checks for the record of the first, which writes it a few system calls after its
/// shard.
const RECORD_POLL_INTERVAL: Duration = Duration::from_millis(100);
const MAX_RECORD_POLLS: u32 = 50;

/// The record of a committed split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommitRecord {
    /// Hash of the job. Records of other jobs are ignored.
    #[serde(default)]
    pub job_hash: String,
    /// The shard.
    #[serde(flatten)]
    pub shard: ShardRecord,
    /// In an object store: the upload that becomes the shard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadRecord>,
}

pub(super) fn split_record(split: SplitId) -> String {
    format!("{STATE_FOLDER}/splits/{:05}.json", split.0)
}

impl Output {
    /// Makes a shard visible and records the commit. Returns the valid record; in a store that may be the record of
    /// another worker that was first.
    ///
    /// # Errors
    /// When the store rejects it, or when another run has taken over the output.
    pub async fn commit(&self, staged: Staged, shard: ShardRecord) -> Result<ShardRecord> {
        #[cfg(debug_assertions)]
        if self.joined {
            pause_before_commit().await;
        }
        match staged.kind {
            StagedKind::Disk(staged) => self.commit_file(&staged, shard).await,
            StagedKind::Store { path, upload } => {
                let record = CommitRecord { job_hash: self.job_hash.clone(), shard, upload: Some(upload) };
                self.commit_upload(&path, record).await
            }
        }
    }

    async fn commit_file(&self, staged: &Path, shard: ShardRecord) -> Result<ShardRecord> {
        let _held = self.lock_commits().await?;
        self.check_ownership().await?;
        let name = split_record(shard.split);
        self.sync(staged.as_ref()).await?;
        match self.rename_if_free(staged, &Path::from(shard.path.as_str())).await {
            Ok(()) => {
                self.sync_name(&shard.path).await?;
                let record = CommitRecord { job_hash: self.job_hash.clone(), shard, upload: None };
                self.put_json(&name, &record).await?;
                Ok(record.shard)
            }
            Err(object_store::Error::AlreadyExists { .. }) => {
                self.delete(staged.as_ref()).await?;
                for _ in 0..MAX_RECORD_POLLS {
                    match self.get_json::<CommitRecord>(&name).await? {
                        Some(winner) if self.is_own(&winner) => return Ok(winner.shard),
                        Some(_) => break,
                        None => tokio::time::sleep(RECORD_POLL_INTERVAL).await,
                    }
                }
                // The worker that placed the shard was killed before it wrote the record. With equal bytes it is this
                // shard.
                if self.read_whole(&shard.path, |_| {}).await? == (shard.sha256.clone(), shard.bytes) {
                    self.sync_name(&shard.path).await?;
                    let record = CommitRecord { job_hash: self.job_hash.clone(), shard, upload: None };
                    self.put_json(&name, &record).await?;
                    return Ok(record.shard);
                }
                let message = format!("{}: exists, but no record says that it is committed", self.shown(&shard.path));
                Err(PipelineError::new(ErrorKind::Output, message).retryable())
            }
            Err(e) => Err(self.failed(&e, "commit", &shard.path)),
        }
    }

    /// Renames a staged file unless the name is taken.
    ///
    /// A hard link fails if the name is taken. On a file system without hard links, this checks the name and then
    /// renames the file. If two processes do so at the same time, the later file replaces the earlier one. Both would
    /// have to hold this output's lock and make splits of one job, so their bytes are equal.
    async fn rename_if_free(&self, staged: &Path, to: &Path) -> object_store::Result<()> {
        match self.store.rename_if_not_exists(staged, to).await {
            Err(e) if is_link_unsupported(&e) => match self.store.head(to).await {
                Ok(_) => Err(object_store::Error::AlreadyExists { path: to.to_string(), source: Box::new(e) }),
                Err(object_store::Error::NotFound { .. }) => self.store.rename(staged, to).await,
                Err(e) => Err(e),
            },
            moved => moved,
        }
    }

    async fn commit_upload(&self, path: &Path, record: CommitRecord) -> Result<ShardRecord> {
        if let Err(e) = self.check_ownership().await {
            self.abort_upload(path, &record).await;
            return Err(e);
        }
        let name = split_record(record.shard.split);
        let valid = match self.create_json(&name, &record).await {
            Ok(()) => record,
            Err(e) if matches!(e, object_store::Error::AlreadyExists { .. }) => {
                let winner =
                    self.get_json::<CommitRecord>(&name).await?.ok_or_else(|| self.failed(&e, "commit", &name))?;
                if winner.upload != record.upload {
                    self.abort_upload(path, &record).await;
                }
                if winner.job_hash != record.job_hash {
                    let message = format!("{}: another job has committed this split; run again", self.shown(&name));
                    return Err(PipelineError::new(ErrorKind::Output, message).retryable());
                }
                winner
            }
            // It is unknown whether the record was written. The next run handles both cases.
            Err(e) => return Err(self.failed(&e, "commit", &name)),
        };
        if self.complete_upload(&valid).await? {
            return Ok(valid.shard);
        }
        self.remove_stale_record(&valid).await?;
        Err(PipelineError::new(
            ErrorKind::Output,
            format!(
                "{}: another process aborted its upload before it was complete; run the job again",
                self.shown(&valid.shard.path)
            ),
        )
        .retryable())
    }

    /// Replaces a missing or damaged shard with one that was made again, if the new one matches the record.
    ///
    /// # Errors
    /// When the bytes differ from the record; the new shard is discarded then. When the store rejects it, or when another
    /// run has taken over the output.
    pub async fn replace(&self, staged: Staged, made: &ShardRecord, record: &ShardRecord) -> Result<()> {
        if (staged.bytes, &staged.sha256) != (record.bytes, &record.sha256) {
            let is_of_other_input = made.input_sha256 != record.input_sha256;
            self.discard(staged).await;
            let why = match is_of_other_input {
                true => "its input has changed since; put the files back as they were",
                false => {
                    "its input is the same; another type of CPU or version of this program made it then, use that one"
                }
            };
            let message = format!(
                "{}: made again it has {} bytes and sha256 {}, the record has {} and {}: {why}, or make the data set anew with `run --overwrite`; what is there was left as it is",
                self.shown(&record.path),
                made.bytes,
                made.sha256,
                record.bytes,
                record.sha256
            );
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        #[cfg(debug_assertions)]
        if self.joined {
            pause_before_commit().await;
        }
        // As for a commit: a run that takes over the output waits for workers between their check and their rename.
        let _held = self.lock_commits().await?;
        self.check_ownership().await?;
        let outcome = match (&staged.kind, &self.backend) {
            (StagedKind::Disk(staged), _) => {
                self.sync(staged.as_ref()).await?;
                let moved = self.store.rename(staged, &Path::from(record.path.as_str())).await;
                if moved.is_ok() {
                    self.sync_name(&record.path).await?;
                }
                moved
            }
            // Unconditional: the existing shard is damaged, and the record says what must replace it.
            (StagedKind::Store { path, upload }, Backend::Store(bucket)) => {
                bucket.multipart.complete_multipart(path, &upload.id, upload.part_ids()).await.map(|_| ())
            }
            (StagedKind::Store { .. }, Backend::Disk(_) | Backend::Web(_)) => Ok(()),
        };
        // If the response was lost, the retry fails although the first request succeeded. Only the stored size counts.
        match (self.size(&record.path).await? == Some(record.bytes), outcome) {
            (true, Ok(())) => Ok(()),
            (true, Err(e)) if is_upload_gone(&e) => Ok(()),
            (_, Err(e)) => Err(self.failed(&e, "write", &record.path)),
            (false, Ok(())) => Err(PipelineError::new(
                ErrorKind::Output,
                format!("{}: the store does not have the {} bytes it took", self.shown(&record.path), record.bytes),
            )),
        }
    }

    /// Discards a staged shard.
    async fn discard(&self, staged: Staged) {
        let gone = match (staged.kind, &self.backend) {
            (StagedKind::Disk(staged), _) => self.store.delete(&staged).await,
            (StagedKind::Store { path, upload }, Backend::Store(bucket)) => {
                bucket.multipart.abort_multipart(&path, &upload.id).await
            }
            (StagedKind::Store { .. }, Backend::Disk(_) | Backend::Web(_)) => Ok(()),
        };
        if let Err(e) = gone {
            tracing::debug!("{e}");
        }
    }

    /// Writes the commit record of a shard from the manifest's data. Returns the record's name.
    ///
    /// # Errors
    /// When the store rejects it, or when another run has taken over the output.
    pub async fn record(&self, shard: &ShardRecord) -> Result<String> {
        self.check_ownership().await?;
        let name = split_record(shard.split);
        let record = CommitRecord { job_hash: self.job_hash.clone(), shard: shard.clone(), upload: None };
        self.put_json(&name, &record).await?;
        Ok(name)
    }

    /// Removes a record whose upload no longer exists, unless another record has replaced it.
    pub(super) async fn remove_stale_record(&self, record: &CommitRecord) -> Result<()> {
        let name = split_record(record.shard.split);
        self.check_ownership().await?;
        match self.get_json::<CommitRecord>(&name).await? {
            Some(now) if now == *record => self.delete(&name).await,
            _ => Ok(()),
        }
    }

    async fn abort_upload(&self, path: &Path, record: &CommitRecord) {
        if let (Backend::Store(bucket), Some(upload)) = (&self.backend, &record.upload)
            && let Err(e) = bucket.multipart.abort_multipart(path, &upload.id).await
        {
            tracing::debug!("{path}: {e}");
        }
    }

    /// Completes the upload that a record names, which is the last step of a commit. Returns false if the upload no
    /// longer exists and the shard is missing.
    pub(super) async fn complete_upload(&self, record: &CommitRecord) -> Result<bool> {
        let (Backend::Store(bucket), Some(upload)) = (&self.backend, &record.upload) else { return Ok(false) };
        let path = bucket.full_path(&record.shard.path);
        let completed = match &bucket.uploads {
            Some(uploads) if self.conditional => {
                uploads.complete_if_absent(&path, &upload.id, &upload.part_ids()).await.map(|_| ())
            }
            _ => bucket.multipart.complete_multipart(&path, &upload.id, upload.part_ids()).await.map(|_| ()),
        };
        // If the response was lost, the retry fails although the first request succeeded. Only the shard counts.
        if self.size(&record.shard.path).await? == Some(record.shard.bytes) {
            return Ok(true);
        }
        match completed {
            Err(e) if is_upload_gone(&e) => Ok(false),
            Err(object_store::Error::Precondition { .. } | object_store::Error::AlreadyExists { .. }) => {
                let message =
                    format!("{}: something else is there; remove it and run again", self.shown(&record.shard.path));
                Err(PipelineError::new(ErrorKind::Output, message))
            }
            Err(e) => Err(self.failed(&e, "complete", &record.shard.path)),
            Ok(_) => Err(PipelineError::new(
                ErrorKind::Output,
                format!(
                    "{}: the store does not have the {} bytes it took",
                    self.shown(&record.shard.path),
                    record.shard.bytes
                ),
            )),
        }
    }
}

/// Test hook: pauses a worker just before its commit. It writes a `.reached` file beside the file that the variable
/// names, and continues when the named file is removed.
#[cfg(debug_assertions)]
async fn pause_before_commit() {
    let Some(path) = std::env::var_os("STILLHOUSE_TEST_HOLD_COMMIT").map(std::path::PathBuf::from) else { return };
    let exists = async || tokio::fs::try_exists(&path).await.unwrap_or(false);
    if exists().await {
        let _ = tokio::fs::write(path.with_extension("reached"), "").await;
    }
    while exists().await {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether an error means that the file system, or this file, does not allow hard links:
/// - EPERM: Linux reports it for file systems without links, and where links to others' files are forbidden.
/// - EOPNOTSUPP and ENOSYS: network and FUSE file systems.
/// - EMLINK.
///
/// EXDEV is excluded, because a rename across file systems fails as well.
pub(super) fn is_link_unsupported(error: &object_store::Error) -> bool {
    let Some(number) = storage::find_cause::<io::Error>(error).and_then(io::Error::raw_os_error) else { return false };
    [libc::EPERM, libc::EOPNOTSUPP, libc::ENOTSUP, libc::ENOSYS, libc::EMLINK].contains(&number)
}

/// Whether an error means that the upload no longer exists: completed, aborted or never created.
fn is_upload_gone(error: &object_store::Error) -> bool {
    match error {
        object_store::Error::NotFound { .. } => true,
        // object_store's in-memory store has no specific error for it.
        object_store::Error::Generic { store: "InMemory", .. } => true,
        // Azure: the blocks never existed or no longer do.
        _ => storage::find_transport_error(error).is_some_and(|failure| match &failure.outcome {
            storage::Outcome::Refused(refusal) => refusal.code.as_deref() == Some("InvalidBlockList"),
            storage::Outcome::Broken(..) => false,
        }),
    }
}
