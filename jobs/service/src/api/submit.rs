//! Submission of job files: checks all that needs no reading of input or models, then queues the job.
//!
//! The worker finds problems of the input or the teacher within the first seconds of the first attempt. It is confined,
//! and reports its findings by field as well.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::{Body, HttpBody};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::path_expansion::PathExpander;
use stillhouse_pipeline::storage::Location;
use stillhouse_schemas::parse::Parsed;
use stillhouse_schemas::problems::{Problem, Problems};
use stillhouse_schemas::spec::JobSpec;
use stillhouse_teacher::DeviceChoice;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::admission::{self, Admission, CancelOnDrop};
use super::auth::Caller;
use super::fair_semaphore::Requester;
use super::problem::{ApiResult, ProblemDetails};
use super::query::Params;
use crate::bounds::{self, quoted_prefix};
use crate::config::Config;
use crate::model::{FieldProblem, Job, JobId, Slot, Time};
use crate::store::jobs::{self, IdempotencyKey, NewJob, QueueLimits, Submitted};
use crate::store::tokens::Scope;

pub const YAML: &str = "application/yaml";
pub const JSON: &str = "application/json";

/// How to run a job.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SubmitQuery {
    /// Absolute folder on the server: the base of the job file's relative paths.
    #[param(max_length = 4096)]
    folder: Option<String>,
    /// Jobs of higher priority run first.
    #[param(minimum = -100, maximum = 100, default = 0)]
    priority: Option<i32>,
    /// Attempts that may fail or crash. Default and maximum: the server's limit.
    #[param(minimum = 1)]
    max_attempts: Option<u32>,
    /// Longest duration of one attempt. Default and maximum: the server's limit.
    #[param(minimum = 1)]
    time_limit_seconds: Option<u64>,
    /// Largest total size of the shards. Default and maximum: the server's limit.
    #[param(minimum = 1)]
    output_limit_bytes: Option<u64>,
    /// Whether the job may replace another job's data set at its output.
    #[param(default = false)]
    overwrite: Option<bool>,
    /// For a finished data set whose input has new files: whether to make splits only of the new files and keep every
    /// shard.
    #[param(default = false)]
    append: Option<bool>,
}

/// Base folder of relative paths.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ValidateQuery {
    /// Absolute folder on the server: the base of the job file's relative paths.
    #[param(max_length = 4096)]
    folder: Option<String>,
}

/// The result of a validation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Validation {
    /// Whether no problem was found.
    pub valid: bool,
    /// The job's name.
    pub name: Option<String>,
    /// All problems, by field.
    pub problems: Vec<FieldProblem>,
}

/// A job file from a request.
struct Upload {
    json: bool,
    text: String,
}

