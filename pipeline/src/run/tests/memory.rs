//! Tests jobs on a GPU with less memory than it reports (the host takes its place). The plan stores the pass size
//! chosen at the start; a resumed run uses the same one or is refused.

use std::sync::Mutex;

use stillhouse_gpu_host::Host;
use stillhouse_schemas::manifest::TeacherArithmetic;
use stillhouse_teacher::provide_gpus;
use stillhouse_teacher::stillhouse_gpu::Device;

use super::*;
use crate::error::Result;
use crate::events::{Event, Observer};
use crate::teacher::{DecidedArithmetic, LoadedTeachers};

/// More memory than any of these jobs needs.
const MUCH: u64 = 8 << 30;

struct Gpus {
    /// Total bytes of each, and how many of them are unusable.
    memory: [(u64, u64); 2],
    opened_last: Option<Arc<Host>>,
}

static GPUS: Mutex<Gpus> = Mutex::new(Gpus { memory: [(MUCH, 0); 2], opened_last: None });

fn gpus(memory: [(u64, u64); 2]) {
    GPUS.lock().unwrap().memory = memory;
    provide_gpus(
        2,
        Box::new(|ordinal| {
            let mut gpus = GPUS.lock().unwrap();
            let (total, unusable) = gpus.memory[ordinal];
            let host = Arc::new(Host::fragmented(1, total, unusable));
            gpus.opened_last = Some(Arc::clone(&host));
            Ok(host as Arc<dyn Device>)
        }),
    );
}

/// A job over two short documents in long lines, thus in two splits, on these devices.
fn job_on(folder: &Path, device: &str, batch_tokens: u32, out: &str) -> String {
    let mut job: Value = serde_json::from_str(&job_over(2, folder, out, byte_teacher())).unwrap();
    let line = |n| json!({"text": format!("word{n} some words"), "rest": "-".repeat(1400)}).to_string() + "\n";
    fs::write(folder.join("corpus.jsonl"), (0..2).map(line).collect::<String>()).unwrap();
    job["input"]["split_megabytes"] = json!(0.0015);
    job["pack"]["length"] = json!(8);
    job["extract"]["teacher"]["device"] = json!(device);
    job["extract"]["teacher"]["batch_tokens"] = json!(batch_tokens);
    job.to_string()
}

#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl Observer for Told {
    fn event(&self, event: &Event) {
        if let Event::Warning { message } = event {
            self.0.lock().unwrap().push(message.clone());
        }
    }
}

fn load(text: &str, folder: &Path, earlier: Option<&TeacherArithmetic>) -> (Result<LoadedTeachers>, Vec<String>) {
    let (prepared, told) = (prepare(text, folder), Told::default());
    let none = JobInput { splits: &[], files: &[] };
    let loaded = teacher::load_all(&prepared, none, earlier.map(DecidedArithmetic::ByShards), true, &told);
    (loaded, told.0.into_inner().unwrap())
}

/// Peak memory of passes of this number of tokens.
fn needed(folder: &Path, tokens: u32) -> u64 {
    gpus([(MUCH, 0); 2]);
    let (loaded, said) = load(&job_on(folder, "cuda:0", tokens, "out"), folder, None);
    let arithmetic = loaded.unwrap().arithmetic.unwrap();
    assert_eq!((arithmetic.pass_tokens, said), (Some(u64::from(tokens)), Vec::new()));
    GPUS.lock().unwrap().opened_last.take().unwrap().peak_used()
}

