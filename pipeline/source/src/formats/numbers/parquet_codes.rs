//! Codes in Parquet: a column of lists of integers, and one of labels.
//!
//! Memory: a batch of at most 256 rows of the two columns, and a page of each.

use std::vec::IntoIter;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{InputFile, RangeCache, Store};
use stillhouse_operators::images::BadImage;
use stillhouse_schemas::spec::Codes;

use super::{Content, RawRecord, RawRecords, bad_record, label, reason};

const BATCH: usize = 256;

/// Builds a record of codes, each of which must be below `size`.
pub(super) fn raw(
    position: RecordPosition,
    numbers: impl Iterator<Item = i128>,
    size: u32,
    label: Result<Option<i32>, BadImage>,
) -> RawRecord {
    let mut stored = Vec::new();
    let mut codes = Vec::new();
    let mut wrong = None;
    for (place, number) in numbers.enumerate() {
        match u32::try_from(number).ok().filter(|code| *code < size) {
            Some(code) => {
                stored.extend_from_slice(&code.to_le_bytes());
                codes.push(code);
            }
            None => {
                stored.extend_from_slice(&u32::MAX.to_le_bytes());
                wrong = wrong.or(Some((place, number)));
            }
        }
    }
    let content = match wrong {
        Some((place, number)) => bad_record(
            reason::RANGE,
            format!("got code {number} at position {place}; valid: 0 to {} (`input.codes.size`)", size - 1),
        ),
        None => Ok(Content::Numbers(codes)),
    };
    RawRecord { position, stored, label, content }
}

fn wrong(file: &InputFile, error: impl std::fmt::Display) -> SourceError {
    SourceError::corrupt(&file.path, format!("cannot be read as Parquet: {error}"))
}

type Builder = ParquetRecordBatchReaderBuilder<RangeCache>;

fn builder(store: &Store, file: &InputFile, codes: &Codes) -> Result<Builder, SourceError> {
    let builder = Builder::try_new(RangeCache::new(store, &file.location, file.size)).map_err(|e| match e {
        parquet::errors::ParquetError::External(e) => match e.downcast::<object_store::Error>() {
            Ok(error) => SourceError::from_store(&file.path, *error),
            Err(e) => wrong(file, e),
        },
        e => wrong(file, e),
    })?;
    column(file, &builder, &codes.column, "lists of whole numbers", is_list)?;
    if let Some(labels) = &codes.labels {
        column(file, &builder, labels, "whole numbers", DataType::is_integer)?;
    }
    Ok(builder)
}

fn is_list(kind: &DataType) -> bool {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            item.data_type().is_integer()
        }
        _ => false,
    }
}

/// Checks that a column exists and has a valid type.
fn column(
    file: &InputFile,
    builder: &Builder,
    name: &str,
    what: &str,
    serves: impl Fn(&DataType) -> bool,
) -> Result<(), SourceError> {
    let fields = builder.schema().fields();
    match fields.iter().find(|field| field.name() == name) {
        Some(field) if serves(field.data_type()) => Ok(()),
        Some(field) => {
            let kind = field.data_type();
            Err(wrong(file, format_args!("column {name:?} has type {kind}; valid: {what}")))
        }
        None => {
            let names: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
            Err(wrong(file, format_args!("no column {name:?}; columns: {}", names.join(", "))))
        }
    }
}

/// Returns the number of rows of a file.
pub(super) fn rows(store: &Store, file: &InputFile, codes: &Codes) -> Result<u64, SourceError> {
    Ok(builder(store, file, codes)?.metadata().file_metadata().num_rows().max(0) as u64)
}

/// Reads rows of codes of a file.
pub(super) struct ParquetCodes {
    file: InputFile,
    reader: ParquetRecordBatchReader,
    codes: Codes,
    waiting: IntoIter<RawRecord>,
    row: u64,
    end: u64,
}

impl ParquetCodes {
    pub fn open(store: &Store, file: &InputFile, codes: &Codes, (start, end): (u64, u64)) -> Result<Self, SourceError> {
        let builder = builder(store, file, codes)?;
        let wanted = [Some(&codes.column), codes.labels.as_ref()];
        let fields = builder.schema().fields();
        let places = (0..fields.len()).filter(|i| wanted.contains(&Some(fields[*i].name())));
        let mask = ProjectionMask::roots(builder.parquet_schema(), places.collect::<Vec<_>>());
        let count = (end - start) as usize;
        let reader = builder.with_projection(mask).with_offset(start as usize).with_limit(count);
        let reader = reader.with_batch_size(BATCH.min(count.max(1))).build().map_err(|e| wrong(file, e))?;
        Ok(Self { file: file.clone(), reader, codes: codes.clone(), waiting: Vec::new().into_iter(), row: start, end })
    }

    fn batch(&mut self) -> Result<bool, SourceError> {
        let Some(batch) = self.reader.next() else { return Ok(false) };
        let batch = batch.map_err(|e| wrong(&self.file, e))?;
        let column = |name: &str| batch.column_by_name(name).cloned().ok_or_else(|| wrong(&self.file, "lost a column"));
        let lists = column(&self.codes.column)?;
        let labels = match &self.codes.labels {
            Some(name) => Some(cast(&column(name)?, &DataType::Int64).map_err(|e| wrong(&self.file, e))?),
            None => None,
        };
        let mut raws = Vec::with_capacity(batch.num_rows());
        for i in 0..batch.num_rows() {
            let position = RecordPosition::Row(self.row + i as u64);
            let label = match &labels {
                Some(labels) if labels.is_null(i) => {
                    bad_record(reason::NO_LABEL, "its label is null, or no number of 64 bits")
                }
                Some(labels) => label(labels.as_primitive::<Int64Type>().value(i)),
                None => Ok(None),
            };
            raws.push(match cell(&lists, i).map_err(|e| wrong(&self.file, e))? {
                Some(numbers) => {
                    // a null becomes -1, which is not a valid code
                    let number = |k: usize| if numbers.is_null(k) { -1 } else { i128::from(numbers.value(k)) };
                    raw(position, (0..numbers.len()).map(number), self.codes.size, label)
                }
                None => {
                    let message =
                        format!("the value of {:?} is null; valid: a list of whole numbers", self.codes.column);
                    RawRecord { position, stored: Vec::new(), label, content: bad_record(reason::NULL, message) }
                }
            });
        }
        self.row += raws.len() as u64;
        self.waiting = raws.into_iter();
        Ok(true)
    }
}

/// Returns the numbers of a row; `None` if it is null.
fn cell(lists: &ArrayRef, row: usize) -> Result<Option<Int64Array>, arrow::error::ArrowError> {
    if lists.is_null(row) {
        return Ok(None);
    }
    let values = match lists.data_type() {
        DataType::FixedSizeList(..) => lists.as_fixed_size_list().value(row),
        DataType::LargeList(_) => lists.as_list::<i64>().value(row),
        _ => lists.as_list::<i32>().value(row),
    };
    Ok(Some(cast(&values, &DataType::Int64)?.as_primitive::<Int64Type>().clone()))
}

impl RawRecords for ParquetCodes {
    fn next(&mut self) -> Result<Option<RawRecord>, SourceError> {
        loop {
            if let Some(raw) = self.waiting.next() {
                return Ok(Some(raw));
            }
            if !self.batch()? {
                return match self.row < self.end {
                    true => Err(wrong(&self.file, format_args!("ends at row {}; its footer says more", self.row))),
                    false => Ok(None),
                };
            }
        }
    }
}
