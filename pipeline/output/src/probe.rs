//! Whether a store keeps to `If-None-Match: *`, which every commit depends on. Some take the header and overwrite.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use stillhouse_base::storage::{Outcome, find_failure};

use super::STATE;
use super::lease::unique;

/// What a store makes of a conditional PUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    /// Only the first of two wins.
    Kept,
    /// The second overwrites the first.
    Ignored,
    /// The store says that it cannot.
    Refused,
}

/// Puts an object twice with the condition, and takes it away again: three small requests.
///
/// # Errors
/// What the store says: missing bucket, credentials, no right to write.
pub(super) async fn probe(store: &Arc<dyn ObjectStore>) -> object_store::Result<Condition> {
    let path = Path::from(format!("{STATE}/probe-{}", unique()));
    let put = || {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        store.put_opts(&path, PutPayload::from_static(b"may be deleted"), options)
    };
    // A refused first PUT has found its own object, whose answer was lost: that is an answer too.
    let first = put().await;
    let answer = match first {
        Ok(_) => put().await,
        refused => refused,
    };
    let condition = match answer {
        Ok(_) => Condition::Ignored,
        Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Condition::Kept,
        Err(object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. }) => {
            return Ok(Condition::Refused);
        }
        Err(e) if is_not_implemented(&e) => return Ok(Condition::Refused),
        Err(e) => return Err(e),
    };
    match store.delete(&path).await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(condition),
        Err(e) => Err(e),
    }
}

/// 501, of a server that knows no conditions.
fn is_not_implemented(error: &object_store::Error) -> bool {
    find_failure(error).is_some_and(|failure| match &failure.outcome {
        Outcome::Refused(refusal) => refusal.status.as_u16() == 501,
        Outcome::Broken(..) => false,
    })
}
