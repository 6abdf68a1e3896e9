//! Records of JSON lines: one object per line, with the text under one key.
//!
//! It parses the object as a stream, so the text and the other values may have any length; a key may have 1 MB. If a
//! key occurs twice, the last one counts, as in Python's `json`. Numbers of any size and up to 128 levels of nesting
//! are valid.
//!
//! With `input.carry`, a line is parsed once more for the carried values, and a line that is not completely in the buffer is
//! copied; a line of more than [`MAX_RECORD_BYTES`] bytes is then bad.
//!
//! A good line that is completely in the buffer is read by a faster parser ([`fast_parser`]). `meta.text` is the key
//! `text` of the object `meta`, unless a key has the whole name. Lines of white space are not records.

mod carried;
pub(crate) mod fast_parser;
mod table;

use std::io::{self, Read};
use std::sync::Arc;

use struson::reader::{
    JsonReader, JsonStreamReader, JsonSyntaxError, ReaderError, ReaderSettings, SyntaxErrorKind, ValueType,
};

use stillhouse_base::source_error::{SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::spec::Input;

use super::text::{invalid, read_line};
use super::{BytesFormat, Cut};
use crate::records::{BadRecord, Carried, ReadError, RecordStart, Records, push};
use crate::spool::Spool;
use crate::table_format::{MAX_RECORD_BYTES, TableFormat};

const MAX_KEY_BYTES: u64 = 1 << 20;
/// Maximum number of keys of an object that a message names, and maximum characters of one.
const MAX_KEYS_SHOWN: usize = 20;
const MAX_KEY_BYTES_SHOWN: usize = 64;

/// A reader of one line. It keeps errors of the input separate from errors in the line.
struct LineReader<'a> {
    cursor: &'a mut Cursor,
    ended: bool,
    left: u64,
    failed: Option<io::Error>,
    /// Receives the line.
    copy: Option<&'a mut LineCopy>,
}

/// A copy of a line.
#[derive(Default)]
struct LineCopy {
    line: Vec<u8>,
    is_too_long: bool,
}

impl LineCopy {
    fn add(&mut self, bytes: &[u8]) {
        self.is_too_long |= self.line.len() + bytes.len() > MAX_RECORD_BYTES;
        if !self.is_too_long {
            self.line.extend_from_slice(bytes);
        }
    }
}

impl Read for LineReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        if self.left == 0 {
            return Err(io::Error::other("a key of more than 1 MB"));
        }
        let available = match self.cursor.fill() {
            Ok(available) => available,
            Err(e) => {
                let reported = io::Error::new(e.kind(), "the input failed");
                self.failed = Some(e);
                return Err(reported);
            }
        };
        let window = &available[..available.len().min(out.len())];
        let end = memchr::memchr(b'\n', window);
        let n = end.unwrap_or(window.len());
        out[..n].copy_from_slice(&window[..n]);
        if let Some(copy) = &mut self.copy {
            copy.add(&out[..n]);
        }
        if n == 0 {
            self.ended = true;
        }
        self.left = self.left.saturating_sub(n as u64);
        self.cursor.consume(n);
        Ok(n)
    }
}

/// `input.format: jsonl`.
pub(super) struct Jsonl;

impl BytesFormat for Jsonl {
    fn endings(&self) -> &'static [&'static str] {
        &[".jsonl", ".ndjson", ".json"]
    }

    fn cut(&self, _input: &Input) -> Cut {
        Cut::Anywhere
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError> {
        let cursor = Cursor::open_at_line(store, file, input, range)?;
        let from = cursor.offset;
        let value =
            if input.messages.is_some() { LineValue::Record } else { LineValue::Text(input.text.as_str().into()) };
        let names = input.carried_columns().map(str::to_owned).collect();
        Ok((Box::new(JsonRecords::new(cursor, value, names)), from))
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&table::JsonlTable)
    }
}

/// What of a line is the document.
pub(crate) enum LineValue {
    /// The text under a key.
    Text(Arc<str>),
    /// The line, which is not parsed here: the operator `chat` parses conversations.
    Record,
}

