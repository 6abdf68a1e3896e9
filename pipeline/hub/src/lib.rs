//! Models and tokenizers named `hf://org/name`, from the Hugging Face hub or from the cache shared with Python.
//!
//! ```text
//!   hf://org/name@main ─► commit sha ───► which files ─► HEAD: etag, size ─► lock ─► GET, Range ─► size, sha256
//!        HubRef           /api/models…    selection      /resolve/<sha>/…            <etag>.incomplete   │
//!                                                                                                        ▼
//!   HF_HUB_CACHE/models--org--name/ refs/main ─► snapshots/<sha>/config.json ─symlink─► blobs/<etag> ◄ rename
//! ```
//!
//! The layout is that of Python's `huggingface_hub`: what one has downloaded, the other uses. A branch or tag is
//! resolved to a commit once, every file is asked for by that commit, and the commit is returned for the manifest.
//! Files appear whole (rename), refs last; processes that want the same blob wait for each other on the lock that
//! Python takes too. The token goes to the origin of the endpoint alone, never along a redirect elsewhere.
//!
//! The calls block: from async code use `spawn_blocking`. Cost: one request to resolve and two per missing file; none
//! when the revision is a commit that the cache has. Memory: one buffer of 128 KiB.
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
mod config;
mod download;
mod reference;
mod selection;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use self::cache::Repo;
use self::client::{Client, Listing};
pub use self::config::{HubConfig, Token};
pub use self::reference::HubRef;
use self::selection::{Cached, Choice};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

/// What a reference is wanted for: it decides the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// `tokenizer.json`, and the files beside it that name special tokens.
    Tokenizer,
    /// `config.json` and the weights as safetensors, and the tokenizer's files as far as they are there.
    Teacher,
}

/// Told of a download: the file, the bytes done, the bytes in all (0 when the server does not say).
pub type Progress<'a> = &'a dyn Fn(&str, u64, u64);

/// What [`fetch`] found or downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The folder of the snapshot, or the `.gguf` file that was named.
    pub path: PathBuf,
    /// The commit that the revision stands for: 40 hexadecimal digits.
    pub commit: String,
}

/// Fetches with the settings of the environment; see [`Hub::fetch`].
///
/// # Errors
/// Those of [`HubConfig::from_env`] and [`Hub::fetch`].
pub fn fetch(reference: &HubRef, wanted: Wanted, progress: Progress<'_>) -> Result<Fetched> {
    Hub::new(HubConfig::from_env()?).fetch(reference, wanted, progress)
}

/// A hub and its local cache.
#[derive(Debug)]
pub struct Hub {
    config: HubConfig,
}

impl Hub {
    /// A hub with these settings; nothing is read or sent yet.
    pub fn new(config: HubConfig) -> Self {
        Self { config }
    }

    /// Makes the files of a reference local: from the cache where it has them, else from the hub.
    ///
    /// A branch or tag is resolved at every call, so that a moved branch is seen; when the hub cannot be reached and
    /// the cache has what is wanted, the cached commit is used and a warning logged.
    ///
    /// # Errors
    /// `Usage` for what a person has to change (no such repository, revision or file; gated or private; no safetensors),
    /// `Model` for the rest, retryable where the network or the local disk failed.
    pub fn fetch(&self, reference: &HubRef, wanted: Wanted, progress: Progress<'_>) -> Result<Fetched> {
        let repo = Repo::new(&self.config.cache, reference.repo());
        let cached = repo.commit_of(reference.revision());
        let cached_files =
            cached.as_ref().map_or(Cached::Nothing, |commit| selection::cached(&repo, commit, reference, wanted));
        let local = cached.filter(|_| cached_files != Cached::Nothing).map(|commit| repo.fetched(commit, reference));

        if let Some(fetched) = &local
            && (self.config.offline || (reference.is_pinned() && cached_files == Cached::All))
        {
            return Ok(fetched.clone());
        }
        if self.config.offline {
            return Err(self.not_cached(reference, wanted));
        }
        let client = Client::new(&self.config)?;
        // with the files at hand a hub that does not answer is asked once, not waited for
        let attempts = if local.is_some() { 1 } else { self.config.attempts };
        match (client.listing(reference, attempts), local) {
            (Ok(listing), _) => complete(&client, &repo, reference, wanted, &listing, progress),
            (Err(error), Some(fetched)) if error.retryable || reference.is_pinned() => {
                tracing::warn!(%reference, commit = fetched.commit, %error, "the hub does not answer: using the cache");
                Ok(fetched)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Whether a reference can be fetched, as far as one short question tells: nothing is downloaded, nothing asked twice.
    ///
    /// # Errors
    /// Of kind `Usage` what a person has to change, as of [`Hub::fetch`]; of another kind that there was no answer, which says nothing of
    /// the reference.
    pub fn look(&self, reference: &HubRef, wanted: Wanted) -> Result<()> {
        let repo = Repo::new(&self.config.cache, reference.repo());
        let cached = repo.commit_of(reference.revision());
        let cached_files =
            cached.map_or(Cached::Nothing, |commit| selection::cached(&repo, &commit, reference, wanted));
        match (self.config.offline, cached_files) {
            (true, Cached::Nothing) => return Err(self.not_cached(reference, wanted)),
            (true, _) => return Ok(()),
            // the cache does, whatever the hub says
            (false, Cached::Required | Cached::All) if reference.is_pinned() => return Ok(()),
            (false, _) => {}
        }
        let listing = Client::new(&self.config)?.listing(reference, 1)?;
        selection::choose(&listing.files, reference, wanted).map(drop)
    }

    fn not_cached(&self, reference: &HubRef, wanted: Wanted) -> PipelineError {
        let what = match (reference.file(), wanted) {
            (Some(_), _) => "the file is",
            (None, Wanted::Tokenizer) => "its tokenizer.json is",
            (None, Wanted::Teacher) => "its config.json and all its safetensors are",
        };
        PipelineError::new(
            ErrorKind::Usage,
            format!(
                "{reference}: HF_HUB_OFFLINE is set and {what} not in the cache {}; unset it, or download the model first",
                self.config.cache.display()
            ),
        )
    }
}

/// Brings what is missing of a commit into the cache, then lets the revision point to it.
fn complete(
    client: &Client,
    repo: &Repo,
    reference: &HubRef,
    wanted: Wanted,
    listing: &Listing,
    progress: Progress<'_>,
) -> Result<Fetched> {
    let commit = listing.commit.as_str();
    let Choice { files, absent } = selection::choose(&listing.files, reference, wanted)?;
    for file in &files {
        download::file(client, repo, reference, commit, file, progress)?;
        if file == selection::INDEX {
            for shard in selection::shards_of(&repo.file(commit, file), &listing.files, reference)? {
                download::file(client, repo, reference, commit, &shard, progress)?;
            }
        }
    }
    repo.remember_absent(commit, &absent);
    repo.point(reference.revision(), commit);
    Ok(repo.fetched(commit.to_owned(), reference))
}
