//! Rows of Arrow IPC: the file format and the stream format (what Hugging Face `datasets` writes), bodies compressed or not.
//!
//! Both are sequences of messages. A walk over the headers (bodies are not read) tells where each record batch is and how many
//! rows it has; then the batches that a range needs are read one at a time, and only the text column is decoded.
//!
//! Memory: one record batch with all its columns, as stored, and the dictionaries of the file.
//! Invalid UTF-8 inside a string column breaks the Arrow format itself: the file is corrupt, whatever `on_error` says.

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::{Block, MessageHeader, MetadataVersion, root_as_message};
use std::sync::Arc;

use super::error::SourceError;
use super::list::InputFile;
use super::parquet::{EachCell, RowGroup};
use super::store::Store;

const MAGIC: &[u8] = b"ARROW1";
const CONTINUATION: [u8; 4] = [0xff; 4];
const LARGEST_HEADER: u64 = 256 << 20;

/// A message of the file after the schema.
struct Message {
    block: Block,
    dictionary: bool,
    rows: u64,
}

/// What is in a file.
struct Index {
    schema: SchemaRef,
    version: MetadataVersion,
    messages: Vec<Message>,
}

fn wrong(file: &InputFile, error: impl std::fmt::Display) -> SourceError {
    SourceError::corrupt(&file.path, format!("cannot be read as Arrow IPC: {error}"))
}

fn get(store: &Store, file: &InputFile, start: u64, length: u64) -> Result<Buffer, SourceError> {
    let end = start.saturating_add(length);
    if end > file.size {
        return Err(wrong(file, format_args!("is cut off: a message ends at byte {end}, the file at {}", file.size)));
    }
    store
        .get(&file.location, start, end)
        .map(Buffer::from)
        .map_err(|source| SourceError::Store { file: file.path.clone(), source: Box::new(source) })
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Where the footer of the file format begins.
fn footer(store: &Store, file: &InputFile) -> Result<u64, SourceError> {
    let tail = get(store, file, file.size.saturating_sub(10), file.size.min(10))?;
    let length = u32_at(&tail, 0).map_or(0, u64::from) + 10;
    match tail.ends_with(MAGIC) && length + 8 <= file.size {
        true => Ok(file.size - length),
        false => Err(wrong(file, "is cut off: it begins as an Arrow file, but does not end with its footer")),
    }
}

/// Walks over the messages from the start; in the file format they are followed by a footer, which repeats what they say.
fn index(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let (mut at, limit) = if is_stream(store, file)? { (0, file.size) } else { (8, footer(store, file)?) };
    let mut schema: Option<(SchemaRef, MetadataVersion)> = None;
    let mut messages = Vec::new();
    while at + 4 <= limit {
        let prefix = get(store, file, at, 8.min(file.size - at))?;
        let continued = prefix.starts_with(&CONTINUATION);
        let prefix_length = if continued { 8 } else { 4 };
        let length = u32_at(&prefix, prefix_length - 4).map_or(0, u64::from);
        if length == 0 {
            break;
        }
        if length > LARGEST_HEADER {
            return Err(wrong(file, format_args!("got a message header of {length} bytes at byte {at}; is it Arrow IPC?")));
        }
        let header = get(store, file, at + prefix_length as u64, length)?;
        let message = root_as_message(&header).map_err(|e| wrong(file, e))?;
        let total = prefix_length as u64 + length;
        let body = message.bodyLength().max(0) as u64;
        if message.header_type() == MessageHeader::Schema {
            let fields = message.header_as_schema().ok_or_else(|| wrong(file, "the schema message has no schema"))?;
            schema = Some((Arc::new(fb_to_schema(fields)), message.version()));
        } else {
            let dictionary = message.header_type() == MessageHeader::DictionaryBatch;
            let rows = message.header_as_record_batch().map_or(0, |b| b.length().max(0) as u64);
            messages.push(Message { block: Block::new(at as i64, total as i32, body as i64), dictionary, rows });
        }
        at = at.saturating_add(total).saturating_add(body);
    }
    if at > file.size {
        return Err(wrong(file, format_args!("is cut off: a message ends at byte {at}, the file at {}", file.size)));
    }
    let (schema, version) = schema.ok_or_else(|| wrong(file, "it has no schema; valid: Arrow IPC files and streams"))?;
    Ok(Index { schema, version, messages })
}

fn is_string(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, value) => is_string(value),
        _ => false,
    }
}

