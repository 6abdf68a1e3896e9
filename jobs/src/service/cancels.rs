//! Cancels: stored, and the worker stopped; kept here while the disk has no room for them.
//!
//! ```text
//!   cancel ─► stored ────────────────────────────► its worker is stopped
//!          └► no room ─► kept, its worker stopped ─► stored once there is room, before any job begins or ends
//! ```
//!
//! What a job writes may be what the disk is full of, so stopping it must not wait for room. What is kept is shown as the job's state. It is
//! lost where the service ends before there is room again, its reserve included: the next start finds the job as it was.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Service;
use super::model::{Job, JobId, JobState, Time};
use super::runner::Stop;
use super::store::jobs;
use super::store::{Result, StoreError};

/// Those that are not stored yet; never more than there are jobs that are not over.
#[derive(Debug, Default)]
pub struct Cancels(Mutex<HashMap<JobId, Cancel>>);

#[derive(Debug, Clone)]
struct Cancel {
    by: String,
    at: Time,
}

impl Cancels {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, Cancel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a job the state that a cancel which is not stored yet makes of it.
    pub fn show(&self, job: &mut Job) {
        if let Some(cancel) = self.lock().get(&job.id)
            && !job.state.is_final()
        {
            (job.state, job.reason, job.queue_position) =
                (JobState::Cancelling, Some(jobs::cancelled_by(&cancel.by)), None);
        }
    }
}

/// Cancels a job that is not over; gives it as it is then.
///
/// # Errors
/// [`StoreError::NoJob`], [`StoreError::WrongState`]; never for want of room.
pub async fn cancel(service: &Service, id: JobId, by: String) -> Result<Job> {
    let cancel = Cancel { by, at: Time::now() };
    let mut stored = store(service, id.clone(), cancel.clone()).await;
    if matches!(stored, Err(StoreError::NoRoom(_))) && service.store.reserve.give() {
        stored = store(service, id.clone(), cancel.clone()).await;
    }
    if !matches!(stored, Err(StoreError::NoRoom(_))) {
        return stored;
    }
    let found = id.clone();
    let mut job = service.store.read(move |c| jobs::get(c, &found)).await?;
    // the first one counts, as it does where there is room
    service.cancels.lock().entry(id).or_insert(cancel);
    service.running.stop(&job.id, job.attempt, Stop::Cancel);
    service.wake.notify_one();
    service.cancels.show(&mut job);
    Ok(job)
}

/// Stores what is kept.
///
/// # Errors
/// Of the store; what is not stored then is kept on.
pub async fn store_kept(service: &Service) -> Result<()> {
    let kept: Vec<JobId> = service.cancels.lock().keys().cloned().collect();
    for id in kept {
        store_kept_of(service, &id).await?;
    }
    Ok(())
}

/// Stores what is kept of one job, if anything is.
///
/// # Errors
/// As there.
pub async fn store_kept_of(service: &Service, id: &JobId) -> Result<()> {
    let Some(cancel) = service.cancels.lock().get(id).cloned() else { return Ok(()) };
    match store(service, id.clone(), cancel).await {
        // it is over meanwhile, or forgotten
        Ok(_) | Err(StoreError::WrongState { .. } | StoreError::NoJob(_)) => {
            service.cancels.lock().remove(id);
            Ok(())
        }
        Err(e) => Err(e),
    }
}

async fn store(service: &Service, id: JobId, Cancel { by, at }: Cancel) -> Result<Job> {
    let cancel = move |t: &_, appended: &mut _| jobs::cancel(t, &id, &by, at, appended);
    let job = service.store.write(move |t, appended| cancel(t, appended)).await?;
    if job.state == JobState::Cancelling {
        service.running.stop(&job.id, job.attempt, Stop::Cancel);
    }
    Ok(job)
}
