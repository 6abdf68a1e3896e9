//! The numbers of a net's weights and products.

use std::sync::Arc;

use super::Shape;
use crate::device::{Device, Element, Result};
use crate::error::GpuError;

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
