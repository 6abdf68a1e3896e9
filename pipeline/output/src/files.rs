//! Reads, writes and lists files of an output.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::lease::is_condition_failure;
use super::{Output, disk};

const PIECE_BYTES: u64 = 8 << 20;
const MAX_PIECES_IN_FLIGHT: usize = 2;
/// Maximum attempts at a conditional put that other writers preceded.
const MAX_PUT_ATTEMPTS: u32 = 20;

impl Output {
    /// Writes a file atomically. On a disk it is durable on return, and its bytes are durable before its name.
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn put(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        let put = match self.folder() {
            Some(root) => disk::put(root.join(name), bytes).await.map_err(to_store_error),
            None => self.store.put(&Path::from(name), PutPayload::from(bytes)).await.map(drop),
        };
        put.map_err(|e| self.failed(&e, "write", name))
    }

    /// Writes a file of the data set if this run still holds the output. A run that was suspended must not overwrite
    /// the file of its successor.
    ///
    /// ```text
    ///   read the version v, or that the file is missing ─► still ours? ─► put if v is unchanged (If-Match),
    ///                                                                     or if it is still missing (If-None-Match)
    ///   missing (If-None-Match)
    /// ```
    ///
    /// When the check finds that this run holds the output, the file that was read is older than any loss of it. A
    /// successor's file would have another version. A put delayed in this process or in the network is therefore
    /// refused. A store without conditional puts relies on the check alone.
    ///
    /// # Errors
    /// When another run holds the output, or when the store rejects the file.
    pub async fn put_if_owner(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        if self.folder().is_some() || !self.conditional {
            self.check_ownership().await?;
            return self.put(name, bytes).await;
        }
        let (path, payload) = (Path::from(name), PutPayload::from(bytes));
        for _ in 0..MAX_PUT_ATTEMPTS {
            let mode = match self.store.head(&path).await {
                Ok(there) => PutMode::Update(UpdateVersion { e_tag: there.e_tag, version: there.version }),
                Err(object_store::Error::NotFound { .. }) => PutMode::Create,
                Err(e) => return Err(self.failed(&e, "access", name)),
            };
            self.check_ownership().await?;
            match self.store.put_opts(&path, payload.clone(), mode.into()).await {
                Ok(_) => return Ok(()),
                // Another writer was first, or an earlier put of this one whose response was lost. The next round finds
                // out.
                Err(e) if is_condition_failure(&e) || matches!(e, object_store::Error::NotFound { .. }) => {}
                Err(e) => return Err(self.failed(&e, "write", name)),
            }
        }
        let message = format!("{}: others write it at the same time, {MAX_PUT_ATTEMPTS} times over", self.shown(name));
        Err(PipelineError::new(ErrorKind::Output, message))
    }

    /// Like [`Output::put_if_owner`], for a value as JSON.
    ///
    /// # Errors
    /// As [`Output::put_if_owner`].
    pub async fn put_json_if_owner<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        self.put_if_owner(name, json(name, value)?).await
    }

    /// Writes a value as JSON.
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn put_json<T: Serialize>(&self, name: &str, value: &T) -> Result<()> {
        self.put(name, json(name, value)?).await
    }

    /// Writes a value as JSON unless the file exists.
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

    /// Reads a JSON file; returns `None` if it does not exist.
    ///
    /// # Errors
    /// When it cannot be read or parsed.
    pub async fn get_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(bytes) = self.get(name).await? else { return Ok(None) };
        let context = || format!("cannot read {}", self.shown(name));
        serde_json::from_slice(&bytes).map(Some).map_err(PipelineError::dataset(context()))
    }

    /// Reads a small file; returns `None` if it does not exist.
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

    /// Streams a file of known size in pieces of 8 MiB and reads one piece ahead. A broken connection costs at most one
    /// piece.
    pub fn pieces(&self, name: &str, bytes: u64) -> impl Stream<Item = Result<Bytes>> {
        let path = Path::from(name);
        futures::stream::iter((0..bytes).step_by(PIECE_BYTES as usize))
            .map(move |start| {
                let path = path.clone();
                async move { self.store.get_range(&path, start..bytes.min(start + PIECE_BYTES)).await }
            })
            .buffered(MAX_PIECES_IN_FLIGHT)
            .map_err(|e| self.failed(&e, "read", name))
    }

    /// Reads a file of any size in pieces. Returns its SHA-256 and size.
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

    /// Whether a file exists.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.size(name).await?.is_some())
    }

    /// Returns the size of a file, or `None` if it does not exist.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn size(&self, name: &str) -> Result<Option<u64>> {
        match self.store.head(&Path::from(name)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.failed(&e, "access", name)),
        }
    }

    /// Lists the files under a folder with their sizes, by name.
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

    /// Removes a file if it exists.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn delete(&self, name: &str) -> Result<()> {
        if let Some(root) = self.folder() {
            return self.removal_result(disk::remove_file(root.to_owned(), name.to_owned()).await, name);
        }
        match self.store.delete(&Path::from(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(self.failed(&e, "remove", name)),
        }
    }

    /// Removes every file under a folder. On a disk it also removes the folder and the unfinished files that the store
    /// hides.
    pub(super) async fn remove_under(&self, folder: &str) -> Result<()> {
        if let Some(root) = self.folder() {
            return self.removal_result(disk::remove_folder(root.to_owned(), folder.to_owned()).await, folder);
        }
        for name in self.list(folder).await?.into_keys() {
            self.delete(&name).await?;
        }
        Ok(())
    }

    fn removal_result(&self, removed: std::io::Result<()>, name: &str) -> Result<()> {
        removed.map_err(|e| PipelineError::caused(ErrorKind::Output, format!("cannot remove {}", self.shown(name)), e))
    }

    /// Makes the bytes of a file on a disk durable, before it gets its final name.
    pub(super) async fn sync(&self, name: &str) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let context = format!("cannot sync {}", self.shown(name));
        disk::sync_file(root.join(name)).await.map_err(PipelineError::output(context))
    }

    /// Makes the name of a file on a disk durable, before a record says that it exists.
    pub(super) async fn sync_name(&self, name: &str) -> Result<()> {
        let Some(root) = self.folder() else { return Ok(()) };
        let path = root.join(name);
        let folder = path.parent().unwrap_or(root).to_owned();
        let context = format!("cannot sync {}", folder.display());
        disk::sync_folder(folder).await.map_err(PipelineError::output(context))
    }
}

/// Converts an I/O error to the error that object_store's local store would return.
pub(super) fn to_store_error(error: std::io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "LocalFileSystem", source: error.into() }
}

fn json<T: Serialize>(name: &str, value: &T) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(PipelineError::output(name))?;
    bytes.push(b'\n');
    Ok(bytes)
}
