//! `partitions`: assigns every token to group 0 or group 1, so one sequence gives two complementary masked examples
//! (Partition Generative Modeling, Deschenaux et al. 2025).
//!
//! ```text
//!  t in [eps, 1 − eps], one per view             g_i = 1 with probability 1 − α(t), independently for each token
//!
//!  the  cat  sat  on  the  mat                   group 0 is predicted from group 1, and group 1 from group 0
//!   0    1    0   0    1    1
//! ```
//!
//! | column | type and shape | content |
//! |---|---|---|
//! | `partition` | bool \[views, L\] | true for group 1; false on padding |
//! | `partition_t` | float32 \[views\] | t of each view, exactly the number used to draw the groups |
//!
//! 1 − α(t) is t for the schedule `linear`, 1 − (1 − t)^power for `polynomial`, and arccos(1 − t)·2/π for `arccos`.
//! `stratified` draws one t from each of `views` equal parts of \[eps, 1 − eps\], in random order; `independent` draws
//! each t from the whole interval. If a group is empty and the sequence has at least two tokens besides padding, one of
//! them, chosen at random, moves into it.
//!
//! With `level: block` (BD3-LM) every block of `block_length` tokens has its own t, and `partition_t` is \[views,
//! blocks\]. With `level: subtoken` (MDM-Prime) the digits of tokens have groups, and `partition` is \[views, L, ℓ\].
//! At these two levels group 1 is the masked part, and an empty group stays empty (`levels`).
//!
//! Every random number depends only on the seed, a purpose, `sequence_id` and the view (and, for the groups, the
//! position), never on order, batch or thread. They come from [`keyed_uniforms`]:
//!
//! | purpose | stream | use |
//! |---|---|---|
//! | `partition_strata` | 0 | order of the strata |
//! | `partition_t` | view | place of t in its stratum |
//! | `partition_group` | view | the i-th number decides position i |
//! | `partition_repair` | view | which token fills an empty group |
//!
//! Cost: half a Philox block per token and view.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::keyed_uniforms;
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView};
use crate::extract::sequences;
use crate::invariants::{CheckContext, Violation, float_column};
use crate::operator::{Emit, Operator, OperatorError, SplitContext, extend_schema};
use crate::rows::{ListRows, list_column};
use crate::subtokens::SubtokensSection;

mod levels;
mod section;
mod view;

pub use self::section::{PartitionLevel, PartitionsSection, Sampling, Schedule};

const NAME: &str = "partitions";

/// Configuration of `partitions`.
#[derive(Debug, Clone, PartialEq)]
pub struct PartitionsConfig {
    /// Number of partitions per sequence.
    pub views: u32,
    /// The schedule α(t).
    pub schedule: Schedule,
    /// Exponent of the polynomial schedule.
    pub power: f64,
    /// How to draw t.
    pub sampling: Sampling,
    /// Bound of t, which lies in [eps, 1 − eps].
    pub eps: f64,
    /// Interval of t in place of [eps, 1 − eps], for the levels `block` and `subtoken`.
    pub t_range: Option<[f64; 2]>,
    /// Unit that belongs to a group.
    pub level: PartitionLevel,
    /// Tokens per block, for [`PartitionLevel::Block`].
    pub block_length: u32,
    /// Digits per token, for [`PartitionLevel::Subtoken`].
    pub digits: u32,
    /// Seed of the job.
    pub seed: u64,
    /// Row length: fixed, or up to a maximum.
    pub rows: RowLength,
}

/// One view of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// t as stored.
    pub t: f32,
    /// For each position, whether it is in group 1.
    pub groups: Vec<bool>,
}

/// Expected share of tokens in group 1, 1 − α(t).
pub fn group_share(schedule: Schedule, power: f64, t: f64) -> f64 {
    match schedule {
        Schedule::Linear => t,
        Schedule::Polynomial => 1.0 - libm::pow(1.0 - t, power),
        Schedule::Arccos => libm::acos(1.0 - t) * std::f64::consts::FRAC_2_PI,
    }
}

