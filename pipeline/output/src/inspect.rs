//! Inspects an output: which job it belongs to, what is committed, what a crash left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::path::{Path as FsPath, PathBuf};

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStore;
use object_store::path::Path;
use serde::Deserialize;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_operators::registry::sidecar_files;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;

use super::commands::repair_command;
use super::commit::CommitRecord;
use super::upload::UploadRecord;
use super::{
    Backend, Bucket, CARD, Found, MANIFEST, MAX_CONCURRENT_REQUESTS, Output, PLAN, PlanRecord, STATE_FOLDER, SUCCESS,
    TOKENIZER, disk,
};

/// Describes, one difference per line, how the job of a plan differs from the current one.
pub type DescribeDifferences<'a> = dyn Fn(&PlanRecord) -> Vec<String> + Send + Sync + 'a;

/// The field of a manifest that identifies its job.
#[derive(Deserialize)]
struct ManifestJobHash {
    job_hash: String,
}

/// Maximum number of records that are read just to report how much the output contains.
const MAX_RECORDS_READ: usize = 2_000;

impl Output {
    /// Inspects the output for the job with this hash. Writes nothing.
    ///
    /// # Errors
    /// When it belongs to another job, or not to Stillhouse at all.
    pub async fn inspect(&self, job_hash: &str) -> Result<Found> {
        self.inspect_with(job_hash, &|_| Vec::new()).await
    }

    /// Like [`Output::inspect`]; `describe_differences` describes how another job differs, for the error message.
    ///
    /// # Errors
    /// As [`Output::inspect`].
    pub async fn inspect_with(&self, job_hash: &str, describe_differences: &DescribeDifferences<'_>) -> Result<Found> {
        let Some(plan) = self.plan().await? else {
            return match self.count_entries().await? {
                0 => Ok(Found::Nothing),
                _ if self.has_state().await? && self.is_a_data_set().await? => Err(PipelineError::new(
                    ErrorKind::DataSet,
                    format!(
                        "output.path: {self} holds a data set whose plan ({PLAN}) is missing; `{}` makes it again",
                        repair_command(self, None)
                    ),
                )),
                entries => Err(PipelineError::new(
                    ErrorKind::Usage,
                    format!(
                        "output.path: {self} holds {entries} files that are not of a Stillhouse job; choose an empty folder"
                    ),
                )),
            };
        };
        if plan.job_hash != job_hash {
            let mut message = format!(
                "output.path: {self} holds the output of another job ({}, hash {}; this job has {}); choose another folder, or `--overwrite` to remove it",
                plan.name,
                &plan.job_hash[..12.min(plan.job_hash.len())],
                &job_hash[..12.min(job_hash.len())],
            );
            let lines = describe_differences(&plan)
                .into_iter()
                .chain([format!("would be lost: {}", self.describe_contents(&plan).await)]);
            lines.for_each(|line| message += &format!("\n  {line}"));
            return Err(PipelineError::new(ErrorKind::Usage, message));
        }
        // A missing or damaged manifest is written again from the records.
        if let Some(manifest) = self.finished_manifest().await? {
            // Parse only the hash: a manifest may list many splits.
            if serde_json::from_slice::<ManifestJobHash>(&manifest).is_ok_and(|of| of.job_hash == job_hash) {
                return Ok(Found::Complete);
            }
        }
        let (mut done, mut incomplete_uploads) = (BTreeMap::new(), Vec::new());
        let shards = self.list("data").await?;
        for record in self.records().await?.into_iter().filter(|r| plan.includes_commit(&r.job_hash)) {
            if shards.get(&record.shard.path) == Some(&record.shard.bytes) {
                done.insert(record.shard.split, record.shard);
            } else {
                incomplete_uploads.push(record);
            }
        }
        Ok(Found::Resumable { done, incomplete_uploads })
    }

    /// Whether the output contains a manifest or a commit record.
    async fn is_a_data_set(&self) -> Result<bool> {
        Ok(self.exists(MANIFEST).await? || !self.list(&format!("{STATE_FOLDER}/splits")).await?.is_empty())
    }

