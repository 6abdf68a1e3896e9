//! Compares the probe's differences with sums in f64, over logits of one run at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use stillhouse_gpu_host::Host;
use stillhouse_teacher::probe::{MAX_TOKENS, Reference, Text, seconds};
use stillhouse_teacher::stillhouse_gpu::Device;
use stillhouse_teacher::{Hidden, LoadOptions, Logits, Result, Runs, Teacher, TeacherInfo, gpu, load};

use super::errors::assert_all;
use super::*;

const RUNS: [&[u32]; 3] = [&[1, 5, 9, 2, 7], &[3], &[4, 4, 8]];

fn cpu(model: &str, dtype: Precision) -> Box<dyn Teacher> {
    load(&testdata(model), &LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() }).unwrap()
}

/// Returns ln p of every position of a run.
fn logprobs(teacher: &dyn HostTeacher, run: &[u32]) -> Vec<Vec<f64>> {
    let hidden = teacher.hidden(run, 1, run.len()).unwrap().flatten(0, 1).unwrap();
    let mut logits = Vec::new();
    teacher.logits_into(&hidden, &mut logits).unwrap();
    let rows = logits.chunks_exact(teacher.info().vocab_size);
    rows.map(|row| {
        let z = row.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
        row.iter().map(|l| f64::from(*l) - z).collect()
    })
    .collect()
}

#[test]
fn the_cost_of_a_type_is_what_the_definition_says() {
    for model in ["gpt2", "llama-gqa", "qwen3"] {
        for dtype in [Precision::F16, Precision::Bf16, Precision::Bf16x3] {
            let (exact, other) = (teacher(model, Precision::F32), teacher(model, dtype));
            let (mut all, mut largest) = (Vec::new(), 0f64);
            for run in RUNS {
                let (p, q) = (logprobs(exact.as_ref(), run), logprobs(other.as_ref(), run));
                for (i, (p, q)) in p.iter().zip(&q).enumerate() {
                    all.push(p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
                    if let Some(next) = run.get(i + 1) {
                        largest = largest.max((p[*next as usize] - q[*next as usize]).abs());
                    }
                }
            }
            let expected = cpu(model, Precision::F32);
            let reference = Reference::new(Text::new(RUNS, expected.info().vocab_size), expected.as_ref()).unwrap();
            let got = reference.difference(cpu(model, dtype).as_ref()).unwrap();
            assert_eq!(got.tokens, 9);
            let mean = all.iter().sum::<f64>() / 9.0;
            let max = all.iter().copied().fold(0.0, f64::max);
            // ln p is stored in f32.
            assert!((got.mean_kl_nats - mean).abs() < 1e-7 + 1e-3 * mean, "{model} {dtype}: {got:?}, not {mean}");
            assert!((got.max_kl_nats - max).abs() < 1e-6 + 1e-3 * max, "{model} {dtype}: {got:?}, not {max}");
            assert!((got.max_logprob_change_nats - largest).abs() < 2e-6, "{model} {dtype}: {got:?}, not {largest}");
            if dtype == Precision::Bf16x3 {
                assert!(largest < 2e-4, "{model}: {largest}");
            }
        }
    }
}

#[test]
fn a_teacher_is_at_no_distance_from_itself_and_a_text_has_a_bound() {
    let teacher = cpu("gpt2", Precision::F32);
    let reference = Reference::new(Text::new(RUNS, teacher.info().vocab_size), teacher.as_ref()).unwrap();
    let itself = reference.difference(teacher.as_ref()).unwrap();
    assert!(itself.max_kl_nats < 1e-6 && itself.max_logprob_change_nats < 1e-6, "{itself:?}");
    assert!(seconds(teacher.as_ref(), reference.text()).unwrap() > 0.0);

    let long = [7u32; 3 * MAX_TOKENS];
    assert_eq!(Text::new(long.chunks(100), 50_257).tokens(), MAX_TOKENS);
    assert_eq!(Text::new(long.chunks(100), 1 << 20).tokens(), 64, "256 MiB of log-probabilities");
    let error = Reference::new(Text::new([], 16), teacher.as_ref()).err().unwrap().to_string();
    assert_all(&error, &["text of a probe", "no tokens", "one token at least"]);
    let other = cpu("llama-gqa", Precision::F32);
    assert_ne!(other.info().vocab_size, teacher.info().vocab_size);
    assert_all(&reference.difference(other.as_ref()).unwrap_err().to_string(), &["vocabulary of a teacher to compare"]);
}

/// A teacher with passes of at most `room` tokens, which records the size of the largest pass.
struct Bounded {
    teacher: Box<dyn Teacher>,
    room: usize,
    largest: AtomicUsize,
}

impl Teacher for Bounded {
    fn info(&self) -> &TeacherInfo {
        self.teacher.info()
    }
    fn slice_rows(&self) -> usize {
        4
    }
    fn pass_tokens(&self) -> usize {
        self.room
    }
    fn buffer(&self) -> Result<Logits> {
        self.teacher.buffer()
    }
    fn pass(&self, runs: &Runs) -> Result<Hidden> {
        self.largest.fetch_max(runs.tokens().len(), Ordering::Relaxed);
        self.teacher.pass(runs)
    }
    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()> {
        self.teacher.slice(hidden, tokens, logits)
    }
}

#[test]
fn a_pass_of_a_probe_has_no_more_tokens_than_there_is_room_for() {
    let text = Text::new(RUNS, 199);
    let whole = Reference::new(text.clone(), cpu("gpt2", Precision::F32).as_ref()).unwrap();
    let want = whole.difference(cpu("gpt2", Precision::Bf16).as_ref()).unwrap();
    for (room, largest) in [(1024, 9), (8, 6), (6, 6), (5, 5), (1, 5)] {
        let bounded = |dtype| Bounded { teacher: cpu("gpt2", dtype), room, largest: AtomicUsize::new(0) };
        let (exact, other) = (bounded(Precision::F32), bounded(Precision::Bf16));
        let got = Reference::new(text.clone(), &exact).unwrap().difference(&other).unwrap();
        assert_eq!(got, want, "room for {room}");
        seconds(&exact, &text).unwrap();
        for teacher in [exact, other] {
            // A run is one pass, whatever its length.
            assert_eq!(teacher.largest.into_inner(), largest, "room for {room}");
        }
    }
}

/// On a device, `seconds` measures what a job does: passes that fit, and logits that stay on the device.
#[test]
fn a_device_is_timed_without_its_logits_leaving_it() {
    let host = Arc::new(Host::new(0));
    let device: Arc<dyn Device> = host.clone();
    let options = LoadOptions { batch_tokens: 8, length: 5, ..LoadOptions::default() };
    let teacher = gpu::load(&testdata("gpt2"), &device, &options).unwrap();
    assert_eq!(teacher.pass_tokens(), 8);
    let text = Text::new(RUNS, teacher.info().vocab_size);
    assert!(text.tokens() > teacher.pass_tokens());
    let reference = Reference::new(text, teacher.as_ref()).unwrap();
    // The comparison copies logits to the host.
    let copied = host.copied_out();
    assert!(copied >= 9 * 4 * teacher.info().vocab_size as u64);
    assert!(seconds(teacher.as_ref(), reference.text()).unwrap() > 0.0);
    assert_eq!(host.copied_out(), copied);
}
