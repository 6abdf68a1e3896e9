//! Gemma 2 (Gemma Team 2024, section 2): norms before and after attention and the MLP, a window in every second layer,
//! and soft caps on scores and logits.
//!
//! Gemma 3 (Gemma Team 2025, section 2): norms of queries and keys per head instead of caps, and five layers with a
//! window for each global layer. Each of the two kinds has its own rotation.
//!
//! Both scale the embedding by sqrt(H), and store the weights of norms minus 1.

use candle_core::quantized::gguf_file::Value as Metadata;
use serde_json::{Map, Value, json};

use super::decoder::{Decoder, Defaults, Norms, Positions, QueryNorms};
use super::{Family, GgufFeatures, GgufLayout, activation, windows};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::net::{Activation, Loader, Net, RopeFields};

const DEFAULTS: Defaults = Defaults { kv_heads: Some(4), head_dim: Some(256), eps: 1e-6, tied: true };

const NORMS: Norms = Norms {
    before_attention: Some("input_layernorm"),
    after_attention: Some("post_attention_layernorm"),
    before_mlp: Some("pre_feedforward_layernorm"),
    after_mlp: Some("post_feedforward_layernorm"),
};

/// Gemma 2.
pub(super) struct Gemma2;

impl Family for Gemma2 {
    fn name(&self) -> &'static str {
        "gemma2"
    }

    fn class(&self) -> &'static str {
        "Gemma2ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        gemma2(config, loader)
    }

    fn gguf_features(&self) -> GgufFeatures {
        GGUF
    }

    fn add_gguf_fields(&self, file: &Gguf, heads_and_dim: [usize; 2], json: &mut Map<String, Value>) -> Result<()> {
        add_gguf_fields(
            file,
            heads_and_dim,
            json,
            &GgufDefaults { largest: 46, window: Some(4096), caps: [Some(50.0), Some(30.0)] },
        )
    }

    fn gguf_layout(&self, name: &str, _module: &str, _dimensions: usize) -> GgufLayout {
        gguf_layout(name)
    }
}

/// Gemma 3, text only.
pub(super) struct Gemma3;

impl Family for Gemma3 {
    fn name(&self) -> &'static str {
        "gemma3_text"
    }

    fn class(&self) -> &'static str {
        "Gemma3ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        gemma3(config, loader)
    }

    fn gguf_name(&self) -> Option<&'static str> {
        Some("gemma3")
    }

    fn gguf_features(&self) -> GgufFeatures {
        GGUF
    }

    fn gguf_rope(&self, file: &Gguf, _head_dim: usize, json: &mut Map<String, Value>) -> Result<()> {
        let mut global = file.rope_scaling()?;
        global["rope_theta"] = file.rope_theta(1_000_000.0)?;
        let local = file.float(&file.key("rope.freq_base_swa"))?.unwrap_or(10_000.0);
        let local = json!({"rope_type": "default", "rope_theta": local});
        json.insert("rope_parameters".into(), json!({"full_attention": global, "sliding_attention": local}));
        Ok(())
    }

    fn add_gguf_fields(&self, file: &Gguf, heads_and_dim: [usize; 2], json: &mut Map<String, Value>) -> Result<()> {
        add_gguf_fields(file, heads_and_dim, json, &GgufDefaults { largest: 62, window: None, caps: [None, None] })
    }

    fn gguf_layout(&self, name: &str, _module: &str, _dimensions: usize) -> GgufLayout {
        gguf_layout(name)
    }
}

const GGUF: GgufFeatures = GgufFeatures { soft_caps: true, window: true, norms_behind: true, partial_rotation: false };

/// What a GGUF file leaves out.
struct GgufDefaults {
    /// Layers of the largest model of the family, in which the scale of the scores is not that of a head.
    largest: usize,
    window: Option<u64>,
    /// Soft caps of scores and of logits.
    caps: [Option<f64>; 2],
}

