//! Compares URLs with configured prefixes.

use std::net::IpAddr;

use stillhouse_schemas::storage::Scheme;
use url::{Host, Url};

use crate::storage::StoreUrl;

/// Whether the text is the URL of a store rather than a path.
pub(super) fn is_url(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| scheme != "file")
}

/// All URLs of a store that begin with the same path components.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Prefix {
    scheme: Scheme,
    /// `None` means all buckets or hosts.
    bucket: Option<Bucket>,
    parts: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Bucket {
    /// Bucket names are compared literally. Of a data set of the hub, in all revisions: `datasets/org/name`.
    Named(String),
    /// All data sets of an organisation of the hub: `datasets/org/`.
    Organisation(String),
    /// A host as the `url` crate normalizes it, and the effective port.
    Server(Host, Option<u16>),
    /// An invalid host, where nothing is allowed.
    Invalid,
}

impl Prefix {
    /// Parses an entry of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(scheme) = text.strip_suffix("://*") {
            let any = if scheme == "hf" { "datasets/any/any" } else { "any" };
            let any = StoreUrl::parse(&format!("{scheme}://{any}")).ok_or("is not the URL of a store")??;
            return Ok(Self { scheme: any.scheme, bucket: None, parts: Vec::new() });
        }
        if let Some(organisation) = text.strip_prefix("hf://").and_then(|rest| rest.strip_suffix('*')) {
            StoreUrl::parse(&format!("hf://{organisation}name")).ok_or("is not the URL of a store")??;
            let bucket = Some(Bucket::Organisation(organisation.to_owned()));
            return Ok(Self { scheme: Scheme::Hf, bucket, parts: Vec::new() });
        }
        let url = StoreUrl::parse(text).ok_or("is not the URL of a store")??;
        if url.key.contains(['*', '?', '[']) {
            return Err("is taken as it is, and cannot hold *, ? and [".into());
        }
        if url.scheme == Scheme::Hf && url.bucket.contains('@') {
            return Err(
                "names a revision, and a data set is allowed in all of them; leave out @ and the revision".into()
            );
        }
        let prefix = Self::from_url(&url);
        if prefix.bucket == Some(Bucket::Invalid) {
            return Err("its host is none that can be asked".into());
        }
        Ok(prefix)
    }

    /// The prefix that equals this URL.
    pub fn from_url(url: &StoreUrl) -> Self {
        let bucket = match url.scheme {
            Scheme::Http | Scheme::Https => server(url),
            Scheme::Hf => Bucket::Named(url.bucket.split('@').next().unwrap_or_default().to_owned()),
            Scheme::S3 | Scheme::Gs | Scheme::Az => Bucket::Named(url.bucket.clone()),
        };
        let parts = url.path().parts().map(|part| part.as_ref().to_owned()).collect();
        Self { scheme: url.scheme, bucket: Some(bucket), parts }
    }

    pub fn is_read_only(&self) -> bool {
        self.scheme.is_read_only()
    }

    /// The IP address, if the URL names the web server by one.
    pub fn address(&self) -> Option<IpAddr> {
        match &self.bucket {
            Some(Bucket::Server(Host::Ipv4(address), _)) => Some(IpAddr::V4(*address)),
            Some(Bucket::Server(Host::Ipv6(address), _)) => Some(IpAddr::V6(*address)),
            _ => None,
        }
    }

    /// Whether another prefix lies within this one.
    pub fn contains(&self, other: &Self) -> bool {
        let bucket = match (&self.bucket, &other.bucket) {
            (_, Some(Bucket::Invalid)) => false,
            (None, _) => true,
            (Some(Bucket::Organisation(all)), Some(Bucket::Named(one))) => one.starts_with(all.as_str()),
            (own, other) => own == other,
        };
        self.scheme == other.scheme && bucket && other.parts.starts_with(&self.parts)
    }
}

fn server(url: &StoreUrl) -> Bucket {
    let parsed = Url::parse(&url.root().to_string()).ok();
    match parsed.as_ref().and_then(|u| Some((u.host()?.to_owned(), u.port_or_known_default()))) {
        Some((host, port)) => Bucket::Server(host, port),
        None => Bucket::Invalid,
    }
}

/// Whether two endpoint URLs name the same service.
pub(super) fn same_endpoint(one: &str, other: &str) -> bool {
    let parts = |text: &str| {
        let url = Url::parse(text).ok()?;
        let plain =
            url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
        let host = url.host()?.to_owned();
        plain.then(|| {
            (url.scheme().to_owned(), host, url.port_or_known_default(), url.path().trim_end_matches('/').to_owned())
        })
    };
    parts(one).is_some_and(|one| parts(other) == Some(one))
}
