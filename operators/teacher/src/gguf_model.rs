//! Translates a GGUF file's model to Hugging Face's conventions: the configuration, the names of tensors, and the order
//! of their rows.
//!
//! | `general.architecture` | family | difference in the stored tensors |
//! |---|---|---|
//! | `llama` | Llama, Mistral | q and k: rotated pairs are adjacent rows instead of rows in two halves |
//! | `smollm3` | SmolLM3 | as `llama` |
//! | `qwen2`, `qwen3`, `olmo2`, `phi3` | the same name | |
//! | `gemma2`, `gemma3` | the same name | norms: 1 is added |
//! | `gptneox` | GPT-NeoX | q of all heads, then k, then v |
//! | `gpt2` | GPT-2 | `[out, in]` |
//!
//! ```text
//! Hugging Face, rows of a head:   a0 a1 a2 … | b0 b1 b2 …      a_i is rotated with b_i
//! GGUF of a Llama:                a0 b0 a1 b1 a2 b2 …
//! ```

use candle_core::Tensor;
use candle_core::quantized::gguf_file::Value as Metadata;
use serde_json::{Map, Value, json};
use stillhouse_gpu::net::StorageOrder;

use crate::config::{Architecture, ConfigFile, SUPPORTED_IN_GGUF, TeacherConfig};
use crate::error::Result;
use crate::gguf::Gguf;

/// Tensors that hold LongRoPE's factors, which become part of the configuration.
pub(crate) const LONGROPE_FACTORS: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];

impl Gguf {
    pub(crate) fn architecture(&self) -> Result<Architecture> {
        let known = match self.text("general.architecture") {
            Some("gpt2") => Architecture::Gpt2,
            Some("llama") => Architecture::Llama,
            Some("smollm3") => Architecture::SmolLm3,
            Some("qwen2") => Architecture::Qwen2,
            Some("qwen3") => Architecture::Qwen3,
            Some("gemma2") => Architecture::Gemma2,
            Some("gemma3") => Architecture::Gemma3,
            Some("gptneox") => Architecture::GptNeoX,
            Some("olmo2") => Architecture::Olmo2,
            Some("phi3") => Architecture::Phi3,
            _ => return Err(self.invalid("general.architecture", SUPPORTED_IN_GGUF)),
        };
        Ok(known)
    }

