//! One object store over several: the local disk, and buckets under path prefixes.
//!
//! ```text
//!   home/x/corpus.jsonl   ─► the disk, /home/x/corpus.jsonl
//!   s3:/corpora/owt/1.gz  ─► the bucket `corpora`, owt/1.gz
//!   input.sql:/…          ─► the staged rows of a run's query, if they are beside its output in a store
//! ```
//!
//! It only reads; writes go to the output's own store.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use stillhouse_base::storage::{Location, StoreUrl};

/// A store mounted at a path prefix.
#[derive(Debug, Clone)]
pub(crate) struct Mount {
    pub prefix: Path,
    pub store: Arc<dyn ObjectStore>,
    /// URL of the bucket, without a key; or of the mounted prefix, if only a part of the bucket is mounted.
    pub url: StoreUrl,
}

/// The disk and the mounts.
#[derive(Debug)]
pub(crate) struct Router {
    disk: Arc<LocalFileSystem>,
    mounts: Vec<Mount>,
}

impl Router {
    pub fn new(mounts: Vec<Mount>) -> Self {
        Self { disk: Arc::new(LocalFileSystem::new()), mounts }
    }

    /// Returns the same router with another mount, which takes precedence.
    pub fn with(&self, mount: Mount) -> Self {
        let mounts = std::iter::once(mount).chain(self.mounts.iter().cloned()).collect();
        Self { disk: Arc::clone(&self.disk), mounts }
    }

    /// Iterates over the buckets with their URLs, which have no key.
    pub fn buckets(&self) -> impl Iterator<Item = (&StoreUrl, &Arc<dyn ObjectStore>)> {
        self.mounts.iter().filter(|mount| mount.url.key.is_empty()).map(|mount| (&mount.url, &mount.store))
    }

    /// Returns a path as users name it, and whether it is on the disk.
    pub fn display_name(&self, path: &Path) -> (String, bool) {
        for mount in &self.mounts {
            if let Some(inner) = path.prefix_match(&mount.prefix) {
                return (format!("{}/{}", mount.url, inner.collect::<Path>()), false);
            }
        }
        (format!("/{path}"), true)
    }

    /// Returns the location of a path; `None` if no path of the disk can have this name.
    pub fn location_of(&self, path: &Path) -> Option<Location> {
        for mount in &self.mounts {
            let root = mount.url.path();
            if let Some(inner) = path.prefix_match(&mount.prefix) {
                let of_bucket = root.parts().chain(inner).collect::<Path>();
                return Some(Location::Store(StoreUrl { key: of_bucket.to_string(), ..mount.url.clone() }));
            }
        }
        disk_path(path).map(Location::Disk)
    }

    /// Returns the file system path of a location that no mount covers; `None` if no path of the disk can have this
    /// name.
    pub fn on_disk(&self, path: &Path) -> Option<PathBuf> {
        match self.is_on_disk(path) {
            true => disk_path(path),
            false => None,
        }
    }

    /// Whether a path is on the disk.
    pub fn is_on_disk(&self, path: &Path) -> bool {
        !self.mounts.iter().any(|mount| path.prefix_matches(&mount.prefix))
    }

    /// Returns the store of a path, the path inside it, and the prefix of its mount.
    fn route(&self, path: &Path) -> (Arc<dyn ObjectStore>, Path, Option<Path>) {
        for mount in &self.mounts {
            if let Some(inner) = path.prefix_match(&mount.prefix) {
                return (Arc::clone(&mount.store), inner.collect(), Some(mount.prefix.clone()));
            }
        }
        (Arc::clone(&self.disk) as Arc<dyn ObjectStore>, path.clone(), None)
    }
}

/// Same as [`LocalFileSystem::path_to_filesystem`] without a prefix, but without the detour over a URL: every file of a
/// listing calls it.
fn disk_path(path: &Path) -> Option<PathBuf> {
    let path = path.as_ref();
    let name = path.rsplit('/').next().filter(|name| !name.is_empty())?;
    // the store names its own unfinished files with `#` and digits at the end
    let unfinished = |(_, suffix): (&str, &str)| !suffix.is_empty() && suffix.bytes().all(|b| b.is_ascii_digit());
    (!name.split_once('#').is_some_and(unfinished)).then(|| PathBuf::from(format!("/{path}")))
}

fn with_prefix(prefix: Option<&Path>, inner: Path) -> Path {
    match prefix {
        Some(prefix) => prefix.parts().chain(inner.parts()).collect(),
        None => inner,
    }
}

fn meta_with_prefix(prefix: Option<&Path>, meta: ObjectMeta) -> ObjectMeta {
    ObjectMeta { location: with_prefix(prefix, meta.location.clone()), ..meta }
}

fn read_only<T>(operation: &str) -> Result<T> {
    Err(Error::NotImplemented { operation: operation.into(), implementer: "the input, which is only read".into() })
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the input")
    }
}

#[async_trait]
impl ObjectStore for Router {
    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        read_only("put")
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        read_only("put_multipart")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (store, inner, prefix) = self.route(location);
        let got = store.get_opts(&inner, options).await?;
        Ok(GetResult { meta: meta_with_prefix(prefix.as_ref(), got.meta.clone()), ..got })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let (store, inner, _) = self.route(location);
        store.get_ranges(&inner, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        locations.map(|_| read_only("delete")).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, inner, prefix) = self.route(prefix.unwrap_or(&Path::default()));
        store.list(Some(&inner)).map_ok(move |meta| meta_with_prefix(prefix.as_ref(), meta)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let (store, inner, prefix) = self.route(prefix.unwrap_or(&Path::default()));
        let listed = store.list_with_delimiter(Some(&inner)).await?;
        let prefix = prefix.as_ref();
        Ok(ListResult {
            common_prefixes: listed.common_prefixes.into_iter().map(|p| with_prefix(prefix, p)).collect(),
            objects: listed.objects.into_iter().map(|meta| meta_with_prefix(prefix, meta)).collect(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        read_only("copy")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_disk_is_what_the_store_says() {
        let disk = LocalFileSystem::new();
        for name in ["", "a", "a/b c", "a/50%25", "a/ü#", "a/x#1", "a/x#1b", "#7/x", "a/[b]?{c}~|`^", "a/b#2/c", "-.-"]
        {
            let path = Path::parse(name).unwrap();
            assert_eq!(disk_path(&path), disk.path_to_filesystem(&path).ok(), "{name:?}");
        }
    }
}
