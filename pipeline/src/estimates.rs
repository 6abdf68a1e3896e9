//! Estimates that `plan` reports beside the splits: the outcome of an orders' schedule, and the share of idle sampling
//! steps of sub-tokens.

use serde::Serialize;
use stillhouse_operators::partitions::{PartitionsSection, Schedule};
use stillhouse_operators::subtokens::{self, PLANNED_LENGTHS, SubtokensSection};
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

use crate::job::Prepared;
use crate::sequence_offsets;

/// Outcome of `orders.schedule` over the splits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ScheduleOutlook {
    /// Planned number of sequences of train.
    pub sequences: u64,
    /// ρ of the first sequence of train.
    pub first_rho: u32,
    /// ρ of the last sequence of train.
    pub last_rho: u32,
    /// Warning, if the schedule does not fit the splits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Outcome of a job's schedule over these splits; `None` if it has no schedule.
pub(crate) fn schedule(spec: &JobSpec, splits: &[SplitRecord]) -> Option<ScheduleOutlook> {
    let (sequences, [first_rho, last_rho], warning) = sequence_offsets::outlook(spec, splits)?;
    Some(ScheduleOutlook { sequences, first_rho, last_rho, warning })
}

/// Idle-step ratio for a number of sub-tokens per token (MDM-Prime, Eq. A6).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct IdleSteps {
    /// ℓ, the sub-tokens per token.
    pub length: u32,
    /// b, the base of the sub-tokens.
    pub base: u64,
    /// Share of sampling steps that change nothing.
    pub ratio: f64,
    /// Whether the curve over ℓ has its elbow at this length, among the lengths with 4 ≤ b ≤ 4,096.
    pub elbow: bool,
}

pub(crate) fn idle_steps(prepared: &Prepared) -> Vec<IdleSteps> {
    let spec = &prepared.spec;
    if !spec.sections.contains(SubtokensSection::KEY) {
        return Vec::new();
    }
    // the paper has no ratio for sub-tokens with another schedule: report the linear one
    let power = match spec.sections.get::<PartitionsSection>() {
        Ok(Some(partitions)) if partitions.schedule == Schedule::Polynomial => partitions.power,
        _ => 1.0,
    };
    let length = spec.pack.length;
    let ratio = |digits: u32| subtokens::idle_step_ratio(digits, length, length, power);
    let vocab_size = prepared.vocab_size as u64;
    let elbow = subtokens::elbow_length(&PLANNED_LENGTHS, vocab_size, length, power);
    let point = |digits: u32| IdleSteps {
        length: digits,
        base: subtokens::base(vocab_size, digits),
        ratio: ratio(digits),
        elbow: elbow == Some(digits),
    };
    PLANNED_LENGTHS.into_iter().map(point).collect()
}
