//! A small S3 client with which tests prepare and inspect buckets, independent of the program under test.
//!
//! ```text
//!   S3 ─► request ─► AwsAuthorizer (SigV4) ─► reqwest ─► 127.0.0.1 ─► S3Response { status, headers, body }
//! ```
//!
//! Every call sends one request without retries, so tests see exactly what the server answers.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use object_store::ClientOptions;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpClient, HttpConnector, HttpRequest, ReqwestConnector};
use quick_xml::Reader;
use quick_xml::events::Event;
use tokio::runtime::{Builder, Runtime};

use crate::network::Host;

/// An access key and its secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// `AWS_ACCESS_KEY_ID`.
    pub access: &'static str,
    /// `AWS_SECRET_ACCESS_KEY`.
    pub secret: &'static str,
}

/// A user with all permissions.
pub const ADMIN: Keys = Keys { access: "stillhouse-admin", secret: "stillhouse-secret" };
/// A user who may read and list.
pub const READER: Keys = Keys { access: "stillhouse-reader", secret: "stillhouse-reader-secret" };
/// A user unknown to every server.
pub const NOBODY: Keys = Keys { access: "stillhouse-nobody", secret: "stillhouse-nobody-secret" };
/// The region used in signatures.
pub const REGION: &str = "us-east-1";

/// Sets the environment of a command for a user of this endpoint, and removes all inherited AWS variables.
pub fn environment(command: &mut Command, endpoint: &str, keys: Keys) {
    let set = command.get_envs().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.chain(set).filter(|n| n.to_string_lossy().starts_with("AWS_")) {
        command.env_remove(name);
    }
    command
        .env("AWS_ACCESS_KEY_ID", keys.access)
        .env("AWS_SECRET_ACCESS_KEY", keys.secret)
        .env("AWS_ENDPOINT_URL", endpoint)
        .env("AWS_REGION", REGION)
        .env("AWS_ALLOW_HTTP", "true");
}

/// A server's response.
#[derive(Debug)]
pub struct S3Response {
    /// The HTTP status.
    pub status: u16,
    /// Headers by lower-case name.
    pub headers: BTreeMap<String, String>,
    /// The body.
    pub body: Vec<u8>,
}

impl S3Response {
    /// Asserts the status; shows the body on failure.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    /// The `<Code>` of an S3 error, or an empty string.
    pub fn code(&self) -> String {
        texts(&self.body, "Error", &["Code"]).pop().map(|mut t| t.remove(0)).unwrap_or_default()
    }
}

/// The client.
pub struct S3 {
    endpoint: String,
    credential: AwsCredential,
    keys: Keys,
    http: HttpClient,
    runtime: Runtime,
    host: Option<Host>,
}

impl S3 {
    /// Creates a client for the server at `http://host:port`.
    pub fn new(endpoint: &str, keys: Keys) -> Self {
        // Keep no idle connections: one to a killed server would fail the first request after its restart.
        let options = ClientOptions::new().with_allow_http(true).with_pool_max_idle_per_host(0);
        Self {
            endpoint: endpoint.to_owned(),
            credential: AwsCredential { key_id: keys.access.into(), secret_key: keys.secret.into(), token: None },
            keys,
            http: ReqwestConnector::default().connect(&options).unwrap(),
            runtime: Builder::new_current_thread().enable_all().build().unwrap(),
            host: None,
        }
    }

    /// The same client, connecting from a host of a [`crate::network::Network`].
    #[must_use]
    pub fn from_host(self, host: &Host) -> Self {
        Self { host: Some(host.clone()), ..self }
    }

    /// object_store's own client for a bucket, for operations that this client lacks. Run its futures with
    /// [`S3::wait`].
    pub fn store(&self, bucket: &str) -> Arc<AmazonS3> {
        let builder = AmazonS3Builder::new().with_endpoint(&self.endpoint).with_bucket_name(bucket);
        let builder = builder.with_access_key_id(self.keys.access).with_secret_access_key(self.keys.secret);
        Arc::new(builder.with_region(REGION).with_allow_http(true).build().unwrap())
    }

