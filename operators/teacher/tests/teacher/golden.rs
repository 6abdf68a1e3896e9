//! The golden files of `scripts/teacher-goldens`: tiny checkpoints of every family with the logits of transformers.
//!
//! ```text
//! tests/golden/CASE.json ── config, tensors [name, shape, scale, offset] ──▶ checkpoint(): config.json + safetensors
//!                        └─ tokens [2, L], logits [2, L, V], hidden [layers + 1, 3, H] ──▶ compared with the crate's results
//! ```
//!
//! This file computes the weights from the tensors' names, in the same way as the script.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stillhouse_teacher::candle_core::quantized::gguf_file::{self, Value as Metadata};
use stillhouse_teacher::candle_core::quantized::{GgmlDType, QTensor};
use stillhouse_teacher::{LoadOptions, Runs, check_weights, load};

use super::*;

/// Positions of the second row whose hidden states the files contain.
const KEPT: [usize; 3] = [0, 13, 28];

/// A sequence beyond `max_position_embeddings`, which this crate refuses.
const TOO_LONG: &str = "llama_dynamic_long";

/// Cases that GGUF can represent. It lacks the activation, the scale of queries and Qwen2's window, and a Gemma's head
/// is always tied.
pub(crate) const IN_GGUF: [&str; 21] = [
    "gemma2_plain",
    "gemma3_plain",
    "gpt2",
    "gpt_neox",
    "llama",
    "llama_linear",
    "llama_llama3",
    "llama_yarn",
    "mistral_full",
    "olmo2",
    "olmo2_bias_tied",
    "phi3_longrope_long",
    "phi3_longrope_short",
    "phi3_window",
    "pythia",
    "qwen2",
    "qwen2_tied",
    "qwen2_yarn",
    "qwen3",
    "qwen3_yarn",
    "smollm3",
];

/// The form of `config.json`: as transformers 5 writes it, or as earlier versions do (`rope_theta` and `rope_scaling`
/// at the top).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spelling {
    Now,
    Old,
}

pub(crate) struct Golden {
    case: String,
    json: Value,
    /// `[2, L]`
    pub(crate) tokens: Vec<u32>,
    pub(crate) batch: usize,
    pub(crate) length: usize,
    /// `[2·L, V]`, f32, from transformers.
    pub(crate) logits: Tensor,
}