/// Submit a job
///
/// The body is a job file. A request with the header `Idempotency-Key` can be repeated without creating a second job.
#[utoipa::path(post, path = "/jobs", operation_id = "submitJob", tag = "jobs", params(SubmitQuery,
    ("Idempotency-Key" = Option<String>, Header, description = "1 to 200 visible ASCII characters that name this submission", pattern = "^[!-~]{1,200}$")),
    request_body(content((JobFile = "application/json"), (String = "application/yaml")), description = "The job file"),
    responses(
    (status = 201, description = "The job is queued", body = Job, headers(("location" = String, description = "Path of the job"))),
    (status = 200, description = "The job of an earlier request with the same key and content", body = Job),
    (status = 408, description = "The body did not arrive within `limits.body_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 413, description = "The job file is too large", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 415, description = "The media type is neither YAML nor JSON", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 422, description = "The job file has problems, or the key was used for another request", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 503, description = "The checks of the job file took longer than `limits.check_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn submit(
    State(app): State<App>,
    caller: Caller,
    Params(query): Params<SubmitQuery>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Response> {
    let user = caller.require(Scope::Submit)?.user.clone();
    check_rate(&app, &caller)?;
    if app.service.store.disk_space.is_full() {
        return Err(ProblemDetails::disk_full());
    }
    let config = &app.service.config;
    let folder = base_folder(config, query.folder.as_deref())?;
    let options = Options::from_query(config, &query)?;
    let key = idempotency_key(&headers)?;
    let upload = read_upload(config, &headers, body).await?;
    let key = key.map(|text| IdempotencyKey { request: fingerprint(&upload, &folder, &options), text });
    let text = upload.text.clone();
    let (checked, upload_folder) = check(&app, &caller, upload, folder).await?;
    let (spec, slot) = checked.outcome.map_err(|problems| ProblemDetails::from_file_problems(&problems))?;
    let new = NewJob {
        id: JobId::new().map_err(|e| ProblemDetails::internal(&e))?,
        name: spec.name.clone(),
        user,
        priority: options.priority,
        slot,
        media_type: if is_json(&headers) { JSON } else { YAML }.to_owned(),
        file: text,
        output: output_location(&spec, &upload_folder),
        folder: upload_folder.to_string_lossy().into_owned(),
        max_attempts: options.max_attempts,
        time_limit_seconds: options.time_limit_seconds,
        output_limit_bytes: options.output_limit_bytes,
        overwrite: options.overwrite,
        append: options.append,
    };
    let limits = QueueLimits { all: config.limits.queued_jobs, per_user: config.limits.queued_jobs_per_user };
    let service = Arc::clone(&app.service);
    let submitted = super::run_uncancelled(async move {
        let queue = move |t: &_, appended: &mut _| jobs::submit(t, &new, key.as_ref(), limits, Time::now(), appended);
        let submitted = service.store.write(move |t, appended| queue(t, appended)).await?;
        service.wake.notify_one();
        Ok(submitted)
    });
    let submitted = submitted.await?;
    match submitted {
        Submitted::Existing(job) => Ok((StatusCode::OK, Json(job)).into_response()),
        Submitted::New(job) => {
            tracing::info!(job = %job.id, user = job.user, name = job.name, "submitted");
            let location = HeaderValue::from_str(&format!("{}/jobs/{}", super::BASE, job.id));
            let mut response = (StatusCode::CREATED, Json(job)).into_response();
            if let Ok(location) = location {
                response.headers_mut().insert(header::LOCATION, location);
            }
            Ok(response)
        }
    }
}

/// Validate a job file
///
/// Runs the checks of a submission, and submits nothing.
#[utoipa::path(post, path = "/validate", operation_id = "validateJob", tag = "jobs", params(ValidateQuery),
    request_body(content((JobFile = "application/json"), (String = "application/yaml")), description = "The job file"),
    responses(
    (status = 200, description = "The result of the checks", body = Validation),
    (status = 408, description = "The body did not arrive within `limits.body_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 413, description = "The job file is too large", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 415, description = "The media type is neither YAML nor JSON", body = ProblemDetails, content_type = "application/problem+json"),
    (status = 503, description = "The checks of the job file took longer than `limits.check_seconds`", body = ProblemDetails, content_type = "application/problem+json"),
))]
pub async fn validate(
    State(app): State<App>,
    caller: Caller,
    Params(query): Params<ValidateQuery>,
    headers: HeaderMap,
    body: Body,
) -> ApiResult<Json<Validation>> {
    caller.require(Scope::Submit)?;
    check_rate(&app, &caller)?;
    let folder = base_folder(&app.service.config, query.folder.as_deref())?;
    let upload = read_upload(&app.service.config, &headers, body).await?;
    let (checked, _) = check(&app, &caller, upload, folder).await?;
    let (name, problems) = match checked.outcome {
        Ok(_) => (checked.name, Vec::new()),
        Err(problems) => {
            // the parser replaced a missing or invalid name to check the rest of the file
            let name = checked.name.filter(|_| !problems.touches("name"));
            (name, bounds::limit_problems(problems.0.iter().map(FieldProblem::from)))
        }
    };
    Ok(Json(Validation { valid: problems.is_empty(), name, problems }))
}

/// Placeholder for the job file's schema in the OpenAPI document; see `openapi.rs`.
#[derive(ToSchema)]
pub struct JobFile {}

fn check_rate(app: &App, caller: &Caller) -> ApiResult<()> {
    let max = app.service.config.limits.submissions_per_minute;
    app.submissions.take(&caller.rate_key, Instant::now()).map_err(|seconds| {
        ProblemDetails::too_many_requests(format!("more than {max} submissions and validations in a minute"), seconds)
    })
}

/// The options of a submission, within the server's limits.
struct Options {
    priority: i32,
    max_attempts: u32,
    time_limit_seconds: u64,
    output_limit_bytes: u64,
    overwrite: bool,
    append: bool,
}

