//! Tests the walk-through of CONTRIBUTING.md: compiles its file, runs the operator in a job, and checks everything that
//! the page promises.

#![allow(clippy::unwrap_used, reason = "tests fail by it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use arrow::array::{Array, ArrayRef, Int32Array, RecordBatch};
use futures::TryStreamExt;
use serde_json::json;
use stillhouse_datasets::dataset::{Dataset, Selection};
use stillhouse_datasets::inspect::{InspectOptions, inspect};
use stillhouse_datasets::verify::{VerifyOptions, verify};
use stillhouse_operators::invariants::CheckContext;
use stillhouse_operators::operator_spec::{Factory, RowChecks};
use stillhouse_operators::registry;
use stillhouse_operators::registry::{columns_table, job_format};
use stillhouse_operators::{config, extract, invariants, operator, rows};
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::events::NullObserver;
use stillhouse_pipeline::job::Prepared;
use stillhouse_pipeline::{job, plan, plan_report, run};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::Statistic;
use tokio::task::spawn_blocking;

#[path = "walkthrough/faulty.rs"]
mod faulty;
#[path = "walkthrough/lengths.rs"]
mod lengths;

const FILE: &str = include_str!("walkthrough/lengths.rs");
const PAGE: &str = include_str!("../../CONTRIBUTING.md");

/// Installs the operators, which a process can do only once.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        registry::install(&[&Factory::<lengths::LengthsConfig>::ENTRY, &Factory::<faulty::FaultyConfig>::ENTRY])
            .unwrap();
    });
}

/// A job over two lines of text, with an additional section.
fn job_text(folder: &Path, section: &str) -> String {
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/teacher-nano-gpt2");
    fs::write(
        folder.join("a.txt"),
        "It was the best of times.\nIt was the worst of times, it was the age of wisdom.\n",
    )
    .unwrap();
    format!(
        "version: 1\nname: small\ninput: {{format: text, paths: [a.txt]}}\ntokenizer: {{path: '{tokenizer}'}}\n\
         pack: {{length: 12, mode: pad}}\noutput: {{path: out}}\n{section}\n"
    )
}

async fn prepare(text: String, folder: PathBuf) -> Arc<Prepared> {
    let parsed = job_format().parse(&text);
    let prepared = spawn_blocking(move || job::prepare(parsed, &folder, &Access::everything(), &NullObserver));
    Arc::new(prepared.await.unwrap().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_an_operator_ends_the_run_with_its_split() {
    install();
    for (fault, says) in
        [("panics", "stopped: a bug in this program"), ("breaks_its_invariant", "row 0: broken on purpose")]
    {
        let scratch = tempfile::tempdir().unwrap();
        let text = job_text(scratch.path(), &format!("faulty: {{fault: {fault}}}"));
        let prepared = prepare(text, scratch.path().to_owned()).await;
        let error = run::run(prepared, run::RunOptions::default(), Arc::new(NullObserver)).await.unwrap_err();
        assert!(error.to_string().starts_with("split 0 (") && error.to_string().contains(says), "{fault}: {error}");
        assert!(!error.retryable, "{error}");
        assert!(!scratch.path().join("out").exists(), "{fault}: a run that failed at once leaves nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_of_one_file_and_one_line() {
    assert!(PAGE.contains(FILE), "CONTRIBUTING.md does not quote pipeline/tests/walkthrough/lengths.rs as it is");
    install();
    assert!(registry::install(&[]).unwrap_err().contains(&"lengths"));

    // the job file
    let scratch = tempfile::tempdir().unwrap();
    let text = job_text(scratch.path(), "lengths: {}");
    let schema = job_format().json_schema();
    assert_eq!(schema["properties"]["lengths"]["$ref"], "#/$defs/LengthsSection");
    let wrong = job_format().parse(&text.replace("lengths: {}", "lengths: {x: 1}")).problems.to_string();
    assert!(wrong.contains("7:11: lengths.x: got 1: unknown key; valid keys here: none"), "{wrong}");

    // the plan
    let prepared = prepare(text, scratch.path().to_owned()).await;
    let planned = Arc::clone(&prepared);
    let planned = spawn_blocking(move || {
        let hash = plan::job_hash(&planned, &NullObserver).unwrap();
        (hash.identity["job"]["lengths"].clone(), plan_report::plan(&planned, &hash, false, &NullObserver).unwrap())
    });
    let (hashed, plan) = planned.await.unwrap();
    assert_eq!(hashed, json!({}));
    assert_eq!(plan.operators, ["clean", "tokenize", "pack", "lengths"]);
    let without = registry::bytes_per_token(&prepared.operators[..3], prepared.vocab_size);
    assert_eq!(plan.estimated_bytes_per_token, without + 0.001);

    // the data set
    run::run(Arc::clone(&prepared), run::RunOptions::default(), Arc::new(NullObserver)).await.unwrap();
    let dataset = Dataset::open(prepared.output().unwrap()).await.unwrap();
    let manifest = dataset.manifest();
    let column = manifest.columns.last().unwrap();
    assert_eq!((column.name.as_str(), column.data_type.as_str(), &column.shape), ("length", "int32", &None));
    let mut batches =
        dataset.read(&manifest.shards[0], &Selection { batch_rows: 9, ..Selection::default() }).await.unwrap();
    let batch = batches.try_next().await.unwrap().unwrap();
    let stored: &Int32Array = batch["length"].as_any().downcast_ref().unwrap();
    assert_eq!((stored.len(), stored.value(1)), (2, 12));
    assert!(stored.value(0) < 12);

    // what the page promises
    let card = fs::read_to_string(scratch.path().join("out/README.md")).unwrap();
    assert!(card.contains("| `length` | int32 |  | number of tokens of the sequence, padding not counted |"), "{card}");
    assert!(card.contains("| Sequences of less than half the longest length | 0 |"), "{card}");
    assert!(columns_table().ends_with("| `length` | int32 | `lengths` | tokens that are no padding |\n"));
    assert_eq!(manifest.statistics.operators["short_sequences"], Statistic::Sum(0));
    let shown = inspect(&dataset, &InspectOptions::default()).await.unwrap();
    let meanings: Vec<&str> = shown.operator_statistics.iter().map(|s| s.meaning.as_str()).collect();
    assert!(meanings.contains(&"Sequences of less than half the longest length"), "{meanings:?}");
    assert_eq!(shown.row.unwrap().operators[0].facts, [("length".to_owned(), stored.value(0).to_string())]);
    let verified = verify(&dataset, &VerifyOptions::default(), &NullObserver).await.unwrap();
    assert!(verified.passed(), "{:?}", verified.faults);
    let context = CheckContext { vocab_size: prepared.vocab_size, length: 12, split: SplitId(0), sequence_range: None };
    let row_checks = RowChecks { context, operators: prepared.operators.clone() };
    assert_eq!(row_checks.check(&batch).unwrap(), []);
    let wrong: ArrayRef = Arc::new(Int32Array::from(vec![stored.value(0), 11]));
    let columns = batch.columns()[..batch.num_columns() - 1].iter().cloned().chain([wrong]).collect();
    let wrong = RecordBatch::try_new(batch.schema(), columns).unwrap();
    let violations = row_checks.check(&wrong).unwrap();
    assert_eq!(violations, [invariants::Violation::new(1, "length 11, valid: 12")]);
}
