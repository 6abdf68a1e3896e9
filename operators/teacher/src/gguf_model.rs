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

use crate::config::TeacherConfig;
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::families::{Architecture, Family, GgufFeatures, GgufLayout};
use crate::gguf::Gguf;

impl Gguf {
    /// The family that the file names.
    pub(crate) fn family(&self) -> Result<&'static dyn Family> {
        Ok(Architecture::of_gguf(self)?.family())
    }

    /// Returns the full key of the model's architecture: `llama.block_count` for `block_count`.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.text("general.architecture").unwrap_or_default())
    }

    pub(crate) fn config(&self) -> Result<TeacherConfig> {
        Ok(TeacherConfig {
            architecture: Architecture::of_gguf(self)?,
            vocab_size: self.vocab_size()?,
            max_positions: self.max_positions()?,
            hidden_size: self.hidden_size()?,
            layers: self.layers()?,
            bos_token_id: self.token("tokenizer.ggml.bos_token_id"),
            eos_token_id: self.token("tokenizer.ggml.eos_token_id"),
            weights: vec![self.path.clone()],
        })
    }

    /// Length of the longest sequence.
    pub(crate) fn max_positions(&self) -> Result<usize> {
        self.size(&self.key("context_length"))
    }

    /// Width of the hidden states, H.
    pub(crate) fn hidden_size(&self) -> Result<usize> {
        self.size(&self.key("embedding_length"))
    }

    /// Number of layers.
    pub(crate) fn layers(&self) -> Result<usize> {
        self.size(&self.key("block_count"))
    }

    /// Tokens of the window of attention, if there is one.
    pub(crate) fn window(&self) -> Option<u64> {
        self.number(&self.key("attention.sliding_window")).filter(|window| *window > 0)
    }

    /// Returns the metadata as a Hugging Face `config.json`.
    pub(crate) fn config_file(&self) -> Result<ConfigFile> {
        let family = self.family()?;
        self.refuse_other_keys(&family.gguf_features())?;
        Ok(ConfigFile::new(self.path.clone(), family.gguf_config(self)?))
    }

    /// Refuses keys of other families that affect logits, unless their value is neutral.
    fn refuse_other_keys(&self, features: &GgufFeatures) -> Result<()> {
        let one = ["logit_scale", "residual_scale", "embedding_scale"];
        let zero =
            ["expert_count", "expert_used_count", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"];
        let caps = ["attn_logit_softcapping", "final_logit_softcapping"];
        let zero = zero.into_iter().chain(caps.into_iter().filter(|_| !features.soft_caps));
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
        match self.number(&window) {
            Some(tokens) if !features.window && tokens > 0 && tokens < self.max_positions()? as u64 => {
                Err(self.invalid(&window, "0, or at least context_length: this family has no window"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the configuration of a family of Llama's design, without the rotation, and the number of heads and their
    /// size.
    pub(crate) fn decoder_config(
        &self,
        name: &str,
        features: &GgufFeatures,
    ) -> Result<(Map<String, Value>, [usize; 2])> {
        let width = self.hidden_size()?;
        let heads = self.size(&self.key("attention.head_count"))?;
        let kv_heads = match self.value(&self.key("attention.head_count_kv")) {
            None => heads,
            Some(_) => self.size(&self.key("attention.head_count_kv"))?,
        };
        let head_dim = match self.value(&self.key("attention.key_length")) {
            None => width / heads,
            Some(_) => self.size(&self.key("attention.key_length"))?,
        };
        let equal: &[&str] = match features.partial_rotation {
            true => &["attention.value_length"],
            false => &["attention.value_length", "rope.dimension_count"],
        };
        for key in equal.iter().map(|name| self.key(name)) {
            if self.value(&key).is_some() && self.size(&key)? != head_dim {
                return Err(self.invalid(&key, &head_dim.to_string()));
            }
        }
        let fields = [
            ("model_type", json!(name)),
            ("vocab_size", json!(self.vocab_size()?)),
            ("hidden_size", json!(width)),
            ("intermediate_size", json!(self.size(&self.key("feed_forward_length"))?)),
            ("num_hidden_layers", json!(self.layers()?)),
            ("num_attention_heads", json!(heads)),
            ("num_key_value_heads", json!(kv_heads)),
            ("head_dim", json!(head_dim)),
            ("max_position_embeddings", json!(self.max_positions()?)),
            ("rms_norm_eps", json!(self.eps("attention.layer_norm_rms_epsilon")?)),
            ("attention_bias", json!(self.has("layers.0.self_attn.q_proj.bias"))),
            ("mlp_bias", json!(self.has("layers.0.mlp.gate_proj.bias"))),
            ("tie_word_embeddings", json!(!self.has("lm_head.weight"))),
        ];
        let json = fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Ok((json, [heads, head_dim]))
    }

    /// The base of the rotation, as a number of JSON.
    pub(crate) fn rope_theta(&self, default: f64) -> Result<Value> {
        Ok(json!(self.float(&self.key("rope.freq_base"))?.unwrap_or(default)))
    }

    /// Returns `rope_scaling`.
    pub(crate) fn rope_scaling(&self) -> Result<Value> {
        let original = self.number(&self.key("rope.scaling.original_context_length"));
        let mut scaling = json!({"rope_type": "default"});
        let kind = self.key("rope.scaling.type");
        match self.text(&kind) {
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
        Ok(scaling)
    }

    pub(crate) fn eps(&self, name: &str) -> Result<f64> {
        let key = self.key(name);
        self.float(&key)?.ok_or_else(|| self.invalid(&key, "a number above 0"))
    }

    /// Reads a tensor of a few numbers, in the file's layout.
    pub(crate) fn read_floats(&self, name: &str) -> Result<Vec<f32>> {
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
        match self.family()?.gguf_layout(name, module, shape.len()) {
            GgufLayout::Same => Ok(tensor),
            GgufLayout::PairsOfQueries => halves(heads()?),
            GgufLayout::PairsOfKeys => halves(kv_heads()?),
            GgufLayout::PlusOne => Ok((tensor - 1.0)?),
            GgufLayout::ByPart => {
                let heads = heads()?;
                Ok(tensor.reshape((3, heads, rows / heads / 3, rest))?.transpose(0, 1)?.reshape(shape)?)
            }
            GgufLayout::Transposed => Ok(tensor.t()?.contiguous()?),
        }
    }

    /// Returns how a tensor's bytes are ordered in the file, for callers that widen them. Returns `None` if the file
    /// stores other numbers, or in an order that [`StorageOrder`] lacks.
    pub(crate) fn stored_order(&self, name: &str, shape: &[usize]) -> Result<Option<StorageOrder>> {
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        Ok(match self.family()?.gguf_layout(name, module, shape.len()) {
            GgufLayout::Same => Some(StorageOrder::RowMajor),
            GgufLayout::PairsOfQueries | GgufLayout::PairsOfKeys => Some(StorageOrder::Interleaved),
            GgufLayout::Transposed => Some(StorageOrder::Transposed),
            GgufLayout::PlusOne | GgufLayout::ByPart => None,
        })
    }

    /// Returns the shape of a tensor in the file.
    pub(crate) fn stored_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        let layout = self.family().map(|family| family.gguf_layout(name, module, shape.len()));
        match (layout, shape) {
            (Ok(GgufLayout::Transposed), [inputs, outputs]) => vec![*outputs, *inputs],
            _ => shape.to_vec(),
        }
    }

    /// Returns the file's name of a Hugging Face tensor.
    pub(crate) fn name_of(&self, name: &str) -> String {
        let norms_behind = self.family().is_ok_and(|family| family.gguf_features().norms_behind);
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
            "post_attention_layernorm" if norms_behind => "post_attention_norm",
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
