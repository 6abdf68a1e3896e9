//! Files that an export is writing.

use bytes::Bytes;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{Output, ShardUpload};

use super::ExportedFile;

/// The files of a unit while they are uploaded. They are invisible until [`Files::place`].
pub(super) struct Files {
    uploads: Vec<(String, ShardUpload)>,
    destination: Output,
}

impl Files {
    /// Starts the uploads. `bytes` is the approximate size of each file.
    pub async fn begin(destination: &Output, names: &[String], bytes: u64) -> Result<Self> {
        let mut files = Self { uploads: Vec::new(), destination: destination.clone() };
        for name in names {
            match destination.upload_copy(name, bytes, None).await {
                Ok(upload) => files.uploads.push((name.clone(), upload)),
                Err(e) => {
                    files.abort().await;
                    return Err(e);
                }
            }
        }
        Ok(files)
    }

    /// Path of the first file, for messages.
    pub fn shown(&self) -> String {
        self.destination.shown(self.uploads.first().map_or("", |(name, _)| name))
    }

    /// Appends bytes to the file with this index.
    pub async fn put(&mut self, file: usize, bytes: Vec<u8>) -> Result<()> {
        let Some((name, upload)) = self.uploads.get_mut(file) else { return Ok(()) };
        let shown = self.destination.shown(name);
        upload.put(Bytes::from(bytes)).await.map_err(|e| PipelineError::store(ErrorKind::Output, &e, "write", &shown))
    }

    /// Finishes the uploads and makes the files visible, one after the other.
    pub async fn place(self) -> Result<Vec<ExportedFile>> {
        let mut made = Vec::new();
        for (name, upload) in self.uploads {
            let shown = self.destination.shown(&name);
            let staged =
                upload.finish().await.map_err(|e| PipelineError::store(ErrorKind::Output, &e, "write", &shown))?;
            let file =
                ExportedFile { name: name.clone(), bytes: staged.bytes, sha256: staged.sha256.clone(), there: false };
            self.destination.place(staged, &name).await?;
            made.push(file);
        }
        Ok(made)
    }

    /// Aborts the uploads.
    pub async fn abort(self) {
        for (_, upload) in self.uploads {
            upload.abort().await;
        }
    }
}
