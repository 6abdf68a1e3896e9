//! Queries of a data set by a confined worker, because a data set is untrusted input.

use std::time::Duration;

use serde_json::Value;
use stillhouse_pipeline::events::Event;

use super::Service;
use super::model::JobId;
use super::worker::{Worker, WorkerOutput, WorkerStart};
use super::worker_protocol::{Message, WorkerRequest, WorkerTask};

/// Why there is no answer.
#[derive(Debug)]
pub enum QueryError {
    /// The requested item does not exist.
    NotFound(String),
    /// The data set cannot be read.
    Unreadable(String),
    /// The data set at the output is not known to be this job's.
    OtherDataSet,
    /// The worker failed.
    WorkerFailed(String),
}

/// Runs a query in a worker, which is killed when this future is dropped.
///
/// # Errors
/// See [`QueryError`].
pub async fn query_worker(service: &Service, work: WorkerTask) -> Result<Value, QueryError> {
    let worker_failed = |e: &dyn std::fmt::Display| QueryError::WorkerFailed(e.to_string());
    let id = JobId::new().map_err(|e| worker_failed(&e))?;
    let scratch = service.scratch(&format!("ask-{id}"));
    let start = WorkerStart {
        program: service.program.clone(),
        visible_gpus: Some(String::new()),
        endpoint: service.config.endpoint.clone(),
        request: WorkerRequest {
            work,
            access: service.config.job_access(),
            scheduler: None,
            scratch: scratch.clone(),
            threads: 1,
            allow_unconfined: service.config.allow_unconfined,
            memory_bytes: None,
        },
    };
    let started = tokio::task::spawn_blocking(move || {
        let mut worker = Worker::start(&start)?;
        worker.send_request(&start.request).map(|()| worker)
    });
    let worker = started.await.map_err(|e| worker_failed(&e))?.map_err(|e| worker_failed(&e))?;
    let mut query = RunningQuery { worker: Some(worker), scratch };
    let mut log = Vec::new();
    let mut answer = None;
    while let Some(output) = match &mut query.worker {
        Some(worker) => worker.output.recv().await,
        None => None,
    } {
        match output {
            WorkerOutput::Message(message) => match *message {
                Message::Answer(value) => answer = Some(Ok(value)),
                Message::OtherDataSet => answer = Some(Err(QueryError::OtherDataSet)),
                // the requested row does not exist; the pipeline names the option of the command line
                Message::Failed { kind, message, .. } if kind == "usage" && message.starts_with("--row") => {
                    answer = Some(Err(QueryError::NotFound(message.trim_start_matches("--").to_owned())));
                }
                Message::Failed { message, .. } => answer = Some(Err(QueryError::Unreadable(message))),
                Message::Event(_) => {}
            },
            WorkerOutput::Log(line) if log.len() < 4096 => log.extend(line),
            WorkerOutput::Log(_) | WorkerOutput::Invalid(_) => {}
        }
    }
    answer.unwrap_or_else(|| {
        let output = String::from_utf8_lossy(&log).into_owned();
        Err(worker_failed(&format!("the worker that reads the data set ended without an answer: {output}")))
    })
}

/// The final event of a job's worker, if the data set is complete and belongs to the job. The worker may have been
/// stopped just before it sent this event.
pub async fn query_finished(service: &Service, file: String, folder: String, job_hash: String) -> Option<Event> {
    let timeout = Duration::from_secs(service.config.limits.report_seconds.into());
    let work = WorkerTask::Finished { file, folder: folder.into(), job_hash };
    let result = match tokio::time::timeout(timeout, query_worker(service, work)).await {
        Ok(Ok(answer)) => serde_json::from_value(answer).map_err(|e| e.to_string()),
        Ok(Err(e)) => Err(format!("{e:?}")),
        Err(_) => Err(format!("no answer in {} s", timeout.as_secs())),
    };
    result.unwrap_or_else(|why| {
        tracing::warn!("cannot check whether the data set of a stopped job is complete: {why}");
        None
    })
}

struct RunningQuery {
    worker: Option<Worker>,
    scratch: std::path::PathBuf,
}

impl Drop for RunningQuery {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        worker.kill();
        let scratch = std::mem::take(&mut self.scratch);
        // reaped in the background; its folder is removed once nothing writes into it
        tokio::spawn(async move {
            if let Err(e) = worker.wait().await {
                tracing::warn!("cannot wait for the end of a worker: {e}");
            }
            if let Err(e) = tokio::fs::remove_dir_all(&scratch).await {
                tracing::warn!("cannot remove {}: {e}", scratch.display());
            }
        });
    }
}
