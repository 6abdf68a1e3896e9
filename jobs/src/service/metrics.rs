//! Figures for Prometheus, at `/metrics`.
//!
//! | name | kind | of |
//! |---|---|---|
//! | `stillhouse_jobs{state}` | gauge | jobs in each state |
//! | `stillhouse_queue_wait_seconds` | summary | from queued to running |
//! | `stillhouse_attempts_total{outcome}` | counter | attempts by how they ended |
//! | `stillhouse_documents_total`, `_text_bytes_total`, `_tokens_total`, `_sequences_total`, `_teacher_tokens_total` | counter | work done |
//! | `stillhouse_tokens_per_second` | gauge | of all running jobs |
//! | `stillhouse_stage_milliseconds_total{stage}`, `stillhouse_stage_rows_total{stage}` | counter | each stage's own work |
//! | `stillhouse_splits_committed_total`, `stillhouse_shard_bytes_total`, `stillhouse_split_retries_total` | counter | splits |
//! | `stillhouse_store_requests_total`, `stillhouse_store_retries_total` | counter | requests to object stores, those sent again |
//! | `stillhouse_http_requests_total{method,route,status}`, `stillhouse_http_seconds{route}` | counter, summary | requests to the service |
//! | `stillhouse_watchers` | gauge | live streams |
//! | `stillhouse_data_folder_full` | gauge | 1 while the disk of the data folder is full |

use std::sync::Arc;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use stillhouse_pipeline::events::Progress;

use super::Service;
use super::store::{Result, jobs};

/// Begins to count in this process.
///
/// # Errors
/// When somebody counts already.
pub fn install() -> Result<PrometheusHandle, String> {
    let handle = PrometheusBuilder::new().install_recorder().map_err(|e| e.to_string())?;
    describe_gauge!("stillhouse_jobs", "Jobs in each state");
    describe_histogram!("stillhouse_queue_wait_seconds", "Seconds from queued to running");
    describe_counter!("stillhouse_attempts_total", "Attempts by how they ended");
    describe_counter!("stillhouse_documents_total", "Documents read");
    describe_counter!("stillhouse_text_bytes_total", "Bytes of text read");
    describe_counter!("stillhouse_tokens_total", "Tokens of text");
    describe_counter!("stillhouse_sequences_total", "Sequences packed");
    describe_counter!("stillhouse_teacher_tokens_total", "Tokens that teachers have gone over");
    describe_gauge!("stillhouse_tokens_per_second", "Tokens per second of all running jobs");
    describe_counter!("stillhouse_stage_milliseconds_total", "Milliseconds of each stage's own work");
    describe_counter!("stillhouse_stage_rows_total", "Rows that each stage gave out");
    describe_counter!("stillhouse_splits_committed_total", "Splits committed");
    describe_counter!("stillhouse_shard_bytes_total", "Bytes of committed shards");
    describe_counter!("stillhouse_split_retries_total", "Splits begun again in a later attempt");
    describe_counter!("stillhouse_store_requests_total", "Requests to object stores");
    describe_counter!(
        "stillhouse_store_retries_total",
        "Requests to object stores that were sent again after an error"
    );
    describe_counter!("stillhouse_http_requests_total", "Requests to the service");
    describe_histogram!("stillhouse_http_seconds", "Seconds until the head of an answer");
    describe_gauge!("stillhouse_watchers", "Live streams of events and logs");
    describe_gauge!(
        "stillhouse_data_folder_full",
        "1 while the disk of the data folder is full, so that submissions are refused"
    );
    for name in ["splits_committed", "shard_bytes", "split_retries", "store_requests", "store_retries", "tokens"] {
        counter!(format!("stillhouse_{name}_total")).increment(0);
    }
    Ok(handle)
}

/// Adds what a job did since its last reading.
pub fn count(last: &Progress, now: &Progress) {
    let more = |name: &'static str, last: u64, now: u64| counter!(name).increment(now.saturating_sub(last));
    more("stillhouse_documents_total", last.documents, now.documents);
    more("stillhouse_text_bytes_total", last.text_bytes, now.text_bytes);
    more("stillhouse_tokens_total", last.tokens, now.tokens);
    more("stillhouse_sequences_total", last.sequences, now.sequences);
    more("stillhouse_teacher_tokens_total", last.teacher_tokens, now.teacher_tokens);
    more("stillhouse_store_requests_total", last.store_requests, now.store_requests);
    more("stillhouse_store_retries_total", last.store_retries, now.store_retries);
    for stage in &now.stages {
        let before = last.stages.iter().find(|s| s.name == stage.name);
        let (rows, seconds) = before.map_or((0, 0.0), |s| (s.rows, s.busy_seconds));
        counter!("stillhouse_stage_rows_total", "stage" => stage.name.clone())
            .increment(stage.rows.saturating_sub(rows));
        let milliseconds = ((stage.busy_seconds - seconds).max(0.0) * 1e3) as u64;
        counter!("stillhouse_stage_milliseconds_total", "stage" => stage.name.clone()).increment(milliseconds);
    }
}

/// Sums up what was measured now and then, so that it does not pile up where nobody asks.
pub async fn upkeep(service: Arc<Service>) {
    let Some(handle) = service.metrics.clone() else { return };
    let mut ticks = tokio::time::interval(std::time::Duration::from_secs(5));
    loop {
        ticks.tick().await;
        handle.run_upkeep();
    }
}

/// The figures, with those that are looked up when they are asked for.
///
/// # Errors
/// When the store fails.
pub async fn render(service: &Arc<Service>) -> Result<String> {
    for (state, n) in service.store.read(jobs::counts).await? {
        gauge!("stillhouse_jobs", "state" => state.name()).set(n as f64);
    }
    gauge!("stillhouse_data_folder_full").set(f64::from(u8::from(service.store.room.is_full())));
    gauge!("stillhouse_tokens_per_second").set(service.running.tokens_per_second());
    let handle = service.metrics.clone();
    Ok(handle
        .map(|handle| {
            handle.run_upkeep();
            handle.render()
        })
        .unwrap_or_default())
}
