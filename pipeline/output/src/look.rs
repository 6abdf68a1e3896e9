//! What is at an output already: whose it is, what is committed, what a crash left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::path::{Path as FsPath, PathBuf};

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStore;
use object_store::path::Path;
use serde::Deserialize;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_operators::config::SIDECAR_FILES;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;

use super::commands::repair_command;
use super::commit::CommitRecord;
use super::upload::UploadRecord;
use super::{
    Backend, Bucket, CARD, Found, MANIFEST, Output, PLAN, PlanRecord, REQUESTS, STATE, SUCCESS, TOKENIZER, disk,
};

/// Says in what the job of a plan is another one, line by line.
pub type Differs<'a> = dyn Fn(&PlanRecord) -> Vec<String> + Send + Sync + 'a;

/// A manifest, of which only this counts.
#[derive(Deserialize)]
struct OfJob {
    job_hash: String,
}

/// Records that are read only to tell how much is there.
const RECORDS_READ: usize = 2_000;

impl Output {
    /// Looks at what is there, for a job of this hash. Writes nothing.
    ///
    /// # Errors
    /// When it is another job's, or not Stillhouse's at all.
    pub async fn look(&self, job_hash: &str) -> Result<Found> {
        self.look_as(job_hash, &|_| Vec::new()).await
    }

    /// The same; `differs` says, line by line, in what another job is another.
    ///
    /// # Errors
    /// As [`Output::look`].
    pub async fn look_as(&self, job_hash: &str, differs: &Differs<'_>) -> Result<Found> {
        let Some(plan) = self.plan().await? else {
            return match self.entries().await? {
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
            let lines = differs(&plan).into_iter().chain([format!("would be lost: {}", self.holdings(&plan).await)]);
            lines.for_each(|line| message += &format!("\n  {line}"));
            return Err(PipelineError::new(ErrorKind::Usage, message));
        }
        // a manifest that is missing or damaged is written again, from the records
        if let Some(manifest) = self.finished_manifest().await? {
            // the splits in it may be many, and are read by who needs them
            if serde_json::from_slice::<OfJob>(&manifest).is_ok_and(|of| of.job_hash == job_hash) {
                return Ok(Found::Complete);
            }
        }
        let (mut done, mut unsettled) = (BTreeMap::new(), Vec::new());
        let shards = self.list("data").await?;
        for record in self.records().await?.into_iter().filter(|r| plan.counts(&r.job_hash)) {
            if shards.get(&record.shard.path) == Some(&record.shard.bytes) {
                done.insert(record.shard.split, record.shard);
            } else {
                unsettled.push(record);
            }
        }
        Ok(Found::Resumable { done, unsettled })
    }

    /// Whether a manifest or a record of a commit is here.
    async fn is_a_data_set(&self) -> Result<bool> {
        Ok(self.exists(MANIFEST).await? || !self.list(&format!("{STATE}/splits")).await?.is_empty())
    }

    /// What is here of a job, in words.
    async fn holdings(&self, plan: &PlanRecord) -> String {
        let shards = self.list("data").await.unwrap_or_default();
        let shards: Vec<u64> = shards.into_iter().filter(|(name, _)| is_ours(name)).map(|(_, bytes)| bytes).collect();
        let bytes: u64 = shards.iter().sum();
        // a store's records may be many, and what they say is worth a few requests only
        let records = if shards.len() <= RECORDS_READ { self.records().await.unwrap_or_default() } else { Vec::new() };
        let own = records.iter().filter(|r| plan.counts(&r.job_hash));
        let rows = match own.clone().count() {
            0 => String::new(),
            _ => format!(", {} sequences", own.map(|r| r.shard.rows).sum::<u64>()),
        };
        format!("{} shards of {} splits{rows}, {bytes} bytes", shards.len(), plan.splits.len())
    }

    /// Files that are not the state of a run, up to a thousand; on a disk files and folders at the top.
    pub(super) async fn entries(&self) -> Result<usize> {
        if self.folder().is_none() {
            // some servers show folders in which nothing is left; consoles put an empty object for the folder itself
            let state = Path::from(STATE);
            let ours = |at: &Path| at.prefix_matches(&state) || at.as_ref().is_empty();
            let files = self.store.list(None).try_filter(|meta| ready(!ours(&meta.location)));
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
        let folders = listing.common_prefixes.iter().filter(|p| p.filename() != Some(STATE)).count();
        Ok(folders + listing.objects.len())
    }

    /// All commits that are on record.
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

    /// All commits that are on record, and the records that are damaged: their names, and what is wrong.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn readable_records(&self) -> Result<(Vec<CommitRecord>, Vec<(String, String)>)> {
        let names = self.list(&format!("{STATE}/splits")).await?.into_keys();
        let all: Vec<(String, Option<bytes::Bytes>)> = futures::stream::iter(names)
            .map(|name| async move { self.get(&name).await.map(|bytes| (name, bytes)) })
            .buffered(REQUESTS)
            .try_collect()
            .await?;
        let (mut records, mut unreadable) = (Vec::new(), Vec::new());
        for (name, bytes) in all.into_iter().filter_map(|(name, bytes)| Some((name, bytes?))) {
            match serde_json::from_slice::<CommitRecord>(&bytes) {
                Ok(record) => records.push(record),
                Err(e) => {
                    let message =
                        format!("{} is damaged: {e}; `{}` mends it", self.shown(&name), repair_command(self, None));
                    unreadable.push((name, message));
                }
            }
        }
        Ok((records, unreadable))
    }

    /// Takes away what a crash left half-done and completes what was committed; gives the splits that this settles.
    ///
    /// The caller holds the lock, so every other upload to this output is a dead one's.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn recover(&self, unsettled: Vec<CommitRecord>) -> Result<BTreeMap<SplitId, ShardRecord>> {
        self.still_ours().await?;
        self.delete(SUCCESS).await?;
        let mut settled = BTreeMap::new();
        for record in unsettled {
            if self.settle(&record).await? {
                settled.insert(record.shard.split, record.shard);
            } else {
                self.void(&record).await?;
            }
        }
        self.remove_leftovers().await?;
        let (own, others): (Vec<_>, Vec<_>) = self.records().await?.into_iter().partition(|r| self.is_own(r));
        for record in others {
            self.void(&record).await?;
        }
        self.abort_uploads(false).await?;
        let committed: BTreeSet<String> = own.into_iter().map(|r| r.shard.path).collect();
        for name in self.list("data").await?.into_keys().filter(|name| is_ours(name) && !committed.contains(name)) {
            self.delete(&name).await?;
        }
        Ok(settled)
    }

