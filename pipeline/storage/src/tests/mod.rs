//! Tests of the crate against a fake store: which failures are retried, which end at once, how they are explained, and
//! that no secret leaks.
//!
//! The tests count requests, and never measure time.

mod counting_store;
mod disk_cache;
mod fake_store;
mod faults;
mod guard;
mod hub;
mod secrets;
mod uploads;

use object_store::path::Path;
use stillhouse_schemas::storage::{Retry, Storage};

use super::{Environment, Opened, Storages, StoreUrl};
use fake_store::FakeStore;

const SECRET: &str = "PLANTEDSECRET0123456789";
const TOKEN: &str = "PLANTEDTOKEN0123456789";

fn environment() -> Environment {
    [
        ("AWS_ACCESS_KEY_ID", "AKPLANTED0123456789"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_SESSION_TOKEN", TOKEN),
        ("HOME", "/nonexistent"),
    ]
    .into_iter()
    .collect()
}

fn options(endpoint: &str) -> Storage {
    let retry = Retry {
        max_attempts: Some(5),
        longest_seconds: Some(30),
        first_backoff_milliseconds: Some(1),
        largest_backoff_milliseconds: Some(1),
        request_timeout_seconds: Some(10),
    };
    Storage { endpoint: Some(endpoint.to_owned()), retry: Some(retry), ..Storage::default() }
}

fn url(text: &str) -> StoreUrl {
    StoreUrl::parse(text).unwrap().unwrap()
}

fn open(server: &FakeStore) -> Opened {
    Storages::with_environment(environment()).open(&url("s3://b"), &options(&server.url)).unwrap()
}

fn key() -> Path {
    Path::from("folder/k")
}
