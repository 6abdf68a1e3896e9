//! The corpus: from the job's paths to documents in pieces, for every format, without ever holding a document.
//!
//! ```text
//!   input.paths ─► list ─► [InputFile] ─► plan_splits ─► [SplitRecord] ─► SplitReader ─► documents_schema batches
//!                   │                        ▲                               │
//!                   └─► stage_sql ─► Parquet parts (where the job has sql)   ├─ lines, json, csv: Cursor ─► Spool
//!                                                                            ├─ parquet, ipc: ranged reads of one column
//!                                                                            └─ numbers: images, codes ─► numbers_schema batches
//! ```
//!
//! All of it is plain blocking code over [`object_store`], meant for `spawn_blocking`: it waits for the store through a
//! tokio handle ([`Store`]). What a split is depends on the job and the files alone (`plan`).
//!
//! A *record* is what may become a document: a line of text, a line of JSON that is not blank, a CSV record after the
//! header, a block between blank lines, a file, a row. Bad records are records too: they take an ordinal and count in the holdout.
//!
//! | format | a split begins | memory per reader |
//! |---|---|---|
//! | jsonl, text by line, plain | anywhere: it owns the lines that begin in its bytes | read-ahead ≤ 4 MB (two chunks) + one piece |
//! | the same compressed; csv; text by blank line | at a record found by one scan when planning | the same + the decoder's window |
//! | text by file | at the file | the same |
//! | Parquet | at a row | a page and a dictionary of one column + the cells of ≤ 1 MB of rows |
//! | none | at a document | nothing |
//! | Arrow IPC | at a row | a record batch |
//!
//! A document of a row format goes through a spool (`spool::Spool`) before any of it is emitted, so that a bad record emits nothing
//! and a document of any length costs one piece of memory. A *cell* of Parquet or Arrow has to fit in memory.
//!
//! Cost: planning reads nothing of plain line files but their sizes, the footers of columnar files, and all of
//! every other file once (on all cores). A split in the middle of a compressed file decompresses what is between the last checkpoint
//! before it and there (`checkpoints`): about 1 MB of gzip, and of Zstandard what is before it in its frame. All files of a store together
//! hold at most 64 MB of checkpoints.

mod batch;
mod check;
mod checkpoints;
mod classes;
mod column_types;
mod compression;
mod decode;
mod decompress;
mod first;
mod folder;
mod formats;
mod holdout;
mod inflate;
mod input_file;
mod list;
mod overlap;
mod parallel;
mod plan;
mod range;
mod read;
mod records;
mod router;
mod segment;
mod sniff;
mod spool;
mod sql;
mod store;
mod summary;
mod table;

pub use check::check_columns;
pub use first::{FirstRecords, first_records};
pub use formats::numbers::with_classes;
pub use formats::of_file_name;
pub use input_file::{InputFile, Listing};
pub use list::{NotListed, list, literal};
pub use overlap::reads_output;
pub use plan::{PlanProgress, Weighed, append_splits, plan_splits};
pub use read::{SplitReader, digests, read_split};
pub use sql::{QueryTable, Staged, check_sql, stage_sql, staged};
pub use sql::{StagedRecord, staged_by_run, staged_record};
pub use stillhouse_base::file_state::{Changed, FileState};
pub use stillhouse_base::source_error::{RecordPosition, SourceError, Stopped};
pub use store::Store;
pub use summary::{ReadSummary, TRAIN};

#[cfg(test)]
mod tests;
