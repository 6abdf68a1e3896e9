//! Writes one shard: encodes a stream of sequence batches as a Parquet file and hashes it while uploading.
//!
//! Encoding and compression run on the thread that pulls the batches; the request runtime uploads (`sender`). Neither
//! waits for the other's threads: an encoded row group is uploaded while the next one is encoded.
//!
//! Memory: one row group being encoded (`output.row_group_megabytes` before compression), an encoded one being sent,
//! and the part buffers of the upload; never the whole shard.

mod pages;
mod sender;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use arrow::array::{Array, BooleanArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use bytes::Bytes;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::MemoryReservation;
use futures::{Stream, StreamExt};
use pages::PageChecksums;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::{KeyValue, ParquetMetaData};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder, WriterVersion};
use parquet::schema::types::ColumnPath;
use sender::Sender;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_operators::operator::FooterEntries;
use stillhouse_operators::operator_spec::RowChecks;
use stillhouse_operators::rows::ListRows;
use stillhouse_output::{Output, Staged};
use stillhouse_schemas::columns;
use stillhouse_schemas::pages::FooterRecord;
use stillhouse_schemas::pages::{FIRST_PAGE, PAGES, PageSum, render};
use stillhouse_schemas::spec::Output as OutputSpec;
use tokio::runtime::Handle;

use crate::node_metrics::NodeMetrics;
use crate::stage_state::{StageActivity, StageState};

/// Tokens per data page. A trainer reads single rows and short runs of rows at random, and must read every page that
/// holds them.
const PAGE_TOKENS: usize = 8_192;

/// A written shard that is not committed yet.
#[derive(Debug)]
pub struct WrittenShard {
    /// The file, which is invisible until it is committed.
    pub staged: Staged,
    /// Number of rows.
    pub rows: u64,
    /// Number of tokens without padding.
    pub tokens: u64,
    /// Compressed bytes per column.
    pub column_bytes: BTreeMap<String, u64>,
    /// Size and checksum of the file's footer, if its pages have checksums.
    pub footer: Option<FooterRecord>,
}

/// How to write a shard.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions<'a> {
    /// Sizes and compression.
    pub spec: &'a OutputSpec,
    /// The checks that its rows must pass.
    pub row_checks: &'a RowChecks,
    /// Names the split in messages.
    pub context: &'a str,
    /// Ends the work when set.
    pub stop: &'a AtomicBool,
    /// The memory reservation of the row group being encoded, from the job's pool.
    pub memory: &'a MemoryReservation,
    /// The runtime that serves store requests.
    pub requests: &'a Handle,
    /// The metrics that count its rows and time.
    pub metrics: &'a NodeMetrics,
    /// Receives what the stage is doing.
    pub stage: &'a StageState,
    /// Entries for the footer; complete at the end of the stream.
    pub footer: &'a FooterEntries,
    /// Whether each page gets a checksum. A shard that is made again gets none if the original had none.
    pub checksums: bool,
}

/// Writes a stream of batches as an uncommitted shard.
///
/// # Errors
/// When a stage fails, the store rejects the bytes, or `stop` is set. Nothing of the shard remains then.
pub async fn write(
    output: &Output,
    shard: &str,
    batches: SendableRecordBatchStream,
    write_options: WriteOptions<'_>,
) -> Result<WrittenShard> {
    let WriteOptions { spec, row_checks, context, stop, requests, metrics, .. } = write_options;
    let options = ArrowWriterOptions::new().with_properties(writer_properties(
        &batches.schema(),
        spec,
        row_checks.context.length,
    )?);
    let write_error = |e: ParquetError| to_pipeline_error(e, context, &output.shown(&format!("data/{shard}")));
    let mut sender = Sender::begin(requests, output, shard).await?;
    let encoded = match ShardWriter::new(&mut sender, batches.schema(), options, write_options.checksums) {
        Ok(writer) => encode_all(writer, until_stopped(stop, batches), write_options, &write_error).await,
        Err(e) => Err(write_error(e)),
    };
    match encoded {
        Ok(Encoded { rows, tokens, column_bytes, footer }) => {
            let staged = sender.finish().await.map_err(|e| write_error(ParquetError::External(Box::new(e))))?;
            metrics.count_output(0, usize::try_from(staged.bytes).unwrap_or(usize::MAX));
            Ok(WrittenShard { staged, rows, tokens, column_bytes, footer })
        }
        Err(e) => {
            sender.abort().await;
            Err(e)
        }
    }
}

