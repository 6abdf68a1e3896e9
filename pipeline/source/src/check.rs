//! A check when a job is planned: the files are what the job says they are, and the text column is there and can be text.
//!
//! Cost: the footer or header of at most [`MOST_LOOKED_INTO`] Parquet, Arrow and CSV files; the first bytes of as many others (of a store, of the first 32).

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{Input, InputFormat};

use super::first::MOST_LOOKED_INTO;
use super::list::{InputFile, LookedAt};
use super::parallel::spread;
use super::store::Store;
use super::{csv, ipc, parquet_rows, sniff};

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
    if !matches!(input.format(), InputFormat::Parquet | InputFormat::Arrow | InputFormat::Csv) {
        return sniff::check(store, files, input, "input.paths", MOST, looked_at);
    }
    let mut problems = Vec::new();
    for (i, file) in spread(files.iter().enumerate(), files.len(), MOST_LOOKED_INTO) {
        if problems.len() >= MOST {
            break;
        }
        looked_at(i);
        let columns = match input.format() {
            InputFormat::Parquet => parquet_rows::columns(store, file),
            InputFormat::Arrow => ipc::columns(store, file),
            _ => csv::columns(store, file, input)
                .map(|names| names.into_iter().map(|n| (n, true, "text".to_string())).collect()),
        };
        match columns {
            Err(e) if e.retryable() => return Err(e),
            Err(e) => problems.push(Problem::missing("input.paths", e.to_string())),
            Ok(columns) if columns.is_empty() && input.format() == InputFormat::Csv => {}
            Ok(columns) => problems.extend(check(&columns, &file.path, input)),
        }
    }
    Ok(problems)
}

fn check(columns: &[(String, bool, String)], file: &str, input: &Input) -> Option<Problem> {
    if columns.iter().any(|(name, string, _)| *name == input.text && *string) {
        return None;
    }
    let there = columns.iter().map(|(name, _, kind)| format!("{name} ({kind})")).collect::<Vec<_>>().join(", ");
    let wrong = match columns.iter().find(|(name, _, _)| *name == input.text) {
        Some((_, _, kind)) => format!("the column is of type {kind} in {file}; valid: a string column of"),
        None => format!("no such column in {file}; columns:"),
    };
    let names: Vec<&str> = columns.iter().filter(|(_, string, _)| *string).map(|(name, ..)| name.as_str()).collect();
    let there = there + &did_you_mean(&input.text, &names);
    Some(Problem::new("input.text", format!("{:?}", input.text), format!("{wrong} {there}")))
}
