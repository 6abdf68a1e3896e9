//! Several processes at one job: one holds the output, the others work for it.
//!
//! ```text
//!   holder: lock, plan ──ticket──► worker: join ─► splits, each committed as always
//!      └─ ends, or loses the output ─────────────► its workers' next commit is refused
//! ```
//!
//! A worker takes no lock of its own. Before each commit it makes sure that the run it works for still holds the output: on a disk its lock, in
//! a store its lease. So two jobs on one output stay impossible, and a split that two workers made is committed once, as ever.

use std::fs::{File, TryLockError};

use serde::{Deserialize, Serialize};

use super::{Backend, Output, STATE};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::storage::blocking;

/// What a worker needs to work for the run that holds an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Hash of the job.
    pub job_hash: String,
    /// Who holds the lease, in a store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

impl Output {
    /// For the workers of the run that holds this output.
    pub fn ticket(&self) -> Ticket {
        Ticket { job_hash: self.job_hash.clone(), holder: self.holder.get().cloned() }
    }

    /// The same output, for a worker of the run that gave the ticket.
    #[must_use]
    pub fn joined(self, ticket: &Ticket) -> Self {
        if let Some(holder) = &ticket.holder {
            let _ = self.holder.set(holder.clone());
        }
        Self { joined: true, ..self.for_job(&ticket.job_hash) }
    }

    /// On a disk: whether the run that this worker works for still holds the lock. A run's own process holds it itself.
    pub(super) async fn is_locked(&self) -> Result<()> {
        let Backend::Disk(root) = &self.backend else { return Ok(()) };
        let path = root.join(STATE).join("lock");
        let shown = self.to_string();
        blocking(move || {
            let failed = |e| PipelineError::caused(ErrorKind::Output, format!("cannot look at {}", path.display()), e);
            match look(&path) {
                Ok(true) => Ok(()),
                Ok(false) => {
                    let message = format!("{shown}: the run that this worker works for has ended; this one stops");
                    Err(PipelineError::new(ErrorKind::Output, message))
                }
                Err(e) => Err(failed(e)),
            }
        })
        .await
    }
}

#[expect(clippy::disallowed_methods, reason = "called where it may block")]
fn look(lock: &std::path::Path) -> std::io::Result<bool> {
    match File::open(lock)?.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Silent;

    #[tokio::test]
    async fn a_worker_may_commit_as_long_as_its_run_holds_the_output() {
        let folder = tempfile::tempdir().unwrap();
        let made = Output::on_disk(folder.path()).unwrap().create(&Silent).await.unwrap();
        let run = made.for_job("abc");
        let lock = run.lock(&Silent).await.unwrap();
        let sent = serde_json::to_string(&run.ticket()).unwrap();
        let worker = Output::on_disk(folder.path()).unwrap().joined(&serde_json::from_str(&sent).unwrap());
        worker.still_ours().await.unwrap();
        // another run is refused meanwhile, of the same job too
        assert!(Output::on_disk(folder.path()).unwrap().for_job("abc").lock(&Silent).await.is_err());
        lock.release().await;
        let refused = worker.still_ours().await.unwrap_err().to_string();
        assert!(refused.ends_with("the run that this worker works for has ended; this one stops"), "{refused}");
    }
}
