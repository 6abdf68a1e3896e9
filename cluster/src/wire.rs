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

use crate::order::BUILD;
use crate::tls;
use crate::token::Token;

/// The largest message in bytes. The rows of 100,000 splits take about 40 MB.
pub const LARGEST_MESSAGE: usize = 512 << 20;

const CONNECTS: Duration = Duration::from_secs(10);
const KEEPS: Duration = Duration::from_secs(10);

/// The address of a scheduler, and how callers connect to it.
#[derive(Debug, Clone)]
pub struct Scheduler {
    /// The address as the user wrote it.
    named: String,
    host_and_port: String,
    /// The certificates to trust; `None` without TLS.
    tls: Option<ClientTlsConfig>,
}

impl Scheduler {
    /// The scheduler at `host:port`, without TLS, or at `https://host:port`. The address must already be validated.
    ///
    /// # Errors
    /// Those of [`tls::of_client`].
    pub fn find(named: &str) -> Result<Self> {
        let (host_and_port, tls) = match named.split_once("://") {
            Some(("https", address)) => (address, Some(tls::of_client()?)),
            Some((_, address)) => (address, None),
            None => (named, None),
        };
        Ok(Self { named: named.into(), host_and_port: host_and_port.into(), tls })
    }

    /// Host and port as separate values.
    pub fn host_and_port(&self) -> (&str, u16) {
        let (host, port) = self.host_and_port.rsplit_once(':').unwrap_or((&self.host_and_port, ""));
        (host, port.parse().unwrap_or_default())
    }

    /// Whether callers use TLS.
    pub fn speaks_tls(&self) -> bool {
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
        let endpoint = endpoint.connect_timeout(CONNECTS).http2_keep_alive_interval(KEEPS).keep_alive_timeout(KEEPS);
        endpoint.keep_alive_while_idle(true).user_agent(format!("stillhouse/{BUILD} {}", token.proof()))
    }

    /// Connects to the scheduler.
    ///
    /// # Errors
    /// When nothing answers at the address, or its certificate is not trusted.
    pub async fn connect(&self, token: &Token) -> Result<Channel> {
        let endpoint = self.endpoint(token).map_err(|e| self.unreached(&e))?;
        endpoint.connect().await.map_err(|e| self.unreached(&e))
    }

    fn unreached(&self, e: &(dyn Error + 'static)) -> PipelineError {
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

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.named)
    }
}

/// Admits a call whose caller has the token and this build.
///
/// # Errors
/// The status names what is missing or differs.
pub fn admit<T>(request: Request<T>, proof: &str) -> Result<Request<T>, Status> {
    let (build, got) = caller(request.metadata());
    match (build, got) {
        (None, _) | (_, None) => Err(Status::unauthenticated(
            "this scheduler serves stillhouse only, and the call does not say that it comes from one with this cluster's token",
        )),
        (Some(build), Some(_)) if build != BUILD => Err(Status::failed_precondition(format!(
            "the scheduler is stillhouse {BUILD}, the caller {build}; valid: one build throughout a cluster"
        ))),
        (_, Some(got)) if !same(got, proof) => {
            Err(Status::unauthenticated("the caller has another token than this cluster's scheduler"))
        }
        _ => Ok(request),
    }
}

fn caller(metadata: &MetadataMap) -> (Option<&str>, Option<&str>) {
    let agent = metadata.get("user-agent").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut words = agent.split(' ');
    (words.next().and_then(|word| word.strip_prefix("stillhouse/")), words.next())
}

fn same(a: &str, b: &str) -> bool {
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
            admit(request, &token.proof()).map(drop)
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
