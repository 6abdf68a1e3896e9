//! Writes rows in DistillKit's capture format: Parquet with `input_ids`, `compressed_logprobs` and
//! `bytepacked_indices`, and the compressor's configuration.
//!
//! ```text
//!   row of L tokens  x_0  x_1  …  x_{L−2}  x_{L−1}         the data set stores the teacher's prediction of x_i at position i
//!   input_ids        x_0  x_1  …  x_{L−2}                  uint64 [T], T = L − 1
//!   logprobs of      x_1  x_2  …  x_{L−1}                  [T, k]: at token t, the distribution of token t + 1
//! ```
//!
//! DistillKit's trainer adds the values at t to its own logits at t, which predict token t + 1. So the export writes
//! the data set's position t + 1 at t. The last token has no next one, and position 0 has no preceding token. The
//! export writes no padding: a row has one position less than its text, as in DistillKit's own captures.
//! `distillkit-pack-logits` packs such rows.
//!
//! DistillKit's compressor stores exact values, a polynomial for the rest, and quantized residuals. This export stores
//! all k values exactly (`exact_k: k`) and nothing else. So the only loss is the rounding of the float type.
//!
//! | bytes per position | content |
//! |---|---|
//! | `compressed_logprobs` | k floats of `exact_dtype`, little-endian, in descending order |
//! | `bytepacked_indices` | k ids of ⌈log2 d⌉ bits each, most significant bit first, without gaps; zero bits pad the last byte |
//!
//! `labels` exists if the teacher wrote the text. It is −100, which the trainer masks, up to the first token that the
//! teacher wrote.

use std::fmt::Write as _;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListArray, RecordBatch, UInt8Array, UInt64Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use async_trait::async_trait;
use parquet::arrow::ArrowWriter;
use parquet::arrow::async_reader::ParquetRecordBatchStreamBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{CARD, Output};
use stillhouse_reader::ShardFile;
use stillhouse_schemas::manifest::Manifest;

use super::{ExportFormat, ExportWriter, LeftOut, Unit, unit_per_shard};
use crate::dataset::Dataset;
use crate::export::ExportedFile;
use crate::export::files::Files;
use crate::export::rows::{RowReader, rows_of_splits};
use crate::export::sparse::{Entries, Sparse, SparseBatch, ValueType};

/// Key in a file's Parquet metadata whose value records what the export left out of the file.
const LEFT_OUT: &str = "stillhouse.left_out";
/// Target size of a row group before compression, in bytes.
const ROW_GROUP_BYTES: usize = 16 << 20;

/// Name of the compressor's configuration, as DistillKit names it beside its own captures.
const CONFIG: &str = "compression_config.yaml";
/// Label that the trainer masks.
const MASKED: i64 = -100;

/// Largest vocabulary. DistillKit computes the bits of an id with a logarithm in f32, which is exact up to this size.
const MAX_IDS: u64 = 1 << 20;

/// The DistillKit format. It has no settings.
pub(super) struct DistillKit;

#[async_trait]
impl ExportFormat for DistillKit {
    fn max_ids(&self) -> (u64, &'static str) {
        (MAX_IDS, "DistillKit's compressor counts the bits of an id in f32")
    }

    /// Up to the tokenizer's last token. The trainer cuts its logits off after that token, so an entry beyond it would
    /// abort the training.
    async fn ids(&self, dataset: &Dataset) -> Result<u64> {
        let vocab = dataset.manifest().vocab_size;
        let last = dataset.tokenizer().await?.get_vocab(true).into_values().max();
        Ok(last.map_or(vocab, |last| vocab.min(u64::from(last) + 1)))
    }

    fn writer(
        &self,
        manifest: &Manifest,
        sparse: &Arc<Sparse>,
        dtype: ValueType,
    ) -> Result<Box<dyn ExportWriter>, String> {
        let zstd_level = ZstdLevel::try_new(manifest.job.output.zstd_level).unwrap_or_default();
        Ok(Box::new(Rows { sparse: Arc::clone(sparse), dtype, bits: bits(manifest.vocab_size), zstd_level }))
    }
}

/// Writes rows as Parquet files.
struct Rows {
    sparse: Arc<Sparse>,
    dtype: ValueType,
    /// Bits per id.
    bits: u32,
    zstd_level: ZstdLevel,
}

#[async_trait]
impl ExportWriter for Rows {
    /// One unit, with one file, per shard.
    fn units(&self, manifest: &Manifest) -> Vec<Unit> {
        unit_per_shard(manifest, |shard| shard.path.clone())
    }

    fn position_bytes(&self) -> usize {
        self.sparse.width * self.dtype.bytes() + self.packed_bytes() + 8
    }

