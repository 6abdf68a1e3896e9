//! Hidden states of layers for the host: copies of the residual stream, in the order of the pass, through pinned
//! memory.
//!
//! Cost: a copy of tokens · H elements per kept layer. The host waits once per pass.

use std::sync::Arc;

use half::{bf16, f16};

use crate::device::{Device, Element, Matrix, Pinned, Result, Stream};

/// The hidden states that a pass keeps; none if `layers` is empty.
#[derive(Debug, Default)]
pub(super) struct Kept<'a> {
    pub layers: &'a [usize],
    /// `[layers, tokens, H]` elements of the pass.
    pub memory: Option<Pinned>,
}

impl<'a> Kept<'a> {
    /// Reserves `bytes` bytes per layer; reuses `memory`, an earlier pass's, if it is large enough.
    pub fn new(device: &Arc<dyn Device>, layers: &'a [usize], bytes: usize, memory: Option<Pinned>) -> Result<Self> {
        let bytes = layers.len() * bytes;
        let memory = match memory.filter(|memory| memory.len() >= bytes) {
            None if bytes > 0 => Some(Pinned::new(device, bytes)?),
            memory => memory,
        };
        Ok(Self { layers, memory })
    }

    /// Copies the states of a layer if it is one of the kept layers. The copy is complete once [`Stream::Pass`] has
    /// reached this point.
    pub fn take(&mut self, device: &dyn Device, layer: usize, states: Matrix) -> Result<()> {
        let bytes = states.rows * states.columns * states.element.bytes();
        let Some(memory) = &mut self.memory else { return Ok(()) };
        for place in self.layers.iter().enumerate().filter(|(_, kept)| **kept == layer).map(|(place, _)| place) {
            let to = &mut memory[place * bytes..(place + 1) * bytes];
            // SAFETY: both have `bytes` bytes; the host waits for the stream before it reads or frees the memory
            unsafe { device.copy_out(Stream::Pass, to.as_mut_ptr(), states.pointer, bytes)? };
        }
        Ok(())
    }

    /// Returns all kept states as f32 `[tokens, layers, H]`. Call it after waiting for the stream.
    pub fn widened(&self, element: Element, tokens: usize, width: usize) -> Vec<f32> {
        let (layers, bytes) = (self.layers.len(), tokens * width * element.bytes());
        let mut states = vec![0.0; tokens * layers * width];
        let all = self.memory.iter().flat_map(|memory| memory.chunks_exact(bytes.max(1))).take(layers);
        for (place, layer) in all.enumerate() {
            let rows = states.chunks_exact_mut(layers * width).map(|row| &mut row[place * width..(place + 1) * width]);
            for (to, from) in rows.zip(layer.chunks_exact(width * element.bytes())) {
                let values = to.iter_mut().zip(from.chunks_exact(element.bytes()));
                values.for_each(|(to, from)| *to = widened(element, from));
            }
        }
        states
    }
}

fn widened(element: Element, bytes: &[u8]) -> f32 {
    match (element, bytes) {
        (Element::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (Element::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        (Element::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        // unreachable: every chunk has the size of an element
        _ => f32::NAN,
    }
}
