use std::collections::HashMap;
use std::fs;
use std::path::Path;

use stillhouse_teacher::candle_core::quantized::gguf_file::{self, Value};
use stillhouse_teacher::candle_core::quantized::{GgmlDType, QTensor};
use stillhouse_teacher::{TeacherConfig, check_weights, gguf_tokenizer};

use super::*;

/// Reorders rows as llama.cpp's converter does: from halves of a head to adjacent pairs.
fn interleaved(weight: &Tensor, heads: usize) -> Tensor {
    let (rows, columns) = weight.dims2().unwrap();
    let halves = weight.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    halves.transpose(1, 2).unwrap().reshape((rows, columns)).unwrap()
}

/// The reference Llama with GGUF's names and layouts, in f32.
fn tensors() -> Vec<(String, Tensor)> {
    let file = testdata("llama-gqa").join("model.safetensors");
    let names = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("model.layers", "blk"),
    ];
    let loaded = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let mut all: Vec<_> = loaded
        .into_iter()
        .map(|(name, tensor)| {
            let name = names.iter().fold(name, |name, (from, to)| name.replace(from, to));
            let tensor = match name.split('.').nth(2) {
                Some("attn_q") => interleaved(&tensor, 6),
                Some("attn_k") => interleaved(&tensor, 2),
                _ => tensor,
            };
            (name, tensor)
        })
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn metadata() -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.into());
    let vocab = ["<s>", "a", "b", "1", "2", "Ġ", "ab", "<kept>"].map(text).to_vec();
    vec![
        ("general.architecture", text("llama")),
        ("llama.context_length", Value::U32(128)),
        ("llama.embedding_length", Value::U32(48)),
        ("llama.block_count", Value::U32(3)),
        ("llama.feed_forward_length", Value::U32(96)),
        ("llama.attention.head_count", Value::U32(6)),
        ("llama.attention.head_count_kv", Value::U32(2)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(1e5)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", Value::Array(vocab)),
        ("tokenizer.ggml.token_type", Value::Array([3, 1, 1, 1, 1, 1, 1, 4].map(Value::I32).to_vec())),
        ("tokenizer.ggml.merges", Value::Array(vec![text("a b"), text("1 2")][..1].to_vec())),
        ("tokenizer.ggml.bos_token_id", Value::U32(0)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
    ]
}

fn write(path: &Path, metadata: &[(&'static str, Value)], tensors: &[(String, Tensor)], dtype: GgmlDType) {
    let quantised: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| {
            let fits = tensor.rank() == 2 && tensor.dim(1).unwrap() % dtype.block_size() == 0;
            (name, QTensor::quantize(tensor, if fits { dtype } else { GgmlDType::F32 }).unwrap())
        })
        .collect();
    let tensors: Vec<_> = quantised.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

fn logits(path: &Path) -> Tensor {
    let (teacher, expected) = (load_on_host(path, Precision::F32).unwrap(), expected("llama-gqa"));
    let hidden = teacher.hidden(&expected.tokens, expected.batch, expected.length).unwrap();
    teacher.logits(&rows(&hidden)).unwrap()
}

fn off(path: &Path) -> f32 {
    worst(&logits(path), &expected("llama-gqa").logits)
}

#[test]
fn gguf_equals_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    // 48 columns are not whole blocks of 32, so only the down projections (96 columns) are quantised.
    let rounded: Vec<_> = tensors()
        .into_iter()
        .map(|(name, tensor)| match name.contains("ffn_down") {
            true => (name, QTensor::quantize(&tensor, GgmlDType::Q8_0).unwrap().dequantize(&Device::Cpu).unwrap()),
            false => (name, tensor),
        })
        .collect();
    write(&path, &metadata(), &tensors(), GgmlDType::F32);
    let off = off(&path);
    assert!(off < 1e-4, "f32: off by {off}");
    write(&path, &metadata(), &rounded, GgmlDType::F32);
    let widened = logits(&path);
    write(&path, &metadata(), &tensors(), GgmlDType::Q8_0);
    assert_eq!(worst(&logits(&path), &widened), 0.0, "q8_0");
    let teacher = load_on_host(&path, Precision::F32).unwrap();
    let arithmetic = &teacher.info().arithmetic;
    assert!(arithmetic.starts_with("f32 (widened from F32/Q8_0 gguf), products"), "{arithmetic}");
    let config = TeacherConfig::read(&path).unwrap();
    assert_eq!((config.architecture.name(), config.vocab_size, config.max_positions), ("llama", 199, 128));
    assert_eq!((config.bos_token_id, config.eos_token_id), (Some(0), None));
}

#[test]
fn an_untied_head_and_frequency_factors_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut all = tensors();
    let embedding = all.iter().find(|(name, _)| name == "token_embd.weight").unwrap().1.clone();
    all.push(("output.weight".into(), embedding));
    all.push(("rope_freqs.weight".into(), Tensor::ones(4, DType::F32, &Device::Cpu).unwrap()));
    write(&path, &metadata(), &all, GgmlDType::F32);
    assert!(off(&path) < 1e-4);
    let doubled = Tensor::new(&[1f32, 1.0, 1.0, 8.0], &Device::Cpu).unwrap();
    if let Some(last) = all.last_mut() {
        last.1 = doubled;
    }
    write(&path, &metadata(), &all, GgmlDType::F32);
    assert!(off(&path) > 1e-4);
}

#[test]
fn gguf_complaints_name_file_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let complaint = |metadata: &[(&'static str, Value)], tensors: &[(String, Tensor)]| {
        write(&path, metadata, tensors, GgmlDType::F32);
        let error = load_on_host(&path, Precision::F32).map(|_| ()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("model.gguf"), "{error}");
        error
    };
    let with = |key: &str, value: Value| {
        let mut all: HashMap<_, _> = metadata().into_iter().collect();
        let key =
            metadata().into_iter().map(|(k, _)| k).chain(["llama.rope.scaling.type"]).find(|k| *k == key).unwrap();
        all.insert(key, value);
        all.into_iter().collect::<Vec<_>>()
    };
    let error = complaint(&with("general.architecture", Value::String("rwkv".into())), &tensors());
    assert!(error.contains("rwkv") && error.contains("gpt2, llama, smollm3"), "{error}");
    let error = complaint(&with("llama.rope.scaling.type", Value::String("spiral".into())), &tensors());
    assert!(error.contains("llama.rope.scaling.type") && error.contains("none, linear, yarn"), "{error}");
    let error = complaint(&with("llama.feed_forward_length", Value::U32(95)), &tensors());
    assert!(error.contains("blk.0.ffn_gate.weight") && error.contains("[95, 48]"), "{error}");
    let all: Vec<_> = tensors().into_iter().filter(|(name, _)| name != "blk.2.attn_q.weight").collect();
    let error = complaint(&metadata(), &all);
    assert!(error.contains("blk.2.attn_q.weight") && error.contains("missing"), "{error}");

    // Keys of other families' files, for features that this family does not compute.
    let and = |key: &'static str, value: Value| {
        let mut all = metadata();
        all.push((key, value));
        all
    };
    for (key, value) in [
        ("llama.logit_scale", Value::F32(0.0625)),
        ("llama.residual_scale", Value::F32(0.22)),
        ("llama.attention.sliding_window", Value::U32(16)),
        ("llama.attention.clamp_kqv", Value::F32(8.0)),
        ("llama.attention.causal", Value::Bool(false)),
        ("llama.final_logit_softcapping", Value::F32(30.0)),
        ("llama.expert_count", Value::U32(8)),
    ] {
        let error = complaint(&and(key, value), &tensors());
        assert!(error.contains(&format!("field `{key}`: got")) && error.contains("valid: "), "{error}");
    }
    for (key, value) in [
        ("llama.logit_scale", Value::F32(1.0)),
        ("llama.attention.sliding_window", Value::U32(4096)),
        ("llama.expert_count", Value::U32(0)),
    ] {
        write(&path, &and(key, value), &tensors(), GgmlDType::F32);
        check_weights(&path, &[]).unwrap();
    }

    write(&path, &metadata(), &tensors(), GgmlDType::F32);
    let whole = fs::read(&path).unwrap();
    for length in [3, 40, 400, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = load_on_host(&path, Precision::F32).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("model.gguf") && error.contains("cut short"), "{length}: {error}");
        assert_eq!(check_weights(&path, &[]).unwrap_err().to_string().lines().next(), error.lines().next());
    }
}

