//! Opens a finished data set and reads its shards with column pruning and row ranges.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use arrow::array::RecordBatch;
use bytes::Bytes;
use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parquet::arrow::ProjectionMask;
use parquet::arrow::async_reader::{ParquetRecordBatchStream, ParquetRecordBatchStreamBuilder};
use parquet::errors::ParquetError;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_operators::registry::job_format;
use stillhouse_output::{MANIFEST, Output, SUCCESS, TOKENIZER};
use stillhouse_reader::ShardFile;
use stillhouse_schemas::columns::{FORMAT_VERSION, HIDDEN_STATES};
use stillhouse_schemas::manifest::{Manifest, ShardRecord};
use tokenizers::Tokenizer;

/// A finished data set.
pub struct Dataset {
    output: Output,
    manifest: Manifest,
}

/// The part of a shard to read.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Columns to read; `None` reads all.
    pub columns: Option<Vec<String>>,
    /// First row.
    pub offset: usize,
    /// Number of rows; `None` reads to the end of the shard.
    pub limit: Option<usize>,
    /// Maximum rows per batch.
    pub batch_rows: usize,
}

impl Dataset {
    /// Opens the data set in a folder.
    ///
    /// # Errors
    /// If the folder or the data set does not exist, the data set is unfinished, or its format is newer than this
    /// program supports.
    pub async fn open(output: Output) -> Result<Self> {
        let shown = output.shown("");
        if !output.has_folder().await {
            return Err(PipelineError::new(ErrorKind::DataSet, format!("{shown}: no such folder")));
        }
        let version = output.get_json::<serde_json::Value>(MANIFEST).await.map_err(|e| match e.kind {
            ErrorKind::DataSet => {
                let message = format!("{e}; `stillhouse run` of its job file writes it again");
                PipelineError::new(ErrorKind::DataSet, message)
            }
            _ => e,
        })?;
        let Some(version) = version else {
            let state = if output.exists("_stillhouse/plan.json").await? {
                "manifest.json is not there: the job is not finished, or it was lost; `stillhouse run` its job file again"
            } else {
                "not a Stillhouse data set (no manifest.json); give the folder that the job's output.path names"
            };
            return Err(PipelineError::new(ErrorKind::DataSet, format!("{shown}: {state}")));
        };
        let format = version.get("format_version").and_then(serde_json::Value::as_u64);
        if format.is_none_or(|v| v > u64::from(FORMAT_VERSION)) {
            return Err(PipelineError::new(
                ErrorKind::DataSet,
                format!("{shown}/manifest.json: format_version {format:?}; this program reads up to {FORMAT_VERSION}"),
            ));
        }
        let manifest = serde_json::from_value(version)
            .map_err(|e| PipelineError::caused(ErrorKind::DataSet, format!("{shown}/manifest.json"), e))?;
        if !output.exists(SUCCESS).await? {
            return Err(PipelineError::new(
                ErrorKind::DataSet,
                format!("{shown}: no _SUCCESS; `stillhouse run` its job file again"),
            ));
        }
        let mut opened = Self { output, manifest };
        opened.read_section_files().await?;
        opened.read_width();
        Ok(opened)
    }

    /// Sets the width of the stored hidden states. The job does not name it, so this parses it from the column's shape
    /// in the manifest.
    fn read_width(&mut self) {
        let stored = self.manifest.columns.iter().find(|column| column.name == HIDDEN_STATES);
        let last = stored.and_then(|column| column.shape.as_deref()?.strip_suffix(']')?.rsplit_once(','));
        let width = last.and_then(|(_, width)| width.parse().ok());
        if let Some(states) = self.manifest.job.extract.as_mut().and_then(|e| e.hidden_states.as_mut()) {
            states.width = width;
        }
    }

