//! The upload of a shard: hashed, counted, and invisible until it is committed.
//!
//! Memory in a store: `parts_at_once` + 1 parts of `part_bytes` per shard, and at most 16 parts in flight over all
//! shards. On a disk: 8 MiB of buffer.

use std::sync::Arc;

use bytes::Bytes;
use object_store::buffered::BufWriter;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// A multipart upload with all its parts; enough for any process to complete it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadRecord {
    /// The store's id of the upload.
    pub id: String,
    /// The store's ids of the parts, in order.
    pub parts: Vec<String>,
}

impl UploadRecord {
    pub(super) fn part_ids(&self) -> Vec<PartId> {
        self.parts.iter().map(|id| PartId { content_id: id.clone() }).collect()
    }
}

const DISK_BUFFER: usize = 8 << 20;

/// How shards are uploaded to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadOptions {
    /// Size of every part but the last. Some stores require equal parts, and none accepts more than 10,000.
    pub part_bytes: usize,
    /// Maximum number of parts of one shard in flight.
    pub parts_at_once: usize,
}

/// Maximum number of parts that stores accept per upload.
const MAX_PARTS: usize = 10_000;

impl UploadOptions {
    /// Increases the part size so that four times `bytes` fit into the maximum number of parts.
    #[must_use]
    pub fn for_shard_size(self, bytes: f64) -> Self {
        let min_part_bytes = (bytes * 4.0 / MAX_PARTS as f64).ceil() as usize;
        Self { part_bytes: self.part_bytes.max(min_part_bytes), ..self }
    }
}

impl Default for UploadOptions {
    fn default() -> Self {
        Self { part_bytes: 8 << 20, parts_at_once: 4 }
    }
}

/// A shard being written.
pub struct ShardUpload {
    target: Target,
    digest: Sha256,
    bytes: u64,
}

enum Target {
    Disk { store: Arc<dyn ObjectStore>, staged: Path, writer: BufWriter, closed: bool },
    Store(Parts),
}

/// A completely written shard that is not committed yet.
#[derive(Debug)]
pub struct Staged {
    pub(super) kind: StagedKind,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

#[derive(Debug)]
pub(super) enum StagedKind {
    Disk(Path),
    Store { path: Path, upload: UploadRecord },
}

impl ShardUpload {
    /// An upload to a folder of this machine.
    pub fn to_disk(store: Arc<dyn ObjectStore>, staged: Path) -> Self {
        let writer = BufWriter::with_capacity(Arc::clone(&store), staged.clone(), DISK_BUFFER);
        Self::new(Target::Disk { store, staged, writer, closed: false })
    }

    /// Continues an upload that was created in a store.
    pub(super) fn to_store(
        multipart: Arc<dyn MultipartStore>,
        path: Path,
        id: String,
        upload_options: UploadOptions,
        part_permits: Arc<Semaphore>,
    ) -> Self {
        Self::new(Target::Store(Parts {
            multipart,
            path,
            id,
            upload_options,
            part_permits,
            buffered: Vec::new(),
            buffered_bytes: 0,
            in_flight: JoinSet::new(),
            sent: Vec::new(),
        }))
    }

    fn new(target: Target) -> Self {
        Self { target, digest: Sha256::new(), bytes: 0 }
    }

    /// Uploads the next bytes; waits while too many parts are in flight.
    ///
    /// # Errors
    /// When the disk or the store rejects them.
    pub async fn put(&mut self, bytes: Bytes) -> object_store::Result<()> {
        self.digest.update(&bytes);
        self.bytes += bytes.len() as u64;
        match &mut self.target {
            Target::Disk { writer, .. } => writer.put(bytes).await,
            Target::Store(parts) => parts.put(bytes).await,
        }
    }

    /// SHA-256 of the bytes so far, in hexadecimal.
    pub fn sha256(&self) -> String {
        hex::encode(self.digest.clone().finalize())
    }

    /// Sends the rest. The shard is then complete but not committed.
    ///
    /// # Errors
    /// When the disk or the store rejects it. The upload is aborted then, as far as possible.
    pub async fn finish(mut self) -> object_store::Result<Staged> {
        if let Err(e) = self.flush().await {
            self.abort().await;
            return Err(e);
        }
        let kind = match self.target {
            Target::Disk { staged, .. } => StagedKind::Disk(staged),
            Target::Store(parts) => {
                let upload = UploadRecord { id: parts.id, parts: parts.sent.into_iter().flatten().collect() };
                StagedKind::Store { path: parts.path, upload }
            }
        };
        Ok(Staged { kind, bytes: self.bytes, sha256: hex::encode(self.digest.finalize()) })
    }

