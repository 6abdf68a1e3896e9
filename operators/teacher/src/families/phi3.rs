//! Phi-3: Abdin et al. 2024, "Phi-3 Technical Report" (section 2). A Llama that stores q, k and v in one weight, and
//! gate and up in another. It may rotate only a part of each head, and scales positions with LongRoPE (Ding et al.
//! 2024).

use serde_json::{Map, Value, json};

use super::decoder::{Decoder, Defaults};
use super::{Family, GgufFeatures, activation};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::net::{Activation, Loader, Net, RopeFields};

/// Tensors of a GGUF file that hold LongRoPE's factors, which become part of the configuration.
const LONGROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

/// Phi-3.
pub(super) struct Phi3;

impl Family for Phi3 {
    fn name(&self) -> &'static str {
        "phi3"
    }

    fn class(&self) -> &'static str {
        "Phi3ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        load(config, loader)
    }

    fn every_layer_slides(&self) -> bool {
        true
    }

    fn is_buffer(&self, name: &str, layers: usize) -> bool {
        // the factors are read with the configuration
        LONGROPE_FACTORS.contains(&name) || super::llama::Llama.is_buffer(name, layers)
    }

    fn gguf_features(&self) -> GgufFeatures {
        GgufFeatures { window: true, partial_rotation: true, ..GgufFeatures::default() }
    }

    fn gguf_rope(&self, file: &Gguf, head_dim: usize, json: &mut Map<String, Value>) -> Result<()> {
        let original = file.number(&file.key("rope.scaling.original_context_length"));
        let mut scaling = json!({"rope_type": "default"});
        if file.has(LONGROPE_FACTORS[1]) {
            let [short, long] = LONGROPE_FACTORS.map(|name| file.read_floats(name));
            scaling = json!({"rope_type": "longrope", "short_factor": short?, "long_factor": long?});
            if let Some(factor) = file.float(&file.key("rope.scaling.attn_factor"))? {
                scaling["attention_factor"] = json!(factor);
            }
        }
        json.insert("original_max_position_embeddings".into(), json!(original.unwrap_or(4096)));
        if file.value(&file.key("rope.dimension_count")).is_some() {
            let rotated = file.size(&file.key("rope.dimension_count"))?;
            json.insert("partial_rotary_factor".into(), json!(rotated as f64 / head_dim as f64));
        }
        json.insert("rope_theta".into(), file.rope_theta(10_000.0)?);
        json.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    fn add_gguf_fields(&self, file: &Gguf, _: [usize; 2], json: &mut Map<String, Value>) -> Result<()> {
        json.insert("sliding_window".into(), json!(file.window()));
        Ok(())
    }
}

fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: None, head_dim: None, eps: 1e-5, tied: false })?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.fused = true;
    let window = config.window("sliding_window", None)?;
    decoder.positions.iter_mut().for_each(|layer| layer.window = window);
    let mut rope = RopeFields::from_config(config, decoder.head_dim);
    rope.rotated = config.rotated("partial_rotary_factor", decoder.head_dim, 1.0)?;
    rope.original_context = Some(4096.0);
    rope.yarn_is_longrope = true;
    decoder.with_rope(&rope, loader)?.net(config, loader)
}
