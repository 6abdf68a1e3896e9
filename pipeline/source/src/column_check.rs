//! Checks during planning that the files have the job's format and that the text column exists and can hold text.
//!
//! Cost: reads the footer or header of at most [`MAX_CHECKED_FILES`] Parquet, Arrow and CSV files, or the first bytes
//! of as many other files (in a store, of the first 32).

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{
    BeforeItem, InputFile, MAX_CHECKED_FILES, Store, evenly_spaced,
    sniff::{self, HEAD_BYTES},
};
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;

use super::formats::{self, FileColumn, Format};

/// Maximum number of files in stores that the check reads before a job begins. The run checks the others when it reads
/// them, without a further request.
const MAX_STORE_FILES: usize = 32;
/// Maximum number of problems that a check of files reports.
pub(super) const MAX_PROBLEMS: usize = 5;

/// Checks that `input.text` is a string column of the files. With `input.sql` or a mixture it checks nothing,
/// since these make the column. Reports at most five files. Calls `before_item` before it examines each file.
///
/// # Errors
/// When a store does not answer, which is not a problem of the job.
pub fn check_columns(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    before_item: BeforeItem<'_>,
) -> Result<Vec<Problem>, SourceError> {
    // `check_first_records` checks images and codes
    if input.is_staged() || input.is_rows() {
        return Ok(Vec::new());
    }
    let format = formats::for_input(input);
    let mut problems = Vec::new();
    for (i, file) in evenly_spaced(files.iter().enumerate(), files.len(), MAX_CHECKED_FILES) {
        if problems.len() >= MAX_PROBLEMS {
            break;
        }
        before_item(i);
        match format.columns(store, file, input) {
            Err(e) if e.retryable() => return Err(e),
            Err(e) => problems.push(Problem::missing("input.paths", e.to_string())),
            // an empty CSV file has no header
            Ok(Some(columns)) if columns.is_empty() && matches!(format, Format::Bytes(_)) => {}
            Ok(Some(columns)) => {
                problems.extend(check_text_column(&columns, &file.path, input));
                problems.extend(check_carried_columns(&columns, &file.path, input));
            }
            Ok(None) => return check_first_bytes(store, files, input, "input.paths", MAX_PROBLEMS, before_item),
        }
    }
    Ok(problems)
}

fn check_text_column(columns: &[FileColumn], file: &str, input: &Input) -> Option<Problem> {
    if let Some(messages) = &input.messages {
        return check_messages_column(columns, file, messages);
    }
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

/// Checks that the columns exist that `input.carry` names, and that each has one value per record.
fn check_carried_columns(columns: &[FileColumn], file: &str, input: &Input) -> Vec<Problem> {
    let problem = |(i, name): (usize, &String)| {
        let there = columns.iter().find(|column| column.name == *name);
        let inside = format!("{name}.");
        let message = match there {
            Some(column) if !column.is_list => return None,
            Some(column) => {
                format!("the column is of type {} in {file}; valid: one value per record", column.data_type)
            }
            None if columns.iter().any(|column| column.is_list && column.name.starts_with(&inside)) => {
                format!("the column is a list in {file}; valid: one value per record")
            }
            None if columns.iter().any(|column| column.name.starts_with(&inside)) => {
                format!("the column has fields in {file}; valid: the name of a field, such as {inside}FIELD")
            }
            None => {
                let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
                format!("no such column in {file}; columns: {}{}", names.join(", "), did_you_mean(name, &names))
            }
        };
        Some(Problem::new(format!("input.carry[{i}]"), format!("{name:?}"), message))
    };
    let is_column = |(_, name): &(usize, &String)| input.carried_columns().any(|column| column == *name);
    input.carry.iter().enumerate().filter(is_column).filter_map(problem).collect()
}

/// Checks that a column of messages exists: one column, or those of the fields of its objects.
fn check_messages_column(columns: &[FileColumn], file: &str, messages: &str) -> Option<Problem> {
    let root = |column: &FileColumn| column.name.split('.').next().unwrap_or_default().to_owned();
    let mut roots: Vec<String> = columns.iter().map(root).collect();
    roots.dedup();
    if roots.iter().any(|root| root == messages) {
        return None;
    }
    let names: Vec<&str> = roots.iter().map(String::as_str).collect();
    let meant = did_you_mean(messages, &names);
    let there = names.join(", ");
    Some(Problem::new(
        "input.messages",
        format!("{messages:?}"),
        format!("no such column in {file}; columns: {there}{meant}"),
    ))
}

/// Checks the first bytes of line files and returns at most `max_problems` problems. Examines [`MAX_CHECKED_FILES`]
/// evenly spread files on the local disk, and the first ones in a store. The run checks the others when it reads them.
///
/// # Errors
/// When a store does not answer.
pub(super) fn check_first_bytes(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    field: &str,
    max_problems: usize,
    before_item: BeforeItem<'_>,
) -> Result<Vec<Problem>, SourceError> {
    let mut problems = Vec::new();
    let mut in_stores = 0;
    let chosen = evenly_spaced(files.iter().enumerate(), files.len(), MAX_CHECKED_FILES);
    for (i, file) in chosen.filter(|(_, file)| file.size > 0) {
        before_item(i);
        if problems.len() >= max_problems {
            break;
        }
        if !store.is_on_disk(&file.location) {
            in_stores += 1;
            if in_stores > MAX_STORE_FILES {
                continue;
            }
        }
        match store.get(&file.location, 0, file.size.min(HEAD_BYTES)) {
            Ok(head) => {
                problems.extend(sniff::check_stored(&head, file, input).map(|e| Problem::missing(field, e.to_string())))
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
