//! Records of CSV files (RFC 4180): quoted fields may hold delimiters, quotes and newlines, and be of any length.
//!
//! The first record is the header. A record with another number of fields is bad. Blank lines are not records. Only the
//! text field is kept, and only it must be UTF-8. CSV has no nulls: an empty field is an empty document.

pub(super) mod table;

use std::io;

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use stillhouse_base::source_error::{SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::spec::Input;

use super::{BytesFormat, Cut, FileColumn};
use crate::records::{BadRecord, Carried, MAX_CARRIED_BYTES, ReadError, RecordStart, Records, push};
use crate::spool::Spool;
use crate::table_format::TableFormat;

const OUTPUT_BYTES: usize = 64 << 10;
const MAX_FIELD_ENDS: usize = 256;
const MAX_HEADER_BYTES: usize = 1 << 20;

/// The CSV parser and its position.
struct Parser {
    cursor: Cursor,
    csv: Reader,
    output: Vec<u8>,
    ends: [usize; MAX_FIELD_ENDS],
}

impl Parser {
    fn new(cursor: Cursor, delimiter: u8) -> Self {
        let csv = ReaderBuilder::new().delimiter(delimiter).build();
        Self { cursor, csv, output: vec![0; OUTPUT_BYTES], ends: [0; MAX_FIELD_ENDS] }
    }

    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        self.cursor.skip_byte_order_mark()?;
        loop {
            let available = self.cursor.fill()?;
            if available.is_empty() {
                return Ok(None);
            }
            let n = available.iter().position(|b| !matches!(b, b'\r' | b'\n'));
            let passed = &available[..n.unwrap_or(available.len())];
            let newlines = memchr::memchr_iter(b'\n', passed).count() as u64;
            let length = passed.len();
            self.cursor.newlines += newlines;
            self.cursor.consume(length);
            if n.is_some() {
                self.csv.reset();
                // feed an empty line first, so that the parser does not strip a byte order mark in the middle of a file
                self.csv.read_record(b"\n", &mut self.output, &mut self.ends);
                return Ok(Some(RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines }));
            }
        }
    }

    /// Passes a record and calls `on_field` with parts of its fields: the index of the field, and bytes of it. Returns
    /// the number of fields.
    ///
    /// If the file ends inside a quoted field, this is an error, not a bad record: to skip it would skip everything
    /// after the quote.
    fn record(&mut self, mut on_field: impl FnMut(usize, &[u8])) -> io::Result<usize> {
        let (mut fields, mut before, began) = (0, 0, self.cursor.newlines);
        loop {
            let input = self.cursor.fill()?;
            let at_end = input.is_empty();
            // at the end of the file, feed a newline: if it does not end the record, a quoted field is open
            let input = if at_end { b"\n" } else { input };
            let (result, read, written, ended) = self.csv.read_record(input, &mut self.output, &mut self.ends);
            if at_end && matches!(result, ReadRecordResult::InputEmpty) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("line {}: {UNTERMINATED}", began + 1)));
            }
            if !at_end {
                self.cursor.newlines += memchr::memchr_iter(b'\n', &input[..read]).count() as u64;
                self.cursor.consume(read);
            }
            let mut from = 0;
            for end in &self.ends[..ended] {
                let to = (end - before).min(written);
                on_field(fields, &self.output[from..to]);
                (from, fields) = (to, fields + 1);
            }
            if from < written {
                on_field(fields, &self.output[from..written]);
            }
            before += written;
            if matches!(result, ReadRecordResult::Record | ReadRecordResult::End) {
                return Ok(fields);
            }
        }
    }
}

const UNTERMINATED: &str = "a quoted field begins in this record and the file ends in it; valid: a closing quote";

fn wrong_number(got: usize, names: &[String]) -> String {
    format!("got {got} fields; valid: {}, as in the header ({})", names.len(), names.join(", "))
}