impl Options {
    fn from_query(config: &Config, query: &SubmitQuery) -> ApiResult<Self> {
        let limits = &config.limits;
        let priority = query.priority.unwrap_or(0);
        if !(-100..=100).contains(&priority) {
            return Err(ProblemDetails::bad_request(format!("priority: got {priority}; valid: -100 to 100")));
        }
        let (overwrite, append) = (query.overwrite.unwrap_or(false), query.append.unwrap_or(false));
        if overwrite && append {
            return Err(ProblemDetails::bad_request("append: got true with overwrite true; valid: one of the two"));
        }
        let within = |key: &str, requested: Option<u64>, max: u64| match requested {
            None => Ok(max),
            Some(n) if (1..=max).contains(&n) => Ok(n),
            Some(n) => Err(ProblemDetails::bad_request(format!("{key}: got {n}; valid on this server: 1 to {max}"))),
        };
        let attempts = within("max_attempts", query.max_attempts.map(u64::from), limits.max_attempts.into())?;
        Ok(Self {
            priority,
            max_attempts: u32::try_from(attempts).unwrap_or(limits.max_attempts),
            time_limit_seconds: within("time_limit_seconds", query.time_limit_seconds, limits.max_job_seconds())?,
            output_limit_bytes: within("output_limit_bytes", query.output_limit_bytes, limits.max_output_bytes())?,
            overwrite,
            append,
        })
    }
}

fn base_folder(config: &Config, requested: Option<&str>) -> ApiResult<PathBuf> {
    match requested {
        None => Ok(config.folder.clone()),
        Some(text) if text.len() <= 4096 && Path::new(text).is_absolute() && !text.contains('\0') => Ok(text.into()),
        Some(text) => {
            // a URL may hold a password
            let got = match text.split_once("://") {
                Some((scheme, _)) => quoted_prefix(&format!("{scheme}://…")),
                None => quoted_prefix(text),
            };
            let detail = format!("folder: got {got}; valid: an absolute path on the server");
            Err(ProblemDetails::bad_request(detail))
        }
    }
}

fn idempotency_key(headers: &HeaderMap) -> ApiResult<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let text = value.to_str().ok().filter(|t| (1..=200).contains(&t.len()) && t.bytes().all(|b| b.is_ascii_graphic()));
    match text {
        Some(text) => Ok(Some(text.to_owned())),
        None => {
            let got = quoted_prefix(&String::from_utf8_lossy(value.as_bytes()));
            Err(ProblemDetails::bad_request(format!(
                "Idempotency-Key: got {got}; valid: 1 to 200 visible ASCII characters"
            )))
        }
    }
}

fn fingerprint(upload: &Upload, folder: &Path, options: &Options) -> [u8; 32] {
    let Options { priority, max_attempts, time_limit_seconds, output_limit_bytes, overwrite, append } = options;
    // without `append` the text is as in earlier versions, so that older keys still match their requests
    let append = if *append { " append" } else { "" };
    let settings = format!("{priority} {max_attempts} {time_limit_seconds} {output_limit_bytes} {overwrite}{append}");
    let mut hash = Sha256::new();
    for part in
        [upload.text.as_bytes(), folder.as_os_str().as_encoded_bytes(), settings.as_bytes(), &[upload.json.into()]]
    {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase())
}

fn is_json(headers: &HeaderMap) -> bool {
    media_type(headers).as_deref() == Some(JSON)
}

