//! Fetches models and tokenizers named `hf://org/name` from the Hugging Face hub, or from the cache that it shares with
//! Python.
//!
//! ```text
//!   hf://org/name@main ─► commit sha ───► which files ─► HEAD: etag, size ─► lock ─► GET, Range ─► size, sha256
//!        HubRef           /api/models…    selection      /resolve/<sha>/…            <etag>.incomplete   │
//!                                                                                                        ▼
//!   HF_HUB_CACHE/models--org--name/ refs/main ─► snapshots/<sha>/config.json ─symlink─► blobs/<etag> ◄ rename
//! ```
//!
//! The cache has the layout of Python's `huggingface_hub`, so each uses the downloads of the other. `fetch` resolves a
//! branch or tag to a commit once, requests every file by that commit, and returns the commit for the manifest. A file
//! becomes visible only when complete, by a rename; refs are written last. Processes that need the same blob wait for
//! each other on the lock file that Python also uses. The token is sent only to the origin of the endpoint, and never
//! after a redirect to another origin.
//!
//! The calls block: use `spawn_blocking` in async code. Cost: one request to resolve the revision and two per missing
//! file; none if the revision is a commit that the cache contains. Memory: one buffer of 128 KiB.
//!
//! ```
//! use stillhouse_hub::HubRef;
//!
//! let teacher = HubRef::parse("hf://openai-community/gpt2@main")?.ok_or("not of the hub")?;
//! assert_eq!((teacher.repo(), teacher.revision()), ("openai-community/gpt2", "main"));
//! assert_eq!(HubRef::parse("models/gpt2")?, None);
//! # Ok::<(), String>(())
//! ```

mod cache;
mod client;
mod download;
mod reference;
mod selection;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use self::cache::CachedRepo;
use self::client::{Client, Listing};
pub use self::reference::HubRef;
use self::selection::{CacheCoverage, FileSelection};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
pub use stillhouse_base::storage::hub::{HubConfig, Token};

/// The purpose of a fetch, which determines the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchPurpose {
    /// `tokenizer.json`, and the accompanying files that name special tokens.
    Tokenizer,
    /// `config.json`, the weights as safetensors, and the tokenizer's files that exist.
    Teacher,
}

/// Callback for download progress: the file, the bytes received, and the total bytes (0 if the server does not report
/// them).
pub type Progress<'a> = &'a dyn Fn(&str, u64, u64);

/// The local result of [`fetch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Folder of the snapshot, or the `.gguf` file if the reference names one.
    pub path: PathBuf,
    /// Commit that the revision resolved to: 40 hexadecimal digits.
    pub commit: String,
}

/// Fetches with the settings of the environment. See [`Hub::fetch`].
///
/// # Errors
/// Those of [`HubConfig::from_env`] and [`Hub::fetch`].
pub fn fetch(reference: &HubRef, purpose: FetchPurpose, progress: Progress<'_>) -> Result<Fetched> {
    Hub::new(HubConfig::from_env()?).fetch(reference, purpose, progress)
}

/// A hub and its local cache.
#[derive(Debug)]
pub struct Hub {
    config: HubConfig,
}

impl Hub {
    /// Creates a hub with these settings. Reads and sends nothing yet.
    pub fn new(config: HubConfig) -> Self {
        Self { config }
    }

