//! Plans of random jobs over a wire, and a plan that another process executes.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use datafusion::execution::TaskContext;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::TryStreamExt;
use proptest::prelude::*;
use serde_json::{Value, json};
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{KeyRange, Piece, Range, SplitRecord};
use stillhouse_schemas::spec::{JobSpec, Tokenizer};
use stillhouse_teacher::Teacher;

use super::codec::{from_bytes, to_bytes};
use super::device::DeviceQueue;
use super::operator::OperatorExec;
use super::pool::Pool;
use super::sink::{Shard, ShardSinkExec, Shards, records};
use super::source::{Corpus, SplitsExec};
use super::{job_plan, splits_of};
use crate::access::Access;
use crate::events::Silent;
use crate::job::{self, Prepared};
use crate::output::{Output, Ticket};
use crate::run::{self, Job, RunOptions, splits::resources};
use crate::source::{FileState, InputFile};
use crate::teacher::{self, JobInput};
use crate::{operators, plan};

mod arithmetic;
mod devices;
mod memory;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets")
}

/// A job that asks for this and that.
fn job_text(extract: Value, subtokens: Option<u32>, partitions: bool, seed: u64, length: u32) -> String {
    let mut job = json!({
        "version": 1, "name": "any", "seed": seed,
        "input": {"format": "jsonl", "paths": ["a.jsonl"], "text": "text", "holdout": {"validation": {"share": 0.1}}},
        "tokenizer": {"path": "t"},
        "pack": {"length": length, "remainder": "pad"},
        "output": {"path": "out"},
    });
    if !extract.is_null() {
        job["extract"] = extract;
    }
    if let Some(length) = subtokens {
        job["subtokens"] = json!({ "length": length });
    }
    if partitions {
        job["partitions"] = json!({"views": 2, "schedule": "linear", "sampling": "stratified"});
    }
    job.to_string()
}

fn extracts() -> impl Strategy<Value = Value> {
    let noise =
        (any::<bool>(), 1e-6f64..0.5, 1u32..5, any::<bool>()).prop_map(|(replay, tolerance, draws, condition)| {
            match replay {
                true => json!({"codec": "replay", "tolerance": tolerance, "draws": draws, "condition": condition}),
                false => json!({"codec": "dense", "draws": draws}),
            }
        });
    let extract =
        (prop::option::of(noise), 0u32..9, any::<bool>(), 64u32..9000).prop_map(|(noise, topk, document, tokens)| {
            let mut extract = json!({
                "teacher": {"path": "t", "device": "cpu", "dtype": "f32", "batch_tokens": tokens},
                "context": if document { "document" } else { "sequence" },
                "topk": topk,
            });
            if let Some(noise) = noise {
                extract["noise"] = noise;
            }
            extract
        });
    prop_oneof![1 => Just(Value::Null), 3 => extract]
}

prop_compose! {
    fn splits()(
        cuts in prop::collection::vec((0u64..1 << 50, 1u64..1 << 40, prop::option::of(any::<u64>()), any::<bool>()), 0..40)
    ) -> Vec<SplitRecord> {
        let one = |(n, (start, length, key, rows)): (u32, (u64, u64, Option<u64>, bool))| SplitRecord {
            split: SplitId(n),
            dataset_split: if n % 3 == 0 { "train".into() } else { "validation".into() },
            pieces: vec![Piece {
                file: format!("a-{n} ü.jsonl"),
                range: match rows {
                    true => Range::Rows { start, end: start + length },
                    false => Range::Bytes { start, end: start + length, line: key.map(|k| k % 1000) },
                },
            }],
            keys: key.map(|first| KeyRange { seed: 7, first, last: u64::MAX }),
            appended: 0,
        };
        (0..).zip(cuts).map(one).collect()
    }
}

fn spec(text: &str) -> JobSpec {
    let parsed = operators::job_format().parse(text);
    assert!(parsed.problems.0.is_empty(), "{:?} in {text}", parsed.problems);
    parsed.spec.unwrap()
}

