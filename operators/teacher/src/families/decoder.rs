//! The families of Llama's shape: RMS norms, rotary positions, grouped-query attention, a gated feed-forward part. What each says of itself is
//! a [`Decoder`]; this makes the net of it.
//!
//! ```text
//! x = embed_tokens[token] · embedding_scale
//! x = x + after_attention(o_proj(attention(rope(q_norm(q_proj n)), rope(k_norm(k_proj n)), v_proj n))),   n = before_attention(x)
//! x = x + after_mlp(down_proj(act(gate_proj m) ⊙ up_proj m)),                                             m = before_mlp(x)
//! logits = soft_cap(norm(x) · lm_headᵀ)
//! ```

use serde_json::json;

use crate::config::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Attention, Bias, Embedding, Head, HeadNorms, Layer, Loader, Mlp, Net, Rope, RopeFields};
use crate::weights::Weights;

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueryNorms {
    /// None.
    Absent,
    /// Of each head.
    PerHead,
    /// Of all heads together.
    Whole,
}

/// Names of the norms of a layer, where it has them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Norms {
    pub before_attention: Option<&'static str>,
    pub after_attention: Option<&'static str>,
    pub before_mlp: Option<&'static str>,
    pub after_mlp: Option<&'static str>,
}

impl Norms {
    /// Before both parts, as in Llama.
    pub(super) const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
}

/// A layer's positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Positions {
    /// Tokens that are seen, itself included.
    pub window: Option<usize>,
    /// The number of the rotation.
    pub rope: Option<usize>,
}

/// What a family says of itself.
pub(super) struct Decoder {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// What scores are multiplied with.
    pub scale: f32,
    pub score_cap: Option<f32>,
    pub query_norms: QueryNorms,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub mlp_bias: bool,
    /// q, k and v as `qkv_proj`, gate and up as `gate_up_proj`.
    pub fused: bool,
    pub activation: Activation,
    pub norms: Norms,
    /// What is added to the weights of norms.
    pub norm_offset: f32,
    pub eps: f32,
    pub ropes: Vec<Rope>,
    /// By layer.
    pub positions: Vec<Positions>,
    pub embedding_scale: f32,
    pub logit_cap: Option<f32>,
    pub tied: bool,
}

/// Defaults that a family's own configuration class has for what a file leaves out.
pub(super) struct Defaults {
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub eps: f64,
    pub tied: bool,
}

