//! The hub's requests and answers about a data set, without sending them.

use ::url::Url;
use chrono::DateTime;
use http::HeaderMap;
use http::header::LINK;
use object_store::ObjectMeta;
use object_store::path::Path;
use serde::Deserialize;
use stillhouse_schemas::hub_names::{HubDataset, is_commit};

/// The URLs of a data set at an endpoint.
#[derive(Debug)]
pub(super) struct DatasetUrls {
    /// URL of the hub. May have a path, for mirrors.
    pub endpoint: Url,
    pub dataset: HubDataset,
}

impl DatasetUrls {
    /// The URL that tells the commit of the revision, and nothing else of it.
    pub fn revision(&self) -> Url {
        let mut url = self.api("revision", &self.dataset.revision);
        url.set_query(Some("expand=sha"));
        url
    }

    /// The URL that lists a folder, or everything below it.
    pub fn tree(&self, commit: &str, folder: &Path, recursive: bool) -> Url {
        let mut url = self.api("tree", commit);
        if !folder.as_ref().is_empty() {
            self.extend(&mut url, [folder.as_ref()]);
        }
        url.set_query(Some(if recursive { "recursive=true&expand=false" } else { "recursive=false&expand=false" }));
        url
    }

    /// The URL that tells size and hash of given files.
    pub fn paths_info(&self, commit: &str) -> Url {
        self.api("paths-info", commit)
    }

    /// The URL of a file's bytes.
    pub fn resolve(&self, commit: &str, file: &Path) -> Url {
        let mut url = self.endpoint.clone();
        let repository = self.dataset.repository.split('/');
        self.extend(&mut url, ["datasets"].into_iter().chain(repository).chain(["resolve", commit]));
        self.extend(&mut url, file.as_ref().split('/'));
        url
    }

    fn api(&self, request: &str, revision: &str) -> Url {
        let mut url = self.endpoint.clone();
        let repository = self.dataset.repository.split('/');
        self.extend(&mut url, ["api", "datasets"].into_iter().chain(repository).chain([request, revision]));
        url
    }

    /// Appends each part as one segment: a slash inside a part becomes `%2F`.
    fn extend<'a>(&self, url: &mut Url, parts: impl IntoIterator<Item = &'a str>) {
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(parts);
        }
    }
}

/// Returns the query of the next page of a listing, from its header `Link`; `None` after the last page.
pub(super) fn next_query(headers: &HeaderMap) -> Option<String> {
    let links = headers.get(LINK)?.to_str().ok()?;
    let next = links.split(',').map(str::trim).find(|link| link.contains("rel=\"next\""))?;
    let (_, query) = next.strip_prefix('<')?.split_once('>')?.0.split_once('?')?;
    Some(query.to_owned())
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

/// Returns the commit of a revision.
pub(super) fn commit_of(body: &[u8]) -> Result<String, String> {
    let Revision { sha } = serde_json::from_slice(body).map_err(|e| format!("not JSON with a commit: {e}"))?;
    if is_commit(&sha) { Ok(sha) } else { Err(format!("{sha:?} is not a commit")) }
}

/// A file or folder of a listing.
#[derive(Deserialize)]
pub(super) struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    /// SHA-256 of the content.
    oid: String,
    size: u64,
}

impl Entry {
    /// Parses a page of a listing.
    pub fn parse_all(body: &[u8]) -> Result<Vec<Self>, String> {
        serde_json::from_slice(body).map_err(|e| format!("not a list of files: {e}"))
    }

    pub fn is_file(&self) -> bool {
        self.kind == "file"
    }

    pub fn path(&self) -> Result<Path, String> {
        Path::parse(&self.path).map_err(|_| format!("the name {:?} cannot be read", self.path))
    }

