//! Downloads one file from the hub into the cache: resumes, verifies, and makes it visible only when complete.

use std::fs::{self, File};
use std::io::{ErrorKind as IoErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::storage;

use super::Progress;
use super::cache::{Repo, disk};
use super::client::{Again, Client, Failure, Metadata};
use super::reference::HubRef;

const BUFFER_BYTES: usize = 128 << 10;
/// Bytes that an attempt must receive to reset the count of failures, so that a long download over an unreliable line
/// completes.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Downloads a file of a commit, unless it is already local.
pub(super) fn file(
    client: &Client,
    repo: &Repo,
    reference: &HubRef,
    commit: &str,
    name: &str,
    progress: Progress<'_>,
) -> Result<()> {
    if repo.has(commit, name) {
        return Ok(());
    }
    let metadata = client.metadata(reference, commit, name)?;
    let _lock = repo.lock(&metadata.etag)?;
    let blob = repo.blob(&metadata.etag);
    // Another process may have downloaded it in the meantime, or another commit may have the same file.
    let whole = fs::metadata(&blob).is_ok_and(|held| metadata.size.is_none_or(|size| size == held.len()));
    if !whole {
        Download { client, reference, commit, name, metadata: &metadata, progress }.to(&blob)?;
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
    fn to(&self, blob: &Path) -> Result<()> {
        let part = blob.with_added_extension("incomplete");
        let context = || format!("cannot write {}", part.display());
        if let Some(folder) = blob.parent() {
            fs::create_dir_all(folder).map_err(disk(context()))?;
        }
        let mut file =
            File::options().read(true).write(true).create(true).truncate(false).open(&part).map_err(disk(context()))?;
        let mut failures = 0;
        let mut damaged = false;
        loop {
            let before = self.kept(&mut file).map_err(disk(context()))?;
            match self.append(&mut file, before, &context) {
                Ok(()) => {}
                Err(failure) => {
                    let after = file.metadata().map_or(0, |m| m.len());
                    failures = if after >= before + PROGRESS_BYTES { 1 } else { failures + 1 };
                    if failure.again == Again::Afresh {
                        file.set_len(0).map_err(disk(context()))?;
                    }
                    self.client.pause(failure, failures, self.client.attempts)?;
                    continue;
                }
            }
            match self.damage(&mut file).map_err(disk(context()))? {
                None => break,
                // The part kept from an earlier attempt may be damaged: downloads once more from the beginning.
                Some(_) if !damaged => {
                    damaged = true;
                    file.set_len(0).map_err(disk(context()))?;
                }
                Some(damage) => {
                    drop(file);
                    let _ = fs::remove_file(&part);
                    return Err(PipelineError::new(
                        ErrorKind::Model,
                        format!("{:?} of {}: {damage}, twice", self.name, self.reference),
                    ));
                }
            }
        }
        file.sync_all().map_err(disk(context()))?;
        fs::rename(&part, blob).map_err(disk(context()))
    }

    /// Returns the number of bytes on disk from which the download can resume.
    fn kept(&self, file: &mut File) -> std::io::Result<u64> {
        let kept = file.metadata()?.len();
        if self.metadata.size.is_some_and(|size| kept <= size) {
            return Ok(kept);
        }
        // Without a known size, a kept part could already be the whole file, so the download restarts.
        file.set_len(0)?;
        Ok(0)
    }

    fn append(&self, file: &mut File, kept: u64, context: &dyn Fn() -> String) -> std::result::Result<(), Failure> {
        let size = self.metadata.size;
        let total = size.unwrap_or(0);
        if size == Some(kept) {
            (self.progress)(self.name, kept, total);
            return Ok(());
        }
        let response = self.client.open(self.reference, self.commit, self.name, kept)?;
        if response.headers().get("content-encoding").is_some_and(|encoding| encoding != "identity") {
            let message =
                format!("{:?} of {}: the server compresses it although asked not to", self.name, self.reference);
            return Err(PipelineError::new(ErrorKind::Model, message).into());
        }
        let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        let mut done = match (response.status().as_u16(), range) {
            (206, Some(range)) if range.trim().starts_with(&format!("bytes {kept}-")) => kept,
            (206, _) => {
                return Err(Failure::passing(format!("{:?}: the server sent another part than asked", self.name)));
            }
            _ => 0,
        };
        file.set_len(done).and_then(|()| file.seek(SeekFrom::Start(done))).map_err(disk(context()))?;
        (self.progress)(self.name, done, total);

        // One byte more than announced proves that the server sends a different file.
        let mut body = response.take(size.map_or(u64::MAX, |size| size - done + 1));
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(e) if e.kind() == IoErrorKind::Interrupted => continue,
                Err(e) => {
                    let (_, why) = storage::breakage(&e);
                    return Err(Failure::passing(format!("{:?} of {}: {why}", self.name, self.reference)));
                }
            };
            file.write_all(&buffer[..count]).map_err(disk(context()))?;
            done += count as u64;
            (self.progress)(self.name, done, total);
        }
        match size {
            Some(size) if done < size => Err(Failure::passing(format!(
                "{:?} of {}: ended after {done} of {size} bytes",
                self.name, self.reference
            ))),
            _ => Ok(()),
        }
    }

    /// Describes a mismatch of the complete file with the announced size or SHA-256.
    fn damage(&self, file: &mut File) -> std::io::Result<Option<String>> {
        let length = file.metadata()?.len();
        if let Some(size) = self.metadata.size.filter(|&size| size != length) {
            return Ok(Some(format!("the hub sent {length} bytes or more and not the {size} that it promised")));
        }
        let Some(promised) = self.metadata.sha256() else { return Ok(None) };
        file.seek(SeekFrom::Start(0))?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
        let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((!found.eq_ignore_ascii_case(promised))
            .then(|| format!("the hub sent bytes with the sha256 {found} and not the {promised} that it promised")))
    }
}
