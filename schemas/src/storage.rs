//! Options of object stores, and the syntax of their URLs.
//!
//! Credentials are not options: they come from the environment or from the AWS profile files, so that a job file can be
//! shown to anybody. A URL or an endpoint that contains credentials is refused, and the message does not repeat it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::hub_names::HubDataset;

/// Options of object stores. Every key is optional. `input.storage` and `output.storage` replace single keys of `storage`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "job", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Storage {
    /// URL of an S3-compatible service. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS profile, then AWS itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Region of the bucket. Default: AWS_REGION, AWS_DEFAULT_REGION, the AWS profile, then us-east-1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9-]+$")))]
    pub region: Option<String>,
    /// Whether the bucket is in the path (`host/bucket/key`) and not in the host name. Default: true with an endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_style: Option<bool>,
    /// Whether requests are sent without credentials, as public buckets allow. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anonymous: Option<bool>,
    /// What the store of the output must support. Default: require.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conditional_put: Option<ConditionalPut>,
    /// Limits of retries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Size of the parts of an upload, in megabytes (10^6 bytes; 5 means 5 MiB). A part is held in memory. Default: 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 5, max = 512)))]
    pub part_megabytes: Option<u32>,
    /// Parts of one upload that are sent concurrently, each in memory. Default: 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 64)))]
    pub parts_at_once: Option<u32>,
}

/// What the store of the output must support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "job", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ConditionalPut {
    /// The store must support `If-None-Match: *`. One that ignores it is refused before the job starts.
    #[default]
    Require,
    /// Nothing: you guarantee that only one process writes to the output at a time. Prints a warning if the store ignores the condition.
    TrustSingleWriter,
}

/// Limits of retries after throttling, server errors, timeouts and incomplete bodies.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "job", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Maximum number of attempts of a request. Default: 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 1000)))]
    pub max_attempts: Option<u32>,
    /// Maximum total time of a request, in seconds; signatures are valid for 15 minutes. Default: 180.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 600)))]
    pub longest_seconds: Option<u32>,
    /// Longest wait before the second attempt, in milliseconds. It doubles with each attempt. Default: 100.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 60_000)))]
    pub first_backoff_milliseconds: Option<u32>,
    /// Longest wait between attempts, in milliseconds, unless the store asks for more. Default: 15000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 600_000)))]
    pub largest_backoff_milliseconds: Option<u32>,
    /// Timeout of one attempt with its body, in seconds. Default: 60.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "job", schemars(range(min = 1, max = 600)))]
    pub request_timeout_seconds: Option<u32>,
}

/// [`Retry`] with the defaults filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryLimits {
    /// Maximum number of attempts of a request.
    pub max_attempts: u32,
    /// Maximum total time of a request, over all attempts.
    pub max_elapsed: Duration,
    /// Maximum wait before the second attempt.
    pub first_backoff: Duration,
    /// Maximum wait between attempts.
    pub max_backoff: Duration,
    /// Timeout of one attempt.
    pub request_timeout: Duration,
}

impl Storage {
    /// Whether no option is set.
    pub fn is_unset(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these options, with those of `base` for every option that is not set.
    #[must_use]
    pub fn with_defaults_from(&self, base: &Self) -> Self {
        let retry = match (&self.retry, &base.retry) {
            (Some(own), Some(base)) => Some(own.with_defaults_from(base)),
            (own, base) => own.clone().or_else(|| base.clone()),
        };
        Self {
            endpoint: self.endpoint.clone().or_else(|| base.endpoint.clone()),
            region: self.region.clone().or_else(|| base.region.clone()),
            path_style: self.path_style.or(base.path_style),
            anonymous: self.anonymous.or(base.anonymous),
            conditional_put: self.conditional_put.or(base.conditional_put),
            retry,
            part_megabytes: self.part_megabytes.or(base.part_megabytes),
            parts_at_once: self.parts_at_once.or(base.parts_at_once),
        }
    }

    /// Returns the retry limits, with the defaults filled in.
    pub fn retry_limits(&self) -> RetryLimits {
        let retry = self.retry.clone().unwrap_or_default();
        let milliseconds = |value: Option<u32>, default| Duration::from_millis(value.unwrap_or(default).into());
        let seconds = |value: Option<u32>, default| Duration::from_secs(value.unwrap_or(default).into());
        RetryLimits {
            max_attempts: retry.max_attempts.unwrap_or(10),
            max_elapsed: seconds(retry.longest_seconds, 180),
            first_backoff: milliseconds(retry.first_backoff_milliseconds, 100),
            max_backoff: milliseconds(retry.largest_backoff_milliseconds, 15_000),
            request_timeout: seconds(retry.request_timeout_seconds, 60),
        }
    }

    /// Bytes of a part of an upload; at least 5 MiB, the minimum of the stores.
    pub fn part_bytes(&self) -> usize {
        (self.part_megabytes.unwrap_or(8) as usize * 1_000_000).max(5 << 20)
    }

    /// Maximum concurrent parts of one upload.
    pub fn parts_at_once(&self) -> usize {
        self.parts_at_once.unwrap_or(4).max(1) as usize
    }

    /// What the output's store must support.
    pub fn conditional_put(&self) -> ConditionalPut {
        self.conditional_put.unwrap_or_default()
    }
}

impl Retry {
    fn with_defaults_from(&self, base: &Self) -> Self {
        Self {
            max_attempts: self.max_attempts.or(base.max_attempts),
            longest_seconds: self.longest_seconds.or(base.longest_seconds),
            first_backoff_milliseconds: self.first_backoff_milliseconds.or(base.first_backoff_milliseconds),
            largest_backoff_milliseconds: self.largest_backoff_milliseconds.or(base.largest_backoff_milliseconds),
            request_timeout_seconds: self.request_timeout_seconds.or(base.request_timeout_seconds),
        }
    }
}

/// Kinds of store that a URL can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scheme {
    /// Amazon S3 and services that use its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
    /// Data sets of the Hugging Face hub, read only.
    Hf,
    /// A plain web server, read only.
    Http,
    /// A web server over TLS, read only.
    Https,
}

