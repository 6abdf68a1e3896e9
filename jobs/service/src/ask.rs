//! Queries of a data set by a confined worker, because a data set is untrusted input.

use std::time::Duration;

use serde_json::Value;
use stillhouse_pipeline::events::Event;

use super::Service;
use super::model::JobId;
use super::order::{Message, Order, Work};
use super::worker::{FromWorker, Start, Worker};

/// Why there is no answer.
#[derive(Debug)]
pub enum Unanswered {
    /// The requested item does not exist.
    NotThere(String),
    /// The data set cannot be read.
    Failed(String),
    /// The data set at the output is not known to be this job's.
    OtherDataSet,
    /// The worker failed.
    Broken(String),
}

/// Runs a query in a worker, which is killed when this future is dropped.
///
/// # Errors
/// See [`Unanswered`].
pub async fn ask(service: &Service, work: Work) -> Result<Value, Unanswered> {
    let broken = |e: &dyn std::fmt::Display| Unanswered::Broken(e.to_string());
    let name = JobId::new().map_err(|e| broken(&e))?;
    let scratch = service.scratch(&format!("ask-{name}"));
    let start = Start {
        program: service.program.clone(),
        visible_gpus: Some(String::new()),
        endpoint: service.config.endpoint.clone(),
        order: Order {
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
        worker.give(&start.order).map(|()| worker)
    });
    let worker = started.await.map_err(|e| broken(&e))?.map_err(|e| broken(&e))?;
    let mut asked = Asked { worker: Some(worker), scratch };
    let mut log = Vec::new();
    let mut answer = None;
    while let Some(said) = match &mut asked.worker {
        Some(worker) => worker.said.recv().await,
        None => None,
    } {
        match said {
            FromWorker::Message(message) => match *message {
                Message::Answer(value) => answer = Some(Ok(value)),
                Message::OtherDataSet => answer = Some(Err(Unanswered::OtherDataSet)),
                // the requested row does not exist; the pipeline names the option of the command line
                Message::Failed { kind, message, .. } if kind == "usage" && message.starts_with("--row") => {
                    answer = Some(Err(Unanswered::NotThere(message.trim_start_matches("--").to_owned())));
                }
                Message::Failed { message, .. } => answer = Some(Err(Unanswered::Failed(message))),
                Message::Event(_) => {}
            },
            FromWorker::Log(line) if log.len() < 4096 => log.extend(line),
            FromWorker::Log(_) | FromWorker::Garbled(_) => {}
        }
    }
    answer.unwrap_or_else(|| {
        let said = String::from_utf8_lossy(&log).into_owned();
        Err(broken(&format!("a worker that was to read a data set ended without an answer: {said}")))
    })
}

/// The final event of a job's worker, if the data set is complete and belongs to the job. The worker may have been
/// stopped just before it sent this event.
pub async fn finished(service: &Service, file: String, folder: String, job_hash: String) -> Option<Event> {
    let patience = Duration::from_secs(service.config.limits.report_seconds.into());
    let work = Work::Finished { file, folder: folder.into(), job_hash };
    let answered = match tokio::time::timeout(patience, ask(service, work)).await {
        Ok(Ok(answer)) => serde_json::from_value(answer).map_err(|e| e.to_string()),
        Ok(Err(e)) => Err(format!("{e:?}")),
        Err(_) => Err(format!("no answer in {} s", patience.as_secs())),
    };
    answered.unwrap_or_else(|why| {
        tracing::warn!("whether the data set of a stopped job is whole cannot be seen: {why}");
        None
    })
}

struct Asked {
    worker: Option<Worker>,
    scratch: std::path::PathBuf,
}

impl Drop for Asked {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        worker.kill();
        let scratch = std::mem::take(&mut self.scratch);
        // reaped in the background; its folder is removed once nothing writes into it
        tokio::spawn(async move {
            if let Err(e) = worker.wait().await {
                tracing::warn!("the end of a worker was not seen: {e}");
            }
            if let Err(e) = tokio::fs::remove_dir_all(&scratch).await {
                tracing::warn!("cannot remove {}: {e}", scratch.display());
            }
        });
    }
}
