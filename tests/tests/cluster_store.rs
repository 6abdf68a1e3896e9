//! A job of seven splits in a store: starts runs of it, and checks that an ended run left exactly the right objects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::network::Host;
use stillhouse_tests::s3::S3;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::server::Server;
use stillhouse_tests::{Scratch, corpus, with};

use crate::cluster::{Executor, command, read_log};
use crate::stores::{packing_job, shards_in};

pub(crate) const SPLITS: usize = 7;

/// A store with the corpus, and with the output of a local run under `alone`.
pub(crate) struct Store {
    pub weed: Seaweed,
    pub s3: S3,
}

/// The job with its output under a prefix. It soon retries requests that vanished.
pub(crate) fn seven_splits(prefix: &str) -> Value {
    let retry = json!({
        "max_attempts": 100, "longest_seconds": 300, "first_backoff_milliseconds": 20,
        "largest_backoff_milliseconds": 500, "request_timeout_seconds": 3
    });
    with(
        packing_job(),
        &json!({
            "input": {
                "paths": ["s3://corpora/corpus.jsonl"],
                "split_megabytes": 0.0015,
                "holdout": {"validation": {"last_documents": 1}}
            },
            "output": {"path": format!("s3://shards/{prefix}")},
            "storage": {"retry": retry}
        }),
    )
}

impl Store {
    /// Starts the store, on a host if given. `place` sets the environment of the local run.
    pub(crate) fn start(scratch: &Scratch, host: Option<&Host>, place: &dyn Fn(&mut Command)) -> Self {
        let weed = host.map_or_else(Seaweed::start, Seaweed::start_on);
        weed.create_bucket("corpora");
        weed.create_bucket("shards");
        let s3 = weed.s3();
        s3.put("corpora", "corpus.jsonl", corpus(7, 1300).as_bytes());
        let this = Self { weed, s3 };
        Run::begin(scratch, &seven_splits("alone"), &[], &|command| {
            this.weed.environment(command);
            place(command);
        })
        .expect_success();
        assert_eq!(shards_in(&this.s3, "shards", "alone").len(), SPLITS);
        this
    }

    /// Number of commit records.
    pub(crate) fn committed(&self, prefix: &str) -> usize {
        self.s3.list("shards", &format!("{prefix}/_stillhouse/splits/")).len()
    }

    /// The commit records and the unfinished uploads.
    pub(crate) fn state(&self, prefix: &str) -> (BTreeMap<String, String>, Vec<(String, String)>) {
        let records = self.s3.files("shards", &format!("{prefix}/_stillhouse/splits/"));
        (records, self.s3.list_multipart_uploads("shards"))
    }

    /// Asserts that the output has exactly the objects of the local run, and that no upload remains.
    #[track_caller]
    pub(crate) fn assert_finished(&self, prefix: &str) {
        assert_eq!(shards_in(&self.s3, "shards", prefix), shards_in(&self.s3, "shards", "alone"));
        assert_eq!(self.names(prefix), self.names("alone"));
        assert_eq!(self.manifest_shards(prefix), self.manifest_shards("alone"));
        assert_eq!(self.s3.list_multipart_uploads("shards"), Vec::new());
    }

    fn names(&self, prefix: &str) -> BTreeSet<String> {
        let names = self.s3.list("shards", &format!("{prefix}/")).into_keys();
        names.map(|name| name.strip_prefix(prefix).unwrap().to_owned()).collect()
    }

    fn manifest_shards(&self, prefix: &str) -> Value {
        let manifest = self.s3.get("shards", &format!("{prefix}/manifest.json")).unwrap();
        serde_json::from_slice::<Value>(&manifest).unwrap()["shards"].take()
    }
}

/// A run that ends with its test.
pub(crate) struct Run {
    pub server: Server,
    pub log: PathBuf,
}

impl Run {
    pub(crate) fn begin(scratch: &Scratch, job: &Value, more: &[&str], set: &dyn Fn(&mut Command)) -> Self {
        let file = (0..).map(|n| format!("run-{n}.yaml")).find(|file| !scratch.path(file).exists()).unwrap();
        scratch.job(&file, job);
        let mut command = command(scratch, &[&["run", &file], more].concat());
        set(&mut command);
        let log = scratch.path(&file).with_extension("log");
        Self { server: Server::start(command, &log), log }
    }

    pub(crate) fn log_text(&self) -> String {
        read_log(&self.log)
    }

    #[track_caller]
    pub(crate) fn wait_until(&mut self, what: &str, is_so: impl FnMut() -> bool) {
        self.server.wait_until(what, is_so);
    }

    #[track_caller]
    pub(crate) fn expect_success(mut self) {
        assert_eq!(self.server.wait(), Some(0), "{}", self.log_text());
    }

    /// Asserts that the run ends with an error that contains all of these.
    #[track_caller]
    pub(crate) fn expect_failure(mut self, parts: &[&str]) {
        assert_eq!(self.server.wait(), Some(1), "{}", self.log_text());
        for part in parts {
            assert!(self.log_text().contains(part), "{part:?} is not in:\n{}", self.log_text());
        }
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: Signals a process that this test has started.
        assert_eq!(unsafe { libc::kill(self.server.id(), signal) }, 0);
    }
}

/// The split that an executor began last.
pub(crate) fn last_split(executor: &Executor) -> Option<u32> {
    let said = read_log(&executor.log);
    let (_, split) = said.rsplit_once("begins split=")?;
    split.split(' ').next()?.parse().ok()
}

pub(crate) fn has_committed(executor: &Executor, split: u32) -> bool {
    read_log(&executor.log).contains(&format!("committed split={split} "))
}
