//! Rows of Arrow IPC: the file format and the stream format (which Hugging Face `datasets` writes), with or without
//! compressed bodies.
//!
//! Both formats consist of messages. Their headers give the position and the number of rows of each record batch, so
//! planning does not read bodies. A reader then reads the batches of its range one at a time and decodes only the text
//! column.
//!
//! Memory: one record batch with all its columns, as stored, and the dictionaries of the file; the columns of `input.carry`
//! also as text.
//!
//! Invalid UTF-8 in a string column violates the Arrow format itself: the file is corrupt, whatever `on_error` says.

mod table;

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, new_empty_array};
use arrow::buffer::{Buffer, NullBuffer};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Fields, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::{Block, MessageHeader, MetadataVersion, root_as_footer, root_as_message};

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{
    FIRST_CHUNK_BYTES, InputFile, RangeCache, Store,
    sniff::{self, FileType},
};
use stillhouse_schemas::spec::Input;

use super::carried_columns::{self, CarriedColumns};
use super::{FileColumn, RowsFormat};
use crate::records::{Carried, Cell, Rows};
use crate::segment::RowGroup;
use crate::table_format::TableFormat;

const MAGIC: &[u8] = b"ARROW1";
const CONTINUATION: [u8; 4] = [0xff; 4];
const MAX_HEADER_BYTES: u64 = 256 << 20;

/// `input.format: arrow`.
pub(super) struct Arrow;

impl RowsFormat for Arrow {
    fn endings(&self) -> &'static [&'static str] {
        &[".arrow", ".arrows", ".feather", ".ipc"]
    }

    fn row_groups(&self, store: &Store, file: &InputFile, _input: &Input) -> Result<Vec<RowGroup>, SourceError> {
        row_groups(store, file)
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<Box<dyn Rows>, SourceError> {
        Ok(Box::new(IpcRows::open(store, file, input, range)?))
    }

    fn columns(&self, store: &Store, file: &InputFile) -> Result<Option<Vec<FileColumn>>, SourceError> {
        columns(store, file).map(Some)
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&table::ArrowTable)
    }
}

/// A message of the file after the schema.
struct Message {
    block: Block,
    dictionary: bool,
    rows: u64,
}

/// The schema and the messages of a file.
struct Index {
    schema: SchemaRef,
    version: MetadataVersion,
    messages: Vec<Message>,
}

fn corrupt(file: &InputFile, error: impl std::fmt::Display) -> SourceError {
    SourceError::corrupt(&file.path, format!("cannot be read as Arrow IPC: {error}"))
}

fn store_error(file: &InputFile, source: object_store::Error) -> SourceError {
    SourceError::from_store(&file.path, source)
}

fn checked_end(file: &InputFile, start: u64, length: u64) -> Result<u64, SourceError> {
    let end = start.saturating_add(length);
    match end <= file.size {
        true => Ok(end),
        false => {
            Err(corrupt(file, format_args!("is cut off: a message ends at byte {end}, the file at {}", file.size)))
        }
    }
}

