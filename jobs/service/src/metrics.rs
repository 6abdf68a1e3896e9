//! Prometheus metrics, served at `/metrics`.
//!
//! | name | type | meaning |
//! |---|---|---|
//! | `stillhouse_jobs{state}` | gauge | jobs in each state |
//! | `stillhouse_queue_length{kind}` | gauge | queued jobs by the kind of slot that they wait for |
//! | `stillhouse_slots{kind}`, `_slots_used{kind}`, `_slots_free{kind}` | gauge | slots: `cpu`, `gpu:N`, and `all` (`capacity.running_jobs`) |
//! | `stillhouse_queue_wait_seconds` | histogram | from queued to running |
//! | `stillhouse_attempt_seconds{outcome}` | histogram | from the start of a worker to its end |
//! | `stillhouse_job_seconds{state}` | histogram | from the first start of a job to its final state |
//! | `stillhouse_attempts_total{outcome}` | counter | attempts by outcome |
//! | `stillhouse_documents_total`, `_text_bytes_total`, `_tokens_total`, `_sequences_total`, `_teacher_tokens_total` | counter | work done |
//! | `stillhouse_tokens_per_second` | gauge | sum over all running jobs |
//! | `stillhouse_stage_milliseconds_total{stage}`, `stillhouse_stage_rows_total{stage}` | counter | time and rows of each stage |
//! | `stillhouse_splits_committed_total`, `stillhouse_shard_bytes_total`, `stillhouse_split_retries_total` | counter | splits |
//! | `stillhouse_store_requests_total`, `stillhouse_store_retries_total` | counter | requests to object stores, and retries among them |
//! | `stillhouse_http_requests_total{method,route,status}` | counter | requests to the service |
//! | `stillhouse_http_seconds{route,status}` | histogram | time to the head of an answer; `status` is its class, such as `2xx` |
//! | `stillhouse_watchers` | gauge | live streams |
//! | `stillhouse_data_folder_full` | gauge | 1 while the disk of the data folder is full |
//! | `stillhouse_data_free_bytes` | gauge | free bytes on the disk of the data folder |

use std::sync::Arc;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use stillhouse_pipeline::events::Progress;
use stillhouse_pipeline::storage::blocking;

use super::model::Slot;
use super::store::{Result, jobs};
use super::{Service, process};

/// Seconds to the head of an answer.
pub const HTTP_SECONDS: &str = "stillhouse_http_seconds";
/// Seconds from queued to running.
pub const QUEUE_WAIT_SECONDS: &str = "stillhouse_queue_wait_seconds";
/// Seconds from the start of a worker to its end.
pub const ATTEMPT_SECONDS: &str = "stillhouse_attempt_seconds";
/// Seconds from the first start of a job to its final state.
pub const JOB_SECONDS: &str = "stillhouse_job_seconds";

/// Bucket bounds in seconds for durations of milliseconds to seconds: a read of the store, a worker's report.
const SHORT_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];
/// Bucket bounds in seconds for durations of minutes to days.
const LONG_BUCKETS: [f64; 13] =
    [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 1_209_600.0];

/// Installs the metrics recorder of this process.
///
/// # Errors
/// When a recorder is already installed.
pub fn install() -> Result<PrometheusHandle, String> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in [
        (HTTP_SECONDS, &SHORT_BUCKETS[..]),
        (QUEUE_WAIT_SECONDS, &LONG_BUCKETS),
        (ATTEMPT_SECONDS, &LONG_BUCKETS),
        (JOB_SECONDS, &LONG_BUCKETS),
    ] {
        let matcher = Matcher::Full(name.to_owned());
        builder = builder.set_buckets_for_metric(matcher, buckets).map_err(|e| e.to_string())?;
    }
    let handle = builder.install_recorder().map_err(|e| e.to_string())?;
    describe_gauge!("stillhouse_jobs", "Jobs in each state");
    describe_gauge!("stillhouse_queue_length", "Queued jobs by the kind of slot that they wait for");
    describe_gauge!("stillhouse_slots", "Jobs that may run at once, by kind of slot");
    describe_gauge!("stillhouse_slots_used", "Slots in which a job runs");
    describe_gauge!("stillhouse_slots_free", "Slots in which another job could begin now");
    describe_histogram!(QUEUE_WAIT_SECONDS, "Seconds from queued to running");
    describe_histogram!(ATTEMPT_SECONDS, "Seconds from the start of a worker to its end, by outcome");
    describe_histogram!(JOB_SECONDS, "Seconds from the first start of a job to its final state");
    describe_counter!("stillhouse_attempts_total", "Attempts by how they ended");
    describe_counter!("stillhouse_documents_total", "Documents read");
    describe_counter!("stillhouse_text_bytes_total", "Bytes of text read");
    describe_counter!("stillhouse_tokens_total", "Tokens of text");
    describe_counter!("stillhouse_sequences_total", "Sequences packed");
    describe_counter!("stillhouse_teacher_tokens_total", "Tokens that teachers have processed");
    describe_gauge!("stillhouse_tokens_per_second", "Tokens per second of all running jobs");
    describe_counter!("stillhouse_stage_milliseconds_total", "Milliseconds of each stage's own work");
    describe_counter!("stillhouse_stage_rows_total", "Rows that each stage produced");
    describe_counter!("stillhouse_splits_committed_total", "Splits committed");
    describe_counter!("stillhouse_shard_bytes_total", "Bytes of committed shards");
    describe_counter!("stillhouse_split_retries_total", "Splits started again in a later attempt");
    describe_counter!("stillhouse_store_requests_total", "Requests to object stores");
    describe_counter!(
        "stillhouse_store_retries_total",
        "Requests to object stores that were sent again after an error"
    );
    describe_counter!("stillhouse_http_requests_total", "Requests to the service");
    describe_histogram!(HTTP_SECONDS, "Seconds until the head of an answer, by class of status");
    describe_gauge!("stillhouse_watchers", "Live streams of events and logs");
    describe_gauge!(
        "stillhouse_data_folder_full",
        "1 while the disk of the data folder is full, so that submissions are refused"
    );
    gauge!("stillhouse_watchers").set(0.0);
    describe_gauge!("stillhouse_data_free_bytes", "Bytes that are free on the disk of the data folder");
    for name in ["splits_committed", "shard_bytes", "split_retries", "store_requests", "store_retries", "tokens"] {
        counter!(format!("stillhouse_{name}_total")).increment(0);
    }
    Ok(handle)
}

