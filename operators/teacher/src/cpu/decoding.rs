//! Decoding slots of a teacher on a CPU: the KV cache of each sequence, and steps over several of them.

use super::{CpuTeacher, check_layers};
use crate::contract::{Decoding, StepOutput};
use crate::error::{Result, TeacherError};
use crate::model::check_decodable;
use crate::net::{DecodeBuffers, SequenceKvCache, StateCapture};

/// Slots of sequences that are decoded incrementally.
pub(crate) struct CpuDecoding<'a> {
    teacher: &'a CpuTeacher,
    length: usize,
    /// Layers whose states each step returns.
    layers: Vec<usize>,
    slots: Vec<SequenceKvCache>,
    work: DecodeBuffers,
    states: Vec<f32>,
    rows: Vec<u32>,
}

fn invalid<T>(what: &'static str, got: impl ToString, valid: String) -> Result<T> {
    Err(TeacherError::Input { what, got: got.to_string(), valid })
}

impl<'a> CpuDecoding<'a> {
    pub(crate) fn new(teacher: &'a CpuTeacher, slots: usize, length: usize, layers: &[usize]) -> Result<Self> {
        let max_length = teacher.info.max_positions;
        if length == 0 || length > max_length {
            return invalid("sequence length", length, format!("1 to {max_length}"));
        }
        if slots == 0 {
            return invalid("number of slots", slots, "at least 1".into());
        }
        check_decodable(&teacher.net, length)?;
        check_layers(&teacher.info, layers)?;
        let slots = (0..slots).map(|_| SequenceKvCache::new(&teacher.net, length)).collect::<Result<_>>()?;
        let (layers, work) = (layers.to_vec(), DecodeBuffers::default());
        Ok(Self { teacher, length, layers, slots, work, states: Vec::new(), rows: Vec::new() })
    }

    fn check(&self, inputs: &[(usize, &[u32])]) -> Result<()> {
        if !inputs.is_sorted_by(|a, b| a.0 < b.0) {
            let got: Vec<usize> = inputs.iter().map(|(slot, _)| *slot).collect();
            return invalid("slots of a step", format!("{got:?}"), "slots that ascend".into());
        }
        let vocab = self.teacher.info.vocab_size;
        for (slot, tokens) in inputs {
            let Some(cache) = self.slots.get(*slot) else {
                return invalid("slot of a step", slot, format!("below {}", self.slots.len()));
            };
            let remaining = self.length - cache.length();
            if tokens.is_empty() || tokens.len() > remaining {
                return invalid(
                    "number of tokens of a slot",
                    tokens.len(),
                    format!("1 to {remaining}, the remaining positions"),
                );
            }
            if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
                return invalid("token", token, format!("0 to {}", vocab - 1));
            }
        }
        Ok(())
    }
}

impl Decoding for CpuDecoding<'_> {
    fn bytes(&self) -> usize {
        self.slots.iter().map(SequenceKvCache::bytes).sum()
    }

    fn clear(&mut self, slot: usize) {
        if let Some(cache) = self.slots.get_mut(slot) {
            cache.clear();
        }
    }

    fn step(&mut self, inputs: &[(usize, &[u32])], out: &mut StepOutput) -> Result<()> {
        self.check(inputs)?;
        let (count, width) = (inputs.len(), self.teacher.info.hidden_size);
        self.states.resize(count * width, 0.0);
        out.states.resize(count * self.layers.len() * width, 0.0);
        self.rows.clear();
        self.rows.extend(0..count as u32);
        // Enters the thread pool once, rather than for each of a step's many small products.
        rayon::scope(|_| {
            let capture = StateCapture { layers: &self.layers, out: &mut out.states };
            self.teacher.net.decode_step(&mut self.slots, inputs, &mut self.work, &mut self.states, capture)?;
            self.teacher.logits_of(&self.states, &self.rows, &mut out.logits)
        })
    }
}
