//! The locked output of a running job.

use super::stop::{release, was_stopped};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::Observer;
use crate::output::{Found, Lock, Output};

/// An output that this process has locked.
pub(crate) struct LockedOutput {
    /// The output, set up for the job that holds it.
    pub output: Output,
    lock: Lock,
    /// Whether the output was empty before the lock.
    was_empty: bool,
    made_folder: bool,
}

impl LockedOutput {
    /// Creates the folder of an output and locks it. `for_job` sets the job that commits there.
    ///
    /// # Errors
    /// If the output cannot be written, or another run holds it.
    pub async fn lock(output: Output, for_job: impl FnOnce(Output) -> Output, observer: &dyn Observer) -> Result<Self> {
        let was_empty = output.is_nothing().await?;
        let made_folder = output.folder().is_some() && !output.has_folder().await;
        let output = for_job(output.create(observer).await?);
        let lock = output.lock(observer).await?;
        Ok(Self { output, lock, was_empty, made_folder })
    }

    /// Releases the lock. If the job failed before its first commit, removes what it wrote to an empty output.
    pub async fn release<T>(self, result: &Result<T>) {
        if result.is_err() && self.was_empty && !was_stopped(result) {
            self.output.remove_if_nothing_is_committed(self.made_folder).await;
        }
        release(self.lock, result).await;
    }
}

/// Whether `--overwrite` applies to a refusal: the output holds another job's data set.
///
/// # Errors
/// If the output cannot be read.
pub(crate) async fn may_overwrite(output: &Output, overwrite: bool, refusal: &PipelineError) -> Result<bool> {
    Ok(overwrite && refusal.kind == ErrorKind::Usage && output.is_of_a_job().await?)
}

/// What the output has of the job with this hash, after `--overwrite` removed another job's data set.
///
/// # Errors
/// With the refusal in `found` if it is not overwritten; if the output cannot be read or removed.
pub(crate) async fn remove_overwritten(
    output: &Output,
    job_hash: &str,
    overwrite: bool,
    found: Result<Found>,
) -> Result<Found> {
    match found {
        Err(refusal) if may_overwrite(output, overwrite, &refusal).await? => {
            output.remove().await?;
            output.inspect(job_hash).await
        }
        found => found,
    }
}
