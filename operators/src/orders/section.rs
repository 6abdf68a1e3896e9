//! The section `orders` of a job: the order, and the blocks, in which the tokens of a sequence are generated.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_schemas::spec::JobSpec;

/// Generation orders (ARMD): the columns `order` and `block`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Orders")]
pub struct OrdersSection {
    /// Kind of order.
    pub kind: OrderKind,
    /// For `progressive`: ρ, the number of tokens of every sequence that are shuffled among their positions. Set this or `schedule`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub rho: Option<u32>,
    /// For `progressive`: a ρ that grows over the data set. Set this or `rho`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<OrderSchedule>,
    /// For `strided`: S, the number of streams, or several numbers, one of which is drawn for each sequence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 64), inner(range(min = 1, max = 1_048_576)))]
    pub streams: Vec<u32>,
    /// For `random`: T, the number of masking steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub steps: Option<u32>,
    /// The epoch of the orders. Each epoch has other random choices (as the seed of the package's views), and `schedule` continues from the
    /// earlier epochs. `stillhouse derive` makes the orders of later epochs from the data set of the first.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub epoch: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl Section for OrdersSection {
    const KEY: &'static str = super::NAME;
    const IS_DERIVABLE: bool = true;

    /// Kind `none`, which every job without the section has always had in its hash.
    fn when_absent() -> Option<Self> {
        Some(Self::default())
    }

    /// Checks that the keys fit the kind of order.
    fn check(&self, _: &JobSpec, problems: &mut Vec<Problem>) {
        let unless_kind = |kind: OrderKind| if self.kind == kind { "" } else { kind.name() };
        for (key, given, kind) in [
            ("rho", self.rho.is_some(), unless_kind(OrderKind::Progressive)),
            ("schedule", self.schedule.is_some(), unless_kind(OrderKind::Progressive)),
            ("streams", !self.streams.is_empty(), unless_kind(OrderKind::Strided)),
            ("steps", self.steps.is_some(), unless_kind(OrderKind::Random)),
            ("epoch", self.epoch > 0 && self.kind == OrderKind::None, "progressive, strided or random"),
        ] {
            if given && !kind.is_empty() {
                let message = format!("is for kind {kind}, and orders.kind is {}", self.kind.name());
                problems.push(Problem::missing(format!("orders.{key}"), message));
            }
        }
        let mut missing = |key: &str, message: &str| problems.push(Problem::missing(format!("orders.{key}"), message));
        match self.kind {
            OrderKind::Progressive if self.rho.is_some() == self.schedule.is_some() => {
                missing("rho", "kind progressive needs either rho or schedule");
            }
            OrderKind::Strided if self.streams.is_empty() => {
                missing("streams", "is required for kind strided and missing");
            }
            OrderKind::Random if self.steps.is_none() => missing("steps", "is required for kind random and missing"),
            _ => {}
        }
        if let Some(schedule) = self.schedule.filter(|schedule| schedule.i_perm_sequences < schedule.i_ar_sequences) {
            let message = format!("before orders.schedule.i_ar_sequences; valid: {} or more", schedule.i_ar_sequences);
            problems.push(Problem::new("orders.schedule.i_perm_sequences", schedule.i_perm_sequences, message));
        }
        if let Some(OrderSchedule { bytes_per_sequence: Some(_), sequences_per_split: Some(rows), .. }) = self.schedule
        {
            let message =
                "contradicts orders.schedule.bytes_per_sequence, which counts sequences in another way; leave it out";
            problems.push(Problem::new("orders.schedule.sequences_per_split", rows, message));
        }
    }
}

/// Kinds of generation order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OrderKind {
    /// No orders.
    #[default]
    None,
    /// Left to right, with ρ tokens shuffled among their positions; blocks of one token.
    Progressive,
    /// S interleaved streams: first the heads one by one, then S tokens at a time.
    Strided,
    /// Every token is masked at one of T steps. The tokens masked last are generated first; the tokens of one step are a block.
    Random,
}

impl OrderKind {
    /// The name in job files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Progressive => "progressive",
            Self::Strided => "strided",
            Self::Random => "random",
        }
    }
}

/// ρ over the data set: 0 before `i_ar_sequences`, 1 there, then growing linearly to `rho_max` at `i_perm_sequences`, and constant from there on.
///
/// The position of a sequence counts the sequences planned for earlier splits, not those that the splits came to have. So the rows of a split do not depend on other splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OrderSchedule {
    /// Where shuffling begins, in sequences. (The paper counts training steps: multiply by the sequences per step.)
    pub i_ar_sequences: u64,
    /// Where ρ reaches its maximum, in sequences.
    pub i_perm_sequences: u64,
    /// The maximum of ρ, in tokens.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub rho_max: u32,
    /// Bytes of input that are planned as one sequence: of uncompressed text, or for `codes` and `images` of numbers. Default for
    /// text: 4.2 bytes per token. `plan` and `run` warn if this is far from the real number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_u64))]
    pub bytes_per_sequence: Option<u64>,
    /// Only for data sets of earlier versions: a sequence is at (split number · this + row in the split), so ρ falls back if splits
    /// have more rows than this. Leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_u64))]
    pub sequences_per_split: Option<u64>,
}

impl OrderSchedule {
    /// Position of a sequence in the data set, computed from its id and the planned range of its split; `None` if no
    /// range was planned.
    pub fn position_of(&self, sequence_id: u64, planned: Option<SequenceRange>) -> Option<u64> {
        let (split, row) = (sequence_id >> 32, sequence_id & u64::from(u32::MAX));
        match self.sequences_per_split {
            Some(rows) => Some(split.saturating_mul(rows).saturating_add(row)),
            None => planned.map(|place| place.of_row(row)),
        }
    }

    /// ρ at a position in the data set.
    pub fn rho(&self, sequence: u64) -> u32 {
        if sequence < self.i_ar_sequences {
            0
        } else if sequence >= self.i_perm_sequences {
            self.rho_max
        } else {
            let (grown, all) = (sequence - self.i_ar_sequences, self.i_perm_sequences - self.i_ar_sequences);
            // in 128 bits, since both factors may be large; the quotient is below rho_max
            1 + (u128::from(self.rho_max - 1) * u128::from(grown) / u128::from(all)) as u32
        }
    }
}