#[test]
fn a_gguf_holds_the_tensors_that_its_metadata_describes_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let error_of = |metadata: &[(&'static str, Value)], tensors: &[(String, Tensor)]| {
        write(&path, metadata, tensors, GgmlDType::F32);
        let checked = check_weights(&path, &[]).err().map(|e| e.to_string());
        assert_eq!(load_on_host(&path, Precision::F32).err().map(|e| e.to_string()), checked);
        checked.unwrap_or_default()
    };
    assert_eq!(error_of(&metadata(), &tensors()), "");
    let blocks = |n: u32| -> Vec<_> {
        let with = |key, value| if key == "llama.block_count" { (key, Value::U32(n)) } else { (key, value) };
        metadata().into_iter().map(|(key, value)| with(key, value)).collect()
    };
    for n in [1, 2] {
        let error = error_of(&blocks(n), &tensors());
        let (first, count) = (format!("`blk.{n}.attn_k.weight`"), (3 - n) * 9);
        assert!(error.contains(&first) && error.contains(&format!("{count} tensors are not part")), "{error}");
        assert!(error.contains(&format!("llama.block_count {n}")), "{error}");
    }
    assert!(error_of(&blocks(4), &tensors()).contains("`blk.3.attn_norm.weight` is missing"));
    for (name, _) in tensors() {
        let some: Vec<_> = tensors().into_iter().filter(|(other, _)| *other != name).collect();
        let error = error_of(&metadata(), &some);
        assert!(error.contains(&name) && error.contains("is missing"), "{name}: {error}");
    }
    let one = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    let with = |name: &str, tensor: Tensor| [tensors(), vec![(name.to_owned(), tensor)]].concat();
    assert!(error_of(&metadata(), &with("blk.0.attn_q.bias2", one(48))).contains("`blk.0.attn_q.bias2`"));
    assert!(error_of(&metadata(), &with("blk.1.attn_q.bias", one(48))).contains("`blk.1.attn_q.bias`"));
    assert_eq!(error_of(&metadata(), &with("blk.1.attn_rot_embd.weight", one(4))), "");
    assert_eq!(error_of(&metadata(), &with("rope_freqs.weight", one(4))), "");
    assert!(error_of(&metadata(), &with("rope_freqs.weight", one(5))).contains("rope_freqs.weight"));
    let parts = [metadata(), vec![("split.count", Value::U16(2))]].concat();
    assert!(error_of(&parts, &tensors()).contains("split.count"));
}

