//! Checksums of a shard's pages, verified before anything decodes the bytes.

use std::ops::Range;
use std::sync::Arc;

use parquet::file::metadata::ParquetMetaData;
use stillhouse_schemas::pages::{FIRST_PAGE, PAGES, parse};

/// Locations and checksums of the pages of a shard. Memory: 12 bytes a page, beside the footer itself.
#[derive(Debug)]
pub(crate) struct Pages {
    metadata: Arc<ParquetMetaData>,
    /// Offset of the first byte of each page, followed by the end of the last page.
    bounds: Vec<u64>,
    crc32: Vec<u32>,
}

impl Pages {
    /// Parses the page checksums in the metadata; `None` if an older version wrote the shard.
    pub fn of(metadata: &Arc<ParquetMetaData>) -> Result<Option<Self>, String> {
        let entries = metadata.file_metadata().key_value_metadata();
        let Some(entry) = entries.and_then(|entries| entries.iter().find(|entry| entry.key == PAGES)) else {
            return Ok(None);
        };
        let wrong = || format!("its metadata {PAGES} is not a list of bytes:crc32");
        let pages = entry.value.as_deref().and_then(parse).ok_or_else(wrong)?;
        let mut bounds = Vec::with_capacity(pages.len() + 1);
        bounds.push(FIRST_PAGE);
        let mut end = FIRST_PAGE;
        for page in &pages {
            end = end.checked_add(page.bytes).ok_or_else(wrong)?;
            bounds.push(end);
        }
        let crc32 = pages.iter().map(|page| page.crc32).collect();
        Ok(Some(Self { metadata: Arc::clone(metadata), bounds, crc32 }))
    }

    /// Offset after the last byte of the last page.
    pub fn end(&self) -> u64 {
        self.bounds.last().copied().unwrap_or(FIRST_PAGE)
    }

    /// Memory size in bytes, without the footer.
    pub fn size(&self) -> usize {
        self.bounds.len() * 12
    }

    /// Checks that bytes of the file are those that were written. The range must consist of whole pages, as listed in
    /// the footer.
    pub fn check(&self, range: &Range<u64>, bytes: &[u8]) -> Result<(), String> {
        let mut page = self.bounds.partition_point(|&bound| bound < range.start);
        let mut at = range.start;
        while at < range.end {
            let bounds = (self.bounds.get(page), self.bounds.get(page + 1));
            let (Some(&start), Some(&end)) = bounds else { return Err(not_pages(range)) };
            if start != at || end > range.end || end == start {
                return Err(not_pages(range));
            }
            let inside = (start - range.start) as usize..(end - range.start) as usize;
            let Some(found) = bytes.get(inside) else {
                return Err(format!("{} is cut short", self.describe_page(page)));
            };
            let (crc32, expected) = (crc32fast::hash(found), self.crc32[page]);
            if crc32 != expected {
                return Err(format!(
                    "{}: its CRC-32 is {crc32:08x}, it was written with {expected:08x}",
                    self.describe_page(page)
                ));
            }
            (at, page) = (end, page + 1);
        }
        Ok(())
    }

    /// Row group, column and page number of a page, for a message.
    fn describe_page(&self, page: usize) -> String {
        let (start, end) = (self.bounds[page], self.bounds[page + 1]);
        let bytes = format!("bytes {start} to {}", end - 1);
        for (group, columns) in self.metadata.row_groups().iter().enumerate() {
            for column in columns.columns() {
                let (first, length) = column.byte_range();
                if !(first..first + length).contains(&start) {
                    continue;
                }
                let number = page - self.bounds.partition_point(|&bound| bound < first);
                let page = match (number, column.dictionary_page_offset()) {
                    (0, Some(_)) => "its dictionary".to_owned(),
                    (number, Some(_)) => format!("page {}", number - 1),
                    (number, None) => format!("page {number}"),
                };
                let name = column.column_path().parts().first().map_or("", String::as_str);
                return format!("row group {group}, column {name}, {page} ({bytes})");
            }
        }
        bytes
    }
}

