//! What must hold of a row that the teacher wrote, beside what holds of every packed row.

use arrow::array::{Float32Array, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_schemas::columns;
use stillhouse_schemas::spec::Stop;

use super::GenerateConfig;
use super::declaration::given;
use crate::extract::sequences;
use crate::invariants::Broken;
use crate::rows::ListRows;

pub(super) fn check(config: &GenerateConfig, batch: &RecordBatch, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let given = given(batch)?;
    let lists = ListRows::of(batch, columns::LOGPROB)?;
    let logprobs = lists.values::<Float32Array>(columns::LOGPROB)?.values();
    for (row, sequence) in sequences(batch)?.iter().enumerate() {
        let mut wrong = |message: String| broken.push(Broken::new(row, message));
        let (given, valid) = (given.value(row), sequence.valid);
        let Some(first) = usize::try_from(given).ok().filter(|given| (1..valid).contains(given)) else {
            wrong(format!(
                "given is {given}, valid: 1 to {}, before the first token that was written",
                valid.max(1) - 1
            ));
            continue;
        };
        if sequence.tokens.first() != config.pack.bos.as_ref() {
            wrong(format!("the row begins with {:?}, valid: bos, {:?}", sequence.tokens.first(), config.pack.bos));
        }
        let logprobs = &logprobs[lists.range(row)];
        let certain = logprobs.iter().take(first).chain(logprobs.iter().skip(valid));
        if let Some(other) = certain.copied().find(|logprob| *logprob != 0.0) {
            wrong(format!("logprob of a position that is given or padding is {other}, valid: 0"));
        }
        if config.written.stop == Stop::Eos {
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
