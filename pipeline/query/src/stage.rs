//! Writes the rows of a query or of a mixture, their text and the columns of `input.carry`, to Parquet files.
//!
//! Files and row groups are cut by bytes of values, row by row, so the cuts do not depend on the query's batches.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_base::file_state::FileState;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::manifest::{SourceStatistics, Statistics};
use stillhouse_schemas::spec::Input;
use stillhouse_source::{QueryTable, as_text};

use crate::bounds::on_large_stack;
use crate::check::plan;
use crate::error::sql_error;
use crate::session::session;
use crate::table::{FilesTable, SkippedCounts};

const FILE_BYTES: u64 = 256_000_000;
const ROW_GROUP_BYTES: u64 = 16_000_000;
/// Rows that the writer is given at once. It decides over pages by what it is given, so this keeps them independent of the batches.
const PAGE_STEP_ROWS: usize = 32;
const RECORD: &str = "staged.json";

/// The staged rows of a query or of a mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct StagedRows {
    /// Parquet files with the column that `input.text` names and those that `input.carry` names, all of them strings; empty if
    /// there are no rows. Plan and read them with `input.format` set to Parquet and a store of local files.
    pub files: Vec<InputFile>,
    /// Number of rows in the files.
    pub rows: u64,
    /// Number of bad records of the tables that were skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// The tables of a mixture.
    pub tables: Vec<MixedTable>,
    /// SHA-256 of each file.
    pub sha256: Vec<String>,
}

/// What a mixture has of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MixedTable {
    /// Name of the table.
    pub name: String,
    /// Number of its documents.
    pub documents: u64,
    /// Its tokens.
    pub tokens: u64,
    /// How often it is read.
    pub epochs: f64,
    /// Tokens in the mixture.
    pub mixed_tokens: u64,
    /// Its records that were skipped, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, u64>,
}

impl StagedRows {
    /// The records that were skipped, as a run counts them: all of them, and those of each table of a mixture.
    pub fn skipped_records(&self) -> Statistics {
        let with_skipped = self.tables.iter().filter(|table| !table.skipped.is_empty());
        let counts = |table: &MixedTable| {
            let skipped = table.skipped.clone();
            (table.name.clone(), SourceStatistics { skipped, ..SourceStatistics::default() })
        };
        let sources = with_skipped.map(counts).collect();
        Statistics { skipped: self.skipped.clone(), sources, ..Statistics::default() }
    }
}

/// The record that a run writes about its staged rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StagedRecord {
    /// Number of rows in all parts.
    pub rows: u64,
    /// Names and sizes in bytes.
    pub files: Vec<(String, u64)>,
    /// Number of records skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// The tables of a mixture.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<MixedTable>,
    /// States of the files that the query read.
    #[serde(default)]
    pub inputs: Vec<FileState>,
    /// SHA-256 of each file.
    #[serde(default)]
    pub sha256: Vec<String>,
}

impl StagedRecord {
    /// Whether the query read exactly these files, in these states.
    pub fn matches_inputs(&self, inputs: &[InputFile]) -> bool {
        self.inputs.len() == inputs.len() && self.inputs.iter().zip(inputs).all(|(was, now)| *was == now.state)
    }

    /// Converts the record to [`StagedRows`], with the path of each file as `place` returns it for its name.
    pub fn with_locations<E>(
        self,
        place: impl Fn(&str) -> Result<object_store::path::Path, E>,
    ) -> Result<StagedRows, E> {
        let mut files = Vec::new();
        for (name, size) in self.files {
            let (location, state) = (place(&name)?, FileState { bytes: size, ..FileState::default() });
            files.push(InputFile { path: format!("sql/{name}"), location, size, state });
        }
        let Self { rows, skipped, tables, sha256, .. } = self;
        Ok(StagedRows { files, rows, skipped, tables, sha256 })
    }

    /// Iterates over the names, sizes and checksums of the files.
    pub fn parts(&self) -> impl Iterator<Item = (&str, u64, &str)> {
        self.files.iter().zip(&self.sha256).map(|((name, size), sha256)| (name.as_str(), *size, sha256.as_str()))
    }
}