    async fn flush(&mut self) -> object_store::Result<()> {
        match &mut self.target {
            Target::Disk { writer, closed, .. } => {
                *closed = true;
                // unwrap the store's error
                let store_error = |e: std::io::Error| match e.downcast::<object_store::Error>() {
                    Ok(error) => error,
                    Err(e) => object_store::Error::Generic { store: "disk", source: e.into() },
                };
                writer.shutdown().await.map_err(store_error)
            }
            Target::Store(parts) => parts.flush().await,
        }
    }

    /// Aborts the upload. If that fails, `stillhouse clean` and the next run find the remains.
    pub async fn abort(self) {
        let removed = match self.target {
            Target::Disk { store, staged, mut writer, closed } => {
                // A writer whose shutdown failed cannot be aborted.
                let aborted = if closed { Ok(()) } else { writer.abort().await };
                drop(writer);
                store.delete(&staged).await.or(aborted)
            }
            Target::Store(mut parts) => {
                parts.in_flight.shutdown().await;
                parts.multipart.abort_multipart(&parts.path, &parts.id).await
            }
        };
        match removed {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
            Err(e) => tracing::warn!("an unfinished upload could not be taken back: {e}"),
        }
    }
}

/// The parts of a multipart upload.
struct Parts {
    multipart: Arc<dyn MultipartStore>,
    path: Path,
    id: String,
    upload_options: UploadOptions,
    /// Shared by all uploads to an output.
    part_permits: Arc<Semaphore>,
    buffered: Vec<Bytes>,
    buffered_bytes: usize,
    in_flight: JoinSet<object_store::Result<(usize, PartId)>>,
    /// Ids of the parts by index; `None` while a part is in flight.
    sent: Vec<Option<String>>,
}

impl Parts {
    async fn put(&mut self, mut bytes: Bytes) -> object_store::Result<()> {
        while !bytes.is_empty() {
            let free = self.upload_options.part_bytes - self.buffered_bytes;
            let taken = bytes.split_to(free.min(bytes.len()));
            self.buffered_bytes += taken.len();
            self.buffered.push(taken);
            if self.buffered_bytes == self.upload_options.part_bytes {
                self.send().await?;
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> object_store::Result<()> {
        if self.buffered_bytes > 0 || self.sent.is_empty() {
            self.send().await?;
        }
        while let Some(sent) = self.in_flight.join_next().await {
            self.record_part(sent)?;
        }
        Ok(())
    }

    async fn send(&mut self) -> object_store::Result<()> {
        while self.in_flight.len() >= self.upload_options.parts_at_once.max(1)
            && let Some(sent) = self.in_flight.join_next().await
        {
            self.record_part(sent)?;
        }
        if self.sent.len() == MAX_PARTS {
            let bytes = self.upload_options.part_bytes;
            let message = format!("more than {MAX_PARTS} parts of {bytes} bytes; set storage.part_megabytes higher");
            return Err(object_store::Error::Generic { store: "upload", source: message.into() });
        }
        let payload = PutPayload::from_iter(self.buffered.drain(..));
        self.buffered_bytes = 0;
        let index = self.sent.len();
        self.sent.push(None);
        let (multipart, path, id) = (Arc::clone(&self.multipart), self.path.clone(), self.id.clone());
        let permit = Arc::clone(&self.part_permits).acquire_owned().await.ok();
        self.in_flight.spawn(async move {
            let _held_until_sent = permit;
            let part = multipart.put_part(&path, &id, index, payload).await?;
            Ok((index, part))
        });
        Ok(())
    }

    fn record_part(
        &mut self,
        sent: Result<object_store::Result<(usize, PartId)>, tokio::task::JoinError>,
    ) -> object_store::Result<()> {
        let (index, part) = sent.map_err(|source| object_store::Error::JoinError { source })??;
        if let Some(place) = self.sent.get_mut(index) {
            *place = Some(part.content_id);
        }
        Ok(())
    }
}
