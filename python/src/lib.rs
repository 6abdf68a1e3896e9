//! The Rust core of the Python package `stillhouse`: reading shards and replaying noise on the CPU.
//!
//! ```text
//!   stillhouse.open ──► reader.rs ──► stillhouse-reader: pages of Parquet ─► rows ─► numpy arrays
//!   noise.replay ─────► replay.rs ──► stillhouse-noise: Philox, posterior ─► ξ `[n, V]`
//! ```
//!
//! Nothing here decides anything: it takes arrays apart, lets go of the interpreter's lock, and puts arrays together.

use pyo3::prelude::*;

mod reader;
mod replay;
mod threads;

/// `stillhouse._core`.
#[pymodule]
mod _core {
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // Python's name
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::reader::{DataSet, Steps, Stream};
    #[pymodule_export]
    use crate::replay::{prior, replay, replay_dense};
}
