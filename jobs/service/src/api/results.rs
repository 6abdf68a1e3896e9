//! The results of a job: its log, and the manifest and a report of its data set.
//!
//! A confined worker reads manifest and report, because a data set is untrusted input.

use std::path::PathBuf;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::Deserialize;
use serde_json::Value;
use stillhouse_pipeline::storage::StoreUrl;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use utoipa::IntoParams;

use super::auth::Caller;
use super::fair_semaphore::Requester;
use super::problem::{ApiResult, ProblemDetails};
use super::query::{Id, NoQuery, Params};
use super::report_cache::DatasetQuery;
use super::submit::JSON;
use super::{App, require_visible};
use crate::client_limits::Watcher;
use crate::dataset_query::{QueryError, query_worker};
use crate::logs::LogReader;
use crate::model::{EventType, EventView, JobId, JobState};
use crate::store::{Store, events, jobs};
use crate::wait_until_set;
use crate::worker_protocol::WorkerTask;

/// Which lines to return, and whether to follow the log.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LogsQuery {
    /// Whether to continue until the job has ended.
    #[param(default = false)]
    follow: Option<bool>,
    /// Only this many of the last lines.
    #[param(minimum = 0, maximum = 1_000_000)]
    tail: Option<u32>,
}

/// Which row to decode.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReportQuery {
    /// Number of the row to decode, from 0, over the whole data set.
    #[param(minimum = 0, default = 0)]
    row: Option<u64>,
}

