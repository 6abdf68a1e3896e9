//! TLS in a cluster: the scheduler's certificate, and the certificates that its callers trust.
//!
//! Only the scheduler accepts calls, so only it has a certificate; callers authenticate with the
//! [`token`](crate::token).

use std::path::{Path, PathBuf};
use std::time::Duration;

use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// The environment variable with the path of a PEM file of CA certificates. Callers trust these instead of the
/// machine's.
pub const CA_FILE: &str = "STILLHOUSE_CLUSTER_CA_FILE";

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const CERTIFICATE_MARK: &str = "-----BEGIN CERTIFICATE-----";
const KEY_MARK: &str = "PRIVATE KEY-----";

/// The files of a scheduler that serves TLS, both PEM.
#[derive(Debug, Clone)]
pub struct Files {
    /// The certificate, followed by its intermediate certificates.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

fn usage_error(message: String) -> PipelineError {
    PipelineError::new(ErrorKind::Usage, message)
}

fn read(file: &Path, what: &str, mark: &str, valid: &str) -> Result<String> {
    let text = std::fs::read_to_string(file).map_err(|e| usage_error(format!("{what}: cannot be read: {e}")))?;
    if !text.contains(mark) {
        return Err(usage_error(format!("{what}: holds none; valid: a file of {valid} (PEM, {mark}…)")));
    }
    Ok(text)
}

impl Files {
    /// The TLS configuration of a server.
    ///
    /// # Errors
    /// Names the file that cannot be read or does not hold what it should.
    pub fn server_config(&self) -> Result<ServerTlsConfig> {
        let named = |option: &str, file: &Path| format!("{option} {}", file.display());
        let what = named("--tls-certificate", &self.certificate);
        let certificate = read(&self.certificate, &what, CERTIFICATE_MARK, "certificates")?;
        let key = read(&self.key, &named("--tls-key", &self.key), KEY_MARK, "one private key without a password")?;
        Ok(ServerTlsConfig::new().identity(Identity::from_pem(certificate, key)).timeout(HANDSHAKE_TIMEOUT))
    }

    /// The error of a certificate and a key that do not fit together.
    pub(crate) fn mismatch_error(&self, why: &str) -> PipelineError {
        usage_error(format!(
            "--tls-certificate {}, --tls-key {}: {why}; valid: a certificate and its own key",
            self.certificate.display(),
            self.key.display()
        ))
    }
}

/// The TLS configuration of a caller: trusts the CA file of the environment if set, else the machine's certificates.
///
/// # Errors
/// When the file cannot be read or holds no certificate. The error hides its path, because all users of a service can
/// read the errors of its jobs.
pub fn client_config() -> Result<ClientTlsConfig> {
    let config = ClientTlsConfig::new().timeout(HANDSHAKE_TIMEOUT);
    Ok(match std::env::var_os(CA_FILE).filter(|file| !file.is_empty()) {
        None => config.with_native_roots(),
        Some(file) => {
            let what = format!("the file of {CA_FILE}");
            let certificates = read(Path::new(&file), &what, CERTIFICATE_MARK, "certificates")?;
            config.ca_certificate(Certificate::from_pem(certificates))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_none_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let certificate = file("certificate.pem", CERTIFICATE_MARK);
        let key = file("key.pem", "-----BEGIN PRIVATE KEY-----");
        let said = |certificate: &Path, key: &Path| {
            let files = Files { certificate: certificate.to_owned(), key: key.to_owned() };
            files.server_config().map(drop).map_err(|e| e.to_string())
        };
        assert_eq!(said(&certificate, &key), Ok(()));
        for (certificate, key, says) in [
            (folder.path().join("none"), key.clone(), ["--tls-certificate ", "cannot be read"]),
            (certificate.clone(), folder.path().join("none"), ["--tls-key ", "cannot be read"]),
            // each file in place of the other
            (key.clone(), key.clone(), ["--tls-certificate ", "holds none; valid: a file of certificates"]),
            (certificate.clone(), certificate, ["--tls-key ", "holds none; valid: a file of one private key"]),
        ] {
            let refused = said(&certificate, &key).unwrap_err();
            assert!(says.iter().all(|part| refused.contains(part)), "{refused}");
        }
    }
}
