//! What `plan` tells of a job beside its splits: how a schedule of orders comes out, how many sampling steps of digits are idle.

use serde::Serialize;
use stillhouse_operators::subtokens::{self, PLANNED_LENGTHS};
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::{JobSpec, Schedule};

use crate::job::Prepared;
use crate::sequence_offsets;

/// What `orders.schedule` comes to over the splits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ScheduleOutlook {
    /// Sequences of train, as planned.
    pub sequences: u64,
    /// ρ of the first sequence of train.
    pub first_rho: u32,
    /// ρ of the last one.
    pub last_rho: u32,
    /// What is wrong with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// What the schedule of a job comes to over these splits.
pub(crate) fn schedule(spec: &JobSpec, splits: &[SplitRecord]) -> Option<ScheduleOutlook> {
    let (sequences, [first_rho, last_rho], warning) = sequence_offsets::outlook(spec, splits)?;
    Some(ScheduleOutlook { sequences, first_rho, last_rho, warning })
}

/// The idle-step ratio of a length of sub-tokens (MDM-Prime, Eq. A6).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct IdleSteps {
    /// ℓ.
    pub length: u32,
    /// b.
    pub base: u64,
    /// The share of steps.
    pub ratio: f64,
    /// Whether the curve over ℓ has its elbow here, among the lengths whose digits have 4 to 4,096 values.
    pub elbow: bool,
}

pub(crate) fn idle_steps(prepared: &Prepared) -> Vec<IdleSteps> {
    let spec = &prepared.spec;
    if spec.subtokens.is_none() {
        return Vec::new();
    }
    // sub-tokens by another schedule are not the paper's: the linear one is told
    let power = match &spec.partitions {
        Some(partitions) if partitions.schedule == Schedule::Polynomial => partitions.power,
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