    /// Runs a future to completion.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        // The waiting thread opens the connections, so it must be in the host.
        let _inside = self.host.as_ref().map(Host::enter);
        self.runtime.block_on(future)
    }

    /// Sends a signed request. `target` is the percent-encoded path and query. Fails only if the connection fails.
    pub fn request(
        &self,
        method: &str,
        target: &str,
        headers: &[(&'static str, &str)],
        body: &[u8],
    ) -> Result<S3Response, String> {
        let mut request = HttpRequest::new(body.to_vec().into());
        *request.method_mut() = method.parse().unwrap();
        *request.uri_mut() = format!("{}{target}", self.endpoint).parse().unwrap();
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.parse().unwrap());
        }
        AwsAuthorizer::new(&self.credential, "s3", REGION).authorize(&mut request, None);
        self.wait(async {
            let response = self.http.execute(request).await.map_err(|e| e.to_string())?;
            let (head, body) = response.into_parts();
            let headers =
                head.headers.iter().map(|(n, v)| (n.to_string(), String::from_utf8_lossy(v.as_bytes()).into()));
            let body = body.bytes().await.map_err(|e| e.to_string())?.to_vec();
            Ok(S3Response { status: head.status.as_u16(), headers: headers.collect(), body })
        })
    }

    #[track_caller]
    fn call(&self, method: &str, target: &str, headers: &[(&'static str, &str)], body: &[u8]) -> S3Response {
        self.request(method, target, headers, body).unwrap_or_else(|e| panic!("{method} {target}: {e}"))
    }

    /// Creates a bucket, unless it exists.
    #[track_caller]
    pub fn create_bucket(&self, bucket: &str) {
        let answer = self.call("PUT", &format!("/{bucket}"), &[], b"");
        assert!([200, 409].contains(&answer.status), "{answer:?}");
    }

    /// Writes an object.
    #[track_caller]
    pub fn put(&self, bucket: &str, key: &str, content: &[u8]) {
        self.call("PUT", &format!("/{bucket}/{}", encoded(key, true)), &[], content).expect(200);
    }

    /// Writes an object unless it exists. Returns whether it was written.
    #[track_caller]
    pub fn put_new(&self, bucket: &str, key: &str, content: &[u8]) -> bool {
        let target = format!("/{bucket}/{}", encoded(key, true));
        let answer = self.call("PUT", &target, &[("if-none-match", "*")], content);
        assert!([200, 412].contains(&answer.status), "{answer:?}");
        answer.status == 200
    }

    /// Reads an object, or returns `None` if it does not exist.
    #[track_caller]
    pub fn get(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        let answer = self.call("GET", &format!("/{bucket}/{}", encoded(key, true)), &[], b"");
        if answer.status == 404 { None } else { Some(answer.expect(200).body) }
    }

    /// Returns the headers of an object, including `x-amz-meta-…`, or `None` if it does not exist.
    #[track_caller]
    pub fn head(&self, bucket: &str, key: &str) -> Option<BTreeMap<String, String>> {
        let answer = self.call("HEAD", &format!("/{bucket}/{}", encoded(key, true)), &[], b"");
        if answer.status == 404 { None } else { Some(answer.expect(200).headers) }
    }

    /// Removes an object if it exists.
    #[track_caller]
    pub fn delete(&self, bucket: &str, key: &str) {
        self.call("DELETE", &format!("/{bucket}/{}", encoded(key, true)), &[], b"").expect(204);
    }

    /// Lists the objects whose keys begin with `prefix`, with their sizes.
    #[track_caller]
    pub fn list(&self, bucket: &str, prefix: &str) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        let mut token = String::new();
        loop {
            let mut target = format!("/{bucket}?list-type=2&prefix={}", encoded(prefix, false));
            if !token.is_empty() {
                target += &format!("&continuation-token={}", encoded(&token, false));
            }
            let body = self.call("GET", &target, &[], b"").expect(200).body;
            let objects = texts(&body, "Contents", &["Key", "Size"]);
            found.extend(objects.into_iter().map(|t| (t[0].clone(), t[1].parse().unwrap())));
            token = texts(&body, "ListBucketResult", &["NextContinuationToken"]).remove(0).remove(0);
            if token.is_empty() {
                return found;
            }
        }
    }

    /// SHA-256 of every object whose key begins with `prefix`, by key; the counterpart of [`crate::files`].
    #[track_caller]
    pub fn files(&self, bucket: &str, prefix: &str) -> BTreeMap<String, String> {
        let keys = self.list(bucket, prefix).into_keys();
        keys.filter_map(|key| self.get(bucket, &key).map(|content| (key, crate::hex_sha256(&content)))).collect()
    }

    /// Creates a multipart upload and returns its id.
    #[track_caller]
    pub fn create_multipart_upload(&self, bucket: &str, key: &str) -> String {
        let answer = self.call("POST", &format!("/{bucket}/{}?uploads", encoded(key, true)), &[], b"").expect(200);
        // rclone uses a different element name.
        let named = |name| texts(&answer.body, name, &["UploadId"]).into_iter().flatten().next();
        named("InitiateMultipartUploadResult").or_else(|| named("InitiateMultipartUpload")).expect("an UploadId")
    }

    /// Lists the unfinished multipart uploads by key and id (up to 1,000).
    #[track_caller]
    pub fn list_multipart_uploads(&self, bucket: &str) -> Vec<(String, String)> {
        let answer = self.call("GET", &format!("/{bucket}?uploads"), &[], b"");
        if answer.status == 404 && answer.code() == "NoSuchUpload" {
            // rclone's answer if there are none.
            return Vec::new();
        }
        let body = answer.expect(200).body;
        let mut uploads = texts(&body, "Upload", &["Key", "UploadId"])
            .into_iter()
            .map(|mut t| (t.remove(0), t.remove(0)))
            .collect::<Vec<_>>();
        uploads.sort();
        uploads
    }
}

