//! Tests whether a store honours `If-None-Match: *`, on which every commit depends. Some stores accept the header and
//! overwrite.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use stillhouse_base::storage::{Outcome, find_transport_error};

use super::STATE_FOLDER;
use super::lease::unique;

/// How a store treats a conditional PUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConditionSupport {
    /// Honoured: the second PUT fails.
    Honoured,
    /// Ignored: the second PUT overwrites the first.
    Ignored,
    /// The store reports that it does not support it.
    Unsupported,
}

/// Puts an object twice with the condition, then deletes it: three small requests.
///
/// # Errors
/// Any other error of the store: missing bucket, credentials, no permission to write.
pub(super) async fn probe(store: &Arc<dyn ObjectStore>) -> object_store::Result<ConditionSupport> {
    let path = Path::from(format!("{STATE_FOLDER}/probe-{}", unique()));
    let put = || {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        store.put_opts(&path, PutPayload::from_static(b"may be deleted"), options)
    };
    // If the first PUT is refused, an earlier attempt of it succeeded and its response was lost. That proves the
    // condition.
    let first = put().await;
    let answer = match first {
        Ok(_) => put().await,
        refused => refused,
    };
    let condition = match answer {
        Ok(_) => ConditionSupport::Ignored,
        Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
            ConditionSupport::Honoured
        }
        Err(object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. }) => {
            return Ok(ConditionSupport::Unsupported);
        }
        Err(e) if is_not_implemented(&e) => return Ok(ConditionSupport::Unsupported),
        Err(e) => return Err(e),
    };
    match store.delete(&path).await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(condition),
        Err(e) => Err(e),
    }
}

/// Whether the error is HTTP 501, from a server without conditional requests.
fn is_not_implemented(error: &object_store::Error) -> bool {
    find_transport_error(error).is_some_and(|failure| match &failure.outcome {
        Outcome::Refused(refusal) => refusal.status.as_u16() == 501,
        Outcome::Broken(..) => false,
    })
}
