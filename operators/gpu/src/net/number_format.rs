//! The number formats of a net's weights and matrix products.

use std::sync::Arc;

use super::Shape;
use crate::device::{Device, Element, Result};
use crate::error::GpuError;

const MIN_FP8_ROWS: usize = 272;
const FP8_ROW_MULTIPLE: usize = 16;

/// The number format of weights and products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumberFormat {
    /// Everything in one dtype.
    Dtype(Element),
    /// e4m3 products in the layers: one scale per output of a weight, and one per token for the activations.
    ///
    /// Everything else, including the LM head, is bfloat16 with f32 sums. Widths must be multiples of 16, and few
    /// devices support such products ([`Device::fp8_unsupported_reason`]).
    Fp8,
}

impl From<Element> for NumberFormat {
    fn from(element: Element) -> Self {
        Self::Dtype(element)
    }
}

impl NumberFormat {
    /// The dtype of activations, and of weights that are not multiplied in 8 bits.
    #[must_use]
    pub const fn element(self) -> Element {
        match self {
            Self::Dtype(element) => element,
            Self::Fp8 => Element::Bf16,
        }
    }

    /// The name in a job file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dtype(element) => element.name(),
            Self::Fp8 => "fp8",
        }
    }

    /// The number of rows of a product over `tokens` tokens.
    ///
    /// cuBLASLt requires multiples of 16 in FP8. It has no algorithm for few rows of e4m3 with a scale per row (none up
    /// to 256 rows of 9,216 on an H100), so there are at least 272. The contents of the padding rows are undefined, and
    /// nothing reads them.
    #[must_use]
    pub const fn padded_rows(self, tokens: usize) -> usize {
        match self {
            Self::Dtype(_) => tokens,
            Self::Fp8 if tokens < MIN_FP8_ROWS => MIN_FP8_ROWS,
            Self::Fp8 => tokens.next_multiple_of(FP8_ROW_MULTIPLE),
        }
    }

    /// Checks that the device can compute a net of this shape in this number format.
    pub(super) fn check(self, device: &Arc<dyn Device>, shape: &Shape) -> Result<()> {
        shape.check()?;
        if self != Self::Fp8 {
            return Ok(());
        }
        if let Some(message) = device.fp8_unsupported_reason() {
            let (got, valid) = (format!("{}, but {message}", device.name()), "f32, bf16, f16".into());
            return Err(GpuError::Input { what: "products in fp8", got, valid });
        }
        shape.check_fp8()
    }
}
