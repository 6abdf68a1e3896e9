//! `hf://` references: `hf://[org/]name[@revision][/file.gguf]`.

use std::fmt;

use stillhouse_schemas::hub_names::{
    DEFAULT_REVISION, check_repository, check_revision, decode_slashes, encode_slashes, is_commit, split_revision,
};

/// The scheme of references to the hub.
const SCHEME: &str = "hf://";

/// A model on the hub, with an optional revision and, for GGUF, a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HubRef {
    repo: String,
    revision: Option<String>,
    file: Option<String>,
}

impl HubRef {
    /// Parses a reference. Returns `None` if the text does not start with `hf://`.
    ///
    /// A revision is a branch, a tag or a commit. Slashes in it are written as `%2F`, except in `refs/pr/1` and
    /// `refs/convert/x`.
    ///
    /// # Errors
    /// A message with the problem and the valid form.
    pub fn parse(text: &str) -> Result<Option<Self>, String> {
        let Some(rest) = text.strip_prefix(SCHEME) else { return Ok(None) };
        Self::parse_rest(rest)
            .map(Some)
            .map_err(|problem| format!("{text:?}: {problem}; valid: hf://org/name[@revision][/file.gguf]"))
    }

    fn parse_rest(rest: &str) -> Result<Self, String> {
        // An `@` after the second slash belongs to the file name.
        let before_file = rest.match_indices('/').nth(1).map_or(rest, |(at, _)| &rest[..at]);
        let (repo, revision, file) = match before_file.find('@') {
            Some(at) => {
                let (revision, file) = split_revision(&rest[at + 1..]);
                (&rest[..at], Some(decode_slashes(revision)), file)
            }
            None => {
                let (repo, file) = split_repo(rest);
                (repo, None, file)
            }
        };
        check_repo(repo)?;
        if let Some(revision) = &revision {
            check_revision(revision)?;
        }
        if let Some(file) = file {
            check_file(file)?;
            if !is_gguf(file) {
                return Err(format!(
                    "only a .gguf file can be named, not {file:?} (of other models name the repository)"
                ));
            }
        }
        Ok(Self { repo: repo.to_owned(), revision, file: file.map(str::to_owned) })
    }

    /// `org/name`, or `name` for the few models without an organisation.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// The branch, tag or commit; `main` if the reference has none.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// The path of the `.gguf` file in the repository.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Whether the revision is a full commit, which cannot move.
    pub fn is_pinned(&self) -> bool {
        is_commit(self.revision())
    }
}

impl fmt::Display for HubRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{}", encode_slashes(revision))?;
        }
        self.file.as_ref().map_or(Ok(()), |file| write!(f, "/{file}"))
    }
}

pub(super) fn is_gguf(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf")
}

/// Refuses paths that could leave the folder they are joined to, on any operating system.
pub(super) fn check_file(file: &str) -> Result<(), String> {
    let is_portable = file.len() <= 1024 && !file.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'));
    if is_portable && file.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() <= 255) {
        Ok(())
    } else {
        Err(format!("{file:?} is not the path of a file inside the repository"))
    }
}

fn split_repo(rest: &str) -> (&str, Option<&str>) {
    let mut slashes = rest.match_indices('/').map(|(at, _)| at);
    match (slashes.next(), slashes.next()) {
        // `hf://gpt2/model.gguf`: a repository without an organisation.
        (Some(first), None) if is_gguf(rest) => (&rest[..first], Some(&rest[first + 1..])),
        (_, Some(second)) => (&rest[..second], Some(&rest[second + 1..])),
        _ => (rest, None),
    }
}

fn check_repo(repo: &str) -> Result<(), String> {
    if let Some((kind @ ("datasets" | "spaces" | "buckets" | "models"), _)) = repo.split_once('/') {
        return Err(format!("models are named without a kind, as org/name, and {kind}/ is not an organisation"));
    }
    check_repository(repo)
}
