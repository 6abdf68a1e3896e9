//! Multipart uploads beyond object_store's interface: listing unfinished uploads, object metadata, and conditional
//! completion.
//!
//! Amazon S3 and Google Cloud Storage use the same XML for this. Azure has no uploads to list: its uncommitted blocks
//! expire after a week.

use std::fmt;

use async_trait::async_trait;
use bytes::{Buf, Bytes};
use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use futures::future::BoxFuture;
use http::{HeaderValue, Method, StatusCode, header};
use object_store::aws::{AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody, HttpResponse};
use object_store::gcp::GcpCredentialProvider;
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{Error, Result};
use serde::Deserialize;

/// An upload that was begun, but neither completed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// Path of the object that it would create.
    pub path: Path,
    /// Id of the upload.
    pub id: String,
    /// Time when it was begun, if the store reports it.
    pub initiated: Option<DateTime<Utc>>,
}

/// The multipart uploads of a bucket. Their ids are those of [`object_store::multipart::MultipartStore`].
#[async_trait]
pub trait Uploads: fmt::Debug + Send + Sync {
    /// Lists uploads to keys below a folder; the empty path lists all. Costs one request per thousand uploads.
    ///
    /// # Errors
    /// As [`object_store::ObjectStore::list`].
    async fn list(&self, prefix: &Path) -> Result<Vec<Upload>>;

    /// Begins an upload for an object with metadata (names in lower case, values in ASCII).
    ///
    /// # Errors
    /// As [`object_store::multipart::MultipartStore::create_multipart`].
    async fn create(&self, path: &Path, metadata: &[(&str, &str)]) -> Result<String>;

    /// Creates the object from its parts, but only if it does not exist yet. Returns the ETag.
    ///
    /// # Errors
    /// [`Error::Precondition`] or [`Error::AlreadyExists`] if the object exists, perhaps created by an earlier attempt
    /// whose response was lost. [`Error::NotFound`] if the upload does not exist, perhaps because it was completed
    /// already.
    async fn complete_if_absent(&self, path: &Path, id: &str, parts: &[PartId]) -> Result<Option<String>>;
}

/// Signs requests.
pub(super) enum Signer {
    Aws { credentials: AwsCredentialProvider, region: String },
    Google(GcpCredentialProvider),
    Anonymous,
}

/// Uploads of a store that uses S3's XML.
pub(super) struct XmlUploads {
    pub client: HttpClient,
    /// URL of the bucket, without a trailing slash.
    pub base: String,
    pub signer: Signer,
    pub name: String,
}

impl fmt::Debug for XmlUploads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uploads({})", self.name)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    #[serde(default)]
    is_truncated: bool,
    #[serde(default)]
    next_key_marker: String,
    #[serde(default)]
    next_upload_id_marker: String,
    #[serde(default, rename = "Upload")]
    uploads: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    key: String,
    upload_id: String,
    initiated: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct UploadCreated {
    upload_id: String,
}

#[derive(Deserialize)]
struct Completed {
    #[serde(rename = "ETag")]
    e_tag: Option<String>,
}

#[async_trait]
impl Uploads for XmlUploads {
    async fn list(&self, prefix: &Path) -> Result<Vec<Upload>> {
        let prefix = if prefix.as_ref().is_empty() { String::new() } else { format!("{prefix}/") };
        let mut found = Vec::new();
        let mut marker = (String::new(), String::new());
        loop {
            let query = [
                ("uploads", ""),
                ("prefix", &prefix),
                ("max-uploads", "1000"),
                ("key-marker", &marker.0),
                ("upload-id-marker", &marker.1),
            ];
            let query = query.into_iter().filter(|(name, value)| *name == "uploads" || !value.is_empty());
            let response = self.send(Method::GET, &Path::default(), query, &[], String::new()).await?;
            let page: Page = self.read(response).await?;
            for entry in page.uploads {
                // object_store cannot represent such keys, so they are not ours
                let Ok(path) = Path::parse(&entry.key) else { continue };
                if path.as_ref().starts_with(&prefix) {
                    let initiated = entry.initiated.and_then(|t| Some(DateTime::parse_from_rfc3339(&t).ok()?.to_utc()));
                    found.push(Upload { path, id: entry.upload_id, initiated });
                }
            }
            let next = (page.next_key_marker, page.next_upload_id_marker);
            if !page.is_truncated || next == marker {
                return Ok(found);
            }
            marker = next;
        }
    }