    async fn write(&self, _: &Unit, mut reader: RowReader<'_>, files: &mut Files) -> Result<LeftOut> {
        let context = format!("cannot write {}", files.shown());
        let failed = |e: ParquetError| PipelineError::caused(ErrorKind::Output, context.clone(), e);
        let properties = WriterProperties::builder()
            .set_created_by(concat!("stillhouse ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_compression(Compression::ZSTD(self.zstd_level))
            .set_max_row_group_row_count(None)
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), self.schema(), Some(properties)).map_err(failed)?;
        let mut entries = Entries::new(&self.sparse);
        let (mut short, mut waiting) = (0, 0);
        while let Some((batch, shard)) = reader.next().await? {
            let damaged = |e: String| PipelineError::new(ErrorKind::DataSet, format!("{shard}: {e}"));
            let read = self.sparse.batch(&batch).map_err(|e| damaged(e.to_string()))?;
            let (made, none) = self.encode(&read, &mut entries).map_err(damaged)?;
            short += none;
            waiting += made.get_array_memory_size();
            writer.write(&made).map_err(failed)?;
            if waiting > ROW_GROUP_BYTES {
                waiting = 0;
                writer.flush().map_err(failed)?;
                writer.sync().map_err(PipelineError::output("a row group"))?;
                files.put(0, std::mem::take(writer.inner_mut())).await?;
            }
        }
        let left_out =
            LeftOut { rows_of_one_token: short, entries_without_token: entries.left_out, ..LeftOut::default() };
        let text = serde_json::to_string(&left_out).map_err(PipelineError::dataset(LEFT_OUT))?;
        writer.append_key_value_metadata(KeyValue::new(LEFT_OUT.to_owned(), text));
        writer.finish().map_err(failed)?;
        files.put(0, std::mem::take(writer.inner_mut())).await?;
        Ok(left_out)
    }

    /// Sums the counts in the files' metadata. So an interrupted export reports the same counts as an uninterrupted
    /// one.
    async fn left_out_of(&self, files: &[ExportedFile], destination: &Output) -> Result<LeftOut> {
        let mut sum = LeftOut::default();
        for file in files {
            let shown = destination.shown(&file.name);
            let reader = ShardFile::new(destination.store(), &file.name, file.bytes, None);
            let opened = ParquetRecordBatchStreamBuilder::new(reader).await;
            let opened = opened.map_err(PipelineError::dataset(shown.clone()))?;
            let entries = opened.metadata().file_metadata().key_value_metadata();
            let said = entries.and_then(|entries| entries.iter().find(|entry| entry.key == LEFT_OUT));
            let Some(text) = said.and_then(|entry| entry.value.as_ref()) else {
                let message = format!("{shown}: is there with other content; remove it first");
                return Err(PipelineError::new(ErrorKind::Output, message));
            };
            let said: LeftOut = serde_json::from_str(text).map_err(PipelineError::dataset(shown))?;
            sum.rows_of_one_token += said.rows_of_one_token;
            sum.entries_without_token += said.entries_without_token;
        }
        Ok(sum)
    }

    fn small_files(&self, manifest: &Manifest) -> Vec<(&'static str, Vec<u8>)> {
        let config = config(manifest.vocab_size, self.sparse.width, self.dtype);
        let splits: Vec<String> = rows_of_splits(manifest).into_keys().collect();
        vec![(CARD, card(&splits, &config, self.sparse.given).into_bytes()), (CONFIG, config.into_bytes())]
    }
}

/// Number of bits of an id below `vocab`.
fn bits(vocab: u64) -> u32 {
    (u64::BITS - vocab.saturating_sub(1).leading_zeros()).max(1)
}

impl Rows {
    /// Schema of the Parquet files.
    fn schema(&self) -> SchemaRef {
        let list = |item: DataType| DataType::List(Arc::new(Field::new_list_field(item, false)));
        let mut fields = vec![
            Field::new("input_ids", list(DataType::UInt64), false),
            Field::new("compressed_logprobs", list(list(DataType::UInt8)), false),
            Field::new("bytepacked_indices", list(list(DataType::UInt8)), false),
        ];
        fields.extend(self.sparse.given.then(|| Field::new("labels", list(DataType::Int64), false)));
        Arc::new(Schema::new(fields))
    }

    fn packed_bytes(&self) -> usize {
        (self.sparse.width * self.bits as usize).div_ceil(8)
    }

