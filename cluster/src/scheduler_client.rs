//! Calls to the scheduler: its address, and the header of each call that names the caller's build and proves its token.
//!
//! `user-agent: stillhouse/<build> <proof>`: Ballista's executor lets its owner set only this header, so all callers
//! use it.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use stillhouse_pipeline::job::chain;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

use crate::sealed_spec::BUILD;
use crate::tls;
use crate::token::Token;

/// The largest message in bytes. The rows of 100,000 splits take about 40 MB.
pub const MAX_MESSAGE_BYTES: usize = 512 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The address of a scheduler, and how callers connect to it.
#[derive(Debug, Clone)]
pub struct SchedulerAddress {
    /// The address as the user wrote it.
    address: String,
    host_and_port: String,
    /// The certificates to trust; `None` without TLS.
    tls: Option<ClientTlsConfig>,
}

impl SchedulerAddress {
    /// The scheduler at `host:port`, without TLS, or at `https://host:port`. The address must already be validated.
    ///
    /// # Errors
    /// Those of [`tls::client_config`].
    pub fn parse(address: &str) -> Result<Self> {
        let (host_and_port, tls) = match address.split_once("://") {
            Some(("https", host_and_port)) => (host_and_port, Some(tls::client_config()?)),
            Some((_, host_and_port)) => (host_and_port, None),
            None => (address, None),
        };
        Ok(Self { address: address.into(), host_and_port: host_and_port.into(), tls })
    }

    /// Host and port as separate values.
    pub fn host_and_port(&self) -> (&str, u16) {
        let (host, port) = self.host_and_port.rsplit_once(':').unwrap_or((&self.host_and_port, ""));
        (host, port.parse().unwrap_or_default())
    }

    /// Whether callers use TLS.
    pub fn uses_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// An endpoint whose calls carry the caller's build and proof.
    pub fn endpoint(&self, token: &Token) -> Result<Endpoint, tonic::transport::Error> {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.host_and_port))?;
        let endpoint = match &self.tls {
            Some(tls) => endpoint.tls_config(tls.clone())?,
            None => endpoint,
        };
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_INTERVAL);
        endpoint.keep_alive_while_idle(true).user_agent(format!("stillhouse/{BUILD} {}", token.proof()))
    }

    /// Connects to the scheduler.
    ///
    /// # Errors
    /// When nothing answers at the address, or its certificate is not trusted.
    pub async fn connect(&self, token: &Token) -> Result<Channel> {
        let endpoint = self.endpoint(token).map_err(|e| self.connect_error(&e))?;
        endpoint.connect().await.map_err(|e| self.connect_error(&e))
    }

    fn connect_error(&self, e: &(dyn Error + 'static)) -> PipelineError {
        let why = chain(e);
        // a retry does not fix a certificate
        let distrusted = std::iter::successors(Some(e), |e| (*e).source())
            .any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::InvalidData));
        if self.tls.is_some() && distrusted {
            let message = format!(
                "the scheduler at {self} is not to be believed: {why}; valid: one that was started with --tls-certificate, which names \
                 this host and is signed by whom this machine trusts, or by whom the file of {} holds",
                tls::CA_FILE
            );
            return PipelineError::new(ErrorKind::Usage, message);
        }
        let message = format!("no scheduler answers at {self}: {why}; `stillhouse scheduler` starts one");
        PipelineError::new(ErrorKind::Output, message).retryable()
    }
}

impl fmt::Display for SchedulerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Admits a call whose caller has the token and this build.
///
/// # Errors
/// The status names what is missing or differs.
pub fn check_caller<T>(request: Request<T>, proof: &str) -> Result<Request<T>, Status> {
    let (build, got) = build_and_proof(request.metadata());
    match (build, got) {
        (None, _) | (_, None) => Err(Status::unauthenticated(
            "this scheduler serves stillhouse only, and the call does not say that it comes from one with this cluster's token",
        )),
        (Some(build), Some(_)) if build != BUILD => Err(Status::failed_precondition(format!(
            "the scheduler is stillhouse {BUILD}, the caller {build}; valid: one build throughout a cluster"
        ))),
        (_, Some(got)) if !is_same(got, proof) => {
            Err(Status::unauthenticated("the caller has another token than this cluster's scheduler"))
        }
        _ => Ok(request),
    }
}

fn build_and_proof(metadata: &MetadataMap) -> (Option<&str>, Option<&str>) {
    let agent = metadata.get("user-agent").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut words = agent.split(' ');
    (words.next().and_then(|word| word.strip_prefix("stillhouse/")), words.next())
}

fn is_same(a: &str, b: &str) -> bool {
    subtle::ConstantTimeEq::ct_eq(a.as_bytes(), b.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_strangers_and_of_other_builds_are_refused_by_name() {
        let (token, other) = (Token::new(&"a".repeat(32)), Token::new(&"b".repeat(32)));
        let call = |agent: Option<String>| {
            let mut request = Request::new(());
            if let Some(agent) = agent {
                request.metadata_mut().insert("user-agent", agent.parse().unwrap());
            }
            check_caller(request, &token.proof()).map(drop)
        };
        assert!(call(Some(format!("stillhouse/{BUILD} {} tonic/0.14.9", token.proof()))).is_ok());
        for (agent, says) in [
            (None, "serves stillhouse only"),
            (Some("tonic/0.14.9".to_owned()), "serves stillhouse only"),
            (Some(format!("stillhouse/{BUILD}")), "serves stillhouse only"),
            (Some(format!("stillhouse/9.9.9 {}", token.proof())), "the caller 9.9.9; valid: one build"),
            // the same version, another build
            (Some(format!("stillhouse/{} {}", env!("CARGO_PKG_VERSION"), token.proof())), "valid: one build"),
            (Some(format!("stillhouse/{BUILD} {}", other.proof())), "has another token"),
        ] {
            let refused = call(agent).unwrap_err();
            assert!(refused.message().contains(says), "{refused}");
        }
    }
}
