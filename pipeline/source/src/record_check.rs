//! Checks before a run begins that the first records of the files are what the job says.
//!
//! With `input.carry`, a key of JSON that none of the first [`MAX_KEY_RECORDS`] records has is a problem: without the check, a
//! misspelt key would make a column of nulls.
//!
//! Cost: reads the first bytes of at most [`MAX_CHECKED_FILES`] files on a disk and of at most [`MAX_STORE_FILES`] in
//! stores, evenly spread over the list. The run reports problems of the other files when it reads them.

use std::collections::BTreeMap;

use arrow::datatypes::{DataType, Fields};
use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{InputFile, MAX_CHECKED_FILES, Store};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{Input, OnError};

use super::formats::{self, BytesFormat, Format, numbers};
use super::records::ReadError;
use super::split_reader::read_split;
use super::spool::Spool;

/// Maximum number of files in stores that the check reads. Each costs one or two requests.
const MAX_STORE_FILES: usize = 32;
/// Maximum number of problems reported. The first ones are enough to see the cause.
const MAX_PROBLEMS: usize = 5;
/// If bad records may be skipped, the check warns about a file whose first this many records are all bad.
const MAX_RECORDS: usize = 16;
/// Maximum number of stored bytes that the check reads of a file.
const HEAD_BYTES: u64 = 1 << 20;

/// Maximum number of keys that a message names.
const MAX_KEYS_SHOWN: usize = 20;
/// Maximum number of records in which keys of `input.carry` are looked for.
const MAX_KEY_RECORDS: usize = 1000;

/// Results of checking the first records of the files.
#[derive(Debug, Default)]
pub struct FirstRecords {
    /// Files at which a run would fail at once: their first record is bad, or the file is damaged.
    pub problems: Vec<Problem>,
    /// Files whose first records would all be skipped, each with the reason.
    pub skipped: Vec<(String, String)>,
    /// Number of files checked.
    pub files: usize,
}

/// Reads the first record of the files (of 10,000 on a disk, of 32 in stores), or the first few records if bad ones are
/// skipped. Calls `report` with the number of files done and the total.
///
/// # Errors
/// When a store does not answer, which is not a problem of the job.
pub fn check_first_records(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    report: &dyn Fn(usize, usize),
) -> Result<FirstRecords, SourceError> {
    let mut found = FirstRecords::default();
    let chosen = choose_files(store, files, input);
    for (i, file) in chosen.iter().enumerate() {
        if found.problems.len() >= MAX_PROBLEMS {
            break;
        }
        report(i, chosen.len());
        found.files += 1;
        match skip_reason(store, files, file, input) {
            Ok(None) => {}
            Ok(Some(reason)) => found.skipped.push((file.path.clone(), reason)),
            Err(e) if e.retryable() => return Err(e),
            Err(e) => found.problems.push(Problem::missing("input.paths", e.to_string())),
        }
    }
    if let Format::Bytes(format) = formats::for_input(input)
        && !input.is_staged()
        && found.problems.is_empty()
    {
        found.problems = check_carried_keys(format, store, &chosen, input)?;
    }
    Ok(found)
}

/// Checks that the first records have values of the keys that `input.carry` names.
fn check_carried_keys(
    format: &dyn BytesFormat,
    store: &Store,
    files: &[&InputFile],
    input: &Input,
) -> Result<Vec<Problem>, SourceError> {
    let mut missing: Vec<&str> = input.carried_columns().collect();
    let mut records_read = 0;
    let mut text = Spool::new(input.piece_kilobytes as usize * 1000);
    for file in files.iter().take(MAX_STORE_FILES) {
        if missing.is_empty() || records_read == MAX_KEY_RECORDS {
            break;
        }
        let head = InputFile { size: file.size.min(HEAD_BYTES), ..InputFile::clone(file) };
        let (mut records, _) = format.open(store, &head, input, (0, u64::MAX))?;
        // an error after a good record may come from the cut
        while records_read < MAX_KEY_RECORDS && records.next().is_ok_and(|start| start.is_some()) {
            text.clear().map_err(SourceError::temporary_file)?;
            let Ok(outcome) = records.read(&mut text) else { break };
            if outcome.is_err() {
                continue;
            }
            records_read += 1;
            let values: Vec<_> = input.carried_columns().zip(records.carried()).collect();
            missing.retain(|name| values.iter().any(|(of, value)| of == name && value.is_none()));
        }
    }
    if records_read == 0 || missing.is_empty() {
        return Ok(Vec::new());
    }
    let keys = key_names(format, store, files, input);
    let problem = |name: &&str| {
        let index = input.carry.iter().position(|carried| carried == name)?;
        let meant = did_you_mean(name, &keys.iter().map(String::as_str).collect::<Vec<_>>());
        let message = format!(
            "none of the first {records_read} records has a value of this key; their keys: {}{meant}",
            keys.join(", ")
        );
        Some(Problem::new(format!("input.carry[{index}]"), format!("{name:?}"), message))
    };
    Ok(missing.iter().filter_map(problem).collect())
}

