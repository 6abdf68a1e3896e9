//! The interface of an export format. A format's file implements [`ExportFormat`], and declares its options, if it has
//! any; [`FormatName`], [`Format`] and [`FormatOptions`] have a line for it.

mod distillkit;
pub mod megatron;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use stillhouse_base::error;
use stillhouse_output::Output;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};

use self::distillkit::DistillKit;
use self::megatron::{MegatronOptions, MegatronRun};
use crate::dataset::Dataset;
use crate::export::ExportedFile;
use crate::export::convert::Conversion;
use crate::export::files::Files;
use crate::export::rows::RowReader;
use crate::export::sparse::{Signal, Sparse, ValueType};

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
    pub(in crate::export) fn settings(&self) -> &dyn ExportFormat {
        match self {
            Self::DistillKit => &DistillKit,
            Self::MegatronKd(run) => run,
        }
    }
}

/// A format by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum FormatName {
    /// Captured logits of arcee-ai/DistillKit: Parquet and the compressor's configuration
    Distillkit,
    /// Cached logits of NVIDIA/Megatron-LM: tars of iterations
    MegatronKd,
}

/// For another project's reader.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "The teacher's log-probabilities for another reader")]
pub struct FormatOptions {
    /// Write them for this reader in place of the data set
    #[arg(long, value_enum, value_name = "READER")]
    format: Option<FormatName>,
    /// Which columns; else the first of these that are there
    #[arg(long, value_enum, value_name = "COLUMNS", requires = "format")]
    signal: Option<Signal>,
    /// Type of the log-probabilities: as they are (float32), within |ln p|/2048 (float16) or |ln p|/256 (bfloat16)
    #[arg(long, value_enum, value_name = "TYPE", requires = "format")]
    dtype: Option<ValueType>,
    #[command(flatten)]
    megatron: MegatronOptions,
}

impl FormatOptions {
    /// Returns the conversion to make; `None` to copy the data set.
    ///
    /// # Errors
    /// If an option is missing, invalid, or belongs to another format.
    pub fn conversion(&self) -> Result<Option<Conversion>, String> {
        if self.format != Some(FormatName::MegatronKd)
            && let Some(option) = self.megatron.given()
        {
            return Err(format!("{option} is an option of --format megatron-kd"));
        }
        let format = match self.format {
            None => return Ok(None),
            Some(FormatName::Distillkit) => Format::DistillKit,
            Some(FormatName::MegatronKd) => Format::MegatronKd(self.megatron.run()?),
        };
        Ok(Some(Conversion { format, signal: self.signal, dtype: self.dtype.unwrap_or_default() }))
    }
}

/// Counts of what an export could not write, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows at the end of a split that do not fill a global batch.
    #[serde(rename = "rows_of_no_iteration")]
    pub incomplete_batch_rows: u64,
    /// Rows of a single token: they have no next token to predict.
    pub rows_of_one_token: u64,
    /// Entries whose id has no token in the tokenizer.
    pub entries_without_token: u64,
}

/// Files that are written together.
#[derive(Debug, Clone)]
pub(in crate::export) struct Unit {
    /// Data set split, such as `train`.
    pub split: String,
    /// Range of rows of the split, in the order of its shards.
    pub rows: Range<u64>,
    /// Names of the files to write.
    pub files: Vec<String>,
    /// Approximate bytes read from the data set.
    pub bytes: u64,
}

/// One unit, with one file, per shard.
pub(in crate::export) fn unit_per_shard(manifest: &Manifest, name: impl Fn(&ShardRecord) -> String) -> Vec<Unit> {
    let mut rows = BTreeMap::<&str, u64>::new();
    let units = manifest.shards.iter().map(|shard| {
        let begin = rows.entry(&shard.dataset_split).or_default();
        let range = *begin..*begin + shard.rows;
        *begin = range.end;
        Unit { split: shard.dataset_split.clone(), rows: range, files: vec![name(shard)], bytes: shard.bytes }
    });
    units.collect()
}

/// The settings of a format.
#[async_trait]
pub(in crate::export) trait ExportFormat: Send + Sync {
    /// The largest vocabulary that the target reader supports, and the reason for the limit.
    fn max_ids(&self) -> (u64, &'static str);

    /// Exclusive upper bound of the ids that an entry may have; entries with other ids are left out.
    ///
    /// # Errors
    /// If the data set's tokenizer cannot be read.
    async fn ids(&self, dataset: &Dataset) -> error::Result<u64> {
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
pub(in crate::export) trait ExportWriter: Send + Sync {
    /// All units to write, in order.
    fn units(&self, manifest: &Manifest) -> Vec<Unit>;

    /// Bytes per position before compression.
    fn position_bytes(&self) -> usize;

    /// Writes the files of a unit and returns what it left out.
    ///
    /// # Errors
    /// If a row is invalid or the files cannot be written.
    async fn write(&self, unit: &Unit, rows: RowReader<'_>, files: &mut Files) -> error::Result<LeftOut>;

    /// What an earlier export left out of the files that it wrote.
    ///
    /// # Errors
    /// If the files are not the output of this export.
    async fn left_out_of(&self, files: &[ExportedFile], destination: &Output) -> error::Result<LeftOut> {
        let _ = (files, destination);
        Ok(LeftOut::default())
    }

    /// Number of rows that belong to no unit.
    fn incomplete_batch_rows(&self) -> u64 {
        0
    }

    /// The small files beside the data, including the card.
    fn small_files(&self, manifest: &Manifest) -> Vec<(&'static str, Vec<u8>)>;
}
