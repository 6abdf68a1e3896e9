//! Tests the walk-through of CONTRIBUTING.md that adds a family: compiles its file, and builds a net of it.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::json;
use stillhouse_cpu::Arithmetic;

use super::seed_oss::SeedOss;
use super::{Architecture, Family, GgufLayout};
use crate::config::TeacherConfig;
use crate::model::{BuiltNet, build};
use crate::weights::Read;

const PAGE: &str = include_str!("../../../../../CONTRIBUTING.md");
const FILE: &str = include_str!("seed_oss.rs");

#[test]
fn the_page_quotes_the_file() {
    assert!(
        PAGE.contains(FILE),
        "CONTRIBUTING.md does not quote operators/teacher/src/families/tests/seed_oss.rs as it is"
    );
}

/// Builds a net of one layer: H = 8, two heads of 4, one of keys, I = 6, V = 10.
fn built(folder: &Path, without: &str, more: &[&str]) -> Result<BuiltNet, String> {
    let config = json!({
        "model_type": "seed_oss", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 32,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}");
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![10, 8]),
        ("model.norm.weight".to_owned(), vec![8]),
        ("lm_head.weight".to_owned(), vec![10, 8]),
        (layer("self_attn.q_proj.weight"), vec![8, 8]),
        (layer("self_attn.q_proj.bias"), vec![8]),
        (layer("self_attn.k_proj.weight"), vec![4, 8]),
        (layer("self_attn.k_proj.bias"), vec![4]),
        (layer("self_attn.v_proj.weight"), vec![4, 8]),
        (layer("self_attn.v_proj.bias"), vec![4]),
        (layer("self_attn.o_proj.weight"), vec![8, 8]),
        (layer("mlp.gate_proj.weight"), vec![6, 8]),
        (layer("mlp.up_proj.weight"), vec![6, 8]),
        (layer("mlp.down_proj.weight"), vec![8, 6]),
        (layer("input_layernorm.weight"), vec![8]),
        (layer("post_attention_layernorm.weight"), vec![8]),
    ];
    shapes.extend(more.iter().map(|name| (layer(name), vec![4])));
    let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let tensors: HashMap<String, Tensor> = shapes
        .into_iter()
        .filter(|(name, _)| without.is_empty() || !name.ends_with(without))
        .map(|(name, shape)| (name, tensor(&shape)))
        .collect();
    let weights = folder.join("model.safetensors");
    candle_core::safetensors::save(&tensors, &weights).unwrap();
    let config = TeacherConfig {
        architecture: Architecture(&SeedOss),
        vocab_size: 10,
        max_positions: 32,
        hidden_size: 8,
        layers: 1,
        bos_token_id: None,
        eos_token_id: None,
        weights: vec![weights],
    };
    build(folder, &config, Arithmetic::F32, Read::Weights, &[]).map_err(|e| e.to_string())
}

#[test]
fn a_net_of_the_family_takes_its_tensors_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let net = built(folder.path(), "", &[]).unwrap().net;
    assert_eq!((net.layers.len(), net.width, net.head.tied), (1, 8, false));
    let missing = built(folder.path(), "k_proj.bias", &[]).err().unwrap();
    assert!(missing.contains("layers.0.self_attn.k_proj.bias"), "{missing}");
    let unused = built(folder.path(), "", &["self_attn.o_proj.bias"]).err().unwrap();
    assert!(unused.contains("model.layers.0.self_attn.o_proj.bias"), "{unused}");
    // a table that older programs stored is no weight
    built(folder.path(), "", &["self_attn.rotary_emb.inv_freq"]).unwrap();
    assert_eq!(SeedOss.gguf_layout("layers.0.self_attn.q_proj.weight", "q_proj", 2), GgufLayout::Same);
}