    /// Converts a batch to DistillKit's columns. Returns also the number of rows that it left out because they have
    /// fewer than two tokens.
    ///
    /// # Errors
    /// A message, if a row is invalid.
    fn encode(&self, batch: &SparseBatch<'_>, entries: &mut Entries) -> Result<(RecordBatch, u64), String> {
        let (mut ids, mut labels, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        let (mut logprobs, mut packed) = (Vec::new(), Vec::new());
        let mut short = 0;
        for number in 0..batch.len() {
            let row = batch.row(number).map_err(|e| format!("row {number} of a batch: {e}"))?;
            let length = row.length.saturating_sub(1);
            if length == 0 {
                short += 1;
                continue;
            }
            lengths.push(length);
            for (t, id) in row.tokens.iter().take(length).enumerate() {
                ids.push(u64::try_from(*id).map_err(|_| format!("row {number} of a batch: id {id}"))?);
                labels.push(if t + 1 < row.given { MASKED } else { i64::from(*id) });
                entries.read(batch, &row, t + 1);
                self.dtype.put(&entries.logprobs, &mut logprobs);
                pack(&entries.ids, self.bits, &mut packed);
            }
        }
        let rows = self.batch(&lengths, ids, logprobs, packed, labels).map_err(|e| e.to_string())?;
        Ok((rows, short))
    }

    fn batch(
        &self,
        lengths: &[usize],
        ids: Vec<u64>,
        logprobs: Vec<u8>,
        packed: Vec<u8>,
        labels: Vec<i64>,
    ) -> Result<RecordBatch, ArrowError> {
        let rows = OffsetBuffer::from_lengths(lengths.iter().copied());
        let list = |values: ArrayRef, offsets: &OffsetBuffer<i32>| -> Result<ArrayRef, ArrowError> {
            let item = Arc::new(Field::new_list_field(values.data_type().clone(), false));
            Ok(Arc::new(ListArray::try_new(item, offsets.clone(), values, None)?))
        };
        let positions = ids.len();
        let bytes = |values: Vec<u8>, each: usize| -> Result<ArrayRef, ArrowError> {
            let inner = OffsetBuffer::from_repeated_length(each, positions);
            list(list(Arc::new(UInt8Array::from(values)), &inner)?, &rows)
        };
        let mut columns = vec![
            list(Arc::new(UInt64Array::from(ids)), &rows)?,
            bytes(logprobs, self.sparse.width * self.dtype.bytes())?,
            bytes(packed, self.packed_bytes())?,
        ];
        if self.sparse.given {
            columns.push(list(Arc::new(Int64Array::from(labels)), &rows)?);
        }
        RecordBatch::try_new(self.schema(), columns)
    }
}

/// Appends numbers of `bits` bits each, most significant bit first, and pads the last byte with zero bits.
fn pack(numbers: &[u32], bits: u32, out: &mut Vec<u8>) {
    let (mut waiting, mut have) = (0u64, 0);
    for number in numbers {
        waiting = waiting << bits | u64::from(*number);
        have += bits;
        while have >= 8 {
            have -= 8;
            out.push((waiting >> have) as u8);
        }
    }
    if have > 0 {
        out.push((waiting << (8 - have)) as u8);
    }
}

/// The compressor's configuration in YAML. The trainer's `teacher.logprob_compressor` must equal it.
fn config(vocab: u64, width: usize, dtype: ValueType) -> String {
    format!(
        "d: {vocab}\ndelta_encoding: false\nerror_diffusion: false\nexact_dtype: {}\nexact_k: {width}\nk: {width}\nnormalize_t: false\n\
         polynomial_terms: null\nresidual_bins: []\nterm_dtype: float32\n",
        dtype.name()
    )
}

/// The card: lists the files of each split and the settings that the trainer needs.
fn card(splits: &[String], config: &str, given: bool) -> String {
    let mut text = String::from("---\nconfigs:\n- config_name: default\n  data_files:\n");
    for split in splits {
        let _ = writeln!(text, "  - split: {split}\n    path: data/{split}-*.parquet");
    }
    let indented: String = config.lines().map(|line| format!("    {line}\n")).collect();
    let labels = if given { " `labels` is −100 up to where the teacher's writing begins." } else { "" };
    let _ = write!(
        text,
        "---\n\nLog-probabilities of a teacher, written by `stillhouse export --format distillkit`; `export.json` says from what.{labels}\n\n\
         The trainer's configuration (`prepacked` where all rows have one length; else first\n`datasets.load_dataset(...).save_to_disk(...)` and `distillkit-pack-logits`; of its losses \
         `missing_probability_handling: zero` where the entries of a position may add up to 1):\n\n\
         ```yaml\ndataset:\n  train_dataset:\n    repo_id: <this folder>\n    split: train\n  prepacked: true\nteacher:\n  kind: dataset\n  logprob_compressor:\n{indented}```\n"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_packed_with_the_high_bit_first() {
        for (numbers, width, expected) in [
            (vec![5u32, 1], 3, vec![0b1010_0100]),
            (vec![0xABC, 0xDEF, 0x123], 12, vec![0xAB, 0xCD, 0xEF, 0x12, 0x30]),
            (vec![1, 0, 1, 1, 0, 0, 0, 0, 1], 1, vec![0b1011_0000, 0b1000_0000]),
            (vec![0x1FFFF, 0], 17, vec![0xFF, 0xFF, 0b1000_0000, 0, 0]),
        ] {
            let mut out = Vec::new();
            pack(&numbers, width, &mut out);
            assert_eq!(out, expected, "{numbers:x?}");
        }
        assert_eq!([1, 2, 3, 256, 257, 50_257, 131_072, 131_073].map(bits), [1, 1, 2, 8, 9, 16, 17, 18]);
    }
}
