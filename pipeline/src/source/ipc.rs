//! Rows of Arrow IPC: the file format and the stream format (what Hugging Face `datasets` writes), bodies compressed or not.
//!
//! Both are messages, of which the headers (bodies are not read) tell where each record batch is and how many rows it has; then
//! the batches that a range needs are read one at a time, and only the text column is decoded.
//!
//! Memory: one record batch with all its columns, as stored, and the dictionaries of the file.
//! Invalid UTF-8 inside a string column breaks the Arrow format itself: the file is corrupt, whatever `on_error` says.

use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::buffer::Buffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::convert::fb_to_schema;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::{Block, MessageHeader, MetadataVersion, root_as_footer, root_as_message};

use super::error::SourceError;
use super::list::InputFile;
use super::parquet_rows::{EachCell, RowGroup};
use super::store::{Chunks, FIRST_CHUNK, Store};

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

fn unread(file: &InputFile, source: object_store::Error) -> SourceError {
    SourceError::of_store(&file.path, source)
}

fn within(file: &InputFile, start: u64, length: u64) -> Result<u64, SourceError> {
    let end = start.saturating_add(length);
    match end <= file.size {
        true => Ok(end),
        false => Err(wrong(file, format_args!("is cut off: a message ends at byte {end}, the file at {}", file.size))),
    }
}

fn get(store: &Store, file: &InputFile, start: u64, length: u64) -> Result<Buffer, SourceError> {
    let end = within(file, start, length)?;
    store.get(&file.location, start, end).map(Buffer::from).map_err(|e| unread(file, e))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// A message's header, and where its body is.
fn message(chunks: &Chunks, file: &InputFile, at: u64) -> Result<Option<(Buffer, Block)>, SourceError> {
    if at.saturating_add(4) > file.size {
        return Ok(None);
    }
    let get = |start: u64, length: u64| {
        within(file, start, length)?;
        chunks.fetch(start, length, FIRST_CHUNK).map_err(|e| unread(file, e))
    };
    let prefix = get(at, 8.min(file.size - at))?;
    let prefix_length = if prefix.starts_with(&CONTINUATION) { 8 } else { 4 };
    let length = u32_at(&prefix, prefix_length - 4).map_or(0, u64::from);
    if length == 0 {
        return Ok(None);
    }
    if length > LARGEST_HEADER {
        return Err(wrong(file, format_args!("got a message header of {length} bytes at byte {at}; is it Arrow IPC?")));
    }
    let header = Buffer::from(get(at + prefix_length as u64, length)?);
    let body = root_as_message(&header).map_err(|e| wrong(file, e))?.bodyLength().max(0);
    Ok(Some((header, Block::new(at as i64, (prefix_length as u64 + length) as i32, body))))
}

fn entry(file: &InputFile, header: &Buffer, block: Block) -> Result<Message, SourceError> {
    let message = root_as_message(header).map_err(|e| wrong(file, e))?;
    let dictionary = message.header_type() == MessageHeader::DictionaryBatch;
    let rows = message.header_as_record_batch().map_or(0, |b| b.length().max(0) as u64);
    Ok(Message { block, dictionary, rows })
}

/// What is in a file.
fn index(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    if is_stream(store, file)? { walk(store, file) } else { footer(store, file) }
}

/// The file format: its footer tells where the schema, the dictionaries and the record batches are.
fn footer(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let tail = get(store, file, file.size.saturating_sub(10), file.size.min(10))?;
    let length = u32_at(&tail, 0).map_or(0, u64::from);
    if !tail.ends_with(MAGIC) || length + 18 > file.size {
        return Err(wrong(file, "is cut off: it begins as an Arrow file, but does not end with its footer"));
    }
    let bytes = get(store, file, file.size - length - 10, length)?;
    let footer = root_as_footer(&bytes).map_err(|e| wrong(file, e))?;
    let schema = footer.schema().ok_or_else(|| wrong(file, "its footer has no schema"))?;
    let chunks = Chunks::new(store, &file.location, file.size);
    let blocks = footer.dictionaries().into_iter().flatten().chain(footer.recordBatches().into_iter().flatten());
    let mut messages = Vec::new();
    for block in blocks {
        let (header, _) = message(&chunks, file, block.offset().max(0) as u64)?
            .ok_or_else(|| wrong(file, format_args!("no message at byte {}, where its footer says", block.offset())))?;
        messages.push(entry(file, &header, *block)?);
    }
    Ok(Index { schema: Arc::new(fb_to_schema(schema)), version: footer.version(), messages })
}

/// The stream format: one message after another.
fn walk(store: &Store, file: &InputFile) -> Result<Index, SourceError> {
    let chunks = Chunks::new(store, &file.location, file.size);
    let mut at = 0_u64;
    let mut schema: Option<(SchemaRef, MetadataVersion)> = None;
    let mut messages = Vec::new();
    while let Some((header, block)) = message(&chunks, file, at)? {
        let message = root_as_message(&header).map_err(|e| wrong(file, e))?;
        match message.header_as_schema() {
            Some(fields) => schema = Some((Arc::new(fb_to_schema(fields)), message.version())),
            None => messages.push(entry(file, &header, block)?),
        }
        at = at.saturating_add(block.metaDataLength() as u64).saturating_add(block.bodyLength() as u64);
    }
    if at > file.size {
        return Err(wrong(file, format_args!("is cut off: a message ends at byte {at}, the file at {}", file.size)));
    }
    let (schema, version) =
        schema.ok_or_else(|| wrong(file, "it has no schema; valid: Arrow IPC files and streams"))?;
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
    let column =
        index.schema.fields().iter().position(|f| f.name() == text && is_string(f.data_type())).ok_or_else(|| {
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
