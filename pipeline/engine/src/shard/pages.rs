//! Computes the checksum of every page of a shard while the pages are written.
//!
//! The Parquet writer leaves the `crc` field of its page headers empty, and that field would not cover the header
//! itself. However, the writer puts every page into a page store until the row group is complete, and takes them back
//! in file order. This page store computes the checksums when the pages are taken.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use crc32fast::Hasher;
use parquet::arrow::arrow_writer::{InMemoryPageStore, PageKey, PageStore, PageStoreArgs, PageStoreFactory};
use parquet::errors::Result;
use stillhouse_schemas::pages::PageSum;

/// The checksums so far, 16 bytes per page.
#[derive(Debug, Default)]
struct ChecksumList {
    pages: Vec<PageSum>,
    /// Checksum and size of a page header, which the writer stores separately from the page's data.
    header: Option<(Hasher, u64)>,
}

impl ChecksumList {
    fn add(&mut self, blob: &[u8]) {
        let (mut hasher, before) = self.header.take().unwrap_or_default();
        hasher.update(blob);
        let bytes = before + blob.len() as u64;
        match before {
            0 => self.header = Some((hasher, bytes)),
            _ => self.pages.push(PageSum { bytes, crc32: hasher.finalize() }),
        }
    }
}

/// Creates the writer's page stores, which all append to one list of checksums.
#[derive(Debug, Default)]
pub struct PageChecksums(Arc<Mutex<ChecksumList>>);

impl PageChecksums {
    /// Returns the checksums of the pages written so far, in file order.
    pub fn pages(&self) -> Vec<PageSum> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pages.clone()
    }
}

impl PageStoreFactory for PageChecksums {
    fn create(&self, _: &PageStoreArgs<'_>) -> Result<Box<dyn PageStore>> {
        Ok(Box::new(ChecksummedPages { pages: InMemoryPageStore::default(), list: Arc::clone(&self.0) }))
    }
}

/// The pages of one column chunk.
struct ChecksummedPages {
    pages: InMemoryPageStore,
    list: Arc<Mutex<ChecksumList>>,
}

impl PageStore for ChecksummedPages {
    fn put(&mut self, blob: Bytes) -> Result<PageKey> {
        self.pages.put(blob)
    }

    fn take(&mut self, key: PageKey) -> Result<Bytes> {
        let blob = self.pages.take(key)?;
        self.list.lock().unwrap_or_else(PoisonError::into_inner).add(&blob);
        Ok(blob)
    }

    fn memory_size(&self) -> usize {
        self.pages.memory_size()
    }
}
