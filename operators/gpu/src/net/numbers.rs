//! The numbers of a net's weights and products.

use std::sync::Arc;

use super::Shape;
use crate::device::{Device, Element, Result};
use crate::error::GpuError;

const FEWEST_ROWS: usize = 272;
const ROWS_OF_FP8: usize = 16;

/// What weights and products are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// All of one type.
    Of(Element),
    /// The layers' products of e4m3: weights with a scale for each output, what they are multiplied with with one for each token. Everything
    /// else, the head too, is bfloat16 with sums in f32. Widths have to be multiples of 16, and few devices have such products
    /// ([`Device::lacks_fp8`]).
    Fp8,
}

impl From<Element> for Numbers {
    fn from(element: Element) -> Self {
        Self::Of(element)
    }
}

impl Numbers {
    /// The type of activations, and of weights that are not multiplied in 8 bits.
    #[must_use]
    pub const fn element(self) -> Element {
        match self {
            Self::Of(element) => element,
            Self::Fp8 => Element::Bf16,
        }
    }

    /// As a job file has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Of(element) => element.name(),
            Self::Fp8 => "fp8",
        }
    }

    /// Rows of a product over so many tokens: cuBLASLt is known to have no algorithm for few rows of e4m3 with scales of their own (none up to
    /// 256 rows of 9,216 on an H100), and wants multiples of 16. What is in the rows that are no token's is nobody's.
    #[must_use]
    pub const fn rows(self, tokens: usize) -> usize {
        match self {
            Self::Of(_) => tokens,
            Self::Fp8 if tokens < FEWEST_ROWS => FEWEST_ROWS,
            Self::Fp8 => tokens.next_multiple_of(ROWS_OF_FP8),
        }
    }

    /// That a net of this shape can be computed in them on a device.
    pub(super) fn check(self, device: &Arc<dyn Device>, shape: &Shape) -> Result<()> {
        shape.check()?;
        if self != Self::Fp8 {
            return Ok(());
        }
        if let Some(message) = device.lacks_fp8() {
            let (got, valid) = (format!("{}, but {message}", device.name()), "f32, bf16, f16".into());
            return Err(GpuError::Input { what: "products in fp8", got, valid });
        }
        shape.check_fp8()
    }
}