/// Returns the compressed bytes that the columns of these rows take in a shard.
///
/// # Errors
/// If the rows cannot be written as Parquet.
pub fn encoded_bytes(rows: &[RecordBatch], spec: &OutputSpec, length: usize) -> Result<u64> {
    let Some(first) = rows.first() else { return Ok(0) };
    let options = ArrowWriterOptions::new().with_properties(writer_properties(&first.schema(), spec, length)?);
    let written = || {
        let mut encoder = ArrowWriter::try_new_with_options(Vec::new(), first.schema(), options)?;
        rows.iter().try_for_each(|batch| encoder.write(batch))?;
        encoder.finish()
    };
    let metadata: ParquetMetaData = written().map_err(|e| to_pipeline_error(e, "a sample", "its rows"))?;
    Ok(column_bytes(&metadata).values().sum())
}

/// Encodes row groups as Parquet, computes the page checksums and passes the bytes to the upload.
struct ShardWriter<'a> {
    encoder: ArrowWriter<Vec<u8>>,
    sums: Option<Arc<PageChecksums>>,
    sender: &'a mut Sender,
}

impl<'a> ShardWriter<'a> {
    fn new(
        sender: &'a mut Sender,
        schema: Arc<Schema>,
        options: ArrowWriterOptions,
        checksums: bool,
    ) -> Result<Self, ParquetError> {
        let sums = checksums.then(Arc::<PageChecksums>::default);
        let options = match &sums {
            Some(sums) => options.with_page_store_factory(Arc::clone(sums) as _),
            None => options,
        };
        Ok(Self { encoder: ArrowWriter::try_new_with_options(Vec::new(), schema, options)?, sums, sender })
    }

    fn encode_row_group(&mut self) -> Result<(), ParquetError> {
        self.encoder.flush()?;
        self.encoder.sync()?;
        Ok(())
    }

    /// Passes the encoded bytes to the upload, and returns them.
    async fn send(&mut self) -> Result<Bytes, ParquetError> {
        let bytes = Bytes::from(std::mem::take(self.encoder.inner_mut()));
        self.sender.send(bytes.clone()).await.map_err(|e| ParquetError::External(Box::new(e)))?;
        Ok(bytes)
    }

    /// Writes the footer. Returns its record if the pages have checksums.
    async fn finish(
        mut self,
        entries: &FooterEntries,
    ) -> Result<(ParquetMetaData, Option<FooterRecord>), ParquetError> {
        for (key, value) in entries.get() {
            self.encoder.append_key_value_metadata(KeyValue::new(key.to_owned(), value));
        }
        let Some(sums) = self.sums.take() else {
            let metadata = self.encoder.finish()?;
            self.send().await?;
            return Ok((metadata, None));
        };
        let pages = sums.pages();
        let (summed, written) = (end_offset(&pages), self.encoder.bytes_written() as u64);
        if summed != written {
            let message =
                format!("pages up to byte {summed} were summed, {written} bytes written: a bug in this program");
            return Err(ParquetError::General(message));
        }
        self.encoder.append_key_value_metadata(KeyValue::new(PAGES.to_owned(), render(&pages)));
        let metadata = self.encoder.finish()?;
        let footer = self.send().await?;
        let record = FooterRecord { bytes: footer.len() as u64, sha256: hex::encode(Sha256::digest(&footer)) };
        Ok((metadata, Some(record)))
    }
}

fn end_offset(pages: &[PageSum]) -> u64 {
    FIRST_PAGE + pages.iter().map(|page| page.bytes).sum::<u64>()
}

