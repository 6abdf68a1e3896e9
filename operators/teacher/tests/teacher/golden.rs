//! The golden files of `scripts/teacher-goldens`: tiny checkpoints of every family with the logits that transformers gives.
//!
//! ```text
//! tests/golden/CASE.json ── config, tensors [name, shape, scale, offset] ──▶ checkpoint(): config.json + safetensors
//!                        └─ tokens [2, L], logits [2, L, V] ───────────────▶ compared with what the crate computes
//! ```
//!
//! The weights are computed out of the tensors' names, here as in the script.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stillhouse_teacher::check_weights;

use super::*;

/// Cases that this crate computes. The others are read by `every_golden_is_whole` alone.
const COMPUTED: [&str; 5] = ["gpt2", "llama", "llama_bias_tied", "llama_linear", "llama_llama3"];

/// As `config.json` is written by transformers 5, or by those before it (`rope_theta` and `rope_scaling` at the top).
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

/// The names of all cases, sorted.
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

    /// The weights, by their names in the checkpoint.
    pub(crate) fn tensors(&self) -> HashMap<String, Tensor> {
        let specs: Vec<(String, Vec<usize>, f64, f64)> = serde_json::from_value(self.json["tensors"].clone()).unwrap();
        let tensor = |(name, shape, scale, offset): (String, Vec<usize>, f64, f64)| {
            let values = weights(&name, shape.iter().product(), scale, offset);
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            (name, tensor)
        };
        specs.into_iter().map(tensor).collect()
    }

    /// The checkpoint in a folder: `model.safetensors`, or this many shards with their index.
    pub(crate) fn checkpoint(&self, spelling: Spelling, shards: usize) -> tempfile::TempDir {
        checkpoint(&self.config(spelling), self.tensors(), shards)
    }

    /// How far the teacher in this folder is from the logits.
    pub(crate) fn off(&self, checkpoint: &Path) -> f32 {
        let teacher = load_on_host(checkpoint, Precision::F32).unwrap_or_else(|e| panic!("{}: {e}", self.case));
        let hidden = teacher.hidden(&self.tokens, self.batch, self.length).unwrap();
        worst(&teacher.logits(&rows(&hidden)).unwrap(), &self.logits)
    }
}

/// `config.json` beside these tensors, dealt out to the shards in the order of their names.
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
            // Bit by bit: the script and this file compute the same weights, or no logits can be compared.
            assert_eq!(floats(&tensors[&name])[..3], values, "{case}: {name}");
        }
    }
}

#[test]
fn logits_equal_those_of_transformers() {
    for case in COMPUTED {
        let golden = Golden::read(case);
        for (spelling, shards) in [(Spelling::Now, 1), (Spelling::Old, 1), (Spelling::Now, 2)] {
            let folder = golden.checkpoint(spelling, shards);
            check_weights(folder.path()).unwrap_or_else(|e| panic!("{case}: {e}"));
            let off = golden.off(folder.path());
            assert!(off < 1e-4, "{case}, {spelling:?} in {shards}: off by {off}");
        }
    }
}
