use stillhouse_teacher::Precision::{Bf16, F16, F32};

use stillhouse_teacher::{Hidden, LoadOptions, Runs, load};

use super::*;

#[test]
fn logits_equal_the_reference() {
    for model in MODELS {
        let (teacher, expected) = (teacher(model, F32), expected(model));
        let hidden = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
        assert_eq!(hidden.dims(), [expected.batch, expected.length, teacher.info().hidden_size]);
        let logits = teacher.logits(&rows(&hidden)).unwrap();
        let off = worst(&logits, &expected.logits);
        assert!(off < 1e-4, "{model}: off by {off}");
    }
}

#[test]
fn half_precision_stays_near_the_reference() {
    for (model, dtype) in MODELS.into_iter().flat_map(|model| [(model, Bf16), (model, F16)]) {
        let (teacher, expected) = (teacher(model, dtype), expected(model));
        let hidden = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
        let logits = teacher.logits(&rows(&hidden)).unwrap();
        assert_eq!(logits.dtype(), DType::F32);
        // The tolerance for rounding, eight times finer in f16 (11 bits) than in bf16 (8 bits).
        let (got, want) = (floats(&logits), floats(&expected.logits));
        let size = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
        let off = size(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / size(&mut want.iter().copied());
        let allowed = if dtype == F16 { 0.01 } else { 0.08 };
        assert!(off < allowed, "{model} in {dtype}: off by {off}");
        let mut buffer = Vec::new();
        teacher.logits_into(&rows(&hidden), &mut buffer).unwrap();
        assert_eq!(buffer, floats(&logits));
    }
}

#[test]
fn slices_of_rows_equal_the_whole() {
    for model in MODELS {
        let (teacher, expected) = (teacher(model, F32), expected(model));
        let hidden = rows(&teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap());
        let vocab = teacher.info().vocab_size;
        let whole = floats(&teacher.logits(&hidden).unwrap());
        let mut buffer = vec![f32::NAN; 7];
        for size in [1, 2, 17, 64] {
            for first in (0..hidden.dim(0).unwrap()).step_by(size) {
                let size = size.min(hidden.dim(0).unwrap() - first);
                let slice = hidden.narrow(0, first, size).unwrap();
                teacher.logits_into(&slice, &mut buffer).unwrap();
                let want = &whole[first * vocab..(first + size) * vocab];
                assert_eq!(buffer.len(), want.len());
                assert!(buffer.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{model}, {size} from {first}");
            }
        }
    }
}

#[test]
fn a_batch_equals_its_sequences_one_by_one() {
    for model in MODELS {
        let (teacher, expected) = (teacher(model, F32), expected(model));
        let together = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
        for (b, tokens) in expected.tokens.chunks(expected.length).enumerate() {
            let alone = teacher.hidden(tokens, 1, expected.length).unwrap();
            assert_eq!(worst(&alone, &together.narrow(0, b, 1).unwrap()), 0.0, "{model}");
        }
    }
}

/// Runs of any lengths that share a pass, a task and the rows of a product do not change a single bit of each other.
#[test]
fn runs_together_equal_each_of_them_alone_to_the_bit() {
    for model in MODELS {
        let options = LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() };
        let teacher = load(&testdata(model), &options).unwrap();
        let (vocab, longest) = (teacher.info().vocab_size, teacher.info().max_positions);
        let lengths = [1, 2, 63, 64, 65, 7, 100, 28, 1, 3].map(|length: usize| length.min(longest));
        let mut runs = Runs::new();
        // More tokens than pass through the net at once.
        for i in 0..500 {
            let length = lengths[i * 7 % lengths.len()];
            runs.push((0..length).map(|j| ((i * 31 + j * 7919 + 5) % vocab) as u32));
        }
        assert!(runs.tokens().len() > 2 * 4096);
        let logits = |runs: &Runs, tokens: &[u32]| {
            let (hidden, mut logits) = (teacher.pass(runs).unwrap(), teacher.buffer().unwrap());
            let mut all = Vec::new();
            for tokens in tokens.chunks(teacher.slice_rows()) {
                teacher.slice(&hidden, tokens, &mut logits).unwrap();
                all.extend(logits.on_host().unwrap().iter().map(|x| x.to_bits()));
            }
            all
        };
        let together = logits(&runs, &(0..runs.tokens().len() as u32).collect::<Vec<_>>());
        let (layers, width) = ([0, teacher.info().layers, 1], teacher.info().hidden_size);
        let floats_per_token = layers.len() * width;
        let (Hidden::Host { states, .. }, captured) = teacher.pass_with_states(&runs, &layers).unwrap() else {
            panic!()
        };
        let states: Vec<f32> = states.flatten_all().unwrap().to_vec1().unwrap();
        for (captured, state) in captured.chunks_exact(floats_per_token).zip(states.chunks_exact(width)) {
            assert_eq!(&captured[width..2 * width], state, "{model}: the last one is what the head sees");
        }
        for run in runs.iter().take(60).chain(runs.iter().skip(440)) {
            let row = (run.as_ptr() as usize - runs.tokens().as_ptr() as usize) / size_of::<u32>();
            let mut alone = Runs::new();
            alone.push(run.iter().copied());
            let captured_alone = teacher.pass_with_states(&alone, &layers).unwrap().1;
            assert!(
                captured[row * floats_per_token..(row + run.len()) * floats_per_token] == captured_alone,
                "{model}: {}",
                run.len()
            );
            let alone = logits(&alone, &(0..run.len() as u32).collect::<Vec<_>>());
            assert!(together[row * vocab..(row + run.len()) * vocab] == alone, "{model}: a run of {}", run.len());
        }
    }
}

#[test]
fn a_later_token_changes_nothing_before_it() {
    for model in MODELS {
        let teacher = teacher(model, F32);
        let length = teacher.info().max_positions;
        let vocab = teacher.info().vocab_size as u32;
        let mut tokens: Vec<u32> = (0..length as u32).map(|i| (i * 7919 + 5) % vocab).collect();
        let before = teacher.hidden(&tokens, 1, length).unwrap();
        let changed = length / 2;
        tokens[changed] = (tokens[changed] + 1) % vocab;
        let after = teacher.hidden(&tokens, 1, length).unwrap();
        let part = |hidden: &Tensor, from, to| floats(&hidden.narrow(1, from, to - from).unwrap());
        assert_eq!(part(&before, 0, changed), part(&after, 0, changed), "{model}");
        assert_ne!(part(&before, changed, length), part(&after, changed, length), "{model}");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for model in MODELS {
        let (teacher, expected) = (teacher(model, F32), expected(model));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let hidden = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
                let mut logits = Vec::new();
                teacher.logits_into(&rows(&hidden), &mut logits).unwrap();
                logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            })
        };
        let one = run(1);
        for threads in [2, 3, 4, 8] {
            assert!(one == run(threads), "{model} with {threads} threads");
        }
    }
}

