//! Settings from the environment and the standard AWS profile files.
//!
//! Reads `~/.aws/credentials` (or AWS_SHARED_CREDENTIALS_FILE) and `~/.aws/config` (or AWS_CONFIG_FILE), for the
//! profile AWS_PROFILE or `default`. Supports `aws_access_key_id`, `aws_secret_access_key`, `aws_session_token`,
//! `credential_process`, `region`, `endpoint_url` (also for S3 alone, through `services`) and S3's `addressing_style`.
//! For roles and single sign-on, the error names the alternative.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use object_store::aws::AwsCredential;
use object_store::client::CredentialProvider;
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::blocking;

pub(super) const NO_CREDENTIALS: &str = "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile \
     in ~/.aws/credentials, or for a public bucket `storage: {anonymous: true}`";

const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Keys with a session token expire, and the tool that wrote them writes new ones, so they are read again after this
/// time.
const REREAD_INTERVAL: Duration = Duration::from_secs(300);

/// A snapshot of the environment variables.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// The environment of this process.
    pub fn from_process() -> Self {
        Self::from_iter(std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))))
    }

    /// The value of a variable; `None` if it is not set or empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// All variables that are set.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    fn is_true(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1")
    }

    /// Whether requests for the machine's credentials are disabled.
    pub fn is_metadata_disabled(&self) -> bool {
        self.is_true("AWS_EC2_METADATA_DISABLED")
    }

    fn file(&self, variable: &str, name: &str) -> Option<PathBuf> {
        let home = || self.get("HOME").or_else(|| self.get("USERPROFILE")).map(PathBuf::from);
        match self.get(variable) {
            Some(path) => match (path.strip_prefix("~/"), home()) {
                (Some(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path.into()),
            },
            None => Some(home()?.join(".aws").join(name)),
        }
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Environment({} variables)", self.0.len())
    }
}

/// A profile from the AWS files.
#[derive(Clone)]
pub struct Profile {
    name: String,
    keys: BTreeMap<String, String>,
    s3_endpoint: Option<String>,
}

/// Omits the values, since some are secrets.
impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Profile({:?}, {:?})", self.name, self.keys.keys())
    }
}

