//! Opens the store of a URL with the job's options; each store once.
//!
//! Endpoint and region come from the options, then the environment, then the AWS profile. Credentials come from the
//! environment (keys, web identity), then the profile, then the machine (container, instance). For Google and Azure,
//! object_store reads the environment: for example GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME with
//! AZURE_STORAGE_ACCOUNT_KEY. Endpoint and token of the hub come from the variables of Python's `huggingface_hub`.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::HttpConnector;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use stillhouse_schemas::hub_names::HubDataset;
use stillhouse_schemas::storage::{Storage, endpoint_problem};

use super::client::{CLIENT_TIMEOUT_SECONDS, USER_AGENT};
use super::error::StorageError;
use super::explain::explain;
use super::failure::Target;
use super::guard::Guard;
use super::hub::{self, HubConfig, HubStore};
use super::profile::{Environment, NoCredentials, Profile, ProfileProvider};
use super::redacted_store::RedactedStore;
use super::transport::{Connector, TransportStatistics};
use super::uploads::{Signer, Uploads, XmlUploads};
use super::url::{Scheme, StoreUrl};
use ::url::Url;

type Result<T, E = StorageError> = std::result::Result<T, E>;

/// An open bucket, container, web server or data set of the hub.
#[derive(Clone)]
pub struct Opened {
    /// The store. Its `Debug` output contains no secret.
    pub store: Arc<dyn ObjectStore>,
    /// Multipart uploads; `None` for stores that are only read.
    pub multipart: Option<Arc<dyn MultipartStore>>,
    /// Lists of unfinished uploads, and conditional completions; `None` for Azure and stores that are only read.
    pub uploads: Option<Arc<dyn Uploads>>,
    /// Counters of the requests sent so far.
    pub statistics: Arc<TransportStatistics>,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opened({})", self.store)
    }
}

/// Number of requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requests {
    /// Requests sent, including retries.
    pub sent: u64,
    /// Retries.
    pub retries: u64,
}

/// All open stores.
#[derive(Debug)]
pub struct Storages {
    environment: Environment,
    /// Guard for requests to web servers; `None` allows all addresses.
    guard: Option<Guard>,
    opened: Mutex<HashMap<(Scheme, String, Storage), Opened>>,
}

impl Storages {
    /// Uses the credentials of this process.
    pub fn new() -> Self {
        Self::with_environment(Environment::from_process())
    }

    /// Uses other credentials, for tests.
    pub fn with_environment(environment: Environment) -> Self {
        Self { environment, guard: None, opened: Mutex::default() }
    }

    /// Restricts `http` and `https` URLs to public addresses. Other stores are not affected: their endpoints come from
    /// the environment, or from a job file that was checked.
    #[must_use]
    pub fn with_guard(self, guard: Guard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Returns the number of requests sent to all open stores, and of retries among them.
    pub fn requests(&self) -> Requests {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.values().fold(Requests::default(), |sum, opened| Requests {
            sent: sum.sent + opened.statistics.requests(),
            retries: sum.retries + opened.statistics.retries(),
        })
    }

    /// Opens the bucket of a URL. Sends no request: only the first request shows whether the bucket exists.
    ///
    /// # Errors
    /// If the options, the environment or a profile file are invalid.
    pub fn open(&self, url: &StoreUrl, options: &Storage) -> Result<Opened> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (url.scheme, url.bucket.clone(), options.clone());
        if let Some(opened) = opened.get(&key) {
            return Ok(opened.clone());
        }
        let opener = StoreOpener::new(url, options, &self.environment, self.guard.as_ref());
        let made = match url.scheme {
            Scheme::S3 => opener.s3()?,
            Scheme::Gs => opener.google()?,
            Scheme::Az => opener.azure()?,
            Scheme::Hf => opener.hub()?,
            Scheme::Http | Scheme::Https => opener.web()?,
        };
        opened.insert(key, made.clone());
        Ok(made)
    }
}

impl Default for Storages {
    fn default() -> Self {
        Self::new()
    }
}

