//! The families of Llama's design: RMS norms, rotary positions, grouped-query attention and a gated MLP. Each family
//! describes itself as a [`Decoder`], from which this module builds the net.
//!
//! ```text
//! x = embed_tokens[token] · embedding_scale
//! x = x + after_attention(o_proj(attention(rope(q_norm(q_proj n)), rope(k_norm(k_proj n)), v_proj n))),   n = before_attention(x)
//! x = x + after_mlp(down_proj(act(gate_proj m) ⊙ up_proj m)),                                             m = before_mlp(x)
//! logits = soft_cap(norm(x) · lm_headᵀ)
//! ```

use serde_json::json;

use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Attention, Bias, Embedding, Head, HeadNorms, Layer, Loader, Mlp, Net, Rope, RopeFields};
use crate::weights::Weights;

/// Which norms queries and keys have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueryNorms {
    /// No norms.
    Absent,
    /// A norm per head.
    PerHead,
    /// One norm over all heads.
    Whole,
}

/// Tensor names of a layer's norms; `None` for norms that the family lacks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Norms {
    pub before_attention: Option<&'static str>,
    pub after_attention: Option<&'static str>,
    pub before_mlp: Option<&'static str>,
    pub after_mlp: Option<&'static str>,
}

impl Norms {
    /// Norms before attention and before the MLP, as in Llama.
    pub(super) const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
}

/// How a layer treats positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Positions {
    /// Number of visible tokens, including the current one; `None` for all.
    pub window: Option<usize>,
    /// Index of the rotation; `None` for no rotation.
    pub rope: Option<usize>,
}

/// The description of a family.
pub(super) struct Decoder {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    pub score_cap: Option<f32>,
    pub query_norms: QueryNorms,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub mlp_bias: bool,
    /// Whether q, k and v are stored as `qkv_proj`, and gate and up as `gate_up_proj`.
    pub fused: bool,
    pub activation: Activation,
    pub norms: Norms,
    /// Added to the weights of norms.
    pub norm_offset: f32,
    pub eps: f32,
    pub ropes: Vec<Rope>,
    /// One entry per layer.
    pub positions: Vec<Positions>,
    pub embedding_scale: f32,
    pub logit_cap: Option<f32>,
    pub tied: bool,
}

/// Defaults of the family's own configuration class, for fields that a file omits.
pub(super) struct Defaults {
    pub kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub eps: f64,
    pub tied: bool,
}

impl Decoder {
    /// Reads the fields of a Llama without biases. The family then changes what differs.
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

    /// Sets the single rotation that most families have.
    pub(super) fn with_rope(mut self, fields: &RopeFields<'_>, loader: &Loader<'_>) -> Result<Self> {
        if fields.rotated == self.head_dim {
            for field in ["partial_rotary_factor", "rope_parameters.partial_rotary_factor"] {
                fields.config.require_one_of(field, &[json!(1.0), json!(1)])?;
            }
        }
        self.ropes = vec![rope(fields, loader.weights)?];
        Ok(self)
    }

    /// Builds the net.
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

/// Reads the rotation of a configuration, with the factors that a GGUF file may store as a tensor. If only headers are
/// read, the factors are left out.
pub(crate) fn rope(fields: &RopeFields<'_>, weights: &Weights) -> Result<Rope> {
    let factors = match weights.has("rope_freqs.weight") {
        true => Some(weights.bare_floats("rope_freqs.weight", &[fields.rotated / 2])?),
        false => None,
    };
    fields.read(factors.as_deref().filter(|factors| !factors.is_empty()))
}
