//! The number of tokens of each row, padding not counted: `length` int32.

use std::sync::Arc;

use arrow::array::{Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::manifest::Statistic;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionKind};

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, StatisticKind, with_columns};
use crate::extract::sequences;
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Emit, Operator, OperatorError, SharedStatistics, SplitContext};
use crate::rows::column;

const NAME: &str = "lengths";
const LENGTH: &str = "length";
const SHORT: &str = "short_sequences";

/// The number of tokens of each sequence.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LengthsSection {}

impl Section for LengthsSection {
    const KEY: &'static str = NAME;
}

/// Config of `lengths`.
#[derive(Debug, Clone, PartialEq)]
pub struct LengthsConfig {}

impl OperatorConfig for LengthsConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<LengthsSection>());
    const COLUMNS: &'static [Column] = &[Column {
        name: LENGTH,
        dtype: "int32",
        when: "`lengths`",
        shape: "",
        contract: "tokens that are no padding",
        meaning: "number of tokens of the sequence, padding not counted",
    }];
    const STATISTICS: &'static [StatisticKind] =
        &[StatisticKind { name: SHORT, meaning: "Sequences of less than half the longest length" }];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        Ok(context.section::<LengthsSection>()?.map(|_| Self {}))
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::new(LENGTH, DataType::Int32, false)]
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(Lengths { config: self.clone(), statistics: context.statistics.clone() }))
    }

    fn check(&self, batch: &RecordBatch, _: &CheckContext, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
        let stored = lengths(batch)?;
        for (row, sequence) in sequences(batch)?.iter().enumerate() {
            if stored.value(row) != sequence.valid as i32 {
                violations
                    .push(Violation::new(row, format!("length {}, valid: {}", stored.value(row), sequence.valid)));
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, _: usize) -> f64 {
        before + 0.001
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let fact = (LENGTH.to_owned(), lengths(row)?.value(0).to_string());
        Ok(Some(OperatorView { operator: NAME.into(), facts: vec![fact], ..OperatorView::default() }))
    }
}

fn lengths(batch: &RecordBatch) -> Result<&Int32Array, ArrowError> {
    let typed = column(batch, LENGTH)?.as_any().downcast_ref();
    typed.ok_or_else(|| ArrowError::SchemaError("column length has not type int32".into()))
}

/// The operator.
struct Lengths {
    config: LengthsConfig,
    statistics: SharedStatistics,
}

impl Operator for Lengths {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let sequences = sequences(batch).map_err(&arrow)?;
        let short = sequences.iter().filter(|s| 2 * s.valid < s.tokens.len()).count();
        self.statistics.lock().count(SHORT, Statistic::Sum(short as u64));
        let lengths = Int32Array::from_iter_values(sequences.iter().map(|s| s.valid as i32));
        emit(with_columns(batch, self.config.fields(), vec![Arc::new(lengths)]).map_err(&arrow)?)
    }
}
