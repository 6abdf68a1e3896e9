//! The output of a job, on a disk or in an object store, and the protocol that commits splits and resumes runs.
//!
//! ```text
//!   <output>/data/X.parquet             shards, each visible only when complete
//!   <output>/_stillhouse/plan.json      the job's hash and the splits
//!                        splits/N.json  the commit record of split N, see [`commit`]
//!                        lease.json     holder of the output (store)   lock (disk), see [`lease`]
//!                        staging/       shards being written (disk)
//!                        input/         staged rows (disk, and a store whose splits other processes make)
//!                        workers/       reports of the run's workers; commits (disk), see [`join`]
//! ```
//!
//! A split is done when its record exists and its shard has the size in the record. A crash leaves one of these:
//! - a staged file or an unfinished upload, which the next run removes,
//! - on a disk, a shard without a record, which the next run makes again with the same bytes,
//! - in a store, a record without a shard, which the next run completes.
//!
//! `plan.json` identifies the job by its hash. A run refuses the output of another job.
//!
//! The records remain after the data set is finished. A delayed worker can then still detect that another one has
//! committed its split, and `repair` can make a damaged shard again and compare it.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod commands;
pub mod commit;
mod copied_files;
mod disk;
mod files;
pub mod identity;
mod inspect;
mod join;
mod lease;
mod nofollow;
mod plan;
mod preflight;
mod probe;
#[cfg(test)]
mod tests;
mod upload;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_base::storage::{Location, Opened, Storages, StoreUrl, Uploads, blocking};
use stillhouse_operators::registry::sidecar_files;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;
use stillhouse_schemas::storage::{ConditionalPut, Storage};
use tokio::sync::Semaphore;

pub use self::commit::CommitRecord;
pub use self::disk::relative;
pub use self::inspect::DescribeDifferences;
pub use self::join::{SplitCounts, SplitReport, Ticket, Warning, WorkerReport};
pub use self::lease::LeaseMonitor;
pub use self::lease::Lock;
use self::lease::{Lease, LeaseState, LeaseTiming, LockKind};
pub use self::plan::{DUPLICATES, DuplicatesRecord, PLAN, PlanRecord};
use self::probe::{ConditionSupport, probe};
pub use self::upload::{ShardUpload, Staged, UploadOptions};
use crate::identity::{JobHash, is_hash_of_job};

const STATE_FOLDER: &str = "_stillhouse";
/// Folder of the staged rows of `input.sql` or of a mixture; it exists while the job runs.
pub const INPUT: &str = "_stillhouse/input";
/// Folders of an output that a run writes to and removes files from.
const WRITTEN_FOLDERS: [&str; 5] = ["data", INPUT, "_stillhouse/staging", "_stillhouse/splits", join::WORKERS];
/// Maximum number of concurrent small requests.
const MAX_CONCURRENT_REQUESTS: usize = 16;
/// Maximum number of upload parts in flight over all shards. Each is in memory.
const MAX_PARTS_IN_FLIGHT: usize = 16;
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Name of the file that marks a data set as complete.
pub const SUCCESS: &str = "_SUCCESS";
/// Name of the data set card.
pub const CARD: &str = "README.md";
/// Name of the tokenizer file.
pub const TOKENIZER: &str = "tokenizer.json";

/// An output: a folder, or a prefix in an object store.
#[derive(Clone)]
pub struct Output {
    /// Rooted at the output, so that all paths are relative to the data set.
    store: Arc<dyn ObjectStore>,
    backend: Backend,
    upload_options: UploadOptions,
    /// Whether writes are conditional. False only if the job is configured to trust that it is the only writer.
    conditional: bool,
    /// Set when another run has taken over the output.
    lost: Arc<AtomicBool>,
    /// Holder of the lease or the lock for this process, once taken.
    holder: Arc<OnceLock<String>>,
    /// Whether this process is a worker of a run in another process, which holds the output.
    joined: bool,
    /// Hash of the job that writes this output; empty for exports and readers.
    job_hash: String,
    /// Hashes of the job before files were appended. Commits with these hashes count as well.
    earlier_job_hashes: Vec<String>,
    /// Limits the upload parts in flight over all shards.
    part_permits: Arc<Semaphore>,
}