impl Profile {
    /// Loads the profile that the environment selects; `None` if no file exists or no file has a `default` profile.
    ///
    /// # Errors
    /// If a file cannot be read, or AWS_PROFILE names a profile that does not exist.
    pub fn load(environment: &Environment) -> Result<Option<Self>, String> {
        let requested_name = environment.get("AWS_PROFILE").or_else(|| environment.get("AWS_DEFAULT_PROFILE"));
        let name = requested_name.unwrap_or("default");
        let config = read_sections(environment.file("AWS_CONFIG_FILE", "config"))?;
        let credentials_file = read_sections(environment.file("AWS_SHARED_CREDENTIALS_FILE", "credentials"))?;
        let in_config =
            config.get(&format!("profile {name}")).or_else(|| config.get(name).filter(|_| name == "default"));
        let in_credentials = credentials_file.get(name);
        if in_config.is_none() && in_credentials.is_none() {
            return match requested_name {
                Some(_) => Err(format!("the AWS profile {name:?} (AWS_PROFILE) is in none of the AWS profile files")),
                None => Ok(None),
            };
        }
        // the credentials file takes precedence over the config file
        let mut keys = in_config.cloned().unwrap_or_default();
        keys.extend(in_credentials.cloned().unwrap_or_default());
        let services = keys.get("services").and_then(|s| config.get(&format!("services {s}")));
        let s3_endpoint = services.and_then(|s| s.get("s3.endpoint_url")).or_else(|| keys.get("s3.endpoint_url"));
        Ok(Some(Self { name: name.to_owned(), s3_endpoint: s3_endpoint.cloned(), keys }))
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The region.
    pub fn region(&self) -> Option<&str> {
        self.get("region")
    }

    /// The endpoint for S3.
    pub fn endpoint(&self) -> Option<&str> {
        self.s3_endpoint.as_deref().or_else(|| self.get("endpoint_url")).filter(|e| !e.is_empty())
    }

    /// Whether URLs carry the bucket in the path, if the profile sets it.
    pub fn path_style(&self) -> Option<bool> {
        match self.get("s3.addressing_style")? {
            "path" => Some(true),
            "virtual" => Some(false),
            _ => None,
        }
    }

    /// Whether the profile configures credentials.
    pub fn has_credentials(&self) -> bool {
        const KEYS: [&str; 5] = ["aws_access_key_id", "credential_process", "role_arn", "sso_session", "sso_start_url"];
        KEYS.iter().any(|key| self.get(key).is_some())
    }

    /// The credentials, and the time from which they must be loaded again.
    async fn credentials(&self) -> Result<(AwsCredential, Option<Instant>), String> {
        let name = &self.name;
        if let Some(key) = ["role_arn", "sso_session", "sso_start_url"].into_iter().find(|key| self.get(key).is_some())
        {
            return Err(format!(
                "the AWS profile {name:?} uses {key}, which stillhouse does not support; run `eval \"$(aws configure \
                 export-credentials --profile {name} --format env)\"` first, or give the profile a credential_process"
            ));
        }
        match (self.get("aws_access_key_id"), self.get("aws_secret_access_key"), self.get("credential_process")) {
            (Some(key_id), Some(secret_key), _) => {
                let token = self.get("aws_session_token").map(str::to_owned);
                let until = token.as_ref().map(|_| Instant::now() + REREAD_INTERVAL);
                Ok((AwsCredential { key_id: key_id.to_owned(), secret_key: secret_key.to_owned(), token }, until))
            }
            (_, _, Some(command)) => run_credential_process(name, command).await,
            _ => Err(format!("the AWS profile {name:?} has only one of aws_access_key_id and aws_secret_access_key")),
        }
    }
}

type Sections = BTreeMap<String, BTreeMap<String, String>>;

#[expect(clippy::disallowed_methods, reason = "called through `blocking`, and once when a store is opened")]
fn read_sections(file: Option<PathBuf>) -> Result<Sections, String> {
    let Some(file) = file else { return Ok(Sections::new()) };
    match fs::read_to_string(&file) {
        Ok(text) => Ok(parse(&text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Sections::new()),
        Err(e) => Err(format!("cannot read the AWS profile file {}: {e}", file.display())),
    }
}

/// Parses `key = value` lines in `[sections]`. Indented lines belong to the key above, and become `s3.endpoint_url`,
/// for example.
fn parse(text: &str) -> Sections {
    let mut sections = Sections::new();
    let mut section: Option<String> = None;
    let mut parent_key = String::new();
    for line in text.trim_start_matches('\u{feff}').lines() {
        let indented = line.starts_with([' ', '\t']);
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').filter(|_| !indented) {
            let name = name.split(']').next().unwrap_or_default();
            section = Some(name.split_whitespace().collect::<Vec<_>>().join(" "));
            continue;
        }
        let (Some(section), Some((key, value))) = (&section, line.split_once('=')) else { continue };
        let mut key = key.trim().to_ascii_lowercase();
        match indented {
            true => key = format!("{parent_key}.{key}"),
            false => parent_key.clone_from(&key),
        }
        let comment = if key == "credential_process" { None } else { value.find(" #").or_else(|| value.find(" ;")) };
        let value = value[..comment.unwrap_or(value.len())].trim();
        sections.entry(section.clone()).or_default().insert(key, value.to_owned());
    }
    sections
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ProcessOutput {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<DateTime<Utc>>,
}

/// Runs a `credential_process`. Errors show neither the command nor its output: both can contain secrets.
async fn run_credential_process(profile: &str, command: &str) -> Result<(AwsCredential, Option<Instant>), String> {
    let failed = |why: String| {
        format!("the credential_process of the AWS profile {profile:?} {why}; run it by hand to see what is wrong")
    };
    let command = command.to_owned();
    let output = tokio::task::spawn_blocking(move || run_with_timeout(&command, PROCESS_TIMEOUT)).await;
    let output = output.map_err(|_| failed("could not be waited for".into()))?.map_err(failed)?;
    let got: ProcessOutput = serde_json::from_slice(&output)
        .map_err(|_| failed("wrote something other than {\"Version\": 1, \"AccessKeyId\": …}".into()))?;
    if got.version != 1 {
        return Err(failed(format!("wrote version {}, not 1", got.version)));
    }
    // renewed early, because requests take time: 5 minutes before expiration, or after half the remaining time if that
    // is later
    let remaining = got.expiration.map(|at| (at - Utc::now()).to_std().unwrap_or_default());
    let until = remaining
        .map(|remaining| Instant::now() + remaining.saturating_sub(Duration::from_secs(300)).max(remaining / 2));
    let credential =
        AwsCredential { key_id: got.access_key_id, secret_key: got.secret_access_key, token: got.session_token };
    Ok((credential, until))
}

/// Returns the output of a shell command. Kills it at the timeout.
fn run_with_timeout(command: &str, limit: Duration) -> Result<Vec<u8>, String> {
    let mut process = Command::new("sh");
    process.arg("-c").arg(command).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = process.spawn().map_err(|e| format!("could not be started: {}", e.kind()))?;
    // read while it runs: a full pipe would block it
    let (send, receive) = mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut output = Vec::new();
            let _ = stdout.read_to_end(&mut output);
            let _ = send.send(output);
        });
    }
    let until = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(|e| format!("could not be waited for: {}", e.kind()))? {
            Some(status) => break status,
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            None => {
                let _ = child.kill().and_then(|()| child.wait());
                return Err(format!("took longer than {} s", limit.as_secs_f32()));
            }
        }
    };
    match status.success() {
        true => receive.recv_timeout(Duration::from_secs(1)).map_err(|_| "keeps its output open".into()),
        false => Err(format!("failed ({status})")),
    }
}

