//! Hidden states of layers for the host: copies of the residual stream, in the order of the pass, through pinned
//! memory.
//!
//! Cost: a copy of tokens · H elements per kept layer. The host waits once per pass.

use std::sync::Arc;

use half::{bf16, f16};

use crate::device::{Device, Element, Matrix, Pinned, Result, Stream};

/// The hidden states that a pass keeps; none if `layers` is empty.
#[derive(Debug, Default)]
pub(super) struct HiddenStates<'a> {
    pub layers: &'a [usize],
    /// `[layers, tokens, H]` elements of the pass.
    pub memory: Option<Pinned>,
}

impl<'a> HiddenStates<'a> {
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
    pub fn copy_layer(&mut self, device: &dyn Device, layer: usize, states: Matrix) -> Result<()> {
        let bytes = states.rows * states.columns * states.element.bytes();
        let Some(memory) = &mut self.memory else { return Ok(()) };
        for index in
            self.layers.iter().enumerate().filter(|(_, requested)| **requested == layer).map(|(index, _)| index)
        {
            let to = &mut memory[index * bytes..(index + 1) * bytes];
            // SAFETY: both have `bytes` bytes; the host waits for the stream before it reads or frees the memory
            unsafe { device.copy_to_host(Stream::Pass, to.as_mut_ptr(), states.pointer, bytes)? };
        }
        Ok(())
    }

    /// Returns all kept states as f32 `[tokens, layers, H]`. Call it after waiting for the stream.
    pub fn to_f32(&self, element: Element, tokens: usize, width: usize) -> Vec<f32> {
        let (layers, bytes) = (self.layers.len(), tokens * width * element.bytes());
        let mut states = vec![0.0; tokens * layers * width];
        let all = self.memory.iter().flat_map(|memory| memory.chunks_exact(bytes.max(1))).take(layers);
        for (index, layer) in all.enumerate() {
            let rows = states.chunks_exact_mut(layers * width).map(|row| &mut row[index * width..(index + 1) * width]);
            for (to, from) in rows.zip(layer.chunks_exact(width * element.bytes())) {
                let values = to.iter_mut().zip(from.chunks_exact(element.bytes()));
                values.for_each(|(to, from)| *to = element_to_f32(element, from));
            }
        }
        states
    }
}

fn element_to_f32(element: Element, bytes: &[u8]) -> f32 {
    match (element, bytes) {
        (Element::F32, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
        (Element::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f32(),
        (Element::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f32(),
        // unreachable: every chunk has the size of an element
        _ => f32::NAN,
    }
}
