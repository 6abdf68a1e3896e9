//! `partitions`: every token in group 0 or group 1, so that one sequence is two complementary masked examples
//! (Partition Generative Modeling, Deschenaux et al. 2025).
//!
//! ```text
//!  t in [eps, 1 − eps], one for each view        g_i = 1 with probability 1 − α(t), each token on its own
//!
//!  the  cat  sat  on  the  mat                   group 0 is predicted from group 1, and the other way round
//!   0    1    0   0    1    1
//! ```
//!
//! | column | | |
//! |---|---|---|
//! | `partition` | bool \[views, L\] | true for group 1; false on padding |
//! | `partition_t` | float32 \[views\] | t of each view, exactly the number that the groups were drawn with |
//!
//! With the schedule `linear` 1 − α(t) = t, with `polynomial` 1 − (1 − t)^power. `stratified` draws one t in each of `views` equal
//! parts of \[eps, 1 − eps\], in a random order; `independent` draws each t from all of it. A group that
//! would be empty among the tokens that are no padding gets one of them, at random, where there are two or more.
//!
//! Every random number is a function of the seed, a purpose, `sequence_id` and the view (and, for the groups, the position), drawn from
//! [`keyed_uniforms`]; never of order, batch or thread:
//!
//! | purpose | stream | what |
//! |---|---|---|
//! | `partition_strata` | 0 | the order of the strata |
//! | `partition_t` | view | where t lies in its stratum |
//! | `partition_group` | view | the i-th number decides position i |
//! | `partition_repair` | view | which token fills an empty group |
//!
//! Cost: half a Philox block per token and view.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use serde::{Deserialize, Serialize};
use stillhouse_noise::keyed_uniforms;
use stillhouse_schemas::columns::{self, Rows};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{self, Sampling, Schedule};

use crate::declaration::{Column, Declaration, JobFacts};
use crate::invariants::{Broken, Limits, float_column};
use crate::operator::{Emit, Operator, OperatorError, SplitContext, extended};
use crate::rows::{ListRows, list_column, sequence_ids};

const NAME: &str = "partitions";

/// Config of `partitions`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionsConfig {
    /// Partitions per sequence.
    pub views: u32,
    /// The schedule α(t).
    pub schedule: Schedule,
    /// Exponent of the polynomial schedule.
    pub power: f64,
    /// How t is drawn.
    pub sampling: Sampling,
    /// t lies in [eps, 1 − eps].
    pub eps: f64,
    /// Seed of the job.
    pub seed: u64,
    /// Whether the columns of the data set are fixed-size lists.
    pub rows: Rows,
}

/// One view of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Partition {
    /// t, as it is stored.
    pub t: f32,
    /// Whether each position is in group 1.
    pub groups: Vec<bool>,
}

/// The part of the tokens that group 1 has on average, 1 − α(t).
pub fn group_share(schedule: Schedule, power: f64, t: f64) -> f64 {
    match schedule {
        Schedule::Linear => t,
        Schedule::Polynomial => 1.0 - (1.0 - t).powf(power),
    }
}

/// All views of one sequence. `mask` is its attention mask: false on padding.
///
/// ```
/// use stillhouse_operators::partitions::{PartitionsConfig, partition_row};
/// use stillhouse_schemas::{columns::Rows, spec::Partitions};
///
/// let config = PartitionsConfig::new(&Partitions::default(), 42, Rows::Fixed(8));
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

/// t as f32, not rounded out of its bounds.
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