/// The columns of a file, each with whether it can be the text, and what its type is.
pub(crate) fn columns(store: &Store, file: &InputFile) -> Result<Vec<(String, bool, String)>, SourceError> {
    let index = index(store, file)?;
    let fields = index.schema.fields().iter();
    Ok(fields.map(|f| (f.name().clone(), is_string(f.data_type()), f.data_type().to_string())).collect())
}

/// The record batches of a file; their bytes are those of all columns as stored.
pub(crate) fn row_groups(store: &Store, file: &InputFile) -> Result<Vec<RowGroup>, SourceError> {
    let index = index(store, file)?;
    let batches = index.messages.iter().filter(|m| !m.dictionary);
    Ok(batches.map(|m| RowGroup { rows: m.rows, bytes: m.block.bodyLength().max(0) as u64 }).collect())
}

fn body(store: &Store, file: &InputFile, block: &Block) -> Result<Buffer, SourceError> {
    get(store, file, block.offset() as u64, block.metaDataLength() as u64 + block.bodyLength() as u64)
}

/// Whether the format is the stream format.
pub(crate) fn is_stream(store: &Store, file: &InputFile) -> Result<bool, SourceError> {
    Ok(!get(store, file, 0, file.size.min(8))?.starts_with(MAGIC))
}

/// Reads the text cells of the rows from `start` to `end`, in order.
pub(crate) fn read_rows(
    store: &Store,
    file: &InputFile,
    text: &str,
    (start, end): (u64, u64),
    each: &mut EachCell<'_>,
) -> Result<(), SourceError> {
    let index = index(store, file)?;
    let column = index.schema.fields().iter().position(|f| f.name() == text && is_string(f.data_type())).ok_or_else(|| {
        let names: Vec<_> = index.schema.fields().iter().map(|f| f.name().as_str()).collect();
        SourceError::corrupt(
            &file.path,
            format!("no string column {text:?}, which `input.text` names; columns: {}", names.join(", ")),
        )
    })?;
    let mut decoder = FileDecoder::new(index.schema.clone(), index.version).with_projection(vec![column]);
    let mut first = 0;
    for message in &index.messages {
        let (from, to) = (start.max(first), end.min(first + message.rows));
        if !message.dictionary && from >= to {
            first += message.rows;
            continue;
        }
        if first >= end {
            break;
        }
        let bytes = body(store, file, &message.block)?;
        if message.dictionary {
            decoder.read_dictionary(&message.block, &bytes).map_err(|e| wrong(file, e))?;
            continue;
        }
        let rows = format!("rows {first} to {}", first + message.rows);
        let batch = decoder
            .read_record_batch(&message.block, &bytes)
            .and_then(|b| b.ok_or_else(|| ArrowError::IpcError("an empty message".into())))
            .map_err(|e| wrong(file, format_args!("{rows}: {e}")))?;
        cells(&batch, (from - first) as usize, (to - first) as usize, first, each)
            .map_err(|e| e.unwrap_or_else(|e| wrong(file, e)))?;
        first += message.rows;
    }
    Ok(())
}

fn cells(
    batch: &RecordBatch,
    from: usize,
    to: usize,
    first: u64,
    each: &mut EachCell<'_>,
) -> Result<(), Result<SourceError, ArrowError>> {
    let column = batch.column(0).slice(from, to - from);
    let column = match column.data_type() {
        DataType::Dictionary(_, value) => cast(&column, value).map_err(Err)?,
        _ => column,
    };
    for i in 0..column.len() {
        let cell = (!column.is_null(i)).then(|| match column.data_type() {
            DataType::Utf8 => column.as_string::<i32>().value(i),
            DataType::LargeUtf8 => column.as_string::<i64>().value(i),
            _ => column.as_string_view().value(i),
        });
        each(first + (from + i) as u64, cell.map(str::as_bytes)).map_err(Ok)?;
    }
    Ok(())
}
