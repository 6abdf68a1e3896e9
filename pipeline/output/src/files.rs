//! Small files of an output, and lists of files.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::lease::is_refusal;
use super::{Output, disk};

const PIECE: u64 = 8 << 20;
const PIECES_AT_ONCE: usize = 2;
/// Rounds of a put that others were quicker than.
const MOST_ROUNDS: u32 = 20;

impl Output {
    /// Puts a file whole; on a disk it is durable then, and its bytes are before its name.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let put = match self.folder() {
            Some(root) => disk::put(root.join(name), bytes).await.map_err(of_disk),
            None => self.store.put(&Path::from(name), PutPayload::from(bytes)).await.map(drop),
        };
        put.map_err(|e| self.failed(&e, "write", name))
    }

    /// Puts a file of the data set, where this run still has the output: one that has slept would put it over that of the run that came after it.
    ///
    /// ```text
    ///   what is there? (version v, or nothing) ─► still ours? ─► put, if v is there still (If-Match), or nothing is (If-None-Match)
    /// ```
    ///
    /// What is there when this run is seen to hold the output was put before it was lost; what the next run puts has another version. So a put that sleeps in
    /// this process, or on its way, is refused when it wakes. A store without conditions has only the look.
    ///
    /// # Errors
    /// When another run has it, or when the store does not take it.
    pub async fn put_own(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        if self.folder().is_some() || !self.conditional {
            self.still_ours().await?;
            return self.put(name, bytes).await;
        }
        let (path, payload) = (Path::from(name), PutPayload::from(bytes));
        for _ in 0..MOST_ROUNDS {
            let mode = match self.store.head(&path).await {
                Ok(there) => PutMode::Update(UpdateVersion { e_tag: there.e_tag, version: there.version }),
                Err(object_store::Error::NotFound { .. }) => PutMode::Create,
                Err(e) => return Err(self.failed(&e, "look at", name)),
            };
            self.still_ours().await?;
            match self.store.put_opts(&path, payload.clone(), mode.into()).await {
                Ok(_) => return Ok(()),
                // a sleeper's was quicker, or this one's own, whose answer was lost: the next look tells
                Err(e) if is_refusal(&e) || matches!(e, object_store::Error::NotFound { .. }) => {}
                Err(e) => return Err(self.failed(&e, "write", name)),
            }
        }
        let message = format!("{}: others write it at the same time, {MOST_ROUNDS} times over", self.shown(name));
        Err(PipelineError::new(ErrorKind::Output, message))
    }

    /// The same, for a value as JSON.
    ///
    /// # Errors
    /// As [`Output::put_own`].
    pub async fn put_own_json<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        self.put_own(name, json(name, value)?).await
    }

    /// Puts a value as JSON.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn put_json<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        self.put(name, json(name, value)?).await
    }

    /// Puts a value as JSON where there is none.
    pub(super) async fn create_json<T: Serialize>(&self, name: &str, value: &T) -> object_store::Result<()> {
        let path = Path::from(name);
        let bytes =
            json(name, value).map_err(|e| object_store::Error::Generic { store: "record", source: Box::new(e) })?;
        let mode = match self.conditional {
            true => PutMode::Create,
            false => match self.store.head(&path).await {
                Err(object_store::Error::NotFound { .. }) => PutMode::Overwrite,
                Err(e) => return Err(e),
                Ok(_) => {
                    return Err(object_store::Error::AlreadyExists { path: name.to_owned(), source: "exists".into() });
                }
            },
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        match self.store.put_opts(&path, PutPayload::from(bytes), options).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::Precondition { path, source }) => {
                Err(object_store::Error::AlreadyExists { path, source })
            }
            Err(e) => Err(e),
        }
    }

    /// A value from JSON; `None` when there is no such file.
    ///
    /// # Errors
    /// When it cannot be read or is not what it should be.
    pub async fn get_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(bytes) = self.get(name).await? else { return Ok(None) };
        let context = || format!("cannot read {}", self.shown(name));
        serde_json::from_slice(&bytes).map(Some).map_err(PipelineError::dataset(context()))
    }

    /// A small file whole; `None` when it is not there.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn get(&self, name: &str) -> Result<Option<bytes::Bytes>> {
        let got = match self.store.get(&Path::from(name)).await {
            Ok(result) => result.bytes().await,
            Err(e) => Err(e),
        };
        match got {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.failed(&e, "read", name)),
        }
    }

    /// A file of any size and a known length in pieces of 8 MB, of which one is read ahead; a broken connection
    /// costs one piece.
    pub fn pieces(&self, name: &str, bytes: u64) -> impl Stream<Item = Result<Bytes>> {
        let path = Path::from(name);
        futures::stream::iter((0..bytes).step_by(PIECE as usize))
            .map(move |start| {
                let path = path.clone();
                async move { self.store.get_range(&path, start..bytes.min(start + PIECE)).await }
            })
            .buffered(PIECES_AT_ONCE)
            .map_err(|e| self.failed(&e, "read", name))
    }

    /// Reads a file of any size in pieces and gives its sha256 and size.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn read_whole(&self, name: &str, mut piece: impl FnMut(&Bytes)) -> Result<(String, u64)> {
        let missing = || PipelineError::new(ErrorKind::DataSet, format!("{}: no such file", self.shown(name)));
        let size = self.size(name).await?.ok_or_else(missing)?;
        let pieces = self.pieces(name, size);
        tokio::pin!(pieces);
        let mut hasher = Sha256::new();
        while let Some(bytes) = pieces.try_next().await? {
            hasher.update(&bytes);
            piece(&bytes);
        }
        Ok((hex::encode(hasher.finalize()), size))
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
            Err(e) => Err(self.failed(&e, "look at", name)),
        }
    }

    /// Files under a folder with their sizes, by name.
    ///
    /// # Errors
    /// When the store cannot list them.
    pub async fn list(&self, folder: &str) -> Result<BTreeMap<String, u64>> {
        self.store
            .list(Some(&Path::from(folder)))
            .map_ok(|meta| (meta.location.to_string(), meta.size))
            .try_collect()
            .await
            .map_err(|e| self.failed(&e, "list", folder))
    }

    /// Removes the mark of work that has ended.
    ///
    /// # Errors
    /// When the store does not.
    pub async fn remove_mark(&self, name: &str) -> Result<()> {
        self.delete(name).await
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// When the store refuses.
    pub async fn delete(&self, name: &str) -> Result<()> {
        if let Some(root) = self.folder() {
            return self.removed(disk::remove_file(root.to_owned(), name.to_owned()).await, name);
        }
        match self.store.delete(&Path::from(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(self.failed(&e, "remove", name)),
        }
    }

    /// Removes every file under a folder; on a disk the folder, too, with what the store hides because it is unfinished.
    pub(super) async fn remove_under(&self, folder: &str) -> Result<()> {
        if let Some(root) = self.folder() {
            return self.removed(disk::remove_folder(root.to_owned(), folder.to_owned()).await, folder);
        }
        for name in self.list(folder).await?.into_keys() {
            self.delete(&name).await?;
        }
        Ok(())
    }

    fn removed(&self, removed: std::io::Result<()>, name: &str) -> Result<()> {
        removed.map_err(|e| PipelineError::caused(ErrorKind::Output, format!("cannot remove {}", self.shown(name)), e))
    }

    /// Makes the bytes of a file on a disk durable before it gets the name under which it counts.
    pub(super) async fn sync(&self, name: &str) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let context = format!("cannot sync {}", self.shown(name));
        disk::sync_file(root.join(name)).await.map_err(PipelineError::output(context))
    }

    /// Makes the name of a file on a disk durable before something says that it is there.
    pub(super) async fn sync_name(&self, name: &str) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let path = root.join(name);
        let folder = path.parent().unwrap_or(root).to_owned();
        let context = format!("cannot sync {}", folder.display());
        disk::sync_folder(folder).await.map_err(PipelineError::output(context))
    }
}

/// As the store of a disk tells it.
pub(super) fn of_disk(error: std::io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "LocalFileSystem", source: error.into() }
}

fn json<T: Serialize>(name: &str, value: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(PipelineError::output(name))?;
    bytes.push(b'\n');
    Ok(bytes)
}
