//! The checksum of every page of a shard, taken as the pages are written.
//!
//! The Parquet writer leaves the field `crc` of its page headers empty, and that one would say nothing of the header itself. It does hand every page to
//! a store until the row group is whole and takes them back in the order of the file: there they are summed.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use crc32fast::Hasher;
use parquet::arrow::arrow_writer::{InMemoryPageStore, PageKey, PageStore, PageStoreArgs, PageStoreFactory};
use parquet::errors::Result;
use stillhouse_schemas::pages::PageSum;

/// What was summed so far. Memory: 16 bytes a page.
#[derive(Debug, Default)]
struct Log {
    pages: Vec<PageSum>,
    /// Of a page, its header comes alone.
    header: Option<(Hasher, u64)>,
}

impl Log {
    fn note(&mut self, blob: &[u8]) {
        let (mut hasher, before) = self.header.take().unwrap_or_default();
        hasher.update(blob);
        let bytes = before + blob.len() as u64;
        match before {
            0 => self.header = Some((hasher, bytes)),
            _ => self.pages.push(PageSum { bytes, crc32: hasher.finalize() }),
        }
    }
}

/// Makes the writer's stores of pages, all of which write to one list.
#[derive(Debug, Default)]
pub struct PageSums(Arc<Mutex<Log>>);

impl PageSums {
    /// The pages of the row groups that are written, in the order of the file.
    pub fn pages(&self) -> Vec<PageSum> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pages.clone()
    }
}

impl PageStoreFactory for PageSums {
    fn create(&self, _: &PageStoreArgs<'_>) -> Result<Box<dyn PageStore>> {
        Ok(Box::new(Summed { pages: InMemoryPageStore::default(), log: Arc::clone(&self.0) }))
    }
}

/// The pages of one column of a row group.
struct Summed {
    pages: InMemoryPageStore,
    log: Arc<Mutex<Log>>,
}

impl PageStore for Summed {
    fn put(&mut self, blob: Bytes) -> Result<PageKey> {
        self.pages.put(blob)
    }

    fn take(&mut self, key: PageKey) -> Result<Bytes> {
        let blob = self.pages.take(key)?;
        self.log.lock().unwrap_or_else(PoisonError::into_inner).note(&blob);
        Ok(blob)
    }

    fn memory_size(&self) -> usize {
        self.pages.memory_size()
    }
}
