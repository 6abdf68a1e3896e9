//! A tokenizer and a teacher whose tokens are bytes, for tests of anything but text and real vocabularies. Reading GPT-2's
//! 50,257 tokens takes most of the time of a small job: 0.7 s at each start of a debug build.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use crate::{build_folders, hex_sha256};

/// Bytes, and `<|endoftext|>`.
const VOCABULARY: usize = 257;
const WIDTH: usize = 32;
const LAYERS: usize = 4;
const POSITIONS: usize = 1024;

/// A tokenizer.json of 256 bytes and `<|endoftext|>`: that of [`byte_teacher`].
pub fn byte_tokenizer() -> PathBuf {
    byte_teacher().join("tokenizer.json")
}

/// The folder of a teacher of GPT-2's architecture whose tokens are bytes. Its weights come from a generator with a fixed
/// seed, so that they are the same everywhere.
pub fn byte_teacher() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let config = json!({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
            "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_head": 4, "n_layer": LAYERS, "n_positions": POSITIONS,
            "layer_norm_epsilon": 1e-5, "bos_token_id": 256, "eos_token_id": 256, "tie_word_embeddings": true
        });
        let (shared, _) = build_folders();
        let part = shared.join(format!("byte-teacher-{}", std::process::id()));
        fs::create_dir_all(&part).unwrap();
        fs::write(part.join("config.json"), config.to_string()).unwrap();
        fs::write(part.join("tokenizer.json"), tokenizer().to_string()).unwrap();
        fs::write(part.join("model.safetensors"), weights()).unwrap();
        // The folder that another process has put there stays. Its name changes with this file, for one of an earlier run.
        let sum = hex_sha256(include_bytes!("byte_models.rs"));
        let folder = shared.join(format!("byte-teacher-{}", &sum[..8]));
        if fs::rename(&part, &folder).is_err() {
            assert!(folder.join("model.safetensors").exists(), "{}: cannot be made", folder.display());
            fs::remove_dir_all(&part).unwrap();
        }
        folder
    })
}

fn tokenizer() -> Value {
    // GPT-2 shows each byte as a character: printable ones as themselves, the others from U+0100 on.
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = '\u{100}'..;
    let mut shown = |byte| if printable(byte) { char::from(byte) } else { others.next().unwrap() };
    let mut vocab: BTreeMap<String, u32> = (0..=255).map(|byte| (shown(byte).to_string(), u32::from(byte))).collect();
    vocab.insert("<|endoftext|>".into(), 256);
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let added = json!({
        "id": 256, "content": "<|endoftext|>", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    })
}

/// The weights as a file of safetensors, in f32. Embeddings are wide enough for predictions that are neither certain nor
/// uniform; all others are small.
fn weights() -> Vec<u8> {
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    let mut state = 0x5EED_u64;
    let mut tensor = |name: String, shape: &[usize], center: f32, spread: f32| {
        let begin = data.len();
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // the upper 24 bits as a number in [−1, 1)
            let uniform = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            data.extend((center + spread * uniform).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    };
    tensor("transformer.wte.weight".into(), &[VOCABULARY, WIDTH], 0.0, 0.6);
    tensor("transformer.wpe.weight".into(), &[POSITIONS, WIDTH], 0.0, 0.1);
    let norms = (0..LAYERS).flat_map(|layer| [1, 2].map(|norm| format!("h.{layer}.ln_{norm}")));
    for name in norms.chain(["ln_f".into()]) {
        tensor(format!("transformer.{name}.weight"), &[WIDTH], 1.0, 0.1);
        tensor(format!("transformer.{name}.bias"), &[WIDTH], 0.0, 0.1);
    }
    for layer in 0..LAYERS {
        for (part, inputs, outputs) in [
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ] {
            let name = format!("transformer.h.{layer}.{part}");
            tensor(format!("{name}.weight"), &[inputs, outputs], 0.0, 0.2);
            tensor(format!("{name}.bias"), &[outputs], 0.0, 0.1);
        }
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}
