//! The output folder, and the protocol by which splits are committed and a run is resumed.
//!
//! ```text
//!   _stillhouse/staging/X.parquet ──rename──► data/X.parquet ──► _stillhouse/splits/00007.json   (the commit point)
//!        written, hashed, synced               visible, whole         ShardRecord, put atomically
//! ```
//!
//! A split is done when its record is there and the shard has the size that the record says. A crash anywhere before
//! leaves at worst a staged file (removed at the next run) or a whole shard without a record (made again, with the
//! same bytes). `plan.json` names the job by its hash: a run on the output of another job refuses.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};

use crate::error::{ErrorKind, PipelineError, Result};

const STATE: &str = "_stillhouse";
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Name of the marker that a data set is complete.
pub const SUCCESS: &str = "_SUCCESS";
/// Name of the data set card.
pub const CARD: &str = "README.md";
/// Name of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

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
    /// The splits.
    pub splits: Vec<SplitRecord>,
}

/// An output folder.
#[derive(Debug, Clone)]
pub struct Output {
    store: Arc<dyn ObjectStore>,
    root: PathBuf,
}

/// What is at the output already.
#[derive(Debug)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// This job's work, to be gone on with.
    Resumable(BTreeMap<SplitId, ShardRecord>),
    /// This job's finished data set.
    Complete,
}

