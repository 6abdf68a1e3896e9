//! Locations of files: on this machine or in a store.

use std::fmt;
use std::path::{Path as FsPath, PathBuf};

use object_store::path::Path;
use stillhouse_schemas::hub_names::HubDataset;
use stillhouse_schemas::storage::split_url;

pub use stillhouse_schemas::storage::Scheme;

/// A location that a job or a command names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Location {
    /// A path on this machine.
    Disk(PathBuf),
    /// An object, or a key prefix, in a store.
    Store(StoreUrl),
}

/// The URL of a store, without any part that could be a secret.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreUrl {
    /// Kind of store.
    pub scheme: Scheme,
    /// Bucket or container; for a web server the host, with the port if one is given; for the hub
    /// `datasets/org/name[@revision]`.
    pub bucket: String,
    /// The key in the store's form (not percent-encoded). May contain globs, and keeps a trailing slash.
    pub key: String,
}

impl Location {
    /// Parses a path or URL. Relative paths are relative to `base`.
    ///
    /// # Errors
    /// If the URL is invalid. The message does not repeat it.
    pub fn parse(base: &FsPath, text: &str) -> Result<Self, String> {
        match StoreUrl::parse(text) {
            Some(url) => url.map(Self::Store),
            None => Ok(Self::Disk(base.join(text.strip_prefix("file://").unwrap_or(text)))),
        }
    }

    /// Appends a relative name with slashes.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        match self {
            Self::Disk(path) => Self::Disk(path.join(name)),
            Self::Store(url) => Self::Store(url.join(name)),
        }
    }
}

impl StoreUrl {
    /// Parses the URL of a store; `None` for a path on this machine.
    ///
    /// # Errors
    /// If the URL is invalid. The message does not repeat it.
    pub fn parse(text: &str) -> Option<Result<Self, String>> {
        Some(split_url(text)?.and_then(|parts| {
            let bad = |_| "its key has an empty part, or one that is . or ..".to_owned();
            let key = if parts.scheme.is_web() {
                let decoded = Path::from_url_path(parts.key).map_err(bad)?.to_string();
                let slash = parts.key.ends_with('/') && !decoded.is_empty();
                decoded + if slash { "/" } else { "" }
            } else {
                parts.key.to_owned()
            };
            let bucket = match parts.scheme {
                Scheme::Http | Scheme::Https => parts.bucket.to_ascii_lowercase(),
                Scheme::Hf => HubDataset::parse(parts.bucket)?.bucket(),
                Scheme::S3 | Scheme::Gs | Scheme::Az => parts.bucket.to_owned(),
            };
            let url = Self { scheme: parts.scheme, bucket, key };
            Path::parse(url.key.strip_suffix('/').unwrap_or(&url.key)).map_err(bad)?;
            Ok(url)
        }))
    }

    /// The key as an object_store path; the empty path means the whole bucket.
    pub fn path(&self) -> Path {
        // `parse` has validated the key
        Path::parse(self.key.trim_matches('/')).unwrap_or_else(|_| Path::from(self.key.as_str()))
    }

    /// Appends a relative name with slashes.
    #[must_use]
    pub fn join(&self, name: &str) -> Self {
        let parts = [self.key.trim_matches('/'), name.trim_start_matches('/')];
        let key = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        Self { key, ..self.clone() }
    }

    /// The URL of the bucket alone.
    #[must_use]
    pub fn root(&self) -> Self {
        Self { key: String::new(), ..self.clone() }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.bucket)?;
        if self.key.is_empty() { Ok(()) } else { write!(f, "/{}", self.key) }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(path) => write!(f, "{}", path.display()),
            Self::Store(url) => url.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Location, String> {
        Location::parse(FsPath::new("/base"), text)
    }

    fn store(text: &str) -> StoreUrl {
        match parse(text) {
            Ok(Location::Store(url)) => url,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn paths_are_of_this_machine() {
        assert_eq!(parse("a/b"), Ok(Location::Disk("/base/a/b".into())));
        assert_eq!(parse("file:///a/b").unwrap().to_string(), "/a/b");
        assert_eq!(parse("a").unwrap().join("c/d"), Location::Disk("/base/a/c/d".into()));
    }

    #[test]
    fn keys_are_taken_as_they_are() {
        for text in ["s3://b/x y/%41?/[0-9]*.gz", "gs://b", "az://b/folder/", "hf://datasets/o/n@refs/pr/1/x%20/*"] {
            assert_eq!(store(text).to_string(), text);
        }
        assert_eq!(store("s3://b/100%").path().as_ref(), "100%");
        assert_eq!(store("s3a://b/k").to_string(), "s3://b/k");
        assert_eq!(store("hf://datasets/o/n@main/k").to_string(), "hf://datasets/o/n/k");
        assert_eq!(store("https://H:1/a%20b/").key, "a b/");
    }

    #[test]
    fn joins_have_one_slash() {
        assert_eq!(store("s3://b").join("a/k").to_string(), "s3://b/a/k");
        assert_eq!(store("s3://b/a/").join("k").to_string(), "s3://b/a/k");
        assert_eq!(store("s3://b/a").join("").path().as_ref(), "a");
        assert_eq!(store("s3://b/a/k").root().to_string(), "s3://b");
    }

    #[test]
    fn what_no_key_can_be_is_refused() {
        for text in ["s3://b/a//k", "s3://b/../SECRET", "http://h/k?SECRET", "s3://k:SECRET@b/k", "s3://"] {
            let message = parse(text).unwrap_err();
            assert!(!message.contains("SECRET"), "{message}");
        }
    }
}