impl Scheme {
    /// The canonical scheme before `://`; `s3a`, `gcs`, `azure`, `abfs` and `abfss` are aliases.
    pub fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
            Self::Hf => "hf",
            Self::Http => "http",
            Self::Https => "https",
        }
    }

    /// Whether nothing can be written to stores of this kind.
    pub fn is_read_only(self) -> bool {
        self.is_web() || self == Self::Hf
    }

    /// Whether the store is a web server, in whose URLs `?` begins a query and `%41` is an A.
    pub fn is_web(self) -> bool {
        matches!(self, Self::Http | Self::Https)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(match text.to_ascii_lowercase().as_str() {
            "s3" | "s3a" => Self::S3,
            "gs" | "gcs" => Self::Gs,
            "az" | "azure" | "abfs" | "abfss" => Self::Az,
            "hf" => Self::Hf,
            "http" => Self::Http,
            "https" => Self::Https,
            _ => return None,
        })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The parts of a store's URL, as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UrlParts<'a> {
    /// Kind of store.
    pub scheme: Scheme,
    /// Bucket or container; for a web server the host, with the port if one is given; for the hub
    /// `datasets/org/name[@revision]`.
    pub bucket: &'a str,
    /// Everything after the bucket and its slash. May be empty, and may contain globs.
    pub key: &'a str,
}

const CREDENTIALS: &str = "credentials come from the environment or the AWS profile files, never from a URL";

/// Splits the URL of a store; `None` for a path on this machine, such as `data/x` and `file:///data/x`.
///
/// In `s3`, `gs` and `az` URLs a `?` is a glob character, unless `name=` follows it: then it begins a query, which only
/// signed URLs have.
///
/// # Errors
/// If the URL is invalid. The message repeats only its scheme.
pub fn split_url(text: &str) -> Option<Result<UrlParts<'_>, String>> {
    let (scheme, rest) = text.split_once("://")?;
    if scheme == "file" {
        return None;
    }
    let Some(known) = Scheme::parse(scheme) else {
        return Some(Err("no store of this kind is known; valid: s3, gs, az, hf, http, https, file, or a path".into()));
    };
    let (bucket, key) = match known {
        Scheme::Hf => HubDataset::split_key(rest),
        _ => rest.split_once('/').unwrap_or((rest, "")),
    };
    Some(check(known, bucket, key).map(|()| UrlParts { scheme: known, bucket, key }))
}

fn check(scheme: Scheme, bucket: &str, key: &str) -> Result<(), String> {
    if bucket.contains('@') && scheme != Scheme::Hf {
        return Err(format!("holds a user name or an account before @: {CREDENTIALS}; valid: {scheme}://bucket/key"));
    }
    if bucket.contains('?') || has_query(scheme, key) {
        return Err(format!("holds a query: {CREDENTIALS}; leave out ? and what follows"));
    }
    if bucket.contains('#') || key.contains('#') {
        return Err("holds a fragment; leave out # and what follows (the glob ? finds a # in a name)".into());
    }
    if scheme == Scheme::Hf {
        return HubDataset::parse(bucket).map(drop);
    }
    if bucket.is_empty() {
        return Err(format!("names no {}; valid: {scheme}://{}/key", location_noun(scheme), location_noun(scheme)));
    }
    let is_bucket_char = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let is_host_char = |b: u8| is_bucket_char(b) || matches!(b, b':' | b'[' | b']');
    if !bucket.bytes().all(|b| if scheme.is_web() { is_host_char(b) } else { is_bucket_char(b) }) {
        return Err(format!("its {} has characters that none can have", location_noun(scheme)));
    }
    Ok(())
}

