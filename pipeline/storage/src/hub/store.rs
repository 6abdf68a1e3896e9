//! A data set of the hub as a store that is only read.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::url::Url;
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt, stream};
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use object_store::client::{HttpClient, HttpRequestBody};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use reqwest::redirect::Policy;
use stillhouse_schemas::hub_names::{HubDataset, is_commit};
use tokio::sync::OnceCell;

use super::api::{DatasetUrls, Entry, commit_of, next_query};
use super::{HubConfig, Token};
use crate::client::client_builder;
use crate::error::StorageError;
use crate::failure::{Outcome, find_transport_error};

const MAX_REDIRECTS: usize = 8;
/// Maximum number of files whose size and hash are remembered, of less than 1 KB each. Beyond it they are asked for again.
const MAX_KNOWN_FILES: usize = 100_000;
/// Maximum number of files whose URL of the content is remembered. A signed URL has some KB.
const MAX_CONTENT_URLS: usize = 1000;
/// Maximum number of entries of one listing.
const MAX_LISTED: usize = 10_000_000;
/// How long the URL of a content is used. The hub signs it for an hour or more.
const CONTENT_URL_LIFETIME: Duration = Duration::from_secs(600);

/// Returns a client that follows no redirect by itself.
pub(crate) fn connect(config: &HubConfig) -> Result<HttpClient, StorageError> {
    let mut client = client_builder().redirect(Policy::none());
    if !config.use_proxy {
        client = client.no_proxy();
    }
    let certificates = config.certificates()?;
    if !certificates.is_empty() {
        client = client.tls_built_in_root_certs(false);
        client = certificates.into_iter().fold(client, reqwest::ClientBuilder::add_root_certificate);
    }
    let client = client.build().map_err(|e| StorageError(format!("no connection to the hub can be made: {e}")))?;
    Ok(HttpClient::new(client))
}

/// One revision of a data set, as a store.
#[derive(Clone)]
pub(crate) struct HubStore(Arc<DatasetClient>);

struct DatasetClient {
    /// Sends requests with retries, and returns redirects.
    client: HttpClient,
    urls: DatasetUrls,
    token: Option<Token>,
    /// Folder of the hub's cache with the contents of this data set, named by their hashes.
    blobs: PathBuf,
    /// URL of the data set, for messages.
    name: String,
    commit: OnceCell<String>,
    files: Mutex<HashMap<Path, ObjectMeta>>,
    /// URLs of contents, which may be signed, and when they were received.
    contents: Mutex<HashMap<Path, (Url, Instant)>>,
}

/// A response of the hub or of a server of contents, whole.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    /// The URL that gave it, after redirects.
    url: Url,
}

impl HubStore {
    /// Opens a data set under its URL. Sends no request; `client` must not follow redirects.
    pub fn new(client: HttpClient, config: HubConfig, dataset: HubDataset, name: String) -> Self {
        let urls = DatasetUrls { endpoint: config.endpoint, dataset };
        let folder = format!("datasets--{}", urls.dataset.repository.replace('/', "--"));
        let blobs = config.cache.join(folder).join("blobs");
        let (token, commit) = (config.token, OnceCell::new());
        let (files, contents) = Default::default();
        Self(Arc::new(DatasetClient { client, urls, token, blobs, name, commit, files, contents }))
    }

    /// Lists a folder, or all below it, page by page. A folder that does not exist is empty, as in other stores.
    fn entries(&self, folder: &Path, recursive: bool) -> BoxStream<'static, Result<Entry>> {
        let first = Listing {
            client: Arc::clone(&self.0),
            folder: folder.clone(),
            recursive,
            next: Some(None),
            page: VecDeque::new(),
            listed: 0,
        };
        let entries = stream::try_unfold(first, async |mut listing| {
            while listing.page.is_empty() && listing.next.is_some() {
                listing.request_page().await?;
            }
            Ok(listing.page.pop_front().map(|entry| (entry, listing)))
        });
        entries.boxed()
    }
}

