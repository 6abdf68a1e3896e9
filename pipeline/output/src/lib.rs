//! The output, on a disk or in an object store, and the protocol by which splits are committed and a run is resumed.
//!
//! ```text
//!   <output>/data/X.parquet             shards, each visible once it is whole
//!   <output>/_stillhouse/plan.json      the job's hash and the splits
//!                        splits/N.json  the commit of split N, see [`commit`]
//!                        lease.json     who works on it (store)   lock (disk), see [`lease`]
//!                        staging/       shards being written (disk)
//!                        input/         the rows of input.sql (disk, and a store whose splits are made elsewhere)
//!                        workers/       while others work for the run: what they are at; commits (disk), see [`join`]
//! ```
//!
//! A split is done when its record is there and the shard has the size that the record says. A crash anywhere before
//! leaves at worst a staged file or an unfinished upload, which the next run takes away, a shard without a record on
//! a disk, which is made again with the same bytes, or a record without a shard in a store, which the next run
//! completes. `plan.json` names the job by its hash: a run on the output of another job refuses.
//!
//! The records stay when the data set is finished: a worker that wakes up late still finds that it has lost, and what is damaged later
//! can be made again and compared (`repair`).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod below;
mod check;
pub mod commands;
pub mod commit;
mod copies;
mod disk;
mod files;
pub mod identity;
mod join;
mod lease;
mod look;
mod plan;
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
use stillhouse_operators::config::SIDECAR_FILES;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;
use stillhouse_schemas::storage::{ConditionalPut, Storage};
use tokio::sync::Semaphore;

pub use self::commit::CommitRecord;
pub use self::disk::relative;
pub use self::join::{AtWork, SplitAtWork, SplitCounts, Ticket, Warning};
pub use self::lease::Lock;
pub use self::lease::Pulse;
use self::lease::{Lease, LockKind, Seen, Timing};
pub use self::look::Differs;
pub use self::plan::PLAN;
pub use self::plan::PlanRecord;
use self::probe::{Condition, probe};
pub use self::upload::{Sending, ShardUpload, Staged};
use crate::identity::JobHash;

const STATE: &str = "_stillhouse";
/// The rows of `input.sql`, as long as the job runs.
pub const INPUT: &str = "_stillhouse/input";
/// Folders of an output, which a run writes to and removes from.
const FOLDERS: [&str; 5] = ["data", INPUT, "_stillhouse/staging", "_stillhouse/splits", join::WORKERS];
/// Small requests under way at once.
const REQUESTS: usize = 16;
/// Parts of all shards under way at once; each is in memory.
const PARTS_AT_ONCE: usize = 16;
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Name of the marker that a data set is complete.
pub const SUCCESS: &str = "_SUCCESS";
/// Name of the data set card.
pub const CARD: &str = "README.md";
/// Name of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// An output: a folder, or a prefix of an object store.
#[derive(Clone)]
pub struct Output {
    /// Rooted at the output, so that all names are those of the data set.
    store: Arc<dyn ObjectStore>,
    backend: Backend,
    sending: Sending,
    /// Whether commits are conditional; false only where the job trusts to be the one writer.
    conditional: bool,
    /// Set when another run has taken the output over.
    lost: Arc<AtomicBool>,
    /// Who holds the lease or the lock for this process, once it is taken.
    holder: Arc<OnceLock<String>>,
    /// Whether this is a worker's, of a run in another process that holds the output.
    joined: bool,
    /// Hash of the job that writes here; empty for exports and readers.
    job_hash: String,
    /// Hashes of the job before files were appended: commits of these count as well.
    earlier: Vec<String>,
    /// Parts of all shards on their way at once.
    parts: Arc<Semaphore>,
}

#[derive(Clone)]
enum Backend {
    Disk(PathBuf),
    Store(Bucket),
    /// A web server, by its URL: read only.
    Web(String),
}

/// Where in a store the output is.
#[derive(Clone)]
struct Bucket {
    multipart: Arc<dyn MultipartStore>,
    uploads: Option<Arc<dyn Uploads>>,
    prefix: Path,
    shown: String,
}

/// What is at the output already.
#[derive(Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// This job's work, to be gone on with.
    Resumable {
        /// Committed splits.
        done: BTreeMap<SplitId, ShardRecord>,
        /// Commits whose last step, the completion of the upload, has not been seen.
        unsettled: Vec<CommitRecord>,
    },
    /// This job's finished data set.
    Complete,
}

