//! Tests the choice of the teacher's arithmetic: what a job leaves open is measured once, stored, and the same in every
//! later run.

use std::sync::Mutex;

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::verify::{VerifyOptions, verify};
use stillhouse_schemas::manifest::TeacherArithmetic;
use stillhouse_schemas::spec::Dtype;
use stillhouse_teacher::Precision;

use super::*;
use crate::events::{Event, Observer};
use crate::teacher::DecidedArithmetic;
use stillhouse_input_files::InputFile;

#[derive(Default)]
struct Told(Mutex<String>);

impl Observer for Told {
    fn event(&self, event: &Event) {
        *self.0.lock().unwrap() += &(serde_json::to_string(event).unwrap() + "\n");
    }
}

/// A job whose teacher computes in `dtype`, over 40 documents.
fn job_with(folder: &Path, dtype: &str, bound: Option<f64>) -> String {
    let mut job: Value = serde_json::from_str(&job_over(40, folder, "out", &nano_teacher())).unwrap();
    job["extract"]["teacher"]["dtype"] = json!(dtype);
    if let Some(bound) = bound {
        job["extract"]["teacher"]["max_mean_kl_nats"] = json!(bound);
    }
    job.to_string()
}

fn whole_input(prepared: &Prepared) -> (Vec<SplitRecord>, Vec<InputFile>) {
    (plan::splits(prepared, &prepared.files, &NullObserver).unwrap(), prepared.files.clone())
}

#[test]
fn a_type_that_costs_more_than_the_job_allows_is_refused() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let kept = tempfile::tempdir().unwrap();
    let load = |bound| {
        let prepared = prepare(&job_with(kept.path(), "bf16", Some(bound)), kept.path());
        let (splits, files) = whole_input(&prepared);
        teacher::load_all(&prepared, JobInput { splits: &splits, files: &files }, None, true, &NullObserver)
    };
    let error = load(1e-12).err().unwrap().to_string();
    assert!(
        error.contains("extract.teacher.max_mean_kl_nats: got 0.000000000001, but bf16 costs KL from f32 "),
        "{error}"
    );
    let arithmetic = load(1.0).unwrap().arithmetic.unwrap();
    let cost = arithmetic.cost.unwrap();
    assert_eq!((arithmetic.dtype, cost.tokens), (Dtype::Bf16, 1024));
    assert!((1e-12..1e-3).contains(&cost.mean_kl_nats) && cost.max_kl_nats >= cost.mean_kl_nats, "{cost}");
    assert!((1e-5..0.2).contains(&cost.max_logprob_change_nats), "{cost}");
}

