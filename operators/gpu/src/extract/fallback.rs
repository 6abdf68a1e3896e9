//! Computes the rows that the kernels leave to the CPU, with the CPU code, so that results and errors are the CPU's.

use std::sync::Arc;

use half::f16;
use stillhouse_noise::{
    Correction, DrawKey, Encoder, LoadedRow, NoiseError, NoiseStream, Softmax, dense_noise_of_loaded, round_dense,
};

use super::slots::{CorrectionLists, SliceResults};
use super::{Dense, ExtractRequest, Extracted, Noise};
use crate::device::{Device, Pinned, Result, Stream};

#[derive(Debug)]
pub(super) struct Fallback {
    device: Arc<dyn Device>,
    row_memory: Pinned,
    logits: Vec<f32>,
    encoder: Option<Encoder>,
    softmax: Softmax,
    xi: Vec<f32>,
    corrections: Vec<Correction>,
}

impl Fallback {
    pub fn new(device: &Arc<dyn Device>, request: &ExtractRequest) -> Result<Self> {
        let vocab = request.vocab;
        let encoder = match request.noise {
            Some(Noise::Replay { tolerance, value_type, condition }) => {
                Some(Encoder::new(vocab, tolerance, value_type)?.with_condition(condition))
            }
            _ => None,
        };
        let dense = matches!(request.noise, Some(Noise::Dense { .. }));
        Ok(Self {
            device: Arc::clone(device),
            row_memory: Pinned::new(device, vocab * size_of::<f32>())?,
            logits: vec![0.0; vocab],
            encoder,
            softmax: Softmax::new(vocab)?,
            xi: vec![0.0; if dense { vocab } else { 0 }],
            corrections: Vec::new(),
        })
    }

    /// Recomputes a row, and writes it to the columns and lists.
    ///
    /// # Safety
    /// `pointer` is the device address of a row of logits.
    pub unsafe fn recompute_row(
        &mut self,
        request: &ExtractRequest,
        pointer: u64,
        results: &SliceResults<'_>,
        row: usize,
        out: &mut Extracted,
        lists: Option<&mut CorrectionLists>,
    ) -> Result<()> {
        let bytes = self.row_memory.len();
        // SAFETY: row and target have this length; the copy is waited for
        unsafe { self.device.copy_to_host(Stream::Extract, self.row_memory.as_mut_ptr(), pointer, bytes)? };
        self.device.wait(self.device.record(Stream::Extract)?)?;
        for (to, from) in self.logits.iter_mut().zip(self.row_memory.as_chunks::<4>().0) {
            *to = f32::from_ne_bytes(*from);
        }
        let token = results.token(row);
        let stream = |key| NoiseStream::new(key, results.sequence_id(row), results.position(row));
        let any_stream = stream(DrawKey::new(0, 0));
        self.softmax.load(&self.logits).map_err(|e| e.at(&any_stream))?;
        let Some(&logit) = self.logits.get(token as usize) else {
            let (sequence_id, position) = (any_stream.sequence_id, any_stream.position);
            return Err(NoiseError::Token { sequence_id, position, token, vocab: request.vocab }.into());
        };
        out.logprob[row] = self.softmax.stored_logprob(logit);
        if let (Some(lists), Some(encoder)) = (lists, &mut self.encoder) {
            encoder.load(&self.logits, &any_stream)?;
            for &key in &request.keys {
                self.corrections.clear();
                let encoded = encoder.encode_loaded(&self.logits, token, &stream(key), &mut self.corrections)?;
                lists.push_draw(&self.corrections, encoded.total_variation);
            }
            lists.end_row(out.logprob[row]);
        }
        if let (Some(Noise::Dense { value_type, condition }), Some(dense)) = (request.noise, &mut out.dense) {
            for (draw, &key) in request.keys.iter().enumerate() {
                let (xi, stream) = (&mut self.xi, stream(key));
                dense_noise_of_loaded(&self.softmax, &self.logits, token, &stream, xi)?;
                round_dense(&self.logits, token, value_type, condition, &stream, xi)?;
                write_dense(dense, (row * request.keys.len() + draw) * request.vocab, xi);
            }
        }
        if let Some(signals) = out.signals.get_mut(row) {
            let (sequence_id, position) = (any_stream.sequence_id, any_stream.position);
            *signals = request.signals.compute(&LoadedRow::new(&self.softmax, &self.logits, sequence_id, position));
        }
        Ok(())
    }
}

fn write_dense(dense: &mut Dense, first: usize, xi: &[f32]) {
    match dense {
        Dense::F16(values) => {
            for (to, from) in values[first..].iter_mut().zip(xi) {
                *to = f16::from_f32(*from);
            }
        }
        Dense::F32(values) => values[first..first + xi.len()].copy_from_slice(xi),
    }
}
