//! Weights, packed in the order in which a kernel reads them.
//!
//! ```text
//! weight [outputs, inputs]          panels (for their layout see `kernel`)
//! outputs 0..32                     panel 0
//! outputs 32..64                    panel 1
//! ..
//! gate 0..16 and up 0..16           panel 0 of a gated pair: an epilogue finds both halves in one tile
//! ```

use crate::Arithmetic;
use crate::arithmetic::{Level, with_kernel};
use crate::error::ProductError;
use crate::kernel::Kernel;
use crate::memory::{LINE, Line, as_numbers_mut};
use rayon::prelude::*;

/// Layout of an unpacked weight in memory. Strides are in floats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// `[outputs, inputs]`, as linear layers store it: rows of inputs, `stride` apart.
    Outputs {
        /// From one output's weights to the next; at least `inputs`.
        stride: usize,
    },
    /// `[inputs, outputs]`, as GPT-2's `Conv1D` stores it: rows of outputs, `stride` apart.
    Inputs {
        /// From one input's weights to the next; at least `outputs`.
        stride: usize,
    },
}

/// A weight `[outputs, inputs]`, packed once for the kernel of its arithmetic. Any number of threads may read it.
///
/// It is padded to whole panels and lines, by at most 63 outputs and 63 inputs.
pub struct PackedWeight {
    level: Level,
    arithmetic: Arithmetic,
    outputs: usize,
    inputs: usize,
    gated: bool,
    lines: Vec<Line>,
    panel: usize,
    scales: Vec<f32>,
}

impl std::fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedWeight")
            .field("outputs", &self.outputs)
            .field("inputs", &self.inputs)
            .field("arithmetic", &self.arithmetic)
            .field("level", &self.level.name())
            .field("paired", &self.gated)
            .finish_non_exhaustive()
    }
}

/// A strided matrix `[outputs, inputs]`.
#[derive(Clone, Copy)]
struct Source<'a> {
    data: &'a [f32],
    output: usize,
    input: usize,
}

impl<'a> Source<'a> {
    fn new(data: &'a [f32], outputs: usize, inputs: usize, layout: Layout) -> Result<Self, ProductError> {
        let (rows, columns, stride, output, input) = match layout {
            Layout::Outputs { stride } => (outputs, inputs, stride, stride, 1),
            Layout::Inputs { stride } => (inputs, outputs, stride, 1, stride),
        };
        check_fits("the weight", data.len(), rows, columns, stride)?;
        Ok(Self { data, output, input })
    }

    fn row(self, output: usize, inputs: usize) -> impl Iterator<Item = f32> + Clone + use<'a> {
        self.data[output * self.output..].iter().step_by(self.input).take(inputs).copied()
    }
}

/// Checks that a matrix of rows `stride` apart fits into `floats` floats.
pub(crate) fn check_fits(
    what: &'static str,
    floats: usize,
    rows: usize,
    columns: usize,
    stride: usize,
) -> Result<(), ProductError> {
    if rows == 0 || columns == 0 {
        return Err(ProductError::Empty { what, rows, columns });
    }
    let end = (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(columns));
    if (rows > 1 && stride < columns) || end.is_none_or(|end| end > floats) {
        return Err(ProductError::Memory { what, rows, columns, stride, floats });
    }
    Ok(())
}

impl PackedWeight {
    /// Packs `weight` for products in `arithmetic` on this machine.
    ///
    /// # Errors
    /// Returns [`ProductError`] if this machine does not support the arithmetic, if the weight is larger than its
    /// slice, or if F16 gets a value that is not finite.
    pub fn new(
        weight: &[f32],
        outputs: usize,
        inputs: usize,
        layout: Layout,
        arithmetic: Arithmetic,
    ) -> Result<Self, ProductError> {
        Self::with_level(&[weight], outputs, inputs, layout, arithmetic, Level::best(arithmetic)?)
    }

    /// Packs the two halves of a gated layer, `[width, inputs]` each, for [`crate::Epilogue::SwiGlu`]. They become one
    /// weight of `2 · width` outputs, gate first.
    ///
    /// # Errors
    /// As [`PackedWeight::new`].
    pub fn gate_up(
        gate: &[f32],
        up: &[f32],
        width: usize,
        inputs: usize,
        layout: Layout,
        arithmetic: Arithmetic,
    ) -> Result<Self, ProductError> {
        Self::with_level(&[gate, up], width, inputs, layout, arithmetic, Level::best(arithmetic)?)
    }

