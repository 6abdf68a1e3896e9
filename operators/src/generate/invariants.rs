//! Checks of the rows that the teacher wrote, besides those of all packed rows.

use arrow::array::{Float32Array, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_schemas::columns;
use stillhouse_schemas::spec::Stop;

use super::GenerateConfig;
use super::config::given_column;
use crate::extract::{StoredSignals, StoredStates, sequences};
use crate::invariants::Violation;
use crate::rows::ListRows;

/// The stored signals and hidden states of a batch, besides log-probabilities.
struct StoredValues {
    /// Signals, and the rows whose lists do not match; `extract` reports those rows.
    signals: (StoredSignals, Vec<Violation>),
    states: Option<StoredStates>,
}

impl StoredValues {
    fn read(config: &GenerateConfig, batch: &RecordBatch) -> Result<Self, ArrowError> {
        let (signals, hidden) = (&config.extract.signals, config.extract.hidden.as_ref());
        Ok(Self { signals: StoredSignals::of(signals, batch)?, states: StoredStates::of(hidden, batch)? })
    }

    /// Whether a position's stored values are those of a certain token.
    fn is_certain(&self, row: usize, position: usize, token: u32) -> bool {
        let (signals, misfits) = &self.signals;
        (misfits.iter().any(|misfit| misfit.row == row) || signals.is_certain(row, position, token))
            && self.states.as_ref().is_none_or(|states| states.at(row, position).iter().all(|value| *value == 0.0))
    }
}

pub(super) fn check(
    config: &GenerateConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    let prompt_lengths = given_column(batch)?;
    let lists = ListRows::from_batch(batch, columns::LOGPROB)?;
    let logprobs = lists.values::<Float32Array>(columns::LOGPROB)?.values();
    let stored = StoredValues::read(config, batch)?;
    for (row, sequence) in sequences(batch)?.iter().enumerate() {
        let mut wrong = |message: String| violations.push(Violation::new(row, message));
        let (prompt_length, valid) = (prompt_lengths.value(row), sequence.valid);
        let Some(first) = usize::try_from(prompt_length).ok().filter(|length| (1..valid).contains(length)) else {
            wrong(format!(
                "given is {prompt_length}, valid: 1 to {}, before the first token that was written",
                valid.max(1) - 1
            ));
            continue;
        };
        if sequence.tokens.first() != config.pack.bos.as_ref() {
            wrong(format!("the row begins with {:?}, valid: bos, {:?}", sequence.tokens.first(), config.pack.bos));
        }
        let logprobs = &logprobs[lists.range(row)];
        let others = logprobs.iter().take(first).chain(logprobs.iter().skip(valid));
        if let Some(other) = others.copied().find(|logprob| *logprob != 0.0) {
            wrong(format!("logprob of a position that is given or padding is {other}, valid: 0"));
        }
        let mut positions = (0..first).chain(valid..sequence.tokens.len());
        if let Some(position) =
            positions.find(|position| !stored.is_certain(row, *position, sequence.tokens[*position]))
        {
            wrong(format!(
                "position {position} is given or padding, but its signals or hidden states are not those of its token alone"
            ));
        }
        if config.sequential.stop == Stop::Eos {
            let written = &sequence.tokens[first..valid];
            let ended = written.iter().position(|token| *token == config.eos).map(|at| first + at + 1);
            if ended.unwrap_or(sequence.tokens.len()) != valid {
                wrong(format!("the text has {valid} tokens, valid: up to its first eos, {ended:?}, or all of the row"));
            }
        } else if valid != sequence.tokens.len() {
            wrong(format!("the text has {valid} tokens, valid: {}, as it does not stop at eos", sequence.tokens.len()));
        }
    }
    Ok(())
}