    /// Reads the files that the job's sections name from their copies beside the shards. If a copy is missing or its
    /// checksum differs from the manifest's, the content stays unset and `verify` reports it.
    async fn read_section_files(&mut self) -> Result<()> {
        for file in job_format().files(&self.manifest.job) {
            let Some(name) = file.stored_as else { continue };
            let expected = self.manifest.sidecar_files.get(name);
            let bytes = self.output.get(name).await?;
            if let Some(bytes) = bytes.filter(|bytes| Some(&hex::encode(Sha256::digest(bytes))) == expected) {
                self.manifest.job.sections.set_file(&file.field, bytes.to_vec().into());
            }
        }
        Ok(())
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder of the data set.
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// Path of a file of the data set, for messages.
    pub fn shown(&self, name: &str) -> String {
        self.output.shown(name)
    }

    /// The data set's own tokenizer.
    ///
    /// # Errors
    /// If the tokenizer cannot be read, or its checksum differs from the manifest's.
    pub async fn tokenizer(&self) -> Result<Tokenizer> {
        let context = self.shown(TOKENIZER);
        let bytes = self.read_verified(TOKENIZER, &self.manifest.tokenizer.sha256).await?;
        Tokenizer::from_bytes(bytes).map_err(|e| PipelineError::new(ErrorKind::DataSet, format!("{context}: {e}")))
    }

    /// Reads a small file of the data set and checks its checksum.
    ///
    /// # Errors
    /// If the file is missing, cannot be read, or has another checksum.
    pub async fn read_verified(&self, name: &str, sha256: &str) -> Result<Bytes> {
        let wrong = |what: String| {
            let shown = self.shown(name);
            Err(PipelineError::new(
                ErrorKind::DataSet,
                format!("{shown}: {what}; `stillhouse verify` says how to repair it"),
            ))
        };
        match self.output.get(name).await? {
            None => wrong("is missing".into()),
            Some(bytes) => match hex::encode(Sha256::digest(&bytes)) {
                got if got == sha256 => Ok(bytes),
                got => wrong(format!("sha256 {got}, the manifest has {sha256}")),
            },
        }
    }

    /// The raw bytes of the manifest, checked against the checksum in `_SUCCESS`.
    ///
    /// # Errors
    /// If `_SUCCESS` or the manifest changed after the data set was finished.
    pub async fn verified_manifest(&self) -> Result<Bytes> {
        let manifest = self.output.finished_manifest().await?;
        manifest.ok_or_else(|| {
            let shown = self.shown(MANIFEST);
            let message = format!("{shown}: _SUCCESS has another sha256: one of the two is damaged; `stillhouse verify` says how to repair it");
            PipelineError::new(ErrorKind::DataSet, message)
        })
    }

    /// Reads an entry of a shard's footer; `None` if it has no such entry.
    ///
    /// # Errors
    /// If the shard does not exist or cannot be read.
    pub async fn footer_entry(&self, shard: &ShardRecord, key: &str) -> Result<Option<String>> {
        let reader = ShardFile::new(self.output.store(), &shard.path, shard.bytes, shard.footer.as_ref());
        let builder = match ParquetRecordBatchStreamBuilder::new(reader).await {
            Ok(builder) => builder,
            Err(e) => return Err(self.unreadable(shard, e).await),
        };
        let entries = builder.metadata().file_metadata().key_value_metadata();
        Ok(entries.into_iter().flatten().find(|entry| entry.key == key).and_then(|entry| entry.value.clone()))
    }

    /// Reads a shard as a stream of batches.
    ///
    /// # Errors
    /// If the shard or a column does not exist.
    pub async fn read(
        &self,
        shard: &ShardRecord,
        selection: &Selection,
    ) -> Result<ParquetRecordBatchStream<ShardFile>> {
        let context = self.shown(&shard.path);
        let reader = ShardFile::new(self.output.store(), &shard.path, shard.bytes, shard.footer.as_ref());
        let mut builder = match ParquetRecordBatchStreamBuilder::new(reader).await {
            Ok(builder) => builder,
            Err(e) => return Err(self.unreadable(shard, e).await),
        };
        if let Some(columns) = &selection.columns {
            for name in columns {
                if builder.schema().column_with_name(name).is_none() {
                    return Err(PipelineError::new(ErrorKind::DataSet, format!("{context}: column {name} is missing")));
                }
            }
            let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().map(String::as_str));
            builder = builder.with_projection(mask);
        }
        if let Some(limit) = selection.limit {
            builder = builder.with_limit(limit);
        }
        builder
            .with_offset(selection.offset)
            .with_batch_size(selection.batch_rows.max(1))
            .build()
            .map_err(PipelineError::dataset(context))
    }

    /// Explains why the footer of a shard cannot be read. Usually the file is truncated or missing.
    async fn unreadable(&self, shard: &ShardRecord, error: ParquetError) -> PipelineError {
        let shown = self.shown(&shard.path);
        match self.output.store().head(&Path::from(shard.path.as_str())).await {
            Ok(there) if there.size != shard.bytes => PipelineError::new(
                ErrorKind::DataSet,
                format!("{shown}: has {} bytes, the manifest has {}", there.size, shard.bytes),
            ),
            _ => PipelineError::caused(ErrorKind::DataSet, shown, error),
        }
    }

    /// Reads a range of rows of a shard as one batch; `None` if the range is empty.
    ///
    /// # Errors
    /// See [`Dataset::read`].
    pub async fn rows(&self, shard: &ShardRecord, offset: usize, limit: usize) -> Result<Option<RecordBatch>> {
        let selection = Selection { columns: None, offset, limit: Some(limit), batch_rows: limit };
        let batches: Vec<RecordBatch> = self
            .read(shard, &selection)
            .await?
            .try_collect()
            .await
            .map_err(PipelineError::dataset(self.shown(&shard.path)))?;
        match batches.first() {
            None => Ok(None),
            Some(first) => arrow::compute::concat_batches(&first.schema(), &batches)
                .map(Some)
                .map_err(PipelineError::dataset(self.shown(&shard.path))),
        }
    }
}
