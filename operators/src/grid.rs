//! `grid`: turns each image (or its codes) into a row with `input_ids` `[L]`, and `label` if the input has labels.
//!
//! ```text
//!   [document_id, tokens, label] ──► [sequence_id, input_ids, document_offsets [0], document_ids [one id], label]
//! ```
//!
//! It replaces `clean`, `tokenize` and `pack` and produces their columns, so the operators after it, the reader and
//! `verify` work as they do on text. Each number is its own token: V is 256 for pixels (MDM-Prime's C) and the codebook
//! size for codes.
//!
//! Cost: one copy of the numbers.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int32Array, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::problems::Problem;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, token_id_bits};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Emit, Measure, Meter, Operator, OperatorError, SharedStatistics, SplitContext};
use crate::pack;
use crate::rows::{ListRows, column, list_column};

const NAME: &str = "grid";

/// Configuration of `grid`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GridConfig {
    /// Numbers per row, L.
    pub length: usize,
    /// Number of valid values, C; every number is below it.
    pub values: usize,
    /// The classes, if rows have labels.
    pub labels: Option<Classes>,
}

/// What the job says about the labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    /// Names of the classes in label order; empty if the job gives none.
    pub names: Vec<String>,
}

/// Schema of the rows of numbers as read: `document_id` uint64, `tokens` list uint32, `label` int32 (null without
/// labels).
pub fn numbers_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("tokens", DataType::new_list(DataType::UInt32, false), false),
        Field::new(columns::LABEL, DataType::Int32, true),
    ]))
}

impl OperatorConfig for GridConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &[Column {
        name: columns::LABEL,
        dtype: "int32",
        when: "images and codes with labels",
        shape: "",
        contract: "class of the image, 0 or more; the manifest's job has the names, if any, in `input.images.classes`",
        meaning: "class of the image, from 0",
    }];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let input = &context.spec.input;
        let Some(values) = input.row_values() else { return Ok(None) };
        let names = input.images.as_ref().map(|images| images.classes.clone()).unwrap_or_default();
        let labels = input.has_labels().then_some(Classes { names });
        Ok(Some(Self { length: context.spec.pack.length as usize, values, labels }))
    }

    fn fields(&self) -> Vec<Field> {
        self.labels.iter().map(|_| Field::new(columns::LABEL, DataType::Int32, false)).collect()
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        let mut fields = vec![columns::sequence_id(), self.ids_field()];
        fields.push(columns::list_field(columns::DOCUMENT_OFFSETS, DataType::Int32));
        fields.push(columns::list_field(columns::DOCUMENT_IDS, DataType::UInt64));
        fields.extend(self.fields());
        Arc::new(Schema::new(fields))
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        pack::check_ids(batch, context, violations)?;
        pack::check_tokens(batch, context, violations)?;
        let offsets = ListRows::from_batch(batch, columns::DOCUMENT_OFFSETS)?;
        let starts = offsets.values::<Int32Array>(columns::DOCUMENT_OFFSETS)?.values();
        let ids = ListRows::from_batch(batch, columns::DOCUMENT_IDS)?;
        for row in 0..batch.num_rows() {
            if starts[offsets.range(row)] != [0] || ids.range(row).len() != 1 {
                violations.push(Violation::new(row, "document_offsets and document_ids are not those of one image"));
            }
        }
        if let Some(Classes { names }) = &self.labels {
            let labels = labels(batch)?;
            let most = if names.is_empty() { i32::MAX } else { names.len() as i32 - 1 };
            let wrong = |row: &usize| !(0..=most).contains(&labels.value(*row));
            for row in (0..labels.len()).filter(wrong) {
                violations.push(Violation::new(row, format!("label {}, valid: 0 to {most}", labels.value(row))));
            }
        }
        Ok(())
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        before + token_id_bits(vocab_size) / 8.0
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let Some(Classes { names }) = &self.labels else { return Ok(None) };
        let label = labels(row)?.value(0);
        let name = usize::try_from(label).ok().and_then(|label| names.get(label));
        let shown = name.map_or(label.to_string(), |name| format!("{label} ({name})"));
        let facts = vec![(columns::LABEL.to_owned(), shown)];
        Ok(Some(OperatorView { operator: NAME.into(), facts, ..OperatorView::default() }))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(Grid {
            config: self.clone(),
            split: context.split,
            row_count: 0,
            statistics: context.statistics.clone(),
            meter: context.meter.clone(),
        }))
    }
}

