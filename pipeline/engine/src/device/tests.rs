//! Tests the owner of a device with a mock teacher.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use arrow::array::{ArrayRef, AsArray, Int32Array, ListArray, RecordBatch, UInt64Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Float32Type, Schema};
use candle_core::{DType, Device, Tensor};
use stillhouse_gpu_host::Host;
use stillhouse_operators::extract::ExtractConfig;
use stillhouse_operators::operator::{Counters, Measure, Meter, OperatorError};
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::spec::TeacherContext;
use stillhouse_teacher::stillhouse_gpu::Device as GpuDevice;
use stillhouse_teacher::{
    Architecture, DeviceLogits, Hidden, HostTeacher, HostTeacherAdapter, Logits, Precision, Result, Runs, Teacher,
    TeacherInfo,
};

use super::{DeviceQueue, next_buffer};

const VOCAB: usize = 11;
/// A token for which the mock returns NaN logits.
const POISON: u32 = 7;
/// A token at which the mock panics.
const PANIC: u32 = 9;

/// A mock teacher. Its logits at a position equal the token there for every vocabulary entry, so all log-probabilities
/// are −ln V.
struct Echo {
    info: TeacherInfo,
    passes: Arc<AtomicU64>,
}

impl Echo {
    fn start(passes: &Arc<AtomicU64>) -> DeviceQueue {
        let info = Self::info();
        DeviceQueue::start(Arc::new(HostTeacherAdapter(Self { info, passes: Arc::clone(passes) }))).unwrap()
    }

    fn info() -> TeacherInfo {
        TeacherInfo {
            architecture: Architecture::named("gpt2").unwrap(),
            vocab_size: VOCAB,
            max_positions: 64,
            hidden_size: 1,
            layers: 1,
            parameters: 1,
            bos_token_id: Some(0),
            eos_token_id: Some(0),
            weights: Vec::new(),
            dtype: Precision::F32,
            device: "cpu".into(),
            arithmetic: "f32".into(),
        }
    }

    /// The same mock with its logits on a device, two rows per slice.
    fn start_on_device() -> DeviceQueue {
        let echo = Self { info: Self::info(), passes: Arc::default() };
        DeviceQueue::start(Arc::new(Uploaded(HostTeacherAdapter(echo), Arc::new(Host::new(0))))).unwrap()
    }
}

impl HostTeacher for Echo {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Tensor> {
        self.passes.fetch_add(1, Ordering::Relaxed);
        assert!(!tokens.contains(&PANIC), "on purpose");
        let states: Vec<f32> = tokens.iter().map(|&t| if t == POISON { f32::NAN } else { t as f32 }).collect();
        Ok(Tensor::from_vec(states, (batch, length, 1), &Device::Cpu)?)
    }

    fn logits(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(Tensor::zeros((rows.dim(0)?, VOCAB), DType::F32, &Device::Cpu)?)
    }

    fn logits_into(&self, rows: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        let states = rows.flatten_all()?.to_vec1::<f32>()?;
        out.extend(states.iter().flat_map(|&state| [state; VOCAB]));
        Ok(())
    }
}

/// A mock teacher whose logits look as if they were on a GPU.
struct Uploaded(HostTeacherAdapter<Echo>, Arc<dyn GpuDevice>);

impl Teacher for Uploaded {
    fn info(&self) -> &TeacherInfo {
        self.0.info()
    }

    fn slice_rows(&self) -> usize {
        2
    }

    fn buffer(&self) -> Result<Logits> {
        Ok(Logits::Device(DeviceLogits::new(&self.1, 2, VOCAB)?))
    }

    fn pass(&self, runs: &Runs) -> Result<Hidden> {
        self.0.pass(runs)
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()> {
        let mut on_host = Logits::default();
        self.0.slice(hidden, tokens, &mut on_host)?;
        let Logits::Device(logits) = logits else { panic!("a buffer of the CPU") };
        Ok(logits.fill(&on_host.on_host()?)?)
    }
}

fn list(field: &Field, rows: &[Vec<i32>]) -> ArrayRef {
    let DataType::List(item) = field.data_type() else { panic!("no list") };
    let offsets = OffsetBuffer::from_lengths(rows.iter().map(Vec::len));
    let values = Int32Array::from_iter_values(rows.iter().flatten().copied());
    Arc::new(ListArray::new(item.clone(), offsets, Arc::new(values), None))
}

fn sequences(first: u64, rows: &[Vec<i32>]) -> RecordBatch {
    let fields = vec![
        Field::new(columns::SEQUENCE_ID, DataType::UInt64, false),
        columns::list_field(columns::INPUT_IDS, DataType::Int32),
        columns::list_field(columns::DOCUMENT_OFFSETS, DataType::Int32),
    ];
    let (ids, offsets) = (list(&fields[1], rows), list(&fields[2], &vec![vec![0]; rows.len()]));
    let numbers = UInt64Array::from_iter_values(first..first + rows.len() as u64);
    RecordBatch::try_new(Arc::new(Schema::new(fields)), vec![Arc::new(numbers), ids, offsets]).unwrap()
}

fn config() -> Arc<ExtractConfig> {
    Arc::new(ExtractConfig {
        vocab_size: VOCAB,
        bos: 0,
        context: TeacherContext::Sequence,
        batch_tokens: 64,
        noise: None,
        signals: <_>::default(),
        hidden: None,
        rows: RowLength::UpTo(8),
    })
}

fn meter() -> (Arc<Counters>, Arc<dyn Meter>) {
    let counters = Arc::new(Counters::default());
    (Arc::clone(&counters), counters)
}

/// A timeout far above what any test takes, so that a hang fails the test.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn many_splits_share_a_device_and_each_gets_its_own() {
    let passes = Arc::default();
    let device = Echo::start(&passes);
    let (counters, meter) = meter();
    let split = |n: u64| {
        let (device, meter) = (device.clone(), Arc::clone(&meter));
        tokio::spawn(async move {
            for batch in 0..5 {
                let rows: Vec<Vec<i32>> = (0..3).map(|r| vec![1, (n % 5) as i32 + 1, r]).collect();
                let input = sequences(n * 100 + batch * 10, &rows);
                let pending = device.submit(&config(), input.clone(), Arc::clone(&meter)).await.unwrap();
                let done = pending.wait(&device).await.unwrap();
                assert_eq!(done.batch.num_rows(), 3);
                assert_eq!(&done.batch.columns()[..3], input.columns());
                let logprobs = done.batch.column_by_name(columns::LOGPROB).unwrap();
                let logprobs = logprobs.as_list::<i32>().values().as_primitive::<Float32Type>();
                assert!(logprobs.values().iter().all(|l| (l + (VOCAB as f32).ln()).abs() < 1e-6));
                assert_eq!(done.statistics.predicted_tokens, 9);
            }
        })
    };
    let splits: Vec<_> = (0..20).map(split).collect();
    for split in splits {
        tokio::time::timeout(LONG, split).await.unwrap().unwrap();
    }
    assert_eq!(counters.get(Measure::TeacherTokens), 20 * 5 * 9);
    assert_eq!(passes.load(Ordering::Relaxed), 100);
}