fn nodes(plan: &Arc<dyn ExecutionPlan>) -> Vec<Arc<dyn ExecutionPlan>> {
    let mut all = vec![Arc::clone(plan)];
    all.extend(plan.children().first().map(|input| nodes(input)).unwrap_or_default());
    all
}

fn assert_same(a: &Arc<dyn ExecutionPlan>, b: &Arc<dyn ExecutionPlan>) {
    let (a, b) = (nodes(a), nodes(b));
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(&b) {
        assert_eq!(a.schema(), b.schema());
        assert_eq!(a.output_partitioning().partition_count(), b.output_partitioning().partition_count());
        if let Some(node) = a.downcast_ref::<SplitsExec>() {
            assert_eq!(node.corpus(), b.downcast_ref::<SplitsExec>().unwrap().corpus());
        } else if let Some(node) = a.downcast_ref::<OperatorExec>() {
            assert_eq!(node.spec(), b.downcast_ref::<OperatorExec>().unwrap().spec());
        } else {
            let (a, b) = (a.downcast_ref::<ShardSinkExec>().unwrap(), b.downcast_ref::<ShardSinkExec>().unwrap());
            assert_eq!(a.shards(), b.shards());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(stillhouse_tests::rounds(64, 4096) as u32))]

    #[test]
    fn a_plan_is_the_same_on_the_other_side_of_a_wire(
        extract in extracts(),
        subtokens in prop::option::of(2u32..6),
        partitions in any::<bool>(),
        seed in 0u64..1 << 63,
        length in 8u32..2000,
        splits in splits(),
    ) {
        let spec = spec(&job_text(extract, subtokens, partitions, seed, length));
        let path = assets().join("teacher-nano-gpt2/tokenizer.json");
        let vocabulary = Vocabulary::load(&path, "t", &Tokenizer::default(), None).unwrap();
        let operators = operators::from_job(&spec, &vocabulary, vocabulary.vocab_size()).unwrap();
        let file = |split: &SplitRecord| InputFile {
            path: split.pieces[0].file.clone(),
            location: object_store::path::Path::from(format!("home/{}", split.pieces[0].file)),
            size: u64::from(split.split.0) << 33,
            state: FileState { bytes: 1, modified_ns: Some(-5), e_tag: Some("x".into()), version: None },
        };
        let files = Arc::new(splits.iter().map(file).collect());
        let shards = splits.iter().map(|s| Shard { name: format!("train-{}.parquet", s.split.0), was: None }).collect();
        let corpus = Corpus {
            files,
            input: Arc::new(spec.input.clone()),
            query_skipped: Some((SplitId(0), BTreeMap::from([("broken JSON".to_owned(), seed)]))),
            splits: Arc::new(splits),
        };
        let plan = job_plan(corpus, &operators, Shards { spec: spec.output.clone(), shards: Arc::new(shards) }).unwrap();
        let bytes = to_bytes(&plan).unwrap();
        let got = from_bytes(&bytes, &TaskContext::default()).unwrap();
        assert_same(&plan, &got);
        prop_assert_eq!(to_bytes(&got).unwrap(), bytes);
    }
}

#[test]
fn bytes_that_hold_no_plan_are_an_error() {
    assert!(from_bytes(b"no plan", &TaskContext::default()).is_err());
}

/// A job with a teacher over a small corpus, in a folder.
fn job_in(folder: &Path, out: &str) -> String {
    job_over(60, folder, out)
}

/// The same over so many documents.
fn job_over(documents: usize, folder: &Path, out: &str) -> String {
    let teacher = assets().join("teacher-nano-gpt2");
    let words = |n: usize| (0..40 + n % 50).map(|w| format!("word{} ", (w * 7 + n) % 97)).collect::<String>();
    let lines: String = (0..documents).map(|n| json!({ "text": words(n) }).to_string() + "\n").collect();
    fs::write(folder.join("corpus.jsonl"), lines).unwrap();
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
    Arc::new(job::prepare_text(text, folder, &Access::everything(), &Silent).unwrap())
}