#[derive(Clone)]
enum Backend {
    Disk(PathBuf),
    Store(Bucket),
    /// The URL of a read-only web server.
    Web(String),
}

/// The location of the output in a store.
#[derive(Clone)]
struct Bucket {
    multipart: Arc<dyn MultipartStore>,
    uploads: Option<Arc<dyn Uploads>>,
    prefix: Path,
    shown: String,
}

/// What the output already contains.
#[derive(Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// Work of this job, to be resumed.
    Resumable {
        /// Committed splits.
        done: BTreeMap<SplitId, ShardRecord>,
        /// Commits whose last step, completing the upload, is not confirmed.
        incomplete_uploads: Vec<CommitRecord>,
    },
    /// The finished data set of this job.
    Complete,
}

impl Output {
    /// Opens an output on a disk. It need not exist yet, and nothing is written.
    ///
    /// # Errors
    /// When the path is a file.
    #[expect(
        clippy::disallowed_methods,
        reason = "three looks at one name, once for a command: it is opened before its work begins"
    )]
    pub fn on_disk(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        if root.is_file() {
            let message = format!("{} is a file; valid: a folder", root.display());
            return Err(PipelineError::new(ErrorKind::Output, message));
        }
        let store: Arc<dyn ObjectStore> = if root.exists() {
            let store = LocalFileSystem::new_with_prefix(&root)
                .map_err(|e| PipelineError::store(ErrorKind::Output, &e, "open", &root.display().to_string()))?;
            Arc::new(store)
        } else {
            Arc::new(InMemory::new())
        };
        Ok(Self::new(store, Backend::Disk(root)))
    }

    /// Opens an output in a store. Writes nothing and sends no request.
    ///
    /// # Errors
    /// When the URL's path is not a valid object key.
    pub fn in_store(opened: &Opened, url: &StoreUrl, upload_options: UploadOptions, conditional: bool) -> Result<Self> {
        let prefix = Path::parse(&url.key)
            .map_err(|e| PipelineError::new(ErrorKind::Usage, format!("{url}: not a key: {e}")))?;
        let store = Arc::new(PrefixStore::new(Arc::clone(&opened.store), prefix.clone()));
        let shown = url.to_string().trim_end_matches('/').to_owned();
        let backend = match opened.multipart.clone() {
            Some(multipart) => Backend::Store(Bucket { multipart, uploads: opened.uploads.clone(), prefix, shown }),
            None => Backend::Web(shown),
        };
        Ok(Self { upload_options, conditional, ..Self::new(store, backend) })
    }

    /// Sets the job: commits carry its hash, and commits of other jobs do not count.
    #[must_use]
    pub fn for_job(self, job_hash: &str) -> Self {
        Self { job_hash: job_hash.to_owned(), ..self }
    }

    /// Like [`Output::for_job`], for a job to whose input files may have been appended since earlier commits.
    #[must_use]
    pub fn for_grown_job(self, hash: &JobHash) -> Self {
        let earlier_job_hashes = hash.appended.iter().map(|a| a.to.clone()).collect();
        Self { earlier_job_hashes, ..self.for_job(&hash.hash) }
    }

    /// Whether a commit belongs to the job that writes this output.
    fn is_own(&self, record: &CommitRecord) -> bool {
        is_hash_of_job(&record.job_hash, &self.job_hash, self.earlier_job_hashes.iter().map(String::as_str))
    }

    /// Chooses an upload part size that fits shards of about this size.
    #[must_use]
    pub fn for_shards_of(self, bytes: f64) -> Self {
        Self { upload_options: self.upload_options.for_shard_size(bytes), ..self }
    }

    fn new(store: Arc<dyn ObjectStore>, backend: Backend) -> Self {
        Self {
            store,
            backend,
            upload_options: UploadOptions::default(),
            conditional: true,
            lost: Arc::default(),
            holder: Arc::default(),
            joined: false,
            job_hash: String::new(),
            earlier_job_hashes: Vec::new(),
            part_permits: Arc::new(Semaphore::new(MAX_PARTS_IN_FLIGHT)),
        }
    }

    /// Opens the output at a location.
    ///
    /// # Errors
    /// When the location cannot be opened, for example because options conflict or credentials are missing.
    pub fn at(place: &Location, options: &Storage, storages: &Storages) -> Result<Self> {
        match place {
            Location::Disk(root) => Self::on_disk(root),
            Location::Store(url) => {
                let upload_options =
                    UploadOptions { part_bytes: options.part_bytes(), parts_at_once: options.parts_at_once() };
                let conditional = options.conditional_put() == ConditionalPut::Require;
                Self::in_store(&storages.open(url, options)?, url, upload_options, conditional)
            }
        }
    }

    /// Creates the folder, or checks that the store is writable and honours conditional PUTs.
    ///
    /// # Errors
    /// When it cannot be created or written to, or when the store does not honour `If-None-Match: *`.
    pub async fn create(self, observer: &dyn Observer) -> Result<Self> {
        match &self.backend {
            Backend::Disk(root) => {
                self.refuse_links().await?;
                let (state, root) = (root.join(STATE_FOLDER), root.clone());
                let context = format!("cannot make {}", state.display());
                disk::make_folder(state).await.map_err(PipelineError::output(context))?;
                blocking(move || Self::on_disk(root)).await
            }
            Backend::Web(_) => Err(self.read_only()),
            Backend::Store(_) => {
                let condition = probe(&self.store).await.map_err(|e| self.failed(&e, "write", ""))?;
                if condition == ConditionSupport::Honoured {
                    return Ok(self);
                }
                let how = match condition {
                    ConditionSupport::Ignored => "ignores the condition of a conditional PUT (If-None-Match: *)",
                    _ => "has no conditional PUT (If-None-Match: *)",
                };
                if self.conditional {
                    return Err(PipelineError::new(
                        ErrorKind::Output,
                        format!(
                            "{self}: the store {how}, so two runs could overwrite each other's shards; use another \
                             store, or `storage: {{conditional_put: trust_single_writer}}` where no second run can be"
                        ),
                    ));
                }
                observer.event(&Event::Warning {
                    message: format!("{self}: the store {how}; nothing may write here but this run"),
                });
                Ok(self)
            }
        }
    }

    /// Returns the store, rooted at the output.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// Returns the folder of an output on a disk.
    pub fn folder(&self) -> Option<&FsPath> {
        match &self.backend {
            Backend::Disk(root) => Some(root),
            Backend::Store(_) | Backend::Web(_) => None,
        }
    }

    /// Returns false if the output is a folder that does not exist.
    pub async fn has_folder(&self) -> bool {
        match self.folder() {
            Some(root) => disk::is_folder(root.to_owned()).await.unwrap_or(false),
            None => true,
        }
    }

    /// Whether unfinished uploads can be listed. Azure cannot; it discards them itself after a week.
    pub fn lists_uploads(&self) -> bool {
        !matches!(self.backend, Backend::Store(Bucket { uploads: None, .. }))
    }

    /// Whether the files of the output can be listed.
    pub fn is_listed(&self) -> bool {
        !matches!(self.backend, Backend::Web(_))
    }

    /// The error for an attempt to write to a web server.
    pub fn read_only(&self) -> PipelineError {
        let message = format!("{self}: a web server is only read from; valid: s3://, gs://, az:// or a local path");
        PipelineError::new(ErrorKind::Usage, message)
    }

    /// Formats the path of a file of the output for messages.
    pub fn shown(&self, name: &str) -> String {
        match &self.backend {
            Backend::Disk(root) if name.is_empty() => root.display().to_string(),
            Backend::Disk(root) => root.join(name).display().to_string(),
            Backend::Store(Bucket { shown, .. }) | Backend::Web(shown) if name.is_empty() => shown.clone(),
            Backend::Store(Bucket { shown, .. }) | Backend::Web(shown) => format!("{shown}/{name}"),
        }
    }

    /// Converts an error of the store about a file of the output.
    fn failed(&self, error: &object_store::Error, action: &str, name: &str) -> PipelineError {
        PipelineError::store(ErrorKind::Output, error, action, &self.shown(name))
    }

    /// Locks the output for this process.
    ///
    /// # Errors
    /// When another process holds it.
    pub async fn lock(&self, observer: &dyn Observer) -> Result<Lock> {
        let root = match &self.backend {
            Backend::Disk(root) => root,
            Backend::Web(_) => return Err(self.read_only()),
            Backend::Store(_) => {
                let (store, lost) = (Arc::clone(&self.store), Arc::clone(&self.lost));
                let timing = LeaseTiming::default();
                let lease = Lease::take(store, &self.shown(""), timing, lost, self.conditional, observer).await?;
                let _ = self.holder.set(lease.holder().to_owned());
                return Ok(Lock(LockKind::Lease(lease)));
            }
        };
        self.refuse_links().await?;
        let path = root.join(STATE_FOLDER).join("lock");
        let context = format!("cannot lock {}", path.display());
        let locked = disk::lock(path).await.map_err(|e| PipelineError::caused(ErrorKind::Output, context, e))?;
        let lock = locked.map(|file| Lock(LockKind::File(file))).ok_or_else(|| self.busy())?;
        self.wait_for_commits().await?;
        Ok(lock)
    }

    /// Fails if folders of an output on a disk are symbolic links: a job must not write or remove files outside its
    /// output.
    pub async fn refuse_links(&self) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        disk::refuse_links(root.to_owned(), &WRITTEN_FOLDERS)
            .await
            .map_err(|e| PipelineError::new(ErrorKind::Output, e.to_string()))
    }

    /// The error when another process holds the lock.
    fn busy(&self) -> PipelineError {
        let message = format!("{self}: another run is working on this output; wait for it or stop it");
        PipelineError::new(ErrorKind::Busy, message).retryable()
    }

    /// Checks with the store that this process still holds its lease. Called before every step that would harm another
    /// run, if that run took over the output while this process was suspended.
    ///
    /// # Errors
    /// When another run holds the output, or the store fails.
    pub async fn check_ownership(&self) -> Result<()> {
        self.renewals().await.map(drop)
    }

    /// Like [`Output::check_ownership`]; returns how often the lease was renewed, if there is one.
    async fn renewals(&self) -> Result<Option<u64>> {
        if self.joined {
            self.check_run_holds_lock().await?;
        }
        let Some(holder) = self.holder.get().filter(|_| self.folder().is_none()) else { return Ok(None) };
        let state = match self.lost.load(Ordering::Relaxed) {
            true => LeaseState::HeldByOther,
            false => {
                let state = lease::lease_state(&self.store, holder).await;
                state.map_err(|e| self.failed(&e, "read the lease of", ""))?
            }
        };
        let reason = match state {
            LeaseState::Held(renewals) => return Ok(Some(renewals)),
            LeaseState::Free if self.joined => "the run that this worker works for has ended",
            LeaseState::Free | LeaseState::HeldByOther => "another run has taken this output over",
        };
        Err(PipelineError::new(ErrorKind::Output, format!("{self}: {reason}; this one stops")))
    }

    /// Begins to write a shard, which is invisible to readers until it is committed.
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn upload(&self, shard: &str) -> Result<ShardUpload> {
        match &self.backend {
            Backend::Disk(_) => {
                // Two workers may make the same split, so each stages under its own name.
                let own = if self.joined { format!(".{}", lease::unique()) } else { String::new() };
                let staged = Path::from(format!("{STATE_FOLDER}/staging/{shard}{own}"));
                Ok(ShardUpload::to_disk(Arc::clone(&self.store), staged))
            }
            Backend::Web(_) => Err(self.read_only()),
            Backend::Store(bucket) => {
                let path = bucket.full_path(&format!("data/{shard}"));
                let id = bucket.multipart.create_multipart(&path).await;
                let id = id.map_err(|e| self.failed(&e, "write", &format!("data/{shard}")))?;
                Ok(ShardUpload::to_store(
                    Arc::clone(&bucket.multipart),
                    path,
                    id,
                    self.upload_options,
                    Arc::clone(&self.part_permits),
                ))
            }
        }
    }

    /// Returns the manifest of the finished data set, or `None` if it is unfinished or the manifest has changed since.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn finished_manifest(&self) -> Result<Option<Bytes>> {
        let Some(there) = self.get(SUCCESS).await? else { return Ok(None) };
        let manifest = self.get(MANIFEST).await?;
        Ok(manifest.filter(|manifest| there.is_empty() || *there == marker(manifest)))
    }

    /// Finishes the data set: writes the marker with the manifest's SHA-256, then removes the run's state that later
    /// runs do not need.
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn finish(&self) -> Result<()> {
        let manifest = self.get(MANIFEST).await?;
        self.put_if_owner(SUCCESS, manifest.map(|bytes| marker(&bytes)).unwrap_or_default()).await?;
        // uploads whose creation succeeded but whose response was lost
        self.abort_uploads(false).await?;
        self.clean_state().await
    }

    /// Removes the state that a finished run no longer needs.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn clean_state(&self) -> Result<()> {
        if self.folder().is_some() {
            self.remove_under(&format!("{STATE_FOLDER}/staging")).await?;
        }
        self.remove_under(INPUT).await?;
        self.remove_under(join::WORKERS).await?;
        // reports that workers were writing when they were killed
        self.remove_unfinished().await?;
        self.remove_commits_lock().await;
        Ok(())
    }

    /// Whether a Stillhouse job has written to this output.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn is_of_a_job(&self) -> Result<bool> {
        self.exists(PLAN).await
    }

    /// Whether the output contains nothing at all.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn is_nothing(&self) -> Result<bool> {
        Ok(!self.is_of_a_job().await? && self.count_entries().await? == 0)
    }

    /// Removes what a run created if it failed before its first commit; `made_folder` tells whether it created the
    /// folder.
    pub async fn remove_if_nothing_is_committed(&self, made_folder: bool) {
        let empty = self.list("data").await.is_ok_and(|files| files.is_empty())
            && self.list(&format!("{STATE_FOLDER}/splits")).await.is_ok_and(|files| files.is_empty());
        if !empty || self.check_ownership().await.is_err() {
            return;
        }
        if let Err(e) = self.remove().await {
            tracing::debug!("{self}: {e}");
        }
        if let Some(root) = self.folder() {
            let folders = [root.join(STATE_FOLDER), root.join("data"), root.to_owned()];
            let folders = folders.into_iter().take(if made_folder { 3 } else { 2 }).collect();
            disk::remove_if_empty(Some(root.join(STATE_FOLDER).join("lock")), folders).await;
        }
    }

    /// Removes what a failed export created if no file was exported.
    pub async fn remove_export_if_empty(&self, made_folder: bool) {
        if !self.list("data").await.is_ok_and(|files| files.is_empty()) {
            return;
        }
        let removed = async {
            self.abort_uploads(false).await?;
            self.remove_leftovers().await?;
            self.delete("_stillhouse/export.json").await
        };
        if let Err(e) = removed.await {
            tracing::debug!("{self}: {e}");
        }
        self.remove_if_nothing_is_committed(made_folder).await;
    }

    /// Removes everything that a Stillhouse job writes, and nothing else.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn remove(&self) -> Result<()> {
        if !self.exists(PLAN).await? {
            return Ok(());
        }
        self.check_ownership().await?;
        self.delete(SUCCESS).await?;
        for file in [MANIFEST, CARD, TOKENIZER].into_iter().chain(sidecar_files()) {
            self.delete(file).await?;
        }
        // Records and uploads go before shards, so that a delayed worker finds nothing that it could complete.
        self.remove_under("_stillhouse/splits").await?;
        self.abort_uploads(false).await?;
        for name in self.list("data").await?.into_keys().filter(|name| inspect::is_dataset_file(name)) {
            self.delete(&name).await?;
        }
        if let Some(root) = self.folder() {
            // The folder is removed only if it holds no foreign files.
            disk::remove_if_empty(None, vec![root.join("data")]).await;
        }
        self.remove_leftovers().await?;
        self.clean_state().await?;
        self.delete(PLAN).await
    }
}

impl Bucket {
    fn full_path(&self, name: &str) -> Path {
        self.prefix.parts().chain(Path::from(name).parts()).collect()
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown(""))
    }
}

/// Returns the content of `_SUCCESS`: a line that `sha256sum --check` accepts.
fn marker(manifest: &[u8]) -> Vec<u8> {
    format!("{}  {MANIFEST}\n", hex::encode(Sha256::digest(manifest))).into_bytes()
}
