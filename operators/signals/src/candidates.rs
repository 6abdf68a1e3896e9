//! `candidates`: ln p of given tokens at every position.
//!
//! Cost: a subtraction per candidate.

use stillhouse_noise::{LoadedRow, NoiseError, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::{self, Column};
use stillhouse_schemas::problems::Problem;

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32s, f32s_of_bytes, mismatch};

pub(crate) const COLUMNS: &[Column] = &[Column {
    name: columns::CANDIDATE_LOGPROB,
    dtype: "fixed list float32",
    when: "`candidates`",
    shape: "[L, candidates]",
    contract: "ln p of each token of `candidates`, in the job's order; certain: 0 for the token itself, −∞ for others",
    meaning: "natural logarithms of the probabilities of the job's candidate tokens at each position",
}];

/// Log-probabilities of given tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidates {
    /// The tokens.
    pub tokens: Vec<u32>,
}

impl Signal for Candidates {
    fn check_vocabulary(&self, vocab: usize) -> Result<(), NoiseError> {
        match self.tokens.iter().find(|token| **token as usize >= vocab) {
            Some(&token) => Err(NoiseError::Range { what: "candidate", got: token.into(), last: vocab as i64 - 1 }),
            None => Ok(()),
        }
    }

    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        columns.push(Values::F32(self.tokens.iter().map(|token| row.logprob(*token) as f32).collect()));
    }

    fn kernel(&self, _: usize) -> SignalKernel {
        SignalKernel {
            name: Some("noise_candidate_logprobs"),
            constants: self.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect(),
            count: self.tokens.len() as u32,
            output_bytes: self.tokens.len() * 4,
            ..SignalKernel::default()
        }
    }

    fn read_kernel_output(&self, output: &[u8], _: (&[u32], &[f32]), columns: &mut RowSignals) {
        columns.push(Values::F32(f32s_of_bytes(output)));
    }
}

impl StoredSignal for Candidates {
    fn columns(&self) -> Vec<SignalColumn> {
        let shape = ColumnShape::Vector(self.tokens.len());
        vec![SignalColumn::new(columns::CANDIDATE_LOGPROB, ItemType::F32, shape)]
    }

    fn certain(&self, token: u32, columns: &mut RowSignals) {
        let logprob = |candidate: &u32| if *candidate == token { 0.0 } else { f32::NEG_INFINITY };
        columns.push(Values::F32(self.tokens.iter().map(logprob).collect()));
    }

    fn check(&self, values: &[Values], _: usize) -> Option<String> {
        let bad = f32s(values, 0).iter().find(|logprob| logprob.is_nan() || **logprob > 0.0)?;
        Some(format!("candidate_logprob {bad}, valid: at most 0"))
    }

    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        _: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let mut pairs = f32s(got, 0).iter().zip(f32s(expected, 0));
        let (got, expected) =
            pairs.find(|(got, expected)| differs(**got, **expected, tolerances.listed(**expected)))?;
        mismatch("candidate_logprob", *got, *expected)
    }

    fn bytes_per_token(&self, _: f64) -> f64 {
        3.6 * self.tokens.len() as f64
    }

    fn max_values(&self, _: usize) -> usize {
        self.tokens.len()
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        let series = |(n, token): (usize, &u32)| {
            let name = format!("mean probability of candidate {token}");
            Series {
                title: format!("probability of candidate {token}"),
                values: positions.iter().map(|values| f64::from(f32s(values, 0)[n]).exp()).collect(),
                axis: Axis::FromZero,
                describe_mean: Box::new(move |mean| (name.clone(), format!("{mean:.5}"))),
            }
        };
        self.tokens.iter().enumerate().map(series).collect()
    }

    fn summary(&self, values: &[Values]) -> String {
        let values: Vec<String> = f32s(values, 0).iter().map(|v| format!("{v:.2}")).collect();
        format!("candidates {}", values.join(" "))
    }

    fn vocabulary_problems(&self, vocab: usize) -> Vec<Problem> {
        let outside = self.tokens.iter().enumerate().filter(|(_, token)| **token as usize >= vocab);
        let message = format!("not in the teacher's vocabulary; valid: below {vocab}");
        outside.map(|(i, token)| Problem::new(format!("extract.candidates[{i}]"), token, message.clone())).collect()
    }
}
