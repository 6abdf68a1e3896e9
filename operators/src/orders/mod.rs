//! `orders`: the order in which the tokens of a sequence are generated, and their blocks (ARMD, Karami and Ghodsi
//! 2026).
//!
//! ```text
//!   progressive, ρ = 2    0 1 4 3 2 5 | 1 2 3 4 5 6        left to right, with ρ tokens shuffled among their places
//!   strided, S = 2        0 3 1 4 2 5 | 1 2 3 3 4 4        S streams interleaved: first tokens one by one, then S at a time
//!   random, T = 3         2 5 0 4 1 3 | 1 1 2 2 3 3        τ in {1 … T} for each token; B = T − τ + 1
//!                         order         block
//! ```
//!
//! | column | type and shape | content |
//! |---|---|---|
//! | `order` | uint16 or uint32 \[L\] | π: the position of the n-th token generated; padding last |
//! | `block` | the same \[L\] | B(n) of the n-th token generated, from 1, never falling; padding has one more than the last block |
//!
//! The n-th token may attend to the i-th if B(i) < B(n) (strictly causal, Eq. 5) or B(i) ≤ B(n) (causal, Eq. 3).
//!
//! Every choice depends only on the seed, a purpose and `sequence_id` ([`keyed_uniforms`]). The Python package's
//! `views.armd` draws the same in the epoch `orders.epoch`. With a schedule, ρ depends on the sequence's index in the
//! data set, which the plan records for each split ([`SequenceRange`]).
//!
//! | purpose | use |
//! |---|---|
//! | `armd_places` | progressive: shuffle the ρ positions with the smallest uniforms |
//! | `armd_shuffle` | progressive: put them into the order of these uniforms |
//! | `armd_streams` | strided: pick one of several S |
//! | `armd_steps` | random: τ = 1 + ⌊u·T⌋, with the i-th uniform for position i |
//!
//! Cost: one Philox block per two tokens, and a sort.

mod section;
mod view;

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, UInt16Array, UInt32Array};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::{epoch_seed, keyed_uniforms};
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;
use stillhouse_schemas::sequence_range::SequenceRange;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, with_columns};
use crate::extract::{Sequence, sequences};
use crate::invariants::{CheckContext, Violation, unsigned_column};
use crate::operator::{Emit, Operator, OperatorError, SplitContext};
use crate::rows::list_column;

pub use self::section::{OrderKind, OrderSchedule, OrdersSection};

const NAME: &str = "orders";

/// Configuration of `orders`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrdersConfig {
    /// How to order the tokens.
    pub rule: OrderRule,
    /// Seed of the job, combined with the epoch.
    pub seed: u64,
    /// Row length: fixed, or up to a maximum.
    pub rows: RowLength,
}

/// A kind of order with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderRule {
    /// Left to right, with some tokens shuffled.
    Progressive(Shuffled),
    /// Interleaved streams; their number is drawn from this list.
    Strided(Vec<u32>),
    /// Random, with this number of masking steps T.
    Random(u32),
}

/// Number of tokens to shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffled {
    /// ρ for every sequence.
    Rho(u32),
    /// ρ that depends on the sequence's index in the data set.
    Schedule(OrderSchedule),
}

/// The order of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The position of the n-th token generated; padding last.
    pub order: Vec<u32>,
    /// Block of the n-th token generated, from 1.
    pub block: Vec<u32>,
}

impl Order {
    /// Left to right in blocks of one token; the first `valid` of `length` positions are not padding.
    fn left_to_right(length: usize, valid: usize) -> Self {
        let order = (0..length as u32).collect();
        let block = (1..=length as u32).map(|n| n.min(valid as u32 + 1)).collect();
        Self { order, block }
    }
}

