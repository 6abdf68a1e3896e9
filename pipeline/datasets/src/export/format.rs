//! The interface of an export format. A format's file implements [`ExportFormat`]; [`Format`] has a variant for it.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use stillhouse_base::error::Result;
use stillhouse_output::Output;
use stillhouse_schemas::manifest::Manifest;

use super::ExportedFile;
use super::distillkit::DistillKit;
use super::files::Files;
use super::megatron::MegatronRun;
use super::rows::RowReader;
use super::sparse::{Sparse, ValueType};
use crate::dataset::Dataset;

/// The target format, with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Captured logits for arcee-ai/DistillKit.
    DistillKit,
    /// Cached logits for NVIDIA/Megatron-LM.
    MegatronKd(MegatronRun),
}

impl Format {
    pub(super) fn settings(&self) -> &dyn ExportFormat {
        match self {
            Self::DistillKit => &DistillKit,
            Self::MegatronKd(run) => run,
        }
    }
}

/// Counts of what an export could not write, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows at the end of a split that do not fill a global batch.
    pub rows_of_no_iteration: u64,
    /// Rows of a single token: they have no next token to predict.
    pub rows_of_one_token: u64,
    /// Entries whose id has no token in the tokenizer.
    pub entries_without_token: u64,
}

/// Files that are written together.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    /// Data set split, such as `train`.
    pub split: String,
    /// Range of rows of the split, in the order of its shards.
    pub rows: Range<u64>,
    /// Names of the files to write.
    pub files: Vec<String>,
    /// Approximate bytes read from the data set.
    pub bytes: u64,
}

/// The settings of a format.
#[async_trait]
pub(super) trait ExportFormat: Send + Sync {
    /// The largest vocabulary that the target reader supports, and the reason for the limit.
    fn most_ids(&self) -> (u64, &'static str);

    /// Exclusive upper bound of the ids that an entry may have; entries with other ids are left out.
    ///
    /// # Errors
    /// If the data set's tokenizer cannot be read.
    async fn ids(&self, dataset: &Dataset) -> Result<u64> {
        Ok(dataset.manifest().vocab_size)
    }

    /// Checks the settings against a data set and returns its writer.
    ///
    /// # Errors
    /// A message that names the invalid option.
    fn writer(
        &self,
        manifest: &Manifest,
        sparse: &Arc<Sparse>,
        dtype: ValueType,
    ) -> Result<Box<dyn ExportWriter>, String>;
}

/// Writes one data set in a format.
#[async_trait]
pub(super) trait ExportWriter: Send + Sync {
    /// All units to write, in order.
    fn units(&self, manifest: &Manifest) -> Vec<Unit>;

    /// Bytes per position before compression.
    fn position_bytes(&self) -> usize;

    /// Writes the files of a unit and returns what it left out.
    ///
    /// # Errors
    /// If a row is invalid or the files cannot be written.
    async fn write(&self, unit: &Unit, rows: RowReader<'_>, files: &mut Files) -> Result<LeftOut>;

    /// What an earlier export left out of the files that it wrote.
    ///
    /// # Errors
    /// If the files are not the output of this export.
    async fn left_out_of(&self, files: &[ExportedFile], destination: &Output) -> Result<LeftOut> {
        let _ = (files, destination);
        Ok(LeftOut::default())
    }

    /// Number of rows that belong to no unit.
    fn rows_of_no_iteration(&self) -> u64 {
        0
    }

    /// The small files beside the data, including the card.
    fn small_files(&self, manifest: &Manifest) -> Vec<(&'static str, Vec<u8>)>;
}