/// Adds a job's progress since its last reading.
pub fn count_progress(last: &Progress, now: &Progress) {
    let add = |name: &'static str, last: u64, now: u64| counter!(name).increment(now.saturating_sub(last));
    add("stillhouse_documents_total", last.documents, now.documents);
    add("stillhouse_text_bytes_total", last.text_bytes, now.text_bytes);
    add("stillhouse_tokens_total", last.tokens, now.tokens);
    add("stillhouse_sequences_total", last.sequences, now.sequences);
    add("stillhouse_teacher_tokens_total", last.teacher_tokens, now.teacher_tokens);
    add("stillhouse_store_requests_total", last.store_requests, now.store_requests);
    add("stillhouse_store_retries_total", last.store_retries, now.store_retries);
    for stage in &now.stages {
        let before = last.stages.iter().find(|s| s.name == stage.name);
        let (rows, seconds) = before.map_or((0, 0.0), |s| (s.rows, s.busy_seconds));
        counter!("stillhouse_stage_rows_total", "stage" => stage.name.clone())
            .increment(stage.rows.saturating_sub(rows));
        let milliseconds = ((stage.busy_seconds - seconds).max(0.0) * 1e3) as u64;
        counter!("stillhouse_stage_milliseconds_total", "stage" => stage.name.clone()).increment(milliseconds);
    }
}

/// Aggregates the recorded measurements periodically, so that they do not accumulate when nothing scrapes them.
pub async fn run_upkeep(service: Arc<Service>) {
    let Some(handle) = service.metrics.clone() else { return };
    let mut ticks = tokio::time::interval(std::time::Duration::from_secs(5));
    loop {
        ticks.tick().await;
        handle.run_upkeep();
    }
}

/// Renders the metrics, including those that are computed on request.
///
/// # Errors
/// When the store fails.
pub async fn render(service: &Arc<Service>) -> Result<String> {
    let (states, waiting) = service.store.read(|c| Ok((jobs::counts(c)?, jobs::queued_by_slot(c)?))).await?;
    for (state, n) in states {
        gauge!("stillhouse_jobs", "state" => state.name()).set(n as f64);
    }
    gauge!("stillhouse_data_folder_full").set(f64::from(u8::from(service.store.disk_space.is_full())));
    let wait_for =
        |gpu: bool| waiting.iter().filter(|(slot, _)| (*slot != Slot::Cpu) == gpu).map(|(_, n)| *n).sum::<u64>();
    for (kind, gpu) in [("cpu", false), ("gpu", true)] {
        gauge!("stillhouse_queue_length", "kind" => kind).set(wait_for(gpu) as f64);
    }
    for slots in service.running.slots(&service.config.capacity) {
        for (name, n) in [("", slots.all), ("_used", slots.used), ("_free", slots.free)] {
            gauge!(format!("stillhouse_slots{name}"), "kind" => slots.kind.clone()).set(f64::from(n));
        }
    }
    let data = service.config.data.clone();
    match blocking(move || process::free_bytes(&data)).await {
        Ok(bytes) => gauge!("stillhouse_data_free_bytes").set(bytes as f64),
        Err(e) => tracing::warn!("cannot read the free space of {}: {e}", service.config.data.display()),
    }
    gauge!("stillhouse_tokens_per_second").set(service.running.tokens_per_second());
    let handle = service.metrics.clone();
    Ok(handle
        .map(|handle| {
            handle.run_upkeep();
            handle.render()
        })
        .unwrap_or_default())
}