/// Returns the order of a sequence of `length` positions, of which the first `valid` are not padding. `index` is the
/// sequence's index in the data set; only a schedule uses it.
///
/// ```
/// use stillhouse_operators::orders::{OrderRule, OrdersConfig, generation_order};
/// use stillhouse_schemas::columns::RowLength;
///
/// let config = OrdersConfig { rule: OrderRule::Strided(vec![2]), seed: 0, rows: RowLength::Fixed(8) };
/// let found = generation_order(&config, 0, 0, 8, 8);
/// assert_eq!(found.order, [0, 4, 1, 5, 2, 6, 3, 7]);
/// assert_eq!(found.block, [1, 2, 3, 3, 4, 4, 5, 5]);
/// ```
pub fn generation_order(config: &OrdersConfig, sequence_id: u64, index: u64, length: usize, valid: usize) -> Order {
    let uniforms = |purpose| keyed_uniforms(config.seed, purpose, sequence_id, 0);
    let mut found = Order::left_to_right(length, valid);
    match &config.rule {
        OrderRule::Progressive(shuffled) => {
            let rho = match shuffled {
                Shuffled::Rho(rho) => *rho,
                Shuffled::Schedule(schedule) => schedule.rho(index),
            };
            let mut selection = uniforms("armd_places");
            let mut chosen = sort_by_uniform(0..valid as u32, |_| selection.next_f64());
            chosen.truncate(rho as usize);
            chosen.sort_unstable();
            let mut drawn = uniforms("armd_shuffle");
            let drawn: Vec<f64> = (0..valid).map(|_| drawn.next_f64()).collect();
            let shuffled = sort_by_uniform(chosen.iter().copied(), |position| drawn[position as usize]);
            for (index, position) in chosen.into_iter().zip(shuffled) {
                found.order[index as usize] = position;
            }
        }
        OrderRule::Strided(streams) => {
            let choice = uniforms("armd_streams").below(streams.len() as u32) as usize;
            interleave_streams(&mut found, valid, streams.get(choice).copied().unwrap_or(1) as usize);
        }
        OrderRule::Random(steps) => {
            let mut drawn = uniforms("armd_steps");
            let tau: Vec<u32> = (0..valid).map(|_| 1 + (drawn.next_f64() * f64::from(*steps)) as u32).collect();
            found.order[..valid].sort_by_key(|&position| std::cmp::Reverse(tau[position as usize]));
            for (n, block) in found.block.iter_mut().enumerate() {
                *block = if n < valid { steps - tau[found.order[n] as usize] + 1 } else { steps + 1 };
            }
        }
    }
    found
}

/// Sorts positions by their uniforms, ascending; for equal ones the earlier position comes first.
fn sort_by_uniform(positions: impl Iterator<Item = u32>, mut uniform: impl FnMut(u32) -> f64) -> Vec<u32> {
    let mut drawn: Vec<(f64, u32)> = positions.map(|position| (uniform(position), position)).collect();
    drawn.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    drawn.into_iter().map(|(_, position)| position).collect()
}

/// Arranges the first `valid` positions in `streams` streams. If `valid` is not a multiple of `streams`, the first
/// streams are one token longer.
fn interleave_streams(found: &mut Order, valid: usize, streams: usize) {
    let streams = streams.min(valid).max(1);
    let (short, longer) = (valid / streams, valid % streams);
    let start = |stream: usize| stream * short + stream.min(longer);
    let mut n = 0;
    for offset in 0..short + usize::from(longer > 0) {
        for stream in 0..streams {
            if offset < short + usize::from(stream < longer) {
                found.order[n] = (start(stream) + offset) as u32;
                found.block[n] = (if offset == 0 { stream + 1 } else { streams + offset }) as u32;
                n += 1;
            }
        }
    }
    let last = found.block[..n].last().copied().unwrap_or(0);
    found.block[n..].fill(last + 1);
}

