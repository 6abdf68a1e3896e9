//! Teachers on a device, emulated by the host: their logits equal those of transformers and of the CPU.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, Extract, ExtractionSpec, NoiseForm, ObservedTokens, Signals, Tolerance, ValueType};
use stillhouse_signals::TopK;
use stillhouse_teacher::candle_core::quantized::GgmlDType;
use stillhouse_teacher::probe::{Reference, Text};
use stillhouse_teacher::stillhouse_gpu::Device;
use stillhouse_teacher::stillhouse_gpu::extract::{ExtractRequest, Extractor};
use stillhouse_teacher::{Architecture, LoadOptions, Logits, Runs, Teacher, TeacherConfig, gpu};

use super::golden::{Golden, IN_GGUF, Spelling, cases, checkpoint};
use super::*;

fn options(dtype: Precision) -> LoadOptions {
    LoadOptions { dtype, batch_tokens: 512, length: 128, ..LoadOptions::default() }
}

fn on_device(model: &str, dtype: Precision) -> Box<dyn Teacher> {
    let device: Arc<dyn Device> = Arc::new(Host::new(3));
    gpu::load(&testdata(model), &device, &options(dtype)).unwrap()
}

/// Returns the logits of every token of some runs, computed in slices.
fn logits(teacher: &dyn Teacher, runs: &Runs) -> Vec<f32> {
    let hidden = teacher.pass(runs).unwrap();
    let (mut buffer, mut all) = (teacher.buffer().unwrap(), Vec::new());
    let tokens: Vec<u32> = (0..runs.tokens().len() as u32).collect();
    for tokens in tokens.chunks(5.min(teacher.slice_rows())) {
        teacher.slice(&hidden, tokens, &mut buffer).unwrap();
        assert!(matches!(buffer, Logits::Device(_)));
        all.extend_from_slice(&buffer.on_host().unwrap());
    }
    all
}

fn off(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn runs_of(expected: &Expected) -> Runs {
    let mut runs = Runs::new();
    expected.tokens.chunks(expected.length).for_each(|run| runs.push(run.iter().copied()));
    runs
}

#[test]
fn a_device_gives_the_logits_of_transformers() {
    for model in MODELS {
        let (teacher, expected) = (on_device(model, Precision::F32), expected(model));
        let off = off(&logits(teacher.as_ref(), &runs_of(&expected)), &floats(&expected.logits));
        assert!(off < 1e-4, "{model}: off by {off}");
        let info = teacher.info();
        assert_eq!(
            (info.device.as_str(), info.arithmetic.as_str()),
            ("host", "f32 (safetensors), sums in f32, on host")
        );
    }
}

/// A device widens GGUF's blocks. Logits equal those of transformers. They are bit-identical to those of the blocks as
/// candle widens them, in any row order of the file.
#[test]
fn a_device_widens_what_is_in_a_gguf() {
    for case in ["gpt2", "llama", "llama_llama3", "qwen3"] {
        let golden = Golden::read(case);
        let mut runs = Runs::new();
        golden.tokens.chunks(golden.length).for_each(|run| runs.push(run.iter().copied()));
        let of = |kind, widened, dtype| {
            let device: Arc<dyn Device> = Arc::new(Host::new(5));
            let folder = golden.gguf_of(kind, widened);
            let teacher = gpu::load(&folder.path().join("model.gguf"), &device, &options(dtype)).unwrap();
            (logits(teacher.as_ref(), &runs), teacher.info().arithmetic.clone())
        };
        let exact = of(GgmlDType::F32, false, Precision::F32).0;
        let off = off(&exact, &floats(&golden.logits));
        assert!(off < 1e-4, "{case}: off by {off}");
        for kind in [
            GgmlDType::F16,
            GgmlDType::BF16,
            GgmlDType::Q4_0,
            GgmlDType::Q4_1,
            GgmlDType::Q5_0,
            GgmlDType::Q5_1,
            GgmlDType::Q8_0,
        ] {
            let (got, arithmetic) = of(kind, false, Precision::F32);
            assert!(got == of(kind, true, Precision::F32).0, "{case} in {kind:?}");
            assert!(arithmetic.contains(&format!("{kind:?} gguf")), "{case}: {arithmetic}");
            assert!(got != exact, "{case} in {kind:?}");
            if kind == GgmlDType::BF16 {
                let (copied, widened) = (of(kind, false, Precision::Bf16).0, of(kind, true, Precision::Bf16).0);
                assert!(copied == widened, "{case} in {kind:?}, which are copied to where they belong");
            }
        }
    }
}

/// Returns the logits of a file's teacher on a device for the sequences of a golden case, or the error.
fn on_device_for(golden: &Golden, path: &Path) -> Result<Vec<f32>, String> {
    let device: Arc<dyn Device> = Arc::new(Host::new(3));
    let options = LoadOptions { batch_tokens: golden.tokens.len(), length: golden.length, ..options(Precision::F32) };
    let teacher = gpu::load(path, &device, &options).map_err(|e| e.to_string())?;
    let mut runs = Runs::new();
    golden.tokens.chunks(golden.length).for_each(|run| runs.push(run.iter().copied()));
    teacher.pass(&runs).map_err(|e| e.to_string())?;
    Ok(logits(teacher.as_ref(), &runs))
}

/// Returns the expected error of a device for a golden case; `None` for cases that it computes.
fn refusal(case: &str, family: Architecture) -> Option<&'static str> {
    match (case, family) {
        ("qwen3_bias_window", _) => Some("sliding window on a GPU: got 8 tokens in layer 1, with sequences of 29"),
        ("llama_dynamic_long", _) => Some("sequence length"),
        _ if ["gpt2", "llama", "qwen3"].contains(&family.name()) => None,
        _ => Some("gpt2, llama, qwen3 on a GPU; the others with device: cpu"),
    }
}

