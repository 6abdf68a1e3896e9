//! A check when a job is planned: the files are what the job says they are, and the text column is there and can be text.
//!
//! Cost: the footer or header of at most [`MOST_LOOKED_INTO`] Parquet, Arrow and CSV files; the first bytes of as many others (of a store, of the first 32).

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;

use super::formats::{self, FileColumn, Format};
use super::input_file::{InputFile, LookedAt};
use super::parallel::{MOST_LOOKED_INTO, spread};
use super::sniff::{self, HEAD};
use super::store::Store;

/// Files of a store that are looked at before a job begins; the others when they are read, at no further request.
const STORE_FILES: usize = 32;
const MOST: usize = 5;

/// Checks that `input.text` is a string column of the files; with `input.sql` nothing is checked here (see
/// [`super::check_sql`]). Tells at most five files. `looked_at` is told of every file, before it is looked at.
///
/// # Errors
/// When a store does not answer: that is no problem of the job.
pub fn check_columns(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    looked_at: LookedAt<'_>,
) -> Result<Vec<Problem>, SourceError> {
    // of images and codes the first records tell
    if input.sql.is_some() || input.is_rows() {
        return Ok(Vec::new());
    }
    let format = formats::of(input);
    let mut problems = Vec::new();
    for (i, file) in spread(files.iter().enumerate(), files.len(), MOST_LOOKED_INTO) {
        if problems.len() >= MOST {
            break;
        }
        looked_at(i);
        match format.columns(store, file, input) {
            Err(e) if e.retryable() => return Err(e),
            Err(e) => problems.push(Problem::missing("input.paths", e.to_string())),
            // an empty file of CSV has no header
            Ok(Some(columns)) if columns.is_empty() && matches!(format, Format::Bytes(_)) => {}
            Ok(Some(columns)) => problems.extend(check(&columns, &file.path, input)),
            Ok(None) => return first_bytes(store, files, input, "input.paths", MOST, looked_at),
        }
    }
    Ok(problems)
}

fn check(columns: &[FileColumn], file: &str, input: &Input) -> Option<Problem> {
    if columns.iter().any(|column| column.name == input.text && column.is_text) {
        return None;
    }
    let there =
        columns.iter().map(|column| format!("{} ({})", column.name, column.data_type)).collect::<Vec<_>>().join(", ");
    let wrong = match columns.iter().find(|column| column.name == input.text) {
        Some(FileColumn { data_type, .. }) => {
            format!("the column is of type {data_type} in {file}; valid: a string column of")
        }
        None => format!("no such column in {file}; columns:"),
    };
    let names: Vec<&str> = columns.iter().filter(|column| column.is_text).map(|column| column.name.as_str()).collect();
    let there = there + &did_you_mean(&input.text, &names);
    Some(Problem::new("input.text", format!("{:?}", input.text), format!("{wrong} {there}")))
}

/// Looks at the first bytes of the files of lines, at most `most` problems: of this machine [`MOST_LOOKED_INTO`], evenly spread, the first ones of a store.
/// The others are looked at when they are read.
///
/// # Errors
/// When a store does not answer.
pub(super) fn first_bytes(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    field: &str,
    most: usize,
    looked_at: LookedAt<'_>,
) -> Result<Vec<Problem>, SourceError> {
    let mut problems = Vec::new();
    let mut in_stores = 0;
    let chosen = spread(files.iter().enumerate(), files.len(), MOST_LOOKED_INTO);
    for (i, file) in chosen.filter(|(_, file)| file.size > 0) {
        looked_at(i);
        if problems.len() >= most {
            break;
        }
        if !store.is_on_disk(&file.location) {
            in_stores += 1;
            if in_stores > STORE_FILES {
                continue;
            }
        }
        match store.get(&file.location, 0, file.size.min(HEAD)) {
            Ok(head) => {
                problems.extend(sniff::stored(&head, file, input).map(|e| Problem::missing(field, e.to_string())))
            }
            Err(error) => {
                let error = SourceError::from_store(&file.path, error);
                if error.retryable() {
                    return Err(error);
                }
                problems.push(Problem::missing(field, error.to_string()));
            }
        }
    }
    Ok(problems)
}
