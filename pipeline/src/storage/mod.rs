//! STUB until the branch `storage` is merged.
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::multipart::MultipartStore;
use object_store::path::Path;

/// x
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// x
    Disk(PathBuf),
    /// x
    Store(StoreUrl),
}
impl Place {
    /// x
    pub fn parse(base: &FsPath, text: &str) -> Result<Self, String> {
        Ok(Self::Disk(base.join(text)))
    }
}
/// x
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// x
    pub bucket: String,
    /// x
    pub key: String,
}
impl std::fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "s3://{}/{}", self.bucket, self.key)
    }
}
/// x
pub struct Opened {
    /// x
    pub store: Arc<dyn ObjectStore>,
    /// x
    pub multipart: Option<Arc<dyn MultipartStore>>,
    /// x
    pub uploads: Option<Arc<dyn ListUploads>>,
}
/// x
#[derive(Debug, Clone)]
pub struct Upload {
    /// x
    pub path: Path,
    /// x
    pub id: String,
}
/// x
#[async_trait::async_trait]
pub trait ListUploads: Send + Sync + std::fmt::Debug {
    /// x
    async fn list(&self, prefix: &Path) -> object_store::Result<Vec<Upload>>;
}
/// x
pub fn explain(e: &object_store::Error, action: &str, place: &str) -> String {
    format!("cannot {action} {place}: {e}")
}

/// x
pub fn is_retryable(_: &object_store::Error) -> bool {
    false
}

/// x
#[derive(Debug, Clone, Default)]
pub struct Storage;
impl Storage {
    /// x
    pub fn part_megabytes(&self) -> u32 {
        8
    }
    /// x
    pub fn parts_at_once(&self) -> u32 {
        4
    }
    /// x
    pub fn conditional_put_required(&self) -> bool {
        true
    }
}
/// x
pub fn open(_: &StoreUrl, _: &Storage) -> crate::error::Result<Opened> {
    Err(crate::error::PipelineError::new(crate::error::ErrorKind::Output, "stub"))
}
