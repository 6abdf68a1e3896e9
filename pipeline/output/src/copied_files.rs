//! Files copied from another data set: written completely or not at all, with their SHA-256 as metadata.

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Attribute, AttributeValue, Attributes, GetOptions, ObjectStore, ObjectStoreExt, PutOptions, PutPayload,
};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::upload::{Staged, StagedKind};
use super::{Backend, Output, STATE_FOLDER, ShardUpload};

/// Name of the metadata field for an object's SHA-256 in hexadecimal (`x-amz-meta-sha256` in S3).
pub const SHA256: &str = "sha256";

impl Output {
    /// Begins to write a file of about `bytes` bytes, with its checksum if known. Readers cannot see it before
    /// [`Output::place`].
    ///
    /// # Errors
    /// When the store rejects it.
    pub async fn upload_copy(&self, name: &str, bytes: u64, sha256: Option<&str>) -> Result<ShardUpload> {
        let bucket = match &self.backend {
            Backend::Disk(_) => {
                let staged = Path::from(format!("{STATE_FOLDER}/staging/{}", name.replace('/', "_")));
                return Ok(ShardUpload::to_disk(Arc::clone(&self.store), staged));
            }
            Backend::Web(_) => return Err(self.read_only()),
            Backend::Store(bucket) => bucket,
        };
        let path = bucket.full_path(name);
        let id = match &bucket.uploads {
            Some(uploads) => {
                let known: Vec<_> = sha256.map(|sha256| (SHA256, sha256)).into_iter().collect();
                uploads.create(&path, &known).await
            }
            // This store cannot attach metadata to a multipart upload, so later checks compare only the size.
            None => bucket.multipart.create_multipart(&path).await,
        };
        let id = id.map_err(|e| self.failed(&e, "write", name))?;
        let upload_options = self.upload_options.for_shard_size(bytes as f64);
        Ok(ShardUpload::to_store(
            Arc::clone(&bucket.multipart),
            path,
            id,
            upload_options,
            Arc::clone(&self.part_permits),
        ))
    }

    /// Makes a copied file visible under its name, and verifies that it exists with the right size.
    ///
    /// # Errors
    /// When the store rejects it, or has a different file of that name.
    pub async fn place(&self, staged: Staged, name: &str) -> Result<()> {
        let outcome = match (&staged.kind, &self.backend) {
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
        // If the response was lost, the retry fails although the first request succeeded. Only the stored file counts.
        match (self.copied(name).await?, outcome) {
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
    /// When the store rejects it.
    pub async fn put_copy(&self, name: &str, bytes: Bytes, sha256: &str) -> Result<()> {
        self.check_ownership().await?;
        if self.folder().is_some() {
            // A disk cannot store the checksum.
            return self.put(name, bytes.into()).await;
        }
        let sha256 = (Attribute::Metadata(SHA256.into()), AttributeValue::from(sha256.to_owned()));
        let options = PutOptions { attributes: Attributes::from_iter([sha256]), ..PutOptions::default() };
        let put = self.store.put_opts(&Path::from(name), PutPayload::from(bytes), options).await;
        put.map(drop).map_err(|e| self.failed(&e, "write", name))
    }

    /// Returns the size and the checksum of a file, or `None` if it does not exist.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn copied(&self, name: &str) -> Result<Option<CopiedFile>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match self.store.get_opts(&Path::from(name), options).await {
            Ok(got) => {
                let sha256 = got.attributes.get(&Attribute::Metadata(SHA256.into())).map(|v| v.to_string());
                Ok(Some(CopiedFile { bytes: got.meta.size, sha256 }))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.failed(&e, "access", name)),
        }
    }
}

/// A file that exists in the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedFile {
    /// Size in bytes.
    pub bytes: u64,
    /// Checksum from the object's metadata; always `None` on a disk.
    pub sha256: Option<String>,
}
