//! Reads rows of one shard: loads its footer once, then only the pages that contain the rows.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::RecordBatch;
use futures::TryStreamExt;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, RowSelection};
use parquet::arrow::async_reader::ParquetRecordBatchStreamBuilder;
use parquet::errors::ParquetError;
use serde::Deserialize;
use stillhouse_schemas::pages::FooterRecord;

use crate::catch_panic::catch_panic;
use crate::columns::ColumnSpec;
use crate::file::ShardFile;
use crate::pages::Pages;
use crate::source::Source;
use crate::{ReadError, Result};

/// A shard as listed in the manifest.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Shard {
    pub path: String,
    pub dataset_split: String,
    pub rows: u64,
    pub bytes: u64,
    pub sha256: String,
    #[serde(default)]
    pub footer: Option<FooterRecord>,
}

/// Footer of a shard: the locations and checksums of its pages.
#[derive(Debug, Clone)]
pub(crate) struct Footer {
    metadata: ArrowReaderMetadata,
    pages: Option<Arc<Pages>>,
}

impl Footer {
    /// Loads the footer, and checks that the file is the shard that the manifest describes.
    pub async fn load(source: &Source, shard: &Shard) -> Result<Self> {
        let mut file = open_file(source, shard);
        let metadata = run_read(source, shard, file.load()).await?;
        let rows = metadata.file_metadata().num_rows();
        if u64::try_from(rows) != Ok(shard.rows) {
            return Err(ReadError::DataSet(format!(
                "{}: has {rows} rows, the manifest says {}; it is not the shard of this data set, copy it again",
                source.display_name(&shard.path),
                shard.rows
            )));
        }
        let metadata = async { ArrowReaderMetadata::try_new(metadata, ArrowReaderOptions::new()) };
        let metadata = run_read(source, shard, metadata).await?;
        Ok(Self { metadata, pages: file.pages() })
    }

    /// Memory size in bytes.
    pub fn size(&self) -> usize {
        self.metadata.metadata().memory_size() + self.pages.as_ref().map_or(0, |pages| pages.size())
    }

    /// Reads ascending, disjoint ranges of rows. The batches contain the rows in order, at least one batch per row
    /// group.
    pub async fn read(
        &self,
        source: &Source,
        shard: &Shard,
        columns: &[ColumnSpec],
        ranges: &[Range<u64>],
    ) -> Result<Vec<RecordBatch>> {
        let (groups, selection) = self.select(ranges);
        let mask = ProjectionMask::columns(self.metadata.parquet_schema(), columns.iter().map(|c| c.name.as_str()));
        for column in columns {
            let checked = match self.metadata.schema().field_with_name(&column.name) {
                Ok(field) => column.check(field.data_type()),
                Err(_) => Err(format!("has no column {}, though the manifest lists it", column.name)),
            };
            checked.map_err(|what| {
                let place = source.display_name(&shard.path);
                ReadError::Column(format!("{place}: {what}; it is not the shard of this data set, copy it again"))
            })?;
        }
        let rows: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        let reading = async {
            let file = open_file(source, shard).with_pages(self.pages.clone());
            ParquetRecordBatchStreamBuilder::new_with_metadata(file, self.metadata.clone())
                .with_projection(mask)
                .with_row_groups(groups)
                .with_row_selection(selection)
                .with_batch_size(rows as usize)
                .build()?
                .try_collect()
                .await
        };
        run_read(source, shard, reading).await
    }

    /// The row groups that contain the ranges, and the selected rows in them.
    fn select(&self, ranges: &[Range<u64>]) -> (Vec<usize>, RowSelection) {
        let mut groups = Vec::new();
        let mut selected = Vec::new();
        let (mut start, mut taken) = (0u64, 0u64);
        for (number, group) in self.metadata.metadata().row_groups().iter().enumerate() {
            let end = start + group.num_rows().max(0) as u64;
            let inside = |r: &&Range<u64>| r.start < end && r.end > start;
            let before = selected.len();
            for range in ranges.iter().filter(inside) {
                let (from, to) = (range.start.max(start), range.end.min(end));
                selected.push((taken + from - start) as usize..(taken + to - start) as usize);
            }
            if selected.len() > before {
                groups.push(number);
                taken += end - start;
            }
            start = end;
        }
        (groups, RowSelection::from_consecutive_ranges(selected.into_iter(), taken as usize))
    }
}

fn open_file(source: &Source, shard: &Shard) -> ShardFile {
    ShardFile::new(&source.store, &shard.path, shard.bytes, shard.footer.as_ref())
}

/// Runs a read of parquet and arrow, which panic on some damage instead of returning an error.
async fn run_read<T>(
    source: &Source,
    shard: &Shard,
    reading: impl Future<Output = Result<T, ParquetError>>,
) -> Result<T> {
    match catch_panic(reading).await {
        Some(read) => read.map_err(|e| damage_error(source, shard, e)),
        None => Err(damage_error(source, shard, ParquetError::General("its contents make no sense".into()))),
    }
}

fn damage_error(source: &Source, shard: &Shard, error: ParquetError) -> ReadError {
    let error = match error {
        ParquetError::External(cause) => match cause.downcast::<object_store::Error>() {
            Ok(cause) => return source.explain_error(&cause, &shard.path),
            Err(other) => other.to_string(),
        },
        other => other.to_string(),
    };
    let place = source.display_name(&shard.path);
    ReadError::DataSet(format!(
        "{place}: is damaged: {error}; `stillhouse verify` checks every shard; copy this one again, or make it again with `stillhouse repair`"
    ))
}