/// Reads lines that are not blank.
pub(crate) struct JsonRecords {
    cursor: Cursor,
    value: LineValue,
    buffer: Vec<u8>,
    /// The keys of `input.carry`, and the values of the line that was read last.
    names: Vec<String>,
    carried: Carried,
}

impl JsonRecords {
    pub fn new(cursor: Cursor, value: LineValue, names: Vec<String>) -> Self {
        Self { cursor, value, buffer: vec![0; 16 << 10], names, carried: Carried::new() }
    }

    /// Reads the line if it is completely in the buffer and good; else consumes nothing. A line of at most
    /// `MAX_KEY_BYTES` bytes cannot have a key that is too long.
    fn read_fast(&mut self, key: &str, text: &mut Spool) -> Result<bool, ReadError> {
        let available = self.cursor.fill()?;
        let window = &available[..available.len().min(MAX_KEY_BYTES as usize)];
        let Some(end) = memchr::memchr(b'\n', window) else { return Ok(false) };
        if !fast_parser::read(&window[..end], key, text).map_err(ReadError::Spool)? {
            text.clear().map_err(ReadError::Spool)?;
            return Ok(false);
        }
        self.cursor.consume(end + 1);
        self.cursor.newlines += 1;
        Ok(true)
    }

    /// Reads the document, and copies its line if asked to.
    fn read_document(
        &mut self,
        text: &mut Spool,
        mut copy: Option<&mut LineCopy>,
    ) -> Result<Result<(), BadRecord>, ReadError> {
        let newlines = self.cursor.newlines;
        let LineValue::Text(key) = &self.value else {
            let good = read_line(&mut self.cursor, text, |bytes| copy.iter_mut().for_each(|copy| copy.add(bytes)))?;
            return Ok(if good { Ok(()) } else { Err(invalid(newlines)) });
        };
        let key = Arc::clone(key);
        if copy.is_none() && self.read_fast(&key, text)? {
            return Ok(Ok(()));
        }
        let mut line = LineReader { cursor: &mut self.cursor, ended: false, left: u64::MAX, failed: None, copy };
        let outcome = TextSearch { name: &key, buffer: &mut self.buffer, text }.line(&mut line);
        if let Some(error) = line.failed.take() {
            return Err(ReadError::Input(error));
        }
        self.cursor.finish_line(|_| {})?;
        match outcome {
            Ok(()) => Ok(Ok(())),
            Err(LineError::Spool(e)) => Err(ReadError::Spool(e)),
            Err(LineError::Line(reason, message)) => Ok(Err(BadRecord { reason, message, newlines })),
        }
    }
}

