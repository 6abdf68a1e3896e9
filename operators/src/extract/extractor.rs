//! Who makes something of a slice of logits: the one that is where the logits are.

use std::sync::Arc;

use stillhouse_noise::{Extract, Extracted, Extraction, NoiseForm, Observed, RowExtractor};
use stillhouse_teacher::stillhouse_gpu::extract::{Asked, Dense, Extractor, Noise, Positions};
use stillhouse_teacher::stillhouse_gpu::{Device, GpuError};
use stillhouse_teacher::{DeviceLogits, Logits, TeacherError};

use super::noise_error;
use crate::operator::OperatorError;

/// Keeps the extractors of a device between slices, for as long as the same is asked of them.
#[derive(Default)]
pub struct Workspace {
    host: Option<RowExtractor>,
    device: Option<OnDevice>,
}

/// An extractor with what it was made for.
struct OnDevice {
    device: Arc<dyn Device>,
    asked: Extraction,
    rows: usize,
    extractor: Extractor,
}

impl Workspace {
    pub(super) fn extract(
        &mut self,
        asked: &Extraction,
        logits: &Logits,
        observed: &Observed<'_>,
    ) -> Result<Extracted, OperatorError> {
        match logits {
            Logits::Host(logits) => {
                let extractor = match self.host.take().filter(|extractor| extractor.asked() == asked) {
                    Some(extractor) => extractor,
                    None => RowExtractor::new(asked.clone()).map_err(noise_error)?,
                };
                self.host.insert(extractor).extract(logits, observed).map_err(noise_error)
            }
            Logits::Device(logits) => {
                let fits = |kept: &OnDevice| {
                    kept.asked == *asked
                        && Arc::ptr_eq(&kept.device, logits.device())
                        && observed.tokens.len() <= kept.rows
                };
                let kept = match self.device.take().filter(fits) {
                    Some(kept) => kept,
                    None => OnDevice::new(asked, logits).map_err(device_error)?,
                };
                self.device.insert(kept).extract(logits, observed).map_err(device_error)
            }
        }
    }
}

fn device_error(error: GpuError) -> OperatorError {
    match error {
        GpuError::Noise(error) => noise_error(error),
        other => OperatorError::Teacher(TeacherError::from(other)),
    }
}

impl OnDevice {
    fn new(asked: &Extraction, logits: &DeviceLogits) -> Result<Self, GpuError> {
        let noise = asked.noise.map(|form| match form {
            NoiseForm::Replay { tolerance, value_type, condition } => {
                Noise::Replay { tolerance, value_type, condition }
            }
            NoiseForm::Dense { value_type, condition } => Noise::Dense { value_type, condition },
        });
        let (vocab, rows, device) = (asked.vocab, logits.room(asked.vocab), logits.device());
        let wanted = Asked { vocab, stride: vocab, keys: asked.keys.clone(), noise, topk: asked.topk };
        let extractor = Extractor::new(device, wanted, rows)?;
        Ok(Self { device: Arc::clone(device), asked: asked.clone(), rows, extractor })
    }

    fn extract(&mut self, logits: &DeviceLogits, observed: &Observed<'_>) -> Result<Extracted, GpuError> {
        let Observed { tokens, positions, sequence_ids } = *observed;
        logits.wait()?;
        // SAFETY: the logits are of so many rows, and nobody writes to them before this returns
        let pending =
            unsafe { self.extractor.begin(logits.pointer(), &Positions { tokens, positions, sequence_ids })? };
        let found = self.extractor.collect(pending)?;
        let dense = found.dense.map(|dense| match dense {
            Dense::F16(values) => values.into_iter().map(half::f16::to_f32).collect(),
            Dense::F32(values) => values,
        });
        let stillhouse_teacher::stillhouse_gpu::extract::Extracted { logprob, replay, topk, fallbacks, .. } = found;
        Ok(Extracted { logprob, replay, dense, topk, fallbacks })
    }
}
