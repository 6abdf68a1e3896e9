//! The rows of one table of a mixture: its text and the columns of `input.carry`, whatever its files call them.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, LargeStringArray, RecordBatch, StructArray, new_null_array};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use serde_json::Value;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::Store;
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{ColumnType, FILE_COLUMN, Input, SOURCE_COLUMN};
use stillhouse_source::{QueryTable, as_text, is_single};

use crate::check::is_string;
use crate::stage::staged_columns;

/// Where a carried value of a table comes from.
#[derive(Debug, Clone, PartialEq)]
enum ValueSource {
    /// The name of the table.
    TableName,
    /// The table has no such column.
    Nothing,
    /// A column, or a field inside of it.
    Column { name: String, path: Vec<String> },
}

impl ValueSource {
    /// Finds a name among columns: a column, or a field of a column as `meta.lang`.
    fn find(name: &str, columns: &Schema) -> Self {
        if columns.field_with_name(name).is_ok() {
            return Self::Column { name: name.to_owned(), path: Vec::new() };
        }
        let mut path = name.split('.').map(str::to_owned);
        let first = path.next().and_then(|first| columns.field_with_name(&first).ok().map(|field| (first, field)));
        let path: Vec<String> = path.collect();
        match first {
            Some((name, field)) if !path.is_empty() && has_field(field.data_type(), &path) => {
                Self::Column { name, path }
            }
            _ => Self::Nothing,
        }
    }
}

/// Whether a column of objects has a field at a path.
fn has_field(kind: &DataType, path: &[String]) -> bool {
    match (kind, path) {
        (_, []) => true,
        (DataType::Struct(fields), [first, rest @ ..]) => {
            fields.iter().any(|field| field.name() == first && has_field(field.data_type(), rest))
        }
        _ => false,
    }
}

/// A table, and where its staged columns come from.
#[derive(Debug, Clone)]
pub(super) struct TableRows {
    table: QueryTable,
    /// The columns to read.
    schema: SchemaRef,
    /// The columns of the rows: text, then those that are carried.
    columns: Vec<(String, ValueSource)>,
}

impl TableRows {
    /// Opens a table: reads what determines its columns. `input` is that of the job.
    ///
    /// # Errors
    /// When a file cannot be read, or a column is missing or has values that are no text.
    pub(super) fn open(store: &Store, table: &QueryTable, input: &Input) -> Result<Self, SourceError> {
        let invalid = |message: String| SourceError::Mixture { message, retryable: false };
        let found = table.schema(store)?;
        let mut table = table.clone();
        let text = table.input.text.clone();
        let field = found.field_with_name(&text).map_err(|_| {
            let there = found.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>();
            let meant = did_you_mean(&text, &there);
            let there = there.join(", ");
            invalid(format!("{}: no column {text:?}, which `text` names; its columns: {there}{meant}", table.name))
        })?;
        if !is_string(field.data_type()) {
            let kind = field.data_type();
            return Err(invalid(format!("{}: the column {text:?} is of type {kind}; valid: strings", table.name)));
        }
        let mut columns = vec![(input.text.clone(), ValueSource::Column { name: text.clone(), path: Vec::new() })];
        let mut read = vec![text.clone()];
        for name in staged_columns(input).into_iter().skip(1) {
            let source = match name {
                SOURCE_COLUMN => ValueSource::TableName,
                name => ValueSource::find(name, &found),
            };
            if let ValueSource::Column { name: column, path } = &source {
                if path.is_empty()
                    && let Ok(field) = found.field_with_name(column)
                    && !is_single(field.data_type())
                {
                    let kind = field.data_type();
                    return Err(invalid(format!(
                        "{}: the column {column:?}, which `input.carry` names, is of type {kind}; valid: strings, numbers, booleans, \
                         dates and times",
                        table.name
                    )));
                }
                // a value of another type than the first thousand would make a bad record, and it is only carried
                if column != FILE_COLUMN && table.input.format().has_untyped_columns() {
                    table.input.schema.entry(column.clone()).or_insert(ColumnType::String);
                }
                if !read.contains(column) {
                    read.push(column.clone());
                }
            }
            columns.push((name.to_owned(), source));
        }
        let typed = table.schema(store)?;
        let fields: Vec<Field> = read.iter().filter_map(|name| typed.field_with_name(name).ok().cloned()).collect();
        Ok(Self { table, schema: Arc::new(Schema::new(fields)), columns })
    }