/// For every golden case, including future ones, a device computes the logits of transformers or refuses the case by
/// name.
#[test]
fn every_golden_case_is_right_on_a_device_or_refused_by_name() {
    let (mut wrong, mut computed) = (Vec::new(), 0);
    let mut check = |what: String, golden: &Golden, path: &Path, refusal: Option<&str>| match (
        on_device_for(golden, path),
        refusal,
    ) {
        (Ok(got), None) if off(&got, &floats(&golden.logits)) < 1e-4 => computed += 1,
        (Ok(got), None) => wrong.push(format!("{what}: off by {}", off(&got, &floats(&golden.logits)))),
        (Ok(_), Some(_)) => wrong.push(format!("{what}: computed, though it cannot be")),
        (Err(error), Some(refusal)) if error.contains(refusal) => {}
        (Err(error), _) => wrong.push(format!("{what}: {error}")),
    };
    for case in cases() {
        let golden = Golden::read(&case);
        for spelling in [Spelling::Now, Spelling::Old].into_iter().filter(|s| !golden.config(*s).is_null()) {
            let folder = golden.checkpoint(spelling, 1);
            let family = TeacherConfig::read(folder.path()).unwrap().architecture;
            check(format!("{case}, {spelling:?}"), &golden, folder.path(), refusal(&case, family));
        }
    }
    for case in IN_GGUF {
        let (golden, folder) = (Golden::read(case), Golden::read(case).gguf());
        let path = folder.path().join("model.gguf");
        let family = TeacherConfig::read(&path).unwrap().architecture;
        check(format!("{case}, GGUF"), &golden, &path, refusal(case, family));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(computed >= 30, "{computed}");
}

/// In families with a GPU path, each of these configuration values changes the logits on a device exactly as on the
/// CPU, or is refused.
#[test]
fn every_word_of_a_configuration_is_heeded_or_refused() {
    let longrope = |original: usize| {
        let factors = |last: f64| [1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, last];
        json!({"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original,
            "short_factor": factors(4.0), "long_factor": factors(9.0), "attention_factor": 1.25})
    };
    let patches: [(&str, &str, Value, &str); 12] = [
        ("gpt2", "activation_function", json!("gelu"), ""),
        ("gpt2", "scale_attn_weights", json!(false), ""),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), ""),
        ("gpt2", "layer_norm_epsilon", json!(0.1), ""),
        ("llama", "hidden_act", json!("gelu_pytorch_tanh"), ""),
        ("llama", "rms_norm_eps", json!(0.1), ""),
        ("llama", "rope_parameters", longrope(64), ""),
        ("llama", "rope_parameters", longrope(28), "length of sequences under longrope, on a GPU: got 29"),
        ("qwen3", "hidden_act", json!("gelu_pytorch_tanh"), ""),
        ("qwen3_bias_window", "sliding_window", json!(29), ""),
        ("qwen3_bias_window", "sliding_window", json!(28), "sliding window on a GPU: got 28 tokens in layer 1"),
        (
            "qwen3_bias_window",
            "layer_types",
            json!(["sliding_attention", "full_attention", "full_attention"]),
            "layer 0",
        ),
    ];
    for (case, field, value, refused) in patches {
        let golden = Golden::read(case);
        let (what, mut config) = (format!("{case}, {field}: {value}"), golden.config(Spelling::Now));
        config[field] = value;
        let folder = checkpoint(&config, golden.tensors(), 1);
        if !refused.is_empty() {
            let error = on_device_for(&golden, folder.path()).unwrap_err();
            assert!(error.contains(refused) && error.contains("device: cpu"), "{what}: {error}");
            continue;
        }
        let cpu = load_on_host(folder.path(), Precision::F32).unwrap();
        let hidden = cpu.hidden(&golden.tokens, golden.batch, golden.length).unwrap();
        let want = floats(&cpu.logits(&rows(&hidden)).unwrap());
        let changed = off(&want, &floats(&golden.logits));
        assert!(changed > 1e-3, "{what} changes nothing: {changed}");
        let off = off(&on_device_for(&golden, folder.path()).unwrap(), &want);
        assert!(off < 1e-4, "{what}: off by {off}");
    }
}

