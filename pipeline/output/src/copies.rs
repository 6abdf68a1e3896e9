//! Files that come from another data set: written whole or not at all, with their sha256 beside them.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Attribute, AttributeValue, Attributes, GetOptions, ObjectStore, ObjectStoreExt, PutOptions, PutPayload,
};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::upload::{Staged, StagedKind};
use super::{Backend, Output, STATE, ShardUpload};

/// Name of the metadata that holds an object's sha256 in hexadecimal (`x-amz-meta-sha256` in S3).
pub const SHA256: &str = "sha256";

impl Output {
    /// Begins to write a file of about so many bytes, with its checksum where that is known; readers see nothing of it before [`Output::place`].
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn upload_copy(&self, name: &str, bytes: u64, sha256: Option<&str>) -> Result<ShardUpload> {
        let bucket = match &self.backend {
            Backend::Disk(_) => {
                let staged = Path::from(format!("{STATE}/staging/{}", name.replace('/', "_")));
                return Ok(ShardUpload::to_disk(Arc::clone(&self.store), staged));
            }
            Backend::Web(_) => return Err(self.read_only()),
            Backend::Store(bucket) => bucket,
        };
        let path = bucket.full(name);
        let id = match &bucket.uploads {
            Some(uploads) => {
                let known: Vec<_> = sha256.map(|sha256| (SHA256, sha256)).into_iter().collect();
                uploads.create(&path, &known).await
            }
            // no way to give metadata to an upload of parts: the size is all that tells then
            None => bucket.multipart.create_multipart(&path).await,
        };
        let id = id.map_err(|e| self.failed(&e, "write", name))?;
        let sending = self.sending.for_about(bytes as f64);
        Ok(ShardUpload::to_store(Arc::clone(&bucket.multipart), path, id, sending, Arc::clone(&self.parts)))
    }

    /// Makes a copied file visible under its name and makes sure that it is there with its size.
    ///
    /// # Errors
    /// When the store does not take it, or has something else under the name.
    pub async fn place(&self, staged: Staged, name: &str) -> Result<()> {
        let done = match (&staged.kind, &self.backend) {
            (StagedKind::Disk(staged), _) => {
                self.sync(staged.as_ref()).await?;
                let moved = self.store.rename(staged, &Path::from(name)).await;
                if moved.is_ok() {
                    self.sync_name(name).await?;
                }
                moved
            }
            (StagedKind::Store { path, upload }, Backend::Store(bucket)) => match &bucket.uploads {
                Some(uploads) if self.conditional => {
                    uploads.complete_if_absent(path, &upload.id, &upload.part_ids()).await.map(|_| ())
                }
                _ => bucket.multipart.complete_multipart(path, &upload.id, upload.part_ids()).await.map(|_| ()),
            },
            (StagedKind::Store { .. }, Backend::Disk(_) | Backend::Web(_)) => Ok(()),
        };
        // an answer that was lost makes the second try fail: what counts is what is there
        match (self.copied(name).await?, done) {
            (Some(there), _)
                if there.bytes == staged.bytes && there.sha256.as_ref().is_none_or(|s| *s == staged.sha256) =>
            {
                Ok(())
            }
            (_, Err(e)) => Err(self.failed(&e, "write", name)),
            (there, Ok(())) => Err(PipelineError::new(
                ErrorKind::Output,
                format!(
                    "{}: {} bytes were written, {:?} are there",
                    self.shown(name),
                    staged.bytes,
                    there.map(|t| t.bytes)
                ),
            )),
        }
    }

    /// Writes a small file with its checksum.
    ///
    /// # Errors
    /// When the store does not take it.
    pub async fn put_copy(&self, name: &str, bytes: Bytes, sha256: &str) -> Result<()> {
        self.still_ours().await?;
        if self.folder().is_some() {
            // a disk has no place for the checksum
            return self.put(name, bytes.into()).await;
        }
        let sha256 = (Attribute::Metadata(SHA256.into()), AttributeValue::from(sha256.to_owned()));
        let options = PutOptions { attributes: Attributes::from_iter([sha256]), ..PutOptions::default() };
        let put = self.store.put_opts(&Path::from(name), PutPayload::from(bytes), options).await;
        put.map(drop).map_err(|e| self.failed(&e, "write", name))
    }

    /// What is there under a name: its size, and the checksum that was put beside it.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn copied(&self, name: &str) -> Result<Option<Copied>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.store.get_opts(&Path::from(name), options).await {
            Ok(got) => {
                let sha256 = got.attributes.get(&Attribute::Metadata(SHA256.into())).map(|v| v.to_string());
                Ok(Some(Copied { bytes: got.meta.size, sha256 }))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.failed(&e, "look at", name)),
        }
    }
}

/// A file that is there already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// Its size.
    pub bytes: u64,
    /// Its checksum as the metadata has it; disks have none.
    pub sha256: Option<String>,
}