/// Returns all views of one sequence. `mask` is its attention mask: false on padding.
///
/// ```
/// use stillhouse_operators::partitions::{PartitionsConfig, partition_row};
/// use stillhouse_operators::partitions::PartitionsSection;
/// use stillhouse_schemas::columns::RowLength;
///
/// let config = PartitionsConfig::new(&PartitionsSection::default(), 42, RowLength::Fixed(8));
/// let views = partition_row(&config, 7, &[true; 8]);
/// assert_eq!(views[0].groups.len(), 8);
/// assert_eq!(views, partition_row(&config, 7, &[true; 8]));
/// ```
pub fn partition_row(config: &PartitionsConfig, sequence_id: u64, mask: &[bool]) -> Vec<Partition> {
    let mut strata: Vec<u32> = (0..config.views).collect();
    keyed_uniforms(config.seed, "partition_strata", sequence_id, 0).shuffle(&mut strata);
    let views = (0u32..).zip(&strata);
    views
        .map(|(view, &stratum)| {
            let u = keyed_uniforms(config.seed, "partition_t", sequence_id, view).next_f64();
            let part = match config.sampling {
                Sampling::Independent => u,
                Sampling::Stratified => (f64::from(stratum) + u) / f64::from(config.views),
            };
            let t = stored_t(config.eps + (1.0 - 2.0 * config.eps) * part, config.eps);
            Partition { t, groups: groups(config, sequence_id, view, t, mask) }
        })
        .collect()
}

/// Converts t to f32 without rounding it out of its bounds.
fn stored_t(t: f64, eps: f64) -> f32 {
    let stored = t as f32;
    if f64::from(stored) < eps {
        stored.next_up()
    } else if f64::from(stored) > 1.0 - eps {
        stored.next_down()
    } else {
        stored
    }
}

fn groups(config: &PartitionsConfig, sequence_id: u64, view: u32, t: f32, mask: &[bool]) -> Vec<bool> {
    let share = group_share(config.schedule, config.power, f64::from(t));
    let mut uniforms = keyed_uniforms(config.seed, "partition_group", sequence_id, view);
    let mut groups: Vec<bool> = mask.iter().map(|&valid| (uniforms.next_f64() < share) & valid).collect();

    let valid = mask.iter().filter(|&&valid| valid).count();
    let ones = groups.iter().filter(|&&one| one).count();
    if valid >= 2 && (ones == 0 || ones == valid) {
        let nth = keyed_uniforms(config.seed, "partition_repair", sequence_id, view).below(valid as u32) as usize;
        let moved = mask.iter().zip(&mut groups).filter(|(valid, _)| **valid).nth(nth);
        if let Some((_, group)) = moved {
            *group = !*group;
        }
    }
    groups
}

impl OperatorConfig for PartitionsConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<PartitionsSection>());
    const COLUMNS: &'static [Column] = &[
        Column {
            name: columns::PARTITION,
            dtype: "fixed list bool",
            when: "`partitions`",
            shape: "[views, L]",
            contract: "true for group 1, false for group 0 and padding; with `level: subtoken`: [views, L, ℓ]",
            meaning: "group of each token in each view; true for group 1 (Partition Generative Modeling)",
        },
        Column {
            name: columns::PARTITION_T,
            dtype: "fixed list float32",
            when: "`partitions`",
            shape: "[views]",
            contract: "with `level: block`: [views, ⌈L/L'⌉], one per block",
            meaning: "the t with which each view, or each of its blocks, was drawn",
        },
    ];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<PartitionsSection>()? else { return Ok(None) };
        let digits = context.section::<SubtokensSection>()?.map_or(1, |subtokens| subtokens.length);
        Ok(Some(Self { digits, ..Self::new(&section, context.spec.seed, context.rows()) }))
    }

    fn fields(&self) -> Vec<Field> {
        vec![self.partition_field(), self.t_field()]
    }

    fn check(&self, batch: &RecordBatch, _: &CheckContext, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
        let groups = ListRows::from_batch(batch, columns::PARTITION)?;
        let group_values = groups.values::<BooleanArray>(columns::PARTITION)?;
        let times = float_column(batch, columns::PARTITION_T)?;
        for (row, sequence) in sequences(batch)?.iter().enumerate() {
            let stored: Vec<bool> = groups.range(row).map(|i| group_values.value(i)).collect();
            let expected = self.draw_views(sequence);
            if expected.groups != stored || expected.times != times.row(row) {
                violations.push(Violation::new(row, "partitions differ from those that the seed gives"));
            }
            let empty = |view: &[bool]| {
                let ones = view.iter().filter(|&&group| group).count();
                self.level == PartitionLevel::Token && sequence.valid >= 2 && (ones == 0 || ones == sequence.valid)
            };
            let views = stored.chunks(sequence.tokens.len().max(1)).enumerate();
            for (view, _) in views.filter(|(_, groups)| empty(groups)) {
                violations.push(Violation::new(row, format!("view {view}: a group is empty")));
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, _: usize) -> f64 {
        let times = if self.level == PartitionLevel::Block { 4.0 / f64::from(self.block_length.max(1)) } else { 0.0 };
        before + f64::from(self.views) * (f64::from(self.groups_per_token()) / 8.0 + times)
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        match self.level {
            PartitionLevel::Token => Ok(None),
            PartitionLevel::Block => self.block_view(row).map(Some),
            PartitionLevel::Subtoken => self.digit_view(row).map(Some),
        }
    }

    fn operator(&self, _: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build()?))
    }
}