/// Hidden states on a device equal those on the CPU, which equal those of transformers. The last ones are the head's
/// input.
#[test]
fn a_device_keeps_the_hidden_states_of_layers() {
    for model in MODELS {
        let expected = expected(model);
        let mut runs = runs_of(&expected);
        runs.push(expected.tokens[..3].iter().copied());
        let cpu = LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() };
        let cpu = stillhouse_teacher::load(&testdata(model), &cpu).unwrap();
        let layers: Vec<usize> = (0..=cpu.info().layers).rev().chain([1]).collect();
        let (_, want) = cpu.pass_with_states(&runs, &layers).unwrap();
        let size = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
        for (dtype, allowed) in [(Precision::F32, 1e-5), (Precision::Bf16, 0.08), (Precision::F16, 0.01)] {
            let teacher = on_device(model, dtype);
            for _ in 0..2 {
                let (hidden, got) = teacher.pass_with_states(&runs, &layers).unwrap();
                assert_eq!(got.len(), want.len());
                // Compares each layer separately, because their magnitudes differ a lot.
                for place in 0..layers.len() {
                    let width = cpu.info().hidden_size;
                    let of = |all: &[f32]| -> Vec<f32> {
                        let rows = all.chunks_exact(layers.len() * width);
                        rows.flat_map(|row| row[place * width..(place + 1) * width].to_vec()).collect()
                    };
                    let (got, want) = (of(&got), of(&want));
                    let off = size(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / size(&mut want.iter().copied());
                    assert!(off < allowed, "{model} in {dtype}, layer {}: off by {off}", layers[place]);
                }
                // The head can still use the pass.
                let mut buffer = teacher.buffer().unwrap();
                teacher.slice(&hidden, &[0, 5], &mut buffer).unwrap();
            }
            assert!(teacher.pass_with_states(&runs, &[]).unwrap().1.is_empty());
            let e = teacher.pass_with_states(&runs, &[0, cpu.info().layers + 1]).unwrap_err().to_string();
            assert!(e.contains("layer of hidden states") && e.contains("0 to"), "{e}");
        }
    }
}

