//! Looks at the files of a corpus: their format, compression and columns, and the language of the first documents.
//! `stillhouse init` proposes a job from it.
//!
//! ```text
//!   paths ─► their files, by format ─► the format with the most bytes ─► the first rows of a few files ─► columns
//! ```
//!
//! Cost: a listing, and at most 1,000 records of 8 files: these decide the types of columns
//! of JSON and CSV. Of 50 rows a file it keeps the lengths of texts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use serde::Serialize;
use stillhouse_input_files::{InputFile, InputPaths, ListError, Store, compression, evenly_spaced, list_files};
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::problems::Problems;
use stillhouse_schemas::spec::{Compression, INPUT_TABLE, Input, InputFormat, JobSpec, OnError};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::input_store;
use crate::path_expansion::PathExpander;
use crate::source::{self, QueryTable};
use crate::source_error::{SourceError, Stopped};
use crate::storage::Storages;

/// Files of which rows are read, spread over all.
const MAX_SAMPLED_FILES: usize = 8;
/// Rows that are read of a file.
const ROWS_PER_FILE: usize = 50;
/// Bytes of a text that decide its language.
const LANGUAGE_BYTES: usize = 2048;
/// Name of the argument, for messages.
const FIELD: &str = "CORPUS";
/// Depth to which objects in a column are looked into.
const MAX_DEPTH: usize = 4;

/// What the files of a corpus are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InputSummary {
    /// Format of the files that make up most of the corpus.
    pub format: InputFormat,
    /// Number of these files.
    pub files: usize,
    /// Their size as stored, in bytes.
    pub bytes: u64,
    /// Number of files by compression, where a whole file is compressed or may be.
    pub compression: BTreeMap<String, usize>,
    /// Number of files of other formats under the same paths.
    pub other_files: BTreeMap<String, usize>,
    /// Rows that were read.
    pub rows: usize,
    /// Columns with text, the longest texts first.
    pub text_columns: Vec<TextColumn>,
    /// Names of the other columns.
    pub other_columns: Vec<String>,
}

/// A column with text.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TextColumn {
    /// Its name; `meta.text` is the key `text` of the object `meta`.
    pub name: String,
    /// Rows that have a text.
    pub texts: usize,
    /// Mean length of these texts in bytes.
    pub mean_bytes: f64,
    /// Number of texts by language, by its English name.
    pub languages: BTreeMap<String, usize>,
}

impl TextColumn {
    /// The language of most texts, and its share of those whose language was recognised.
    pub fn language(&self) -> Option<(&str, f64)> {
        let all: usize = self.languages.values().sum();
        let most = self.languages.iter().max_by_key(|(_, texts)| **texts)?;
        Some((most.0, *most.1 as f64 / all as f64))
    }
}

/// Looks at the files that these paths name, relative to `base`: files, folders, globs or URLs. Blocks; needs a tokio
/// runtime.
///
/// # Errors
/// If nothing is found, no file has a format that contains text, or a file cannot be read.
pub fn summarize(paths: &[String], base: &Path, observer: &dyn Observer) -> Result<InputSummary> {
    let (names, storages) = (PathExpander::from_environment(), Storages::new());
    let spec = spec_of(paths)?;
    let store = input_store(&spec, &names, &storages)?;
    observer.event(&Event::Preparing { what: "listing the files of the corpus".into() });
    let input = &spec.input;
    let paths = InputPaths { input, field: FIELD, base_dir: base, names: &names, endings: source::table_endings() };
    let files = list_files(&store, paths, &|_| Ok(()), &mut |_| {}).map_err(|e| match e {
        ListError::Problems(problems) => of_corpus(Problems(problems)).into(),
        ListError::Store(error) => error,
    })?;
    let mut by_format: Vec<(Input, Vec<InputFile>)> = InputFormat::tables()
        .map(|format| {
            let of_format = |file: &&InputFile| source::format_of_file_name(&file.path) == Some(format);
            (Input { format: Some(format), ..input.clone() }, files.iter().filter(of_format).cloned().collect())
        })
        .filter(|(_, files): &(_, Vec<_>)| !files.is_empty())
        .collect();
    by_format.sort_by_key(|(_, files)| std::cmp::Reverse(bytes(files)));
    let mut by_format = by_format.into_iter();
    let Some((input, files)) = by_format.next() else {
        let message =
            format!("none of the files has an ending of a format with text; valid: {}", source::table_endings());
        return Err(PipelineError::new(ErrorKind::Usage, message));
    };
    observer.event(&Event::Preparing { what: "reading the first records of a few files".into() });
    let mut columns = Columns::default();
    for file in evenly_spaced(&files, files.len(), MAX_SAMPLED_FILES) {
        columns.read(&store, &input, file).map_err(|e| PipelineError::source(FIELD, e))?;
    }
    let mut compressions = BTreeMap::new();
    for file in &files {
        let name = match compression(file, &input) {
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
            Compression::None | Compression::Auto => "none",
        };
        *compressions.entry(name.to_owned()).or_default() += 1;
    }
    let rows = columns.rows;
    let (text_columns, other_columns) = columns.finish();
    Ok(InputSummary {
        format: input.format(),
        files: files.len(),
        bytes: bytes(&files),
        compression: compressions,
        other_files: by_format.map(|(input, files)| (input.format().name().to_owned(), files.len())).collect(),
        rows,
        text_columns,
        other_columns,
    })
}

