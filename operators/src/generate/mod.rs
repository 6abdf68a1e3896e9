//! The teacher writes the text (`extract.mode: sequential`), in place of `pack` and `extract`.
//!
//! ```text
//!  documents' tokens ─► prompts: bos and the first tokens of each, numbered ─► generate: token after token ─► rows, as `pack` makes them
//!                       [sequence_id, document_id, prompt]                      x = argmax_k(l_k + ξ_k)       + given, logprob, top-k
//! ```
//!
//! | column | | |
//! |---|---|---|
//! | those of `pack` | | one text a row: bos, prompt, what was written, padding |
//! | `given` | int32 | positions from the start that were given; the others, up to padding, were written |
//! | `logprob`, `topk_…`, other signals, `hidden_states` | as of `extract` | of the teacher's own distribution, whatever was sampled from; given positions are certain |
//!
//! ξ_k = −ln e_k of the generator that the stored noise of other jobs is replayed from (`stillhouse_noise::Sampler`), so nothing of it is
//! stored: Gumbel distillation's sequential extraction (Algorithm 1, with x drawn and not observed). Texts are written in slots, one token
//! of each at a step, over kept keys and values; one that has ended makes room for the next at once ([`Writer`]). What a text becomes does
//! not depend on the others: the logits, and the states of layers, are those of the parallel pass over it, to the bit.
//!
//! Cost per token: all weights once for each step, shared by the slots; attention over what the text has so far; one pass over V for the
//! noise. Memory: `slots` times the keys and values of `length` tokens, logits `[slots, V]`, and the batches under way, with what the teacher
//! said of their tokens ([`GenerateConfig::rows_at_once`]).

mod config;
mod invariants;
mod prompts;
mod rows;
#[cfg(test)]
mod tests;
mod writer;

use std::sync::Arc;

use arrow::array::RecordBatch;
use stillhouse_noise::Sampling;
use stillhouse_schemas::spec::{Sequential, Stop};
use stillhouse_teacher::{Teacher, TeacherInfo};

use crate::extract::{ExtractConfig, parts};
use crate::operator::{Emit, Meter, Operator, OperatorError, SharedStatistics, SplitContext};
use crate::pack::PackConfig;

pub use prompts::PromptsConfig;
pub use rows::Written;
pub use writer::Writer;

const NAME: &str = "generate";
/// Positions from the start of a row that the teacher was given.
pub const GIVEN: &str = "given";

/// Config of the operator.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateConfig {
    /// The rows: length, special tokens, segments.
    pub pack: PackConfig,
    /// The columns of the teacher.
    pub extract: ExtractConfig,
    /// Ends a text.
    pub eos: u32,
    /// How tokens are chosen.
    pub written: Sequential,
    /// Seed of the noise.
    pub seed: u64,
}

/// How tokens are chosen, as the noise crate has it.
pub fn sampling(written: &Sequential) -> Sampling {
    Sampling { temperature: written.temperature, top_k: written.top_k as usize, top_p: written.top_p }
}

impl GenerateConfig {
    /// Whether a teacher can serve this config.
    ///
    /// # Errors
    /// With a teacher of another vocabulary.
    pub fn check(&self, teacher: &TeacherInfo) -> Result<(), OperatorError> {
        self.extract.check(teacher)
    }

    /// L.
    pub fn length(&self) -> usize {
        self.pack.length
    }

    /// Rows of a batch of prompts, at most.
    pub fn rows_at_once(&self) -> usize {
        self.extract.written_at_once().min(prompts::ROWS)
    }

    /// Batches of prompts that keep all slots at work, the first of which may wait for its last text.
    pub fn batches_at_once(&self) -> usize {
        1 + (self.written.slots as usize).div_ceil(self.rows_at_once())
    }

    fn ends(&self, token: u32) -> bool {
        self.written.stop == Stop::Eos && token == self.eos
    }

    fn build(&self, context: &SplitContext) -> Result<Generate, OperatorError> {
        let none = || OperatorError::Config { operator: NAME, message: "needs a teacher".into() };
        let teacher = context.teacher.clone().ok_or_else(none)?;
        self.check(teacher.info())?;
        let (statistics, meter) = (context.statistics.clone(), Arc::clone(&context.meter));
        Ok(Generate { config: Arc::new(self.clone()), teacher, statistics, meter })
    }
}

/// The operator, for engines in which nothing else owns the teacher: a batch at a time.
struct Generate {
    config: Arc<GenerateConfig>,
    teacher: Arc<dyn Teacher>,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

impl Operator for Generate {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut writer = Writer::new(self.teacher.as_ref(), Arc::clone(&self.config))?;
        for part in parts(batch, self.config.rows_at_once()) {
            writer.push((), &part, Arc::clone(&self.meter)).map_err(|((), error)| error)?;
            while !writer.is_idle() {
                for ((), written) in writer.step() {
                    let Written { batch, statistics, .. } = written?;
                    self.statistics.lock().add(&statistics);
                    emit(batch)?;
                }
            }
        }
        Ok(())
    }
}
