//! An operator with deliberate faults, to test how a run handles them.

use arrow::array::RecordBatch;
use arrow::datatypes::Field;
use arrow::error::ArrowError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionKind};

use crate::config::{Column, JobContext, OperatorConfig};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Emit, Operator, OperatorError, SplitContext};

const NAME: &str = "faulty";

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// It panics at its first batch.
    Panics,
    /// Its own check finds its first row broken.
    BreaksItsInvariant,
}

/// The fault.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FaultySection {
    /// What goes wrong.
    pub fault: Fault,
}

impl Section for FaultySection {
    const KEY: &'static str = NAME;
}

/// Config of `faulty`.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultyConfig(Fault);

impl OperatorConfig for FaultyConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<FaultySection>());
    const COLUMNS: &'static [Column] = &[];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        Ok(context.section::<FaultySection>()?.map(|section| Self(section.fault)))
    }

    fn fields(&self) -> Vec<Field> {
        Vec::new()
    }

    fn operator(&self, _: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(Faulty(self.0)))
    }

    fn check(&self, batch: &RecordBatch, _: &CheckContext, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
        if self.0 == Fault::BreaksItsInvariant && batch.num_rows() > 0 {
            violations.push(Violation::new(0, "broken on purpose"));
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, _: usize) -> f64 {
        before
    }
}

struct Faulty(Fault);

impl Operator for Faulty {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        assert!(self.0 != Fault::Panics, "on purpose");
        emit(batch.clone())
    }
}