    /// Describes what the output contains of a job.
    async fn describe_contents(&self, plan: &PlanRecord) -> String {
        let shards = self.list("data").await.unwrap_or_default();
        let shards: Vec<u64> =
            shards.into_iter().filter(|(name, _)| is_dataset_file(name)).map(|(_, bytes)| bytes).collect();
        let bytes: u64 = shards.iter().sum();
        // A store may have many records; this message is worth only a few requests.
        let records =
            if shards.len() <= MAX_RECORDS_READ { self.records().await.unwrap_or_default() } else { Vec::new() };
        let own = records.iter().filter(|r| plan.includes_commit(&r.job_hash));
        let rows = match own.clone().count() {
            0 => String::new(),
            _ => format!(", {} sequences", own.map(|r| r.shard.rows).sum::<u64>()),
        };
        format!("{} shards of {} splits{rows}, {bytes} bytes", shards.len(), plan.splits.len())
    }

    /// Counts the files that are not state of a run, up to 1,000. On a disk it counts top-level files and folders.
    pub(super) async fn count_entries(&self) -> Result<usize> {
        if self.folder().is_none() {
            // Some servers list folders that no longer contain anything, and web consoles create an empty object for
            // the folder itself.
            let state = Path::from(STATE_FOLDER);
            let is_state = |at: &Path| at.prefix_matches(&state) || at.as_ref().is_empty();
            let files = self.store.list(None).try_filter(|meta| ready(!is_state(&meta.location)));
            return files
                .take(1000)
                .try_fold(0, |n, _| ready(Ok(n + 1)))
                .await
                .map_err(|e| self.failed(&e, "list", ""));
        }
        let listing = match self.store.list_with_delimiter(None).await {
            Ok(listing) => listing,
            Err(object_store::Error::NotFound { .. }) => return Ok(0),
            Err(e) => return Err(self.failed(&e, "list", "")),
        };
        let folders = listing.common_prefixes.iter().filter(|p| p.filename() != Some(STATE_FOLDER)).count();
        Ok(folders + listing.objects.len())
    }

    /// Reads all commit records.
    ///
    /// # Errors
    /// When the store fails, or a record is damaged.
    pub async fn records(&self) -> Result<Vec<CommitRecord>> {
        let (records, unreadable) = self.readable_records().await?;
        match unreadable.into_iter().next() {
            None => Ok(records),
            Some((_, message)) => Err(PipelineError::new(ErrorKind::DataSet, message)),
        }
    }