fn get(store: &Store, file: &InputFile, start: u64, length: u64) -> Result<Buffer, SourceError> {
    let end = checked_end(file, start, length)?;
    store.get(&file.location, start, end).map(Buffer::from).map_err(|e| store_error(file, e))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns a message's header and the position of the message.
fn read_message(cache: &RangeCache, file: &InputFile, at: u64) -> Result<Option<(Buffer, Block)>, SourceError> {
    if at.saturating_add(4) > file.size {
        return Ok(None);
    }
    let get = |start: u64, length: u64| {
        checked_end(file, start, length)?;
        cache.fetch(start, length, FIRST_CHUNK_BYTES).map_err(|e| store_error(file, e))
    };
    let prefix = get(at, 8.min(file.size - at))?;
    let prefix_length = if prefix.starts_with(&CONTINUATION) { 8 } else { 4 };
    let length = u32_at(&prefix, prefix_length - 4).map_or(0, u64::from);
    if length == 0 {
        return Ok(None);
    }
    if length > MAX_HEADER_BYTES {
        return Err(corrupt(
            file,
            format_args!("got a message header of {length} bytes at byte {at}; is it Arrow IPC?"),
        ));
    }
    let header = Buffer::from(get(at + prefix_length as u64, length)?);
    let body = root_as_message(&header).map_err(|e| corrupt(file, e))?.bodyLength().max(0);
    Ok(Some((header, Block::new(at as i64, (prefix_length as u64 + length) as i32, body))))
}

fn to_message(file: &InputFile, header: &Buffer, block: Block) -> Result<Message, SourceError> {
    let message = root_as_message(header).map_err(|e| corrupt(file, e))?;
    let dictionary = message.header_type() == MessageHeader::DictionaryBatch;
    let rows = message.header_as_record_batch().map_or(0, |b| b.length().max(0) as u64);
    Ok(Message { block, dictionary, rows })
}

/// Reads the index of a file.
fn read_index(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let index = if is_stream(store, file)? { stream_index(store, file) } else { file_index(store, file) };
    index.map_err(|e| match e {
        SourceError::Corrupt { .. } => sniff::other_format(store, file, FileType::Arrow).unwrap_or(e),
        other => other,
    })
}

/// Reads the index of the file format: the footer has the schema and the positions of dictionaries and record batches.
fn file_index(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let tail = get(store, file, file.size.saturating_sub(10), file.size.min(10))?;
    let length = u32_at(&tail, 0).map_or(0, u64::from);
    if !tail.ends_with(MAGIC) || length + 18 > file.size {
        return Err(corrupt(file, "is cut off: it begins as an Arrow file, but does not end with its footer"));
    }
    let bytes = get(store, file, file.size - length - 10, length)?;
    let footer = root_as_footer(&bytes).map_err(|e| corrupt(file, e))?;
    let schema = footer.schema().ok_or_else(|| corrupt(file, "its footer has no schema"))?;
    let cache = RangeCache::new(store, &file.location, file.size);
    let blocks = footer.dictionaries().into_iter().flatten().chain(footer.recordBatches().into_iter().flatten());
    let mut messages = Vec::new();
    for block in blocks {
        let (header, _) = read_message(&cache, file, block.offset().max(0) as u64)?.ok_or_else(|| {
            corrupt(file, format_args!("no message at byte {}, where its footer says", block.offset()))
        })?;
        messages.push(to_message(file, &header, *block)?);
    }
    Ok(Index { schema: Arc::new(fb_to_schema(schema)), version: footer.version(), messages })
}

/// Reads the index of the stream format: one message after another.
fn stream_index(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let cache = RangeCache::new(store, &file.location, file.size);
    let mut at = 0_u64;
    let mut schema: Option<(SchemaRef, MetadataVersion)> = None;
    let mut messages = Vec::new();
    while let Some((header, block)) = read_message(&cache, file, at)? {
        let message = root_as_message(&header).map_err(|e| corrupt(file, e))?;
        match message.header_as_schema() {
            Some(fields) => schema = Some((Arc::new(fb_to_schema(fields)), message.version())),
            None => messages.push(to_message(file, &header, block)?),
        }
        at = at.saturating_add(block.metaDataLength() as u64).saturating_add(block.bodyLength() as u64);
    }
    if at > file.size {
        return Err(corrupt(file, format_args!("is cut off: a message ends at byte {at}, the file at {}", file.size)));
    }
    let (schema, version) =
        schema.ok_or_else(|| corrupt(file, "it has no schema; valid: Arrow IPC files and streams"))?;
    if let Some(after) = data_after_end(&cache, file, at)? {
        let message = format!(
            "there is more behind the end of its stream, from byte {after}; valid: one stream in a file, not several one after the other"
        );
        return Err(corrupt(file, message));
    }
    Ok(Index { schema, version, messages })
}

/// Returns the offset of data after the end of a stream. The end mark is at `at`, and zeros may follow it.
fn data_after_end(cache: &RangeCache, file: &InputFile, at: u64) -> Result<Option<u64>, SourceError> {
    let left = file.size.saturating_sub(at);
    if left == 0 {
        return Ok(None);
    }
    let examined = left.min(FIRST_CHUNK_BYTES);
    let tail = cache.fetch(at, examined, FIRST_CHUNK_BYTES).map_err(|e| store_error(file, e))?;
    let mark = if tail.starts_with(&CONTINUATION) { 8 } else { 4 };
    let is_over = tail.iter().skip(mark).all(|byte| *byte == 0) && examined == left;
    Ok((!is_over).then_some(at + mark.min(left as usize) as u64))
}

/// Whether a type is text, or bytes that may be text.
fn may_be_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => true,
        DataType::Dictionary(_, value) => may_be_text(value),
        _ => false,
    }
}

