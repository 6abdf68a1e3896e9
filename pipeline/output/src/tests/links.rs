//! Tests commits on file systems without hard links, and on failing ones.

use std::io;

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, RenameTargetMode, Result,
};

use super::*;

/// A disk whose hard links fail with a given error; all other operations work.
#[derive(Debug)]
struct WithoutLinks {
    disk: LocalFileSystem,
    number: i32,
}

impl fmt::Display for WithoutLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} without links", self.disk)
    }
}

#[async_trait]
impl ObjectStore for WithoutLinks {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.disk.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.disk.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.disk.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.disk.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.disk.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.disk.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.disk.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        match options.target_mode {
            RenameTargetMode::Overwrite => self.disk.rename_opts(from, to, options).await,
            RenameTargetMode::Create => {
                let source = Box::new(io::Error::from_raw_os_error(self.number));
                Err(Error::Generic { store: "LocalFileSystem", source })
            }
        }
    }
}

async fn without_links(folder: &TempDir, number: i32) -> Output {
    let output = disk(folder).made(&number.to_string()).await;
    let disk = LocalFileSystem::new_with_prefix(output.folder().unwrap()).unwrap();
    Output { store: Arc::new(WithoutLinks { disk, number }), ..output }
}

#[tokio::test]
async fn where_there_are_no_links_a_commit_renames() {
    let folder = tempfile::tempdir().unwrap();
    for number in [libc::EPERM, libc::EOPNOTSUPP, libc::ENOSYS, libc::EMLINK] {
        let output = without_links(&folder, number).await;
        output.begin(&plan("hash")).await.unwrap();
        let (shard, record) = staged(&output, &content(1, 1)).await;
        output.commit(shard, record.clone()).await.unwrap();
        let Found::Resumable { done, .. } = output.inspect("hash").await.unwrap() else { panic!("error {number}") };
        assert_eq!(done.into_values().collect::<Vec<_>>(), [record], "error {number}");
    }
}

#[tokio::test]
async fn a_rename_replaces_no_committed_shard() {
    let folder = tempfile::tempdir().unwrap();
    let output = without_links(&folder, libc::EPERM).await;
    output.begin(&plan("hash")).await.unwrap();
    let (first, record) = staged(&output, &content(1, 1)).await;
    output.commit(first, record.clone()).await.unwrap();
    // Other bytes, which a second worker of this job would not have, show which file is there.
    let (second, other) = staged(&output, &content(2, 1)).await;
    assert_ne!(other.sha256, record.sha256);
    assert_eq!(output.commit(second, other).await.unwrap(), record);
    assert_eq!(output.read_whole(&record.path, |_| {}).await.unwrap().0, record.sha256);
}

#[tokio::test]
async fn an_error_of_a_disk_that_has_links_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    for number in [libc::EIO, libc::ENOSPC, libc::EACCES, libc::EROFS, libc::EXDEV, libc::EDQUOT] {
        let output = without_links(&folder, number).await;
        output.begin(&plan("hash")).await.unwrap();
        let (shard, record) = staged(&output, &content(1, 1)).await;
        let reported = output.commit(shard, record).await.unwrap_err();
        let cause = io::Error::from_raw_os_error(number).to_string();
        assert!(reported.to_string().contains(&cause), "{reported}");
        assert!(output.list("data").await.unwrap().is_empty(), "error {number}");
        assert!(output.records().await.unwrap().is_empty(), "error {number}");
    }
}

/// Proves that object_store keeps the system's error: a link to a folder fails with EPERM on every system.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_systems_error_is_found_in_that_of_the_store() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("a")).unwrap();
    let disk = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    let refused = disk.rename_if_not_exists(&Path::from("a"), &Path::from("b")).await.unwrap_err();
    assert!(commit::is_link_unsupported(&refused), "{refused:?}");
    let missing = disk.rename_if_not_exists(&Path::from("c"), &Path::from("b")).await.unwrap_err();
    assert!(!commit::is_link_unsupported(&missing), "{missing:?}");
}