/// Returns the keys of the first records, and those of their objects as `meta.lang`; for messages.
fn key_names(format: &dyn BytesFormat, store: &Store, files: &[&InputFile], input: &Input) -> Vec<String> {
    fn add(prefix: &str, fields: &Fields, names: &mut Vec<String>) {
        for field in fields {
            let name = format!("{prefix}{}", field.name());
            match field.data_type() {
                DataType::Struct(inner) => add(&format!("{name}."), inner, names),
                _ if names.len() < MAX_KEYS_SHOWN => names.push(name),
                _ => {}
            }
        }
    }
    let files: Vec<InputFile> = files.iter().take(MAX_STORE_FILES).map(|file| InputFile::clone(file)).collect();
    let mut names = Vec::new();
    if let Some(Ok(schema)) = format.table().map(|table| table.schema(store, &files, input)) {
        add("", schema.fields(), &mut names);
    }
    names
}

/// Returns files spread over the list: many of the disk, fewer of those in stores, and fewer of images, which may be
/// one file each.
fn choose_files<'a>(store: &Store, files: &'a [InputFile], input: &Input) -> Vec<&'a InputFile> {
    let is_remote = |file: &InputFile| input.is_rows() || (!file.is_placeholder() && !store.is_on_disk(&file.location));
    let remote_files = files.iter().filter(|file| is_remote(file)).count();
    let every = |all: usize, most: usize| all.div_ceil(most).max(1);
    let steps = [every(files.len() - remote_files, MAX_CHECKED_FILES), every(remote_files, MAX_STORE_FILES)];
    let mut numbers = [0, 0];
    let mut wanted = |file: &InputFile| {
        let of = usize::from(is_remote(file));
        numbers[of] += 1;
        (numbers[of] - 1) % steps[of] == 0
    };
    files.iter().filter(|file| wanted(file)).collect()
}

/// Returns the reason why all of the first records would be skipped. `None` if one of them is good or the file is too
/// short to tell.
fn skip_reason(
    store: &Store,
    files: &[InputFile],
    file: &InputFile,
    input: &Input,
) -> Result<Option<String>, SourceError> {
    let groups = match formats::for_input(input) {
        Format::Bytes(format) => return check_bytes(format, store, file, input),
        Format::Rows(format) => format.row_groups(store, file, input)?,
        Format::Numbers => {
            return numbers::skip_reason(
                store,
                files,
                file,
                input,
                if input.on_error == OnError::Fail { 1 } else { MAX_RECORDS },
            );
        }
    };
    let rows: u64 = groups.iter().map(|group| group.rows).sum();
    let max_records = if input.on_error == OnError::Fail { 1 } else { MAX_RECORDS as u64 };
    let split = SplitRecord {
        split: SplitId(0),
        dataset_split: String::new(),
        keys: None,
        appended: 0,
        place: None,
        pieces: vec![Piece { file: file.path.clone(), range: Range::Rows { start: 0, end: rows.min(max_records) } }],
    };
    if rows == 0 {
        return Ok(None);
    }
    let read = read_split(store, std::slice::from_ref(file), &split, input, &mut |_| Ok(()))?;
    Ok(if read.documents == 0 { read.skipped.into_keys().next() } else { None })
}

fn check_bytes(
    format: &dyn BytesFormat,
    store: &Store,
    file: &InputFile,
    input: &Input,
) -> Result<Option<String>, SourceError> {
    let head = InputFile { size: file.size.min(HEAD_BYTES), ..file.clone() };
    let is_truncated = head.size < file.size;
    match read_head(format, store, &head, input) {
        Ok(HeadRecords { ended_at, .. }) if is_truncated && ended_at >= head.size => Ok(None),
        Ok(HeadRecords { good: true, .. }) => Ok(None),
        Ok(head) => Ok(head.skipped.into_keys().next()),
        // the error may come from the cut
        Err(SourceError::Corrupt { .. }) if is_truncated => Ok(None),
        Err(e) => Err(e),
    }
}

struct HeadRecords {
    /// Whether one of the records is a document.
    good: bool,
    skipped: BTreeMap<String, u64>,
    /// Offset of the end of the last record read.
    ended_at: u64,
}

fn read_head(
    format: &dyn BytesFormat,
    store: &Store,
    file: &InputFile,
    input: &Input,
) -> Result<HeadRecords, SourceError> {
    let fault = |e| SourceError::from_io(&file.path, e);
    let (mut records, _) = format.open(store, file, input, (0, u64::MAX))?;
    let mut text = Spool::new(input.piece_kilobytes as usize * 1000);
    let mut head = HeadRecords { good: false, skipped: BTreeMap::new(), ended_at: 0 };
    for _ in 0..MAX_RECORDS {
        if records.next().map_err(fault)?.is_none() {
            break;
        }
        text.clear().map_err(SourceError::temporary_file)?;
        let outcome = records.read(&mut text).map_err(|e| match e {
            ReadError::Input(e) => fault(e),
            ReadError::Spool(e) => SourceError::temporary_file(e),
        })?;
        head.ended_at = records.offset();
        match outcome {
            Ok(()) => {
                head.good = true;
                break;
            }
            Err(_) if head.ended_at >= file.size && file.size == HEAD_BYTES => break,
            Err(bad) if input.on_error == OnError::Fail => {
                let (position, reason, message) = (RecordPosition::Line(1 + bad.newlines), bad.reason, bad.message);
                return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
            }
            Err(bad) => *head.skipped.entry(bad.reason.into()).or_default() += 1,
        }
    }
    Ok(head)
}
