//! `--format jsonl`: a line of JSON per row, with the entries of each prediction.
//!
//! ```text
//!   {"input_ids": [x_0, …, x_{T−1}], "ids": [[…], …], "logprobs": [[…], …]}    [T], [T, k], [T, k]; T = L − 1
//! ```
//!
//! `ids[t]` and `logprobs[t]` are the teacher's prediction of token t + 1, most likely first.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::json;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::CARD;
use stillhouse_schemas::manifest::Manifest;

use crate::export::files::Files;
use crate::export::formats::{ExportFormat, ExportWriter, LeftOut, Unit, unit_per_shard};
use crate::export::rows::RowReader;
use crate::export::sparse::{Entries, Sparse, SparseBatch, ValueType};

/// The format. It has no settings.
pub(super) struct Jsonl;

impl ExportFormat for Jsonl {
    fn max_ids(&self) -> (u64, &'static str) {
        (1 << 32, "ids have 32 bits")
    }

    fn writer(&self, _: &Manifest, sparse: &Arc<Sparse>, dtype: ValueType) -> Result<Box<dyn ExportWriter>, String> {
        match dtype {
            ValueType::Float32 => Ok(Box::new(JsonlWriter { sparse: Arc::clone(sparse) })),
            other => Err(format!("--dtype: got {}, valid with --format jsonl: float32", other.name())),
        }
    }
}

/// Writes rows as lines.
pub(super) struct JsonlWriter {
    pub sparse: Arc<Sparse>,
}

impl JsonlWriter {
    /// The lines of a batch, and the number of rows that have no next token to predict.
    ///
    /// # Errors
    /// A message, if a row is invalid.
    pub fn lines(&self, batch: &SparseBatch<'_>, entries: &mut Entries) -> Result<(String, u64), String> {
        let (mut lines, mut short) = (String::new(), 0);
        for number in 0..batch.len() {
            let row = batch.row(number).map_err(|e| format!("row {number} of a batch: {e}"))?;
            let Some(predicted) = row.length.checked_sub(1).filter(|predicted| *predicted > 0) else {
                short += 1;
                continue;
            };
            let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
            for t in 0..predicted {
                let count = entries.read(batch, &row, t + 1);
                ids.push(entries.ids[..count].to_vec());
                logprobs.push(entries.logprobs[..count].to_vec());
            }
            let line = json!({"input_ids": &row.tokens[..predicted], "ids": ids, "logprobs": logprobs});
            lines.push_str(&format!("{line}\n"));
        }
        Ok((lines, short))
    }
}

#[async_trait]
impl ExportWriter for JsonlWriter {
    fn units(&self, manifest: &Manifest) -> Vec<Unit> {
        unit_per_shard(manifest, |shard| shard.path.replace(".parquet", ".jsonl"))
    }

    fn position_bytes(&self) -> usize {
        8 + 20 * self.sparse.width
    }

    async fn write(&self, _: &Unit, mut rows: RowReader<'_>, files: &mut Files) -> Result<LeftOut> {
        let (mut entries, mut left_out) = (Entries::new(&self.sparse), LeftOut::default());
        while let Some((batch, shard)) = rows.next().await? {
            let damaged = |e: String| PipelineError::new(ErrorKind::DataSet, format!("{shard}: {e}"));
            let batch = self.sparse.batch(&batch).map_err(|e| damaged(e.to_string()))?;
            let (lines, short) = self.lines(&batch, &mut entries).map_err(damaged)?;
            left_out.rows_of_one_token += short;
            files.put(0, lines.into_bytes()).await?;
        }
        left_out.entries_without_token = entries.left_out;
        Ok(left_out)
    }

    fn small_files(&self, _: &Manifest) -> Vec<(&'static str, Vec<u8>)> {
        let card = "Log-probabilities of a teacher, written by `stillhouse export --format jsonl`.\n";
        vec![(CARD, card.into())]
    }
}
