//! Cancels that the store cannot write yet because the disk is full.
//!
//! ```text
//!   cancel ─► stored ─────────────────────────────► the worker is stopped
//!          └► disk full ─► pending, the worker is stopped ─► stored once there is space, before any job starts or ends
//! ```
//!
//! The job to cancel may be the one that fills the disk, so a cancel stops its worker without waiting for disk space.
//! The API shows a pending cancel as the state of the job. If the service ends before there is space, even in the
//! reserve, the cancel is lost: the next start finds the job unchanged.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Service;
use super::model::{Job, JobId, JobState, Time};
use super::stop::Stop;
use super::store::jobs;
use super::store::{Result, StoreError};

/// Pending cancels by job; at most one per unfinished job.
#[derive(Debug, Default)]
pub struct PendingCancels(Mutex<HashMap<JobId, Cancel>>);

#[derive(Debug, Clone)]
struct Cancel {
    by: String,
    at: Time,
}

impl PendingCancels {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Cancel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the state of a job that has a pending cancel to `cancelling`.
    pub fn apply(&self, job: &mut Job) {
        if let Some(cancel) = self.lock().get(&job.id)
            && !job.state.is_final()
        {
            (job.state, job.reason, job.queue_position) =
                (JobState::Cancelling, Some(jobs::cancelled_by(&cancel.by)), None);
        }
    }
}

/// Cancels an unfinished job; returns the job afterwards.
///
/// # Errors
/// [`StoreError::NoJob`], [`StoreError::WrongState`]; a full disk is never an error.
pub async fn cancel(service: &Service, id: JobId, by: String) -> Result<Job> {
    let cancel = Cancel { by, at: Time::now() };
    let mut stored = store_cancel(service, id.clone(), cancel.clone()).await;
    if matches!(stored, Err(StoreError::DiskFull(_))) && service.store.reserve.release() {
        stored = store_cancel(service, id.clone(), cancel.clone()).await;
    }
    if !matches!(stored, Err(StoreError::DiskFull(_))) {
        return stored;
    }
    let found = id.clone();
    let mut job = service.store.read(move |c| jobs::get(c, &found)).await?;
    if job.state.is_final() {
        return Err(StoreError::WrongState { state: job.state, valid: jobs::CANCELLABLE });
    }
    // the first cancel counts, as it does with space on the disk
    service.pending_cancels.lock().entry(id).or_insert(cancel);
    service.running.stop(&job.id, job.attempt, Stop::Cancel);
    service.wake.notify_one();
    service.pending_cancels.apply(&mut job);
    Ok(job)
}

/// Stores all pending cancels.
///
/// # Errors
/// The store's errors; cancels that are not stored stay pending.
pub async fn store_pending(service: &Service) -> Result<()> {
    let pending: Vec<JobId> = service.pending_cancels.lock().keys().cloned().collect();
    for id in pending {
        store_pending_of(service, &id).await?;
    }
    Ok(())
}

/// Stores the pending cancel of one job, if there is one.
///
/// # Errors
/// The store's errors; the cancel stays pending.
pub async fn store_pending_of(service: &Service, id: &JobId) -> Result<()> {
    let Some(cancel) = service.pending_cancels.lock().get(id).cloned() else { return Ok(()) };
    match store_cancel(service, id.clone(), cancel).await {
        // the job has ended or was deleted meanwhile
        Ok(_) | Err(StoreError::WrongState { .. } | StoreError::NoJob(_)) => {
            service.pending_cancels.lock().remove(id);
            Ok(())
        }
        Err(e) => Err(e),
    }
}

async fn store_cancel(service: &Service, id: JobId, Cancel { by, at }: Cancel) -> Result<Job> {
    let cancel = move |t: &_, appended: &mut _| jobs::cancel(t, &id, &by, at, appended);
    let job = service.store.write(move |t, appended| cancel(t, appended)).await?;
    if job.state == JobState::Cancelling {
        service.running.stop(&job.id, job.attempt, Stop::Cancel);
    }
    Ok(job)
}