    async fn create(&self, path: &Path, metadata: &[(&str, &str)]) -> Result<String> {
        let prefix = if matches!(self.signer, Signer::Google(_)) { "x-goog-meta-" } else { "x-amz-meta-" };
        let headers: Vec<_> = metadata.iter().map(|(name, value)| (format!("{prefix}{name}"), *value)).collect();
        let response = self.send(Method::POST, path, [("uploads", "")], &headers, String::new()).await?;
        Ok(self.read::<UploadCreated>(response).await?.upload_id)
    }

    async fn complete_if_absent(&self, path: &Path, id: &str, parts: &[PartId]) -> Result<Option<String>> {
        let mut body = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
        for (i, part) in parts.iter().enumerate() {
            let tag = quick_xml::escape::escape(part.content_id.as_str());
            body += &format!("<Part><PartNumber>{}</PartNumber><ETag>{tag}</ETag></Part>", i + 1);
        }
        body += "</CompleteMultipartUpload>";
        // Google supports conditions for simple uploads only, so the commit record must detect conflicts.
        let conditions = match self.signer {
            Signer::Google(_) => Vec::new(),
            _ => vec![(header::IF_NONE_MATCH.to_string(), "*")],
        };
        let response = self.send(Method::POST, path, [("uploadId", id)], &conditions, body).await?;
        Ok(self.read::<Completed>(response).await?.e_tag)
    }
}

impl XmlUploads {
    /// Signs and sends a request. Boxed for the compiler, since the futures of signers nest deeply.
    fn send<'a>(
        &'a self,
        method: Method,
        path: &'a Path,
        query: impl IntoIterator<Item = (&'a str, &'a str)>,
        headers: &'a [(String, &'a str)],
        body: String,
    ) -> BoxFuture<'a, Result<HttpResponse>> {
        let request = self.request(method, path, query, headers, body);
        Box::pin(async move {
            let mut request = request?;
            match &self.signer {
                Signer::Aws { credentials, region } => {
                    let credential = credentials.get_credential().await?;
                    AwsAuthorizer::new(&credential, "s3", region).authorize(&mut request, None);
                }
                Signer::Google(credentials) => {
                    let bearer = format!("Bearer {}", credentials.get_credential().await?.bearer);
                    let mut value = HeaderValue::from_str(&bearer).map_err(|e| self.error(e))?;
                    value.set_sensitive(true);
                    request.headers_mut().insert(header::AUTHORIZATION, value);
                }
                Signer::Anonymous => {}
            }
            let response = self.client.execute(request).await.map_err(|e| self.error(e))?;
            let status = response.status();
            if status.is_success() {
                return Ok(response);
            }
            let text = self.bytes(response).await?;
            let source = format!("{} {}", status.as_u16(), String::from_utf8_lossy(&text)).into();
            let path = path.to_string();
            Err(match status {
                StatusCode::NOT_FOUND => Error::NotFound { path, source },
                StatusCode::CONFLICT => Error::AlreadyExists { path, source },
                StatusCode::PRECONDITION_FAILED => Error::Precondition { path, source },
                _ => Error::Generic { store: "S3", source },
            })
        })
    }

    fn request<'a>(
        &self,
        method: Method,
        path: &Path,
        query: impl IntoIterator<Item = (&'a str, &'a str)>,
        headers: &[(String, &str)],
        body: String,
    ) -> Result<HttpRequest> {
        // signatures cover the encoded path, so it is encoded exactly as they require
        let folders = path.parts().map(|part| format!("/{}", percent_encode(part.as_ref())));
        let query = query.into_iter().map(|(name, value)| match value {
            "" => percent_encode(name),
            value => format!("{}={}", percent_encode(name), percent_encode(value)),
        });
        let url = format!("{}{}?{}", self.base, folders.collect::<String>(), query.collect::<Vec<_>>().join("&"));
        let mut request = http::Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        request = request.header(header::CONTENT_LENGTH, body.len());
        request.body(HttpRequestBody::from(body)).map_err(|e| self.error(e))
    }

    async fn bytes(&self, response: HttpResponse) -> Result<Bytes> {
        let chunks: Vec<Bytes> = response.into_body().bytes_stream().try_collect().await.map_err(|e| self.error(e))?;
        Ok(chunks.concat().into())
    }

    async fn read<T: for<'de> Deserialize<'de>>(&self, response: HttpResponse) -> Result<T> {
        let bytes = self.bytes(response).await?;
        quick_xml::de::from_reader(bytes.reader()).map_err(|e| self.error(e))
    }

    fn error(&self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Generic { store: "S3", source: Box::new(source) }
    }
}

/// Percent-encodes all but letters, digits, `-`, `.`, `_` and `~`, as signatures require.
fn percent_encode(text: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~');
    text.bytes().map(|b| if keep(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
