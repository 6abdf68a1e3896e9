//! `carry`: keeps columns of the input beside the documents of each sequence (`input.carry`).
//!
//! ```text
//!  [document_ids] ──► values of each document, which the reader has kept ──► [document_fields]
//! ```
//!
//! | column | type and shape | content |
//! |---|---|---|
//! | `document_fields` | list of structs \[*\] | a value for each name in `input.carry` and each entry of `document_ids` |
//!
//! Values are text: strings as they are, other values of JSON as they are written, other columns as Arrow casts them to
//! text. They are no tokens and the teacher does not see them.
//!
//! Cost: a look-up for each document of a row, and one copy of its values. Memory: about 4 MB of values, or those of
//! one row.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray, StringBuilder, StructArray, UInt64Array};
use arrow::datatypes::{DataType, Field, Fields};
use arrow::error::ArrowError;
use stillhouse_schemas::columns::{self, list_field};
use stillhouse_schemas::problems::Problem;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, with_columns};
use crate::document_pieces::document_name;
use crate::invariants::{CheckContext, Violation};
use crate::operator::{CarriedValues, Emit, Operator, OperatorError, SplitContext};
use crate::rows::{ListRows, list_column, sequence_ids};

const NAME: &str = "carry";
/// Bytes of values at which a batch is passed on.
const FULL_BYTES: usize = 4 << 20;
/// Documents of a row that `inspect` shows with their values.
const MAX_SHOWN: usize = 8;

/// Configuration of `carry`.
#[derive(Debug, Clone, PartialEq)]
pub struct CarryConfig {
    /// The names, in the order of the job file.
    names: Vec<String>,
}

impl CarryConfig {
    fn field(&self) -> Field {
        list_field(columns::DOCUMENT_FIELDS, DataType::Struct(self.value_fields()))
    }

    fn value_fields(&self) -> Fields {
        self.names.iter().map(|name| Field::new(name, DataType::Utf8, true)).collect()
    }
}

impl OperatorConfig for CarryConfig {
    const NAME: &'static str = NAME;

    const COLUMNS: &'static [Column] = &[Column {
        name: columns::DOCUMENT_FIELDS,
        dtype: "list struct of string",
        when: "`input.carry`",
        shape: "[*]",
        contract: "one struct per entry of document_ids, with a field per name in `input.carry`; equal for equal ids; null where \
                   the record has no value",
        meaning: "values of columns of the input for the documents of the row, in the order of document_ids",
    }];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let names = &context.spec.input.carry;
        Ok((!names.is_empty()).then(|| Self { names: names.clone() }))
    }

    fn fields(&self) -> Vec<Field> {
        vec![self.field()]
    }

    fn check(&self, batch: &RecordBatch, _: &CheckContext, violations: &mut Vec<Violation>) -> Result<(), ArrowError> {
        let ids = ListRows::from_batch(batch, columns::DOCUMENT_IDS)?;
        let id_values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?.values();
        let lists = ListRows::from_batch(batch, columns::DOCUMENT_FIELDS)?;
        let values = self.values(&lists)?;
        for row in 0..ids.len() {
            let (documents, structs) = (ids.range(row), lists.range(row));
            if documents.len() != structs.len() {
                let message = format!("{} document ids, {} document_fields", documents.len(), structs.len());
                violations.push(Violation::new(row, message));
                continue;
            }
            let pairs = documents.zip(structs).collect::<Vec<_>>();
            let same = |a: usize, b: usize| values.iter().all(|column| value(column, a) == value(column, b));
            let differ =
                |pair: &&[(usize, usize)]| id_values[pair[0].0] == id_values[pair[1].0] && !same(pair[0].1, pair[1].1);
            if let Some(pair) = pairs.windows(2).find(differ) {
                let document = document_name(id_values[pair[0].0]);
                violations.push(Violation::new(row, format!("document_fields has two values for {document}")));
            }
        }
        Ok(())
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let ids = ListRows::from_batch(row, columns::DOCUMENT_IDS)?;
        let id_values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?;
        let lists = ListRows::from_batch(row, columns::DOCUMENT_FIELDS)?;
        let values = self.values(&lists)?;
        let mut shown: Vec<(u64, usize)> =
            ids.range(0).zip(lists.range(0)).map(|(id, at)| (id_values.value(id), at)).collect();
        shown.dedup_by_key(|(id, _)| *id);
        let hidden = shown.len().saturating_sub(MAX_SHOWN);
        let of_document = |(id, at): &(u64, usize)| {
            let named = self.names.iter().zip(&values);
            let texts = named.filter_map(|(name, column)| Some(format!("{name} {}", value(column, *at)?)));
            (document_name(*id), texts.collect::<Vec<_>>().join(", "))
        };
        let mut facts: Vec<(String, String)> = shown.iter().take(MAX_SHOWN).map(of_document).collect();
        if hidden > 0 {
            facts.push(("further documents".into(), hidden.to_string()));
        }
        Ok(Some(OperatorView { operator: NAME.into(), facts, ..OperatorView::default() }))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let missing = || OperatorError::Config {
            operator: NAME,
            message: "got no values of the documents: a bug in this program".into(),
        };
        let source = Arc::clone(context.carried.as_ref().ok_or_else(missing)?);
        Ok(Box::new(Carry { config: self.clone(), source }))
    }
}

