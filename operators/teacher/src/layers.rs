//! What the architectures share: linear maps, norms, rotary positions, the vocabulary head.
//!
//! Activations are `[rows, width]` with rows = batch × length, so that every linear map is one product.

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

use crate::config::ConfigFile;
use crate::error::{Result, TeacherError};
use crate::kernels;
use crate::product::{Matrix, Threads, product};
use crate::weights::Weights;

/// `x · w + b`, with w seen as `[in, out]` whichever way it lies in memory (gemm packs it as it needs).
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// `weight` is `[out, in]`, as PyTorch's `nn.Linear` stores it.
    pub(crate) fn new(weight: &Tensor, bias: Option<Tensor>) -> Result<Self> {
        Ok(Self { weight: weight.t()?, bias })
    }

    pub(crate) fn load(weights: &Weights, name: &str, inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let weight = weights.get(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias = if bias { Some(weights.get(&format!("{name}.bias"), &[outputs])?) } else { None };
        Self::new(&weight, bias)
    }

    /// GPT-2's `Conv1D`: the weight is stored `[in, out]`, and there is always a bias.
    pub(crate) fn load_conv1d(weights: &Weights, name: &str, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = weights.get(&format!("{name}.weight"), &[inputs, outputs])?;
        Ok(Self { weight, bias: Some(weights.get(&format!("{name}.bias"), &[outputs])?) })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.matmul(&self.weight)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// SwiGLU: `down(silu(gate x) ⊙ up x)`, gate and up as one product.
pub(crate) struct GatedMlp {
    gate_up: Linear,
    down: Linear,
}

impl GatedMlp {
    pub(crate) fn load(weights: &Weights, name: &str, width: usize, inner: usize, bias: bool) -> Result<Self> {
        let pair = |kind: &str, shape: &[usize]| -> Result<Tensor> {
            weights.get_stacked(&["gate", "up"].map(|part| format!("{name}.{part}_proj.{kind}")), shape)
        };
        let gate_up_bias = if bias { Some(pair("bias", &[inner])?) } else { None };
        Ok(Self {
            gate_up: Linear::new(&pair("weight", &[inner, width])?, gate_up_bias)?,
            down: Linear::load(weights, &format!("{name}.down_proj"), inner, width, bias)?,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&kernels::swiglu(&self.gate_up.forward(x)?)?)
    }
}

/// RMSNorm over the last dimension.
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub(crate) fn load(weights: &Weights, name: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: weights.get(&format!("{name}.weight"), &[width])?, eps: eps as f32 })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::ops::rms_norm(x, &self.weight, self.eps)
    }
}

/// LayerNorm over the last dimension.
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f32,
}