    /// Returns the full key of the model's architecture: `llama.block_count` for `block_count`.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.text("general.architecture").unwrap_or_default())
    }

    pub(crate) fn config(&self) -> Result<TeacherConfig> {
        Ok(TeacherConfig {
            architecture: self.architecture()?,
            vocab_size: self.vocab_size()?,
            max_positions: self.size(&self.key("context_length"))?,
            hidden_size: self.size(&self.key("embedding_length"))?,
            layers: self.size(&self.key("block_count"))?,
            bos_token_id: self.token("tokenizer.ggml.bos_token_id"),
            eos_token_id: self.token("tokenizer.ggml.eos_token_id"),
            weights: vec![self.path.clone()],
        })
    }

    /// Returns the metadata as a Hugging Face `config.json`.
    pub(crate) fn config_file(&self) -> Result<ConfigFile> {
        let config = self.config()?;
        self.refuse_other_keys(&config)?;
        let json = match config.architecture {
            Architecture::Gpt2 => self.gpt2(&config)?,
            Architecture::GptNeoX => self.gpt_neox(&config)?,
            _ => self.decoder(&config)?,
        };
        Ok(ConfigFile::new(self.path.clone(), json))
    }

    /// Refuses keys of other families that affect logits, unless their value is neutral.
    fn refuse_other_keys(&self, config: &TeacherConfig) -> Result<()> {
        let family = config.architecture;
        let is_gemma = matches!(family, Architecture::Gemma2 | Architecture::Gemma3);
        let one = ["logit_scale", "residual_scale", "embedding_scale"];
        let zero =
            ["expert_count", "expert_used_count", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"];
        let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
        let zero = zero.into_iter().chain(caps.into_iter().filter(|_| !is_gemma));
        for (names, neutral) in [(one.into_iter().collect::<Vec<_>>(), 1.0), (zero.collect(), 0.0)] {
            for key in names.iter().map(|name| self.key(name)) {
                let got = match self.value(&key) {
                    None => continue,
                    Some(Metadata::F32(x)) => Some(f64::from(*x)),
                    Some(Metadata::F64(x)) => Some(*x),
                    Some(_) => self.number(&key).map(|n| n as f64),
                };
                if got != Some(neutral) {
                    return Err(self.invalid(&key, &format!("{neutral}, or no such key: this family has none")));
                }
            }
        }
        let causal = self.key("attention.causal");
        if self.value(&causal).is_some_and(|flag| !flag.to_bool().unwrap_or(true)) {
            return Err(self.invalid(&causal, "true, or no such key"));
        }
        let window = self.key("attention.sliding_window");
        let slides = is_gemma || matches!(family, Architecture::Phi3 | Architecture::Olmo2);
        match self.number(&window) {
            Some(tokens) if !slides && tokens > 0 && tokens < config.max_positions as u64 => {
                Err(self.invalid(&window, "0, or at least context_length: this family has no window"))
            }
            _ => Ok(()),
        }
    }

    fn gpt2(&self, config: &TeacherConfig) -> Result<Value> {
        Ok(json!({
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.max_positions,
            "n_embd": config.hidden_size,
            "n_layer": config.layers,
            "n_head": self.size(&self.key("attention.head_count"))?,
            "n_inner": self.size(&self.key("feed_forward_length"))?,
            "layer_norm_epsilon": self.eps("attention.layer_norm_epsilon")?,
            "tie_word_embeddings": !self.has("lm_head.weight"),
        }))
    }

    fn gpt_neox(&self, config: &TeacherConfig) -> Result<Value> {
        let heads = self.size(&self.key("attention.head_count"))?;
        let rotated = match self.value(&self.key("rope.dimension_count")) {
            None => config.hidden_size / heads,
            Some(_) => self.size(&self.key("rope.dimension_count"))?,
        };
        let parallel = self.value(&self.key("use_parallel_residual")).is_none_or(|flag| flag.to_bool().unwrap_or(true));
        Ok(json!({
            "model_type": "gpt_neox",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_positions,
            "hidden_size": config.hidden_size,
            "intermediate_size": self.size(&self.key("feed_forward_length"))?,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "layer_norm_eps": self.eps("attention.layer_norm_epsilon")?,
            "rotary_pct": rotated as f64 / (config.hidden_size / heads) as f64,
            "rotary_emb_base": self.float(&self.key("rope.freq_base"))?.unwrap_or(10_000.0),
            "use_parallel_residual": parallel,
            "attention_bias": self.has("layers.0.attention.query_key_value.bias"),
            "tie_word_embeddings": !self.has("embed_out.weight"),
        }))
    }

    /// Returns the configuration of the families of Llama's design.
    fn decoder(&self, config: &TeacherConfig) -> Result<Value> {
        let family = config.architecture;
        let heads = self.size(&self.key("attention.head_count"))?;
        let kv_heads = match self.value(&self.key("attention.head_count_kv")) {
            None => heads,
            Some(_) => self.size(&self.key("attention.head_count_kv"))?,
        };
        let head_dim = match self.value(&self.key("attention.key_length")) {
            None => config.hidden_size / heads,
            Some(_) => self.size(&self.key("attention.key_length"))?,
        };
        let equal: &[&str] = match family {
            Architecture::Phi3 => &["attention.value_length"],
            _ => &["attention.value_length", "rope.dimension_count"],
        };
        for key in equal.iter().map(|name| self.key(name)) {
            if self.value(&key).is_some() && self.size(&key)? != head_dim {
                return Err(self.invalid(&key, &head_dim.to_string()));
            }
        }
        let mut json = json!({
            "model_type": family.name(),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": self.size(&self.key("feed_forward_length"))?,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": self.eps("attention.layer_norm_rms_epsilon")?,
            "attention_bias": self.has("layers.0.self_attn.q_proj.bias"),
            "mlp_bias": self.has("layers.0.mlp.gate_proj.bias"),
            "tie_word_embeddings": !self.has("lm_head.weight"),
        });
        if let Value::Object(json) = &mut json {
            self.rope(config, head_dim, json)?;
            self.add_family_fields(config, [heads, head_dim], json)?;
        }
        Ok(json)
    }

    /// Adds the fields that only some families have.
    fn add_family_fields(
        &self,
        config: &TeacherConfig,
        [heads, head_dim]: [usize; 2],
        json: &mut Map<String, Value>,
    ) -> Result<()> {
        let family = config.architecture;
        let window = self.number(&self.key("attention.sliding_window")).filter(|window| *window > 0);
        let mut put = |key: &str, value: Value| json.insert(key.into(), value);
        match family {
            Architecture::Olmo2 if window.is_some() => {
                return Err(self.invalid(&self.key("attention.sliding_window"), "0, or none"));
            }
            Architecture::Phi3 => {
                put("sliding_window", json!(window));
            }
            Architecture::Gemma2 | Architecture::Gemma3 => {
                // The file lacks this value. In the largest model of each family it is not the size of a head.
                let largest = if family == Architecture::Gemma2 { 46 } else { 62 };
                let of_width = config.layers == largest;
                put("query_pre_attn_scalar", json!(if of_width { config.hidden_size / heads } else { head_dim }));
                let default = (family == Architecture::Gemma2).then_some(4096);
                put("sliding_window", json!(window.or(default)));
                let caps = if family == Architecture::Gemma2 { [Some(50.0), Some(30.0)] } else { [None, None] };
                let names = ["attn_logit_softcapping", "final_logit_softcapping"];
                for (name, default) in names.into_iter().zip(caps) {
                    put(name, json!(self.float(&self.key(name))?.or(default)));
                }
                if let Some(Metadata::U32(pattern)) = self.value(&self.key("attention.sliding_window_pattern")) {
                    put("sliding_window_pattern", json!(pattern));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn rope(&self, config: &TeacherConfig, head_dim: usize, json: &mut Map<String, Value>) -> Result<()> {
        let theta = self.float(&self.key("rope.freq_base"))?;
        let original = self.number(&self.key("rope.scaling.original_context_length"));
        let mut scaling = json!({"rope_type": "default"});
        let kind = self.key("rope.scaling.type");
        match self.text(&kind) {
            _ if config.architecture == Architecture::Phi3 => {
                if self.has(LONGROPE_FACTORS[1]) {
                    let [short, long] = LONGROPE_FACTORS.map(|name| self.read_floats(name));
                    scaling = json!({"rope_type": "longrope", "short_factor": short?, "long_factor": long?});
                    if let Some(factor) = self.float(&self.key("rope.scaling.attn_factor"))? {
                        scaling["attention_factor"] = json!(factor);
                    }
                }
                json.insert("original_max_position_embeddings".into(), json!(original.unwrap_or(4096)));
                if self.value(&self.key("rope.dimension_count")).is_some() {
                    let rotated = self.size(&self.key("rope.dimension_count"))?;
                    json.insert("partial_rotary_factor".into(), json!(rotated as f64 / head_dim as f64));
                }
            }
            None | Some("none") => {}
            Some("linear") => {
                let factor = self.float(&self.key("rope.scaling.factor"))?.unwrap_or(1.0);
                scaling = json!({"rope_type": "linear", "factor": factor});
            }
            Some("yarn") => {
                for refused in ["attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"] {
                    let key = self.key(&format!("rope.scaling.{refused}"));
                    if self.value(&key).is_some() {
                        return Err(self.invalid(&key, "none"));
                    }
                }
                let factor = self.float(&self.key("rope.scaling.factor"))?;
                scaling = json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
                for (ours, theirs) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                    scaling[ours] = json!(self.float(&self.key(&format!("rope.scaling.{theirs}")))?);
                }
            }
            Some(_) => return Err(self.invalid(&kind, "none, linear, yarn")),
        }
        if config.architecture == Architecture::Gemma3 {
            let local = self.float(&self.key("rope.freq_base_swa"))?.unwrap_or(10_000.0);
            scaling["rope_theta"] = json!(theta.unwrap_or(1_000_000.0));
            let local = json!({"rope_type": "default", "rope_theta": local});
            json.insert("rope_parameters".into(), json!({"full_attention": scaling, "sliding_attention": local}));
            return Ok(());
        }
        json.insert("rope_theta".into(), json!(theta.unwrap_or(10_000.0)));
        json.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    fn eps(&self, name: &str) -> Result<f64> {
        let key = self.key(name);
        self.float(&key)?.ok_or_else(|| self.invalid(&key, "a number above 0"))
    }

    /// Reads a tensor of a few numbers, in the file's layout.
    fn read_floats(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.stored(name)?.flatten_all()?.to_vec1()?)
    }

    /// Reorders a tensor's rows to Hugging Face's order.
    pub(crate) fn to_hf_row_order(&self, name: &str, tensor: Tensor, shape: &[usize]) -> Result<Tensor> {
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        let (rows, rest) = (shape.first().copied().unwrap_or(0), shape.iter().skip(1).product::<usize>());
        let heads = || self.size(&self.key("attention.head_count"));
        let kv_heads = || match self.value(&self.key("attention.head_count_kv")) {
            None => heads(),
            Some(_) => self.size(&self.key("attention.head_count_kv")),
        };
        let halves = |heads: usize| -> Result<Tensor> {
            Ok(tensor.reshape((heads, rows / heads / 2, 2, rest))?.transpose(1, 2)?.reshape(shape)?)
        };
        match (self.architecture()?, module) {
            (Architecture::Llama | Architecture::SmolLm3, "q_proj") => halves(heads()?),
            (Architecture::Llama | Architecture::SmolLm3, "k_proj") => halves(kv_heads()?),
            (Architecture::Gemma2 | Architecture::Gemma3, _) if name.ends_with("norm.weight") => Ok((tensor - 1.0)?),
            (Architecture::GptNeoX, "query_key_value") => {
                let heads = heads()?;
                Ok(tensor.reshape((3, heads, rows / heads / 3, rest))?.transpose(0, 1)?.reshape(shape)?)
            }
            (Architecture::Gpt2, _) if is_conv1d(module) && shape.len() == 2 => Ok(tensor.t()?.contiguous()?),
            _ => Ok(tensor),
        }
    }

    /// Returns how a tensor's bytes are ordered in the file, for callers that widen them. Returns `None` if the file
    /// stores other numbers, or in an order that [`StorageOrder`] lacks.
    pub(crate) fn stored_order(&self, name: &str, shape: &[usize]) -> Result<Option<StorageOrder>> {
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        Ok(match (self.architecture()?, module) {
            (Architecture::Llama | Architecture::SmolLm3, "q_proj" | "k_proj") => Some(StorageOrder::Interleaved),
            (Architecture::Gpt2, _) if is_conv1d(module) && shape.len() == 2 => Some(StorageOrder::Transposed),
            (Architecture::Gemma2 | Architecture::Gemma3, _) if name.ends_with("norm.weight") => None,
            (Architecture::GptNeoX, "query_key_value") => None,
            _ => Some(StorageOrder::RowMajor),
        })
    }

    /// Returns the shape of a tensor in the file.
    pub(crate) fn stored_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        match (self.architecture(), shape) {
            (Ok(Architecture::Gpt2), [inputs, outputs]) if is_conv1d(module) => vec![*outputs, *inputs],
            _ => shape.to_vec(),
        }
    }

    /// Returns the file's name of a Hugging Face tensor.
    pub(crate) fn name_of(&self, name: &str) -> String {
        let sandwich =
            matches!(self.architecture(), Ok(Architecture::Gemma2 | Architecture::Gemma3 | Architecture::Olmo2));
        let layer = name.strip_prefix("layers.").or(name.strip_prefix("h.")).and_then(|rest| rest.split_once('.'));
        let Some((layer, rest)) = layer else {
            let (module, kind) = name.rsplit_once('.').unwrap_or((name, "weight"));
            let module = match module {
                "embed_tokens" | "embed_in" | "wte" => "token_embd",
                "wpe" => "position_embd",
                "norm" | "final_layer_norm" | "ln_f" => "output_norm",
                "lm_head" | "embed_out" => "output",
                other => other,
            };
            return format!("{module}.{kind}");
        };
        let (module, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
        let module = match module {
            "input_layernorm" | "ln_1" => "attn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.qkv_proj" | "attention.query_key_value" | "attn.c_attn" => "attn_qkv",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "self_attn.o_proj" | "attention.dense" | "attn.c_proj" => "attn_output",
            "post_attention_layernorm" if sandwich => "post_attention_norm",
            "post_attention_layernorm" | "pre_feedforward_layernorm" | "ln_2" => "ffn_norm",
            "post_feedforward_layernorm" => "post_ffw_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.dense_h_to_4h" | "mlp.c_fc" => "ffn_up",
            "mlp.down_proj" | "mlp.dense_4h_to_h" | "mlp.c_proj" => "ffn_down",
            other => other,
        };
        format!("blk.{layer}.{module}.{kind}")
    }
}

fn is_conv1d(module: &str) -> bool {
    matches!(module, "c_attn" | "c_proj" | "c_fc")
}