impl DatasetClient {
    /// The commit of the revision; the same in all requests of this store.
    async fn commit(&self) -> Result<&str> {
        let asked = self.commit.get_or_try_init(|| async {
            let revision = &self.urls.dataset.revision;
            if is_commit(revision) {
                return Ok(revision.clone());
            }
            let answer = self.send(Method::GET, self.urls.revision(), &[], Bytes::new()).await?;
            if !answer.status.is_success() {
                let problem = format!("status {}; check the name, and HF_ENDPOINT", answer.status.as_u16());
                return Err(self.invalid("the commit of the revision", &problem));
            }
            let commit =
                commit_of(&answer.body).map_err(|problem| self.invalid("the commit of the revision", &problem))?;
            tracing::debug!(name = self.name, commit, "the revision is this commit");
            Ok(commit)
        });
        asked.await.map(String::as_str)
    }

    /// The metadata of a file.
    async fn file(&self, location: &Path) -> Result<ObjectMeta> {
        if let Some(known) = lock(&self.files).get(location) {
            return Ok(known.clone());
        }
        let missing = || Error::NotFound { path: location.to_string(), source: "no such file".into() };
        if location.as_ref().is_empty() {
            return Err(missing());
        }
        let body = serde_json::json!({"paths": [location.as_ref()], "expand": false}).to_string();
        let headers = [(CONTENT_TYPE, "application/json".to_owned())];
        let url = self.urls.paths_info(self.commit().await?);
        let answer = self.expect_ok(self.send(Method::POST, url, &headers, body.into()).await?, location)?;
        let entries = Entry::parse_all(&answer.body).map_err(|problem| self.invalid(location.as_ref(), &problem))?;
        let found = entries.into_iter().find(|e| e.is_file() && e.path().is_ok_and(|path| path == *location));
        let meta = found.ok_or_else(missing)?.meta().map_err(|problem| self.invalid(location.as_ref(), &problem))?;
        remember(&self.files, MAX_KNOWN_FILES, location, meta.clone());
        Ok(meta)
    }

