//! Tests runs whose splits are built by other processes, on other devices and in other arithmetic.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_teacher::Teacher;
use stillhouse_tests::{byte_teacher, nano_teacher};

use crate::access::Access;
use crate::driver::{SplitTask, TaskSpec};
use crate::engine::device::DeviceQueue;
use crate::events::NullObserver;
use crate::job::{self, Prepared};
use crate::output::Output;
use crate::plan;
use crate::run::memory_budget::MemoryBudget;
use crate::run::worker::{Worker, WorkerConfig};
use crate::run::{self, Job, RunOptions};
use crate::teacher::{self, JobInput};

mod arithmetic;
mod devices;
mod memory;

/// A job with a teacher of bytes over a small corpus, in a folder.
fn job_in(folder: &Path, out: &str) -> String {
    job_over(40, folder, out, byte_teacher())
}

/// A job over this number of documents.
fn job_over(documents: usize, folder: &Path, out: &str, teacher: &Path) -> String {
    let words = |n: usize| (0..40 + n % 50).map(|w| format!("word{} ", (w * 7 + n) % 97)).collect::<String>();
    let lines: String = (0..documents).map(|n| json!({ "text": words(n) }).to_string() + "\n").collect();
    let corpus = folder.join("corpus.jsonl");
    if fs::read_to_string(&corpus).ok().as_ref() != Some(&lines) {
        // another job of the test may use the same corpus, and rewriting it would change its file state
        fs::write(corpus, lines).unwrap();
    }
    json!({
        "version": 1, "name": "wire", "seed": 3,
        "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "text": "text", "split_megabytes": 0.004},
        "tokenizer": {"path": teacher},
        "pack": {"length": 32, "remainder": "pad"},
        "extract": {
            "teacher": {"path": teacher, "device": "cpu", "dtype": "f32", "batch_tokens": 256},
            "noise": {"codec": "replay", "tolerance": 1e-3}, "topk": 3,
        },
        "subtokens": {"length": 4},
        "partitions": {"views": 2, "schedule": "linear", "sampling": "stratified"},
        "output": {"path": out},
    })
    .to_string()
}

fn prepare(text: &str, folder: &Path) -> Arc<Prepared> {
    Arc::new(job::prepare(job_format().parse(text), folder, &Access::everything(), &NullObserver).unwrap())
}

fn sums(output: &Path) -> BTreeMap<String, String> {
    let manifest: Value = serde_json::from_slice(&fs::read(output.join("manifest.json")).unwrap()).unwrap();
    let text = |shard: &Value, key: &str| shard[key].as_str().unwrap().to_owned();
    manifest["shards"].as_array().unwrap().iter().map(|s| (text(s, "path"), text(s, "sha256"))).collect()
}

fn load_teacher(prepared: &Prepared) -> Arc<dyn Teacher> {
    let none = JobInput { splits: &[], files: &[] };
    teacher::load_all(prepared, none, None, true, &NullObserver).unwrap().teachers.remove(0)
}

const ORDER: &str = "STILLHOUSE_TEST_ORDER";

/// Body of the other process: builds the splits assigned to it.
#[test]
#[ignore = "run by workers_in_other_processes_make_the_same_shards"]
fn other_process() {
    let Some(folder) = std::env::var_os(ORDER).map(PathBuf::from) else { return };
    let read = |name: &str| fs::read(folder.join(name)).unwrap();
    let task: TaskSpec = serde_json::from_slice(&read("order")).unwrap();
    let wanted: Vec<SplitTask> = serde_json::from_slice(&read("wanted")).unwrap();
    let own: usize = std::env::var("STILLHOUSE_TEST_OWN").unwrap().parse().unwrap();
    let config = WorkerConfig {
        name: format!("worker {own}"),
        access: Access::everything(),
        device: None,
        slots: 1,
        memory_budget: MemoryBudget::new(u64::MAX / 2),
    };
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let worker = Worker::join(&task, &config, Arc::new(NullObserver)).await.unwrap();
        for wanted in wanted.iter().skip(own).step_by(2) {
            assert_eq!(worker.build_split(wanted).await.unwrap().split, wanted.split);
        }
    });
    // the test harness writes to stdout as well
    writeln!(std::io::stdout(), "\ndone {own}").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_in_other_processes_make_the_same_shards() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let work = folder.clone();
    let (here, there) = tokio::task::spawn_blocking(move || {
        (prepare(&job_in(&work, "here"), &work), prepare(&job_in(&work, "there"), &work))
    })
    .await
    .unwrap();
    run::run(here, RunOptions::default(), Arc::new(NullObserver)).await.unwrap();

    let began = Instant::now();
    let hash = plan::job_hash(&there, &NullObserver).unwrap();
    let output = there.output().unwrap().create(&NullObserver).await.unwrap().for_job(&hash.hash);
    let lock = output.lock(&NullObserver).await.unwrap();
    let job =
        Job::start(Arc::clone(&there), hash, output.clone(), BTreeMap::new(), Arc::new(NullObserver)).await.unwrap();
    output.let_others_join().await.unwrap();
    let task = TaskSpec {
        spec: serde_json::to_string(&there.spec).unwrap(),
        base: folder.clone(),
        ticket: output.ticket(),
        teacher: output.plan().await.unwrap().unwrap().teacher,
        device: None,
    };
    let wanted = |s: SplitRecord| SplitTask { split: s.split, dataset_split: s.dataset_split, was: None };
    let wanted: Vec<SplitTask> = job.all_splits().into_iter().map(wanted).collect();
    assert!(wanted.len() >= 4, "{wanted:?}");
    fs::write(folder.join("order"), serde_json::to_vec(&task).unwrap()).unwrap();
    fs::write(folder.join("wanted"), serde_json::to_vec(&wanted).unwrap()).unwrap();

    // two workers run at once while this process holds the output
    let start = |own: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["run::tests::other_process", "--exact", "--ignored", "--nocapture"])
            .env(ORDER, &folder)
            .env("STILLHOUSE_TEST_OWN", own.to_string())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let workers = [start(0), start(1)];
    for (own, worker) in workers.into_iter().enumerate() {
        let ended = tokio::task::spawn_blocking(move || worker.wait_with_output().unwrap()).await.unwrap();
        let said = String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && said.contains(&format!("done {own}")), "{said}");
    }
    job.finish(began).await.unwrap();
    lock.release().await;
    assert_eq!(sums(&folder.join("here")), sums(&folder.join("there")));
}