impl PartitionsConfig {
    /// Creates the config from the job's section.
    pub fn new(section: &PartitionsSection, seed: u64, rows: RowLength) -> Self {
        Self {
            views: section.views,
            schedule: section.schedule,
            power: section.power,
            sampling: section.sampling,
            eps: section.eps,
            t_range: section.t_range,
            level: section.level,
            block_length: section.block_length.unwrap_or(1),
            digits: 1,
            seed,
            rows,
        }
    }

    fn partition_field(&self) -> Field {
        let digits = (self.level == PartitionLevel::Subtoken).then_some(self.digits as usize);
        self.rows.field(columns::PARTITION, DataType::Boolean, Some(self.views as usize), digits)
    }

    fn t_field(&self) -> Field {
        match self.level {
            PartitionLevel::Block => {
                let blocks = RowLength::Fixed(self.blocks());
                blocks.field(columns::PARTITION_T, DataType::Float32, Some(self.views as usize), None)
            }
            _ => columns::fixed_field(columns::PARTITION_T, DataType::Float32, self.views.cast_signed()),
        }
    }

    fn groups_per_token(&self) -> u32 {
        if self.level == PartitionLevel::Subtoken { self.digits } else { 1 }
    }

    /// Returns the number of blocks in a row of maximum length.
    fn blocks(&self) -> usize {
        self.rows.length().div_ceil(self.block_length.max(1) as usize)
    }

    /// Builds the operator.
    ///
    /// # Errors
    /// Fails if a value is out of its bounds.
    pub fn build(&self) -> Result<Partitions, OperatorError> {
        let problem = if self.views == 0 || self.views > 1024 {
            Some(format!("views: got {}, valid: 1 to 1024", self.views))
        } else if !(0.0..=0.49).contains(&self.eps) {
            Some(format!("eps: got {}, valid: 0 to 0.49", self.eps))
        } else if let Some([low, high]) =
            self.t_range.filter(|[low, high]| !(0.0 <= *low && low < high && *high <= 1.0))
        {
            Some(format!("t_range: got [{low}, {high}], valid: two numbers from 0 to 1, the smaller first"))
        } else if !(self.power > 0.0 && self.power.is_finite()) {
            Some(format!("power: got {}, valid: more than 0", self.power))
        } else {
            None
        };
        match problem {
            Some(message) => Err(OperatorError::Config { operator: NAME, message }),
            None => Ok(Partitions { config: self.clone() }),
        }
    }
}

/// The operator.
#[derive(Debug)]
pub struct Partitions {
    config: PartitionsConfig,
}

impl Operator for Partitions {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let (mut groups, mut times) = (Vec::new(), Vec::new());
        let (mut groups_per_row, mut times_per_row) = (Vec::new(), Vec::new());
        for sequence in sequences(batch).map_err(&arrow)? {
            let views = self.config.draw_views(&sequence);
            groups_per_row.push(views.groups.len());
            times_per_row.push(views.times.len());
            groups.extend(views.groups);
            times.extend(views.times);
        }
        let (partition, t) = (self.config.partition_field(), self.config.t_field());
        let groups: ArrayRef = Arc::new(BooleanArray::from(groups));
        let groups = list_column(&partition, groups, &groups_per_row).map_err(&arrow)?;
        let ts = list_column(&t, Arc::new(Float32Array::from(times)), &times_per_row).map_err(&arrow)?;
        let arrays = batch.columns().iter().cloned().chain([groups, ts]).collect();
        emit(RecordBatch::try_new(extend_schema(&batch.schema(), self.config.fields()), arrays).map_err(arrow)?)
    }
}

#[cfg(test)]
mod tests;
