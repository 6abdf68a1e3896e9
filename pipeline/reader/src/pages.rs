//! The checksums of a shard's pages, held against the bytes that were read before anything decodes them.

use std::ops::Range;
use std::sync::Arc;

use parquet::file::metadata::ParquetMetaData;
use stillhouse_schemas::pages::{FIRST_PAGE, PAGES, parse};

/// Where the pages of a shard lie, and what they sum to. Memory: 12 bytes a page beside the footer itself.
#[derive(Debug)]
pub(crate) struct Pages {
    metadata: Arc<ParquetMetaData>,
    /// First byte of each page, and one past the last one's.
    bounds: Vec<u64>,
    crc32: Vec<u32>,
}

impl Pages {
    /// What a shard says of its pages; `None` where an older version wrote it.
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

    /// One past the last byte of the last page.
    pub fn end(&self) -> u64 {
        self.bounds.last().copied().unwrap_or(FIRST_PAGE)
    }

    /// Bytes of memory, the footer not counted.
    pub fn size(&self) -> usize {
        self.bounds.len() * 12
    }

    /// Makes sure that bytes of the file are those that were written. They must be whole pages, as the footer has them.
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
                return Err(format!("{} is cut short", self.place(page)));
            };
            let (crc32, should) = (crc32fast::hash(found), self.crc32[page]);
            if crc32 != should {
                return Err(format!(
                    "{}: its CRC-32 is {crc32:08x}, it was written with {should:08x}",
                    self.place(page)
                ));
            }
            (at, page) = (end, page + 1);
        }
        Ok(())
    }

    /// Row group, column and page by number, for a message.
    fn place(&self, page: usize) -> String {
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
