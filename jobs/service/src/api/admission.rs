//! Checks before a job is queued, beyond its file: the number of paths, whether the hub has its models, whether its
//! output can be created. Downloads and writes nothing.
//!
//! Every check has a time limit, and stops when the client no longer waits.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use stillhouse_pipeline::error::ErrorKind;
use stillhouse_pipeline::hub::{FetchPurpose, Hub, HubConfig, HubRef};
use stillhouse_pipeline::output::Output;
use stillhouse_pipeline::path_expansion::PathExpander;
use stillhouse_pipeline::storage::{Location, Storages};
use stillhouse_pipeline::units;
use stillhouse_schemas::paths::count;
use stillhouse_schemas::problems::{Problem, Problems};
use stillhouse_schemas::spec::JobSpec;

use crate::config::{Config, Limits};
use crate::process;

/// How long to skip a hub that did not answer; otherwise each submission would wait for it.
const HUB_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// State shared by all submissions.
#[derive(Debug, Default)]
pub struct Admission {
    hub_silent_until: Mutex<Option<Instant>>,
}

/// A client waits for an answer. The request owns this, so a client that disconnects drops it.
pub struct CancelOnDrop {
    cancelled: Arc<AtomicBool>,
    deadline: Instant,
}

impl CancelOnDrop {
    pub fn with_deadline(deadline: Instant) -> Self {
        Self { cancelled: Arc::default(), deadline }
    }

    /// Returns a check for the worker thread: whether to continue.
    pub fn should_continue(&self) -> impl Fn() -> bool + Send + 'static {
        let (cancelled, deadline) = (Arc::clone(&self.cancelled), self.deadline);
        move || !cancelled.load(Ordering::Relaxed) && Instant::now() < deadline
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }
}

/// Refuses a job with more paths than it may have, because each is checked on its own.
pub fn path_count_problem(limits: &Limits, spec: &JobSpec) -> Option<Problem> {
    // a path with braces stands for several
    let got = spec.input.all_paths().map(|(_, path)| count(path)).fold(0, usize::saturating_add);
    let max = limits.paths_per_job as usize;
    (got > max).then(|| {
        let message = format!(
            "more paths than this server accepts; valid: at most {} (limits.paths_per_job); one glob or folder can match any number of files",
            units::count(max as u64)
        );
        Problem::new("input.paths", format!("{} paths", units::count(got as u64)), message)
    })
}

impl Admission {
    /// Problems of models that the hub lacks and of an output that cannot work; skips fields that `existing` already
    /// reports.
    pub fn problems(&self, config: &Config, spec: &JobSpec, base: &Path, existing: &Problems) -> Vec<Problem> {
        let mut problems = Vec::new();
        let models = [
            ("tokenizer.path", spec.tokenizer.path.as_ref(), FetchPurpose::Tokenizer),
            ("extract.teacher.path", spec.extract.as_ref().map(|e| &e.teacher.path), FetchPurpose::Teacher),
        ];
        for (field, path, purpose) in models {
            let Some(path) = path.filter(|_| !existing.touches(field)) else { continue };
            let wrong = match HubRef::parse(&unescape(path)) {
                Ok(None) => None,
                Ok(Some(reference)) => self.missing_model(config, &reference, purpose),
                Err(message) => Some(message),
            };
            problems.extend(wrong.map(|message| Problem::new(field, format!("{path:?}"), message)));
        }
        if !existing.touches("output.path") && !existing.touches("storage") && !existing.touches("output.storage") {
            let wrong = output_problem(spec, base);
            problems.extend(wrong.map(|m| Problem::new("output.path", format!("{:?}", spec.output.path), m)));
        }
        problems
    }

    /// Why the hub cannot provide a model, if it says so. If the hub does not answer, the worker tries later, with more
    /// patience.
    fn missing_model(&self, config: &Config, reference: &HubRef, purpose: FetchPurpose) -> Option<String> {
        let seconds = config.limits.hub_seconds;
        let silent = |until: &Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        if seconds == 0 || silent(&self.hub_silent_until.lock().unwrap_or_else(PoisonError::into_inner)) {
            return None;
        }
        let hub = match HubConfig::from_env() {
            Ok(hub) => HubConfig { timeout: Duration::from_secs(seconds.into()), attempts: 1, ..hub },
            Err(e) => {
                tracing::error!("cannot set up the connection to the hub: {e}");
                return None;
            }
        };
        match Hub::new(hub).check(reference, purpose) {
            Err(e) if e.kind == ErrorKind::Usage => Some(e.to_string()),
            Err(e) => {
                tracing::warn!(
                    "the hub did not answer about {reference}, so submissions skip this check for a while: {e}"
                );
                let until = Instant::now() + HUB_RETRY_INTERVAL;
                *self.hub_silent_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
                None
            }
            Ok(()) => None,
        }
    }
}

