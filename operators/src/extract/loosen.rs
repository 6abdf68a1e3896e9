//! Re-encodes stored noise for a looser tolerance from the columns alone, without the teacher: see
//! `stillhouse_noise::CorrectionPruner`.

use arrow::array::{ArrayRef, RecordBatch};
use arrow::error::ArrowError;
use rayon::prelude::*;
use stillhouse_noise::{Correction, CorrectionPruner, DrawKey, NoiseStream, StoredToken, Tolerance};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::Statistics;

use super::collect::{floats, unsigned};
use super::{ExtractConfig, NAME, NoiseConfig, Sequence, noise_error, sequences};
use crate::invariants::{float_column, unsigned_column};
use crate::operator::OperatorError;
use crate::rows::list_column;

/// The columns that are rewritten.
pub const LOOSENED_COLUMNS: [&str; 3] = [columns::NOISE_COUNT, columns::NOISE_INDEX, columns::NOISE_LOGPROB];

/// Converts the noise of one config to that of another, which differs only in its tolerance.
#[derive(Debug, Clone)]
pub struct NoiseLoosener {
    to: ExtractConfig,
    noise: NoiseConfig,
    pruner: CorrectionPruner,
}

/// The new noise of one row.
#[derive(Default)]
struct LoosenedRow {
    counts: Vec<u32>,
    corrections: Vec<Correction>,
    added_variation: f64,
}

impl NoiseLoosener {
    /// Converts between two configs with codec `replay`. Returns `None` if the tolerance of `to` is too close to that
    /// of `from`.
    ///
    /// # Errors
    /// Fails for a tolerance or a vocabulary that no encoder accepts.
    pub fn new(from: &ExtractConfig, to: &ExtractConfig) -> Result<Option<Self>, OperatorError> {
        let (Some(stored), Some(noise)) = (&from.noise, &to.noise) else { return Ok(None) };
        let tolerance = |noise: &NoiseConfig| Tolerance::new(noise.tolerance).map_err(noise_error);
        let tolerances = (tolerance(stored)?, tolerance(noise)?);
        let pruner = CorrectionPruner::new(to.vocab_size, tolerances, noise.condition, noise.value_type())
            .map_err(noise_error)?;
        Ok(pruner.map(|pruner| Self { to: to.clone(), noise: noise.clone(), pruner }))
    }

    /// Returns the columns of [`LOOSENED_COLUMNS`], in that order. Adds only non-empty lists to the statistics: an
    /// empty list does not show whether its position was predicted. `stored_variation` is the largest total variation
    /// of the stored noise.
    ///
    /// # Errors
    /// Fails if the columns do not follow the format.
    pub fn columns(
        &self,
        batch: &RecordBatch,
        stored_variation: f64,
        statistics: &mut Statistics,
    ) -> Result<Vec<ArrayRef>, OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let sequences = sequences(batch).map_err(&arrow)?;
        let rows = self.rows(batch, &sequences)?;
        for row in &rows {
            statistics.total_variation_max = statistics.total_variation_max.max(stored_variation + row.added_variation);
        }
        for count in rows.iter().flat_map(|row| &row.counts).filter(|count| **count > 0) {
            statistics.count_corrections(u64::from(*count));
        }
        let fields = self.to.fields();
        let field = |name: &str| {
            let missing = || OperatorError::Config { operator: NAME, message: format!("no column {name}") };
            fields.iter().find(|field| field.name() == name).ok_or_else(missing)
        };
        let [count, index, logprob] =
            [field(LOOSENED_COLUMNS[0])?, field(LOOSENED_COLUMNS[1])?, field(LOOSENED_COLUMNS[2])?];
        let lists: Vec<usize> = rows.iter().map(|row| row.counts.len()).collect();
        let lengths: Vec<usize> = rows.iter().map(|row| row.corrections.len()).collect();
        let counts = rows.iter().flat_map(|row| row.counts.iter().copied()).collect();
        let corrections = || rows.iter().flat_map(|row| &row.corrections);
        let indices = corrections().map(|c| c.index).collect();
        let logprobs = corrections().map(|c| c.logprob).collect();
        Ok(vec![
            list_column(count, unsigned(count, counts)?, &lists).map_err(&arrow)?,
            list_column(index, unsigned(index, indices)?, &lengths).map_err(&arrow)?,
            list_column(logprob, floats(logprob, logprobs), &lengths).map_err(&arrow)?,
        ])
    }

    fn rows(&self, batch: &RecordBatch, sequences: &[Sequence]) -> Result<Vec<LoosenedRow>, OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let logprobs = float_column(batch, columns::LOGPROB).map_err(&arrow)?;
        let counts = unsigned_column(batch, columns::NOISE_COUNT).map_err(&arrow)?;
        let indices = unsigned_column(batch, columns::NOISE_INDEX).map_err(&arrow)?;
        let values = float_column(batch, columns::NOISE_LOGPROB).map_err(&arrow)?;
        let keys = DrawKey::draws(self.noise.seed, self.noise.draws);
        let row = |(number, sequence): (usize, &Sequence)| -> Result<LoosenedRow, OperatorError> {
            let (counts, indices, values) = (counts.row(number), indices.row(number), values.row(number));
            let (logprobs, length) = (logprobs.row(number), sequence.tokens.len());
            let sum: usize = counts.iter().map(|count| *count as usize).sum();
            if counts.len() != length * keys.len()
                || indices.len() != sum
                || values.len() != sum
                || logprobs.len() != length
            {
                let message = format!("sequence {}: the lists of its noise do not fit each other", sequence.id);
                return Err(arrow(ArrowError::InvalidArgumentError(message)));
            }
            let (mut loosened, mut pruner) = (LoosenedRow::default(), self.pruner.clone());
            let (mut first, mut stored) = (0, Vec::new());
            for (list, count) in counts.iter().enumerate() {
                let (key, position) = (keys[list / length], list % length);
                let range = first..first + *count as usize;
                first = range.end;
                stored.clear();
                let pairs = indices[range.clone()].iter().zip(&values[range]);
                stored.extend(pairs.map(|(&index, &logprob)| Correction { index, logprob }));
                let (token, logprob) = (sequence.tokens[position], logprobs[position]);
                let token = StoredToken { token, logprob, corrections: &stored };
                let (stream, before) =
                    (NoiseStream::new(key, sequence.id, position as u32), loosened.corrections.len());
                let added_variation = pruner.prune(&token, &stream, &mut loosened.corrections).map_err(noise_error)?;
                loosened.added_variation = loosened.added_variation.max(added_variation);
                loosened.counts.push((loosened.corrections.len() - before) as u32);
            }
            Ok(loosened)
        };
        sequences.par_iter().enumerate().map(row).collect()
    }
}