    /// Returns bytes of a file, which are not none.
    async fn bytes(&self, location: &Path, meta: &ObjectMeta, range: &Range<u64>) -> Result<Bytes> {
        if let Some(cached) = self.cached(meta, range).await {
            return Ok(cached);
        }
        let headers = [(RANGE, format!("bytes={}-{}", range.start, range.end - 1))];
        let known = lock(&self.contents).get(location).cloned();
        let fresh = known.filter(|(_, received)| received.elapsed() < CONTENT_URL_LIFETIME);
        let mut known_url = fresh.map(|(url, _)| url);
        let mut may_ask_again = true;
        loop {
            let url = match known_url.take() {
                Some(url) => url,
                None => self.urls.resolve(self.commit().await?, location),
            };
            let answer = match self.send(Method::GET, url, &headers, Bytes::new()).await {
                Ok(answer) => self.expect_ok(answer, location)?,
                // its URL may have expired: the hub gives a new one
                Err(error) if is_refused_content(&error) && std::mem::take(&mut may_ask_again) => {
                    tracing::debug!(name = self.name, %location, "asking for the URL of the content again");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if answer.url.origin() != self.urls.endpoint.origin() {
                remember(&self.contents, MAX_CONTENT_URLS, location, (answer.url.clone(), Instant::now()));
            }
            return self.part(location, meta, range, answer);
        }
    }

    /// Reads bytes from the hub's cache; `None` unless it has the whole file.
    async fn cached(&self, meta: &ObjectMeta, range: &Range<u64>) -> Option<Bytes> {
        let hash = meta.e_tag.as_deref().filter(|hash| hash.bytes().all(|b| b.is_ascii_alphanumeric()))?;
        let (path, size, range) = (self.blobs.join(hash), meta.size, range.clone());
        tokio::task::spawn_blocking(move || read_if_whole(&path, size, &range)).await.ok()?
    }

    /// Takes the range from an answer that has it, or the whole file. A wrong length is an error.
    fn part(&self, location: &Path, meta: &ObjectMeta, range: &Range<u64>, answer: Answer) -> Result<Bytes> {
        let got = answer.body.len() as u64;
        if answer.status == StatusCode::PARTIAL_CONTENT {
            let said = answer.headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok()).unwrap_or_default();
            let expected = format!("bytes {}-{}/{}", range.start, range.end - 1, meta.size);
            if said == expected && got == range.end - range.start {
                return Ok(answer.body);
            }
            let problem = format!("{expected} are expected, and {said:?} came with {got} bytes");
            return Err(self.invalid(location.as_ref(), &problem));
        }
        if got == meta.size {
            return Ok(answer.body.slice(range.start as usize..range.end as usize));
        }
        Err(self.invalid(location.as_ref(), &format!("the file has {} bytes, and {got} came", meta.size)))
    }

    /// Sends a request and follows its redirects. The token goes to the hub only.
    async fn send(
        &self,
        method: Method,
        mut url: Url,
        headers: &[(HeaderName, String)],
        body: Bytes,
    ) -> Result<Answer> {
        let endpoint = self.urls.endpoint.origin();
        // a server that a redirect names must not choose requests that carry the token
        let mut at_endpoint = true;
        for _ in 0..=MAX_REDIRECTS {
            at_endpoint &= url.origin() == endpoint;
            let mut request = http::Request::builder().method(method.clone()).uri(url.as_str());
            for (name, value) in headers {
                request = request.header(name, value);
            }
            request = request.header(ACCEPT_ENCODING, "identity");
            let mut request = request.body(HttpRequestBody::from(body.clone())).map_err(|e| self.error(Box::new(e)))?;
            if let Some(token) = self.token.as_ref().filter(|_| at_endpoint) {
                let mut value = HeaderValue::from_str(&token.bearer()).map_err(|e| self.error(Box::new(e)))?;
                value.set_sensitive(true);
                request.headers_mut().insert(AUTHORIZATION, value);
            }
            let response = self.client.execute(request).await.map_err(|e| self.error(Box::new(e)))?;
            let (parts, body) = response.into_parts();
            if !parts.status.is_redirection() {
                let chunks: Vec<Bytes> =
                    body.bytes_stream().try_collect().await.map_err(|e| self.error(Box::new(e)))?;
                let body = if chunks.len() == 1 { chunks[0].clone() } else { chunks.concat().into() };
                return Ok(Answer { status: parts.status, headers: parts.headers, body, url });
            }
            let to = parts.headers.get(LOCATION).and_then(|to| to.to_str().ok()).and_then(|to| url.join(to).ok());
            let Some(next) = to.filter(|next| matches!(next.scheme(), "http" | "https")) else {
                return Err(self.invalid("a redirect", "it leads nowhere"));
            };
            if url.scheme() == "https" && next.scheme() == "http" {
                return Err(self.invalid("a redirect", "it leads from https to http"));
            }
            url = next;
        }
        Err(self.invalid("a redirect", &format!("there are more than {MAX_REDIRECTS}")))
    }

    /// Returns a success, and an error for every other status that the transport returns.
    fn expect_ok(&self, answer: Answer, location: &Path) -> Result<Answer> {
        if answer.status.is_success() {
            return Ok(answer);
        }
        let text = format!("{} {}", answer.status.as_u16(), String::from_utf8_lossy(&answer.body));
        match answer.status {
            StatusCode::NOT_FOUND => Err(Error::NotFound { path: location.to_string(), source: text.into() }),
            _ => Err(self.error(text.into())),
        }
    }

    /// Remembers a file of a listing.
    fn listed(&self, entry: &Entry) -> Result<ObjectMeta> {
        let meta = entry.meta().map_err(|problem| self.invalid("a list of files", &problem))?;
        remember(&self.files, MAX_KNOWN_FILES, &meta.location, meta.clone());
        Ok(meta)
    }

    fn invalid(&self, what: &str, problem: &str) -> Error {
        self.error(format!("the hub's answer makes no sense: {what}: {problem}").into())
    }

    fn error(&self, source: Box<dyn std::error::Error + Send + Sync>) -> Error {
        Error::Generic { store: "hub", source }
    }

    fn read_only(&self, operation: &str) -> Error {
        Error::NotImplemented { operation: operation.to_owned(), implementer: self.name.clone() }
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a value under a file. If there are `most` of them, the others are forgotten.
fn remember<T>(shared: &Mutex<HashMap<Path, T>>, most: usize, location: &Path, value: T) {
    let mut all = lock(shared);
    if all.len() >= most && !all.contains_key(location) {
        all.clear();
    }
    all.insert(location.clone(), value);
}

/// Whether a server of contents refused a request.
fn is_refused_content(error: &Error) -> bool {
    find_transport_error(error).is_some_and(|failure| {
        !failure.request.at_store && !failure.transient && matches!(failure.outcome, Outcome::Refused(_))
    })
}

/// Reads bytes of a file; `None` unless the file has this size.
#[expect(clippy::disallowed_methods, reason = "called on a thread that may block")]
fn read_if_whole(path: &std::path::Path, size: u64, range: &Range<u64>) -> Option<Bytes> {
    let file = File::open(path).ok()?;
    if file.metadata().ok()?.len() != size {
        return None;
    }
    let mut bytes = vec![0; usize::try_from(range.end - range.start).ok()?];
    file.read_exact_at(&mut bytes, range.start).ok()?;
    Some(Bytes::from(bytes))
}

/// A listing in progress.
struct Listing {
    client: Arc<DatasetClient>,
    folder: Path,
    recursive: bool,
    /// The query of the next page; `Some(None)` before the first one, `None` after the last one.
    next: Option<Option<String>>,
    page: VecDeque<Entry>,
    /// Number of entries so far.
    listed: usize,
}

impl Listing {
    async fn request_page(&mut self) -> Result<()> {
        let Some(query) = self.next.take() else { return Ok(()) };
        let Self { client, folder, recursive, .. } = self;
        let mut url = client.urls.tree(client.commit().await?, folder, *recursive);
        if let Some(query) = &query {
            url.set_query(Some(query));
        }
        let answer = client.send(Method::GET, url, &[], Bytes::new()).await?;
        let invalid = |problem: &str| client.invalid(&format!("the list of the folder {:?}", folder.as_ref()), problem);
        // the folder does not exist; a further page that does not exist would cut the list short
        if answer.status == StatusCode::NOT_FOUND && query.is_none() {
            return Ok(());
        }
        if !answer.status.is_success() {
            return Err(invalid(&format!("status {}", answer.status.as_u16())));
        }
        let page = Entry::parse_all(&answer.body).map_err(|problem| invalid(&problem))?;
        self.listed += page.len();
        if self.listed > MAX_LISTED {
            return Err(invalid(&format!("it has more than {MAX_LISTED} entries; name a folder in it")));
        }
        let next = next_query(&answer.headers);
        if next.is_some() && (next == query || page.is_empty()) {
            return Err(invalid("its pages do not end"));
        }
        (self.page, self.next) = (page.into(), next.map(Some));
        Ok(())
    }
}

impl fmt::Debug for HubStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name)
    }
}

