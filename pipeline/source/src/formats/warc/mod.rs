//! Records of WARC files (ISO 28500) whose content is plain text, as Common Crawl's WET files have it.
//!
//! A document is the content of a record of the type `conversion`, byte for byte. Fields of its header are columns.
//! Records about the crawl (`warcinfo`, `metadata`, `request`, `revisit`) are passed. A response of a web server is not
//! text, and a continuation is only a part of one: a file that has records of other types is refused.

use std::io;

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::records_table::RecordsTable;
use super::text::invalid;
use super::{BytesFormat, Cut, FileColumn};
use crate::records::{BadRecord, Carried, ReadError, RecordStart, Records, push};
use crate::spool::Spool;
use crate::table_format::TableFormat;

/// Fields of the header that are columns. A record that does not have one has a null there.
const COLUMNS: [&str; 6] = [
    "WARC-Target-URI",
    "WARC-Date",
    "WARC-Record-ID",
    "WARC-Refers-To",
    "WARC-Block-Digest",
    "WARC-Identified-Content-Language",
];

/// Maximum bytes of a header. Those of Common Crawl have less than 3 KB.
const MAX_HEADER_BYTES: usize = 256 << 10;

/// `input.format: warc`.
pub(super) struct Warc;

impl BytesFormat for Warc {
    fn endings(&self) -> &'static [&'static str] {
        &[".wet", ".warc"]
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
        let cursor = Cursor::open_range(store, file, input, range)?;
        Ok((Box::new(WarcRecords::new(cursor, input)), range.0))
    }

    fn columns(&self, store: &Store, file: &InputFile, input: &Input) -> Result<Option<Vec<FileColumn>>, SourceError> {
        let mut records = WarcRecords::new(Cursor::open(store, file, input, 0)?, input);
        // shows whether it is a WARC file, and of text
        records.next().map_err(|e| SourceError::from_io(&file.path, e))?;
        let names = std::iter::once(input.text.as_str()).chain(COLUMNS);
        let column =
            |name: &str| FileColumn { name: name.into(), is_text: true, is_list: false, data_type: "text".into() };
        Ok(Some(names.map(column).collect()))
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&RecordsTable { format: &Warc, columns: &COLUMNS })
    }
}

/// The fields of a record's header.
#[derive(Debug, Default)]
struct Header(Vec<(String, String)>);

impl Header {
    /// Returns the first value of a field. Names of fields have no case.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Reads the records of text.
pub(crate) struct WarcRecords {
    cursor: Cursor,
    /// Fields that are carried.
    carried: Vec<String>,
    header: Header,
    /// Bytes of the record's content that are not passed yet.
    left: u64,
}

impl WarcRecords {
    pub fn new(cursor: Cursor, input: &Input) -> Self {
        let carried = input.carried_columns().map(String::from).collect();
        Self { cursor, carried, header: Header::default(), left: 0 }
    }

    /// Passes the lines between two records. Returns whether there is a further record.
    fn is_at_record(&mut self) -> io::Result<bool> {
        loop {
            match self.cursor.fill()?.first() {
                None => return Ok(false),
                Some(b'\n') => {
                    self.cursor.newlines += 1;
                    self.cursor.consume(1);
                }
                Some(b'\r') => self.cursor.consume(1),
                Some(_) => return Ok(true),
            }
        }
    }

    /// Reads the header of the record that begins here, with the empty line after it.
    fn read_header(&mut self) -> io::Result<()> {
        let start = self.cursor.offset;
        let mut fields: Vec<(String, String)> = Vec::new();
        let (mut line, mut room, mut is_first) = (Vec::new(), MAX_HEADER_BYTES, true);
        loop {
            if self.cursor.fill()?.is_empty() {
                return Err(broken(start, "the file ends in its header"));
            }
            line.clear();
            self.cursor.finish_line(|part| {
                // one byte more shows that it is too long
                line.extend_from_slice(&part[..part.len().min((room + 1).saturating_sub(line.len()))]);
            })?;
            let Some(left) = room.checked_sub(line.len() + 1) else {
                return Err(broken(start, &format!("its header has more than {MAX_HEADER_BYTES} bytes")));
            };
            room = left;
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches('\r');
            if std::mem::take(&mut is_first) {
                if !text.starts_with("WARC/") {
                    let got: String = text.chars().take(40).collect();
                    return Err(broken(start, &format!("it begins with {got:?}; valid: WARC/1.0 or WARC/1.1")));
                }
            } else if text.is_empty() {
                self.header = Header(fields);
                return Ok(());
            } else if let (true, Some((_, value))) = (text.starts_with([' ', '\t']), fields.last_mut()) {
                // the value goes on in a further line
                value.push(' ');
                value.push_str(text.trim());
            } else if let Some((name, value)) = text.split_once(':') {
                fields.push((name.trim().to_owned(), value.trim().to_owned()));
            } else {
                let got: String = text.chars().take(40).collect();
                return Err(broken(start, &format!("its header has the line {got:?}; valid: NAME: VALUE")));
            }
        }
    }

    /// Passes the rest of the content and hands its bytes over, part by part.
    fn pass_content(&mut self, mut on_part: impl FnMut(&[u8], u64)) -> io::Result<()> {
        while self.left > 0 {
            let before = self.cursor.newlines;
            let available = self.cursor.fill()?;
            let n = (available.len() as u64).min(self.left) as usize;
            if n == 0 {
                let missing = self.left;
                return Err(broken(
                    self.cursor.offset,
                    &format!("the file ends {missing} bytes before its content does"),
                ));
            }
            let part = &available[..n];
            on_part(part, before);
            let newlines = memchr::memchr_iter(b'\n', part).count() as u64;
            self.cursor.newlines += newlines;
            self.cursor.consume(n);
            self.left -= n as u64;
        }
        Ok(())
    }
}

/// The error of a file whose further records cannot be found.
fn broken(offset: u64, problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the WARC record at byte {offset} is broken: {problem}"))
}

impl Records for WarcRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        loop {
            if !self.is_at_record()? {
                return Ok(None);
            }
            let start = RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines };
            self.read_header()?;
            let length = self.header.get("Content-Length").unwrap_or_default();
            self.left = length.parse().map_err(|_| {
                broken(start.offset, &format!("its Content-Length is {length:?}; valid: a number of bytes"))
            })?;
            match self.header.get("WARC-Type").unwrap_or_default() {
                "conversion" => return Ok(Some(start)),
                "warcinfo" | "metadata" | "request" | "revisit" => self.pass_content(|_, _| {})?,
                kind => {
                    let message = format!(
                        "the WARC record at byte {} is of the type {kind:?}, whose content is not text; valid: files of \
                         `conversion` records, such as the WET files (.warc.wet.gz) of the same crawl",
                        start.offset
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        let (mut bad, mut fault) = (None, None);
        self.pass_content(|part, newlines| {
            if bad.is_none() && fault.is_none() {
                match push(text, part) {
                    Ok(None) => {}
                    Ok(Some(at)) => bad = Some(newlines + memchr::memchr_iter(b'\n', &part[..at]).count() as u64),
                    Err(e) => fault = Some(e),
                }
            }
        })?;
        if let Some(fault) = fault {
            return Err(fault);
        }
        let bad = bad.or_else(|| (!text.is_whole()).then_some(self.cursor.newlines));
        Ok(bad.map_or(Ok(()), |newlines| Err(invalid(newlines))))
    }

    fn skip(&mut self) -> io::Result<()> {
        self.pass_content(|_, _| {})
    }

    fn carried(&mut self) -> Carried {
        self.carried.iter().map(|name| self.header.get(name).map(str::to_owned)).collect()
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}
