//! Weights of files as the parts of a net.

use stillhouse_cpu::Arithmetic;

use super::{Activation, Linear, Norm, Stored};
use crate::error::Result;
use crate::weights::Weights;

/// Whether a linear map has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    /// `NAME.bias`.
    There,
    /// None.
    Absent,
}

impl From<bool> for Bias {
    fn from(there: bool) -> Self {
        if there { Self::There } else { Self::Absent }
    }
}

/// Hands out weights by the names of Hugging Face checkpoints, ready for the products.
pub(crate) struct Loader<'a> {
    pub weights: &'a Weights,
    pub arithmetic: Arithmetic,
}

impl Loader<'_> {
    /// A tensor `[n]`; empty where only headers are read.
    pub(crate) fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>> {
        self.weights.floats(name, &[length])
    }

    /// A tensor `[rows, columns]`, row after row; empty where only headers are read.
    pub(crate) fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        self.weights.floats(name, &shape)
    }

    /// Linear maps of one input, `NAME.weight` `[outputs, inputs]` as PyTorch's `nn.Linear` stores it, one under the other.
    pub(crate) fn linear(&self, parts: &[(String, usize)], inputs: usize, bias: Bias) -> Result<Linear> {
        let (weight, biases, outputs) = self.stacked(parts, inputs, bias)?;
        self.packed(&weight, [outputs, inputs], Stored::Outputs, biases)
    }

    /// The first product of a gated feed-forward part of width I: gate and up, or both in one weight `[2I, inputs]`.
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
            _ => self.packed(&weight, [outputs, inputs], Stored::Outputs, biases),
        }
    }

    /// Weights of one input one under the other, their biases, and how many outputs they are.
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
            if bias == Bias::There {
                biases.extend(self.vector(&format!("{name}.bias"), *rows)?);
            }
            outputs += rows;
        }
        Ok((weight, (bias == Bias::There).then_some(biases), outputs))
    }

    /// GPT-2's `Conv1D`: the weight is stored `[inputs, outputs]`, and there is always a bias.
    pub(crate) fn conv1d(&self, name: &str, inputs: usize, outputs: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), [inputs, outputs])?;
        let bias = self.vector(&format!("{name}.bias"), outputs)?;
        self.packed(&weight, [outputs, inputs], Stored::Inputs, Some(bias))
    }

    /// A weight that is in memory, or the place of one where only headers are read.
    pub(crate) fn packed(
        &self,
        weight: &[f32],
        [outputs, inputs]: [usize; 2],
        stored: Stored,
        bias: Option<Vec<f32>>,
    ) -> Result<Linear> {
        if self.weights.is_read() {
            return Linear::new(weight, [outputs, inputs], stored, bias, self.arithmetic);
        }
        Ok(Linear::unread([outputs, inputs], bias))
    }

    /// `NAME.weight`, to which `offset` is added (Gemma stores what the scale differs from 1).
    pub(crate) fn rms_norm(&self, name: &str, width: usize, eps: f32, offset: f32) -> Result<Norm> {
        let mut weight = self.vector(&format!("{name}.weight"), width)?;
        weight.iter_mut().for_each(|w| *w += offset);
        Ok(Norm::Rms { weight, eps })
    }

    /// `NAME.weight` and `NAME.bias`.
    pub(crate) fn layer_norm(&self, name: &str, width: usize, eps: f32) -> Result<Norm> {
        let weight = self.vector(&format!("{name}.weight"), width)?;
        Ok(Norm::Layer { weight, bias: self.vector(&format!("{name}.bias"), width)?, eps })
    }

    /// The head: the embedding where they are tied, which may lie in the file a second time, else a weight of its own (without the prefix).
    pub(crate) fn head(
        &self,
        tied: bool,
        [head, embedding]: [&str; 2],
        tokens: &[f32],
        shape: [usize; 2],
    ) -> Result<Linear> {
        if tied {
            self.weights.check_tied(head, embedding)?;
            return self.packed(tokens, shape, Stored::Outputs, None);
        }
        let weight = self.weights.bare_floats(head, &shape)?;
        self.packed(&weight, shape, Stored::Outputs, None)
    }
}