fn sums(output: &Path) -> BTreeMap<String, String> {
    let manifest: Value = serde_json::from_slice(&fs::read(output.join("manifest.json")).unwrap()).unwrap();
    let text = |shard: &Value, key: &str| shard[key].as_str().unwrap().to_owned();
    manifest["shards"].as_array().unwrap().iter().map(|s| (text(s, "path"), text(s, "sha256"))).collect()
}

fn load_teacher(prepared: &Prepared) -> Arc<dyn Teacher> {
    let none = JobInput { splits: &[], files: &[] };
    teacher::load_all(prepared, none, None, true, &Silent).unwrap().teachers.remove(0)
}

const PLAN: &str = "STILLHOUSE_TEST_PLAN";

/// The other process: executes the partitions that it is told, and prints the records.
#[test]
#[ignore = "run by a_decoded_plan_makes_the_same_shards_in_other_processes"]
fn other_process() {
    let Some(folder) = std::env::var_os(PLAN).map(PathBuf::from) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let prepared = prepare(&fs::read_to_string(folder.join("job.json")).unwrap(), &folder);
    let ticket: Ticket = serde_json::from_slice(&fs::read(folder.join("ticket")).unwrap()).unwrap();
    let output = Output::on_disk(folder.join("wired")).unwrap().joined(&ticket);
    // an owner each; which of them serves a split changes no byte
    let devices = [(); 3].map(|()| DeviceQueue::start(load_teacher(&prepared)).unwrap());
    let pool = Pool::new(2).unwrap();
    let here = resources(&prepared, &output, &devices, pool.spawner().unwrap(), &Arc::new(AtomicBool::new(false)));
    let context = Arc::new(here).session(Arc::new(RuntimeEnv::default())).unwrap().task_ctx();
    let plan = from_bytes(&fs::read(folder.join("plan")).unwrap(), &context).unwrap();
    let own: usize = std::env::var("STILLHOUSE_TEST_OWN").unwrap().parse().unwrap();
    for partition in (0..plan.output_partitioning().partition_count()).filter(|p| p % 2 == own) {
        let chain = pool.spawner().unwrap().chain(plan.execute(partition, Arc::clone(&context)).unwrap().try_collect());
        let batches: Vec<_> = runtime.block_on(chain.wait()).unwrap().unwrap();
        assert_eq!(batches.iter().flat_map(|b| records(b).unwrap()).count(), 1);
    }
    // the harness of the tests prints as well
    writeln!(std::io::stdout(), "\ndone {own}").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decoded_plan_makes_the_same_shards_in_other_processes() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let work = folder.clone();
    let (here, there) = tokio::task::spawn_blocking(move || {
        let wired = job_in(&work, "wired");
        fs::write(work.join("job.json"), &wired).unwrap();
        (prepare(&job_in(&work, "here"), &work), prepare(&wired, &work))
    })
    .await
    .unwrap();
    run::run(here, RunOptions::default(), Arc::new(Silent)).await.unwrap();

    let began = Instant::now();
    let hash = plan::job_hash(&there, &Silent).unwrap();
    let output = there.output().unwrap().create(&Silent).await.unwrap().for_job(&hash.hash);
    let lock = output.lock(&Silent).await.unwrap();
    let job = Job::start(Arc::clone(&there), hash, output.clone(), BTreeMap::new(), Arc::new(Silent)).await.unwrap();
    let pool = Pool::new(1).unwrap();
    let plan = Arc::clone(&job.session(job.all_splits(), pool.spawner().unwrap()).unwrap().plan);
    let splits = splits_of(plan.as_ref()).unwrap().len();
    assert!(splits >= 4, "{splits} splits");
    fs::write(folder.join("plan"), to_bytes(&plan).unwrap()).unwrap();
    fs::write(folder.join("ticket"), serde_json::to_vec(&output.ticket()).unwrap()).unwrap();

    // two workers at once, while this process holds the output
    let start = |own: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["engine::tests::other_process", "--exact", "--ignored", "--nocapture"])
            .env(PLAN, &folder)
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
    assert_eq!(sums(&folder.join("here")), sums(&folder.join("wired")));
}
