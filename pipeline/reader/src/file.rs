//! Ranged reads of one Parquet file of a store, for parquet's asynchronous reader.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parquet::arrow::arrow_reader::ArrowReaderOptions;
use parquet::arrow::async_reader::AsyncFileReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader};

/// Ranged reads of one shard.
pub struct ShardFile {
    store: Arc<dyn ObjectStore>,
    path: Path,
    bytes: u64,
}

impl ShardFile {
    /// A file of `bytes` bytes.
    pub fn new(store: &Arc<dyn ObjectStore>, path: &str, bytes: u64) -> Self {
        Self { store: Arc::clone(store), path: Path::from(path), bytes }
    }
}

impl AsyncFileReader for ShardFile {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, parquet::errors::Result<Bytes>> {
        async move { self.store.get_range(&self.path, range).await.map_err(external) }.boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, parquet::errors::Result<Vec<Bytes>>> {
        async move { self.store.get_ranges(&self.path, &ranges).await.map_err(external) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        _: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, parquet::errors::Result<Arc<ParquetMetaData>>> {
        async move {
            let bytes = self.bytes;
            let reader = ParquetMetaDataReader::new().with_page_index_policy(PageIndexPolicy::Optional);
            Ok(Arc::new(reader.load_and_finish(self, bytes).await?))
        }
        .boxed()
    }
}

fn external(error: object_store::Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}
