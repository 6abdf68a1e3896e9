//! The section `partitions` of a job: what the two groups of a sequence consist of, and how their proportion is drawn.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

use crate::subtokens::SubtokensSection;

/// Two-group partitions: every token is in group 0 or 1, P(group 1) = 1 − α(t).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Partitions")]
pub struct PartitionsSection {
    /// Partitions per sequence.
    #[schemars(range(min = 1, max = 1024))]
    pub views: u32,
    /// The schedule α(t).
    pub schedule: Schedule,
    /// For `polynomial`: α(t) = (1 − t)^power.
    #[schemars(range(min = 0.01, max = 100.0))]
    pub power: f64,
    /// How t is drawn for the views of one sequence.
    pub sampling: Sampling,
    /// t is in [eps, 1 − eps].
    #[schemars(range(min = 0.0, max = 0.49))]
    pub eps: f64,
    /// For `level: block` and `subtoken`: t is in [low, high], in place of `eps` (BD3-LM narrows it for short blocks).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(inner(range(min = 0.0, max = 1.0)))]
    pub t_range: Option<[f64; 2]>,
    /// The unit that has a group, and the unit that has its own t.
    #[serde(skip_serializing_if = "PartitionLevel::is_token")]
    pub level: PartitionLevel,
    /// For `level: block`: tokens per block, L' (BD3-LM: 4 and 16). The last block of a sequence may be shorter.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub block_length: Option<u32>,
}

impl Default for PartitionsSection {
    fn default() -> Self {
        Self {
            views: 1,
            schedule: Schedule::Linear,
            power: 3.0,
            sampling: Sampling::Stratified,
            eps: 1e-3,
            t_range: None,
            level: PartitionLevel::Token,
            block_length: None,
        }
    }
}

impl Section for PartitionsSection {
    const KEY: &'static str = super::NAME;
    const IS_DERIVABLE: bool = true;

    /// Checks that the keys fit the level.
    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        let is_block = self.level == PartitionLevel::Block;
        match self.block_length {
            None if is_block => {
                problems.push(Problem::missing("partitions.block_length", "is required for level block and missing"));
            }
            Some(length) if !is_block => {
                problems.push(Problem::new("partitions.block_length", length, "is for level block"));
            }
            _ => {}
        }
        if let Some([low, high]) = self.t_range {
            let given = format!("[{low}, {high}]");
            if self.level == PartitionLevel::Token {
                let message = "is for level block or subtoken; level token has eps";
                problems.push(Problem::new("partitions.t_range", given, message));
            } else if !(0.0 <= low && low < high && high <= 1.0) {
                let message = "valid: two numbers from 0 to 1, the smaller first";
                problems.push(Problem::new("partitions.t_range", given, message));
            }
        }
        if self.level == PartitionLevel::Subtoken && !job.sections.contains(SubtokensSection::KEY) {
            let message = "needs digits; valid: level token or block, or a job with `subtokens: {length: 4}`";
            problems.push(Problem::new("partitions.level", "subtoken", message));
        }
        if self.level == PartitionLevel::Subtoken && job.has_short_rows() {
            let message = "rows of different lengths cannot have groups of digits; valid: pack.remainder drop or pad";
            problems.push(Problem::new("partitions.level", "subtoken", message));
        }
    }
}

/// The unit that has a group, and the unit that has its own t.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PartitionLevel {
    /// Tokens have groups; one t per sequence.
    #[default]
    Token,
    /// Tokens have groups; one t per block of `block_length` (BD3-LM).
    Block,
    /// Digits of tokens have groups; one t per sequence (MDM-Prime). Needs `subtokens`.
    Subtoken,
}

impl PartitionLevel {
    fn is_token(&self) -> bool {
        *self == Self::Token
    }
}

/// The schedule α(t): the share of the sequence that is not masked at time t.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// α(t) = 1 − t.
    #[default]
    Linear,
    /// α(t) = (1 − t)^power.
    Polynomial,
    /// α(t) = 1 − arccos(1 − t)·2/π: the masked share, or group 1, is more often large than small (MaskGIT; PGM's images).
    Arccos,
}

/// How t is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Sampling {
    /// One t in each of `views` equal parts of the interval, in a random order.
    #[default]
    Stratified,
    /// Each t is drawn independently.
    Independent,
}
