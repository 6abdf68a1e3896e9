//! Downloads one file from the hub into the cache: resumes, verifies, and makes it visible only when complete.

use std::fs::{self, File};
use std::io::{ErrorKind as IoErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::storage;

use super::Progress;
use super::cache::{CachedRepo, disk_error};
use super::client::{Client, Failure, Metadata, RetryPolicy};
use super::reference::HubRef;

const BUFFER_BYTES: usize = 128 << 10;
/// Bytes that an attempt must receive to reset the count of failures, so that a long download over an unreliable line
/// completes.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Downloads a file of a commit, unless it is already local.
pub(super) fn fetch_file(
    client: &Client,
    repo: &CachedRepo,
    reference: &HubRef,
    commit: &str,
    name: &str,
    progress: Progress<'_>,
) -> Result<()> {
    if repo.has_file(commit, name) {
        return Ok(());
    }
    let metadata = client.request_metadata(reference, commit, name)?;
    let _lock = repo.lock(&metadata.etag)?;
    let blob = repo.blob_path(&metadata.etag);
    // Another process may have downloaded it in the meantime, or another commit may have the same file.
    let is_complete = fs::metadata(&blob).is_ok_and(|existing| metadata.size.is_none_or(|size| size == existing.len()));
    if !is_complete {
        Download { client, reference, commit, name, metadata: &metadata, progress }.run(&blob)?;
    }
    repo.link(&metadata.etag, commit, name)
}

struct Download<'a> {
    client: &'a Client,
    reference: &'a HubRef,
    commit: &'a str,
    name: &'a str,
    metadata: &'a Metadata,
    progress: Progress<'a>,
}

impl Download<'_> {
    fn run(&self, blob: &Path) -> Result<()> {
        let partial = blob.with_added_extension("incomplete");
        let context = || format!("cannot write {}", partial.display());
        if let Some(folder) = blob.parent() {
            fs::create_dir_all(folder).map_err(disk_error(context()))?;
        }
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&partial)
            .map_err(disk_error(context()))?;
        let mut failures = 0;
        let mut mismatched_before = false;
        loop {
            let before = self.resume_offset(&mut file).map_err(disk_error(context()))?;
            match self.append(&mut file, before, &context) {
                Ok(()) => {}
                Err(failure) => {
                    let after = file.metadata().map_or(0, |m| m.len());
                    failures = if after >= before + PROGRESS_BYTES { 1 } else { failures + 1 };
                    if failure.retry == RetryPolicy::FromStart {
                        file.set_len(0).map_err(disk_error(context()))?;
                    }
                    self.client.pause(failure, failures, self.client.attempts)?;
                    continue;
                }
            }
            match self.find_mismatch(&mut file).map_err(disk_error(context()))? {
                None => break,
                // The part kept from an earlier attempt may be damaged: downloads once more from the beginning.
                Some(_) if !mismatched_before => {
                    mismatched_before = true;
                    file.set_len(0).map_err(disk_error(context()))?;
                }
                Some(mismatch) => {
                    drop(file);
                    let _ = fs::remove_file(&partial);
                    return Err(PipelineError::new(
                        ErrorKind::Model,
                        format!("{:?} of {}: {mismatch}, twice", self.name, self.reference),
                    ));
                }
            }
        }
        file.sync_all().map_err(disk_error(context()))?;
        fs::rename(&partial, blob).map_err(disk_error(context()))
    }

    /// Returns the number of bytes on disk from which the download can resume.
    fn resume_offset(&self, file: &mut File) -> std::io::Result<u64> {
        let length = file.metadata()?.len();
        if self.metadata.size.is_some_and(|size| length <= size) {
            return Ok(length);
        }
        // Without a known size, a kept part could already be the whole file, so the download restarts.
        file.set_len(0)?;
        Ok(0)
    }

    fn append(&self, file: &mut File, offset: u64, context: &dyn Fn() -> String) -> std::result::Result<(), Failure> {
        let size = self.metadata.size;
        let total = size.unwrap_or(0);
        if size == Some(offset) {
            (self.progress)(self.name, offset, total);
            return Ok(());
        }
        let response = self.client.open(self.reference, self.commit, self.name, offset)?;
        if response.headers().get("content-encoding").is_some_and(|encoding| encoding != "identity") {
            let message =
                format!("{:?} of {}: the server compresses it although asked not to", self.name, self.reference);
            return Err(PipelineError::new(ErrorKind::Model, message).into());
        }
        let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        let mut received = match (response.status().as_u16(), range) {
            (206, Some(range)) if range.trim().starts_with(&format!("bytes {offset}-")) => offset,
            (206, _) => {
                return Err(Failure::transient(format!("{:?}: the server sent another part than asked", self.name)));
            }
            _ => 0,
        };
        file.set_len(received).and_then(|()| file.seek(SeekFrom::Start(received))).map_err(disk_error(context()))?;
        (self.progress)(self.name, received, total);

        // One byte more than announced proves that the server sends a different file.
        let mut body = response.take(size.map_or(u64::MAX, |size| size - received + 1));
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(e) if e.kind() == IoErrorKind::Interrupted => continue,
                Err(e) => {
                    let (_, why) = storage::classify_no_response(&e);
                    return Err(Failure::transient(format!("{:?} of {}: {why}", self.name, self.reference)));
                }
            };
            file.write_all(&buffer[..count]).map_err(disk_error(context()))?;
            received += count as u64;
            (self.progress)(self.name, received, total);
        }
        match size {
            Some(size) if received < size => Err(Failure::transient(format!(
                "{:?} of {}: ended after {received} of {size} bytes",
                self.name, self.reference
            ))),
            _ => Ok(()),
        }
    }

    /// Describes a mismatch of the complete file with the announced size or SHA-256.
    fn find_mismatch(&self, file: &mut File) -> std::io::Result<Option<String>> {
        let length = file.metadata()?.len();
        if let Some(size) = self.metadata.size.filter(|&size| size != length) {
            return Ok(Some(format!("the hub sent {length} bytes or more and not the {size} that it promised")));
        }
        let Some(expected) = self.metadata.sha256() else { return Ok(None) };
        file.seek(SeekFrom::Start(0))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
        let actual: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((!actual.eq_ignore_ascii_case(expected))
            .then(|| format!("the hub sent bytes with the sha256 {actual} and not the {expected} that it promised")))
    }
}