impl fmt::Display for HubStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name)
    }
}

#[async_trait]
impl ObjectStore for HubStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let meta = self.0.file(location).await?;
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            Some(range) => range.as_range(meta.size).map_err(|e| self.0.error(Box::new(e)))?,
            None => 0..meta.size,
        };
        let bytes = match options.head || range.is_empty() {
            true => Bytes::new(),
            false => self.0.bytes(location, &meta, &range).await?,
        };
        let payload = GetResultPayload::Stream(stream::once(async { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes: Attributes::default() })
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let client = Arc::clone(&self.0);
        let files = self.entries(&prefix.cloned().unwrap_or_default(), true).try_filter_map(move |entry| {
            let file = entry.is_file().then(|| client.listed(&entry)).transpose();
            std::future::ready(file)
        });
        files.boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let (mut common_prefixes, mut objects) = (Vec::new(), Vec::new());
        let mut entries = self.entries(&prefix.cloned().unwrap_or_default(), false);
        while let Some(entry) = entries.try_next().await? {
            match entry.is_file() {
                true => objects.push(self.0.listed(&entry)?),
                false => {
                    common_prefixes.push(entry.path().map_err(|problem| self.0.invalid("a list of files", &problem))?)
                }
            }
        }
        Ok(ListResult { common_prefixes, objects })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(self.0.read_only("put"))
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(self.0.read_only("put_multipart"))
    }

    fn delete_stream(&self, _: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let refused = self.0.read_only("delete");
        stream::once(async { Err(refused) }).boxed()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(self.0.read_only("copy"))
    }
}
