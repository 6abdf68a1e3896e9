//! Settings of the hub, from the environment variables that Python's `huggingface_hub` reads.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::url::Url;
use reqwest::Certificate;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::error::StorageError;
use crate::profile::Environment;

type Result<T, E = StorageError> = std::result::Result<T, E>;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// An access token. Its secret is sent to the hub but never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: String,
    /// Origin of the token, for messages.
    source: String,
}

impl Token {
    /// Creates a token from a secret and its origin. Returns `None` if the secret is blank.
    ///
    /// # Errors
    /// If the secret contains characters that no header can carry. The message names the origin, not the secret.
    pub fn new(secret: &str, source: impl Into<String>) -> Result<Option<Self>> {
        let (secret, source) = (secret.trim(), source.into());
        if !secret.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(StorageError(format!(
                "{source} does not hold a token: it has spaces or characters that are not ASCII"
            )));
        }
        Ok((!secret.is_empty()).then(|| Self { secret: secret.to_owned(), source }))
    }

    /// The value of the header `Authorization`.
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.secret)
    }

    /// Where the token comes from: a variable or a file.
    pub fn source(&self) -> &str {
        &self.source
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(*** from {})", self.source)
    }
}

/// Locations of the hub and its cache, and network limits.
#[derive(Debug, Clone)]
pub struct HubConfig {
    /// URL of the hub (`HF_ENDPOINT`). May include a path, for mirrors.
    pub endpoint: Url,
    /// Folder of the cache (`HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`).
    pub cache: PathBuf,
    /// Token from `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else `HF_HOME/token`.
    pub token: Option<Token>,
    /// `HF_HUB_OFFLINE`: use only the cache.
    pub offline: bool,
    /// Certificates to trust instead of the system's (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`).
    pub ca_bundle: Option<PathBuf>,
    /// Whether to respect `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    pub use_proxy: bool,
    /// Maximum attempts of a request; a download counts only consecutive failures that brought no progress.
    pub attempts: u32,
    /// Upper limit of the random wait before the second attempt. It doubles with each further attempt, up to 30
    /// seconds.
    pub backoff: Duration,
    /// Longest time without data from the server.
    pub timeout: Duration,
}

impl HubConfig {
    /// Creates settings for a hub and a cache, without a token.
    ///
    /// # Errors
    /// If the endpoint is not an `http://` or `https://` URL, or contains a user, password, query or fragment.
    pub fn new(endpoint: &str, cache: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self {
            endpoint: parse_endpoint(endpoint)?,
            cache: cache.into(),
            token: None,
            offline: false,
            ca_bundle: None,
            use_proxy: true,
            attempts: 5,
            backoff: Duration::from_secs(1),
            timeout: Duration::from_secs(30),
        })
    }

    /// Reads the settings from the environment of the process.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` or the token is unusable.
    pub fn from_env() -> Result<Self> {
        Self::from_environment(&Environment::from_process())
    }

    /// Reads the settings from environment variables.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` or the token is unusable.
    pub fn from_environment(environment: &Environment) -> Result<Self> {
        let get = |name: &str| environment.get(name).filter(|value| !value.trim().is_empty());
        let is_true = |name: &str| {
            get(name).is_some_and(|v| matches!(v.trim().to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true"))
        };
        let user_home = get("HOME").map(PathBuf::from).or_else(std::env::home_dir).unwrap_or_default();
        let folder = |name: &str| {
            get(name).map(|value| match value.strip_prefix("~/") {
                Some(rest) => user_home.join(rest),
                None => PathBuf::from(value),
            })
        };
        let hf_home = folder("HF_HOME").unwrap_or_else(|| {
            folder("XDG_CACHE_HOME").unwrap_or_else(|| user_home.join(".cache")).join("huggingface")
        });
        let cache =
            folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| hf_home.join("hub"));

        let mut config = Self::new(get("HF_ENDPOINT").unwrap_or(DEFAULT_ENDPOINT), cache)?;
        config.offline = is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE");
        config.ca_bundle = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"].into_iter().find_map(folder);
        if !is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            config.token = match get("HF_TOKEN") {
                Some(token) => Token::new(token, "HF_TOKEN")?,
                None => read_token_file(&folder("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token")))?,
            };
        }
        Ok(config)
    }

    /// Reads the certificates of `ca_bundle`; none if it is not set. Unusable ones, such as very old ones, are skipped.
    ///
    /// # Errors
    /// If the file cannot be read, or no certificate in it is usable.
    #[expect(clippy::disallowed_methods, reason = "once when a store is opened")]
    pub fn certificates(&self) -> Result<Vec<Certificate>> {
        let Some(path) = &self.ca_bundle else { return Ok(Vec::new()) };
        let unusable =
            |why: String| StorageError(format!("the certificates of {} cannot be used: {why}", path.display()));
        let pem = std::fs::read(path).map_err(|e| unusable(e.to_string()))?;
        let mut store = RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(&pem).flatten();
        let usable = certificates.filter(|certificate| store.add(certificate.clone()).is_ok());
        let trusted: Vec<_> = usable.filter_map(|certificate| Certificate::from_der(&certificate).ok()).collect();
        if trusted.is_empty() {
            return Err(unusable("it holds none (PEM is read)".to_owned()));
        }
        Ok(trusted)
    }
}

fn parse_endpoint(text: &str) -> Result<Url> {
    let invalid_endpoint = |why: &str| StorageError(format!("HF_ENDPOINT: {why}"));
    // Errors do not repeat the text, which may contain a password.
    let url = Url::parse(text.trim())
        .map_err(|e| invalid_endpoint(&format!("not an address such as {DEFAULT_ENDPOINT}: {e}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(invalid_endpoint(&format!("must start with https:// or http://, as {DEFAULT_ENDPOINT} does")));
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(invalid_endpoint(
            "must not hold a user, a password, a query or a fragment (a token goes into HF_TOKEN)",
        ));
    }
    Ok(url)
}

#[expect(clippy::disallowed_methods, reason = "once when a store is opened")]
fn read_token_file(path: &Path) -> Result<Option<Token>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Token::new(&text, path.display().to_string()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(StorageError(format!("cannot read the token in {}: {e}", path.display()))),
    }
}