#[test]
fn devices_have_passes_that_all_of_them_have_room_for() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path();
    let [whole, half] = [1024, 512].map(|tokens| needed(folder, tokens));
    gpus([(MUCH, 0), (MUCH, MUCH - (whole + half) / 2)]);
    let (loaded, said) = load(&job_on(folder, "cuda:0,cuda:1", 1024, "out"), folder, None);
    let LoadedTeachers { teachers, arithmetic } = loaded.unwrap();
    assert_eq!(teachers.iter().map(|t| t.pass_tokens()).collect::<Vec<_>>(), [512, 512]);
    let arithmetic = arithmetic.unwrap();
    assert_eq!(arithmetic.pass_tokens, Some(512));
    let [warning] = said.as_slice() else { panic!("{said:?}") };
    assert!(warning.starts_with("teacher: host: out of memory: "), "{warning}");
    assert!(warning.ends_with("with passes of 1024 tokens; they have 512 tokens instead"), "{warning}");
    drop(teachers);

    // a resumed run uses the same pass size: not more, not less
    gpus([(MUCH, 0); 2]);
    let (loaded, said) = load(&job_on(folder, "cuda:0", 1024, "out"), folder, Some(&arithmetic));
    assert_eq!((loaded.unwrap().arithmetic, said), (Some(arithmetic.clone()), Vec::new()));
    gpus([(half - 1024, 0); 2]);
    let (refused, said) = load(&job_on(folder, "cuda:0", 1024, "out"), folder, Some(&arithmetic));
    let error = refused.err().unwrap().to_string();
    assert!(error.contains(&format!("{half} bytes requested, {0} of {0} are free", half - 1024)), "{error}");
    assert!(error.contains("a pass over 512 tokens") && error.contains("--overwrite") && said.is_empty(), "{error}");
    // if nothing is left to build, the stored pass size does not matter
    gpus([(MUCH, 0); 2]);
    let prepared = prepare(&job_on(folder, "cuda:0", 8, "out"), folder);
    let none = JobInput { splits: &[], files: &[] };
    let described =
        teacher::load_all(&prepared, none, Some(DecidedArithmetic::ByShards(&arithmetic)), false, &NullObserver)
            .unwrap();
    assert_eq!(described.arithmetic, Some(arithmetic));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_passes_became_smaller_has_the_same_bytes_whenever_it_goes_on() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let run = |out: &'static str| {
        let (work, text, told) = (folder.clone(), job_on(&folder, "cuda:0", 32, out), Arc::new(Told::default()));
        async move {
            let prepared = tokio::task::spawn_blocking(move || prepare(&text, &work)).await.unwrap();
            let ran = run::run(prepared, RunOptions::default(), Arc::clone(&told) as Arc<dyn Observer>).await;
            let said = told.0.lock().unwrap().clone();
            (ran.map(drop), said)
        }
    };
    let work = folder.clone();
    let needed = tokio::task::spawn_blocking(move || [32, 16].map(|tokens| needed(&work, tokens))).await.unwrap();
    let [whole, half] = needed;
    gpus([(MUCH, MUCH - (whole + half) / 2), (MUCH, 0)]);
    let (ran, said) = run("out").await;
    ran.unwrap();
    assert!(said.iter().any(|m| m.ends_with("with passes of 32 tokens; they have 16 tokens instead")), "{said:?}");
    let out = folder.join("out");
    let first = sums(&out);
    assert!(first.len() >= 2, "{first:?}");
    let plan: Value = serde_json::from_str(&fs::read_to_string(out.join("_stillhouse/plan.json")).unwrap()).unwrap();
    assert_eq!(plan["teacher"]["pass_tokens"], 16);
    assert!(plan["teacher"]["arithmetic"].as_str().unwrap().ends_with("passes of 16 tokens"), "{plan}");

    // simulates a run that stopped before its last split and resumes with less memory, then with more
    for name in ["_SUCCESS", "manifest.json", "_stillhouse/splits/00000.json"] {
        fs::remove_file(out.join(name)).unwrap();
    }
    gpus([(half - 1024, 0), (MUCH, 0)]);
    let (refused, _) = run("out").await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains(&format!("{half} bytes requested, {0} of {0} are free", half - 1024)), "{error}");
    gpus([(MUCH, 0); 2]);
    let (ran, said) = run("out").await;
    ran.unwrap();
    assert_eq!((sums(&out), said), (first, Vec::new()));
}
