//! Rows as DistillKit captures them: Parquet of `input_ids`, `compressed_logprobs`, `bytepacked_indices`, and the compressor that reads them.
//!
//! ```text
//!   row of L tokens  x_0  x_1  …  x_{L−2}  x_{L−1}         what the teacher said of x_i is the data set's position i
//!   input_ids        x_0  x_1  …  x_{L−2}                  uint64 [T], T = L − 1
//!   logprobs of      x_1  x_2  …  x_{L−1}                  [T, k]: after token t, the distribution of the next one
//! ```
//!
//! The trainer adds what it reads at t to its own logits at t, so the data set's position t + 1 is written at t; of the last token there is no next
//! one, and position 0 has nothing before it. Padding is not written: rows are as long as their text, less one, as DistillKit's own captures
//! (`distillkit-pack-logits` packs them).
//!
//! Its compressor takes exact values, a polynomial for the rest and quantized residuals. Here all k are exact (`exact_k: k`) and the others
//! are none, which loses nothing but what the float type does:
//!
//! | list of bytes of a position | content |
//! |---|---|
//! | `compressed_logprobs` | k floats of `exact_dtype`, low bytes first, falling |
//! | `bytepacked_indices` | k ids of ⌈log2 d⌉ bits each, the high bit first, without gaps; zeros up to the byte |
//!
//! `labels` is there where the teacher wrote the text: −100, which the trainer masks, up to where its writing begins.

use std::collections::BTreeMap;
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

use super::ExportedFile;
use super::files::Files;
use super::format::{ExportFormat, ExportWriter, LeftOut, Unit};
use super::rows::{RowReader, rows_of_splits};
use super::sparse::{Entries, Sparse, SparseBatch, ValueType};
use crate::dataset::Dataset;

/// What a file says of what is not in it: key of its Parquet metadata.
const LEFT_OUT: &str = "stillhouse.left_out";
/// Bytes of a row group before compression.
const ROW_GROUP_BYTES: usize = 16 << 20;

/// The name under which DistillKit itself leaves the compressor beside its captures.
const CONFIG: &str = "compression_config.yaml";
/// What the trainer masks.
const MASKED: i64 = -100;

/// The most ids of a compressor here: it counts their bits by a logarithm in f32, which is exact up to there.
const MOST_IDS: u64 = 1 << 20;

/// The format.
pub(super) struct DistillKit;

#[async_trait]
impl ExportFormat for DistillKit {
    fn most_ids(&self) -> (u64, &'static str) {
        (MOST_IDS, "DistillKit's compressor counts the bits of an id in f32")
    }

    /// The trainer cuts its logits off behind the last token; an entry behind it would end the training.
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

/// How rows are written.
struct Rows {
    sparse: Arc<Sparse>,
    dtype: ValueType,
    /// Bits of an id.
    bits: u32,
    zstd_level: ZstdLevel,
}

#[async_trait]
impl ExportWriter for Rows {
    /// A file for each shard.
    fn units(&self, manifest: &Manifest) -> Vec<Unit> {
        let mut rows = BTreeMap::<&str, u64>::new();
        let units = manifest.shards.iter().map(|shard| {
            let begin = rows.entry(&shard.dataset_split).or_default();
            let range = *begin..*begin + shard.rows;
            *begin = range.end;
            let (split, files) = (shard.dataset_split.clone(), vec![shard.path.clone()]);
            Unit { split, rows: range, files, bytes: shard.bytes }
        });
        units.collect()
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

    /// Each file says it, so that an export that was interrupted ends as one that was not.
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

/// Bits of an id below `vocab`.
fn bits(vocab: u64) -> u32 {
    (u64::BITS - vocab.saturating_sub(1).leading_zeros()).max(1)
}

impl Rows {
    /// The columns.
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

    /// Rows of the data set as DistillKit's; gives how many have no token that another one follows, which are left out.
    ///
    /// # Errors
    /// In words, when a row is not what it should be.
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

/// Appends numbers of so many bits each, the high bit first, with zeros up to the byte.
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

/// The compressor, as YAML: what `teacher.logprob_compressor` of the trainer's configuration must have.
fn config(vocab: u64, width: usize, dtype: ValueType) -> String {
    format!(
        "d: {vocab}\ndelta_encoding: false\nerror_diffusion: false\nexact_dtype: {}\nexact_k: {width}\nk: {width}\nnormalize_t: false\n\
         polynomial_terms: null\nresidual_bins: []\nterm_dtype: float32\n",
        dtype.name()
    )
}

/// The card: which files are which split, and what the trainer's configuration must say.
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