impl GridConfig {
    fn ids_field(&self) -> Field {
        RowLength::Fixed(self.length).field(columns::INPUT_IDS, DataType::Int32, None, None)
    }

    fn has_labels(&self) -> bool {
        self.labels.is_some()
    }
}

fn labels(batch: &RecordBatch) -> Result<&Int32Array, ArrowError> {
    let typed = column(batch, columns::LABEL)?.as_any().downcast_ref();
    typed.ok_or_else(|| ArrowError::SchemaError("column label has not type int32".into()))
}

/// The operator.
struct Grid {
    config: GridConfig,
    split: SplitId,
    /// Rows emitted so far.
    row_count: u64,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

impl Grid {
    /// Returns the numbers of the batch and the row lengths. Fails if a row has the wrong length or a number is out of
    /// range.
    fn ids(&self, batch: &RecordBatch) -> Result<(Int32Array, Vec<usize>), OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let rows = ListRows::from_batch(batch, "tokens").map_err(&arrow)?;
        let tokens = rows.values::<UInt32Array>("tokens").map_err(&arrow)?.values();
        let wrong = |row: usize, message: String| OperatorError::Data {
            operator: NAME,
            place: format!("split {}, row {}", self.split.0, self.row_count + row as u64),
            message,
        };
        let mut ids = Vec::with_capacity(rows.len() * self.config.length);
        for row in 0..rows.len() {
            let numbers = &tokens[rows.range(row)];
            if numbers.len() != self.config.length {
                let message = format!("got {} numbers, valid: {}", numbers.len(), self.config.length);
                return Err(wrong(row, message));
            }
            if let Some(number) = numbers.iter().find(|number| **number as usize >= self.config.values) {
                return Err(wrong(row, format!("got {number}, valid: 0 to {}", self.config.values - 1)));
            }
            ids.extend(numbers.iter().map(|number| *number as i32));
        }
        Ok((Int32Array::from(ids), vec![self.config.length; rows.len()]))
    }
}

impl Operator for Grid {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let rows = batch.num_rows();
        if rows == 0 {
            return Ok(());
        }
        let arrow = OperatorError::arrow(NAME);
        let (ids, lengths) = self.ids(batch)?;
        let tokens = ids.len() as u64;
        let first = u32::try_from(self.row_count);
        let last = u32::try_from(self.row_count + rows as u64 - 1);
        let (Ok(first), Ok(last)) = (first, last) else {
            return Err(OperatorError::Data {
                operator: NAME,
                place: format!("split {}", self.split.0),
                message: "got more than 2^32 rows, valid: up to 2^32 rows in a split".into(),
            });
        };
        self.row_count += rows as u64;
        let sequence_ids = UInt64Array::from_iter_values((first..=last).map(|row| self.split.sequence(row).0));
        let documents = column(batch, "document_id").map_err(&arrow)?.clone();
        let schema = self.config.output_schema(&batch.schema());
        let ones = vec![1; rows];
        let mut arrays: Vec<ArrayRef> = vec![
            Arc::new(sequence_ids),
            list_column(schema.field(1), Arc::new(ids), &lengths).map_err(&arrow)?,
            list_column(schema.field(2), Arc::new(Int32Array::from(vec![0; rows])), &ones).map_err(&arrow)?,
            list_column(schema.field(3), documents, &ones).map_err(&arrow)?,
        ];
        if self.config.has_labels() {
            arrays.push(Arc::new(labels(batch).map_err(&arrow)?.clone()));
        }
        let batch = RecordBatch::try_new(schema, arrays).map_err(&arrow)?;
        self.meter.add(Measure::Documents, rows as u64);
        self.meter.add(Measure::TextBytes, tokens);
        self.meter.add(Measure::Tokens, tokens);
        self.meter.add(Measure::Sequences, rows as u64);
        {
            let mut statistics = self.statistics.lock();
            statistics.documents += rows as u64;
            statistics.text_bytes += tokens;
            statistics.text_tokens += tokens;
        }
        emit(batch)
    }
}

#[cfg(test)]
pub(crate) mod tests;