#[test]
fn sixteen_bits_stay_as_near_as_on_a_cpu() {
    let size = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    for (dtype, allowed) in [(Precision::Bf16, 0.08), (Precision::F16, 0.01)] {
        for model in MODELS {
            let (teacher, expected) = (on_device(model, dtype), expected(model));
            let (got, want) = (logits(teacher.as_ref(), &runs_of(&expected)), floats(&expected.logits));
            let off = size(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / size(&mut want.iter().copied());
            assert!(off < allowed, "{model} in {dtype}: off by {off}");
        }
    }
}

/// The same probe as for the CPU measures the loss of fp8. A CPU refuses an fp8 teacher.
#[test]
fn eight_bits_are_measured_and_refused_on_a_cpu() {
    for model in MODELS {
        let (exact, expected) = (on_device(model, Precision::F32), expected(model));
        let text = Text::new(expected.tokens.chunks(expected.length), exact.info().vocab_size);
        let reference = Reference::new(text, exact.as_ref()).unwrap();
        let of = |dtype| reference.difference(on_device(model, dtype).as_ref()).unwrap();
        let (eight, sixteen) = (of(Precision::Fp8), of(Precision::Bf16));
        assert!(eight.mean_kl_nats > 4.0 * sixteen.mean_kl_nats, "{model}: {eight:?}, {sixteen:?}");
        // The weights are random, so logits are larger than a trained teacher's.
        assert!(eight.mean_kl_nats < 0.3, "{model}: {eight:?}");
        let teacher = on_device(model, Precision::Fp8);
        let arithmetic = "fp8 (converted from F32 safetensors), sums in f32, the rest in bf16, on host";
        assert_eq!(teacher.info().arithmetic, arithmetic);
        let cpu = LoadOptions { device: DeviceChoice::Cpu, ..options(Precision::Fp8) };
        let error = stillhouse_teacher::load(&testdata(model), &cpu).err().unwrap().to_string();
        assert!(error.starts_with("dtype of a teacher on a CPU: got fp8") && error.contains("bf16x3"), "{error}");
    }
}

#[test]
fn runs_of_any_lengths_share_a_pass() {
    for model in MODELS {
        let (teacher, expected) = (on_device(model, Precision::F32), expected(model));
        let tokens = &expected.tokens[..expected.length];
        let lengths = [1, expected.length, 2, expected.length / 2];
        let (mut together, mut alone) = (Runs::new(), Vec::new());
        for length in lengths {
            together.push(tokens[..length].iter().copied());
            let mut one = Runs::new();
            one.push(tokens[..length].iter().copied());
            alone.extend(logits(teacher.as_ref(), &one));
        }
        let off = off(&logits(teacher.as_ref(), &together), &alone);
        assert!(off < 1e-6, "{model}: off by {off}");
    }
}

#[test]
fn what_does_not_fit_is_told_with_its_numbers() {
    let device: Arc<dyn Device> = Arc::new(Host::with_memory(0, 100_000));
    let error = gpu::load(&testdata("gpt2"), &device, &options(Precision::F32)).err().unwrap().to_string();
    assert!(error.contains("100000 of 100000 are free") && error.contains("valid: a smaller type"), "{error}");

    let teacher = on_device("gpt2", Precision::F32);
    let mut long = Runs::new();
    long.push(std::iter::repeat_n(0, teacher.info().max_positions + 1));
    assert!(teacher.pass(&long).unwrap_err().to_string().starts_with("sequence length"));
    let mut strange = Runs::new();
    strange.push([teacher.info().vocab_size as u32]);
    assert!(teacher.pass(&strange).unwrap_err().to_string().starts_with("token"));
    assert!(teacher.slice(&teacher.pass(&runs_of(&expected("gpt2"))).unwrap(), &[0], &mut Logits::default()).is_err());
}

/// A device with too little memory for the requested passes runs smaller ones and reports it. The size depends only on
/// its memory.
#[test]
fn a_pass_is_as_small_as_it_has_to_be() {
    let whole = on_device("gpt2", Precision::F32);
    assert_eq!(whole.pass_tokens(), 512);
    let host = Arc::new(Host::new(0));
    let device: Arc<dyn Device> = host.clone();
    let before = host.used();
    let kept = gpu::load(&testdata("gpt2"), &device, &options(Precision::F32)).unwrap();
    let bytes = host.used() - before + 4 * (kept.slice_rows() * kept.info().vocab_size.next_multiple_of(8) * 4) as u64;
    drop(kept);
    assert_eq!(host.used(), 0, "what a teacher had is given back");
    // Half a megabyte too little for a pass over 512 tokens, which needs 735 kB. A twentieth of free memory stays
    // unused.
    let bytes = (bytes - 500_000) * 100 / 95;
    let small: Arc<dyn Device> = Arc::new(Host::with_memory(0, bytes));
    let teacher = gpu::load(&testdata("gpt2"), &small, &options(Precision::F32)).unwrap();
    assert!((64..512).contains(&teacher.pass_tokens()), "{}", teacher.pass_tokens());
    let suffix = format!("passes of {} tokens", teacher.pass_tokens());
    assert!(teacher.info().arithmetic.ends_with(&suffix), "{}", teacher.info().arithmetic);
    let expected = expected("gpt2");
    let runs = runs_of(&expected);
    assert!(off(&logits(teacher.as_ref(), &runs), &logits(whole.as_ref(), &runs)) < 1e-5);
}

/// A thousand batches, from tokens to corrections, allocate nothing after the first.
#[test]
fn the_steady_state_allocates_nothing() {
    let host = Arc::new(Host::new(0));
    let device: Arc<dyn Device> = host.clone();
    let teacher = gpu::load(&testdata("llama-gqa"), &device, &options(Precision::Bf16)).unwrap();
    let vocab = teacher.info().vocab_size;
    let noise =
        NoiseForm::Replay { tolerance: Tolerance::new(1e-3).unwrap(), value_type: ValueType::F16, condition: true };
    let extraction = ExtractionSpec {
        vocab,
        keys: DrawKey::draws(1, 1),
        noise: Some(noise),
        signals: Signals::new(vec![Arc::new(TopK { k: 2 })]),
    };
    let mut extractor =
        Extractor::new(&device, ExtractRequest::with_stride(&extraction, vocab.next_multiple_of(8)), 8).unwrap();
    let mut buffers = [teacher.buffer().unwrap(), teacher.buffer().unwrap()];
    let mut after_the_first = None;
    for batch in 0..1000u32 {
        let mut runs = Runs::new();
        runs.push((0..1 + batch % 3).map(|i| (batch + i) % vocab as u32));
        let hidden = teacher.pass(&runs).unwrap();
        let logits = &mut buffers[batch as usize % 2];
        teacher.slice(&hidden, &[0], logits).unwrap();
        let Logits::Device(logits) = logits else { panic!("not on the device") };
        let observed = ObservedTokens { tokens: &[batch % 7], positions: &[batch], sequence_ids: &[5] };
        // SAFETY: the buffer lives, and nothing writes to it meanwhile
        let slice = unsafe { logits.slice() }.unwrap();
        let found = extractor.extract(&slice, &observed).unwrap();
        assert_eq!(found.logprob.len(), 1);
        let held = (host.allocations(), host.used(), host.used_pinned());
        assert_eq!(*after_the_first.get_or_insert(held), held, "batch {batch}");
    }
    drop((teacher, extractor, buffers));
    assert_eq!((host.used(), host.used_pinned()), (0, 0));
}