/// Converts an error of the Parquet writer; an error of the store keeps the store's message.
fn to_pipeline_error(error: ParquetError, context: &str, place: &str) -> PipelineError {
    let cause = match error {
        ParquetError::External(cause) => cause.downcast::<object_store::Error>(),
        other => Err(Box::new(other) as Box<dyn std::error::Error + Send + Sync>),
    };
    match cause {
        Ok(cause) => PipelineError::store(ErrorKind::Output, &cause, "write", place),
        Err(cause) => PipelineError::caused(ErrorKind::Output, format!("{context}: cannot write {place}"), cause),
    }
}

/// Yields the batches until `stop` is set, then an error.
fn until_stopped(
    stop: &AtomicBool,
    batches: SendableRecordBatchStream,
) -> impl Stream<Item = Result<RecordBatch, DataFusionError>> {
    batches.map(|batch| match stop.load(Ordering::Relaxed) {
        true => Err(DataFusionError::Execution("another split has failed".into())),
        false => batch,
    })
}

struct Encoded {
    rows: u64,
    tokens: u64,
    column_bytes: BTreeMap<String, u64>,
    footer: Option<FooterRecord>,
}

async fn encode_all(
    mut writer: ShardWriter<'_>,
    batches: impl Stream<Item = Result<RecordBatch, DataFusionError>>,
    write_options: WriteOptions<'_>,
    write_error: &impl Fn(ParquetError) -> PipelineError,
) -> Result<Encoded> {
    let WriteOptions { spec, row_checks, context, metrics, stage, .. } = write_options;
    tokio::pin!(batches);
    let limit = spec.row_group_megabytes as usize * 1_000_000;
    let (mut rows, mut tokens, mut group_bytes) = (0, 0, 0);
    loop {
        stage.set_activity(StageActivity::WaitsForInput);
        let next = batches.next().await;
        stage.set_activity(StageActivity::Works);
        let Some(batch) = next else { break };
        let batch = batch.map_err(|e| PipelineError::from_stage(context, e))?;
        if cfg!(debug_assertions) {
            check_invariants(&batch, row_checks, context)?;
        }
        for batch in split_by_size(&batch, limit) {
            let began = Instant::now();
            let size = logical_bytes(&batch);
            if group_bytes > 0 && group_bytes + size > limit {
                writer.encode_row_group().map_err(write_error)?;
                metrics.worked_since(began);
                writer.send().await.map_err(write_error)?;
                group_bytes = 0;
            }
            let began = Instant::now();
            group_bytes += size;
            rows += batch.num_rows() as u64;
            tokens += count_tokens(&batch).map_err(|e| PipelineError::caused(ErrorKind::DataSet, context, e))?;
            writer.encoder.write(&batch).map_err(write_error)?;
            let size = writer.encoder.memory_size();
            write_options.memory.try_resize(size).map_err(|e| out_of_memory(&e, size, context))?;
            metrics.count_output(batch.num_rows(), 0);
            stage.count_output(batch.num_rows());
            metrics.worked_since(began);
        }
    }
    let began = Instant::now();
    writer.encode_row_group().map_err(write_error)?;
    metrics.worked_since(began);
    writer.send().await.map_err(write_error)?;
    let (metadata, footer) = writer.finish(write_options.footer).await.map_err(write_error)?;
    Ok(Encoded { rows, tokens, column_bytes: column_bytes(&metadata), footer })
}

/// The compressed bytes of each column.
fn column_bytes(metadata: &ParquetMetaData) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for group in metadata.row_groups() {
        for column in group.columns() {
            let name = column.column_path().parts().first().cloned().unwrap_or_default();
            *sums.entry(name).or_insert(0) += column.compressed_size().max(0) as u64;
        }
    }
    sums
}

fn out_of_memory(error: &DataFusionError, bytes: usize, context: &str) -> PipelineError {
    // This error lists the largest consumers of the memory.
    tracing::info!("{error}");
    let megabytes = bytes as f64 / 1e6;
    let message = format!(
        "{context}: no memory for the {megabytes:.1} MB of a row group: raise `engine.memory_megabytes`, or lower `output.row_group_megabytes` or `engine.parallel_splits`"
    );
    PipelineError::new(ErrorKind::Usage, message)
}