async fn read_upload(config: &Config, headers: &HeaderMap, body: Body) -> ApiResult<Upload> {
    let media_type = media_type(headers).unwrap_or_default();
    let json = match media_type.as_str() {
        JSON => true,
        YAML | "text/yaml" | "application/x-yaml" | "text/x-yaml" => false,
        other => {
            let detail = format!("Content-Type: got {other:?}; valid: {YAML}, {JSON}");
            return Err(ProblemDetails::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
        }
    };
    if headers.contains_key(header::CONTENT_ENCODING) {
        let detail = "Content-Encoding: valid: none";
        return Err(ProblemDetails::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
    }
    let max = config.limits.body_bytes();
    let too_large = || {
        let kilobytes = config.limits.body_kilobytes;
        let detail = format!("the job file is larger than {kilobytes} kB, the most that this server accepts");
        ProblemDetails::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    };
    // refuse before the body arrives
    if body.size_hint().lower() > max as u64 {
        return Err(too_large());
    }
    let seconds = config.limits.body_seconds;
    let collected = tokio::time::timeout(Duration::from_secs(seconds.into()), Limited::new(body, max).collect()).await;
    let bytes = match collected {
        Err(_) => {
            let detail = format!("the request body did not arrive within {seconds} s");
            return Err(ProblemDetails::new(StatusCode::REQUEST_TIMEOUT, detail));
        }
        Ok(Err(e)) if e.is::<LengthLimitError>() => return Err(too_large()),
        Ok(Err(e)) => return Err(ProblemDetails::bad_request(format!("cannot read the request body: {e}"))),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    let text = String::from_utf8(bytes.to_vec())
        .map_err(|e| ProblemDetails::bad_request(format!("the job file is not UTF-8: {e}")))?;
    Ok(Upload { json, text })
}

/// The result of the checks of a file.
struct Checked {
    /// The name in the file.
    name: Option<String>,
    outcome: Result<(JobSpec, Slot), Problems>,
}

/// Checks a file against the schema, the named checks, the server's configuration, and what is known of models and
/// output. It reads the disk and asks the hub, so it may block; it stops at the time limit or when the client
/// disconnects.
async fn check(app: &App, caller: &Caller, upload: Upload, folder: PathBuf) -> ApiResult<(Checked, PathBuf)> {
    let seconds = app.service.config.limits.check_seconds;
    let deadline = Instant::now() + Duration::from_secs(seconds.into());
    let timed_out = || {
        let detail =
            format!("checking the job file took longer than {seconds} s (limits.check_seconds); try again later");
        ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    };
    let permit = tokio::time::timeout_at(deadline.into(), app.check_permits.acquire(Requester::from_caller(caller)));
    let permit = permit.await.map_err(|_| timed_out())?;
    let cancel_on_drop = CancelOnDrop::with_deadline(deadline);
    let (service, admission, should_continue) =
        (Arc::clone(&app.service), Arc::clone(&app.admission), cancel_on_drop.should_continue());
    let work = tokio::task::spawn_blocking(move || {
        let checked = check_blocking(&service.config, &admission, &upload, &folder, &should_continue);
        // the permit ends with the work, even if the client no longer waits
        drop(permit);
        (checked, folder)
    });
    let work = tokio::time::timeout_at(deadline.into(), work).await.map_err(|_| timed_out())?;
    let (checked, folder) = work.map_err(|e| ProblemDetails::internal(&e))?;
    Ok((checked.ok_or_else(timed_out)?, folder))
}

/// `None` if `should_continue` returned false before the end.
fn check_blocking(
    config: &Config,
    admission: &Admission,
    upload: &Upload,
    folder: &Path,
    should_continue: &dyn Fn() -> bool,
) -> Option<Checked> {
    let format = job_format();
    let parsed = if upload.json { format.parse_json(&upload.text) } else { format.parse(&upload.text) };
    let Parsed { spec, mut problems, positions } = parsed;
    let Some(mut spec) = spec else { return Some(Checked { name: None, outcome: Err(problems) }) };
    if let Some(problem) = admission::path_count_problem(&config.limits, &spec) {
        problems.push(problem);
        spec.input.paths.clear();
        spec.input.tables.clear();
    }
    let name = Some(spec.name.clone());
    let access_problems = config.job_access().problems_while(&spec, folder, should_continue)?;
    add_new(&mut problems, access_problems);
    let admission_problems = admission.problems(config, &spec, folder, &problems);
    add_new(&mut problems, admission_problems);
    let outcome = with_slot(config, spec, problems).map_err(|mut problems| {
        positions.locate(&mut problems);
        problems
    });
    Some(Checked { name, outcome })
}

fn add_new(problems: &mut Problems, found: Vec<Problem>) {
    for problem in found {
        if !problems.touches(&problem.field) {
            problems.push(problem);
        }
    }
}

fn with_slot(config: &Config, spec: JobSpec, mut problems: Problems) -> Result<(JobSpec, Slot), Problems> {
    let slot = match required_slot(config, &spec) {
        Ok(slot) => slot,
        Err(problem) => {
            if !problems.touches(&problem.field) {
                problems.push(problem);
            }
            Slot::Cpu
        }
    };
    problems.into_result().map(|()| (spec, slot))
}

/// The slot that the job needs: the teacher's device decides; `auto` takes a GPU if the server has one.
fn required_slot(config: &Config, spec: &JobSpec) -> Result<Slot, Problem> {
    const FIELD: &str = "extract.teacher.device";
    let capacity = &config.capacity;
    let Some(extract) = &spec.extract else { return cpu_slot(capacity.cpu_slots, FIELD) };
    let device = &extract.teacher.device;
    let gpus: Vec<String> = capacity.gpus.iter().map(|n| format!("cuda:{n}")).collect();
    let valid = || match gpus.is_empty() {
        true => "this server has no GPU; valid: auto, cpu".to_owned(),
        false => format!("this server has other GPUs; valid: auto, cpu, cuda, {}", gpus.join(", ")),
    };
    if stillhouse_teacher::parse_devices(device).map_or(device == "all", |devices| devices.len() > 1) {
        let valid = format!("a job in the service uses one device; {}", valid());
        return Err(Problem::new(FIELD, device, valid));
    }
    match (device.as_str(), device.parse::<DeviceChoice>()) {
        // the checks of the job file report it
        (_, Err(_)) => Ok(Slot::Cpu),
        (_, Ok(DeviceChoice::Cpu)) => cpu_slot(capacity.cpu_slots, FIELD),
        (_, Ok(DeviceChoice::Auto)) if capacity.gpus.is_empty() => cpu_slot(capacity.cpu_slots, FIELD),
        (_, Ok(DeviceChoice::Auto)) => Ok(Slot::AnyGpu),
        ("cuda", _) if !capacity.gpus.is_empty() => Ok(Slot::AnyGpu),
        (_, Ok(DeviceChoice::Cuda(n))) => match u32::try_from(n).ok().filter(|n| capacity.gpus.contains(n)) {
            Some(n) => Ok(Slot::Gpu(n)),
            None => Err(Problem::new(FIELD, device, valid())),
        },
    }
}

fn cpu_slot(slots: u32, field: &str) -> Result<Slot, Problem> {
    if slots > 0 {
        Ok(Slot::Cpu)
    } else {
        Err(Problem::missing(field, "this server runs jobs only on GPUs; valid: cuda"))
    }
}

/// The output's path or URL, as it is known before the job runs.
fn output_location(spec: &JobSpec, folder: &Path) -> String {
    // expands no variables, only removes escapes
    let path = PathExpander::none().expand(&spec.output.path).unwrap_or_else(|_| spec.output.path.clone());
    Location::parse(folder, &path).map_or(path, |place| place.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Capacity;

    #[test]
    fn jobs_get_the_slot_that_their_device_needs() {
        let with = |gpus: &[u32], device: Option<&str>| {
            let extract = device.map_or(String::new(), |d| format!("extract: {{teacher: {{path: t, device: {d}}}}}\n"));
            let text = format!(
                "version: 1\nname: x\ninput: {{format: text, paths: [a]}}\ntokenizer: {{path: t}}\npack: {{length: 8}}\noutput: {{path: o}}\n{extract}"
            );
            let capacity = Capacity { gpus: gpus.to_vec(), ..Capacity::default() };
            required_slot(&Config { capacity, ..Config::default() }, &job_format().parse(&text).spec.unwrap())
                .map_err(|p| p.to_string())
        };
        assert_eq!(with(&[0], None), Ok(Slot::Cpu));
        assert_eq!(with(&[], Some("auto")), Ok(Slot::Cpu));
        assert_eq!(with(&[0], Some("auto")), Ok(Slot::AnyGpu));
        assert_eq!(with(&[0, 1], Some("cuda")), Ok(Slot::AnyGpu));
        assert_eq!(with(&[0, 1], Some("\"cuda:1\"")), Ok(Slot::Gpu(1)));
        assert_eq!(with(&[0], Some("cpu")), Ok(Slot::Cpu));
        insta::assert_snapshot!(with(&[], Some("cuda")).unwrap_err(), @"extract.teacher.device: got cuda: this server has no GPU; valid: auto, cpu");
        insta::assert_snapshot!(with(&[0], Some("all")).unwrap_err(), @"extract.teacher.device: got all: a job in the service uses one device; this server has other GPUs; valid: auto, cpu, cuda, cuda:0");
        insta::assert_snapshot!(with(&[0], Some("\"cuda:1\"")).unwrap_err(), @"extract.teacher.device: got cuda:1: this server has other GPUs; valid: auto, cpu, cuda, cuda:0");
    }

    #[test]
    fn a_folder_that_is_refused_is_named_without_what_a_url_may_hide() {
        let refused = |folder: &str| base_folder(&Config::default(), Some(folder)).unwrap_err().detail;
        assert_eq!(refused("data"), "folder: got \"data\"; valid: an absolute path on the server");
        assert_eq!(refused("s3://k:hidden@b/x"), "folder: got \"s3://…\"; valid: an absolute path on the server");
    }
}