    /// Finds uploads to this output that were begun and not ended, and aborts them unless only asked for them.
    ///
    /// Uploads that a commit names are not among them, nor are those of other names than a data set has.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn abort_uploads(&self, dry_run: bool) -> Result<Vec<String>> {
        if !dry_run {
            self.still_ours().await?;
        }
        let Backend::Store(Bucket { multipart, uploads: Some(uploads), prefix, .. }) = &self.backend else {
            return Ok(Vec::new());
        };
        let begun = match uploads.list(prefix).await {
            Ok(begun) => begun,
            // what some servers say as long as there has never been one
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
                // A server that died in the middle of a completion can have both the shard and its upload. Aborting
                // might take the shard's parts away; completing once more ends the upload.
                if !dry_run && self.exists(shard).await? {
                    let again = multipart.complete_multipart(&upload.path, &upload.id, record.part_ids()).await;
                    tracing::debug!(shard, ?again, "completed once more");
                }
                continue;
            }
            if !is_ours(name.as_ref()) {
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

    /// Whether a Stillhouse job or export has been at work here.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn has_state(&self) -> Result<bool> {
        Ok(!self.list(STATE).await?.is_empty())
    }

    /// Files that a crash left: staged shards, probes, and on a disk what was being put.
    ///
    /// # Errors
    /// When the store cannot list them.
    pub async fn leftovers(&self) -> Result<Vec<String>> {
        let names = self.list(STATE).await?.into_keys();
        let left = [format!("{STATE}/staging/"), format!("{STATE}/probe-")];
        let mut found: Vec<String> = names.filter(|name| left.iter().any(|l| name.starts_with(l.as_str()))).collect();
        if let Some(root) = self.folder() {
            let unfinished = self.unfinished(root).await?;
            let names = unfinished.iter().map(|file| file.strip_prefix(root).unwrap_or(file));
            found.extend(names.map(|name| name.to_string_lossy().into_owned()));
        }
        Ok(found)
    }

    /// Removes them.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn remove_leftovers(&self) -> Result<()> {
        self.remove_unfinished().await?;
        for name in self.leftovers().await? {
            self.delete(&name).await?;
        }
        self.remove_under(&format!("{STATE}/staging")).await
    }

    /// Removes what was being put on a disk when its process was killed.
    pub(super) async fn remove_unfinished(&self) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let removed = disk::remove_files(self.unfinished(root).await?).await;
        removed.map_err(PipelineError::output(format!("cannot clean {self}")))
    }

    /// Lists hide these: under its final name each was never there.
    async fn unfinished(&self, root: &FsPath) -> Result<Vec<PathBuf>> {
        let in_state = |name: &str| name.ends_with(".json");
        let in_root = |name: &str| name == SUCCESS || is_ours(name);
        let state = [root.join(STATE), root.join(STATE).join("splits")];
        let listed = async {
            let mut found = disk::unfinished(state.into(), in_state).await?;
            found.append(&mut disk::unfinished(vec![root.to_owned()], in_root).await?);
            Ok::<_, std::io::Error>(found)
        };
        listed.await.map_err(PipelineError::output(format!("cannot list {self}")))
    }
}

/// Whether a data set has files of this name.
pub(super) fn is_ours(name: &str) -> bool {
    [MANIFEST, CARD, TOKENIZER].contains(&name)
        || SIDECAR_FILES.contains(&name)
        || name.strip_prefix("data/").is_some_and(|shard| shard.ends_with(".parquet") && shard.contains("-of-"))
}