fn location_noun(scheme: Scheme) -> &'static str {
    if scheme.is_web() { "host" } else { "bucket" }
}

fn has_query(scheme: Scheme, key: &str) -> bool {
    let is_named = |after: &str| {
        let name = after.bytes().take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')).count();
        name > 0 && after.as_bytes().get(name) == Some(&b'=')
    };
    key.match_indices('?').any(|(at, _)| scheme.is_web() || is_named(&key[at + 1..]))
}

/// Returns what is wrong with an endpoint, if anything. The message does not repeat the endpoint.
pub fn endpoint_problem(endpoint: &str) -> Option<String> {
    const VALID: &str = "valid: https://host[:port], or http:// for a service without TLS";
    let Some(Ok(parts)) = split_url(endpoint) else {
        let problem = match split_url(endpoint) {
            Some(Err(_)) if endpoint.contains(['@', '?', '#']) => {
                "holds a user name, a query or a fragment: credentials come from the environment or the AWS profile files"
            }
            _ => "is not the URL of a service",
        };
        return Some(format!("{problem}; {VALID}"));
    };
    (!parts.scheme.is_web()).then(|| format!("is not the URL of a web service; {VALID}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> Result<(Scheme, &str, &str), String> {
        split_url(text).unwrap().map(|p| (p.scheme, p.bucket, p.key))
    }

    #[test]
    fn urls_come_apart() {
        assert_eq!(parts("s3://b/a/k.parquet"), Ok((Scheme::S3, "b", "a/k.parquet")));
        assert_eq!(parts("abfss://b"), Ok((Scheme::Az, "b", "")));
        assert_eq!(parts("http://[::1]:80/x%20y"), Ok((Scheme::Http, "[::1]:80", "x%20y")));
        assert_eq!(parts("s3://b/year=202?/month=0[1-3]/*.gz").unwrap().2, "year=202?/month=0[1-3]/*.gz");
        let hub = "hf://datasets/org/name@refs/convert/parquet/default/*.parquet";
        assert_eq!(parts(hub), Ok((Scheme::Hf, "datasets/org/name@refs/convert/parquet", "default/*.parquet")));
        assert!(split_url("data/x").is_none() && split_url("file:///x").is_none());
    }

    #[test]
    fn what_may_hold_a_secret_is_refused_and_not_repeated() {
        for text in [
            "s3://AKIA:SECRET@b/k",
            "s3://b?SECRET",
            "s3://b/k?X-Amz-Signature=SECRET",
            "https://h/k?SECRET",
            "gs://b/k#SECRET",
            "https://u:SECRET@h/k",
            "s3:///SECRET",
            "hf://user:SECRET@h/k",
            "hf://datasets/org/name/k?token=SECRET",
            "hf://datasets/org/name#SECRET",
            "hf://datasets/org/name?SECRET",
            "s3://SEC RET/k",
            "ftp://u:SECRET@h",
        ] {
            let message = parts(text).unwrap_err();
            assert!(!message.contains("SEC"), "{text}: {message}");
        }
        for endpoint in ["http://u:SECRET@h", "https://h/?SECRET=1", "h:9000", "s3://SECRET", "file:///SECRET"] {
            let message = endpoint_problem(endpoint).unwrap();
            assert!(message.contains("valid: https://") && !message.contains("SECRET"), "{message}");
        }
        assert_eq!(endpoint_problem("http://127.0.0.1:9000"), None);
    }

    #[test]
    fn options_replace_one_by_one() {
        let retry = |max_attempts, longest_seconds| Some(Retry { max_attempts, longest_seconds, ..Retry::default() });
        let base = Storage { region: Some("a".into()), retry: retry(Some(3), Some(5)), ..Storage::default() };
        let own = Storage { anonymous: Some(true), retry: retry(Some(4), None), ..Storage::default() };
        let both = own.with_defaults_from(&base);
        assert_eq!((both.region.as_deref(), both.anonymous), (Some("a"), Some(true)));
        let limits = both.retry_limits();
        assert_eq!((limits.max_attempts, limits.max_elapsed.as_secs(), limits.request_timeout.as_secs()), (4, 5, 60));
        assert_eq!(Storage { part_megabytes: Some(5), ..Storage::default() }.part_bytes(), 5 << 20);
    }
}
