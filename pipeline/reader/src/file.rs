//! Ranged reads of one Parquet file of a store, for parquet's asynchronous reader. Verifies checksums, where they
//! exist, before decoding.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader};
use sha2::{Digest, Sha256};
use stillhouse_schemas::pages::FooterRecord;

use crate::pages::Pages;

/// Bytes of the first request for the end of a file whose footer length is not in the manifest. Covers the footer and
/// the offset index of most shards.
const FOOTER_PREFETCH_BYTES: usize = 256 * 1024;

/// Ranged reads of one shard.
pub struct ShardFile {
    store: Arc<dyn ObjectStore>,
    path: Path,
    bytes: u64,
    footer: Option<FooterRecord>,
    pages: Option<Arc<Pages>>,
}

impl ShardFile {
    /// Creates a reader for a file of `bytes` bytes. `footer` is the manifest's record of the end of the file.
    ///
    /// With `footer`, damage anywhere is an error before decoding. Without it (shards of older versions), damage may go
    /// undetected.
    pub fn new(store: &Arc<dyn ObjectStore>, path: &str, bytes: u64, footer: Option<&FooterRecord>) -> Self {
        Self { store: Arc::clone(store), path: Path::from(path), bytes, footer: footer.cloned(), pages: None }
    }

    /// Sets checksums of pages that were loaded before.
    pub(crate) fn with_pages(self, pages: Option<Arc<Pages>>) -> Self {
        Self { pages, ..self }
    }

    /// The checksums of pages, after the metadata are loaded.
    pub(crate) fn pages(&self) -> Option<Arc<Pages>> {
        self.pages.clone()
    }

    /// Loads the metadata and the checksums of pages.
    pub(crate) async fn load(&mut self) -> Result<Arc<ParquetMetaData>> {
        let mut reader = ParquetMetaDataReader::new()
            .with_offset_index_policy(PageIndexPolicy::Optional)
            .with_column_index_policy(PageIndexPolicy::Skip);
        let metadata = match &self.footer {
            Some(footer) => {
                let bytes = self.footer_bytes(footer).await?;
                reader.try_parse_sized(&bytes, self.bytes)?;
                reader.finish()?
            }
            None => {
                let prefetched = FOOTER_PREFETCH_BYTES.min(self.bytes as usize);
                let bytes = self.bytes;
                reader.with_prefetch_hint(Some(prefetched)).load_and_finish(&mut *self, bytes).await?
            }
        };
        let metadata = Arc::new(metadata);
        let pages = Pages::of(&metadata).map_err(damage)?;
        if let Some(footer) = &self.footer {
            let (end, start) = (pages.as_ref().map(Pages::end), self.bytes - footer.bytes);
            if end != Some(start) {
                let end =
                    end.map_or("has no checksums of pages".to_owned(), |end| format!("has pages up to byte {end}"));
                return Err(damage(format!("it {end}, the manifest says that its footer begins at byte {start}")));
            }
        }
        self.pages = pages.map(Arc::new);
        Ok(metadata)
    }

    /// Reads the footer of the file, and checks it against the manifest.
    async fn footer_bytes(&self, footer: &FooterRecord) -> Result<Bytes> {
        let Some(start) = self.bytes.checked_sub(footer.bytes).filter(|start| *start < self.bytes) else {
            let (footer, all) = (footer.bytes, self.bytes);
            return Err(damage(format!("the manifest says that {footer} of its {all} bytes are its footer")));
        };
        let bytes = self.store.get_range(&self.path, start..self.bytes).await.map_err(external)?;
        let sha256 = hex::encode(Sha256::digest(&bytes));
        if bytes.len() as u64 != footer.bytes || sha256 != footer.sha256 {
            let (expected, length) = (&footer.sha256, bytes.len());
            return Err(damage(format!(
                "its footer (bytes {start} to {}) has {length} bytes and sha256 {sha256}, the manifest says {} and {expected}",
                self.bytes.saturating_sub(1),
                footer.bytes
            )));
        }
        Ok(bytes)
    }

    fn check(&self, range: &Range<u64>, bytes: &Bytes) -> Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.check(range, bytes).map_err(damage))
    }
}

impl AsyncFileReader for ShardFile {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes>> {
        async move {
            let bytes = self.store.get_range(&self.path, range.clone()).await.map_err(external)?;
            self.check(&range, &bytes)?;
            Ok(bytes)
        }
        .boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        async move {
            let found = self.store.get_ranges(&self.path, &ranges).await.map_err(external)?;
            for (range, bytes) in ranges.iter().zip(&found) {
                self.check(range, bytes)?;
            }
            Ok(found)
        }
        .boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>>> {
        self.load().boxed()
    }
}

fn external(error: object_store::Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

fn damage(message: String) -> ParquetError {
    ParquetError::External(message.into())
}
