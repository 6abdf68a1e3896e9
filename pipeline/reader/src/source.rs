//! Location of a data set: a folder, or a prefix of a store. Explains its errors.

use std::path::Path as FsPath;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use stillhouse_schemas::storage::Storage;
use stillhouse_storage::{DiskCache, DiskCacheOptions, Location, Storages, explain};

use crate::{ReadError, Result};

/// An open location, rooted at the data set.
#[derive(Debug, Clone)]
pub struct Source {
    name: String,
    pub(crate) store: Arc<dyn ObjectStore>,
    on_disk: bool,
    cache: Option<Arc<DiskCache>>,
}

impl Source {
    /// Opens a folder or URL. Sends no request to a store: the first read shows whether the data set exists.
    pub fn open(url: &str, storage: &Storage) -> Result<Self> {
        let current_dir = std::env::current_dir().unwrap_or_default();
        let location = Location::parse(&current_dir, url)
            .map_err(|e| ReadError::Usage(format!("the URL of the data set: {e}")))?;
        let name = location.to_string().trim_end_matches('/').to_owned();
        match &location {
            Location::Disk(folder) => {
                if !folder.is_dir() {
                    return Err(ReadError::DataSet(format!("{name}: no such folder")));
                }
                let store = LocalFileSystem::new_with_prefix(folder)
                    .map_err(|e| ReadError::DataSet(format!("{name}: cannot be opened: {e}")))?;
                Ok(Self { name, store: Arc::new(store), on_disk: true, cache: None })
            }
            Location::Store(url) => {
                let opened = Storages::new().open(url, storage).map_err(|e| ReadError::Usage(e.to_string()))?;
                let store = PrefixStore::new(opened.store, url.path());
                Ok(Self { name, store: Arc::new(store), on_disk: false, cache: None })
            }
        }
    }

    /// Caches ranges of shards on the local disk, grouped by job. A local folder is read without a cache.
    pub fn with_disk_cache(mut self, options: &DiskCacheOptions, job_hash: &str) -> Result<Self> {
        if !self.on_disk {
            let cache = DiskCache::open(options, &format!("{} {job_hash}", self.name))
                .map_err(|e| ReadError::Usage(e.to_string()))?;
            self.store = cache.wrap(self.store, &self.name);
            self.cache = Some(cache);
        }
        Ok(self)
    }

    /// Drops the cached bytes of a file that turned out to be damaged when read since `since`. Returns whether to read
    /// it again.
    pub async fn drop_cached(&self, name: &str, since: Instant) -> bool {
        let Some(cache) = self.cache.clone() else { return false };
        let url = format!("{}/{}", self.name, Path::from(name));
        tokio::task::spawn_blocking(move || cache.drop_object(&url, since)).await.unwrap_or(false)
    }

    /// Returns the first failure of the cache. Returns it once.
    pub fn take_warning(&self) -> Option<String> {
        self.cache.as_ref()?.take_warning()
    }

    /// Full name of a file of the data set, for messages.
    pub fn display_name(&self, file: &str) -> String {
        if self.on_disk {
            return FsPath::new(&self.name).join(file).display().to_string();
        }
        if file.is_empty() { self.name.clone() } else { format!("{}/{file}", self.name) }
    }

    /// Reads a small file; `None` if it does not exist.
    pub async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        let answer = match self.store.get(&Path::from(name)).await {
            Ok(found) => found.bytes().await,
            Err(e) => Err(e),
        };
        match answer {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(self.explain_error(&e, name)),
        }
    }

    /// Explains a failure in one line.
    pub fn explain_error(&self, error: &Error, name: &str) -> ReadError {
        let shown = self.display_name(name);
        match error {
            Error::NotFound { .. } => ReadError::DataSet(format!(
                "{shown}: is missing, though the manifest lists it; copy the data set again (`stillhouse export`)"
            )),
            _ if self.on_disk => ReadError::DataSet(format!(
                "{}; `stillhouse verify` says what is wrong, copy the data set again",
                explain(error, "read", &shown)
            )),
            _ => ReadError::Store(explain(error, "read", &shown)),
        }
    }
}
