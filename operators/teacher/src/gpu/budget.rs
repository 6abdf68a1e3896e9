//! The memory of a teacher on a device, and the number of tokens in its passes.
//!
//! ```text
//!   free memory ─► tokens of a pass: all, a half, a quarter … ─► load, warm up ─► if out of memory: halve once
//!   tokens of an earlier run ─► exactly these ────────────────► load, warm up ─► if out of memory: error with needed and free bytes
//! ```
//!
//! The contents of a pass affect the last bits of logits. All of this is therefore decided before the first logits are
//! used, and stored with the plan.

use std::sync::Arc;

use stillhouse_gpu::extract::{ExtractRequest, Extractor, Positions};
use stillhouse_gpu::net::{Net, NumberFormat, STAGES_BYTES, Shape};
use stillhouse_gpu::{Device, GpuError, Memory, Stream, logits_stride};
use stillhouse_noise::ExtractionSpec;

use crate::contract::DeviceLogits;
use crate::error::{Result, TeacherError};

/// Share of free memory that is left for other processes and for fragmentation.
const SPARE_SHARE: f64 = 0.05;
/// Slices of a job: one receives logits while the other is extracted.
const SLICES: usize = 2;

/// What needs memory on the device.
pub(super) struct Budget<'a> {
    pub device: &'a Arc<dyn Device>,
    pub shape: &'a Shape,
    pub numbers: NumberFormat,
    pub slice_rows: usize,
    /// The extraction that runs on slices, if known.
    pub extraction: Option<&'a ExtractionSpec>,
}

/// A net with memory for passes of `pass_tokens` tokens.
pub(super) struct FittedNet {
    pub net: Net,
    pub pass_tokens: usize,
    /// Set if passes were halved because less memory was available than the device reported.
    pub warning: Option<String>,
}

