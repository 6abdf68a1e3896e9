//! What a format of another project's reader is: its file implements [`ExportFormat`], [`Format`] has a line for it.

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

/// A reader that the data are for, with its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Captured logits of arcee-ai/DistillKit.
    DistillKit,
    /// Cached logits of NVIDIA/Megatron-LM.
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

/// What could not be written, by why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows at the end of a split that fill no global batch.
    pub rows_of_no_iteration: u64,
    /// Rows of one token, of which no other one is predicted.
    pub rows_of_one_token: u64,
    /// Entries whose id has no token.
    pub entries_without_token: u64,
}

/// Files that are made at once.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    /// The data set split.
    pub split: String,
    /// Rows of the split, in the order of its shards.
    pub rows: Range<u64>,
    /// The files that they become.
    pub files: Vec<String>,
    /// Bytes of the data set that are read for it, about.
    pub bytes: u64,
}

/// The settings of a format.
#[async_trait]
pub(super) trait ExportFormat: Send + Sync {
    /// The largest vocabulary that the reader takes, and why.
    fn most_ids(&self) -> (u64, &'static str);

    /// Ids that an entry may name are below this; others are left out.
    ///
    /// # Errors
    /// When the data set's tokenizer cannot be read.
    async fn ids(&self, dataset: &Dataset) -> Result<u64> {
        Ok(dataset.manifest().vocab_size)
    }

    /// Checks the settings against a data set.
    ///
    /// # Errors
    /// In words, naming the option.
    fn writer(
        &self,
        manifest: &Manifest,
        sparse: &Arc<Sparse>,
        dtype: ValueType,
    ) -> Result<Box<dyn ExportWriter>, String>;
}

/// Writes one data set.
#[async_trait]
pub(super) trait ExportWriter: Send + Sync {
    /// Everything that is made, in order.
    fn units(&self, manifest: &Manifest) -> Vec<Unit>;

    /// Bytes of a position before compression.
    fn position_bytes(&self) -> usize;

    /// Writes the files of a unit; gives what is left out of them.
    ///
    /// # Errors
    /// When a row is not what it should be, or the files cannot be written.
    async fn write(&self, unit: &Unit, rows: RowReader<'_>, files: &mut Files) -> Result<LeftOut>;

    /// What was left out of files that an earlier export has made.
    ///
    /// # Errors
    /// When they are not what this export makes.
    async fn left_out_of(&self, files: &[ExportedFile], destination: &Output) -> Result<LeftOut> {
        let _ = (files, destination);
        Ok(LeftOut::default())
    }

    /// Rows that are in no unit.
    fn rows_of_no_iteration(&self) -> u64 {
        0
    }

    /// The small files beside, the card among them.
    fn small_files(&self, manifest: &Manifest) -> Vec<(&'static str, Vec<u8>)>;
}
