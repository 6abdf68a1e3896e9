//! Tests jobs on special devices: some that are lost, and the host in place of a GPU.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::verify::{VerifyOptions, verify};
use stillhouse_gpu_host::Host;
use stillhouse_teacher::stillhouse_gpu::{Device, GpuError};
use stillhouse_teacher::{Hidden, LoadOptions, Logits, Precision, Runs, Teacher, TeacherError, TeacherInfo, gpu};

use super::*;
use crate::error::Result;
use crate::events::{Event, Observer};

/// A teacher whose device falls off the bus at its third pass.
struct Falling(Arc<dyn Teacher>, AtomicU64);

impl Teacher for Falling {
    fn info(&self) -> &TeacherInfo {
        self.0.info()
    }

    fn slice_rows(&self) -> usize {
        self.0.slice_rows()
    }

    fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
        self.0.buffer()
    }

    fn pass(&self, runs: &Runs) -> stillhouse_teacher::Result<Hidden> {
        if self.1.fetch_add(1, Ordering::Relaxed) < 2 {
            return self.0.pass(runs);
        }
        let (device, call, message) = ("cuda:7".into(), "cuEventRecord".into(), "fallen off the bus".into());
        Err(TeacherError::Gpu(GpuError::Failed { device, call, message, lost: true }))
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> stillhouse_teacher::Result<()> {
        self.0.slice(hidden, tokens, logits)
    }
}

/// Collects the warnings.
#[derive(Debug, Default)]
struct Warnings(Mutex<Vec<String>>);

impl Observer for Warnings {
    fn event(&self, event: &Event) {
        if let Event::Warning { message } = event {
            self.0.lock().unwrap().push(message.clone());
        }
    }
}

/// Runs a job on given devices and returns its warnings.
async fn run_on(
    folder: &Path,
    text: String,
    devices: impl FnOnce(&Prepared) -> Vec<Arc<dyn Teacher>>,
) -> (Result<()>, Vec<String>) {
    let work = folder.to_path_buf();
    let prepared = tokio::task::spawn_blocking(move || prepare(&text, &work)).await.unwrap();
    let hash = plan::job_hash(&prepared, &NullObserver).unwrap();
    let output = prepared.output().unwrap().create(&NullObserver).await.unwrap().for_job(&hash.hash);
    let lock = output.lock(&NullObserver).await.unwrap();
    let warnings = Arc::new(Warnings::default());
    let observer: Arc<dyn Observer> = warnings.clone();
    let job = Job::start(Arc::clone(&prepared), hash, output.clone(), BTreeMap::new(), observer).await.unwrap();
    let devices = devices(&prepared).into_iter().map(|teacher| DeviceQueue::start(teacher).unwrap());
    let job = job.with_devices(devices.collect());
    let began = Instant::now();
    let ran = job.run_splits(job.all_splits(), began).await;
    if ran.is_ok() {
        job.finish(began).await.unwrap();
    }
    lock.release().await;
    let said = warnings.0.lock().unwrap().clone();
    (ran, said)
}

/// Two devices that are lost, and `standing` ones that are not.
fn falling(prepared: &Prepared, standing: usize) -> Vec<Arc<dyn Teacher>> {
    let teacher = load_teacher(prepared);
    let falling = (0..2).map(|_| Arc::new(Falling(Arc::clone(&teacher), AtomicU64::new(0))) as Arc<dyn Teacher>);
    falling.chain((0..standing).map(|_| Arc::clone(&teacher))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_lost_takes_no_split_along() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let (work, text) = (folder.clone(), job_in(&folder, "whole"));
    let whole = tokio::task::spawn_blocking(move || prepare(&text, &work)).await.unwrap();
    run::run(whole, RunOptions::default(), Arc::new(NullObserver)).await.unwrap();
    let (ran, said) = run_on(&folder, job_in(&folder, "lost"), |prepared| falling(prepared, 1)).await;
    ran.unwrap();
    assert_eq!(sums(&folder.join("lost")), sums(&folder.join("whole")));
    assert!(
        !said.is_empty() && said.iter().all(|m| m.ends_with("is lost; its splits go to the other devices")),
        "{said:?}"
    );

    let (ran, _) = run_on(&folder, job_in(&folder, "none"), |prepared| falling(prepared, 0)).await;
    let error = ran.unwrap_err().to_string();
    assert!(error.contains("cuda:7") && error.contains("fallen off the bus"), "{error}");
}

/// Tests the whole path on a device: forward pass, noise, top-k, shards. `verify` with the teacher on the CPU accepts
/// the result.
#[tokio::test(flavor = "multi_thread")]
async fn a_data_set_made_on_a_device_is_good_by_the_cpu() {
    let kept = tempfile::tempdir().unwrap();
    let folder = kept.path().canonicalize().unwrap();
    let path = nano_teacher();
    let on_device = |_: &Prepared| {
        let device: Arc<dyn Device> = Arc::new(Host::new(0));
        let options = LoadOptions { dtype: Precision::F32, batch_tokens: 256, length: 32, ..LoadOptions::default() };
        vec![Arc::from(gpu::load(&path, &device, &options).unwrap())]
    };
    let (ran, said) = run_on(&folder, job_over(1, &folder, "made", &path), on_device).await;
    ran.unwrap();
    assert!(said.is_empty(), "{said:?}");
    let dataset = Dataset::open(Output::on_disk(folder.join("made")).unwrap()).await.unwrap();
    let record = dataset.manifest().teacher.clone().unwrap();
    assert_eq!(
        (record.device.as_str(), record.arithmetic.as_str()),
        ("host", "f32 (widened from F16 safetensors), sums in f32, on host")
    );
    let all = VerifyOptions {
        teacher: true,
        teacher_path: Some(path.clone()),
        device: Some("cpu".into()),
        teacher_batches: 1000,
        report: None,
    };
    let verified = verify(&dataset, &all, &NullObserver).await.unwrap();
    assert!(verified.passed(), "{:?}", verified.faults);
    let check = verified.teacher.unwrap();
    assert!(check.tokens > 60, "{check:?}");
}
