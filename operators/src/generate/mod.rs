//! The operators that let the teacher write the text (`extract.mode: sequential`), in place of `pack` and `extract`.
//!
//! ```text
//!  documents' tokens ─► prompts: bos and the first tokens of each, numbered ─► generate: token by token ─► rows, as of `pack`
//!                       [sequence_id, document_id, prompt]                      x = argmax_k(l_k + ξ_k)     + given, logprob, top-k
//! ```
//!
//! | column | type | content |
//! |---|---|---|
//! | those of `pack` | | one text per row: bos, prompt, generated text, padding |
//! | `given` | int32 | number of given positions at the start; the teacher wrote the others, up to padding |
//! | `logprob`, `topk_…`, other signals, `hidden_states` | as of `extract` | of the teacher's own distribution; given positions are certain |
//!
//! ξ_k = −ln e_k comes from the generator that replays the stored noise of other jobs (`stillhouse_noise::Sampler`), so
//! none of it is stored. This is Gumbel distillation's sequential extraction (Algorithm 1, with x drawn instead of
//! observed). [`BatchedDecoder`] runs texts in slots, one token per step, over a KV cache. As soon as a text ends, its
//! slot takes the next one. A text does not depend on the others: its logits and hidden states equal those of the
//! parallel pass over it, bit for bit. Signals describe the teacher's own distribution, even if the job samples from
//! another one (temperature, top-k, top-p).
//!
//! Cost per token: all weights once per step, shared by the slots; attention over the text so far; one pass over V for
//! the noise. Memory: the KV cache of `slots` texts of `length` tokens, logits `[slots, V]`, and the batches in
//! progress with the signals of their tokens ([`GenerateConfig::max_rows_per_part`]).

mod batched_decoder;
mod config;
mod invariants;
mod prompts;
mod rows;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use arrow::array::RecordBatch;
use stillhouse_noise::Sampling;
use stillhouse_schemas::spec::{Sequential, Stop};
use stillhouse_teacher::{Teacher, TeacherInfo};

use crate::extract::{ExtractConfig, parts};
use crate::operator::{Emit, Meter, Operator, OperatorError, SharedStatistics, SplitContext};
use crate::pack::PackConfig;

pub use batched_decoder::BatchedDecoder;
pub use prompts::PromptsConfig;
pub use rows::GeneratedBatch;

const NAME: &str = "generate";
/// Name of the column with the number of positions at the start of a row that the teacher was given.
pub const GIVEN: &str = "given";

/// Configuration of the operator.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateConfig {
    /// Settings of the rows: length, special tokens, segments.
    pub pack: PackConfig,
    /// Settings of the teacher's columns.
    pub extract: ExtractConfig,
    /// Token that ends a text.
    pub eos: u32,
    /// How to choose tokens.
    pub sequential: Sequential,
    /// Seed of the noise.
    pub seed: u64,
}

/// Returns the sampling settings in the noise crate's form.
pub fn sampling(sequential: &Sequential) -> Sampling {
    Sampling { temperature: sequential.temperature, top_k: sequential.top_k as usize, top_p: sequential.top_p }
}

impl GenerateConfig {
    /// Checks that this teacher can serve this config.
    ///
    /// # Errors
    /// Fails where [`ExtractConfig::check`] does, for example for a teacher of another vocabulary size.
    pub fn check(&self, teacher: &TeacherInfo) -> Result<(), OperatorError> {
        self.extract.check(teacher)
    }

    /// Row length L.
    pub fn length(&self) -> usize {
        self.pack.length
    }

    /// Returns the largest number of rows in a batch of prompts.
    pub fn max_rows_per_part(&self) -> usize {
        self.extract.max_generated_rows().min(prompts::ROWS_PER_BATCH)
    }

    /// Returns the number of batches of prompts that keeps all slots busy, even while the first batch waits for its
    /// last text.
    pub fn max_batches_in_flight(&self) -> usize {
        1 + (self.sequential.slots as usize).div_ceil(self.max_rows_per_part())
    }

    fn is_end(&self, token: u32) -> bool {
        self.sequential.stop == Stop::Eos && token == self.eos
    }

    fn build(&self, context: &SplitContext) -> Result<Generate, OperatorError> {
        let none = || OperatorError::Config { operator: NAME, message: "needs a teacher".into() };
        let teacher = context.teacher.clone().ok_or_else(none)?;
        self.check(teacher.info())?;
        let (statistics, meter) = (context.statistics.clone(), Arc::clone(&context.meter));
        Ok(Generate { config: Arc::new(self.clone()), teacher, statistics, meter })
    }
}

/// The operator for engines in which it runs the teacher itself: one batch at a time.
struct Generate {
    config: Arc<GenerateConfig>,
    teacher: Arc<dyn Teacher>,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

impl Operator for Generate {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut decoder = BatchedDecoder::new(self.teacher.as_ref(), Arc::clone(&self.config))?;
        for part in parts(batch, self.config.max_rows_per_part()) {
            decoder.push((), &part, Arc::clone(&self.meter)).map_err(|((), error)| error)?;
            while !decoder.is_idle() {
                for ((), written) in decoder.step() {
                    let GeneratedBatch { batch, statistics, .. } = written?;
                    self.statistics.lock().add(&statistics);
                    emit(batch)?;
                }
            }
        }
        Ok(())
    }
}