    /// Reads all commit records. Returns damaged ones separately, by name with the error.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn readable_records(&self) -> Result<(Vec<CommitRecord>, Vec<(String, String)>)> {
        let names = self.list(&format!("{STATE_FOLDER}/splits")).await?.into_keys();
        let all: Vec<(String, Option<bytes::Bytes>)> = futures::stream::iter(names)
            .map(|name| async move { self.get(&name).await.map(|bytes| (name, bytes)) })
            .buffered(MAX_CONCURRENT_REQUESTS)
            .try_collect()
            .await?;
        let (mut records, mut unreadable) = (Vec::new(), Vec::new());
        for (name, bytes) in all.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))) {
            match serde_json::from_slice::<CommitRecord>(&bytes) {
                Ok(record) => records.push(record),
                Err(e) => {
                    let message =
                        format!("{} is damaged: {e}; `{}` repairs it", self.shown(&name), repair_command(self, None));
                    unreadable.push((name, message));
                }
            }
        }
        Ok((records, unreadable))
    }

    /// Cleans up after a crash: completes committed uploads and removes the rest. Returns the splits that it completed.
    ///
    /// The caller holds the lock, so every other upload to this output belongs to a dead process.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn recover(&self, incomplete_uploads: Vec<CommitRecord>) -> Result<BTreeMap<SplitId, ShardRecord>> {
        self.check_ownership().await?;
        self.delete(SUCCESS).await?;
        let mut settled = BTreeMap::new();
        for record in incomplete_uploads {
            if self.complete_upload(&record).await? {
                settled.insert(record.shard.split, record.shard);
            } else {
                self.remove_stale_record(&record).await?;
            }
        }
        self.remove_leftovers().await?;
        let (own, others): (Vec<_>, Vec<_>) = self.records().await?.into_iter().partition(|r| self.is_own(r));
        for record in others {
            self.remove_stale_record(&record).await?;
        }
        self.abort_uploads(false).await?;
        let committed: BTreeSet<String> = own.into_iter().map(|r| r.shard.path).collect();
        for name in
            self.list("data").await?.into_keys().filter(|name| is_dataset_file(name) && !committed.contains(name))
        {
            self.delete(&name).await?;
        }
        Ok(settled)
    }

    /// Finds unfinished uploads to this output, and aborts them unless `dry_run` is set. Returns their names.
    ///
    /// Skips uploads that a commit record names, and uploads to names that a data set does not use.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn abort_uploads(&self, dry_run: bool) -> Result<Vec<String>> {
        if !dry_run {
            self.check_ownership().await?;
        }
        let Backend::Store(Bucket { multipart, uploads: Some(uploads), prefix, .. }) = &self.backend else {
            return Ok(Vec::new());
        };
        let begun = match uploads.list(prefix).await {
            Ok(begun) => begun,
            // Some servers return this if there has never been an upload.
            Err(object_store::Error::NotFound { .. }) => Vec::new(),
            Err(e) => return Err(self.failed(&e, "list the uploads to", "")),
        };
        let records = self.records().await?;
        let committed: BTreeMap<&str, (&str, &UploadRecord)> = records
            .iter()
            .filter_map(|r| Some((r.shard.path.as_str(), r.upload.as_ref()?)))
            .map(|(shard, upload)| (upload.id.as_str(), (shard, upload)))
            .collect();
        let mut found = Vec::new();
        for upload in begun {
            let name: Path = upload.path.prefix_match(prefix).map(Iterator::collect).unwrap_or_default();
            if let Some((shard, record)) = committed.get(upload.id.as_str()) {
                // A server that crashed during a completion can have both the shard and its upload. Aborting could
                // delete the shard's parts, but completing again ends the upload.
                if !dry_run && self.exists(shard).await? {
                    let again = multipart.complete_multipart(&upload.path, &upload.id, record.part_ids()).await;
                    tracing::debug!(shard, ?again, "completed once more");
                }
                continue;
            }
            if !is_dataset_file(name.as_ref()) {
                continue;
            }
            found.push(name.to_string());
            if !dry_run {
                match multipart.abort_multipart(&upload.path, &upload.id).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(e) => return Err(self.failed(&e, "abort the upload of", name.as_ref())),
                }
            }
        }
        Ok(found)
    }

    /// Whether a Stillhouse job or export has written state to this output.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn has_state(&self) -> Result<bool> {
        Ok(!self.list(STATE_FOLDER).await?.is_empty())
    }

    /// Lists files that a crash left: staged shards, probes, and on a disk unfinished files.
    ///
    /// # Errors
    /// When the store cannot list them.
    pub async fn leftovers(&self) -> Result<Vec<String>> {
        let names = self.list(STATE_FOLDER).await?.into_keys();
        let prefixes = [format!("{STATE_FOLDER}/staging/"), format!("{STATE_FOLDER}/probe-")];
        let mut found: Vec<String> =
            names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()))).collect();
        if let Some(root) = self.folder() {
            let unfinished = self.unfinished(root).await?;
            let names = unfinished.iter().map(|file| file.strip_prefix(root).unwrap_or(file));
            found.extend(names.map(|name| name.to_string_lossy().into_owned()));
        }
        Ok(found)
    }

    /// Removes what [`Output::leftovers`] lists.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn remove_leftovers(&self) -> Result<()> {
        self.remove_unfinished().await?;
        for name in self.leftovers().await? {
            self.delete(&name).await?;
        }
        self.remove_under(&format!("{STATE_FOLDER}/staging")).await
    }

    /// Removes files on a disk that a killed process was writing.
    pub(super) async fn remove_unfinished(&self) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let removed = disk::remove_files(self.unfinished(root).await?).await;
        removed.map_err(PipelineError::output(format!("cannot clean {self}")))
    }

    /// Finds unfinished files, which listings hide because they still have temporary names.
    async fn unfinished(&self, root: &FsPath) -> Result<Vec<PathBuf>> {
        let in_state = |name: &str| name.ends_with(".json");
        let in_root = |name: &str| name == SUCCESS || is_dataset_file(name);
        let state = [root.join(STATE_FOLDER), root.join(STATE_FOLDER).join("splits")];
        let listed = async {
            let mut found = disk::unfinished(state.into(), in_state).await?;
            found.append(&mut disk::unfinished(vec![root.to_owned()], in_root).await?);
            Ok::<_, std::io::Error>(found)
        };
        listed.await.map_err(PipelineError::output(format!("cannot list {self}")))
    }
}

/// Whether this is the name of a data set's file.
pub(super) fn is_dataset_file(name: &str) -> bool {
    [MANIFEST, CARD, TOKENIZER].contains(&name)
        || sidecar_files().any(|file| file == name)
        || name.strip_prefix("data/").is_some_and(|shard| shard.ends_with(".parquet") && shard.contains("-of-"))
}