fn bytes(files: &[InputFile]) -> u64 {
    files.iter().map(|file| file.size).sum()
}

/// A job with these paths, for what lists and reads files of a job.
fn spec_of(paths: &[String]) -> Result<JobSpec> {
    let job = serde_json::json!({
        "version": 1, "name": "init", "input": {"format": "text", "paths": paths, "on_error": "skip"},
        "tokenizer": {"path": "none"}, "pack": {"length": 2, "boundary": "none"}, "output": {"path": "none"},
    });
    job_format().parse_json(&job.to_string()).into_result().map_err(|problems| of_corpus(problems).into())
}

/// Problems of the argument, not of a job file.
fn of_corpus(mut problems: Problems) -> Problems {
    for problem in &mut problems.0 {
        (problem.field, problem.position) = (FIELD.into(), None);
    }
    problems
}

/// What was read of the columns, by name.
#[derive(Default)]
struct Columns {
    texts: BTreeMap<String, TextColumn>,
    others: BTreeSet<String>,
    rows: usize,
}

impl Columns {
    /// Reads the first rows of a file.
    fn read(&mut self, store: &Store, input: &Input, file: &InputFile) -> std::result::Result<(), SourceError> {
        let table = QueryTable {
            name: INPUT_TABLE.into(),
            field: FIELD.into(),
            input: Input { on_error: OnError::Skip, ..input.clone() },
            files: vec![file.clone()],
        };
        let schema = Arc::new(table.schema(store)?);
        let mut left = ROWS_PER_FILE;
        let read = table.read(store, &schema, &mut |batch, _| {
            let batch = batch.slice(0, batch.num_rows().min(left));
            left -= batch.num_rows();
            self.rows += batch.num_rows();
            for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
                self.add(field.name(), column, 0);
            }
            if left == 0 { Err(Stopped.into()) } else { Ok(()) }
        });
        match read {
            Ok(_) | Err(SourceError::Stopped(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn add(&mut self, name: &str, column: &ArrayRef, depth: usize) {
        match column.data_type() {
            DataType::Struct(fields) if depth < MAX_DEPTH => {
                for (field, column) in fields.iter().zip(column.as_struct().columns()) {
                    self.add(&format!("{name}.{}", field.name()), column, depth + 1);
                }
            }
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
                let Ok(texts) = cast(column, &DataType::Utf8View) else { return };
                let found = self.texts.entry(name.to_owned()).or_default();
                texts.as_string_view().iter().flatten().for_each(|text| found.add(text));
            }
            _ => drop(self.others.insert(name.to_owned())),
        }
    }

    fn finish(self) -> (Vec<TextColumn>, Vec<String>) {
        let named = self.texts.into_iter().map(|(name, column)| TextColumn { name, ..column });
        let mut texts: Vec<TextColumn> = named.collect();
        texts.sort_by(|a, b| b.mean_bytes.total_cmp(&a.mean_bytes));
        (texts, self.others.into_iter().collect())
    }
}

impl TextColumn {
    fn add(&mut self, text: &str) {
        self.texts += 1;
        self.mean_bytes += (text.len() as f64 - self.mean_bytes) / self.texts as f64;
        let head = &text[..text.floor_char_boundary(LANGUAGE_BYTES)];
        if let Some(found) = whatlang::detect(head).filter(whatlang::Info::is_reliable) {
            *self.languages.entry(found.lang().eng_name().to_owned()).or_default() += 1;
        }
    }
}
