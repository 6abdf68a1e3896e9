//! An in-memory store that counts its requests and fails on demand.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The fault to inject into the next request of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A GET fails.
    Get,
    /// A HEAD request is refused.
    Head,
    /// The first bit of a response is flipped.
    Flip,
}

#[derive(Debug)]
pub(super) struct CountingStore {
    store: InMemory,
    gets: AtomicU64,
    heads: AtomicU64,
    bytes: AtomicU64,
    fault: Mutex<Option<Fault>>,
}

impl CountingStore {
    pub fn new(store: InMemory) -> Self {
        Self {
            store,
            gets: AtomicU64::new(0),
            heads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            fault: Mutex::default(),
        }
    }

    pub fn gets(&self) -> u64 {
        self.gets.load(Ordering::SeqCst)
    }

    pub fn heads(&self) -> u64 {
        self.heads.load(Ordering::SeqCst)
    }

    /// Bytes of all response bodies.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    pub fn fail(&self, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
    }

    fn fails(&self, with: Fault) -> bool {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        fault.take_if(|fault| *fault == with).is_some()
    }
}

impl fmt::Display for CountingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counting")
    }
}

#[async_trait]
impl ObjectStore for CountingStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let refused = |what: &str| Error::Generic { store: "Counting", source: what.into() };
        if options.head {
            self.heads.fetch_add(1, Ordering::SeqCst);
            return if self.fails(Fault::Head) {
                Err(refused("405"))
            } else {
                self.store.get_opts(location, options).await
            };
        }
        self.gets.fetch_add(1, Ordering::SeqCst);
        // lets concurrent requests interleave
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        if self.fails(Fault::Get) {
            return Err(refused("503"));
        }
        let answer = self.store.get_opts(location, options).await?;
        let (meta, range, attributes) = (answer.meta.clone(), answer.range.clone(), answer.attributes.clone());
        let mut bytes = answer.bytes().await?.to_vec();
        self.bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        if self.fails(Fault::Flip) {
            bytes[0] ^= 1;
        }
        let payload = GetResultPayload::Stream(futures::stream::iter([Ok(bytes.into())]).boxed());
        Ok(GetResult { payload, meta, range, attributes })
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}