/// Returns the sorted names of all cases.
pub(crate) fn cases() -> Vec<String> {
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

impl Golden {
    pub(crate) fn read(case: &str) -> Self {
        let json = fs::read(folder().join(format!("{case}.json"))).unwrap();
        let json: Value = serde_json::from_slice(&json).unwrap();
        let rows: Vec<Vec<u32>> = serde_json::from_value(json["tokens"].clone()).unwrap();
        let (batch, length, vocab) =
            (rows.len(), rows[0].len(), json["config"]["vocab_size"].as_u64().unwrap() as usize);
        let bytes = base64(json["logits"].as_str().unwrap());
        let logits = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let logits = Tensor::from_vec(logits, (batch * length, vocab), &Device::Cpu).unwrap();
        Self { case: case.into(), json, tokens: rows.concat(), batch, length, logits }
    }

    pub(crate) fn config(&self, spelling: Spelling) -> Value {
        match spelling {
            Spelling::Now => self.json["config"].clone(),
            Spelling::Old => self.json["config_old"].clone(),
        }
    }

    /// Returns the weights by their names in the checkpoint.
    pub(crate) fn tensors(&self) -> HashMap<String, Tensor> {
        let specs: Vec<(String, Vec<usize>, f64, f64)> = serde_json::from_value(self.json["tensors"].clone()).unwrap();
        let tensor = |(name, shape, scale, offset): (String, Vec<usize>, f64, f64)| {
            let values = weights(&name, shape.iter().product(), scale, offset);
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            (name, tensor)
        };
        specs.into_iter().map(tensor).collect()
    }

    /// Writes the checkpoint to a folder: `model.safetensors`, or this number of shards with their index.
    pub(crate) fn checkpoint(&self, spelling: Spelling, shards: usize) -> tempfile::TempDir {
        checkpoint(&self.config(spelling), self.tensors(), shards)
    }

    /// Returns the largest difference between the golden logits and those of the teacher in a folder.
    pub(crate) fn off(&self, checkpoint: &Path) -> f32 {
        let teacher = load_on_host(checkpoint, Precision::F32).unwrap_or_else(|e| panic!("{}: {e}", self.case));
        let hidden = teacher.hidden(&self.tokens, self.batch, self.length).unwrap();
        worst(&teacher.logits(&rows(&hidden)).unwrap(), &self.logits)
    }
}

/// Reorders rows as llama.cpp's converter does: from halves of a head to adjacent pairs.
fn interleaved(rows: &Tensor, heads: usize) -> Tensor {
    let (count, rest) = (rows.dim(0).unwrap(), rows.elem_count() / rows.dim(0).unwrap());
    let halves = rows.reshape((heads, 2, count / heads / 2, rest)).unwrap().transpose(1, 2).unwrap();
    halves.reshape(rows.dims()).unwrap()
}

/// Reorders GPT-NeoX's rows from q, k, v per head to all q, all k, all v.
fn parted(rows: &Tensor, heads: usize) -> Tensor {
    let (count, rest) = (rows.dim(0).unwrap(), rows.elem_count() / rows.dim(0).unwrap());
    let parts = rows.reshape((heads, 3, count / heads / 3, rest)).unwrap().transpose(0, 1).unwrap();
    parts.reshape(rows.dims()).unwrap()
}

/// Returns llama.cpp's name of a tensor in a Hugging Face checkpoint of this family.
fn gguf_name(family: &str, name: &str) -> String {
    let sandwich = ["gemma2", "gemma3_text", "olmo2"].contains(&family);
    let (module, kind) = name.rsplit_once('.').unwrap();
    let module = [
        ("model.", ""),
        ("transformer.", ""),
        ("gpt_neox.", ""),
        ("layers.", "blk."),
        ("h.", "blk."),
        ("embed_tokens", "token_embd"),
        ("embed_in", "token_embd"),
        ("wte", "token_embd"),
        ("wpe", "position_embd"),
        ("lm_head", "output"),
        ("embed_out", "output"),
        ("final_layer_norm", "output_norm"),
        ("ln_f", "output_norm"),
        ("input_layernorm", "attn_norm"),
        ("ln_1", "attn_norm"),
        ("post_attention_layernorm", if sandwich { "post_attention_norm" } else { "ffn_norm" }),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("ln_2", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.qkv_proj", "attn_qkv"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("attention.query_key_value", "attn_qkv"),
        ("attention.dense", "attn_output"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.gate_up_proj", "ffn_up"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ]
    .iter()
    .fold(module.to_owned(), |name, (from, to)| match name.split_once(from) {
        // Replaces only at the start of a part of the name.
        Some((before, after)) if before.is_empty() || before.ends_with('.') => format!("{before}{to}{after}"),
        _ => name,
    });
    let module = if module == "norm" { "output_norm".into() } else { module };
    format!("{module}.{kind}")
}

impl Golden {
    /// Writes the same model as `model.gguf` to a folder, with the names, layouts and keys of llama.cpp's converter,
    /// all in f32.
    pub(crate) fn gguf(&self) -> tempfile::TempDir {
        self.gguf_of(GgmlDType::F32, false)
    }

    /// Like [`Self::gguf`], but quantised to `kind` where rows are whole blocks, or with the f32 numbers that candle
    /// widens these blocks to.
    pub(crate) fn gguf_of(&self, kind: GgmlDType, widened: bool) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let (metadata, tensors) = (self.gguf_metadata(), self.gguf_tensors());
        let quantised = |tensor: &Tensor| {
            let fits = tensor.dims().last().unwrap().is_multiple_of(kind.block_size());
            let stored = QTensor::quantize(tensor, if fits { kind } else { GgmlDType::F32 }).unwrap();
            match widened {
                true => QTensor::quantize(&stored.dequantize(&Device::Cpu).unwrap(), GgmlDType::F32).unwrap(),
                false => stored,
            }
        };
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name, quantised(tensor))).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = fs::File::create(folder.path().join("model.gguf")).unwrap();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
        folder
    }

    fn gguf_tensors(&self) -> BTreeMap<String, Tensor> {
        let config = &self.json["config"];
        let family = config["model_type"].as_str().unwrap();
        let size = |key: &str| config[key].as_u64().map(|n| n as usize);
        let heads = size("num_attention_heads").unwrap_or(0);
        let kv_heads = size("num_key_value_heads").unwrap_or(heads);
        let mut tensors: BTreeMap<_, _> = self
            .tensors()
            .into_iter()
            .map(|(name, tensor)| {
                let module = name.rsplit('.').nth(1).unwrap();
                let tensor = match (family, module) {
                    ("llama" | "mistral" | "smollm3", "q_proj") => interleaved(&tensor, heads),
                    ("llama" | "mistral" | "smollm3", "k_proj") => interleaved(&tensor, kv_heads),
                    ("gemma2" | "gemma3_text", _) if name.ends_with("norm.weight") => (tensor + 1.0).unwrap(),
                    ("gpt_neox", "query_key_value") => parted(&tensor, heads),
                    ("gpt2", "c_attn" | "c_proj" | "c_fc") if tensor.rank() == 2 => {
                        tensor.t().unwrap().contiguous().unwrap()
                    }
                    _ => tensor,
                };
                (gguf_name(family, &name), tensor)
            })
            .collect();
        let rope = &config["rope_parameters"];
        let floats = |key: &str| -> Vec<f32> { serde_json::from_value(rope[key].clone()).unwrap() };
        match rope["rope_type"].as_str() {
            Some("longrope") => {
                for length in ["long", "short"] {
                    let factors = Tensor::new(floats(&format!("{length}_factor")), &Device::Cpu).unwrap();
                    tensors.insert(format!("rope_factors_{length}.weight"), factors);
                }
            }
            Some("llama3") => {
                let number = |key: &str| rope[key].as_f64().unwrap();
                let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
                let dim = size("head_dim").unwrap();
                let divisor = |i: usize| {
                    let frequency = number("rope_theta").powf(-2.0 * i as f64 / dim as f64);
                    let turns = number("original_max_position_embeddings") * frequency / std::f64::consts::TAU;
                    let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                };
                let divisors: Vec<_> = (0..dim / 2).map(divisor).collect();
                tensors.insert("rope_freqs.weight".into(), Tensor::new(divisors, &Device::Cpu).unwrap());
            }
            _ => {}
        }
        tensors
    }

    fn gguf_metadata(&self) -> Vec<(String, Metadata)> {
        let config = &self.json["config"];
        let family = config["model_type"].as_str().unwrap();
        let arch = match family {
            "mistral" => "llama",
            "gemma3_text" => "gemma3",
            "gpt_neox" => "gptneox",
            other => other,
        };
        let mut metadata = vec![("general.architecture".to_owned(), Metadata::String(arch.into()))];
        let mut put = |key: &str, value: Option<Metadata>| {
            metadata.extend(value.map(|value| (format!("{arch}.{key}"), value)));
        };
        let size = |key: &str| config[key].as_u64().map(|n| Metadata::U32(n as u32));
        let float = |value: &Value| value.as_f64().map(|x| Metadata::F32(x as f32));
        let width = config["n_embd"].as_u64();
        put("context_length", size("max_position_embeddings").or(size("n_positions")));
        put("embedding_length", size("hidden_size").or(size("n_embd")));
        put("block_count", size("num_hidden_layers").or(size("n_layer")));
        let inner = size("intermediate_size").or(size("n_inner"));
        put("feed_forward_length", inner.or(width.map(|width| Metadata::U32(4 * width as u32))));
        put("attention.head_count", size("num_attention_heads").or(size("n_head")));
        put("attention.head_count_kv", size("num_key_value_heads"));
        put("attention.key_length", size("head_dim"));
        put("attention.value_length", size("head_dim"));
        put("attention.layer_norm_rms_epsilon", float(&config["rms_norm_eps"]));
        let eps = float(&config["layer_norm_eps"]).or(float(&config["layer_norm_epsilon"]));
        put("attention.layer_norm_epsilon", eps);
        put("attention.sliding_window", size("sliding_window"));
        put("attn_logit_softcapping", float(&config["attn_logit_softcapping"]));
        put("final_logit_softcapping", float(&config["final_logit_softcapping"]));
        put("use_parallel_residual", config["use_parallel_residual"].as_bool().map(Metadata::Bool));
        if family == "gpt2" {
            return metadata;
        }
        let rope = match &config["rope_parameters"] {
            rope if family == "gemma3_text" => &rope["full_attention"],
            rope => rope,
        };
        // For GPT-NeoX, the converter omits the base, which means the default.
        put("rope.freq_base", if family == "gpt_neox" { None } else { float(&rope["rope_theta"]) });
        if let Some(part) = rope["partial_rotary_factor"].as_f64() {
            let number = |key: &str| config[key].as_f64().unwrap();
            let rotated = part * number("hidden_size") / number("num_attention_heads");
            put("rope.dimension_count", Some(Metadata::U32(rotated as u32)));
        }
        let kind = rope["rope_type"].as_str().unwrap();
        if ["linear", "yarn"].contains(&kind) {
            put("rope.scaling.type", Some(Metadata::String(kind.into())));
            put("rope.scaling.factor", float(&rope["factor"]));
        }
        if family == "phi3" || kind == "yarn" {
            let length = rope["original_max_position_embeddings"]
                .as_u64()
                .or(config["original_max_position_embeddings"].as_u64());
            put("rope.scaling.original_context_length", length.map(|n| Metadata::U32(n as u32)));
        }
        if kind == "longrope" {
            let number = |value: &Value| value.as_f64().unwrap();
            let original = number(&config["original_max_position_embeddings"]);
            let scale = number(&config["max_position_embeddings"]) / original;
            let factor = (1.0 + scale.ln() / original.ln()).sqrt();
            put("rope.scaling.attn_factor", Some(Metadata::F32(factor as f32)));
        }
        metadata
    }
}

/// Writes `config.json` and these tensors, distributed over the shards in the order of their names.
pub(crate) fn checkpoint(config: &Value, tensors: HashMap<String, Tensor>, shards: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    if shards == 1 {
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        return folder;
    }
    let mut names: Vec<_> = tensors.keys().cloned().collect();
    names.sort();
    let (mut map, mut dealt) = (serde_json::Map::new(), vec![HashMap::new(); shards]);
    let file = |i: usize| format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
    for (i, name) in names.into_iter().enumerate() {
        map.insert(name.clone(), json!(file(i % shards)));
        dealt[i % shards].insert(name.clone(), tensors[&name].clone());
    }
    for (i, shard) in dealt.iter().enumerate() {
        candle_core::safetensors::save(shard, folder.path().join(file(i))).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

/// offset + scale · (24 bits of splitmix64(fnv1a64(name) + i) / 2²⁴ − ½), in f64, rounded once.
fn weights(name: &str, count: usize, scale: f64, offset: f64) -> Vec<f32> {
    let key = fnv1a64(name);
    let uniform = |i: u64| (splitmix64(key.wrapping_add(i)) >> 40) as f64 / f64::from(1 << 24) - 0.5;
    (0..count as u64).map(|i| (offset + scale * uniform(i)) as f32).collect()
}

fn fnv1a64(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

fn splitmix64(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = text.trim_end_matches('=').bytes().map(|c| DIGITS.iter().position(|d| *d == c).unwrap() as u32);
    let (mut bytes, mut bits, mut held) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for digit in digits {
        bits = bits << 6 | digit;
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    bytes
}

#[test]
fn every_golden_is_whole() {
    assert_eq!(base64("AP8Q/w=="), [0, 255, 16, 255]);
    let cases = cases();
    assert!(cases.len() >= 34, "{cases:?}");
    for case in cases {
        let (golden, tensors) = (Golden::read(&case), Golden::read(&case).tensors());
        assert!(floats(&golden.logits).iter().all(|x| x.is_finite() && x.abs() < 10.0), "{case}");
        let probes: Vec<(String, Vec<f32>)> = serde_json::from_value(golden.json["probe"].clone()).unwrap();
        assert_eq!(probes.len(), 2);
        for (name, values) in probes {
            // The script and this file must compute bit-identical weights, or logits cannot be compared.
            assert_eq!(floats(&tensors[&name])[..3], values, "{case}: {name}");
        }
    }
}

#[test]
fn logits_equal_those_of_transformers() {
    let mut worst: Vec<String> = Vec::new();
    for case in cases().iter().filter(|case| *case != TOO_LONG) {
        let golden = Golden::read(case);
        for (spelling, shards) in [(Spelling::Now, 1), (Spelling::Old, 1), (Spelling::Now, 2)] {
            if golden.config(spelling).is_null() {
                continue;
            }
            let folder = golden.checkpoint(spelling, shards);
            check_weights(folder.path(), &[]).unwrap_or_else(|e| panic!("{case}: {e}"));
            let off = golden.off(folder.path());
            if off >= 1e-4 || off.is_nan() {
                worst.push(format!("{case}, {spelling:?} in {shards}: off by {off}"));
            }
        }
    }
    assert!(worst.is_empty(), "{worst:#?}");
}

#[test]
fn gguf_equals_transformers() {
    let mut worst: Vec<String> = Vec::new();
    for case in IN_GGUF {
        let (golden, folder) = (Golden::read(case), Golden::read(case).gguf());
        let path = folder.path().join("model.gguf");
        let content = gguf_file::Content::read(&mut fs::File::open(&path).unwrap()).unwrap();
        let names =
            golden.tensors().len() + if case.contains("longrope") { 2 } else { usize::from(case == "llama_llama3") };
        assert_eq!(content.tensor_infos.len(), names, "{case}: two names became one");
        check_weights(&path, &[]).unwrap_or_else(|e| panic!("{case}: {e}"));
        let off = golden.off(&path);
        if off >= 1e-4 || off.is_nan() {
            worst.push(format!("{case}: off by {off}"));
        }
    }
    assert!(worst.is_empty(), "{worst:#?}");
}

/// Hidden states equal transformers' `hidden_states`: the embeddings, every layer, and the last layer after the norm.
#[test]
fn hidden_states_equal_those_of_transformers() {
    let mut worst: Vec<String> = Vec::new();
    for case in cases().iter().filter(|case| *case != TOO_LONG) {
        let golden = Golden::read(case);
        let folder = golden.checkpoint(Spelling::Now, 1);
        let teacher = load(folder.path(), &LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() });
        let teacher = teacher.unwrap_or_else(|e| panic!("{case}: {e}"));
        let (layers, width) = (teacher.info().layers, teacher.info().hidden_size);
        let bytes = base64(golden.json["hidden"].as_str().unwrap());
        let want: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(want.len(), (layers + 1) * KEPT.len() * width);
        let mut runs = Runs::new();
        golden.tokens.chunks(golden.length).for_each(|run| runs.push(run.iter().copied()));
        // Descending order shows that states are returned in the requested order.
        let requested: Vec<usize> = (0..=layers).rev().collect();
        let (_, captured) = teacher.pass_with_states(&runs, &requested).unwrap();
        assert_eq!(captured.len(), runs.tokens().len() * requested.len() * width);
        let largest = want.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (layer, want) in want.chunks_exact(KEPT.len() * width).enumerate() {
            for (position, want) in KEPT.iter().zip(want.chunks_exact(width)) {
                let at = ((golden.length + position) * requested.len() + layers - layer) * width;
                let off = captured[at..at + width].iter().zip(want).fold(0f32, |off, (a, b)| off.max((a - b).abs()));
                if off.is_nan() || off > 3e-5 * largest {
                    worst.push(format!("{case}, layer {layer}, position {position}: off by {off} of {largest}"));
                }
            }
        }
        let e = teacher.pass_with_states(&runs, &[layers + 1]).unwrap_err().to_string();
        assert!(e.contains("layer of hidden states") && e.contains(&format!("0 to {layers}")), "{e}");
    }
    assert!(worst.is_empty(), "{worst:#?}");
}