/// Get the log of a job
///
/// Lines of all attempts, each with its time. The oldest lines are removed when the log reaches its limit.
#[utoipa::path(get, path = "/jobs/{id}/logs", operation_id = "getJobLogs", tag = "results", params(Id, LogsQuery), responses(
    (status = 200, description = "The lines of the log", content((String = "text/plain; charset=utf-8"))),
    (status = 429, description = "Too many live streams, or too many requests", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn logs(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<LogsQuery>,
) -> ApiResult<Response> {
    require_visible(&app, &caller, &id).await?;
    let receiver = app.service.store.subscribe();
    let job_id = id.clone();
    let job = app.service.store.read(move |c| jobs::get(c, &job_id)).await?;
    let follow = query.follow.unwrap_or(false);
    let watcher = if follow { Some(super::events::open_stream(&app, &caller)?) } else { None };
    let mut reader = app.service.logs.read(&id);
    if let Some(lines) = query.tail {
        if lines > MAX_TAIL_LINES {
            return Err(ProblemDetails::bad_request(format!("tail: got {lines}; valid: 0 to {MAX_TAIL_LINES}")));
        }
        // `tail` reads the whole log, some megabytes
        let _permit = app.tail_permits.acquire(Requester::from_caller(&caller)).await;
        let skip = move || reader.skip_to_tail(lines as usize).map(|()| reader);
        let skipped = tokio::task::spawn_blocking(skip).await.map_err(|e| ProblemDetails::internal(&e))?;
        reader = skipped.map_err(|e| ProblemDetails::internal(&e))?;
    }
    let lines = LogStream {
        reader: Some(reader),
        id,
        ended: !follow || job.state.is_final(),
        store: std::sync::Arc::clone(&app.service.store),
        receiver,
        stopping: app.service.stopping.subscribe(),
        watcher,
    };
    let body = Body::from_stream(stream::unfold(lines, |mut lines| async move { Some((lines.next().await?, lines)) }));
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"))], body).into_response())
}

const MAX_TAIL_LINES: u32 = 1_000_000;
const POLL_INTERVAL: Duration = Duration::from_millis(300);

struct LogStream {
    reader: Option<LogReader>,
    id: JobId,
    /// Whether the job writes no more lines.
    ended: bool,
    store: std::sync::Arc<Store>,
    receiver: Receiver<std::sync::Arc<EventView>>,
    stopping: watch::Receiver<bool>,
    watcher: Option<Watcher>,
}

impl LogStream {
    async fn next(&mut self) -> Option<std::io::Result<Bytes>> {
        loop {
            let mut reader = self.reader.take()?;
            let read = tokio::task::spawn_blocking(move || (reader.next(), reader)).await;
            let (piece, reader) = read.ok()?;
            match piece {
                Err(e) => return Some(Err(e)),
                Ok(piece) if !piece.is_empty() => {
                    self.reader = Some(reader);
                    return Some(Ok(piece.into()));
                }
                Ok(_) if self.ended => return None,
                Ok(_) => self.reader = Some(reader),
            }
            if self.wait_for_change().await.is_none() {
                // an error, not an end: the job goes on
                self.reader = None;
                return Some(Err(std::io::Error::other(
                    "the service is stopping, or the token has expired or was revoked",
                )));
            }
        }
    }

    /// Waits a moment, or until the job has ended; `None` when the service stops or the token is no longer valid.
    async fn wait_for_change(&mut self) -> Option<()> {
        let pause = tokio::time::sleep(POLL_INTERVAL);
        tokio::pin!(pause);
        loop {
            let over = async {
                match &mut self.watcher {
                    Some(watcher) => watcher.token_ended().await,
                    None => std::future::pending().await,
                }
            };
            let event = tokio::select! {
                biased;
                () = over => return None,
                () = &mut pause => return Some(()),
                () = wait_until_set(&mut self.stopping) => return None,
                event = self.receiver.recv() => event,
            };
            match event {
                Ok(event) if event.job == self.id && event.kind == EventType::State => {
                    let to = event.data.get("to").and_then(Value::as_str).and_then(|s| s.parse::<JobState>().ok());
                    if to.is_some_and(JobState::is_final) {
                        self.ended = true;
                        return Some(());
                    }
                }
                Ok(_) => {}
                // the missed events may include the final one
                Err(RecvError::Lagged(_)) => {
                    let id = self.id.clone();
                    let job = self.store.read(move |c| jobs::get(c, &id)).await;
                    if job.map_or(true, |job| job.state.is_final()) {
                        self.ended = true;
                        return Some(());
                    }
                }
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

/// Get the manifest of a job's data set
#[utoipa::path(get, path = "/jobs/{id}/manifest", operation_id = "getJobManifest", tag = "results", params(Id), responses(
    (status = 200, description = "The content of `manifest.json`", body = Value),
    (status = 409, description = "The job has not succeeded, or its output now holds the data set of another job", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 503, description = "The request waited longer than `limits.report_seconds` for reports of other callers", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 504, description = "The data set could not be read within `limits.report_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 502, description = "The data set cannot be read", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn manifest(State(app): State<App>, caller: Caller, Id(id): Id, _: Params<NoQuery>) -> ApiResult<Response> {
    require_visible(&app, &caller, &id).await?;
    cached_or_query(&app, &caller, id, DatasetQuery::Manifest).await
}

/// Get a report of a job's data set
///
/// Totals, statistics, perplexity, bytes per token by column, and one decoded row. The report may be some seconds old.
#[utoipa::path(get, path = "/jobs/{id}/report", operation_id = "getJobReport", tag = "results", params(Id, ReportQuery), responses(
    (status = 200, description = "The report, as `stillhouse inspect --json` prints it", body = Value),
    (status = 409, description = "The job has not succeeded, or its output now holds the data set of another job", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 503, description = "The request waited longer than `limits.report_seconds` for reports of other callers", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 504, description = "The data set could not be read within `limits.report_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 502, description = "The data set cannot be read", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn report(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id,
    Params(query): Params<ReportQuery>,
) -> ApiResult<Response> {
    require_visible(&app, &caller, &id).await?;
    cached_or_query(&app, &caller, id, DatasetQuery::Report(query.row.unwrap_or(0))).await
}

/// The cached answer, or a worker's answer once the caller has a permit.
async fn cached_or_query(app: &App, caller: &Caller, id: JobId, query: DatasetQuery) -> ApiResult<Response> {
    let job_id = id.clone();
    let query_store = app.service.store.read(move |c| {
        let job = jobs::get(c, &job_id)?;
        let (file, folder) = jobs::file_and_folder(c, &job_id)?;
        let job_hash = events::job_hash(c, jobs::job_ref(c, &job_id)?.0.seq)?;
        Ok((job, file, PathBuf::from(folder), job_hash))
    });
    let (job, file, folder, job_hash) = query_store.await?;
    if job.state != JobState::Succeeded {
        let detail = format!("the job is {}; valid: succeeded", job.state);
        return Err(ProblemDetails::new(StatusCode::CONFLICT, detail));
    }
    let key = (id, query, app.service.running.changes());
    if let Some(cached) = app.reports.get(&key).await {
        return Ok(json_response(cached));
    }
    let (permits, store) = match object_store(&job.output) {
        Some(store) => (&app.store_reports, Some(store)),
        None => (&app.disk_reports, None),
    };
    let seconds = app.service.config.limits.report_seconds;
    let timeout = Duration::from_secs(seconds.into());
    let permit = tokio::time::timeout(timeout, permits.acquire(Requester::from_caller(caller).reading(store))).await;
    let _permit = permit.map_err(|_| {
        let detail = format!(
            "the reports of other callers took longer than {seconds} s (limits.report_seconds); try again later"
        );
        ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    })?;
    let work = match query {
        DatasetQuery::Manifest => WorkerTask::Manifest { file, folder, job_hash },
        DatasetQuery::Report(row) => WorkerTask::Report { file, folder, job_hash, row },
    };
    let fresh = async {
        let result = tokio::time::timeout(timeout, query_worker(&app.service, work)).await.map_err(|_| {
            let detail = format!("reading the data set took longer than {seconds} s");
            ProblemDetails::new(StatusCode::GATEWAY_TIMEOUT, detail)
        })?;
        let value = result.map_err(query_problem)?;
        Ok(serde_json::to_vec(&value).map_err(|e| ProblemDetails::internal(&e))?.into())
    };
    app.reports.get_or_make(key, fresh).await.map(json_response)
}

fn json_response(answer: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(JSON))], answer).into_response()
}

/// The object store of an output; `None` for one on disk.
fn object_store(output: &str) -> Option<String> {
    let url = StoreUrl::parse(output)?.ok()?;
    Some(format!("{}://{}", url.scheme, url.bucket))
}

fn query_problem(why: QueryError) -> ProblemDetails {
    match why {
        QueryError::NotFound(message) => ProblemDetails::new(StatusCode::NOT_FOUND, message),
        QueryError::Unreadable(message) => ProblemDetails::new(StatusCode::BAD_GATEWAY, message),
        QueryError::OtherDataSet => {
            let detail =
                "the job's output now holds a different data set: it was overwritten, or files were appended to it";
            ProblemDetails::new(StatusCode::CONFLICT, detail)
        }
        QueryError::WorkerFailed(message) => ProblemDetails::internal(&message),
    }
}