fn temporary(path: &Path) -> impl Fn(std::io::Error) -> SourceError + '_ {
    move |source| SourceError::Temporary { path: path.display().to_string(), source }
}

/// Runs `input.sql` and stages its text column in `dir`, which it creates if needed and which may hold files of an
/// earlier run.
///
/// # Errors
/// When the query is not valid or fails, or when the files cannot be written.
pub fn stage_sql(
    store: &Store,
    tables: &[QueryTable],
    input: &Input,
    memory_bytes: u64,
    dir: &Path,
    extra_udfs: impl FnOnce(&SessionContext) + Send,
) -> Result<StagedRows, SourceError> {
    let query = |spill: &Path, parts: &mut PartWriter<'_>| {
        let skipped = SkippedCounts::default();
        let context = session(open(store, tables, &skipped)?, memory_bytes, Some(spill), extra_udfs)?;
        store.wait(async {
            let plan = plan(&context, input).await?;
            let frame = context.execute_logical_plan(plan).await.map_err(sql_error)?;
            let mut rows = frame.execute_stream().await.map_err(sql_error)?;
            while let Some(batch) = rows.next().await {
                parts.write_batch(&batch.map_err(sql_error)?)?;
            }
            Ok::<_, SourceError>(())
        })?;
        Ok((skipped.take(), Vec::new()))
    };
    on_large_stack(|| stage(store, tables, input, dir, query))
}

/// Stages the rows that `make` writes, and their record. `make` gets a folder for temporary files and returns the number of bad
/// records skipped, by reason, and the tables of a mixture.
pub(crate) fn stage(
    store: &Store,
    tables: &[QueryTable],
    input: &Input,
    dir: &Path,
    make: impl FnOnce(&Path, &mut PartWriter<'_>) -> Result<(BTreeMap<String, u64>, Vec<MixedTable>), SourceError>,
) -> Result<StagedRows, SourceError> {
    if let Ok(target) = std::fs::read_link(dir) {
        let message = format!("is a link to {}, valid: a folder; remove the link", target.display());
        return Err(temporary(dir)(std::io::Error::other(message)));
    }
    let spill = dir.join("spill");
    std::fs::create_dir_all(&spill).map_err(temporary(&spill))?;
    let record = dir.join(RECORD);
    match std::fs::remove_file(&record) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(temporary(&record)(e)),
        _ => {}
    }
    let mut parts = PartWriter::new(dir, &staged_columns(input))?;
    let (skipped, mixed) = make(&spill, &mut parts)?;
    let WrittenParts { files, sha256, rows } = parts.finish()?;
    // the result is valid only if the files that were read are still as listed
    let inputs = || tables.iter().flat_map(|table| &table.files);
    store.check_unchanged(inputs())?;
    let states = inputs().map(|f| f.state.clone()).collect();
    let written = StagedRecord { rows, files, skipped, tables: mixed, inputs: states, sha256 };
    let text = serde_json::to_vec_pretty(&written).map_err(|e| temporary(&record)(e.into()))?;
    let partial = dir.join("staged.json.partial");
    std::fs::write(&partial, text).map_err(temporary(&partial))?;
    std::fs::rename(&partial, &record).map_err(temporary(&record))?;
    let _ = std::fs::remove_dir_all(&spill);
    with_paths(dir, written)
}

/// Names of the columns of staged rows.
pub(crate) fn staged_columns(input: &Input) -> Vec<&str> {
    let carried = input.carried_columns().filter(|name| *name != input.text);
    std::iter::once(input.text.as_str()).chain(carried).collect()
}

/// Returns a column of the result as text.
fn text_column(batch: &RecordBatch, name: &str) -> Result<ArrayRef, SourceError> {
    let missing = || SourceError::Sql { message: format!("the result has no column {name:?}"), retryable: false };
    let column = batch.column_by_name(name).ok_or_else(missing)?;
    let texts = as_text(column).map_err(|e| {
        let message = format!("the column {name:?} of the result cannot be text: {e}");
        SourceError::Sql { message, retryable: false }
    })?;
    Ok(Arc::new(texts))
}

/// Opens the tables, which determines their columns.
fn open(
    store: &Store,
    tables: &[QueryTable],
    skipped: &SkippedCounts,
) -> Result<Vec<(String, FilesTable)>, SourceError> {
    tables.iter().map(|table| Ok((table.name.clone(), FilesTable::open(store, table, skipped)?))).collect()
}