#[test]
fn a_checkpoint_without_prefix_loads_too() {
    let folder = tempfile::tempdir().unwrap();
    let from = testdata("gpt2");
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    let tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    let mut bare: std::collections::HashMap<String, Tensor> =
        tensors.into_iter().map(|(name, t)| (name.trim_start_matches("transformer.").to_owned(), t)).collect();
    bare.insert("h.0.attn.bias".into(), Tensor::zeros((1, 1, 64, 64), DType::U8, &Device::Cpu).unwrap());
    // Two shards with an index, as large models are stored.
    let (first, second): (Vec<_>, Vec<_>) = bare.into_iter().partition(|(name, _)| name.starts_with("h.1."));
    let mut map = String::new();
    for (i, shard) in [first, second].into_iter().enumerate() {
        let file = format!("model-0000{i}-of-00002.safetensors");
        shard
            .iter()
            .for_each(|(name, _)| map += &format!("{}\"{name}\": \"{file}\"", if map.is_empty() { "" } else { ", " }));
        let shard: std::collections::HashMap<_, _> = shard.into_iter().collect();
        candle_core::safetensors::save(&shard, folder.path().join(file)).unwrap();
    }
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(index, format!("{{\"weight_map\": {{{map}}}}}")).unwrap();

    let (sharded, expected) = (load_on_host(folder.path(), Precision::F32).unwrap(), expected("gpt2"));
    assert_eq!(sharded.info().weights.len(), 2);
    let hidden = sharded.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
    assert!(worst(&sharded.logits(&rows(&hidden)).unwrap(), &expected.logits) < 1e-4);
}

#[test]
fn info_describes_the_model() {
    let teacher = teacher("llama-gqa", F32);
    let info = teacher.info();
    assert_eq!((info.vocab_size, info.max_positions, info.hidden_size, info.layers), (199, 128, 48, 3));
    assert_eq!((info.bos_token_id, info.eos_token_id), (Some(1), Some(2)));
    // Embedding, final norm, and per layer 2 norms, q, k, v, o and three weights of the MLP.
    assert_eq!(info.parameters, 199 * 48 + 48 + 3 * (2 * 48 + 2 * 48 * 48 + 2 * 16 * 48 + 3 * 48 * 96));
    assert_eq!(info.device, "cpu");
    let on = info.arithmetic.strip_prefix("f32 (safetensors), products and attention on ").unwrap();
    assert!(on.starts_with(std::env::consts::ARCH), "{on}");
    assert_eq!(info.weights[0].0, "model.safetensors");
}
