//! Extracts values from a slice of logits on the device that holds the logits.

use std::sync::Arc;

use stillhouse_noise::{Extract, ExtractedColumns, ExtractionSpec, ObservedTokens, RowExtractor};
use stillhouse_teacher::stillhouse_gpu::extract::{ExtractRequest, Extractor};
use stillhouse_teacher::stillhouse_gpu::{Device, GpuError};
use stillhouse_teacher::{DeviceLogits, Logits, TeacherError};

use super::noise_error;
use crate::operator::OperatorError;

/// Caches a device's extractors between slices, while the extraction stays the same.
#[derive(Default)]
pub struct Workspace {
    host: Option<RowExtractor>,
    device: Option<DeviceExtractor>,
}

/// An extractor on a device, and the parameters that it was built for.
struct DeviceExtractor {
    device: Arc<dyn Device>,
    extraction: ExtractionSpec,
    rows: usize,
    extractor: Extractor,
}

impl Workspace {
    pub(super) fn extract(
        &mut self,
        extraction: &ExtractionSpec,
        logits: &Logits,
        observed: &ObservedTokens<'_>,
    ) -> Result<ExtractedColumns, OperatorError> {
        match logits {
            Logits::Host(logits) => {
                let extractor = match self.host.take().filter(|extractor| extractor.spec() == extraction) {
                    Some(extractor) => extractor,
                    None => RowExtractor::new(extraction.clone()).map_err(noise_error)?,
                };
                self.host.insert(extractor).extract(logits, observed).map_err(noise_error)
            }
            Logits::Device(logits) => {
                let fits = |cached: &DeviceExtractor| {
                    cached.extraction == *extraction
                        && Arc::ptr_eq(&cached.device, logits.device())
                        && observed.tokens.len() <= cached.rows
                };
                let cached = match self.device.take().filter(fits) {
                    Some(cached) => cached,
                    None => DeviceExtractor::new(extraction, logits).map_err(device_error)?,
                };
                // SAFETY: the results are copied back before this returns
                let slice = unsafe { logits.slice() }.ok_or_else(|| OperatorError::Config {
                    operator: super::NAME,
                    message: "logits that were never computed: a bug in this program".into(),
                })?;
                self.device.insert(cached).extractor.extract(&slice, observed).map_err(device_error)
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

impl DeviceExtractor {
    fn new(extraction: &ExtractionSpec, logits: &DeviceLogits) -> Result<Self, GpuError> {
        let (rows, device) = (logits.capacity_rows(), logits.device());
        let extractor = Extractor::new(device, ExtractRequest::with_stride(extraction, logits.stride()), rows)?;
        Ok(Self { device: Arc::clone(device), extraction: extraction.clone(), rows, extractor })
    }
}