/// Returns the columns of a file: name (fields of structs as `meta.text`), whether it can be the text, and type.
fn columns(store: &Store, file: &InputFile) -> Result<Vec<FileColumn>, SourceError> {
    fn collect(prefix: &str, fields: &Fields, columns: &mut Vec<FileColumn>) {
        for field in fields {
            let name = format!("{prefix}{}", field.name());
            match field.data_type() {
                DataType::Struct(inner) => collect(&format!("{name}."), inner, columns),
                kind => {
                    let (is_text, is_list) = (may_be_text(kind), kind.is_nested());
                    columns.push(FileColumn { name, is_text, is_list, data_type: kind.to_string() });
                }
            }
        }
    }
    let index = read_index(store, file)?;
    let mut columns = Vec::new();
    collect("", index.schema.fields(), &mut columns);
    Ok(columns)
}

/// Returns the path of indexes to the text: the column, then fields of structs. A column with the whole name takes
/// precedence.
fn path_to(fields: &Fields, name: &str) -> Option<Vec<usize>> {
    let exact = fields.iter().position(|f| f.name() == name && may_be_text(f.data_type()));
    if let Some(exact) = exact {
        return Some(vec![exact]);
    }
    fields.iter().enumerate().find_map(|(i, field)| {
        let DataType::Struct(inner) = field.data_type() else { return None };
        let rest = name.strip_prefix(field.name().as_str())?.strip_prefix('.')?;
        Some([i].into_iter().chain(path_to(inner, rest)?).collect())
    })
}

/// Returns the record batches of a file as row groups. Their size covers all columns as stored.
fn row_groups(store: &Store, file: &InputFile) -> Result<Vec<RowGroup>, SourceError> {
    let index = read_index(store, file)?;
    let batches = index.messages.iter().filter(|m| !m.dictionary);
    Ok(batches.map(|m| RowGroup { rows: m.rows, bytes: m.block.bodyLength().max(0) as u64 }).collect())
}

fn read_body(store: &Store, file: &InputFile, block: &Block) -> Result<Buffer, SourceError> {
    get(store, file, block.offset() as u64, block.metaDataLength() as u64 + block.bodyLength() as u64)
}

/// Whether a file has the stream format.
fn is_stream(store: &Store, file: &InputFile) -> Result<bool, SourceError> {
    Ok(!get(store, file, 0, file.size.min(8))?.starts_with(MAGIC))
}

/// Reads the text cells of a range of rows, in order, one record batch at a time.
pub(crate) struct IpcRows {
    batches: BatchReader,
    /// The text column among those that are decoded, and the path of indexes to the text inside it.
    text_column: usize,
    struct_path: Vec<usize>,
    /// Paths of the carried columns, and the wanted rows of a batch.
    carried_paths: Vec<Vec<String>>,
    carried: CarriedColumns,
    /// The wanted rows of a batch, and their nulls.
    column: ArrayRef,
    nulls: Option<NullBuffer>,
    /// Number of the first of these rows, and how many of them were passed, including the current row.
    first: u64,
    passed: usize,
}

impl IpcRows {
    /// Opens a file to read the rows from `start` to `end` of the text column.
    pub fn open(store: &Store, file: &InputFile, input: &Input, range: (u64, u64)) -> Result<Self, SourceError> {
        let (index, text) = (read_index(store, file)?, &input.text);
        let fields = index.schema.fields();
        let path = path_to(fields, text).ok_or_else(|| {
            let names: Vec<_> = fields.iter().map(|f| f.name().as_str()).collect();
            SourceError::corrupt(
                &file.path,
                format!("no string column {text:?}, which `input.text` names; columns: {}", names.join(", ")),
            )
        })?;
        let carried_paths = carried_columns::paths(file, fields, input)?;
        let mut columns = vec![path[0]];
        columns
            .extend(carried_paths.iter().filter_map(|path| fields.iter().position(|f| Some(f.name()) == path.first())));
        columns.sort_unstable();
        columns.dedup();
        let text_column = columns.iter().position(|column| *column == path[0]).unwrap_or(0);
        let batches = BatchReader::new(store, file, index, columns, range);
        Ok(Self {
            batches,
            text_column,
            struct_path: path[1..].to_vec(),
            carried_paths,
            carried: CarriedColumns::default(),
            column: new_empty_array(&DataType::Utf8),
            nulls: None,
            first: 0,
            passed: 0,
        })
    }
}

impl Rows for IpcRows {
    fn next(&mut self) -> Result<Option<u64>, SourceError> {
        while self.passed == self.column.len() {
            // drop the old batch first, so that only one is in memory
            (self.column, self.nulls) = (new_empty_array(&DataType::Utf8), None);
            self.passed = 0;
            let Some(part) = self.batches.next()? else { return Ok(None) };
            self.first = part.from;
            let wrong = |e| corrupt(&self.batches.file, e);
            (self.column, self.nulls) = text_of(&part, self.text_column, &self.struct_path).map_err(wrong)?;
            self.carried = CarriedColumns::new(&part.wanted(), &self.carried_paths).map_err(wrong)?;
        }
        self.passed += 1;
        Ok(Some(self.first + self.passed as u64 - 1))
    }

