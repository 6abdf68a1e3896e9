//! Builds the parts of a net from weights in files.

use stillhouse_cpu::Arithmetic;

use super::{Activation, Linear, Norm, WeightLayout};
use crate::error::Result;
use crate::weights::Weights;

/// Whether a linear map has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    /// A bias, stored as `NAME.bias`.
    Present,
    /// No bias.
    Absent,
}

impl From<bool> for Bias {
    fn from(is_present: bool) -> Self {
        if is_present { Self::Present } else { Self::Absent }
    }
}

/// Loads weights by their names in Hugging Face checkpoints, packed for products.
pub(crate) struct Loader<'a> {
    pub weights: &'a Weights,
    pub arithmetic: Arithmetic,
}

impl Loader<'_> {
    /// Loads a tensor `[n]`; empty if only headers are read.
    pub(crate) fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>> {
        self.weights.floats(name, &[length])
    }

    /// Loads a tensor `[rows, columns]` in row order; empty if only headers are read.
    pub(crate) fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        self.weights.floats(name, &shape)
    }

    /// Loads linear maps of the same input and stacks their outputs. Each is `NAME.weight` `[outputs, inputs]`, as
    /// PyTorch's `nn.Linear` stores it.
    pub(crate) fn linear(&self, parts: &[(String, usize)], inputs: usize, bias: Bias) -> Result<Linear> {
        let (weight, biases, outputs) = self.stacked(parts, inputs, bias)?;
        self.packed(&weight, [outputs, inputs], WeightLayout::Outputs, biases)
    }

    /// Loads the first product of a gated MLP of width I: gate and up as two weights, or as one weight `[2I, inputs]`.
    pub(crate) fn gate_up(
        &self,
        parts: &[(String, usize)],
        inputs: usize,
        bias: Bias,
        activation: Activation,
    ) -> Result<Linear> {
        let (weight, biases, outputs) = self.stacked(parts, inputs, bias)?;
        match activation {
            Activation::SwiGlu if self.weights.is_read() => {
                Linear::gated(&weight, [outputs / 2, inputs], biases, self.arithmetic)
            }
            Activation::SwiGlu => Ok(Linear::unread([outputs / 2, inputs], biases)),
            _ => self.packed(&weight, [outputs, inputs], WeightLayout::Outputs, biases),
        }
    }

    /// Loads and stacks weights with the same input. Returns the weights, their biases and the number of outputs.
    fn stacked(
        &self,
        parts: &[(String, usize)],
        inputs: usize,
        bias: Bias,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>, usize)> {
        let (mut weight, mut biases, mut outputs) = (Vec::new(), Vec::new(), 0);
        for (name, rows) in parts {
            let part = self.matrix(&format!("{name}.weight"), [*rows, inputs])?;
            if parts.len() == 1 {
                weight = part;
            } else {
                weight.extend_from_slice(&part);
            }
            if bias == Bias::Present {
                biases.extend(self.vector(&format!("{name}.bias"), *rows)?);
            }
            outputs += rows;
        }
        Ok((weight, (bias == Bias::Present).then_some(biases), outputs))
    }

    /// Loads GPT-2's `Conv1D`, whose weight is stored `[inputs, outputs]` and which always has a bias.
    pub(crate) fn conv1d(&self, name: &str, inputs: usize, outputs: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), [inputs, outputs])?;
        let bias = self.vector(&format!("{name}.bias"), outputs)?;
        self.packed(&weight, [outputs, inputs], WeightLayout::Inputs, Some(bias))
    }

    /// Packs a weight, or returns one without numbers if only headers are read.
    pub(crate) fn packed(
        &self,
        weight: &[f32],
        [outputs, inputs]: [usize; 2],
        stored: WeightLayout,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear> {
        if self.weights.is_read() {
            return Linear::new(weight, [outputs, inputs], stored, bias, self.arithmetic);
        }
        Ok(Linear::unread([outputs, inputs], bias))
    }

    /// Loads `NAME.weight` and adds `offset` to it (Gemma stores the weight minus 1).
    pub(crate) fn rms_norm(&self, name: &str, width: usize, eps: f32, offset: f32) -> Result<Norm> {
        let mut weight = self.vector(&format!("{name}.weight"), width)?;
        weight.iter_mut().for_each(|w| *w += offset);
        Ok(Norm::Rms { weight, eps })
    }

    /// Loads `NAME.weight` and `NAME.bias`.
    pub(crate) fn layer_norm(&self, name: &str, width: usize, eps: f32) -> Result<Norm> {
        let weight = self.vector(&format!("{name}.weight"), width)?;
        Ok(Norm::Layer { weight, bias: self.vector(&format!("{name}.bias"), width)?, eps })
    }

    /// Loads the head: the embedding if they are tied (the file may contain a copy), else a weight of its own, without
    /// the prefix.
    pub(crate) fn head(
        &self,
        tied: bool,
        [head, embedding]: [&str; 2],
        tokens: &[f32],
        shape: [usize; 2],
    ) -> Result<Linear> {
        if tied {
            self.weights.check_tied(head, embedding)?;
            return self.packed(tokens, shape, WeightLayout::Outputs, None);
        }
        let weight = self.weights.bare_floats(head, &shape)?;
        self.packed(&weight, shape, WeightLayout::Outputs, None)
    }
}