    /// The metadata of a file. The ETag is the hash of its content; the time is not reported.
    pub fn meta(&self) -> Result<ObjectMeta, String> {
        let (e_tag, size) = self.lfs.as_ref().map_or((&self.oid, self.size), |lfs| (&lfs.oid, lfs.size));
        if e_tag.is_empty() {
            return Err(format!("the file {:?} has no hash", self.path));
        }
        let (location, e_tag) = (self.path()?, Some(e_tag.clone()));
        Ok(ObjectMeta { location, size, e_tag, last_modified: DateTime::UNIX_EPOCH, version: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn each_request_has_its_url() {
        let dataset = HubDataset::parse("datasets/org/name@~parquet").unwrap();
        let urls = DatasetUrls { endpoint: "https://h/hf/".parse().unwrap(), dataset };
        let api = "https://h/hf/api/datasets/org/name";
        assert_eq!(urls.revision().as_str(), format!("{api}/revision/refs%2Fconvert%2Fparquet?expand=sha"));
        let folder = Path::from("a b/c");
        assert_eq!(
            urls.tree("C", &folder, true).as_str(),
            format!("{api}/tree/C/a%20b%2Fc?recursive=true&expand=false")
        );
        assert_eq!(
            urls.tree("C", &Path::default(), false).as_str(),
            format!("{api}/tree/C?recursive=false&expand=false")
        );
        assert_eq!(urls.paths_info("C").as_str(), format!("{api}/paths-info/C"));
        let resolve = "https://h/hf/datasets/org/name/resolve/C/a%20b/c/x%3Fy%23.gz";
        assert_eq!(urls.resolve("C", &Path::parse("a b/c/x?y#.gz").unwrap()).as_str(), resolve);
    }

    #[test]
    fn only_the_query_of_the_next_page_is_taken() {
        let next = |link: &str| next_query(&HeaderMap::from_iter([(LINK, link.parse().unwrap())]));
        let link = "<https://elsewhere/api/x?cursor=a%3D&limit=1>; rel=\"next\"";
        assert_eq!(next(link).as_deref(), Some("cursor=a%3D&limit=1"));
        assert_eq!(next(&format!("<https://h/?p=0>; rel=\"prev\", {link}")).as_deref(), Some("cursor=a%3D&limit=1"));
        assert_eq!(next("<https://h/?p=0>; rel=\"prev\""), None);
        assert_eq!(next_query(&HeaderMap::new()), None);
    }

    #[test]
    fn the_hash_of_a_files_content_is_its_etag() {
        let body = br#"[
            {"type": "directory", "oid": "t", "size": 0, "path": "data"},
            {"type": "file", "oid": "g", "size": 130, "path": "data/a b.parquet",
             "lfs": {"oid": "s", "size": 5000000000, "pointerSize": 130}, "xetHash": "x"},
            {"type": "file", "oid": "g", "size": 7, "path": "README.md"}
        ]"#;
        let entries = Entry::parse_all(body).unwrap();
        let metas: Vec<_> = entries.iter().filter(|e| e.is_file()).map(|e| e.meta().unwrap()).collect();
        let seen: Vec<_> = metas.iter().map(|m| (m.location.as_ref(), m.size, m.e_tag.as_deref())).collect();
        assert_eq!(seen, [("data/a b.parquet", 5_000_000_000, Some("s")), ("README.md", 7, Some("g"))]);
        for bad in ["{}", "[1]", "<html>", r#"[{"type": "file"}]"#] {
            assert!(Entry::parse_all(bad.as_bytes()).is_err(), "{bad}");
        }
        let meta = |text: &str| Entry::parse_all(text.as_bytes()).unwrap()[0].meta().unwrap_err();
        assert_eq!(meta(r#"[{"type": "file", "path": "../x", "oid": "g"}]"#), "the name \"../x\" cannot be read");
        assert_eq!(meta(r#"[{"type": "file", "path": "x"}]"#), "the file \"x\" has no hash");
    }

    #[test]
    fn a_revision_has_a_commit() {
        let body = format!("{{\"id\": \"org/name\", \"sha\": \"{COMMIT}\"}}");
        assert_eq!(commit_of(body.as_bytes()).as_deref(), Ok(COMMIT));
        assert!(commit_of(b"{\"sha\": \"main\"}").is_err() && commit_of(b"{}").is_err());
    }
}