impl Budget<'_> {
    /// Makes the net for passes of as many tokens as fit: `wanted`, or a half, a quarter … of it, and at min_tokens `min_tokens`.
    /// For a resumed run, the number is exactly that of the earlier run.
    ///
    /// # Errors
    /// If the memory is too small, with the required and the free bytes.
    pub fn fit(
        &self,
        [wanted, min_tokens]: [usize; 2],
        earlier: Option<usize>,
        mut make: impl FnMut(usize) -> Result<Net>,
    ) -> Result<FittedNet> {
        let pass_tokens = match earlier {
            Some(tokens) => self.check_earlier(tokens)?,
            None => self.largest_fitting(wanted, min_tokens)?,
        };
        let short = match self.load_and_warm_up(pass_tokens, &mut make) {
            Ok(net) => return Ok(FittedNet { net, pass_tokens, warning: None }),
            Err(TeacherError::Gpu(short @ GpuError::Memory { .. })) => short,
            Err(other) => return Err(other),
        };
        if earlier.is_some() {
            return Err(self.memory_error(&short, pass_tokens, RESUME_REMEDY));
        }
        if pass_tokens == min_tokens {
            return Err(self.memory_error(&short, pass_tokens, FRESH_REMEDY));
        }
        let fewer = (pass_tokens / 2).max(min_tokens);
        let net = self.load_and_warm_up(fewer, &mut make).map_err(|error| match error {
            TeacherError::Gpu(short @ GpuError::Memory { .. }) => self.memory_error(&short, fewer, FRESH_REMEDY),
            other => other,
        })?;
        let warning = format!("{short}, with passes of {pass_tokens} tokens; they have {fewer} tokens instead");
        Ok(FittedNet { net, pass_tokens: fewer, warning: Some(warning) })
    }

    /// Returns the number of tokens in a pass that fits the memory that the device reports as free.
    fn largest_fitting(&self, mut tokens: usize, min_tokens: usize) -> Result<usize> {
        let Memory { free, total } = self.device.memory()?;
        let usable = (free as f64 * (1.0 - SPARE_SHARE)) as u64;
        loop {
            let bytes = self.bytes(tokens);
            if bytes <= usable {
                return Ok(tokens);
            }
            if tokens == min_tokens {
                let short = GpuError::Memory { device: self.device.name().into(), bytes, free, total };
                return Err(self.memory_error(&short, tokens, FRESH_REMEDY));
            }
            tokens = (tokens / 2).max(min_tokens);
        }
    }

    /// Checks that passes of an earlier run's size fit, without the spare share, which that run did not leave free
    /// either.
    fn check_earlier(&self, tokens: usize) -> Result<usize> {
        let (Memory { free, total }, bytes) = (self.device.memory()?, self.bytes(tokens));
        if bytes <= free {
            return Ok(tokens);
        }
        let short = GpuError::Memory { device: self.device.name().into(), bytes, free, total };
        Err(self.memory_error(&short, tokens, RESUME_REMEDY))
    }

    fn weight_bytes(&self) -> u64 {
        self.shape.weight_bytes(self.numbers)
    }

    fn pass_bytes(&self, tokens: usize) -> u64 {
        self.shape.workspace_bytes(self.numbers, tokens)
    }

    /// Bytes of two slices and the extraction's buffers, or of the staging buffers for loading weights, which are freed
    /// before the slices are allocated.
    fn logits_bytes(&self) -> u64 {
        let slices = (SLICES * self.slice_rows * logits_stride(self.shape.vocab) * size_of::<f32>()) as u64;
        let logits =
            slices + self.extraction_request().map_or(slices, |request| Extractor::bytes(&request, self.slice_rows));
        logits.max(STAGES_BYTES as u64 + self.shape.loading_bytes(self.numbers))
    }

    fn extraction_request(&self) -> Option<ExtractRequest> {
        self.extraction.map(|extraction| ExtractRequest::with_stride(extraction, logits_stride(self.shape.vocab)))
    }

    fn bytes(&self, tokens: usize) -> u64 {
        self.weight_bytes() + self.pass_bytes(tokens) + self.logits_bytes()
    }

    fn memory_error(&self, short: &GpuError, tokens: usize, valid: &str) -> TeacherError {
        let (weights, pass, logits) = (self.weight_bytes(), self.pass_bytes(tokens), self.logits_bytes());
        let parts = format!("weights {weights}, a pass over {tokens} tokens {pass}, logits and noise {logits}");
        TeacherError::Device { device: self.device.name().into(), message: format!("{short}: {parts}; valid: {valid}") }
    }

    /// Makes the net and allocates all memory that a job will use on the device, so that a shortage shows before the
    /// first slice.
    fn load_and_warm_up(&self, tokens: usize, make: &mut impl FnMut(usize) -> Result<Net>) -> Result<Net> {
        let mut net = make(tokens)?;
        self.warm_up(&mut net, tokens)?;
        Ok(net)
    }

    /// Runs a pass over this number of tokens, a slice of logits, and the extraction of one of its rows. Libraries and
    /// drivers allocate memory at the first use of a kernel.
    fn warm_up(&self, net: &mut Net, tokens: usize) -> Result<()> {
        let vocab = self.shape.vocab;
        let tokens = self.device.trial_tokens(tokens);
        let logits = (0..SLICES)
            .map(|_| DeviceLogits::new(self.device, self.slice_rows, vocab))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        // Dropped before the logits, because it waits for the kernels that read them.
        let extractor = self
            .extraction_request()
            .map(|request| Extractor::new(self.device, request, self.slice_rows))
            .transpose()?;
        let Some(first) = logits.first() else { return Ok(()) };
        net.hidden(&vec![0; tokens], &run_offsets(tokens, self.shape.positions))?;
        let rows: Vec<u32> = (0..tokens.min(self.slice_rows) as u32).collect();
        // SAFETY: the buffer has the rows of a slice, and nothing else uses it
        unsafe { net.logits_into(&rows, first.pointer(), first.stride())? };
        if let Some(mut extractor) = extractor {
            let observed = Positions { tokens: &[0], positions: &[0], sequence_ids: &[0] };
            // SAFETY: the row stays in place until its results were copied back
            let begun = unsafe { extractor.begin(first.pointer(), &observed)? };
            match extractor.collect(begun) {
                // Logits that are not finite are reported with their position when the job meets them.
                Ok(_) | Err(GpuError::Noise(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.device.wait(self.device.record(Stream::Pass)?)?)
    }
}

/// Returns the offsets of runs, each as long as possible, that together have this number of tokens.
fn run_offsets(tokens: usize, longest: usize) -> Vec<u32> {
    (0..tokens).step_by(longest).chain([tokens]).map(|offset| offset as u32).collect()
}

const FRESH_REMEDY: &str =
    "a smaller type, shorter sequences, fewer draws or corrections in place of dense noise, a device with more memory";
const RESUME_REMEDY: &str = "as much free memory as when the finished splits were computed in passes of this size, or a new run \
                         with --overwrite";

#[cfg(test)]
mod tests {
    use super::run_offsets;

    #[test]
    fn a_rehearsal_has_no_longer_run_than_a_job() {
        assert_eq!(run_offsets(1, 1024), [0, 1]);
        assert_eq!(run_offsets(2048, 1024), [0, 1024, 2048]);
        assert_eq!(run_offsets(2050, 1024), [0, 1024, 2048, 2050]);
    }
}
