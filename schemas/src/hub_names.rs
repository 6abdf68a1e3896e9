//! Names on the Hugging Face hub: repositories, revisions and commits.

/// The revision of a reference without one.
pub const DEFAULT_REVISION: &str = "main";

/// Checks the name of a repository, `org/name` or `name`.
///
/// # Errors
/// What is wrong with it.
pub fn check_repository(name: &str) -> Result<(), String> {
    let is_valid_part = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && !part.starts_with(['-', '.'])
            && !part.ends_with(['-', '.'])
            && !part.contains("..")
            && !part.contains("--")
    };
    if name.len() <= 96 && name.split('/').count() <= 2 && name.split('/').all(is_valid_part) {
        Ok(())
    } else {
        Err(format!("{name:?} is not the name of a repository (letters, digits, '-', '_', '.'; no '--' or '..')"))
    }
}

/// Checks the name of a branch, a tag or a commit, by git's rules for ref names as far as they keep paths and URLs safe.
///
/// # Errors
/// What is wrong with it.
pub fn check_revision(revision: &str) -> Result<(), String> {
    let is_valid_part = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.ends_with(".lock");
    let is_forbidden = |c: char| c.is_control() || c.is_whitespace() || "~^:?*[\\%\"<>|".contains(c);
    if revision.len() <= 200
        && !revision.contains(is_forbidden)
        && !revision.contains("..")
        && !revision.contains("@{")
        && revision.split('/').all(is_valid_part)
    {
        Ok(())
    } else {
        Err(format!("{revision:?} is not a branch, a tag or a commit"))
    }
}

/// Whether the text is a commit: 40 lowercase hexadecimal digits.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Splits the text after an `@` into the revision and what follows its slash. Only `refs/pr/1` and `refs/convert/x`
/// have slashes themselves; in other revisions they are written as `%2F`.
pub fn split_revision(text: &str) -> (&str, Option<&str>) {
    let parts = if text.starts_with("refs/pr/") || text.starts_with("refs/convert/") { 3 } else { 1 };
    match text.match_indices('/').nth(parts - 1) {
        Some((at, _)) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    }
}

/// Returns a revision as the hub knows it: with slashes for `%2F`.
pub fn decode_slashes(revision: &str) -> String {
    revision.replace("%2F", "/").replace("%2f", "/")
}

/// Returns a revision as it is written after an `@`, the inverse of [`decode_slashes`].
pub fn encode_slashes(revision: &str) -> String {
    match split_revision(revision) == (revision, None) {
        true => revision.to_owned(),
        false => revision.replace('/', "%2F"),
    }
}

/// Part of a URL's bucket before the organisation.
const DATASETS: &str = "datasets/";
/// The short name of [`PARQUET_BRANCH`] in a URL, as in DuckDB and Polars.
const PARQUET_ALIAS: &str = "~parquet";
/// The branch that holds the hub's own conversion of a data set to Parquet.
const PARQUET_BRANCH: &str = "refs/convert/parquet";

/// A repository of data on the hub, and a revision of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HubDataset {
    /// `org/name`.
    pub repository: String,
    /// Branch, tag or commit; `main` if the URL has none.
    pub revision: String,
}

impl HubDataset {
    /// Parses the bucket of a URL: `datasets/org/name[@revision]`.
    ///
    /// # Errors
    /// If it is not one. The message does not repeat it.
    pub fn parse(bucket: &str) -> Result<Self, String> {
        const VALID: &str = "valid: hf://datasets/org/name[@revision]/path";
        let name = bucket.strip_prefix(DATASETS).ok_or_else(|| {
            format!("names no data set of the hub (models of it go into extract.teacher and tokenizer); {VALID}")
        })?;
        let (repository, revision) = name.split_once('@').map_or((name, None), |(name, after)| (name, Some(after)));
        if !repository.contains('/') || check_repository(repository).is_err() {
            return Err(format!("the name of its data set is none that the hub can have; {VALID}"));
        }
        let revision = match revision {
            None => DEFAULT_REVISION.to_owned(),
            Some(PARQUET_ALIAS) => PARQUET_BRANCH.to_owned(),
            Some(written) => decode_slashes(written),
        };
        check_revision(&revision).map_err(|_| {
            format!("what follows its @ is not a branch, a tag or a commit (a / in it is %2F); {VALID}")
        })?;
        Ok(Self { repository: repository.to_owned(), revision })
    }