impl Output {
    /// An output on a disk that need not exist yet; nothing is written.
    ///
    /// # Errors
    /// When there is something that is not a folder.
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

    /// An output in a store; nothing is written, and nothing asked of the store.
    ///
    /// # Errors
    /// When the URL has no key that a store could have.
    pub fn in_store(opened: &Opened, url: &StoreUrl, sending: Sending, conditional: bool) -> Result<Self> {
        let prefix = Path::parse(&url.key)
            .map_err(|e| PipelineError::new(ErrorKind::Usage, format!("{url}: not a key: {e}")))?;
        let store = Arc::new(PrefixStore::new(Arc::clone(&opened.store), prefix.clone()));
        let shown = url.to_string().trim_end_matches('/').to_owned();
        let backend = match opened.multipart.clone() {
            Some(multipart) => Backend::Store(Bucket { multipart, uploads: opened.uploads.clone(), prefix, shown }),
            None => Backend::Web(shown),
        };
        Ok(Self { sending, conditional, ..Self::new(store, backend) })
    }

    /// The same, for a job: its commits carry its hash, and those of others do not count.
    #[must_use]
    pub fn for_job(self, job_hash: &str) -> Self {
        Self { job_hash: job_hash.to_owned(), ..self }
    }

    /// The same for a job whose input may have grown since commits were made.
    #[must_use]
    pub fn for_grown_job(self, hash: &JobHash) -> Self {
        let earlier = hash.appended.iter().map(|a| a.to.clone()).collect();
        Self { earlier, ..self.for_job(&hash.hash) }
    }

    /// Whether a commit is of the job that writes here.
    fn is_own(&self, record: &CommitRecord) -> bool {
        record.job_hash == self.job_hash || self.earlier.contains(&record.job_hash)
    }

    /// The same, with uploads in parts that suit shards of about so many bytes.
    #[must_use]
    pub fn for_shards_of(self, bytes: f64) -> Self {
        Self { sending: self.sending.for_about(bytes), ..self }
    }

    fn new(store: Arc<dyn ObjectStore>, backend: Backend) -> Self {
        Self {
            store,
            backend,
            sending: Sending::default(),
            conditional: true,
            lost: Arc::default(),
            holder: Arc::default(),
            joined: false,
            job_hash: String::new(),
            earlier: Vec::new(),
            parts: Arc::new(Semaphore::new(PARTS_AT_ONCE)),
        }
    }

    /// The output at a place.
    ///
    /// # Errors
    /// When the place cannot be opened: options that do not fit, no credentials.
    pub fn at(place: &Location, options: &Storage, storages: &Storages) -> Result<Self> {
        match place {
            Location::Disk(root) => Self::on_disk(root),
            Location::Store(url) => {
                let sending = Sending { part_bytes: options.part_bytes(), parts_at_once: options.parts_at_once() };
                let conditional = options.conditional_put() == ConditionalPut::Require;
                Self::in_store(&storages.open(url, options)?, url, sending, conditional)
            }
        }
    }

