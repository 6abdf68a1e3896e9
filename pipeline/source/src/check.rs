//! Checks during planning that the files have the job's format and that the text column exists and can hold text.
//!
//! Cost: reads the footer or header of at most [`MOST_LOOKED_INTO`] Parquet, Arrow and CSV files, or the first bytes of
//! as many other files (in a store, of the first 32).

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;

use super::formats::{self, FileColumn, Format};
use super::input_file::{InputFile, LookedAt};
use super::parallel::{MOST_LOOKED_INTO, spread};
use super::sniff::{self, HEAD};
use super::store::Store;

/// Maximum number of files in stores that the check reads before a job begins. The run checks the others when it reads
/// them, without a further request.
const STORE_FILES: usize = 32;
const MOST: usize = 5;

/// Checks that `input.text` is a string column of the files. With `input.sql` it checks nothing (see
/// [`super::check_sql`]). Reports at most five files. Calls `looked_at` before it examines each file.
///
/// # Errors
/// When a store does not answer, which is not a problem of the job.
pub fn check_columns(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    looked_at: LookedAt<'_>,
) -> Result<Vec<Problem>, SourceError> {
    // `first_records` checks images and codes
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
            // an empty CSV file has no header
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

/// Checks the first bytes of line files and returns at most `most` problems. Examines [`MOST_LOOKED_INTO`] evenly
/// spread files on the local disk, and the first ones in a store. The run checks the others when it reads them.
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
                let error = SourceError::of_store(&file.path, error);
                if error.retryable() {
                    return Err(error);
                }
                problems.push(Problem::missing(field, error.to_string()));
            }
        }
    }
    Ok(problems)
}