/// An error in a line, without its position in the file.
enum LineError {
    Line(&'static str, String),
    Spool(io::Error),
}

impl From<ReaderError> for LineError {
    fn from(error: ReaderError) -> Self {
        match error {
            ReaderError::IoError { error, .. } => Self::from(error),
            ReaderError::SyntaxError(e) => Self::Line(reason::JSON, describe_syntax_error(&e)),
            ReaderError::MaxNestingDepthExceeded { max_nesting_depth, .. } => Self::Line(
                reason::JSON,
                format!(
                    "more than {max_nesting_depth} levels, one inside of the other; valid: one JSON object per line"
                ),
            ),
            other => Self::Line(reason::JSON, format!("{other}; valid: one JSON object per line")),
        }
    }
}

impl From<io::Error> for LineError {
    fn from(error: io::Error) -> Self {
        // the reader of a string value wraps the error again, which loses its kind
        match error.kind() == io::ErrorKind::InvalidData || error.to_string().contains("invalid UTF-8 data") {
            true => Self::Line(reason::UTF8, "got bytes that are not UTF-8; valid: JSON in UTF-8".into()),
            false => match error.get_ref().and_then(|inner| inner.downcast_ref::<JsonSyntaxError>()) {
                Some(e) => Self::Line(reason::JSON, describe_syntax_error(e)),
                None => Self::Line(reason::JSON, format!("{error}; valid: one JSON object per line")),
            },
        }
    }
}

/// Describes a syntax error in plain words, with its column.
fn describe_syntax_error(error: &JsonSyntaxError) -> String {
    use SyntaxErrorKind as K;
    let what = match error.kind {
        K::CommentsNotEnabled | K::IncompleteComment | K::BlockCommentNotClosed => {
            "a comment, which JSON does not have"
        }
        K::InvalidLiteral | K::TrailingDataAfterLiteral => "a word that is none of true, false and null",
        K::UnexpectedClosingBracket => "a closing bracket that nothing opened",
        K::UnexpectedComma => "a comma too many",
        K::TrailingCommaNotEnabled => "a comma after the last entry",
        K::MissingComma => "no comma between two entries",
        K::UnexpectedColon => "a colon too many",
        K::MissingColon => "no colon after a key",
        K::MalformedNumber | K::TrailingDataAfterNumber => "a number that is not JSON",
        K::ExpectingMemberNameOrObjectEnd => "neither a key in quotes nor }",
        K::NotEscapedControlCharacter => "a control character in a string; JSON has it escaped",
        K::UnknownEscapeSequence | K::MalformedEscapeSequence => "a backslash in a string that escapes nothing",
        K::UnpairedSurrogatePairEscapeSequence => "half of a surrogate pair in a string",
        K::IncompleteDocument => "the line ends before the value does",
        K::TrailingData => "more after the end of the value",
        _ => "something that begins no JSON value",
    };
    let column = error.location.line_pos.map_or_else(String::new, |at| format!(" at column {}", at.column + 1));
    format!("{what}{column}; valid: one JSON object per line")
}

fn type_name(value: ValueType) -> &'static str {
    match value {
        ValueType::Array => "an array",
        ValueType::Object => "an object",
        ValueType::String => "a string",
        ValueType::Number => "a number",
        ValueType::Boolean => "a boolean",
        ValueType::Null => "null",
    }
}

type Reader<'a, 'b> = JsonStreamReader<&'a mut LineReader<'b>>;

/// Finds the text of a line.
struct TextSearch<'a> {
    /// The whole name in `input.text`.
    name: &'a str,
    buffer: &'a mut [u8],
    text: &'a mut Spool,
}

impl TextSearch<'_> {
    fn line(&mut self, line: &mut LineReader<'_>) -> Result<(), LineError> {
        let settings = ReaderSettings { track_path: false, restrict_number_values: false, ..ReaderSettings::default() };
        let mut json = JsonStreamReader::new_custom(line, settings);
        let got = json.peek()?;
        if got != ValueType::Object {
            return Err(LineError::Line(
                reason::JSON,
                format!("got {}; valid: one JSON object per line", type_name(got)),
            ));
        }
        let outcome = self.object(&mut json, self.name)?;
        json.reader_mut().left = u64::MAX;
        json.consume_trailing_whitespace()?;
        outcome
    }

    /// Reads the text under a key of an object: the key with the whole name, else the part before the first dot, with
    /// the rest inside its object.
    fn object(&mut self, json: &mut Reader<'_, '_>, key: &str) -> Result<Result<(), LineError>, LineError> {
        let mut outcome = Err(LineError::Line(reason::MISSING, String::new()));
        let mut keys: Vec<String> = Vec::new();
        let mut found = false;
        json.begin_object()?;
        while {
            json.reader_mut().left = MAX_KEY_BYTES;
            json.has_next()?
        } {
            let name = json.next_name()?;
            let exact = name == key;
            let inside = key.split_once('.').filter(|(head, _)| !found && name == *head).map(|(_, rest)| rest);
            if keys.len() < MAX_KEYS_SHOWN && name.len() <= MAX_KEY_BYTES_SHOWN {
                keys.push(name.to_owned());
            }
            json.reader_mut().left = u64::MAX;
            match (exact, inside) {
                (true, _) => (found, outcome) = (true, self.string(json)?),
                (false, Some(rest)) => outcome = self.inside(json, rest)?,
                (false, None) => json.skip_value()?,
            }
        }
        json.end_object()?;
        if let Err(LineError::Line(reason::MISSING, message)) = &mut outcome
            && message.is_empty()
        {
            *message = self.missing(key, &keys);
        }
        Ok(outcome)
    }

    /// Returns the message about an object without the key.
    fn missing(&self, key: &str, keys: &[String]) -> String {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let there = if keys.is_empty() { "it has none".to_owned() } else { format!("its keys: {}", keys.join(", ")) };
        let meant = did_you_mean(key, &keys);
        format!("the object has no key {:?}, which `input.text` names; {there}{meant}", self.name)
    }

    fn inside(&mut self, json: &mut Reader<'_, '_>, rest: &str) -> Result<Result<(), LineError>, LineError> {
        match json.peek()? {
            ValueType::Object => self.object(json, rest),
            other => self.wrong_type(json, other, &format!("an object that holds {rest:?}")),
        }
    }

    fn string(&mut self, json: &mut Reader<'_, '_>) -> Result<Result<(), LineError>, LineError> {
        match json.peek()? {
            ValueType::String => {}
            other => return self.wrong_type(json, other, "a string"),
        }
        self.text.clear().map_err(LineError::Spool)?;
        let mut value = json.next_string_reader()?;
        loop {
            let n = value.read(self.buffer)?;
            if n == 0 {
                return Ok(Ok(()));
            }
            match push(self.text, &self.buffer[..n]) {
                Ok(None) => {}
                Ok(Some(_)) => return Err(io::Error::from(io::ErrorKind::InvalidData).into()),
                Err(ReadError::Spool(e) | ReadError::Input(e)) => return Err(LineError::Spool(e)),
            }
        }
    }

    fn wrong_type(
        &self,
        json: &mut Reader<'_, '_>,
        got: ValueType,
        valid: &str,
    ) -> Result<Result<(), LineError>, LineError> {
        json.skip_value()?;
        let why = if got == ValueType::Null { reason::NULL } else { reason::TYPE };
        let message = format!("the value of {:?} is {}; valid: {valid}", self.name, type_name(got));
        Ok(Err(LineError::Line(why, message)))
    }
}

