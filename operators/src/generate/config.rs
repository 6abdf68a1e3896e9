//! The declarations of `generate`: column, checks, size estimate and view.

use arrow::array::{Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::problems::Problem;

use super::{GIVEN, GenerateConfig, NAME, invariants};
use crate::config::{Column, JobContext, OperatorConfig, OperatorView};
use crate::extract::{ExtractConfig, sequences};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext, extend_schema};
use crate::pack::PackConfig;
use crate::rows::column;
use crate::vocabulary::Role;

impl OperatorConfig for GenerateConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &[Column {
        name: GIVEN,
        dtype: "int32",
        when: "mode `sequential`",
        shape: "",
        contract: "length of the prompt plus 1 (bos); the teacher wrote the positions from here to the padding",
        meaning: "number of positions at the start that the teacher did not write: bos and the prompt",
    }];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(sequential) = context.spec.sequential() else { return Ok(None) };
        let Some(extract) = ExtractConfig::resolve(context)? else { return Ok(None) };
        Ok(Some(Self {
            pack: PackConfig::resolve(context)?,
            extract,
            eos: context.require(Role::Eos, "the end of a text")?,
            sequential,
            seed: context.spec.noise_seed(),
        }))
    }

    fn fields(&self) -> Vec<Field> {
        let given = Field::new(GIVEN, DataType::Int32, false);
        std::iter::once(given).chain(self.extract.fields()).collect()
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        extend_schema(&self.pack.schema(), OperatorConfig::fields(self))
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        OperatorConfig::check(&self.pack, batch, context, violations)?;
        OperatorConfig::check(&self.extract, batch, context, violations)?;
        invariants::check(self, batch, violations)
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        self.extract.bytes_per_token(self.pack.bytes_per_token(before, vocab_size), vocab_size)
    }

    fn excess_bytes_per_token(&self, vocab_size: usize) -> f64 {
        self.extract.excess_bytes_per_token(vocab_size)
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let prompt_length = given_column(row)?.value(0);
        let (valid, length) = sequences(row)?.first().map_or((0, 0), |s| (s.valid as i32, s.tokens.len() as i32));
        let facts = vec![
            (GIVEN.to_owned(), prompt_length.to_string()),
            ("written".to_owned(), (valid - prompt_length).to_string()),
        ];
        let by = |i: i32| if i < prompt_length { GIVEN } else { "written" };
        let tokens = (0..length).map(|i| if i < valid { by(i).to_owned() } else { String::new() }).collect();
        let own = OperatorView { operator: NAME.into(), facts, tokens, ..OperatorView::default() };
        Ok(Some(match OperatorConfig::view(&self.extract, row)? {
            Some(teacher_view) => merge_views(own, teacher_view),
            None => own,
        }))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(self.build(context)?))
    }
}

/// Combines both views: for each token whether it was given or written, and the teacher's signals if it was written.
fn merge_views(mut own: OperatorView, teacher_view: OperatorView) -> OperatorView {
    own.facts.extend(teacher_view.facts);
    own.pictures.extend(teacher_view.pictures);
    for (token, more) in own.tokens.iter_mut().zip(teacher_view.tokens) {
        if token == "written" && !more.is_empty() {
            *token = format!("{token} · {more}");
        }
    }
    own
}

/// Returns the column `given`.
pub(super) fn given_column(batch: &RecordBatch) -> Result<&Int32Array, ArrowError> {
    let typed = column(batch, GIVEN)?;
    typed
        .as_any()
        .downcast_ref()
        .ok_or_else(|| ArrowError::SchemaError(format!("column {GIVEN} has the unexpected type {}", typed.data_type())))
}
