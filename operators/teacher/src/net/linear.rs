//! Linear maps: packed weights with their biases.

use stillhouse_cpu::{Arithmetic, Epilogue, Layout, PackedWeight, Rows, RowsMut, Threads, product};

use crate::error::{Result, TeacherError};

/// Memory for products, and the choice of their threads.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    memory: stillhouse_cpu::Scratch,
    in_pool: bool,
}

impl Scratch {
    /// Creates a scratch for products of few rows, which all threads of the pool share.
    pub(crate) fn in_pool() -> Self {
        Self { in_pool: true, ..Self::default() }
    }

    const fn threads(&self) -> Threads {
        if self.in_pool { Threads::Pool } else { Threads::One }
    }
}

/// Layout of a weight in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightLayout {
    /// `[outputs, inputs]`, as PyTorch's `nn.Linear` stores it.
    Outputs,
    /// `[inputs, outputs]`, as GPT-2's `Conv1D` stores it.
    Inputs,
}

/// A linear map with its epilogue: `epilogue(x · weightᵀ + bias)`.
#[derive(Debug)]
pub(crate) struct Linear {
    /// Number of outputs of `forward`, and of inputs.
    shape: [usize; 2],
    /// `None` if only headers were read.
    weight: Option<PackedWeight>,
    bias: Option<Vec<f32>>,
    epilogue: Epilogue,
}

impl Linear {
    /// Packs `weight`, which is `[outputs, inputs]` or `[inputs, outputs]` according to `stored`.
    pub(crate) fn new(
        weight: &[f32],
        [outputs, inputs]: [usize; 2],
        stored: WeightLayout,
        bias: Option<Vec<f32>>,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let layout = match stored {
            WeightLayout::Outputs => Layout::Outputs { stride: inputs },
            WeightLayout::Inputs => Layout::Inputs { stride: outputs },
        };
        let weight = PackedWeight::new(weight, outputs, inputs, layout, supported_arithmetic(arithmetic))?;
        Ok(Self { shape: [outputs, inputs], weight: Some(weight), bias, epilogue: Epilogue::Store })
    }

    /// Packs a gated map, `silu(x · gateᵀ) ⊙ (x · upᵀ)`, from gate `[width, inputs]` followed by up.
    pub(crate) fn gated(
        gate_up: &[f32],
        [width, inputs]: [usize; 2],
        bias: Option<Vec<f32>>,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let (gate, up) = gate_up.split_at(gate_up.len() / 2);
        let weight = PackedWeight::gate_up(
            gate,
            up,
            width,
            inputs,
            Layout::Outputs { stride: inputs },
            supported_arithmetic(arithmetic),
        )?;
        Ok(Self { shape: [width, inputs], weight: Some(weight), bias, epilogue: Epilogue::SwiGlu })
    }

    /// Creates a map whose weight is not read. `bias` may be an empty vector, if the map has a bias.
    pub(crate) fn unread(shape: [usize; 2], bias: Option<Vec<f32>>) -> Self {
        Self { shape, weight: None, bias, epilogue: Epilogue::Store }
    }

    /// Adds GELU (tanh approximation) as the epilogue.
    pub(crate) fn with_gelu(self) -> Self {
        Self { epilogue: Epilogue::Gelu, ..self }
    }

    pub(crate) fn outputs(&self) -> usize {
        self.shape[0]
    }

    pub(crate) fn inputs(&self) -> usize {
        self.shape[1]
    }

    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The arithmetic of its products on this machine.
    pub(crate) fn arithmetic(&self) -> Arithmetic {
        self.weight.as_ref().map_or(Arithmetic::F32, PackedWeight::arithmetic)
    }

    /// Computes the map into `out`, on the threads of the scratch.
    pub(crate) fn forward(&self, x: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<()> {
        self.run(x, out, self.epilogue, scratch.threads(), scratch)
    }

    /// `out += x · weightᵀ + bias`, on the threads of the scratch.
    pub(crate) fn add(&self, x: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<()> {
        self.run(x, out, Epilogue::Add, scratch.threads(), scratch)
    }

    /// Computes the map into `out`, on all threads of the pool.
    pub(crate) fn forward_in_pool(&self, x: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<()> {
        self.run(x, out, self.epilogue, Threads::Pool, scratch)
    }

    fn run(
        &self,
        x: &[f32],
        out: &mut [f32],
        epilogue: Epilogue,
        threads: Threads,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let [outputs, inputs] = self.shape;
        let Some(weight) = &self.weight else {
            let (got, valid) = ("headers only".into(), "weights that were read".into());
            return Err(TeacherError::Input { what: "weights of a product", got, valid });
        };
        let rows = x.len() / inputs;
        let x = Rows { data: x, rows, stride: inputs };
        let out = RowsMut { data: out, rows, stride: outputs };
        Ok(product(x, weight, self.bias.as_deref(), epilogue, out, threads, &mut scratch.memory)?)
    }
}

/// Returns the arithmetic that this machine uses. Where it lacks products of a 16-bit type, weights are rounded to that
/// type and stored in it, and products are f32.
fn supported_arithmetic(arithmetic: Arithmetic) -> Arithmetic {
    match (arithmetic, arithmetic.is_available()) {
        (Arithmetic::F16, false) => Arithmetic::F32OfF16,
        (Arithmetic::Bf16, false) => Arithmetic::F32OfBf16,
        (Arithmetic::Bf16x3, false) => Arithmetic::F32,
        _ => arithmetic,
    }
}