/// Held while a run works on an output; released when the process ends, however it ends.
pub struct Lock(#[allow(dead_code, reason = "held for its lock")] File);

impl Output {
    /// An output folder that need not exist yet; nothing is written.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self { store: Arc::new(object_store::memory::InMemory::new()), root }
    }

    /// Makes the folder and opens it.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        fs::create_dir_all(root.join(STATE))
            .map_err(PipelineError::output(format!("cannot make {}", root.display())))?;
        Self::open(root)
    }

    /// Opens a folder that exists.
    ///
    /// # Errors
    /// When it does not.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        let store = LocalFileSystem::new_with_prefix(&root)
            .map_err(|e| PipelineError::caused(ErrorKind::Output, format!("cannot open {}", root.display()), e))?;
        Ok(Self { store: Arc::new(store), root })
    }

    /// The store, with the folder as its root.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// The folder.
    pub fn root(&self) -> &FsPath {
        &self.root
    }

    /// Where a shard is written before it is committed.
    pub fn staging(&self, name: &str) -> Path {
        Path::from(format!("{STATE}/staging/{name}"))
    }

    /// Takes the output for this process.
    ///
    /// # Errors
    /// When another process has it.
    pub fn lock(&self) -> Result<Lock> {
        let path = self.root.join(STATE).join("lock");
        let context = || format!("cannot lock {}", path.display());
        let file = File::create(&path).map_err(PipelineError::output(context()))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock(file)),
            Err(fs::TryLockError::WouldBlock) => Err(PipelineError::new(
                ErrorKind::Output,
                format!("{}: another run is working on this output; wait for it or stop it", self.root.display()),
            )),
            Err(fs::TryLockError::Error(e)) => Err(PipelineError::caused(ErrorKind::Output, context(), e)),
        }
    }

    /// Looks at what is there, for a job of this hash. Writes nothing.
    ///
    /// # Errors
    /// When it is another job's, or not Stillhouse's at all.
    pub async fn look(&self, job_hash: &str) -> Result<Found> {
        let root = self.root.display();
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries.filter_map(|e| e.ok()).filter(|e| e.file_name() != STATE).count(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(e) => return Err(PipelineError::caused(ErrorKind::Output, format!("cannot read {root}"), e)),
        };
        let here = Self::open(&self.root)?;
        let Some(plan) = here.get_json::<PlanRecord>(&format!("{STATE}/plan.json")).await? else {
            if entries == 0 {
                return Ok(Found::Nothing);
            }
            return Err(PipelineError::new(
                ErrorKind::Usage,
                format!(
                    "output.path: {root} holds {entries} files that are not of a Stillhouse job; choose an empty folder"
                ),
            ));
        };
        if plan.job_hash != job_hash {
            return Err(PipelineError::new(
                ErrorKind::Usage,
                format!(
                    "output.path: {root} holds the output of another job ({}, hash {}; this job has {}); choose another folder, or `--overwrite` to remove it",
                    plan.name,
                    &plan.job_hash[..12.min(plan.job_hash.len())],
                    &job_hash[..12.min(job_hash.len())],
                ),
            ));
        }
        if here.exists(SUCCESS).await? {
            return Ok(Found::Complete);
        }
        let mut done = BTreeMap::new();
        for split in &plan.splits {
            let Some(record) = here.get_json::<ShardRecord>(&split_record(split.split)).await? else { continue };
            match here.size(&record.path).await? {
                Some(bytes) if bytes == record.bytes => {
                    done.insert(split.split, record);
                }
                _ => {}
            }
        }
        Ok(Found::Resumable(done))
    }

    /// Writes the plan and removes what a crash left half-done.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn begin(&self, plan: &PlanRecord) -> Result<()> {
        self.remove_under(&format!("{STATE}/staging")).await?;
        self.put_json(&format!("{STATE}/plan.json"), plan).await
    }

    /// Makes a staged shard visible and records the commit.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn commit(&self, staged: &Path, record: &ShardRecord) -> Result<()> {
        let context = || format!("cannot commit {}", record.path);
        self.sync(staged.as_ref())?;
        self.store.rename(staged, &Path::from(record.path.as_str())).await.map_err(PipelineError::output(context()))?;
        self.put_json(&split_record(record.split), record).await
    }

    /// Ends the data set: the marker last, then the state of the run goes, but for the record of the plan.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn finish(&self) -> Result<()> {
        self.put(SUCCESS, Vec::new()).await?;
        self.clean_state().await
    }

    /// Removes the state that a finished run no longer needs.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn clean_state(&self) -> Result<()> {
        for folder in ["splits", "staging", "input"] {
            self.remove_under(&format!("{STATE}/{folder}")).await?;
            let _ = fs::remove_dir(self.root.join(STATE).join(folder));
        }
        Ok(())
    }

    /// Removes everything that a Stillhouse job writes, and nothing else.
    ///
    /// # Errors
    /// When the store refuses, or when the folder was not written by a Stillhouse job.
    pub async fn remove(&self) -> Result<()> {
        if !self.exists(&format!("{STATE}/plan.json")).await? {
            return Ok(());
        }
        for file in [SUCCESS, MANIFEST, CARD, TOKENIZER] {
            self.delete(file).await?;
        }
        self.remove_under("data").await?;
        let _ = fs::remove_dir(self.root.join("data"));
        self.clean_state().await?;
        self.delete(&format!("{STATE}/plan.json")).await
    }

    /// The folder of the job file, as far as it can be found from here.
    pub async fn job_folder(&self) -> Option<PathBuf> {
        let plan = self.get_json::<PlanRecord>(&format!("{STATE}/plan.json")).await.ok()??;
        Some(self.root.join(plan.job_folder))
    }

    /// Folder for the rows of `input.sql` while the job runs.
    pub fn sql_folder(&self) -> PathBuf {
        self.root.join(STATE).join("input")
    }

    /// Puts a file whole, synced to disk.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let context = format!("cannot write {}", self.root.join(name).display());
        self.store.put(&Path::from(name), PutPayload::from(bytes)).await.map_err(PipelineError::output(context))?;
        self.sync(name)
    }

    /// Puts a value as JSON.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn put_json<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(value).map_err(PipelineError::output(name))?;
        bytes.push(b'\n');
        self.put(name, bytes).await
    }

    /// A value from JSON; `None` when there is no such file.
    ///
    /// # Errors
    /// When it cannot be read or is not what it should be.
    pub async fn get_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let context = || format!("cannot read {}", self.root.join(name).display());
        let result = match self.store.get(&Path::from(name)).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(PipelineError::caused(ErrorKind::Output, context(), e)),
        };
        let bytes = result.bytes().await.map_err(PipelineError::output(context()))?;
        serde_json::from_slice(&bytes).map(Some).map_err(PipelineError::dataset(context()))
    }

    /// Whether a file is there.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.size(name).await?.is_some())
    }

    /// Size of a file; `None` when it is not there.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn size(&self, name: &str) -> Result<Option<u64>> {
        match self.store.head(&Path::from(name)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(PipelineError::caused(ErrorKind::Output, format!("cannot look at {name}"), e)),
        }
    }

    async fn delete(&self, name: &str) -> Result<()> {
        match self.store.delete(&Path::from(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(PipelineError::caused(ErrorKind::Output, format!("cannot remove {name}"), e)),
        }
    }

    /// Removes every file under a folder, also those that the store hides because they are unfinished.
    async fn remove_under(&self, folder: &str) -> Result<()> {
        let context = || format!("cannot clear {folder}");
        let listed: Vec<_> = self
            .store
            .list(Some(&Path::from(folder)))
            .map_ok(|meta| meta.location)
            .try_collect()
            .await
            .map_err(PipelineError::output(context()))?;
        for path in listed {
            self.delete(path.as_ref()).await?;
        }
        match fs::read_dir(self.root.join(folder)) {
            Ok(entries) => {
                for entry in entries.filter_map(|e| e.ok()).filter(|e| e.path().is_file()) {
                    fs::remove_file(entry.path()).map_err(PipelineError::output(context()))?;
                }
                Ok(())
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(PipelineError::caused(ErrorKind::Output, context(), e)),
        }
    }

    /// Makes a file durable before something says that it is there.
    fn sync(&self, name: &str) -> Result<()> {
        let path = self.root.join(name);
        File::open(&path)
            .and_then(|f| f.sync_all())
            .map_err(PipelineError::output(format!("cannot sync {}", path.display())))
    }
}

/// `to` as seen from `from`; both must exist. Relative, so that nothing of the machine gets into the output.
pub fn relative(from: &FsPath, to: &FsPath) -> Option<PathBuf> {
    let (from, to) = (from.canonicalize().ok()?, to.canonicalize().ok()?);
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| std::path::Component::ParentDir);
    Some(up.chain(to.components().skip(common)).collect())
}

fn split_record(split: SplitId) -> String {
    format!("{STATE}/splits/{:05}.json", split.0)
}