/// Returns the names in the header, and the parser after it; no names if the file is empty.
fn header(cursor: Cursor, file: &str, delimiter: u8) -> Result<(Vec<String>, Parser), SourceError> {
    let mut parser = Parser::new(cursor, delimiter);
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut size = 0;
    if parser.next().map_err(|e| SourceError::from_io(file, e))?.is_some() {
        parser
            .record(|field, bytes| {
                size += bytes.len() + 1;
                if size <= MAX_HEADER_BYTES {
                    if names.len() <= field {
                        names.resize_with(field + 1, Vec::new);
                    }
                    names[field].extend_from_slice(bytes);
                }
            })
            .map_err(|e| SourceError::from_io(file, e))?;
    }
    if size > MAX_HEADER_BYTES {
        return Err(SourceError::corrupt(
            file,
            format!("line 1: the header has {size} bytes; valid: at most {MAX_HEADER_BYTES}. Is it a CSV file?"),
        ));
    }
    let names = names.iter().map(|n| String::from_utf8_lossy(n).into_owned()).collect();
    Ok((names, parser))
}

fn duplicate_column(file: &InputFile, name: &str) -> SourceError {
    SourceError::corrupt(&file.path, format!("line 1: two columns are named {name:?}; valid: each name once"))
}

fn delimiter(input: &Input) -> u8 {
    input.csv_delimiter.bytes().next().unwrap_or(b',')
}

/// Returns the index of the field with a name; 0 in an empty file.
fn field_named(file: &InputFile, names: &[String], name: &str, key: &str) -> Result<usize, SourceError> {
    let mut found = names.iter().enumerate().filter(|(_, there)| *there == name);
    match (found.next(), found.next()) {
        (_, Some(_)) => Err(duplicate_column(file, name)),
        (Some((field, _)), None) => Ok(field),
        (None, _) if names.is_empty() => Ok(0),
        (None, _) => {
            let there = names.join(", ");
            let meant = did_you_mean(name, &names.iter().map(String::as_str).collect::<Vec<_>>());
            let message = format!("line 1: no column {name:?}, which `{key}` names; columns: {there}{meant}");
            Err(SourceError::corrupt(&file.path, message))
        }
    }
}

/// `input.format: csv`.
pub(super) struct Csv;

impl BytesFormat for Csv {
    fn endings(&self) -> &'static [&'static str] {
        &[".csv", ".tsv"]
    }

    fn cut(&self, _input: &Input) -> Cut {
        Cut::AtRecords
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError> {
        Ok((Box::new(CsvRecords::open(store, file, input, range)?), range.0))
    }

    fn columns(&self, store: &Store, file: &InputFile, input: &Input) -> Result<Option<Vec<FileColumn>>, SourceError> {
        let cursor = Cursor::open(store, file, input, 0)?;
        let (names, _) = header(cursor, &file.path, delimiter(input))?;
        let text = |name| FileColumn { name, is_text: true, is_list: false, data_type: "text".into() };
        Ok(Some(names.into_iter().map(text).collect()))
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&table::CsvTable)
    }
}

/// Reads the records after the header.
pub(crate) struct CsvRecords {
    parser: Parser,
    fields: usize,
    text: usize,
    names: Vec<String>,
    /// The fields of `input.carry`, and their bytes in the record that was read last.
    carried: Vec<(usize, Vec<u8>)>,
}

impl CsvRecords {
    /// Reads the header, then goes to `start`, which must be 0 or the start of a record.
    pub fn open(store: &Store, file: &InputFile, input: &Input, (start, end): (u64, u64)) -> Result<Self, SourceError> {
        let cursor = Cursor::open_range(store, file, input, (0, end))?;
        let (names, mut parser) = header(cursor, &file.path, delimiter(input))?;
        let text = field_named(file, &names, &input.text, "input.text")?;
        let carried = input.carried_columns().map(|name| field_named(file, &names, name, "input.carry"));
        let carried = carried.map(|field| Ok((field?, Vec::new()))).collect::<Result<_, SourceError>>()?;
        if start > parser.cursor.offset {
            parser.cursor = parser.cursor.forward(store, file, input, (start, end))?;
        }
        if start > 0 {
            parser.cursor.newlines = 0;
        }
        Ok(Self { parser, fields: names.len(), text, names, carried })
    }
}

