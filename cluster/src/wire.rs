//! How the scheduler is called: by whom, and in which version, in a header of every call.
//!
//! `user-agent: stillhouse/<version> <proof>`: the one header that Ballista's executor lets its owner set, so all callers use it.

use std::time::Duration;

use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::order::VERSION;
use crate::token::Token;

/// The largest message: the rows of a hundred thousand splits are about 40 MB.
pub const LARGEST_MESSAGE: usize = 512 << 20;

const CONNECTS: Duration = Duration::from_secs(10);
const KEEPS: Duration = Duration::from_secs(10);

/// An endpoint whose calls say who calls.
pub fn signed(endpoint: Endpoint, token: &Token) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = endpoint.connect_timeout(CONNECTS).http2_keep_alive_interval(KEEPS).keep_alive_timeout(KEEPS);
    endpoint.keep_alive_while_idle(true).user_agent(format!("stillhouse/{VERSION} {}", token.proof()))
}

/// Connects to a scheduler.
///
/// # Errors
/// When nobody answers there.
pub async fn connect(scheduler: &str, token: &Token) -> Result<Channel> {
    let failed = |e: &dyn std::error::Error| {
        let why = stillhouse_pipeline::job::chain(e);
        let message = format!("no scheduler answers at {scheduler}: {why}; `stillhouse scheduler` starts one");
        PipelineError::new(ErrorKind::Output, message).retryable()
    };
    let endpoint = Endpoint::from_shared(format!("http://{scheduler}")).map_err(|e| failed(&e))?;
    signed(endpoint, token).map_err(|e| failed(&e))?.connect().await.map_err(|e| failed(&e))
}

/// Lets a call pass where its caller has the token and is of this version.
///
/// # Errors
/// Names what is missing.
pub fn admit<T>(request: Request<T>, proof: &str) -> Result<Request<T>, Status> {
    let (version, got) = caller(request.metadata());
    match (version, got) {
        (None, _) | (_, None) => Err(Status::unauthenticated(
            "this scheduler serves stillhouse only, and the call does not say that it comes from one with this cluster's token",
        )),
        (Some(version), Some(_)) if version != VERSION => Err(Status::failed_precondition(format!(
            "the scheduler is stillhouse {VERSION}, the caller {version}; valid: one version throughout a cluster"
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
    fn calls_of_strangers_and_of_other_versions_are_refused_by_name() {
        let (token, other) = (Token::new(&"a".repeat(32)), Token::new(&"b".repeat(32)));
        let call = |agent: Option<String>| {
            let mut request = Request::new(());
            if let Some(agent) = agent {
                request.metadata_mut().insert("user-agent", agent.parse().unwrap());
            }
            admit(request, &token.proof()).map(drop)
        };
        assert!(call(Some(format!("stillhouse/{VERSION} {} tonic/0.14.9", token.proof()))).is_ok());
        for (agent, says) in [
            (None, "serves stillhouse only"),
            (Some("tonic/0.14.9".to_owned()), "serves stillhouse only"),
            (Some(format!("stillhouse/{VERSION}")), "serves stillhouse only"),
            (Some(format!("stillhouse/9.9.9 {}", token.proof())), "the caller 9.9.9"),
            (Some(format!("stillhouse/{VERSION} {}", other.proof())), "has another token"),
        ] {
            let refused = call(agent).unwrap_err();
            assert!(refused.message().contains(says), "{refused}");
        }
    }
}