/// Percent-encodes a text for SigV4; a key keeps its slashes.
pub fn encoded(text: &str, is_key: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte.into()),
            b'/' if is_key => out.push('/'),
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

/// Texts of some children of every `parent` element; a missing child has an empty text.
fn texts(xml: &[u8], parent: &str, children: &[&str]) -> Vec<Vec<String>> {
    let mut reader = Reader::from_reader(xml);
    let mut buffer = Vec::new();
    let mut path: Vec<String> = Vec::new();
    let mut found: Vec<Vec<String>> = Vec::new();
    loop {
        let here = match path.as_slice() {
            [.., above, last] if above == parent => children.iter().position(|c| c == last),
            _ => None,
        };
        let mut said = |text: &str| {
            if let (Some(i), Some(texts)) = (here, found.last_mut()) {
                texts[i] += text;
            }
        };
        match reader.read_event_into(&mut buffer) {
            Ok(Event::Start(start)) => {
                path.push(String::from_utf8_lossy(start.local_name().as_ref()).into());
                if path.last().is_some_and(|name| name == parent) {
                    found.push(vec![String::new(); children.len()]);
                }
            }
            Ok(Event::End(_)) => drop(path.pop()),
            Ok(Event::Text(text)) => said(&text.decode().unwrap()),
            Ok(Event::GeneralRef(name)) => said(match name.decode().unwrap().as_ref() {
                "amp" => "&",
                "lt" => "<",
                "gt" => ">",
                "quot" | "#34" => "\"",
                "apos" | "#39" => "'",
                other => panic!("&{other};"),
            }),
            Ok(Event::Eof) | Err(_) => return found,
            Ok(_) => {}
        }
        buffer.clear();
    }
}