fn check_invariants(batch: &RecordBatch, row_checks: &RowChecks, context: &str) -> Result<()> {
    let violations = row_checks.check(batch).map_err(|e| PipelineError::caused(ErrorKind::DataSet, context, e))?;
    match violations.first() {
        None => Ok(()),
        Some(first) => Err(PipelineError::new(
            ErrorKind::DataSet,
            format!("{context}: an operator broke an invariant: row {}: {}", first.row, first.message),
        )),
    }
}

/// Slices a batch into parts of whole rows that each fit a row group; a part has at least one row.
fn split_by_size(batch: &RecordBatch, limit: usize) -> Vec<RecordBatch> {
    let rows = batch.num_rows();
    let parts = logical_bytes(batch).div_ceil(limit).max(1);
    let step = rows.div_ceil(parts).max(1);
    (0..rows).step_by(step).map(|start| batch.slice(start, step.min(rows - start))).collect()
}

/// Bytes of the values themselves. Allocation sizes would make row groups depend on how the arrays were allocated.
fn logical_bytes(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(|c| c.to_data().get_slice_memory_size().unwrap_or(0)).sum()
}

/// Returns the tokens of the rows, padding not counted.
///
/// # Errors
/// If a column is missing or has another type than the format defines.
pub fn count_tokens(batch: &RecordBatch) -> Result<u64, arrow::error::ArrowError> {
    if batch.column_by_name(columns::ATTENTION_MASK).is_some() {
        let mask = ListRows::from_batch(batch, columns::ATTENTION_MASK)?;
        let values = mask.values::<BooleanArray>(columns::ATTENTION_MASK)?;
        return Ok((0..mask.len()).flat_map(|r| mask.range(r)).filter(|&i| values.value(i)).count() as u64);
    }
    let ids = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    Ok((0..ids.len()).map(|r| ids.range(r).len() as u64).sum())
}