#[test]
fn an_earlier_choice_is_not_measured_again() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let kept = tempfile::tempdir().unwrap();
    let prepared = prepare(&job_with(kept.path(), "auto", None), kept.path());
    let none = JobInput { splits: &[], files: &[] };
    let spec = &prepared.spec.extract.as_ref().unwrap().teacher;
    let path = &prepared.teacher.as_ref().unwrap().path;
    let arithmetic =
        stillhouse_engine::teacher::load(path, spec, Dtype::F16, 32, "cpu").unwrap().info().arithmetic.clone();
    let earlier = TeacherArithmetic { dtype: Dtype::F16, arithmetic, cost: None, pass_tokens: None };
    let told = Told::default();
    let loaded = teacher::load_all(&prepared, none, Some(DecidedArithmetic::ByShards(&earlier)), true, &told).unwrap();
    assert_eq!(loaded.teachers[0].info().dtype, Precision::F16);
    assert_eq!(loaded.arithmetic, Some(earlier.clone()));
    assert!(!told.0.lock().unwrap().contains("tokens per second"));
    // if nothing is left to build, another machine's arithmetic is reported and is not an error
    let others = TeacherArithmetic { arithmetic: "f16 on the abacus".into(), ..earlier };
    let told =
        teacher::load_all(&prepared, none, Some(DecidedArithmetic::ByShards(&others)), false, &NullObserver).unwrap();
    assert_eq!(told.arithmetic, Some(others.clone()));
    let refused = |decided| teacher::load_all(&prepared, none, Some(decided), true, &NullObserver).err().unwrap();
    let of_shards = refused(DecidedArithmetic::ByShards(&others));
    assert!(of_shards.to_string().starts_with("the splits that are done were computed in f16 on the abacus, this"));
    assert!(!of_shards.machine_specific);
    // the error of a worker does not mention finished splits, and another executor may take its splits
    let of_run = refused(DecidedArithmetic::ByRun(&others));
    let told = of_run.to_string();
    assert!(told.starts_with("the run computes in f16 on the abacus, this executor's machine computes f16 "), "{told}");
    assert!(of_run.machine_specific && !told.contains("done"), "{told}");
    // an arithmetic of an earlier version without the instructions differs, even if it is a prefix of the present one
    let (bare, _) = earlier.arithmetic.split_once(", ").unwrap();
    let bare = TeacherArithmetic { arithmetic: bare.to_owned(), ..others };
    let told = refused(DecidedArithmetic::ByShards(&bare)).to_string();
    assert!(told.contains("did not say on which instructions"), "{told}");
    // without text there is nothing to measure with
    let error = teacher::load_all(&prepared, none, None, true, &NullObserver).err().unwrap().to_string();
    assert!(error.contains("extract.teacher.dtype: the first 0 splits have no token to measure with"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_auto_chose_stands_in_plan_and_manifest_and_a_run_that_goes_on_keeps_to_it() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let prepared = || {
        let (folder, text) = (folder.clone(), job_with(&folder, "auto", None));
        async { tokio::task::spawn_blocking(move || prepare(&text, &folder)).await.unwrap() }
    };
    run::run(prepared().await, RunOptions::default(), Arc::new(NullObserver)).await.unwrap();
    let out = folder.join("out");
    let first = sums(&out);
    let dataset = Dataset::open(Output::on_disk(&out).unwrap()).await.unwrap();
    let record = dataset.manifest().teacher.clone().unwrap();
    let chosen = record.dtype.unwrap();
    assert_ne!(chosen, Dtype::Auto);
    assert!(record.arithmetic.starts_with(chosen.name()), "{record:?}");
    assert_eq!(record.cost.is_some(), chosen != Dtype::F32);
    let options = VerifyOptions { teacher: true, device: Some("cpu".into()), ..VerifyOptions::default() };
    assert!(verify(&dataset, &options, &NullObserver).await.unwrap().faults.is_empty());

    let plan_file = out.join("_stillhouse/plan.json");
    let kept_plan = fs::read_to_string(&plan_file).unwrap();
    let mut plan: Value = serde_json::from_str(&kept_plan).unwrap();
    let in_plan: TeacherArithmetic = serde_json::from_value(plan["teacher"].clone()).unwrap();
    assert_eq!((in_plan.dtype, &in_plan.arithmetic, in_plan.cost), (chosen, &record.arithmetic, record.cost));

    // simulates a run that stopped before its last split
    let unfinished = || {
        for name in ["_SUCCESS", "manifest.json", "_stillhouse/splits/00000.json"] {
            fs::remove_file(out.join(name)).unwrap();
        }
    };
    unfinished();
    plan["teacher"]["arithmetic"] = json!("f32 on the abacus");
    fs::write(&plan_file, plan.to_string()).unwrap();
    let error =
        run::run(prepared().await, RunOptions::default(), Arc::new(NullObserver)).await.unwrap_err().to_string();
    assert!(error.contains("were computed in f32 on the abacus, this machine computes"), "{error}");
    fs::write(&plan_file, kept_plan).unwrap();
    let told = Arc::new(Told::default());
    run::run(prepared().await, RunOptions::default(), Arc::clone(&told) as Arc<dyn Observer>).await.unwrap();
    assert!(!told.0.lock().unwrap().contains("tokens per second"));
    assert_eq!(sums(&out), first);
}