    /// Makes the files of a reference local, from the cache if it has them, else from the hub.
    ///
    /// Resolves a branch or tag at every call, so that a moved branch is noticed. If the hub is unreachable and the
    /// cache has the required files, uses the cached commit and logs a warning.
    ///
    /// # Errors
    /// `Usage` for problems that the user must fix: no such repository, revision or file; gated or private; no
    /// safetensors. `Model` for all others, retryable if the network or the local disk failed.
    pub fn fetch(&self, reference: &HubRef, purpose: FetchPurpose, progress: Progress<'_>) -> Result<Fetched> {
        let repo = CachedRepo::new(&self.config.cache, reference.repo());
        let cached = repo.cached_commit(reference.revision());
        let coverage = cached
            .as_ref()
            .map_or(CacheCoverage::Insufficient, |commit| selection::cache_coverage(&repo, commit, reference, purpose));
        let local =
            cached.filter(|_| coverage != CacheCoverage::Insufficient).map(|commit| repo.to_fetched(commit, reference));

        if let Some(fetched) = &local
            && (self.config.offline || (reference.is_pinned() && coverage == CacheCoverage::All))
        {
            return Ok(fetched.clone());
        }
        if self.config.offline {
            return Err(self.not_cached(reference, purpose));
        }
        let client = Client::new(&self.config)?;
        // If the cache has the required files, the hub gets one attempt without retries.
        let attempts = if local.is_some() { 1 } else { self.config.attempts };
        match (client.request_listing(reference, attempts), local) {
            (Ok(listing), _) => download_missing(&client, &repo, reference, purpose, &listing, progress),
            (Err(error), Some(fetched)) if error.retryable || reference.is_pinned() => {
                tracing::warn!(%reference, commit = fetched.commit, %error, "the hub does not answer: using the cache");
                Ok(fetched)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Checks with at most one request whether a reference can be fetched. Downloads nothing and does not retry.
    ///
    /// # Errors
    /// `Usage` for problems that the user must fix, as in [`Hub::fetch`]. Any other kind means that the hub did not
    /// answer, so nothing is known about the reference.
    pub fn check(&self, reference: &HubRef, purpose: FetchPurpose) -> Result<()> {
        let repo = CachedRepo::new(&self.config.cache, reference.repo());
        let cached = repo.cached_commit(reference.revision());
        let coverage = cached.map_or(CacheCoverage::Insufficient, |commit| {
            selection::cache_coverage(&repo, &commit, reference, purpose)
        });
        match (self.config.offline, coverage) {
            (true, CacheCoverage::Insufficient) => return Err(self.not_cached(reference, purpose)),
            (true, _) => return Ok(()),
            // The cache suffices, whatever the hub answers.
            (false, CacheCoverage::Required | CacheCoverage::All) if reference.is_pinned() => return Ok(()),
            (false, _) => {}
        }
        let listing = Client::new(&self.config)?.request_listing(reference, 1)?;
        selection::select_files(&listing.files, reference, purpose).map(drop)
    }

    fn not_cached(&self, reference: &HubRef, purpose: FetchPurpose) -> PipelineError {
        let missing = match (reference.file(), purpose) {
            (Some(_), _) => "the file is",
            (None, FetchPurpose::Tokenizer) => "its tokenizer.json is",
            (None, FetchPurpose::Teacher) => "its config.json and all its safetensors are",
        };
        PipelineError::new(
            ErrorKind::Usage,
            format!(
                "{reference}: HF_HUB_OFFLINE is set and {missing} not in the cache {}; unset it, or download the model first",
                self.config.cache.display()
            ),
        )
    }
}

/// Downloads the missing files of a commit into the cache, then points the revision to the commit.
fn download_missing(
    client: &Client,
    repo: &CachedRepo,
    reference: &HubRef,
    purpose: FetchPurpose,
    listing: &Listing,
    progress: Progress<'_>,
) -> Result<Fetched> {
    let commit = listing.commit.as_str();
    let FileSelection { files, absent } = selection::select_files(&listing.files, reference, purpose)?;
    for file in &files {
        download::fetch_file(client, repo, reference, commit, file, progress)?;
        if file == selection::INDEX {
            for shard in selection::read_shards(&repo.file_path(commit, file), &listing.files, reference)? {
                download::fetch_file(client, repo, reference, commit, &shard, progress)?;
            }
        }
    }
    repo.record_absent(commit, &absent);
    repo.set_ref(reference.revision(), commit);
    Ok(repo.to_fetched(commit.to_owned(), reference))
}