    fn cell(&self) -> Cell<'_> {
        let (i, column) = (self.passed.checked_sub(1)?, &self.column);
        let there = self.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
        there.then(|| match column.data_type() {
            DataType::Utf8 => column.as_string::<i32>().value(i).as_bytes(),
            DataType::LargeUtf8 => column.as_string::<i64>().value(i).as_bytes(),
            DataType::Utf8View => column.as_string_view().value(i).as_bytes(),
            DataType::Binary => column.as_binary::<i32>().value(i),
            DataType::LargeBinary => column.as_binary::<i64>().value(i),
            _ => column.as_binary_view().value(i),
        })
    }

    fn carried(&self) -> Carried {
        self.passed.checked_sub(1).map_or_else(Carried::new, |row| self.carried.row(row))
    }
}

/// Returns the wanted rows of the text, and their nulls.
fn text_of(
    part: &WantedRows,
    text_column: usize,
    struct_path: &[usize],
) -> Result<(ArrayRef, Option<NullBuffer>), ArrowError> {
    let mut column = Arc::clone(part.wanted().column(text_column));
    let mut nulls = column.logical_nulls();
    for field in struct_path {
        let fields = column.as_struct_opt().ok_or_else(|| ArrowError::SchemaError("not a struct".into()))?;
        column = Arc::clone(fields.column(*field));
        nulls = NullBuffer::union(nulls.as_ref(), column.logical_nulls().as_ref());
    }
    let column = match column.data_type() {
        DataType::Dictionary(_, value) => cast(&column, value)?,
        _ => column,
    };
    Ok((column, nulls))
}

/// Returns the schema of a file.
fn schema(store: &Store, file: &InputFile) -> Result<SchemaRef, SourceError> {
    Ok(read_index(store, file)?.schema)
}

/// Calls `each` with these columns of all rows, one record batch at a time.
fn read_columns(
    store: &Store,
    file: &InputFile,
    columns: Vec<usize>,
    each: &mut dyn FnMut(&RecordBatch) -> Result<(), SourceError>,
) -> Result<(), SourceError> {
    let mut batches = BatchReader::new(store, file, read_index(store, file)?, columns, (0, u64::MAX));
    while let Some(part) = batches.next()? {
        each(&part.batch)?;
    }
    Ok(())
}

/// A record batch, the number of its first row, and the range of wanted rows.
struct WantedRows {
    batch: RecordBatch,
    first: u64,
    from: u64,
    to: u64,
}

impl WantedRows {
    fn wanted(&self) -> RecordBatch {
        self.batch.slice((self.from - self.first) as usize, (self.to - self.from) as usize)
    }
}

/// Iterates over some columns of the record batches that have rows of a range.
struct BatchReader {
    store: Store,
    file: InputFile,
    decoder: FileDecoder,
    messages: std::vec::IntoIter<Message>,
    /// Number of the first row of the next batch.
    first: u64,
    range: (u64, u64),
}

impl BatchReader {
    fn new(store: &Store, file: &InputFile, index: Index, columns: Vec<usize>, range: (u64, u64)) -> Self {
        let decoder = FileDecoder::new(index.schema, index.version).with_projection(columns);
        let messages = index.messages.into_iter();
        Self { store: store.clone(), file: file.clone(), decoder, messages, first: 0, range }
    }

    fn next(&mut self) -> Result<Option<WantedRows>, SourceError> {
        let (start, end) = self.range;
        for message in self.messages.by_ref() {
            let first = self.first;
            let (from, to) = (start.max(first), end.min(first + message.rows));
            if !message.dictionary && from >= to {
                self.first += message.rows;
                continue;
            }
            if first >= end {
                break;
            }
            let file = &self.file;
            let bytes = read_body(&self.store, file, &message.block)?;
            if message.dictionary {
                self.decoder.read_dictionary(&message.block, &bytes).map_err(|e| corrupt(file, e))?;
                continue;
            }
            self.first += message.rows;
            let rows = format!("rows {first} to {}", self.first);
            let batch = self
                .decoder
                .read_record_batch(&message.block, &bytes)
                .and_then(|b| b.ok_or_else(|| ArrowError::IpcError("an empty message".into())))
                .map_err(|e| corrupt(file, format_args!("{rows}: {e}")))?;
            return Ok(Some(WantedRows { batch, first, from, to }));
        }
        Ok(None)
    }
}
