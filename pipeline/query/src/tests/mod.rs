//! Tests of queries: they stage the rows of a query over a folder of files and read them back.

mod agreement;
#[path = "../../../source/src/tests/bench.rs"]
pub(crate) mod bench;
mod queries;
mod rules;
mod types;

use arrow::array::RecordBatch;
use serde_json::{Value, json};
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{self as input_files, InputFile};
use stillhouse_schemas::spec::Input;
use stillhouse_source as source;
use stillhouse_source::{QueryTable, plan_splits};

use super::*;
use bench::*;

pub(super) fn with_sql(fields: Value, sql: &str) -> Input {
    let mut input = input(fields);
    input.sql = Some(sql.into());
    input
}

pub(crate) fn tables(bench: &Bench, input: &Input) -> Vec<QueryTable> {
    let table = |source: stillhouse_schemas::spec::Source| QueryTable {
        files: bench.files(&source.input),
        name: source.name,
        field: source.field,
        input: source.input,
    };
    input.sources().into_iter().map(table).collect()
}

pub(super) fn run(bench: &Bench, input: &Input) -> Result<(StagedRows, Vec<String>), SourceError> {
    let out = tempfile::tempdir().unwrap();
    let staged_now = stage_sql(&bench.store, &tables(bench, input), input, 64 << 20, out.path(), |_| {})?;
    let files: Vec<InputFile> = tables(bench, input).into_iter().flat_map(|table| table.files).collect();
    assert_eq!(reuse_staged(out.path(), &files).as_ref(), Some(&staged_now));
    let mut as_parquet = input.clone();
    as_parquet.format = Some(stillhouse_schemas::spec::InputFormat::Parquet);
    as_parquet.tables.clear();
    let splits = plan_splits(&bench.store, &staged_now.files, &as_parquet, 1 << 20, 0, &|_| {})?.splits;
    let documents = bench.read(&staged_now.files, &as_parquet, &splits)?.documents;
    Ok((staged_now, documents))
}

pub(super) fn problems(bench: &Bench, input: &Input) -> String {
    let problems = check_sql(&bench.store, &tables(bench, input), input, |_| {}).unwrap();
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