impl CarryConfig {
    /// The values of the documents, a column for each name.
    fn values<'a>(&self, lists: &'a ListRows<'_>) -> Result<Vec<&'a StringArray>, ArrowError> {
        let structs: &StructArray = lists.values(columns::DOCUMENT_FIELDS)?;
        let wrong = |name: &str| ArrowError::SchemaError(format!("document_fields has no strings {name:?}"));
        let of_name = |name: &String| {
            let column = structs.column_by_name(name).and_then(|column| column.as_any().downcast_ref::<StringArray>());
            column.ok_or_else(|| wrong(name))
        };
        self.names.iter().map(of_name).collect()
    }
}

fn value(column: &StringArray, at: usize) -> Option<&str> {
    column.is_valid(at).then(|| column.value(at))
}

struct Carry {
    config: CarryConfig,
    source: Arc<dyn CarriedValues>,
}

impl Operator for Carry {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow(NAME);
        let lists = ListRows::from_batch(batch, columns::DOCUMENT_IDS).map_err(&arrow)?;
        let ids = lists.values::<UInt64Array>(columns::DOCUMENT_IDS).map_err(&arrow)?;
        let mut rows = RowsBuilder::new(self.config.names.len());
        let mut first = 0;
        for row in 0..batch.num_rows() {
            let mut current: Option<(u64, Arc<[Option<String>]>)> = None;
            for &id in &ids.values()[lists.range(row)] {
                let (_, values) = match current.take().filter(|(last, _)| *last == id) {
                    Some(same) => current.insert(same),
                    None => current.insert((id, self.values_of(id)?)),
                };
                rows.append(values, row, batch)?;
            }
            rows.end_row();
            if rows.bytes >= FULL_BYTES || row + 1 == batch.num_rows() {
                let fields = rows.finish(&self.config).map_err(&arrow)?;
                let part = batch.slice(first, row + 1 - first);
                emit(with_columns(&part, self.config.fields(), vec![fields]).map_err(&arrow)?)?;
                first = row + 1;
            }
        }
        Ok(())
    }
}

impl Carry {
    fn values_of(&self, id: u64) -> Result<Arc<[Option<String>]>, OperatorError> {
        let failed = |message: String| OperatorError::Data { operator: NAME, place: document_name(id), message };
        let found = self.source.of_document(id).map_err(|e| {
            failed(format!("cannot read its values of `input.carry` from a temporary file (TMPDIR): {e}"))
        })?;
        let count = self.config.names.len();
        found
            .filter(|values| values.len() == count)
            .ok_or_else(|| failed(format!("has not the {count} values of `input.carry`: a bug in this program")))
    }
}

/// Collects the values of rows.
struct RowsBuilder {
    columns: Vec<StringBuilder>,
    lengths: Vec<usize>,
    /// Documents of the row being filled.
    documents: usize,
    bytes: usize,
}

impl RowsBuilder {
    fn new(columns: usize) -> Self {
        Self {
            columns: (0..columns).map(|_| StringBuilder::new()).collect(),
            lengths: Vec::new(),
            documents: 0,
            bytes: 0,
        }
    }

    fn append(&mut self, values: &[Option<String>], row: usize, batch: &RecordBatch) -> Result<(), OperatorError> {
        self.bytes += values.iter().map(|value| value.as_ref().map_or(0, String::len)).sum::<usize>();
        if i32::try_from(self.bytes).is_err() {
            let id = sequence_ids(batch).map_err(OperatorError::arrow(NAME))?.value(row);
            return Err(OperatorError::Data {
                operator: NAME,
                place: format!("sequence {id}"),
                message: format!("the values of its documents have more than {} bytes; carry fewer columns", i32::MAX),
            });
        }
        for (column, value) in self.columns.iter_mut().zip(values) {
            column.append_option(value.as_deref());
        }
        self.documents += 1;
        Ok(())
    }

    fn end_row(&mut self) {
        self.lengths.push(std::mem::take(&mut self.documents));
    }

