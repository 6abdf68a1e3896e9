//! `input.sql`: a DataFusion query over tables of input files. Its text column is staged as Parquet files and then read
//! like any other input.
//!
//! ```text
//!   files ─► tables ─► query (1 partition, fixed options, memory bound, spills) ─► dir/part-NNNNN.parquet ─► plan_splits
//! ```
//!
//! The query's rows, their order and the splits are the same every time, whatever the memory: it runs in one partition,
//! may not call functions that depend on the time or on chance, and every order is total (`order`). Without ORDER BY
//! a filter keeps the order of the files.
//!
//! Clauses that the parser accepts and DataFusion would drop are refused (`clauses`), and so are queries that are too
//! large (`bounds`). A broken record of a table follows `on_error`, and so does a null in the query's text column,
//! which is a bad record of the staged files.
//!
//! Memory: sorts, aggregations and windows spill to disk beyond the bound; the smaller side of a join must fit in it.
//! Outside of the bound: 1024 rows or 1 MB of the columns used, and a record of at most 256 MB. Disk: another copy of
//! the text, compressed.

mod bounds;
mod check;
mod clauses;
mod error;
mod mixture;
mod nodes;
mod order;
mod session;
mod stage;
mod table;
#[cfg(test)]
mod tests;

pub use check::check_sql;
pub use mixture::{CountTokens, MixtureJob, MixtureProgress, check_mixture, stage_mixture};
pub use stage::{MixedTable, StagedRecord, StagedRows, read_staged_record, reuse_staged, stage_sql, staged_rows};