fn add_gguf_fields(
    file: &Gguf,
    [heads, head_dim]: [usize; 2],
    json: &mut Map<String, Value>,
    defaults: &GgufDefaults,
) -> Result<()> {
    let mut put = |key: &str, value: Value| json.insert(key.into(), value);
    let of_width = file.layers()? == defaults.largest;
    put("query_pre_attn_scalar", json!(if of_width { file.hidden_size()? / heads } else { head_dim }));
    put("sliding_window", json!(file.window().or(defaults.window)));
    for (name, default) in ["attn_logit_softcapping", "final_logit_softcapping"].into_iter().zip(defaults.caps) {
        put(name, json!(file.float(&file.key(name))?.or(default)));
    }
    if let Some(Metadata::U32(pattern)) = file.value(&file.key("attention.sliding_window_pattern")) {
        put("sliding_window_pattern", json!(pattern));
    }
    Ok(())
}

fn gguf_layout(name: &str) -> GgufLayout {
    if name.ends_with("norm.weight") { GgufLayout::PlusOne } else { GgufLayout::Same }
}

fn gemma2(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = read(config, [Some(50.0), Some(30.0)])?;
    let window = config.window("sliding_window", Some(4096))?;
    let windows = windows(config, decoder.positions.len(), window, |i| i % 2 == 0)?;
    decoder.positions.iter_mut().zip(windows).for_each(|(layer, window)| layer.window = window);
    let rope = RopeFields::from_config(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}

fn gemma3(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    config.require_one_of("attn_logit_softcapping", &[])?;
    let mut decoder = read(config, [None, None])?;
    decoder.query_norms = QueryNorms::PerHead;
    let window = config.window("sliding_window", Some(4096))?;
    let pattern = match config.get("_sliding_window_pattern") {
        Some(_) => config.size("_sliding_window_pattern")?,
        None => config.size_or("sliding_window_pattern", 6)?,
    };
    let windows = windows(config, decoder.positions.len(), window, |i| (i + 1) % pattern != 0)?;
    for (layer, window) in decoder.positions.iter_mut().zip(windows) {
        *layer = Positions { window, rope: Some(usize::from(window.is_some())) };
    }
    let rotated = decoder.head_dim;
    let by_type = config.get("rope_parameters.full_attention").is_some();
    let (global, local) = if by_type {
        let of = |kind: &str, theta| RopeFields {
            group: format!("rope_parameters.{kind}"),
            theta,
            ..RopeFields::from_config(config, rotated)
        };
        (of("full_attention", 1e6), of("sliding_attention", 1e4))
    } else {
        let theta = config.float_or("rope_local_base_freq", 1e4)?;
        let usual = |theta| RopeFields { theta, ..RopeFields::from_config(config, rotated) };
        (usual(1e6), usual(theta))
    };
    // Without a group of their own, layers with a window use neither the base nor the scaling of global layers.
    let local = if by_type { local.read(None)? } else { local.plain() };
    decoder.ropes = vec![global.read(None)?, local];
    decoder.net(config, loader)
}

fn read(config: &ConfigFile, [score_cap, logit_cap]: [Option<f64>; 2]) -> Result<Decoder> {
    config.require_one_of("use_bidirectional_attention", &[json!(false)])?;
    let mut decoder = Decoder::read(config, &DEFAULTS)?;
    let field = if config.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    decoder.activation = activation(config, field, Activation::GeGlu, true)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.norms = NORMS;
    decoder.norm_offset = 1.0;
    decoder.scale = (1.0 / config.float_or("query_pre_attn_scalar", 256.0)?.sqrt()) as f32;
    decoder.score_cap = config.cap("attn_logit_softcapping", score_cap)?;
    decoder.logit_cap = config.cap("final_logit_softcapping", logit_cap)?;
    decoder.embedding_scale = (config.size("hidden_size")? as f32).sqrt();
    Ok(decoder)
}