impl Declaration for PartitionsConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &[
        Column {
            name: columns::PARTITION,
            dtype: "fixed list bool",
            when: "`partitions`",
            shape: "[views, L]",
            contract: "true = group 1, padding false",
            meaning: "the group of each token, true for group 1, in each of several views (Partition Generative Modeling)",
        },
        Column {
            name: columns::PARTITION_T,
            dtype: "fixed list float32",
            when: "`partitions`",
            shape: "[views]",
            contract: "",
            meaning: "the t that each view was drawn with",
        },
    ];

    fn of_job(facts: &JobFacts<'_>) -> Result<Option<Self>, Problem> {
        let section = facts.spec.partitions.as_ref();
        Ok(section.map(|section| Self::new(section, facts.spec.seed, facts.rows())))
    }

    fn fields(&self) -> Vec<Field> {
        vec![self.partition_field(), self.t_field()]
    }

    fn check(&self, batch: &RecordBatch, _: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
        let groups = ListRows::of(batch, columns::PARTITION)?;
        let group_values = groups.values::<BooleanArray>(columns::PARTITION)?;
        let times = float_column(batch, columns::PARTITION_T)?;
        let sequences = crate::extract::sequences(batch)?;
        for (row, sequence) in sequences.iter().enumerate() {
            let length = sequence.tokens.len();
            let mask: Vec<bool> = (0..length).map(|i| i < sequence.valid).collect();
            let stored: Vec<bool> = groups.range(row).map(|i| group_values.value(i)).collect();
            let expected = partition_row(self, sequence.id, &mask);
            let same = expected.iter().flat_map(|p| &p.groups).eq(stored.iter())
                && expected.iter().map(|p| p.t).eq(times.row(row).iter().copied());
            if !same {
                broken.push(Broken::new(row, "partitions are not those of the seed"));
            }
            for (view, stored) in stored.chunks(length.max(1)).enumerate() {
                let ones = stored.iter().filter(|&&g| g).count();
                if sequence.valid >= 2 && (ones == 0 || ones == sequence.valid) {
                    broken.push(Broken::new(row, format!("view {view}: a group is empty")));
                }
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, _: usize) -> f64 {
        before + f64::from(self.views) / 8.0
    }

    fn operator(&self, _: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build()?))
    }
}

impl PartitionsConfig {
    /// The config of a job.
    pub fn new(spec: &spec::Partitions, seed: u64, rows: Rows) -> Self {
        Self {
            views: spec.views,
            schedule: spec.schedule,
            power: spec.power,
            sampling: spec.sampling,
            eps: spec.eps,
            seed,
            rows,
        }
    }

    fn partition_field(&self) -> Field {
        self.rows.field(columns::PARTITION, DataType::Boolean, Some(self.views as usize), None)
    }

    fn t_field(&self) -> Field {
        columns::fixed_field(columns::PARTITION_T, DataType::Float32, self.views.cast_signed())
    }

    /// Makes the operator.
    ///
    /// # Errors
    /// When a value is out of its bounds.
    pub fn build(&self) -> Result<Partitions, OperatorError> {
        let problem = if self.views == 0 || self.views > 1024 {
            Some(format!("views: got {}, valid: 1 to 1024", self.views))
        } else if !(0.0..=0.49).contains(&self.eps) {
            Some(format!("eps: got {}, valid: 0 to 0.49", self.eps))
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
        let ids = sequence_ids(batch).map_err(&arrow)?;
        let rows = ListRows::of(batch, columns::INPUT_IDS).map_err(&arrow)?;
        let masks = match batch.column_by_name(columns::ATTENTION_MASK) {
            None => None,
            Some(column) => {
                let masks = ListRows::new(columns::ATTENTION_MASK, column).map_err(&arrow)?;
                let values: &BooleanArray = masks.values(columns::ATTENTION_MASK).map_err(&arrow)?;
                Some((masks, values))
            }
        };

        let mut groups = Vec::new();
        let mut ts = Vec::with_capacity(rows.len() * self.config.views as usize);
        let mut lengths = Vec::with_capacity(rows.len());
        for row in 0..rows.len() {
            let length = rows.range(row).len();
            let mask: Vec<bool> = match &masks {
                None => vec![true; length],
                Some((masks, values)) => masks.range(row).map(|i| values.value(i)).collect(),
            };
            for view in partition_row(&self.config, ids.value(row), &mask) {
                groups.extend(view.groups);
                ts.push(view.t);
            }
            lengths.push(length * self.config.views as usize);
        }

        let (partition, t) = (self.config.partition_field(), self.config.t_field());
        let groups: ArrayRef = Arc::new(BooleanArray::from(groups));
        let groups = list_column(&partition, groups, &lengths).map_err(&arrow)?;
        let views = vec![self.config.views as usize; rows.len()];
        let ts = list_column(&t, Arc::new(Float32Array::from(ts)), &views).map_err(&arrow)?;
        let arrays = batch.columns().iter().cloned().chain([groups, ts]).collect();
        emit(RecordBatch::try_new(extended(&batch.schema(), self.config.fields()), arrays).map_err(arrow)?)
    }
}

#[cfg(test)]
mod tests;