impl Records for JsonRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        loop {
            let start = RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines };
            self.cursor.skip_byte_order_mark()?;
            loop {
                let available = self.cursor.fill()?;
                if available.is_empty() {
                    return Ok(None);
                }
                let (n, blank) = match available.iter().position(|b| !matches!(b, b' ' | b'\t' | b'\r')) {
                    None => (available.len(), None),
                    Some(at) if available[at] == b'\n' => (at + 1, Some(true)),
                    Some(at) => (at, Some(false)),
                };
                self.cursor.consume(n);
                match blank {
                    None => {}
                    Some(true) => {
                        self.cursor.newlines += 1;
                        break;
                    }
                    Some(false) => return Ok(Some(start)),
                }
            }
        }
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        if self.names.is_empty() {
            return self.read_document(text, None);
        }
        let newlines = self.cursor.newlines;
        let available = self.cursor.fill()?;
        let whole = memchr::memchr(b'\n', available).map(|end| carried::read(&available[..end], &self.names));
        let found = if let Some(found) = whole {
            if let Err(bad) = self.read_document(text, None)? {
                return Ok(Err(bad));
            }
            found
        } else {
            let mut copy = LineCopy::default();
            if let Err(bad) = self.read_document(text, Some(&mut copy))? {
                return Ok(Err(bad));
            }
            if copy.is_too_long {
                let message =
                    format!("the line is too long for `input.carry`; valid: at most {MAX_RECORD_BYTES} bytes");
                return Ok(Err(BadRecord { reason: reason::LONG_CARRIED, message, newlines }));
            }
            carried::read(&copy.line, &self.names)
        };
        self.carried = match (found, &self.value) {
            (Ok(values), _) => values,
            // the operator `chat` says what is wrong with a conversation
            (Err(_), LineValue::Record) => vec![None; self.names.len()],
            (Err(e), LineValue::Text(_)) => {
                let message = format!("{e}; valid: one JSON object per line");
                return Ok(Err(BadRecord { reason: reason::JSON, message, newlines }));
            }
        };
        Ok(Ok(()))
    }

    fn carried(&mut self) -> Carried {
        std::mem::take(&mut self.carried)
    }

    fn skip(&mut self) -> io::Result<()> {
        self.cursor.finish_line(|_| {})
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}