    /// Like [`PackedWeight::new`] (one matrix) and [`PackedWeight::gate_up`] (two), but for a given level.
    pub(crate) fn with_level(
        weights: &[&[f32]],
        outputs: usize,
        inputs: usize,
        layout: Layout,
        arithmetic: Arithmetic,
        level: Level,
    ) -> Result<Self, ProductError> {
        let sources =
            weights.iter().map(|data| Source::new(data, outputs, inputs, layout)).collect::<Result<Vec<_>, _>>()?;
        let mut packed = Self {
            level,
            arithmetic,
            outputs: outputs * sources.len(),
            inputs,
            gated: sources.len() == 2,
            lines: Vec::new(),
            panel: 0,
            scales: Vec::new(),
        };
        with_kernel!(level, kernel => packed.fill(kernel, &sources, outputs))?;
        Ok(packed)
    }

    fn fill<K: Kernel>(&mut self, _kernel: K, sources: &[Source<'_>], outputs: usize) -> Result<(), ProductError> {
        let (inputs, share) = (self.inputs, K::OUTPUTS / sources.len());
        let panels = outputs.div_ceil(share);
        let body = inputs.div_ceil(K::INPUTS) * K::INPUTS * K::OUTPUTS * size_of::<K::Weight>() / LINE;
        self.panel = body + K::TRAILER_LINES;
        self.lines = vec![Line::ZERO; panels * self.panel];
        self.scales = if K::SCALED { vec![1.0; panels * K::OUTPUTS] } else { vec![1.0; K::OUTPUTS] };
        let scales_of = if K::SCALED { K::OUTPUTS } else { 0 };
        let fill_panel = |p: usize, panel: &mut [Line], scales: &mut [f32]| {
            for j in 0..K::OUTPUTS {
                let (source, output) = (sources[j / share], p * share + j % share);
                if output >= outputs {
                    continue;
                }
                let row = source.row(output, inputs);
                let mut scale = 1.0;
                if K::SCALED {
                    if !row.clone().all(f32::is_finite) {
                        return Err(ProductError::NotFinite { output, arithmetic: self.arithmetic.name() });
                    }
                    scale = K::scale(row.clone().fold(0.0, |max, w| w.abs().max(max)));
                    scales[j] = scale;
                }
                let body = as_numbers_mut::<K::Weight>(&mut panel[..body]);
                for (k, w) in row.enumerate() {
                    body[(k / K::GROUP * K::OUTPUTS + j) * K::GROUP + k % K::GROUP] = K::encode_weight(w / scale);
                }
            }
            K::finish_panel(panel);
            Ok(())
        };
        if K::SCALED {
            let scales = self.scales.par_chunks_mut(scales_of);
            let panels = self.lines.par_chunks_mut(self.panel);
            panels.zip(scales).enumerate().try_for_each(|(p, (panel, scales))| fill_panel(p, panel, scales))
        } else {
            let panels = self.lines.par_chunks_mut(self.panel);
            panels.enumerate().try_for_each(|(p, panel)| fill_panel(p, panel, &mut []))
        }
    }

    /// Number of outputs; gate and up together for a gated pair.
    #[must_use]
    pub const fn outputs(&self) -> usize {
        self.outputs
    }

    /// Number of inputs.
    #[must_use]
    pub const fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes of memory that the packed weight occupies.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        std::mem::size_of_val(self.lines.as_slice()) + std::mem::size_of_val(self.scales.as_slice())
    }

    /// The arithmetic of its products.
    #[must_use]
    pub const fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    pub(crate) const fn level(&self) -> Level {
        self.level
    }

    pub(crate) const fn is_gated(&self) -> bool {
        self.gated
    }

    /// The lines of panel `p`.
    pub(crate) fn panel(&self, p: usize) -> &[Line] {
        &self.lines[p * self.panel..(p + 1) * self.panel]
    }

    /// The lines of panel `p` and of all panels after it.
    pub(crate) fn panels_from(&self, p: usize) -> &[Line] {
        &self.lines[p * self.panel..]
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.lines.len() / self.panel
    }

    /// The scales of panel p's outputs; all ones for a kernel without scales.
    pub(crate) fn scales<K: Kernel>(&self, p: usize) -> &[f32] {
        let start = if K::SCALED { p * K::OUTPUTS } else { 0 };
        &self.scales[start..start + K::OUTPUTS]
    }
}