/// The reason why there are no credentials, in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CredentialError(pub String);

impl From<CredentialError> for object_store::Error {
    fn from(error: CredentialError) -> Self {
        Self::Generic { store: "S3", source: Box::new(error) }
    }
}

/// Provides the credentials of the profile, and loads them again when they expire.
pub(super) struct ProfileProvider {
    environment: Environment,
    current: Mutex<Option<(Arc<AwsCredential>, Option<Instant>)>>,
}

impl ProfileProvider {
    pub(super) fn new(environment: Environment) -> Self {
        Self { environment, current: Mutex::new(None) }
    }
}

impl fmt::Debug for ProfileProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProfileProvider")
    }
}

#[async_trait]
impl CredentialProvider for ProfileProvider {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut current = self.current.lock().await;
        if let Some((credential, until)) = current.as_ref()
            && until.is_none_or(|until| Instant::now() < until)
        {
            return Ok(credential.clone());
        }
        let environment = self.environment.clone();
        let load = move || Profile::load(&environment).map_err(|why| object_store::Error::from(CredentialError(why)));
        let profile = blocking(load).await?;
        let profile = profile.ok_or_else(|| CredentialError("the AWS profile is gone from its files".into()))?;
        let (credential, until) = profile.credentials().await.map_err(CredentialError)?;
        let credential = Arc::new(credential);
        *current = Some((credential.clone(), until));
        Ok(credential)
    }
}

/// A provider for machines without credentials: returns an error that says how to set them.
#[derive(Debug)]
pub(super) struct NoCredentials;

#[async_trait]
impl CredentialProvider for NoCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        Err(CredentialError(NO_CREDENTIALS.into()).into())
    }
}

#[cfg(test)]
#[path = "tests/profile.rs"]
mod tests;