impl Decoder {
    /// Llama without biases; what differs is changed after that.
    pub(super) fn read(config: &ConfigFile, defaults: &Defaults) -> Result<Self> {
        let (width, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let kv_heads = config.size_or("num_key_value_heads", defaults.kv_heads.unwrap_or(heads))?;
        if heads % kv_heads != 0 {
            return Err(config.invalid("num_key_value_heads", &format!("a divisor of num_attention_heads = {heads}")));
        }
        if defaults.head_dim.is_none() && config.get("head_dim").is_none() && width % heads != 0 {
            return Err(config.invalid("num_attention_heads", &format!("a divisor of hidden_size = {width}")));
        }
        let head_dim = config.size_or("head_dim", defaults.head_dim.unwrap_or(width / heads))?;
        if head_dim % 2 != 0 {
            return Err(config.invalid("head_dim", "an even number"));
        }
        let all = Positions { window: None, rope: Some(0) };
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            score_cap: None,
            query_norms: QueryNorms::Absent,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            fused: false,
            activation: Activation::SwiGlu,
            norms: Norms::BEFORE,
            norm_offset: 0.0,
            eps: config.float_or("rms_norm_eps", defaults.eps)? as f32,
            ropes: Vec::new(),
            positions: vec![all; config.size("num_hidden_layers")?],
            embedding_scale: 1.0,
            logit_cap: None,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
        })
    }

    /// The one rotation of most families.
    pub(super) fn with_rope(mut self, fields: &RopeFields<'_>, loader: &Loader<'_>) -> Result<Self> {
        if fields.rotated == self.head_dim {
            for field in ["partial_rotary_factor", "rope_parameters.partial_rotary_factor"] {
                fields.config.only(field, &[json!(1.0), json!(1)])?;
            }
        }
        self.ropes = vec![rope(fields, loader.weights)?];
        Ok(self)
    }

    /// The net.
    pub(super) fn net(self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        let (vocab, width) = (config.size("vocab_size")?, config.size("hidden_size")?);
        let inner = config.size("intermediate_size")?;
        let tokens = loader.matrix("embed_tokens.weight", [vocab, width])?;
        let layers = (0..self.positions.len()).map(|i| self.layer(loader, i, [width, inner]));
        let layers = layers.collect::<Result<_>>()?;
        let names = ["lm_head.weight", "embed_tokens.weight"];
        Ok(Net {
            width,
            head: Head {
                weight: loader.head(self.tied, names, &tokens, [vocab, width])?,
                tied: self.tied,
                soft_cap: self.logit_cap,
            },
            embedding: Embedding { tokens, scale: self.embedding_scale, positions: None },
            layers,
            last: loader.rms_norm("norm", width, self.eps, self.norm_offset)?,
            ropes: self.ropes,
        })
    }

    fn layer(&self, loader: &Loader<'_>, i: usize, [width, inner]: [usize; 2]) -> Result<Layer> {
        let at = |name: &str| format!("layers.{i}.{name}");
        let norm = |name: Option<&str>| {
            name.map(|name| loader.rms_norm(&at(name), width, self.eps, self.norm_offset)).transpose()
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let parts = |fused: &str, names: &[(&str, usize)]| -> Vec<(String, usize)> {
            match self.fused {
                true => vec![(at(fused), names.iter().map(|(_, rows)| rows).sum())],
                false => names.iter().map(|(name, rows)| (at(name), *rows)).collect(),
            }
        };
        let qkv =
            parts("self_attn.qkv_proj", &[("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]);
        let gate_up = parts("mlp.gate_up_proj", &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)]);
        let down = |name: &str, from: usize, bias: bool| loader.linear(&[(at(name), width)], from, Bias::from(bias));
        let Positions { window, rope } = self.positions[i];
        Ok(Layer {
            before_attention: norm(self.norms.before_attention)?,
            qkv: loader.linear(&qkv, width, Bias::from(self.qkv_bias))?,
            attention: Attention {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                scale: self.scale,
                soft_cap: self.score_cap,
                window,
                rope,
                norms: self.head_norms(loader, &at("self_attn"), [q, kv])?,
            },
            out: down("self_attn.o_proj", q, self.out_bias)?,
            after_attention: norm(self.norms.after_attention)?,
            before_mlp: norm(self.norms.before_mlp)?,
            mlp: Mlp {
                up: loader.gate_up(&gate_up, width, Bias::from(self.mlp_bias), self.activation)?,
                activation: self.activation,
                down: down("mlp.down_proj", inner, self.mlp_bias)?,
            },
            after_mlp: norm(self.norms.after_mlp)?,
            parallel: false,
        })
    }

    fn head_norms(&self, loader: &Loader<'_>, at: &str, [q, kv]: [usize; 2]) -> Result<Option<HeadNorms>> {
        let [q, kv] = match self.query_norms {
            QueryNorms::Absent => return Ok(None),
            QueryNorms::PerHead => [self.head_dim; 2],
            QueryNorms::Whole => [q, kv],
        };
        let weight = |name: &str, width: usize| -> Result<Vec<f32>> {
            let mut weight = loader.vector(&format!("{at}.{name}.weight"), width)?;
            weight.iter_mut().for_each(|w| *w += self.norm_offset);
            Ok(weight)
        };
        Ok(Some(HeadNorms { q: weight("q_norm", q)?, k: weight("k_norm", kv)?, eps: self.eps }))
    }
}

/// The rotation that a configuration names, with the factors that a GGUF file may have beside it; without them where only headers are read.
pub(crate) fn rope(fields: &RopeFields<'_>, weights: &Weights) -> Result<Rope> {
    let factors = match weights.has("rope_freqs.weight") {
        true => Some(weights.bare_floats("rope_freqs.weight", &[fields.rotated / 2])?),
        false => None,
    };
    fields.read(factors.as_deref().filter(|factors| !factors.is_empty()))
}