impl Records for CsvRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        self.parser.next()
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        let newlines = self.parser.cursor.newlines;
        let (wanted, mut valid, mut fault) = (self.text, true, None);
        let carried = &mut self.carried;
        carried.iter_mut().for_each(|(_, value)| value.clear());
        let fields = self.parser.record(|field, bytes| {
            for (_, value) in carried.iter_mut().filter(|(of, _)| *of == field) {
                // one byte more shows that it is too long
                let room = (MAX_CARRIED_BYTES + 1).saturating_sub(value.len());
                value.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            if field == wanted && valid && fault.is_none() {
                match push(text, bytes) {
                    Ok(bad) => valid = bad.is_none(),
                    Err(e) => fault = Some(e),
                }
            }
        })?;
        if let Some(fault) = fault {
            return Err(fault);
        }
        let bad = |reason, message| Ok(Err(BadRecord { reason, message, newlines }));
        if fields != self.fields {
            return bad(reason::FIELDS, wrong_number(fields, &self.names));
        }
        if !valid || !text.is_whole() {
            return bad(reason::UTF8, "got bytes in the text field that are not UTF-8; valid: text in UTF-8".into());
        }
        let is_cut = |value: &[u8]| value.len() > MAX_CARRIED_BYTES;
        let is_text = |value: &[u8]| is_cut(value) || str::from_utf8(value).is_ok();
        if let Some((field, _)) = self.carried.iter().find(|(_, value)| !is_text(value)) {
            let name = self.names.get(*field).map_or("", String::as_str);
            return bad(reason::UTF8, format!("the value of {name:?} is not UTF-8; valid: text in UTF-8"));
        }
        Ok(Ok(()))
    }

    fn skip(&mut self) -> io::Result<()> {
        self.parser.record(|_, _| {}).map(|_| ())
    }

    fn carried(&mut self) -> Carried {
        self.carried.iter().map(|(_, value)| Some(String::from_utf8_lossy(value).into_owned())).collect()
    }

    fn offset(&self) -> u64 {
        self.parser.cursor.offset
    }
}

/// Reads whole records after the header, for queries.
pub(crate) struct CsvRows {
    parser: Parser,
    pub names: Vec<String>,
}

impl CsvRows {
    pub fn open(store: &Store, file: &InputFile, input: &Input) -> Result<Self, SourceError> {
        let (names, parser) = header(Cursor::open(store, file, input, 0)?, &file.path, delimiter(input))?;
        if let Some(name) = (1..names.len()).find(|i| names[..*i].contains(&names[*i])).map(|i| &names[i]) {
            return Err(duplicate_column(file, name));
        }
        Ok(Self { parser, names })
    }

    /// Returns the fields of the next record, and the number of newlines before it in the file. A record of more than
    /// `max_bytes` bytes is bad, and its further bytes are dropped.
    pub fn next(
        &mut self,
        fields: &mut Vec<Vec<u8>>,
        max_bytes: usize,
    ) -> io::Result<Option<(u64, Result<(), BadRecord>)>> {
        if self.parser.next()?.is_none() {
            return Ok(None);
        }
        let newlines = self.parser.cursor.newlines;
        fields.iter_mut().for_each(Vec::clear);
        let (mut bytes, wanted) = (0, self.names.len());
        fields.resize_with(wanted, Vec::new);
        let got = self.parser.record(|field, part| {
            bytes += part.len();
            if field < wanted && bytes <= max_bytes {
                fields[field].extend_from_slice(part);
            }
        })?;
        let bad = if got != wanted {
            Some((reason::FIELDS, wrong_number(got, &self.names)))
        } else if bytes > max_bytes {
            Some((reason::LONG, format!("the record has {bytes} bytes; valid in a query: at most {max_bytes}")))
        } else {
            None
        };
        Ok(Some((newlines, bad.map_or(Ok(()), |(reason, message)| Err(BadRecord { reason, message, newlines })))))
    }
}
