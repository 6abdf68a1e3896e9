//! `clean`: removes what an interrupted run or export left behind.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use serde::Serialize;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::Observer;
use stillhouse_output::Output;

/// What was removed, or would be in a dry run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cleaned {
    /// Final names of files whose uploads did not finish.
    pub uploads: Vec<String>,
    /// Staged files and probes.
    pub files: Vec<String>,
    /// Whether the store can list unfinished uploads.
    pub lists_uploads: bool,
}

/// Removes unfinished uploads, staged files and probes of a finished or unfinished data set.
///
/// # Errors
/// If a run is active in the folder, there is no data set, or the store fails.
pub async fn clean(output: Output, dry_run: bool, observer: &dyn Observer) -> Result<Cleaned> {
    if !output.has_folder().await {
        return Err(PipelineError::new(ErrorKind::DataSet, format!("{output}: no such folder")));
    }
    if !output.has_state().await? {
        let message = format!("{output}: no Stillhouse job or export has written here");
        return Err(PipelineError::new(ErrorKind::DataSet, message));
    }
    if dry_run {
        let (uploads, files) = (output.abort_uploads(true).await?, output.leftovers().await?);
        return Ok(Cleaned { uploads, files, lists_uploads: output.lists_uploads() });
    }
    let lock = output.lock(observer).await?;
    let result = take_away(&output).await;
    lock.release().await;
    let (uploads, files) = result?;
    Ok(Cleaned { uploads, files, lists_uploads: output.lists_uploads() })
}

async fn take_away(output: &Output) -> Result<(Vec<String>, Vec<String>)> {
    let files = output.leftovers().await?;
    let uploads = output.abort_uploads(true).await?;
    output.abort_uploads(false).await?;
    output.remove_leftovers().await?;
    Ok((uploads, files))
}
