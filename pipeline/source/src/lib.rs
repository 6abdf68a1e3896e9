//! Turns the files of an input into documents, cut into pieces, for every format. It never holds a whole document.
//!
//! ```text
//!   [InputFile] ─► plan_splits ─► [SplitRecord] ─► SplitReader ─► documents_schema batches
//!       │              ▲                               │
//!       └─► QueryTable ─► query ─► Parquet parts       ├─ lines, json, csv: Cursor ─► Spool
//!                          (if any)                    ├─ parquet, ipc: ranged reads of one column
//!                                                      └─ numbers: images, codes ─► numbers_schema batches
//! ```
//!
//! `stillhouse-input-files` lists the files and reads their bytes. The code is blocking, meant for `spawn_blocking`. A
//! split depends only on the job and the files (`plan`).
//!
//! A *record* is a candidate for a document: a line of text, a non-blank line of JSON, a CSV record after the header, a
//! block between blank lines, a file, or a row. A bad record is a record too: it takes an ordinal and counts in the
//! holdout.
//!
//! | format | where a split begins | memory per reader |
//! |---|---|---|
//! | jsonl, text by line, uncompressed | anywhere: the split owns the lines that begin in its bytes | read-ahead ≤ 4 MB (two chunks) + one piece |
//! | the same compressed; csv; text by blank line | at a record, which one scan finds during planning | the same + the decoder's window |
//! | text by file | at the file | the same |
//! | Parquet | at a row | a page and a dictionary of one column + the cells of ≤ 1 MB of rows |
//! | none | at a document | nothing |
//! | Arrow IPC | at a row | a record batch |
//!
//! A reader of a row format writes a whole document into a spool (`spool::Spool`) before it emits any of it. So a bad
//! record emits nothing, and a document of any length needs only one piece of memory. A *cell* of Parquet or Arrow must
//! fit in memory.
//!
//! Cost: planning reads the sizes of uncompressed line files, the footers of columnar files, and every byte of all
//! other files once (on all cores). A split that begins inside a compressed file first decompresses the bytes between
//! the last checkpoint and its start: about 1 MB for gzip; for Zstandard, the part of the frame before it.

mod batch;
mod carried_table;
mod column_check;
mod column_types;
mod formats;
mod holdout;
mod plan;
mod query_table;
mod record_check;
mod record_reader;
mod records;
mod segment;
mod split_reader;
mod spool;
mod summary;
mod table_format;

pub use carried_table::CarriedTable;
pub use column_check::check_columns;
pub use formats::numbers::with_class_names;
pub use formats::{as_text, file_endings, format_of_file_name, is_single, table_endings};
pub use plan::{PlanProgress, PlannedSplits, append_splits, plan_splits};
pub use query_table::{QueryTable, TakeRows};
pub use record_check::{FirstRecords, check_first_records};
pub use split_reader::{SplitReader, piece_checksums};
pub use summary::{ReadSummary, TRAIN};
pub use table_format::BATCH_ROWS;

#[cfg(test)]
mod tests;