    /// Makes the folder, or makes sure that the store can be written to and keeps to conditions.
    ///
    /// # Errors
    /// When it cannot be made or written to, or when the store does not keep to `If-None-Match: *`.
    pub async fn create(self, observer: &dyn Observer) -> Result<Self> {
        match &self.backend {
            Backend::Disk(root) => {
                self.refuse_links().await?;
                let (state, root) = (root.join(STATE), root.clone());
                let context = format!("cannot make {}", state.display());
                disk::make_folder(state).await.map_err(PipelineError::output(context))?;
                blocking(move || Self::on_disk(root)).await
            }
            Backend::Web(_) => Err(self.read_only()),
            Backend::Store(_) => {
                let condition = probe(&self.store).await.map_err(|e| self.failed(&e, "write", ""))?;
                if condition == Condition::Kept {
                    return Ok(self);
                }
                let how = match condition {
                    Condition::Ignored => "ignores the condition of a conditional PUT (If-None-Match: *)",
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

    /// The store, with the output as its root.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// The folder, where the output is on a disk.
    pub fn folder(&self) -> Option<&FsPath> {
        match &self.backend {
            Backend::Disk(root) => Some(root),
            Backend::Store(_) | Backend::Web(_) => None,
        }
    }

    /// False where the output is a folder that is not there.
    pub async fn has_folder(&self) -> bool {
        match self.folder() {
            Some(root) => disk::is_folder(root.to_owned()).await.unwrap_or(false),
            None => true,
        }
    }

    /// Whether unfinished uploads can be found here; Azure forgets them by itself after a week.
    pub fn lists_uploads(&self) -> bool {
        !matches!(self.backend, Backend::Store(Bucket { uploads: None, .. }))
    }

    /// Whether what is here can be listed.
    pub fn is_listed(&self) -> bool {
        !matches!(self.backend, Backend::Web(_))
    }

    /// What is told where something is to be written to a web server.
    pub fn read_only(&self) -> PipelineError {
        let message = format!("{self}: a web server is only read from; valid: s3://, gs://, az:// or a local path");
        PipelineError::new(ErrorKind::Usage, message)
    }

    /// A file of the output as a person names it.
    pub fn shown(&self, name: &str) -> String {
        match &self.backend {
            Backend::Disk(root) if name.is_empty() => root.display().to_string(),
            Backend::Disk(root) => root.join(name).display().to_string(),
            Backend::Store(Bucket { shown, .. }) | Backend::Web(shown) if name.is_empty() => shown.clone(),
            Backend::Store(Bucket { shown, .. }) | Backend::Web(shown) => format!("{shown}/{name}"),
        }
    }

    /// What the store said of a file of the output.
    fn failed(&self, error: &object_store::Error, action: &str, name: &str) -> PipelineError {
        PipelineError::store(ErrorKind::Output, error, action, &self.shown(name))
    }

    /// Takes the output for this process.
    ///
    /// # Errors
    /// When another process has it.
    pub async fn lock(&self, observer: &dyn Observer) -> Result<Lock> {
        let root = match &self.backend {
            Backend::Disk(root) => root,
            Backend::Web(_) => return Err(self.read_only()),
            Backend::Store(_) => {
                let (store, lost) = (Arc::clone(&self.store), Arc::clone(&self.lost));
                let timing = Timing::default();
                let lease = Lease::take(store, &self.shown(""), timing, lost, self.conditional, observer).await?;
                let _ = self.holder.set(lease.holder().to_owned());
                return Ok(Lock(LockKind::Lease(lease)));
            }
        };
        self.refuse_links().await?;
        let path = root.join(STATE).join("lock");
        let context = format!("cannot lock {}", path.display());
        let locked = disk::lock(path).await.map_err(|e| PipelineError::caused(ErrorKind::Output, context, e))?;
        let lock = locked.map(|file| Lock(LockKind::File(file))).ok_or_else(|| self.busy())?;
        self.others_have_committed().await?;
        Ok(lock)
    }

    /// Refuses an output on a disk whose own folders are links: what they lead to is not the job's to write or remove.
    pub async fn refuse_links(&self) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        disk::refuse_links(root.to_owned(), &FOLDERS)
            .await
            .map_err(|e| PipelineError::new(ErrorKind::Output, e.to_string()))
    }

    /// What is told where another process holds the lock.
    fn busy(&self) -> PipelineError {
        let message = format!("{self}: another run is working on this output; wait for it or stop it");
        PipelineError::new(ErrorKind::Busy, message).retryable()
    }

    /// Asks the store whether the lease that this process took is still its own: before every step that would harm
    /// another run, had it taken the output over while this process slept.
    ///
    /// # Errors
    /// When another run has it, or the store cannot say.
    pub async fn still_ours(&self) -> Result<()> {
        self.renewals().await.map(drop)
    }

    /// The same; how often the lease was renewed, where there is one.
    async fn renewals(&self) -> Result<Option<u64>> {
        if self.joined {
            self.is_locked().await?;
        }
        let Some(holder) = self.holder.get().filter(|_| self.folder().is_none()) else { return Ok(None) };
        let seen = match self.lost.load(Ordering::Relaxed) {
            true => Seen::Others,
            false => {
                let seen = lease::seen_by(&self.store, holder).await;
                seen.map_err(|e| self.failed(&e, "look at the lease of", ""))?
            }
        };
        let why = match seen {
            Seen::Held(renewals) => return Ok(Some(renewals)),
            Seen::Free if self.joined => "the run that this worker works for has ended",
            Seen::Free | Seen::Others => "another run has taken this output over",
        };
        Err(PipelineError::new(ErrorKind::Output, format!("{self}: {why}; this one stops")))
    }

    /// Begins to write a shard; readers see nothing of it before it is committed.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn upload(&self, shard: &str) -> Result<ShardUpload> {
        match &self.backend {
            Backend::Disk(_) => {
                // of two workers at one split each has its own
                let own = if self.joined { format!(".{}", lease::unique()) } else { String::new() };
                let staged = Path::from(format!("{STATE}/staging/{shard}{own}"));
                Ok(ShardUpload::to_disk(Arc::clone(&self.store), staged))
            }
            Backend::Web(_) => Err(self.read_only()),
            Backend::Store(bucket) => {
                let path = bucket.full(&format!("data/{shard}"));
                let id = bucket.multipart.create_multipart(&path).await;
                let id = id.map_err(|e| self.failed(&e, "write", &format!("data/{shard}")))?;
                Ok(ShardUpload::to_store(
                    Arc::clone(&bucket.multipart),
                    path,
                    id,
                    self.sending,
                    Arc::clone(&self.parts),
                ))
            }
        }
    }

    /// The manifest with which the data set was finished; `None` where it is not finished, or the manifest is another one by now.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn finished_manifest(&self) -> Result<Option<Bytes>> {
        let Some(there) = self.get(SUCCESS).await? else { return Ok(None) };
        let manifest = self.get(MANIFEST).await?;
        Ok(manifest.filter(|manifest| there.is_empty() || *there == marker(manifest)))
    }

    /// Ends the data set: the marker, which holds the manifest's sha256, last, then the state of the run goes, but for what the next run must know.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn finish(&self) -> Result<()> {
        let manifest = self.get(MANIFEST).await?;
        self.put_own(SUCCESS, manifest.map(|bytes| marker(&bytes)).unwrap_or_default()).await?;
        // those whose beginning was answered by a connection that broke
        self.abort_uploads(false).await?;
        self.clean_state().await
    }