struct StoreOpener<'a> {
    name: String,
    url: &'a StoreUrl,
    options: &'a Storage,
    environment: &'a Environment,
    guard: Option<&'a Guard>,
    statistics: Arc<TransportStatistics>,
}

impl<'a> StoreOpener<'a> {
    fn new(url: &'a StoreUrl, options: &'a Storage, environment: &'a Environment, guard: Option<&'a Guard>) -> Self {
        Self { name: url.root().to_string(), url, options, environment, guard, statistics: Arc::default() }
    }

    fn s3(&self) -> Result<Opened> {
        let environment = self.environment;
        let anonymous = self.options.anonymous == Some(true);
        let profile = Profile::load(environment).map_err(|message| self.open_error(message))?;
        let first_set = |options: Option<&String>, variables: &[&str], profile: Option<&str>| {
            let variable = || variables.iter().find_map(|name| environment.get(name)).map(str::to_owned);
            options.cloned().or_else(variable).or_else(|| profile.map(str::to_owned))
        };
        let region = first_set(
            self.options.region.as_ref(),
            &["AWS_REGION", "AWS_DEFAULT_REGION"],
            profile.as_ref().and_then(Profile::region),
        );
        let region = region.unwrap_or_else(|| "us-east-1".to_owned());
        let endpoint = first_set(
            self.options.endpoint.as_ref(),
            &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
            profile.as_ref().and_then(Profile::endpoint),
        );
        if let Some(problem) = endpoint.as_deref().and_then(endpoint_problem) {
            return Err(self.open_error(format!("the endpoint {problem}")));
        }
        let path_style = self.options.path_style.or_else(|| profile.as_ref().and_then(Profile::path_style));
        let base = bucket_url(&self.url.bucket, endpoint.as_deref(), &region, path_style);

        let mut builder = self.s3_builder(profile.as_ref());
        let anonymous =
            anonymous || builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).as_deref() == Some("true");
        let connector = self.connector(Some(base.clone()));
        let allow_http = base.starts_with("http://");
        for (key, value) in self.client_options(allow_http) {
            builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
        }
        let store = builder
            .with_bucket_name(&self.url.bucket)
            .with_region(&region)
            // passes the bucket URL unchanged, so that `uploads` uses the same one
            .with_virtual_hosted_style_request(true)
            .with_endpoint(&base)
            .with_skip_signature(anonymous)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_retry(no_retries())
            .with_http_connector(connector.clone())
            .build()
            .map_err(|e| self.builder_error(&e))?;
        let signer = match anonymous {
            true => Signer::Anonymous,
            false => Signer::Aws { credentials: store.credentials().clone(), region },
        };
        let uploads = self.uploads(&connector, base, signer, allow_http)?;
        let store = Arc::new(store);
        Ok(self.opened(store.clone(), Some(store), Some(uploads)))
    }

    /// Configures a builder from the environment, with credentials of the profile if the environment has none.
    fn s3_builder(&self, profile: Option<&Profile>) -> AmazonS3Builder {
        let environment = self.environment;
        let mut builder = AmazonS3Builder::new();
        for (name, value) in environment.iter().filter(|(name, _)| name.starts_with("AWS_")) {
            // these settings are set by the caller
            if let Ok(key) = name.to_ascii_lowercase().parse()
                && !matches!(
                    key,
                    AmazonS3ConfigKey::Endpoint | AmazonS3ConfigKey::S3Endpoint | AmazonS3ConfigKey::Checksum
                )
            {
                builder = builder.with_config(key, value);
            }
        }
        let has_keys =
            environment.get("AWS_ACCESS_KEY_ID").is_some() || environment.get("AWS_SECRET_ACCESS_KEY").is_some();
        let has_identity =
            environment.get("AWS_WEB_IDENTITY_TOKEN_FILE").is_some() && environment.get("AWS_ROLE_ARN").is_some();
        let has_container = environment.iter().any(|(name, _)| name.starts_with("AWS_CONTAINER_CREDENTIALS_"));
        if !has_keys && !has_identity {
            if profile.is_some_and(Profile::has_credentials) {
                builder = builder.with_credentials(Arc::new(ProfileProvider::new(environment.clone())));
            } else if environment.is_metadata_disabled() && !has_container {
                builder = builder.with_credentials(Arc::new(NoCredentials));
            }
        }
        builder
    }

    fn google(&self) -> Result<Opened> {
        let mut builder = GoogleCloudStorageBuilder::new();
        for (name, value) in self.environment.iter().filter(|(name, _)| name.starts_with("GOOGLE_")) {
            if let Ok(key) = name.to_ascii_lowercase().parse() {
                builder = builder.with_config(key, value);
            }
        }
        // object_store does not reveal the base URL that a service account's file sets
        let service = builder.get_config_value(&GoogleConfigKey::BaseUrl);
        let is_url_known = service.is_some() || self.environment.get("GOOGLE_SERVICE_ACCOUNT_KEY").is_none();
        let base = format!(
            "{}/{}",
            service.as_deref().unwrap_or("https://storage.googleapis.com").trim_end_matches('/'),
            self.url.bucket
        );
        let allow_http = base.starts_with("http://");
        for (key, value) in self.client_options(allow_http) {
            builder = builder.with_config(GoogleConfigKey::Client(key), value);
        }
        let connector = self.connector(None);
        let anonymous = self.options.anonymous == Some(true);
        if anonymous {
            builder = builder.with_skip_signature(true);
        }
        let store = builder
            .with_bucket_name(&self.url.bucket)
            .with_retry(no_retries())
            .with_http_connector(connector.clone())
            .build()
            .map_err(|e| self.builder_error(&e))?;
        let signer = if anonymous { Signer::Anonymous } else { Signer::Google(store.credentials().clone()) };
        let uploads = is_url_known.then(|| self.uploads(&connector, base, signer, allow_http)).transpose()?;
        let store = Arc::new(store);
        Ok(self.opened(store.clone(), Some(store), uploads))
    }

    fn azure(&self) -> Result<Opened> {
        let mut builder = MicrosoftAzureBuilder::new();
        for (name, value) in self.environment.iter().filter(|(name, _)| name.starts_with("AZURE_")) {
            if let Ok(key) = name.to_ascii_lowercase().parse() {
                builder = builder.with_config(key, value);
            }
        }
        let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
        for (key, value) in self.client_options(endpoint.is_some_and(|e| e.starts_with("http://"))) {
            builder = builder.with_config(AzureConfigKey::Client(key), value);
        }
        if self.options.anonymous == Some(true) {
            builder = builder.with_skip_signature(true);
        }
        let store = builder
            .with_container_name(&self.url.bucket)
            .with_retry(no_retries())
            .with_http_connector(self.connector(None))
            .build()
            .map_err(|e| self.builder_error(&e))?;
        let store = Arc::new(store);
        Ok(self.opened(store.clone(), Some(store), None))
    }

    fn web(&self) -> Result<Opened> {
        // normalized as in requests: `http://h:80` becomes `http://h`
        let base = Url::parse(&self.name).map_err(|e| self.open_error(e))?.as_str().trim_end_matches('/').to_owned();
        let mut builder = HttpBuilder::new();
        for (key, value) in self.client_options(self.url.scheme == Scheme::Http) {
            builder = builder.with_config(key, value);
        }
        let store = builder
            .with_url(&self.name)
            .with_retry(no_retries())
            .with_http_connector(self.connector(Some(base)))
            .build()
            .map_err(|e| self.builder_error(&e))?;
        Ok(self.opened(Arc::new(store), None, None))
    }

    fn hub(&self) -> Result<Opened> {
        let dataset = HubDataset::parse(&self.url.bucket).map_err(|e| self.open_error(e))?;
        let mut config = HubConfig::from_environment(self.environment).map_err(|e| self.open_error(e))?;
        if config.offline {
            let repository = &dataset.repository;
            return Err(self.open_error(format!(
                "HF_HUB_OFFLINE forbids requests to the hub; unset it, or name a folder with the files                  (`hf download --repo-type dataset --local-dir FOLDER {repository}` makes one)"
            )));
        }
        if self.options.anonymous == Some(true) {
            config.token = None;
        }
        let connector = self.connector(Some(config.endpoint.to_string()));
        let client = connector.transport(hub::connect(&config).map_err(|e| self.open_error(e))?);
        let store = HubStore::new(client, config, dataset, self.name.clone());
        Ok(self.opened(Arc::new(store), None, None))
    }

    fn connector(&self, base: Option<String>) -> Connector {
        let target = Target { scheme: self.url.scheme, bucket: self.url.bucket.clone(), base };
        let limits = self.options.retry_limits();
        let guard = self.guard.filter(|_| self.url.scheme.is_web()).cloned();
        Connector { target: Arc::new(target), limits, statistics: self.statistics.clone(), guard }
    }

    fn client_options(&self, allow_http: bool) -> Vec<(ClientConfigKey, String)> {
        let timeout = format!("{CLIENT_TIMEOUT_SECONDS} seconds");
        let mut options = vec![(ClientConfigKey::UserAgent, USER_AGENT.into()), (ClientConfigKey::Timeout, timeout)];
        if allow_http {
            options.push((ClientConfigKey::AllowHttp, "true".into()));
        }
        options
    }

    fn uploads(
        &self,
        connector: &Connector,
        base: String,
        signer: Signer,
        allow_http: bool,
    ) -> Result<Arc<dyn Uploads>> {
        let options = self.client_options(allow_http);
        let options = options.into_iter().fold(ClientOptions::new(), |all, (key, value)| all.with_config(key, value));
        let client = connector.connect(&options).map_err(|e| self.builder_error(&e))?;
        Ok(Arc::new(XmlUploads { client, base, signer, name: self.name.clone() }))
    }

    fn opened(
        &self,
        store: Arc<dyn ObjectStore>,
        multipart: Option<Arc<dyn MultipartStore>>,
        uploads: Option<Arc<dyn Uploads>>,
    ) -> Opened {
        let store = Arc::new(RedactedStore { store, name: self.name.clone() });
        Opened { store, multipart, uploads, statistics: self.statistics.clone() }
    }

    fn open_error(&self, message: impl fmt::Display) -> StorageError {
        StorageError(format!("cannot open {}: {message}", self.name))
    }

    fn builder_error(&self, error: &object_store::Error) -> StorageError {
        StorageError(explain(error, "open", &self.name))
    }
}

