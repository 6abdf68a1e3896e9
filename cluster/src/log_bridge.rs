//! Forwards Ballista's warnings and errors to this program's log, with the module that each comes from.
//!
//! It drops warnings about conditions that are intended. It also drops repetitions within ten seconds: an executor
//! without its scheduler polls twenty times a second and logs each failure.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::log::{LevelFilter, Log, Metadata, Record};

const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes of a message that identify it; numbers and names come later.
const KEY_BYTES: usize = 40;
/// Most messages to remember at a time.
const MAX_REMEMBERED: usize = 100;

/// First words of warnings about intended conditions: executors send metrics to the run, so the scheduler has none.
const EXPECTED: [&str; 1] = ["The metrics for stage"];

static LAST_LOGGED: LazyLock<Mutex<HashMap<String, Instant>>> = LazyLock::new(Mutex::default);

/// Whether to log the text: it is not an intended condition and was not logged in the last ten seconds.
fn should_log(text: &str, now: Instant) -> bool {
    if EXPECTED.iter().any(|start| text.starts_with(start)) {
        return false;
    }
    let key = &text[..text.floor_char_boundary(KEY_BYTES)];
    let mut last_logged = LAST_LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if last_logged.len() >= MAX_REMEMBERED {
        last_logged.retain(|_, at| now.duration_since(*at) < REPEAT_INTERVAL);
    }
    match last_logged.get(key) {
        Some(at) if now.duration_since(*at) < REPEAT_INTERVAL => false,
        _ => last_logged.insert(key.to_owned(), now).is_none_or(|at| now.duration_since(at) >= REPEAT_INTERVAL),
    }
}

struct Bridge;

impl Log for Bridge {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= ::log::max_level()
    }

    fn log(&self, record: &Record) {
        let (from, text) = (record.target(), record.args().to_string());
        match record.level() {
            ::log::Level::Error if should_log(&text, Instant::now()) => tracing::error!(from, "{text}"),
            ::log::Level::Warn if should_log(&text, Instant::now()) => tracing::warn!(from, "{text}"),
            _ => tracing::debug!(from, "{text}"),
        }
    }

    fn flush(&self) {}
}

/// Installs the forwarder: for all levels down to debug if `STILLHOUSE_LOG` is set, else for warnings.
pub fn install() {
    let level = if std::env::var_os("STILLHOUSE_LOG").is_some() { LevelFilter::Debug } else { LevelFilter::Warn };
    if ::log::set_logger(&Bridge).is_ok() {
        ::log::set_max_level(level);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_again_and_again_is_said_every_ten_seconds() {
        let now = Instant::now();
        let should_log_failure = |n: u32, later: u64| {
            should_log(&format!("the poll loop has failed and goes on asking: {n}"), now + Duration::from_secs(later))
        };
        assert_eq!(
            [
                should_log_failure(1, 0),
                should_log_failure(2, 1),
                should_log_failure(3, 9),
                should_log_failure(4, 10),
                should_log_failure(5, 11)
            ],
            [true, false, false, true, false]
        );
        assert!(should_log("another thing", now));
        assert!(!should_log("The metrics for stage 1 should not be none", now));
    }
}