impl OperatorConfig for OrdersConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<OrdersSection>());
    const COLUMNS: &'static [Column] = &[
        Column {
            name: columns::ORDER,
            dtype: "fixed list uint16 (L and T below 65,535) / uint32",
            when: "`orders`",
            shape: "[L]",
            contract: "π(n): position of the n-th generated token; padding comes last",
            meaning: "order of generation: the positions of the tokens, the one generated first in front (ARMD)",
        },
        Column {
            name: columns::BLOCK,
            dtype: "fixed list uint16 / uint32, as `order`",
            when: "`orders`",
            shape: "[L]",
            contract: "B(n): block of the n-th generated token, from 1, non-decreasing; padding has the last block plus 1",
            meaning: "block in which each token is generated, in the order of generation; under the strictly causal mask, a token sees only earlier blocks",
        },
    ];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(orders) = context.section::<OrdersSection>()? else { return Ok(None) };
        let needs =
            |key: &str| Problem::missing(format!("orders.{key}"), format!("kind {} needs it", orders.kind.name()));
        let rule = match orders.kind {
            OrderKind::None => return Ok(None),
            OrderKind::Progressive => OrderRule::Progressive(match (orders.rho, orders.schedule) {
                (Some(rho), _) => Shuffled::Rho(rho),
                (None, schedule) => Shuffled::Schedule(schedule.ok_or_else(|| needs("rho"))?),
            }),
            OrderKind::Strided if orders.streams.is_empty() => return Err(needs("streams")),
            OrderKind::Strided => OrderRule::Strided(orders.streams),
            OrderKind::Random => OrderRule::Random(orders.steps.ok_or_else(|| needs("steps"))?),
        };
        Ok(Some(Self { rule, seed: epoch_seed(context.spec.seed, orders.epoch), rows: context.rows() }))
    }

    fn fields(&self) -> Vec<Field> {
        [columns::ORDER, columns::BLOCK].map(|name| self.rows.field(name, self.item_type(), None, None)).into()
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        let (order, block) = (unsigned_column(batch, columns::ORDER)?, unsigned_column(batch, columns::BLOCK)?);
        for (row, sequence) in sequences(batch)?.iter().enumerate() {
            let Some(expected) = self.sequence_order(sequence, context.sequence_range) else {
                violations.push(Violation::new(
                    row,
                    "the manifest lacks the position of its split in the data set, which determines ρ",
                ));
                continue;
            };
            if order.row(row) != expected.order || block.row(row) != expected.block {
                violations.push(Violation::new(row, "order and block differ from those that the seed gives"));
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, _: usize) -> f64 {
        // consecutive positions and blocks compress well, shuffled ones do not
        before + if matches!(self.rule, OrderRule::Random(_)) { 2.5 } else { 1.5 }
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let (order, block) = (unsigned_column(row, columns::ORDER)?, unsigned_column(row, columns::BLOCK)?);
        let valid = sequences(row)?.first().map_or(0, |sequence| sequence.valid);
        let (order, block) = (&order.row(0)[..valid], &block.row(0)[..valid]);
        let (facts, pictures) = (view::facts(order, block), view::masks(block));
        Ok(Some(OperatorView { operator: NAME.into(), facts, pictures, ..OperatorView::default() }))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(Orders { config: self.clone(), sequence_range: context.sequence_range }))
    }
}

impl OrdersConfig {
    /// Returns the order of a sequence; `None` if it depends on the index in the data set and that is unknown.
    fn sequence_order(&self, sequence: &Sequence, split: Option<SequenceRange>) -> Option<Order> {
        let index = match &self.rule {
            OrderRule::Progressive(Shuffled::Schedule(schedule)) => schedule.position_of(sequence.id, split)?,
            _ => 0,
        };
        Some(generation_order(self, sequence.id, index, sequence.tokens.len(), sequence.valid))
    }

    /// Type of the values: must hold the block of padding, one more than the last block.
    fn item_type(&self) -> DataType {
        let steps = if let OrderRule::Random(steps) = self.rule { steps as usize } else { 0 };
        let largest = self.rows.length().max(steps) + 1;
        if largest <= usize::from(u16::MAX) { DataType::UInt16 } else { DataType::UInt32 }
    }

    fn array(&self, values: Vec<u32>) -> ArrayRef {
        match self.item_type() {
            DataType::UInt16 => Arc::new(UInt16Array::from_iter_values(values.into_iter().map(|v| v as u16))),
            _ => Arc::new(UInt32Array::from(values)),
        }
    }
}

/// The operator.
struct Orders {
    config: OrdersConfig,
    sequence_range: Option<SequenceRange>,
}

impl Operator for Orders {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let (mut orders, mut blocks, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in sequences(batch).map_err(&arrow)? {
            let found =
                self.config.sequence_order(&sequence, self.sequence_range).ok_or_else(|| OperatorError::Config {
                    operator: NAME,
                    message: "schedule: the position of the split in the data set is unknown; valid: a planned split"
                        .into(),
                })?;
            lengths.push(found.order.len());
            orders.extend(found.order);
            blocks.extend(found.block);
        }
        let fields = self.config.fields();
        let arrays: Result<Vec<ArrayRef>, ArrowError> = fields
            .iter()
            .zip([orders, blocks])
            .map(|(field, values)| list_column(field, self.config.array(values), &lengths))
            .collect();
        emit(with_columns(batch, fields.clone(), arrays.map_err(&arrow)?).map_err(&arrow)?)
    }
}

#[cfg(test)]
mod tests;
