//! Forwards Ballista's warnings and errors to this program's log, with the module that each comes from.
//!
//! It drops warnings about conditions that are intended. It also drops repetitions within ten seconds: an executor
//! without its scheduler polls twenty times a second and logs each failure.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::log::{LevelFilter, Log, Metadata, Record};

const QUIET: Duration = Duration::from_secs(10);
/// Bytes of a message that identify it; numbers and names come later.
const KNOWN_BY: usize = 40;
/// Most messages to remember at a time.
const MOST: usize = 100;

/// First words of warnings about intended conditions: executors send metrics to the run, so the scheduler has none.
const MEANT: [&str; 1] = ["The metrics for stage"];

static SAID: LazyLock<Mutex<HashMap<String, Instant>>> = LazyLock::new(Mutex::default);

/// Whether to log the text: it is not an intended condition and was not logged in the last ten seconds.
fn is_news(text: &str, now: Instant) -> bool {
    if MEANT.iter().any(|start| text.starts_with(start)) {
        return false;
    }
    let key = &text[..text.floor_char_boundary(KNOWN_BY)];
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() >= MOST {
        said.retain(|_, at| now.duration_since(*at) < QUIET);
    }
    match said.get(key) {
        Some(at) if now.duration_since(*at) < QUIET => false,
        _ => said.insert(key.to_owned(), now).is_none_or(|at| now.duration_since(at) >= QUIET),
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
            ::log::Level::Error if is_news(&text, Instant::now()) => tracing::error!(from, "{text}"),
            ::log::Level::Warn if is_news(&text, Instant::now()) => tracing::warn!(from, "{text}"),
            _ => tracing::debug!(from, "{text}"),
        }
    }

    fn flush(&self) {}
}

/// Installs the forwarder: for all levels down to debug if `STILLHOUSE_LOG` is set, else for warnings.
pub fn take() {
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
        let ask = |n: u32, later: u64| {
            is_news(&format!("the poll loop has failed and goes on asking: {n}"), now + Duration::from_secs(later))
        };
        assert_eq!([ask(1, 0), ask(2, 1), ask(3, 9), ask(4, 10), ask(5, 11)], [true, false, false, true, false]);
        assert!(is_news("another thing", now));
        assert!(!is_news("The metrics for stage 1 should not be none", now));
    }
}