/// Parquet properties: floats use byte-stream split, `UInt64` ids delta encoding, other columns dictionaries.
fn writer_properties(schema: &Schema, spec: &OutputSpec, length: usize) -> Result<WriterProperties> {
    let level = ZstdLevel::try_new(spec.zstd_level)
        .map_err(|e| PipelineError::caused(ErrorKind::Usage, "output.zstd_level", e))?;
    let mut builder = WriterProperties::builder()
        .set_created_by(concat!("stillhouse ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_writer_version(WriterVersion::PARQUET_2_0)
        .set_compression(Compression::ZSTD(level))
        .set_statistics_enabled(EnabledStatistics::Page)
        .set_max_row_group_row_count(None)
        .set_data_page_row_count_limit((PAGE_TOKENS / length.max(1)).max(1))
        .set_dictionary_enabled(true);
    for field in schema.fields() {
        builder = set_encoding(builder, field);
    }
    Ok(builder.build())
}

fn set_encoding(builder: WriterPropertiesBuilder, field: &Field) -> WriterPropertiesBuilder {
    let (path, item) = match field.data_type() {
        DataType::List(item) | DataType::FixedSizeList(item, _) => {
            (ColumnPath::new(vec![field.name().clone(), "list".into(), item.name().clone()]), item.data_type())
        }
        other => (ColumnPath::new(vec![field.name().clone()]), other),
    };
    match (field.name().as_str(), item) {
        (_, DataType::Float32) => builder
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::BYTE_STREAM_SPLIT),
        (_, DataType::UInt64) => builder
            .set_column_dictionary_enabled(path.clone(), false)
            .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED),
        _ => builder,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{FixedSizeListBuilder, Float32Builder, ListBuilder, RecordBatch, UInt16Builder, UInt64Array};
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{ObjectStore, ObjectStoreExt};
    use parquet::file::metadata::{PageIndexPolicy, ParquetMetaDataReader};
    use stillhouse_schemas::pages::parse;

    use super::*;
    use stillhouse_output::ShardUpload;

    /// Rows like those of a job: an id, a variable-length list with a dictionary, a fixed-size list without one.
    fn rows(from: u64, count: u64) -> RecordBatch {
        let mut lists = ListBuilder::new(UInt16Builder::new());
        let mut fixed = FixedSizeListBuilder::new(Float32Builder::new(), 64);
        for row in from..from + count {
            lists.append_value((0..row % 7).map(|i| Some(i as u16)));
            (0..64).for_each(|i| fixed.values().append_value((row * 64 + i) as f32));
            fixed.append(true);
        }
        let ids = UInt64Array::from_iter_values(from..from + count);
        let columns = [("id", Arc::new(ids) as _), ("list", Arc::new(lists.finish()) as _)];
        RecordBatch::try_from_iter(columns.into_iter().chain([("fixed", Arc::new(fixed.finish()) as _)])).unwrap()
    }

    /// A shard of three row groups, of which the second is the largest.
    async fn written(checksums: bool) -> (Bytes, Option<FooterRecord>) {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let upload = ShardUpload::to_disk(Arc::clone(&store), Path::from("shard"));
        let mut sender = Sender::new(&Handle::current(), upload);
        let spec = serde_json::from_str(r#"{"path": "out"}"#).unwrap();
        let schema = rows(0, 1).schema();
        let options = ArrowWriterOptions::new().with_properties(writer_properties(&schema, &spec, 1024).unwrap());
        let mut writer = ShardWriter::new(&mut sender, schema, options, checksums).unwrap();
        for (from, count) in [(0, 20), (20, 900), (920, 9)] {
            writer.encoder.write(&rows(from, count)).unwrap();
            writer.encode_row_group().unwrap();
            writer.send().await.unwrap();
        }
        let (_, footer) = writer.finish(&FooterEntries::default()).await.unwrap();
        sender.finish().await.unwrap();
        (store.get(&Path::from("shard")).await.unwrap().bytes().await.unwrap(), footer)
    }

    #[tokio::test]
    async fn every_byte_but_the_first_four_is_in_a_sum() {
        let (file, footer) = written(true).await;
        let footer = footer.unwrap();
        let (pages, end) = file.split_at(file.len() - footer.bytes as usize);
        assert_eq!(footer.sha256, hex::encode(Sha256::digest(end)));

        let mut reader = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Required);
        reader.try_parse(&file).unwrap();
        let metadata = reader.finish().unwrap();
        let entries = metadata.file_metadata().key_value_metadata().unwrap();
        let sums = parse(entries.iter().find(|e| e.key == PAGES).unwrap().value.as_ref().unwrap()).unwrap();
        let mut at = FIRST_PAGE as usize;
        let mut bounds = vec![at];
        for sum in &sums {
            let page = &pages[at..at + sum.bytes as usize];
            assert_eq!(crc32fast::hash(page), sum.crc32);
            at += page.len();
            bounds.push(at);
        }
        assert_eq!(at, pages.len());

        // each summed range is a page of the offset index, or a dictionary page before one
        let mut expected = Vec::new();
        for (group, indexes) in metadata.row_groups().iter().zip(metadata.offset_index().unwrap()) {
            for (column, index) in group.columns().iter().zip(indexes) {
                expected.extend(column.dictionary_page_offset().map(|at| at as usize));
                expected.extend(index.page_locations.iter().map(|page| page.offset as usize));
            }
        }
        assert!(metadata.num_row_groups() == 3 && expected.len() > 60, "{}", expected.len());
        expected.push(pages.len());
        assert_eq!(bounds, expected);
    }

    #[tokio::test]
    async fn a_shard_without_checksums_has_the_same_pages() {
        let (with, footer) = written(true).await;
        let (without, none) = written(false).await;
        assert_eq!(none, None);
        let pages = with.len() - footer.unwrap().bytes as usize;
        assert_eq!(with[..pages], without[..pages]);
        assert!(!without.windows(PAGES.len()).any(|w| w == PAGES.as_bytes()));
    }
}