#[tokio::test]
async fn logits_that_are_no_numbers_are_reported_with_their_place_and_the_device_goes_on() {
    a_poisoned_batch_is_told_and_no_other(Echo::start(&Arc::default())).await;
    a_poisoned_batch_is_told_and_no_other(Echo::start_on_device()).await;
}

async fn a_poisoned_batch_is_told_and_no_other(device: DeviceQueue) {
    let (_, meter) = meter();
    let poisoned = sequences(40, &[vec![1, 2, 3, 4], vec![1, 2, POISON as i32, 3, 4]]);
    let good = || sequences(50, &[vec![1, 2, 3]]);
    // other requests wait in the queue while the origin of the error is located
    let first = device.submit(&config(), poisoned, Arc::clone(&meter)).await.unwrap();
    let second = device.submit(&config(), good(), Arc::clone(&meter)).await.unwrap();
    let waiting = tokio::spawn({
        let (device, meter) = (device.clone(), Arc::clone(&meter));
        async move {
            let third = device.submit(&config(), good(), meter).await.unwrap();
            third.wait(&device).await.unwrap()
        }
    });
    let error = tokio::time::timeout(LONG, first.wait(&device)).await.unwrap().unwrap_err();
    assert!(matches!(error, OperatorError::NotFinite { sequence_id: 41, position: 3, .. }), "{error}");
    assert_eq!(tokio::time::timeout(LONG, second.wait(&device)).await.unwrap().unwrap().batch.num_rows(), 1);
    assert_eq!(tokio::time::timeout(LONG, waiting).await.unwrap().unwrap().batch.num_rows(), 1);
}

#[tokio::test]
async fn a_device_that_panics_is_an_error_for_all_who_wait() {
    let device = Echo::start(&Arc::default());
    let (_, meter) = meter();
    let bad = device.submit(&config(), sequences(1, &[vec![1, PANIC as i32, 3]]), Arc::clone(&meter)).await.unwrap();
    let error = tokio::time::timeout(LONG, bad.wait(&device)).await.unwrap().unwrap_err().to_string();
    assert!(error.ends_with("the device stopped: a bug in this program"), "{error}");
    let config = config();
    let after = device.submit(&config, sequences(2, &[vec![1, 2]]), meter);
    match tokio::time::timeout(LONG, after).await.unwrap() {
        Ok(pending) => assert!(tokio::time::timeout(LONG, pending.wait(&device)).await.unwrap().is_err()),
        Err(e) => assert!(e.to_string().ends_with("a bug in this program"), "{e}"),
    }
}

/// Records which measures were counted, even if their time was zero.
#[derive(Debug, Default)]
struct Counted(std::sync::Mutex<Vec<Measure>>);

impl Meter for Counted {
    fn add(&self, what: Measure, _: u64) {
        self.0.lock().unwrap().push(what);
    }
}

/// A device counts as blocked only while its logits are finished and no buffer is free. It is not blocked while it
/// computes, or has a buffer.
#[test]
fn only_a_device_that_has_nothing_to_do_waits_for_the_extraction() {
    let counted = Counted::default();
    let (give, free) = channel();
    give.send(1).unwrap();
    assert_eq!(next_buffer(&free, || true, &counted).unwrap(), 1);
    // a buffer arrives while the device is computing
    let looks = AtomicU64::new(0);
    let at_work = || {
        if looks.fetch_add(1, Ordering::Relaxed) == 3 {
            give.send(2).unwrap();
        }
        false
    };
    assert_eq!(next_buffer(&free, at_work, &counted).unwrap(), 2);
    assert_eq!((counted.0.lock().unwrap().len(), looks.load(Ordering::Relaxed)), (0, 4));
    // a buffer arrives after the device has finished
    let idle = || {
        give.send(3).unwrap();
        true
    };
    assert_eq!(next_buffer(&free, idle, &counted).unwrap(), 3);
    assert_eq!(*counted.0.lock().unwrap(), [Measure::DeviceBlockedNanos]);
    drop(give);
    assert!(matches!(next_buffer(&free, || false, &counted), Err(OperatorError::Stopped)));
}