    /// Removes the state that a finished run no longer needs.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn clean_state(&self) -> Result<()> {
        if self.folder().is_some() {
            self.remove_under(&format!("{STATE}/staging")).await?;
        }
        self.remove_under(INPUT).await?;
        self.remove_under(join::WORKERS).await?;
        // what workers began to put and were killed over
        self.remove_unfinished().await?;
        self.forget_commits().await;
        Ok(())
    }

    /// Whether a Stillhouse job has written here.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn is_of_a_job(&self) -> Result<bool> {
        self.exists(PLAN).await
    }

    /// Whether there is nothing here at all.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn is_nothing(&self) -> Result<bool> {
        Ok(!self.is_of_a_job().await? && self.entries().await? == 0)
    }

    /// After a run that failed before its first commit: takes away what it made of an output that was not there.
    pub async fn remove_if_nothing_is_committed(&self, made_folder: bool) {
        let empty = self.list("data").await.is_ok_and(|files| files.is_empty())
            && self.list(&format!("{STATE}/splits")).await.is_ok_and(|files| files.is_empty());
        if !empty || self.still_ours().await.is_err() {
            return;
        }
        if let Err(e) = self.remove().await {
            tracing::debug!("{self}: {e}");
        }
        if let Some(root) = self.folder() {
            let folders = [root.join(STATE), root.join("data"), root.to_owned()];
            let folders = folders.into_iter().take(if made_folder { 3 } else { 2 }).collect();
            disk::tidy(Some(root.join(STATE).join("lock")), folders).await;
        }
    }

    /// After an export that failed: takes away what it made where not one file came through.
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
    /// When the store refuses.
    pub async fn remove(&self) -> Result<()> {
        if !self.exists(PLAN).await? {
            return Ok(());
        }
        self.still_ours().await?;
        self.delete(SUCCESS).await?;
        for file in [MANIFEST, CARD, TOKENIZER].into_iter().chain(SIDECAR_FILES) {
            self.delete(file).await?;
        }
        // records and uploads before shards: what wakes up late finds nothing that it could still complete
        self.remove_under("_stillhouse/splits").await?;
        self.abort_uploads(false).await?;
        for name in self.list("data").await?.into_keys().filter(|name| look::is_ours(name)) {
            self.delete(&name).await?;
        }
        if let Some(root) = self.folder() {
            // only where nothing of anybody else is in it
            disk::tidy(None, vec![root.join("data")]).await;
        }
        self.remove_leftovers().await?;
        self.clean_state().await?;
        self.delete(PLAN).await
    }
}

impl Bucket {
    fn full(&self, name: &str) -> Path {
        self.prefix.parts().chain(Path::from(name).parts()).collect()
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown(""))
    }
}

/// What `_SUCCESS` holds: a line that `sha256sum --check` reads.
fn marker(manifest: &[u8]) -> Vec<u8> {
    format!("{}  {MANIFEST}\n", hex::encode(Sha256::digest(manifest))).into_bytes()
}