    /// Returns the column of the rows so far.
    fn finish(&mut self, config: &CarryConfig) -> Result<ArrayRef, ArrowError> {
        let arrays: Vec<ArrayRef> = self.columns.iter_mut().map(|column| Arc::new(column.finish()) as _).collect();
        let structs = StructArray::try_new(config.value_fields(), arrays, None)?;
        self.bytes = 0;
        list_column(&config.field(), Arc::new(structs), &std::mem::take(&mut self.lengths))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use stillhouse_schemas::ids::SplitId;

    use super::*;
    use crate::testing::{context, gpt2};

    /// Documents 0 to 9 of split 3: `long` bytes of text, and a number that every third lacks.
    #[derive(Debug)]
    struct Numbered {
        long: usize,
    }

    impl CarriedValues for Numbered {
        fn of_document(&self, document: u64) -> io::Result<Option<Arc<[Option<String>]>>> {
            let ordinal = document & u64::from(u32::MAX);
            let number = (!ordinal.is_multiple_of(3)).then(|| ordinal.to_string());
            Ok((ordinal < 10).then(|| [Some("u".repeat(self.long)), number].into()))
        }
    }

    fn config() -> CarryConfig {
        CarryConfig { names: vec!["url".into(), "meta.n".into()] }
    }

    /// Rows with the documents of these ordinals.
    fn rows(documents: &[&[u32]]) -> RecordBatch {
        let field = list_field(columns::DOCUMENT_IDS, DataType::UInt64);
        let ids = UInt64Array::from_iter_values(documents.concat().iter().map(|n| SplitId(3).document(*n).0));
        let lengths: Vec<usize> = documents.iter().map(|row| row.len()).collect();
        let sequences = UInt64Array::from_iter_values((0..documents.len()).map(|n| n as u64));
        let schema = arrow::datatypes::Schema::new(vec![columns::sequence_id(), field.clone()]);
        let arrays: Vec<ArrayRef> = vec![Arc::new(sequences), list_column(&field, Arc::new(ids), &lengths).unwrap()];
        RecordBatch::try_new(Arc::new(schema), arrays).unwrap()
    }

    fn carried(batch: &RecordBatch, long: usize) -> Result<Vec<RecordBatch>, OperatorError> {
        let context = SplitContext { carried: Some(Arc::new(Numbered { long })), ..context(&gpt2()) };
        let mut out = Vec::new();
        let mut emit = |batch| {
            out.push(batch);
            Ok(())
        };
        config().operator(&context)?.process(batch, &mut emit)?;
        Ok(out)
    }

    fn violations(batch: &RecordBatch) -> Vec<Violation> {
        let check = CheckContext { vocab_size: 10, length: 4, split: SplitId(3), sequence_range: None };
        let mut violations = Vec::new();
        config().check(batch, &check, &mut violations).unwrap();
        violations
    }

    #[test]
    fn every_document_of_a_row_has_its_values() {
        let made = carried(&rows(&[&[0, 1, 1], &[], &[2]]), 2).unwrap();
        assert_eq!(made.len(), 1);
        let batch = &made[0];
        assert_eq!(config().output_schema(&rows(&[]).schema()), batch.schema());
        let lists = ListRows::from_batch(batch, columns::DOCUMENT_FIELDS).unwrap();
        assert_eq!([0, 1, 2].map(|row| lists.range(row)), [0..3, 3..3, 3..4]);
        let columns = config().values(&lists).unwrap();
        let values: Vec<_> = (0..4).map(|at| [value(columns[0], at), value(columns[1], at)]).collect();
        assert_eq!(
            values,
            [[Some("uu"), None], [Some("uu"), Some("1")], [Some("uu"), Some("1")], [Some("uu"), Some("2")]]
        );
        assert_eq!(violations(batch), []);
        let view = config().view(&batch.slice(0, 1)).unwrap().unwrap();
        let facts: Vec<(&str, &str)> = view.facts.iter().map(|(name, fact)| (name.as_str(), fact.as_str())).collect();
        assert_eq!(facts, [("document 0 of split 3", "url uu"), ("document 1 of split 3", "url uu, meta.n 1")]);
    }

    #[test]
    fn batches_with_large_values_are_passed_on_in_parts() {
        let batch = rows(&[&[1; 300], &[2; 300], &[4; 300], &[5]]);
        let made = carried(&batch, 16_384).unwrap();
        assert_eq!(made.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), [1, 1, 1, 1]);
        assert!(made.iter().all(|part| violations(part).is_empty()));
        assert_eq!(carried(&batch, 100).unwrap().len(), 1);
    }

    #[test]
    fn values_that_are_missing_or_differ_are_found() {
        let error = carried(&rows(&[&[1], &[10]]), 1).unwrap_err().to_string();
        assert!(error.starts_with("carry: document 10 of split 3: has not the 2 values"), "{error}");
        let batch = &carried(&rows(&[&[1, 2]]), 1).unwrap()[0];
        let replaced = |ids: &RecordBatch| {
            let fields = Arc::clone(batch.column_by_name(columns::DOCUMENT_FIELDS).unwrap());
            with_columns(ids, config().fields(), vec![fields]).unwrap()
        };
        let messages = |ids: &[u32]| violations(&replaced(&rows(&[ids])))[0].message.clone();
        assert_eq!(messages(&[1, 1]), "document_fields has two values for document 1 of split 3");
        assert_eq!(messages(&[1]), "1 document ids, 2 document_fields");
    }
}