/// Returns what an earlier [`stage_sql`] of the same job staged in `dir`, if it completed, all files still have their
/// checksums, and the files that the query read have not changed. Reads the staged files once.
///
/// The caller must know that it was the same job.
pub fn reuse_staged(dir: &Path, inputs: &[InputFile]) -> Option<StagedRows> {
    let record = read_staged_record(dir).filter(|record| record.matches_inputs(inputs))?;
    for (name, _, sha256) in record.parts() {
        let path = dir.join(name);
        match file_checksum(&path) {
            Ok(now) if now == sha256 => {}
            Ok(_) => {
                tracing::warn!("{}: staged rows are not what was staged; they are made again", path.display());
                return None;
            }
            Err(e) => {
                tracing::warn!("{}: cannot be read, so the staged rows are made again: {e}", path.display());
                return None;
            }
        }
    }
    with_paths(dir, record).ok()
}

fn file_checksum(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hasher, mut piece) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex::encode(hasher.finalize())),
            n => hasher.update(&piece[..n]),
        }
    }
}

/// Returns what was staged in `dir`, whatever it was staged from: for processes that work for the run that staged it.
pub fn staged_rows(dir: &Path) -> Option<StagedRows> {
    with_paths(dir, read_staged_record(dir)?).ok()
}

/// Returns the record of the rows in `dir`, if all files exist with their sizes and the record has their checksums.
pub fn read_staged_record(dir: &Path) -> Option<StagedRecord> {
    let record: StagedRecord = serde_json::from_slice(&std::fs::read(dir.join(RECORD)).ok()?).ok()?;
    if record.sha256.len() != record.files.len() {
        return None;
    }
    let whole = |(name, size): &(String, u64)| std::fs::metadata(dir.join(name)).is_ok_and(|m| m.len() == *size);
    record.files.iter().all(whole).then_some(record)
}

fn with_paths(dir: &Path, record: StagedRecord) -> Result<StagedRows, SourceError> {
    record.with_locations(|name| {
        let path = dir.join(name);
        object_store::path::Path::from_filesystem_path(&path).map_err(|e| temporary(&path)(std::io::Error::other(e)))
    })
}

/// A file that computes a checksum of the bytes written to it.
struct ChecksumFile {
    file: File,
    hasher: Sha256,
}

impl Write for ChecksumFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// Writes the staged files.
pub(crate) struct PartWriter<'a> {
    dir: &'a Path,
    schema: SchemaRef,
    writer: Option<ArrowWriter<ChecksumFile>>,
    /// Rows that the writer does not have yet, fewer than [`PAGE_STEP_ROWS`].
    pending: Vec<RecordBatch>,
    group_bytes: u64,
    file_bytes: u64,
    written: WrittenParts,
}

/// The written files: names and sizes, checksums, and the number of rows in all of them.
#[derive(Default)]
struct WrittenParts {
    files: Vec<(String, u64)>,
    sha256: Vec<String>,
    rows: u64,
}

impl<'a> PartWriter<'a> {
    fn new(dir: &'a Path, names: &[&str]) -> Result<Self, SourceError> {
        for entry in std::fs::read_dir(dir).map_err(temporary(dir))? {
            let path = entry.map_err(temporary(dir))?.path();
            if path.extension().is_some_and(|e| e == "parquet") {
                std::fs::remove_file(&path).map_err(temporary(&path))?;
            }
        }
        let fields = names.iter().map(|name| Field::new(*name, DataType::LargeUtf8, true));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        Ok(Self {
            dir,
            schema,
            writer: None,
            pending: Vec::new(),
            group_bytes: 0,
            file_bytes: 0,
            written: WrittenParts::default(),
        })
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.join(self.name())
    }

    fn name(&self) -> String {
        format!("part-{:05}.parquet", self.written.files.len())
    }

