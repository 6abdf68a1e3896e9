//! The files of a corpus: their listing, ranged reads with read-ahead, and decompression from any offset. It knows no
//! format: its callers say which endings a folder stands for.
//!
//! ```text
//!   input.paths ─► list_files ─► [InputFile] ─► Cursor (bytes, decompressed)   one reader from start to end
//!                                            └► RangeCache (bytes, as stored)  pages of columnar files
//! ```
//!
//! The code is plain blocking code over [`object_store`], meant for `spawn_blocking`. It waits for the store through a
//! tokio handle ([`Store`]).
//!
//! Memory: a [`Cursor`] holds two chunks (at most 4 MB) and the decoder's window; the checkpoints of all compressed
//! files of a store take at most 64 MB (`checkpoints`).

mod checkpoints;
mod class_folders;
mod compression;
mod decode;
mod decompress;
mod endings;
mod folder;
mod inflate;
mod input_file;
mod list;
mod overlap;
mod parallel;
mod router;
pub mod sniff;
mod store;

pub use class_folders::{class_name, defines_classes};
pub use compression::compression;
pub use decode::Cursor;
pub use endings::FileEndings;
pub use input_file::{AccessCheck, BeforeItem, InputFile, Listing};
pub use list::{InputPaths, ListError, list_files, literal_prefix};
pub use overlap::find_output_overlap;
pub use parallel::{MAX_CHECKED_FILES, evenly_spaced};
pub use store::{FIRST_CHUNK_BYTES, ObjectPage, ObjectReader, RangeCache, Store};

#[cfg(test)]
mod tests;