    /// The names in `input.carry` of which the table has no column.
    fn missing(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter(|(_, source)| *source == ValueSource::Nothing).map(|(name, _)| name.as_str())
    }

    /// Name of the table.
    pub(super) fn name(&self) -> &str {
        &self.table.name
    }

    /// Columns of the rows, all of them text.
    pub(super) fn staged_schema(&self) -> SchemaRef {
        let field = |(name, _): &(String, ValueSource)| Field::new(name, DataType::LargeUtf8, true);
        Arc::new(Schema::new(self.columns.iter().map(field).collect::<Vec<_>>()))
    }

    /// Reads all rows in order. Returns the number of bad records skipped, by reason.
    ///
    /// # Errors
    /// See [`QueryTable::read`]; the errors of `take`.
    pub(super) fn read(
        &self,
        store: &Store,
        take: &mut dyn FnMut(RecordBatch) -> Result<(), SourceError>,
    ) -> Result<BTreeMap<String, u64>, SourceError> {
        let staged = self.staged_schema();
        self.table.read(store, &self.schema, &mut |batch, _| {
            let columns =
                self.columns.iter().map(|(_, source)| self.column(&batch, source)).collect::<Result<_, _>>()?;
            take(RecordBatch::try_new(staged.clone(), columns).map_err(|e| self.failed(e))?)
        })
    }

    fn failed(&self, error: impl std::fmt::Display) -> SourceError {
        SourceError::Mixture { message: format!("{}: {error}", self.table.name), retryable: false }
    }

    fn column(&self, batch: &RecordBatch, source: &ValueSource) -> Result<ArrayRef, SourceError> {
        let rows = batch.num_rows();
        let (name, path) = match source {
            ValueSource::TableName => {
                return Ok(Arc::new(LargeStringArray::from_iter_values(std::iter::repeat_n(&self.table.name, rows))));
            }
            ValueSource::Nothing => return Ok(new_null_array(&DataType::LargeUtf8, rows)),
            ValueSource::Column { name, path } => (name, path),
        };
        let missing = || self.failed(format!("a batch without the column {name:?}: a bug in this program"));
        let column = batch.column_by_name(name).ok_or_else(missing)?;
        let text = |column: &ArrayRef| as_text(column).map_err(|e| self.failed(e));
        if path.is_empty() {
            return Ok(Arc::new(text(column)?));
        }
        if matches!(column.data_type(), DataType::Struct(_)) {
            let inside = field_of(column, path).ok_or_else(missing)?;
            return Ok(Arc::new(text(&inside)?));
        }
        Ok(Arc::new(text(column)?.iter().map(|json| value_at(json?, path)).collect::<LargeStringArray>()))
    }
}

/// The values of a field inside of a column of structs; null where an outer value is null.
fn field_of(column: &ArrayRef, path: &[String]) -> Option<ArrayRef> {
    let [first, rest @ ..] = path else { return Some(column.clone()) };
    let outer: &StructArray = column.as_struct_opt()?;
    let inner = outer.column_by_name(first)?;
    let nulls = datafusion::arrow::buffer::NullBuffer::union(outer.nulls(), inner.nulls());
    let data = inner.to_data().into_builder().nulls(nulls).build().ok()?;
    field_of(&datafusion::arrow::array::make_array(data), rest)
}

/// The value at a path of a JSON object, as text: a string as it is, anything else as JSON.
fn value_at(json: &str, path: &[String]) -> Option<String> {
    let mut value: Value = serde_json::from_str(json).ok()?;
    for key in path {
        value = value.get_mut(key)?.take();
    }
    match value {
        Value::Null => None,
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}

/// Returns the names of `input.carry` that no table has, as problems.
pub(super) fn carried_by_none(tables: &[TableRows], input: &Input) -> Vec<Problem> {
    let problem = |(i, name): (usize, &String)| {
        let is_missing = |table: &TableRows| table.missing().any(|missing| missing == name);
        tables.iter().all(is_missing).then(|| {
            // the program put the name of the table first
            let i = i - usize::from(input.carry.first().is_some_and(|first| first == SOURCE_COLUMN));
            let message = "no table has a column of this name in its first 1000 records; valid: a column of at least one table. If it is \
                           rarer, give the table a `schema` with it";
            Problem::new(format!("input.carry[{i}]"), format!("{name:?}"), message)
        })
    };
    input.carry.iter().enumerate().filter_map(problem).collect()
}