    fn part_error(&self) -> impl Fn(parquet::errors::ParquetError) -> SourceError + 'static {
        let path = self.path();
        move |e| temporary(&path)(std::io::Error::other(e))
    }

    /// Writes rows: the columns with the names of the staged ones.
    pub(crate) fn write_batch(&mut self, batch: &RecordBatch) -> Result<(), SourceError> {
        let column = |field: &FieldRef| text_column(batch, field.name());
        let columns = self.schema.fields().iter().map(column).collect::<Result<_, _>>()?;
        self.write(columns)
    }

    fn write(&mut self, columns: Vec<ArrayRef>) -> Result<(), SourceError> {
        let rows = RecordBatch::try_new(self.schema.clone(), columns).map_err(|e| self.part_error()(e.into()))?;
        let mut lengths = vec![0; rows.num_rows()];
        for column in rows.columns() {
            let texts = column.as_string::<i64>();
            lengths.iter_mut().zip(texts).for_each(|(sum, text)| *sum += text.map_or(0, |text| text.len() as u64));
        }
        let mut start = 0;
        for (i, length) in lengths.iter().enumerate() {
            // four bytes more for each row, so that empty and null rows count too
            self.group_bytes += length + 4;
            self.file_bytes += length + 4;
            if self.group_bytes >= ROW_GROUP_BYTES {
                self.append(&rows.slice(start, i + 1 - start))?;
                self.write_pending()?;
                start = i + 1;
                self.group_bytes = 0;
                let error = self.part_error();
                if let Some(writer) = &mut self.writer {
                    writer.flush().map_err(error)?;
                }
                if self.file_bytes >= FILE_BYTES {
                    self.close()?;
                }
            }
        }
        if start < rows.num_rows() {
            self.append(&rows.slice(start, rows.num_rows() - start))?;
        }
        Ok(())
    }

    fn append(&mut self, rows: &RecordBatch) -> Result<(), SourceError> {
        let held: usize = self.pending.iter().map(RecordBatch::num_rows).sum();
        let first = (PAGE_STEP_ROWS - held).min(rows.num_rows());
        self.pending.push(rows.slice(0, first));
        if held + first < PAGE_STEP_ROWS {
            return Ok(());
        }
        self.write_pending()?;
        let mut start = first;
        while start + PAGE_STEP_ROWS <= rows.num_rows() {
            self.write_rows(&rows.slice(start, PAGE_STEP_ROWS))?;
            start += PAGE_STEP_ROWS;
        }
        if start < rows.num_rows() {
            self.pending.push(rows.slice(start, rows.num_rows() - start));
        }
        Ok(())
    }

    fn write_pending(&mut self) -> Result<(), SourceError> {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return Ok(());
        }
        let rows = concat_batches(&self.schema, &pending).map_err(|e| self.part_error()(e.into()))?;
        self.write_rows(&rows)
    }

    fn write_rows(&mut self, rows: &RecordBatch) -> Result<(), SourceError> {
        let error = self.part_error();
        if self.writer.is_none() {
            let path = self.path();
            let file = ChecksumFile { file: File::create(&path).map_err(temporary(&path))?, hasher: Sha256::new() };
            let properties = WriterProperties::builder()
                .set_compression(Compression::ZSTD(ZstdLevel::default()))
                .set_dictionary_enabled(false)
                .set_statistics_enabled(EnabledStatistics::None)
                .set_write_batch_size(PAGE_STEP_ROWS)
                .set_max_row_group_row_count(None)
                .build();
            self.writer = Some(ArrowWriter::try_new(file, self.schema.clone(), Some(properties)).map_err(&error)?);
        }
        self.written.rows += rows.num_rows() as u64;
        match &mut self.writer {
            Some(writer) => writer.write(rows).map_err(error),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<(), SourceError> {
        self.write_pending()?;
        let path = self.path();
        let error = self.part_error();
        if let Some(writer) = self.writer.take() {
            let ChecksumFile { file, hasher } = writer.into_inner().map_err(error)?;
            file.sync_all().map_err(temporary(&path))?;
            let size = file.metadata().map_err(temporary(&path))?.len();
            let name = self.name();
            self.written.files.push((name, size));
            self.written.sha256.push(hex::encode(hasher.finalize()));
        }
        (self.group_bytes, self.file_bytes) = (0, 0);
        Ok(())
    }

    fn finish(mut self) -> Result<WrittenParts, SourceError> {
        self.close()?;
        Ok(self.written)
    }
}