    /// The bucket, the same for all ways to write it: `datasets/org/name`, with a revision other than `main`.
    pub fn bucket(&self) -> String {
        let revision = match self.revision.as_str() {
            DEFAULT_REVISION => String::new(),
            revision => format!("@{}", encode_slashes(revision)),
        };
        format!("{DATASETS}{}{revision}", self.repository)
    }

    /// Splits `datasets/org/name[@revision]/key` before the key.
    pub(crate) fn split_key(path: &str) -> (&str, &str) {
        let after_kind = path.find('/').map_or(path.len(), |at| at + 1);
        let name = &path[after_kind..];
        let before_key = name.match_indices('/').nth(1).map_or(name, |(at, _)| &name[..at]);
        let end = match before_key.find('@') {
            Some(at) => at + 1 + split_revision(&name[at + 1..]).0.len(),
            None => before_key.len(),
        };
        let (bucket, key) = path.split_at(after_kind + end);
        (bucket, key.strip_prefix('/').unwrap_or(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_sets_have_a_revision() {
        let cases = [
            ("datasets/org/name/a/b.parquet", "org/name", "main", "a/b.parquet"),
            ("datasets/org/name", "org/name", "main", ""),
            ("datasets/org/name/", "org/name", "main", ""),
            ("datasets/org/name@v1.0/x@y.gz", "org/name", "v1.0", "x@y.gz"),
            ("datasets/org/name/x@y.gz", "org/name", "main", "x@y.gz"),
            (
                "datasets/org/name@~parquet/default/train/*.parquet",
                "org/name",
                "refs/convert/parquet",
                "default/train/*.parquet",
            ),
            ("datasets/org/name@refs/convert/parquet/default", "org/name", "refs/convert/parquet", "default"),
            ("datasets/org/name@refs%2Fpr%2F1/x", "org/name", "refs/pr/1", "x"),
        ];
        for (path, repository, revision, expected) in cases {
            let (bucket, key) = HubDataset::split_key(path);
            let dataset = HubDataset::parse(bucket).unwrap();
            assert_eq!((&*dataset.repository, &*dataset.revision, key), (repository, revision, expected), "{path}");
            assert_eq!(HubDataset::parse(&dataset.bucket()), Ok(dataset), "{path}");
        }
        let bucket = |written: &str| HubDataset::parse(written).unwrap().bucket();
        assert_eq!(bucket("datasets/o/n@main"), "datasets/o/n");
        assert_eq!(bucket("datasets/o/n@~parquet"), bucket("datasets/o/n@refs%2Fconvert%2Fparquet"));
        assert_eq!(bucket("datasets/o/n@a%2fb"), "datasets/o/n@a%2Fb");
    }

    #[test]
    fn what_is_no_data_set_is_refused_without_repeating_it() {
        for path in [
            "SECRET",
            "org/SECRET/x",
            "datasets/SECRET",
            "datasets/user:SECRET@host/x",
            "datasets/org/SEC RET/x",
            "datasets/org/SECRET@/x",
            "datasets/org/SECRET@../x",
            "datasets/org/SECRET@a%00/x",
            "datasets/or--g/SECRET",
            "datasets/*/SECRET",
        ] {
            let message = HubDataset::parse(HubDataset::split_key(path).0).unwrap_err();
            assert!(
                message.contains("valid: hf://datasets/org/name") && !message.contains("SECRET"),
                "{path}: {message}"
            );
        }
    }
}