#[test]
fn tokenizer_is_built_from_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, &metadata(), &[], GgmlDType::F32);
    let built = gguf_tokenizer(&path).unwrap();
    assert_eq!((built.bos_token_id, built.eos_token_id, built.add_bos), (Some(0), None, true));
    let encoding = built.tokenizer.encode("ab12<kept> ba<s>", false).unwrap();
    assert_eq!(encoding.get_ids(), [6, 3, 4, 7, 5, 2, 1, 0]);
    assert_eq!(built.tokenizer.decode(encoding.get_ids(), false).unwrap(), "ab12<kept> ba<s>");
    assert_eq!(built.tokenizer.decode(encoding.get_ids(), true).unwrap(), "ab12<kept> ba");

    let other: Vec<_> = metadata()
        .into_iter()
        .map(|(key, value)| (key, if key == "tokenizer.ggml.pre" { Value::String("default".into()) } else { value }))
        .collect();
    write(&path, &other, &[], GgmlDType::F32);
    let error = gguf_tokenizer(&path).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.ggml.pre") && error.contains("gpt-2, smollm, llama-bpe, qwen2"), "{error}");
}

/// In a SentencePiece vocabulary, scores determine the order of merges, whatever the order of the tokens.
#[test]
fn a_sentencepiece_tokenizer_is_built_from_its_scores() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let tokens =
        ["<unk>", "<s>", "</s>", "<0x0A>", "\u{2581}", "a", "b", "c", "ab", "bc", "\u{2581}a", "abc", "<kept>"];
    let kinds = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4];
    let scores = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -5.0, 0.0];
    let array = |values: Vec<Value>| Value::Array(values);
    let metadata = |scores: &[f32], more: &[(&'static str, Value)]| {
        let mut all = vec![
            ("general.architecture", Value::String("llama".into())),
            ("tokenizer.ggml.model", Value::String("llama".into())),
            ("tokenizer.ggml.tokens", array(tokens.iter().map(|t| Value::String((*t).into())).collect())),
            ("tokenizer.ggml.token_type", array(kinds.iter().map(|kind| Value::I32(*kind)).collect())),
            ("tokenizer.ggml.scores", array(scores.iter().map(|score| Value::F32(*score)).collect())),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ];
        all.extend_from_slice(more);
        all
    };
    write(&path, &metadata(&scores, &[]), &[], GgmlDType::F32);
    let built = gguf_tokenizer(&path).unwrap();
    assert_eq!(built.bos_token_id, Some(1));
    let ids = |text: &str| built.tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
    // bc merges before ab, and "\u{2581}a" before abc. A character without a token becomes byte tokens, or <unk> if
    // those are missing. An empty text gets no prefix.
    assert_eq!(ids("abc"), [10, 9]);
    assert_eq!(ids("ab a\n"), [4, 8, 10, 3]);
    assert_eq!(ids("<kept>b"), [12, 4, 6]);
    assert_eq!(ids("zz"), [4, 0]);
    assert_eq!(ids(""), [] as [u32; 0]);
    assert_eq!(built.tokenizer.decode(&ids("ab a\n"), false).unwrap(), "ab a\n");

    let error_of = |metadata: &[(&'static str, Value)]| {
        write(&path, metadata, &[], GgmlDType::F32);
        gguf_tokenizer(&path).map(|_| ()).unwrap_err().to_string()
    };
    let error = error_of(&metadata(&scores[1..], &[]));
    assert!(error.contains("tokenizer.ggml.scores") && error.contains("a finite score for each token"), "{error}");
    let error = error_of(&metadata(&scores, &[("tokenizer.ggml.add_space_prefix", Value::Bool(false))]));
    assert!(error.contains("tokenizer.ggml.add_space_prefix") && error.contains("tokenizer.json"), "{error}");
    let error = error_of(&metadata(&scores, &[("tokenizer.ggml.pre", Value::String("other".into()))]));
    assert!(error.contains("tokenizer.ggml.pre") && error.contains("default"), "{error}");
}