fn not_pages(range: &Range<u64>) -> String {
    format!("bytes {} to {} are no whole pages, though the footer says so", range.start, range.end.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use arrow_array::{Int32Array, RecordBatch, UInt64Array};
    use bytes::Bytes;
    use futures::TryStreamExt;
    use futures::executor::block_on;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{ObjectStore, ObjectStoreExt};
    use parquet::arrow::ArrowWriter;
    use parquet::arrow::arrow_reader::RowSelection;
    use parquet::arrow::async_reader::ParquetRecordBatchStreamBuilder;
    use parquet::errors::ParquetError;
    use parquet::file::metadata::KeyValue;
    use parquet::file::properties::WriterProperties;
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};
    use stillhouse_schemas::pages::FooterRecord;
    use stillhouse_schemas::pages::{PageSum, render};

    use super::*;
    use crate::file::ShardFile;

    const ROWS: i32 = 100;

    /// A file of two row groups with pages of ten rows, with or without checksums in its metadata.
    fn encoded(sums: Option<&[PageSum]>) -> (Vec<u8>, ParquetMetaData) {
        let properties = WriterProperties::builder().set_data_page_row_count_limit(10).set_write_batch_size(10).build();
        let ids = Arc::new(UInt64Array::from_iter_values(0..ROWS as u64)) as _;
        let tokens = Arc::new(Int32Array::from_iter_values((0..ROWS).map(|i| i % 5))) as _;
        let batch = RecordBatch::try_from_iter([("id", ids), ("tokens", tokens)]).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        for half in [batch.slice(0, 60), batch.slice(60, 40)] {
            writer.write(&half).unwrap();
            writer.flush().unwrap();
        }
        if let Some(sums) = sums {
            writer.append_key_value_metadata(KeyValue::new(PAGES.to_owned(), render(sums)));
        }
        let metadata = writer.finish().unwrap();
        (std::mem::take(writer.inner_mut()), metadata)
    }

    /// The file, and the footer record of its manifest. The checksums follow the offset index.
    static SHARD: LazyLock<(Vec<u8>, FooterRecord)> = LazyLock::new(|| {
        let (plain, metadata) = encoded(None);
        let mut bounds = Vec::new();
        for (group, indexes) in metadata.row_groups().iter().zip(metadata.offset_index().unwrap()) {
            for (column, index) in group.columns().iter().zip(indexes) {
                bounds.extend(column.dictionary_page_offset());
                bounds.extend(index.page_locations.iter().map(|page| page.offset));
                let (start, length) = column.byte_range();
                bounds.push((start + length) as i64);
            }
        }
        bounds.dedup();
        let sum = |page: &[i64]| {
            let bytes = &plain[page[0] as usize..page[1] as usize];
            PageSum { bytes: bytes.len() as u64, crc32: crc32fast::hash(bytes) }
        };
        let sums: Vec<PageSum> = bounds.windows(2).map(sum).collect();
        assert!(sums.len() > 20);
        let (file, _) = encoded(Some(&sums));
        let end = &file[bounds[bounds.len() - 1] as usize..];
        let sha256 = Sha256::digest(end).iter().map(|b| format!("{b:02x}")).collect();
        let footer = FooterRecord { bytes: end.len() as u64, sha256 };
        (file, footer)
    });

    /// Reads rows of a file as for training.
    fn read(
        file: &[u8],
        footer: Option<&FooterRecord>,
        ranges: &[Range<usize>],
    ) -> Result<Vec<RecordBatch>, ParquetError> {
        block_on(async {
            let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let bytes = Bytes::copy_from_slice(file);
            store.put(&Path::from("shard"), bytes.into()).await.unwrap();
            let shard = ShardFile::new(&store, "shard", file.len() as u64, footer);
            let selection = RowSelection::from_consecutive_ranges(ranges.iter().cloned(), ROWS as usize);
            let builder = ParquetRecordBatchStreamBuilder::new(shard).await?.with_batch_size(ROWS as usize);
            builder.with_row_selection(selection).build()?.try_collect().await
        })
    }

    fn whole() -> Vec<Range<usize>> {
        std::iter::once(0..ROWS as usize).collect()
    }

    #[test]
    fn damage_is_reported_with_its_place() {
        let (file, footer) = &*SHARD;
        let found = read(file, Some(footer), &whole()).unwrap();
        assert_eq!(found.iter().map(RecordBatch::num_rows).sum::<usize>(), ROWS as usize);
        let mut places = Vec::new();
        for place in 4..file.len() {
            let mut damaged = file.clone();
            damaged[place] ^= 1 << (place % 8);
            let error = read(&damaged, Some(footer), &whole()).unwrap_err().to_string();
            places.push(error.split(['(', ':']).nth(1).unwrap().trim().to_owned());
        }
        places.dedup();
        let mut expected = Vec::new();
        for (group, pages) in [(0, 6), (1, 4)] {
            for column in ["id", "tokens"] {
                expected.push(format!("row group {group}, column {column}, its dictionary"));
                expected.extend((0..pages).map(|page| format!("row group {group}, column {column}, page {page}")));
            }
        }
        expected.push("its footer".into());
        assert_eq!(places, expected);
        // pages that are not read are not checked
        let mut damaged = file.clone();
        damaged[file.len() - footer.bytes as usize - 1] ^= 1;
        assert_eq!(read(&damaged, Some(footer), &[3..4, 55..80]).unwrap().len(), 2);
        assert!(read(&damaged, Some(footer), &[3..4, 99..100]).is_err());
    }

    #[test]
    fn files_without_sums_are_read_as_they_are() {
        let (file, _) = encoded(None);
        let found = read(&file, None, &whole()).unwrap();
        assert_eq!(found.iter().map(RecordBatch::num_rows).sum::<usize>(), ROWS as usize);
        let footer = FooterRecord { bytes: 8, sha256: "0".repeat(64) };
        let error = read(&file, Some(&footer), &whole()).unwrap_err().to_string();
        assert!(error.contains("has 8 bytes and sha256") && error.contains("the manifest says 8 and 000"), "{error}");
    }

    proptest! {
        #[test]
        fn some_rows_of_a_damaged_file_are_right_or_an_error(place in 0..SHARD.0.len(), bit in 0..8u8, rows in prop::collection::btree_set(0..ROWS as usize, 1..9)) {
            let (file, footer) = &*SHARD;
            let ranges: Vec<_> = rows.iter().map(|row| *row..row + 1).collect();
            let mut damaged = file.clone();
            damaged[place] ^= 1 << bit;
            if let Ok(found) = read(&damaged, Some(footer), &ranges) {
                prop_assert_eq!(found, read(file, Some(footer), &ranges).unwrap());
            }
        }
    }
}
