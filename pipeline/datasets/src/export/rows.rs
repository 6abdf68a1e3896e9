//! Reads the rows of a data set for an export, in the order of its shards.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::array::RecordBatch;
use futures::{Stream, TryStreamExt};
use parquet::errors::ParquetError;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};

use super::Counts;
use super::formats::Unit;
use super::sparse::Sparse;
use crate::dataset::{Dataset, Selection};

/// Target size of a batch of entries, in bytes.
const BATCH_BYTES: usize = 1 << 20;

/// L: tokens per row, including padding.
pub(super) fn row_length(manifest: &Manifest) -> usize {
    let ids = manifest.columns.iter().find(|column| column.name == columns::INPUT_IDS);
    let shape = ids.and_then(|column| column.shape.as_deref());
    let length = shape.and_then(|shape| shape.trim_matches(['[', ']']).parse().ok());
    length.unwrap_or(manifest.job.pack.length as usize)
}

/// Number of rows of each data set split.
pub(super) fn rows_of_splits(manifest: &Manifest) -> BTreeMap<String, u64> {
    let mut rows = BTreeMap::new();
    for shard in &manifest.shards {
        *rows.entry(shard.dataset_split.clone()).or_insert(0) += shard.rows;
    }
    rows
}

/// Returns an error if another unit has failed, so that this one stops.
///
/// # Errors
/// If `stop` is set.
pub(super) fn check_not_stopped(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Relaxed) {
        true => Err(PipelineError::new(ErrorKind::Output, "stopped: another file of the export has failed")),
        false => Ok(()),
    }
}

type RowBatches = Pin<Box<dyn Stream<Item = Result<RecordBatch, ParquetError>> + Send>>;

/// Streams rows of a split in the order of its shards and checks each against the manifest.
pub(super) struct RowReader<'a> {
    dataset: &'a Dataset,
    sparse: &'a Sparse,
    counts: &'a Counts,
    /// Set when another unit has failed.
    stop: &'a AtomicBool,
    /// Remaining shards, each with the rows to read.
    left: VecDeque<(&'a ShardRecord, Range<u64>)>,
    current: Option<(RowBatches, &'a ShardRecord, u64)>,
    /// Average bytes per row, for progress.
    row_bytes: f64,
}

impl<'a> RowReader<'a> {
    /// Reads the rows of a unit.
    pub fn new(
        dataset: &'a Dataset,
        sparse: &'a Sparse,
        (counts, stop): (&'a Counts, &'a AtomicBool),
        unit: &Unit,
    ) -> Self {
        let Unit { split, rows, bytes, .. } = unit;
        let (mut begin, mut left) = (0, VecDeque::new());
        for shard in dataset.manifest().shards.iter().filter(|shard| shard.dataset_split == *split) {
            let here = rows.start.max(begin)..rows.end.min(begin + shard.rows);
            if here.start < here.end {
                left.push_back((shard, here.start - begin..here.end - begin));
            }
            begin += shard.rows;
        }
        let row_bytes = *bytes as f64 / (rows.end - rows.start).max(1) as f64;
        Self { dataset, sparse, counts, stop, left, current: None, row_bytes }
    }

    /// The next batch of rows and the path of their shard.
    ///
    /// # Errors
    /// If the rows do not match the manifest, or another unit has failed.
    pub async fn next(&mut self) -> Result<Option<(RecordBatch, String)>> {
        check_not_stopped(self.stop)?;
        loop {
            let Some((batches, shard, missing)) = &mut self.current else {
                let Some((shard, rows)) = self.left.pop_front() else { return Ok(None) };
                let batches = open(self.dataset, self.sparse, shard, &rows).await?;
                self.current = Some((batches, shard, rows.end - rows.start));
                continue;
            };
            let shown = self.dataset.shown(&shard.path);
            match batches.try_next().await.map_err(PipelineError::dataset(shown.clone()))? {
                Some(batch) => {
                    let rows = batch.num_rows() as u64;
                    *missing = missing.saturating_sub(rows);
                    let bytes = (rows as f64 * self.row_bytes) as u64;
                    self.counts.bytes.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(Some((batch, shown)));
                }
                None if *missing > 0 => {
                    let message = format!("{shown}: {missing} rows fewer than the manifest has, {}", shard.rows);
                    return Err(PipelineError::new(ErrorKind::DataSet, message));
                }
                None => self.current = None,
            }
        }
    }
}

async fn open(dataset: &Dataset, sparse: &Sparse, shard: &ShardRecord, rows: &Range<u64>) -> Result<RowBatches> {
    if shard.footer.is_none() {
        // shards of older versions have no page checksums, so hash the whole file first
        let (sha256, bytes) = dataset.output().read_whole(&shard.path, |_| {}).await?;
        if (&sha256, bytes) != (&shard.sha256, shard.bytes) {
            let shown = dataset.shown(&shard.path);
            let message = format!("{shown}: has sha256 {sha256}, the manifest has {}", shard.sha256);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
    }
    let row = row_length(dataset.manifest()) * (sparse.width * 8 + 8);
    let selection = Selection {
        columns: Some(sparse.columns()),
        offset: rows.start as usize,
        limit: Some((rows.end - rows.start) as usize),
        batch_rows: (BATCH_BYTES / row.max(1)).clamp(1, 1024),
    };
    Ok(Box::pin(dataset.read(shard, &selection).await?))
}