/// The path without its escapes. An earlier check refuses variables of the server.
fn unescape(path: &str) -> String {
    PathExpander::none().expand(path).unwrap_or_else(|_| path.to_owned())
}

/// Why a data set cannot be created at the output.
fn output_problem(spec: &JobSpec, base: &Path) -> Option<String> {
    match Location::parse(base, &unescape(&spec.output.path)) {
        Ok(Location::Disk(root)) => folder_problem(&root),
        Ok(place) => Output::at(&place, &spec.output_storage(), &Storages::new()).err().map(|e| e.to_string()),
        Err(message) => Some(message),
    }
}

#[expect(clippy::disallowed_methods, reason = "checks of a job file run on a thread that may block")]
fn folder_problem(root: &Path) -> Option<String> {
    use std::io::ErrorKind::{NotADirectory, NotFound};

    // missing folders are created in the nearest existing ancestor
    for at in root.ancestors() {
        let shown = at.display();
        match std::fs::metadata(at) {
            Err(e) if matches!(e.kind(), NotFound | NotADirectory) => {}
            Err(e) => return Some(format!("cannot access {shown}: {e}")),
            Ok(found) if !found.is_dir() && at == root => {
                return Some("is a file; valid: a folder, which need not exist yet".into());
            }
            Ok(found) if !found.is_dir() => {
                return Some(format!("{shown} is a file, so it cannot contain a folder"));
            }
            Ok(_) => {
                let written = process::check_writable(at);
                return written.err().map(|e| format!("the service's user cannot write to {shown}: {e}"));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(patch: &str) -> JobSpec {
        let text = format!(
            "version: 1\nname: x\ninput: {{format: text, paths: [a, b, c]}}\ntokenizer: {{path: t}}\npack: {{length: 8}}\noutput: {{path: {patch}}}\n"
        );
        stillhouse_operators::registry::job_format().read(&text).unwrap()
    }

    #[test]
    fn paths_are_counted() {
        let limits = |paths_per_job| Limits { paths_per_job, ..Limits::default() };
        assert_eq!(path_count_problem(&limits(3), &spec("o")), None);
        let problem = path_count_problem(&limits(2), &spec("o")).unwrap();
        assert_eq!((problem.field.as_str(), problem.got.as_deref()), ("input.paths", Some("3 paths")));
        assert!(problem.message.contains("at most 2 (limits.paths_per_job)"), "{problem}");
        // paths of tables count too
        let mut with_table = spec("o");
        let table = r#"{"t": {"format": "text", "paths": ["d", "e"]}}"#;
        with_table.input.tables = serde_json::from_str(table).unwrap();
        assert_eq!(path_count_problem(&limits(4), &with_table).unwrap().got.as_deref(), Some("5 paths"));
    }

    #[test]
    fn outputs_that_cannot_be_made_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "x").unwrap();
        let reported = |path: &str| output_problem(&spec(path), folder.path());
        for good in ["out", "deep/er/out", ".", "s3://bucket/out"] {
            assert_eq!(reported(good), None, "{good}");
        }
        assert!(reported("file").unwrap().starts_with("is a file; valid: a folder"));
        for below in ["file/out", "file/a/b"] {
            let reported = reported(below).unwrap();
            assert!(reported.ends_with("/file is a file, so it cannot contain a folder"), "{reported}");
        }
    }

    #[test]
    fn who_waits_no_more_is_not_worked_for() {
        let cancel_on_drop = CancelOnDrop::with_deadline(Instant::now() + Duration::from_secs(3600));
        let should_continue = cancel_on_drop.should_continue();
        assert!(should_continue());
        drop(cancel_on_drop);
        assert!(!should_continue());
        assert!(!CancelOnDrop::with_deadline(Instant::now()).should_continue()());
    }
}