/// The URL of a bucket.
fn bucket_url(bucket: &str, endpoint: Option<&str>, region: &str, path_style: Option<bool>) -> String {
    // wildcard TLS certificates cover only one label before the dot
    let fits_host_name = !bucket.contains('.') && !bucket.contains('_') && !bucket.contains(char::is_uppercase);
    let aws = || {
        let country = if region.starts_with("cn-") { ".cn" } else { "" };
        format!("https://s3.{region}.amazonaws.com{country}")
    };
    let service = endpoint.map_or_else(aws, |e| e.trim_end_matches('/').to_owned());
    match (path_style.unwrap_or(endpoint.is_some() || !fits_host_name), service.split_once("://")) {
        (false, Some((scheme, host))) => format!("{scheme}://{bucket}.{host}"),
        _ => format!("{service}/{bucket}"),
    }
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: std::time::Duration::ZERO, backoff: BackoffConfig::default() }
}

#[cfg(test)]
mod tests {
    use super::bucket_url;

    #[test]
    fn buckets_have_addresses() {
        let endpoint = Some("http://h:1/");
        assert_eq!(bucket_url("b", endpoint, "r", None), "http://h:1/b");
        assert_eq!(bucket_url("b", endpoint, "r", Some(false)), "http://b.h:1");
        assert_eq!(bucket_url("b", None, "eu-west-1", None), "https://b.s3.eu-west-1.amazonaws.com");
        assert_eq!(bucket_url("b.c", None, "cn-north-1", None), "https://s3.cn-north-1.amazonaws.com.cn/b.c");
    }
}