impl LayerNorm {
    pub(crate) fn load(weights: &Weights, name: &str, width: usize, eps: f64) -> Result<Self> {
        let weight = weights.get(&format!("{name}.weight"), &[width])?;
        Ok(Self { weight, bias: weights.get(&format!("{name}.bias"), &[width])?, eps: eps as f32 })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::ops::layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// Rotary positions, halves rotated against each other (Su et al. 2021, in the layout of Hugging Face checkpoints).
pub(crate) struct Rope {
    /// One angle per position and pair: position × frequency.
    frequencies: Vec<f32>,
    cached: (Tensor, Tensor),
    dtype: DType,
}

/// Positions whose sines are kept; longer sequences compute them anew.
const CACHED_POSITIONS: usize = 4096;

impl Rope {
    /// Reads `rope_theta` and the scaling, from the top level or inside `rope_parameters` / `rope_scaling`;
    /// a tensor `rope_freqs.weight` (GGUF) divides the frequencies.
    pub(crate) fn load(config: &ConfigFile, weights: &Weights, head_dim: usize) -> Result<Self> {
        let (dtype, device) = (weights.dtype(), weights.device());
        let group = if config.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        let inside = format!("{group}.rope_theta");
        let field = if config.get(&inside).is_some() { inside.as_str() } else { "rope_theta" };
        let theta = config.float_or(field, 10_000.0)?;
        let mut frequencies: Vec<f64> =
            (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        scale_frequencies(config, group, &mut frequencies)?;
        if weights.has("rope_freqs.weight") {
            let factors = weights.get_bare("rope_freqs.weight", &[head_dim / 2])?;
            let factors = factors.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            frequencies.iter_mut().zip(factors).for_each(|(f, factor)| *f /= f64::from(factor));
        }
        let frequencies: Vec<f32> = frequencies.into_iter().map(|f| f as f32).collect();
        let positions = config.size("max_position_embeddings")?.min(CACHED_POSITIONS);
        let cached = tables(&frequencies, positions, dtype, device)?;
        Ok(Self { frequencies, cached, dtype })
    }

    /// Cosines and sines `[length, D/2]`.
    pub(crate) fn tables(&self, length: usize) -> candle_core::Result<(Tensor, Tensor)> {
        let (cos, sin) = &self.cached;
        if length > cos.dim(0)? {
            return tables(&self.frequencies, length, self.dtype, cos.device());
        }
        Ok((cos.narrow(0, 0, length)?, sin.narrow(0, 0, length)?))
    }
}

fn tables(
    frequencies: &[f32],
    positions: usize,
    dtype: DType,
    device: &Device,
) -> candle_core::Result<(Tensor, Tensor)> {
    let angles: Vec<f32> = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f32 * f)).collect();
    let of = |f: fn(f32) -> f32| {
        let values = angles.iter().map(|a| f(*a)).collect();
        Tensor::from_vec(values, (positions, frequencies.len()), device)?.to_dtype(dtype)
    };
    Ok((of(f32::cos)?, of(f32::sin)?))
}

fn scale_frequencies(config: &ConfigFile, group: &str, frequencies: &mut [f64]) -> Result<()> {
    let at = |name: &str| format!("{group}.{name}");
    let kind = if config.get(&at("rope_type")).is_some() { at("rope_type") } else { at("type") };
    let number = |name: &str| -> Result<f64> {
        match config.get(&at(name)) {
            Some(_) => config.float_or(&at(name), 1.0),
            None => Err(config.invalid(&at(name), "a number above 0")),
        }
    };
    match config.get(&kind).and_then(|kind| kind.as_str()).unwrap_or("default") {
        "default" => {}
        "linear" => {
            let factor = number("factor")?;
            frequencies.iter_mut().for_each(|f| *f /= factor);
        }
        "llama3" => {
            let (factor, low, high) = (number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?);
            let context = number("original_max_position_embeddings")?;
            for f in frequencies {
                // Turns that the frequency makes over the context of the pretraining.
                let turns = context * *f / std::f64::consts::TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *f = *f * keep + *f / factor * (1.0 - keep);
            }
        }
        _ => return Err(config.invalid(&kind, "default, linear, llama3")),
    }
    Ok(())
}

/// Maps hidden states to logits; `[V, H]`, often the embedding itself.
pub(crate) struct Head {
    weight: Tensor,
}

impl Head {
    pub(crate) fn new(weight: Tensor) -> Self {
        Self { weight }
    }

    /// `[n, H]` to `[n, V]`, f32.
    pub(crate) fn logits(&self, rows: &Tensor) -> Result<Tensor> {
        self.check(rows)?;
        Ok(rows.matmul(&self.weight.t()?)?.to_dtype(DType::F32)?)
    }

    /// The same into `out`, resized to n·V; on a CPU in f32 nothing is allocated or copied.
    pub(crate) fn logits_into(&self, rows: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        let count = self.check(rows)?;
        let (vocab, width) = self.weight.dims2()?;
        out.resize(count * vocab, 0.0);
        if !kernels::applies(rows) {
            let logits = self.logits(rows)?.flatten_all()?.to_device(&Device::Cpu)?;
            let (storage, layout) = logits.storage_and_layout();
            out.copy_from_slice(floats(&storage, layout.start_offset(), count * vocab)?);
            return Ok(());
        }
        let rows = rows.contiguous()?;
        let (storage, layout) = rows.storage_and_layout();
        let (weight, weight_layout) = self.weight.storage_and_layout();
        let x = floats(&storage, layout.start_offset(), count * width)?;
        let w = floats(&weight, weight_layout.start_offset(), vocab * width)?;
        let x = Matrix { data: x, shape: (count, width), strides: (width, 1) };
        let w = Matrix { data: w, shape: (vocab, width), strides: (width, 1) };
        Ok(product(out, vocab, 1.0, &x, &w.transposed(), Threads::Pool)?)
    }

    fn check(&self, rows: &Tensor) -> Result<usize> {
        match (rows.dims(), self.weight.dims()) {
            ([count, width], [_, valid]) if *count > 0 && width == valid => Ok(*count),
            (got, valid) => Err(TeacherError::Input {
                what: "shape of the hidden rows",
                got: format!("{got:?}"),
                valid: format!("[n, {}] with n at least 1", valid.last().copied().unwrap_or(0)),
            }),
        }
    }
}

fn floats(storage: &Storage, start: usize, count: usize) -> candle_core::Result<&[f32]> {
    match storage {
        Storage::Cpu(CpuStorage::F32(data)) if data.len() >= start + count => Ok(&data[start..start + count]),
        _ => candle_core::bail!("expected {count} floats on the cpu"),
    }
}
