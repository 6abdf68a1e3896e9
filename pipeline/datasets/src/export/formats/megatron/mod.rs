//! Writes rows for Megatron-LM's cached-logits distillation (`megatron/training/distillation`): tar files of compressed
//! iterations.
//!
//! ```text
//!   data/<split>/cp0_dp{rank}__{last iteration}.tar      a file for each rank and each group of iterations
//!     _meta.json                                         {"hash": …}: Megatron compares it with the hash of its run
//!     {iteration}.pt.zst                                 zstd of torch.save({"values": […], "indices_low": […], "bit_17": […]})
//!                                                        one tensor per micro-batch in each list: [S, batch, K]
//!
//!   row r of iteration i is row i·G + r of the split:    micro-batch r div (m·D), rank (r mod m·D) div m, index r mod m
//! ```
//!
//! G is the global batch size, m the micro-batch size and D the number of data-parallel ranks. This is the order of
//! Megatron's sequential sampler.
//!
//! `values` are ln p in `dtype`. An id is split into its low 16 bits (uint16) and its 17th bit (bool). Index t holds
//! the teacher's prediction of x_{t+1}, like the student's logits at t. A position without a prediction (the last one
//! if S = L, padding, given text) has −1000 in every entry, Megatron's marker for "no entry". Its loss is 0, including
//! that of the token into which Megatron collects the remaining mass.
//!
//! Memory: one iteration of all ranks, as values, as the uncompressed file and compressed.

mod options;
mod torch_file;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use md5::{Digest, Md5};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::CARD;
use stillhouse_schemas::manifest::Manifest;

pub use self::options::MegatronOptions;
use self::torch_file::{Kind, Tensor, encode};
use super::{ExportFormat, ExportWriter, LeftOut, Unit};
use crate::export::files::Files;
use crate::export::rows::{RowReader, row_length, rows_of_splits};
use crate::export::sparse::{Entries, Signal, Sparse, SparseBatch, ValueType};

/// Largest vocabulary: the format has 17 bits per id.
const MAX_IDS: u64 = 1 << 17;
/// Maximum bytes per iteration and rank before compression: sizes in a zip file have 32 bits.
const MAX_ITERATION_BYTES: u64 = 3 << 30;
/// Level that Megatron's own writer uses.
const ZSTD_LEVEL: i32 = 3;
const BLOCK: usize = 512;

/// Settings of the Megatron run that reads the export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MegatronRun {
    /// `--micro-batch-size`.
    pub micro_batch: u32,
    /// `--global-batch-size`.
    pub global_batch: u32,
    /// Number of data-parallel ranks.
    pub data_parallel: u32,
    /// `--seq-length`; `None` means one less than the row length.
    pub sequence_length: Option<u32>,
    /// Iterations per file.
    pub iterations_per_file: u32,
    /// How Megatron recognizes data of its run.
    pub identity: Identity,
}

/// The source of the hash by which Megatron checks that the data belong to its run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// The hash itself, as the run prints it.
    Hash(String),
    /// The values that Megatron hashes.
    Of {
        /// `--seed`.
        seed: i64,
        /// `--train-samples`, or `--train-iters` times the global batch; `None` means the number of exported samples.
        train_samples: Option<u64>,
        /// The data sets of `--data-path`: weight and last component of the path.
        blend: Vec<(f64, String)>,
    },
}

/// A run together with the shapes of the data set.
#[derive(Debug, Clone)]
struct Batches {
    pub run: MegatronRun,
    /// S, the sequence length of the run.
    pub length: usize,
    /// Tokens per row.
    pub row: usize,
    pub dtype: ValueType,
}

impl Batches {
    /// Checks the settings of a run against the data set.
    ///
    /// # Errors
    /// A message that names the invalid option.
    pub fn of(run: &MegatronRun, row: usize, sparse: &Sparse, dtype: ValueType) -> Result<Self, String> {
        let together = u64::from(run.micro_batch) * u64::from(run.data_parallel);
        if together == 0 || run.global_batch == 0 || !u64::from(run.global_batch).is_multiple_of(together) {
            return Err(format!(
                "--global-batch: got {}, valid: a multiple of --micro-batch {} times --data-parallel {}",
                run.global_batch, run.micro_batch, run.data_parallel
            ));
        }
        let length = run.sequence_length.map_or(row.saturating_sub(1), |length| length as usize);
        if length == 0 || (length != row && length + 1 != row) {
            return Err(format!(
                "--sequence-length: got {length}, valid: {} (the last token of a row is a target only) or {row} (of the last position nothing is known)",
                row.saturating_sub(1)
            ));
        }
        if let Identity::Hash(hash) = &run.identity
            && !(hash.len() == 32 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
        {
            return Err(format!("--hash: got {hash:?}, valid: 32 hexadecimal digits, as the run says them"));
        }
        let batches = Self { run: run.clone(), length, row, dtype };
        let bytes = batches.iteration_bytes(sparse) / u64::from(run.data_parallel);
        if bytes > MAX_ITERATION_BYTES {
            return Err(format!(
                "an iteration of a rank has {bytes} bytes before compression, valid up to {MAX_ITERATION_BYTES}: more --data-parallel, a smaller --global-batch, \
                 or a shorter --dtype"
            ));
        }
        batches.hash(1)?;
        Ok(batches)
    }

    /// Bytes of an iteration over all ranks, before compression.
    pub fn iteration_bytes(&self, sparse: &Sparse) -> u64 {
        u64::from(self.run.global_batch) * (self.length * sparse.width * (self.dtype.bytes() + 3)) as u64
    }

    /// Names of the files, one per rank, of the iterations `first` to `first + count - 1`.
    pub fn names(&self, split: &str, first: u64, count: u64) -> Vec<String> {
        let last = first + count - 1;
        (0..self.run.data_parallel).map(|rank| format!("data/{split}/cp0_dp{rank}__{last}.tar")).collect()
    }

    /// The hash of a run with this number of iterations, and the hashed values (`null` if the hash was given).
    fn hash(&self, iterations: u64) -> Result<(String, Value), String> {
        match &self.run.identity {
            Identity::Hash(hash) => Ok((hash.clone(), Value::Null)),
            Identity::Of { seed, train_samples, blend } => {
                let samples = train_samples.unwrap_or(iterations * u64::from(self.run.global_batch));
                let text = identifiers(*seed, self.length, samples, blend)?;
                let hash = Md5::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
                Ok((hash, serde_json::from_str(&text).map_err(|e| e.to_string())?))
            }
        }
    }

    /// Content of `_meta.json`, the first member of every file.
    ///
    /// # Errors
    /// A message, if a name or weight of the blend is invalid.
    pub fn meta(&self, iterations: u64, sparse: &Sparse) -> Result<Vec<u8>, String> {
        let (hash, identifiers) = self.hash(iterations)?;
        let dtype = match self.dtype {
            ValueType::Float32 => "fp32",
            ValueType::Float16 => "fp16",
            ValueType::Bfloat16 => "bf16",
        };
        let saver = json!({"k": sparse.width, "p": null, "min_k": 1, "save_dtype": dtype});
        let meta = json!({"hash": hash, "identifiers": identifiers, "saver": saver});
        Ok(meta.to_string().into_bytes())
    }
}

/// The text that Megatron hashes, byte for byte: the output of Python's `json.dumps` without spaces.
fn identifiers(seed: i64, length: usize, samples: u64, blend: &[(f64, String)]) -> Result<String, String> {
    let mut parts = Vec::new();
    for (weight, path) in blend {
        // the range in which Python and Rust format a float alike
        if !(1e-4..1e15).contains(weight) {
            return Err(format!("--blend: got the weight {weight}, valid: from 0.0001 to 1e15"));
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        let stem = match name.trim_start_matches('.').rfind('.') {
            Some(at) => &name[..at + name.len() - name.trim_start_matches('.').len()],
            None => name,
        };
        if stem.is_empty() || !stem.bytes().all(|b| (b' '..0x7f).contains(&b)) {
            return Err(format!("--blend: got {path:?}, valid: the path of a data set in ASCII; else --hash"));
        }
        parts.push(format!("[{weight:?},{}]", Value::from(stem)));
    }
    let blend = format!("{{\"kind\":\"blend\",\"blend\":[{}]}}", parts.join(","));
    Ok(format!("{{\"seed\":{seed},\"sequence_length\":{length},\"train_samples\":{samples},\"blend\":{blend}}}"))
}

#[async_trait]
impl ExportFormat for MegatronRun {
    fn max_ids(&self) -> (u64, &'static str) {
        (MAX_IDS, "Megatron-LM's reader has ids of 17 bits")
    }

    fn writer(
        &self,
        manifest: &Manifest,
        sparse: &Arc<Sparse>,
        dtype: ValueType,
    ) -> Result<Box<dyn ExportWriter>, String> {
        let batches = Batches::of(self, row_length(manifest), sparse, dtype)?;
        let (mut metas, mut rest) = (BTreeMap::new(), 0);
        for (split, rows) in rows_of_splits(manifest) {
            let iterations = rows / u64::from(self.global_batch);
            rest += rows % u64::from(self.global_batch);
            metas.insert(split, batches.meta(iterations, sparse)?);
        }
        Ok(Box::new(Tars { batches, sparse: Arc::clone(sparse), metas, rest }))
    }
}

/// Writes the tar files.
struct Tars {
    batches: Batches,
    sparse: Arc<Sparse>,
    /// `_meta.json` of each split.
    metas: BTreeMap<String, Vec<u8>>,
    /// Rows that do not fill a global batch.
    rest: u64,
}

#[async_trait]
impl ExportWriter for Tars {
    /// One unit per group of iterations of a split, with one file per rank.
    fn units(&self, manifest: &Manifest) -> Vec<Unit> {
        let global = u64::from(self.batches.run.global_batch);
        let each = u64::from(self.batches.run.iterations_per_file.max(1));
        let mut units = Vec::new();
        for (split, rows) in rows_of_splits(manifest) {
            let bytes: u64 = manifest.shards.iter().filter(|s| s.dataset_split == split).map(|s| s.bytes).sum();
            let iterations = rows / global;
            let mut first = 0;
            while first < iterations {
                let count = each.min(iterations - first);
                units.push(Unit {
                    split: split.clone(),
                    rows: first * global..(first + count) * global,
                    files: self.batches.names(&split, first, count),
                    bytes: (bytes as f64 * (count * global) as f64 / rows.max(1) as f64) as u64,
                });
                first += count;
            }
        }
        units
    }

    fn position_bytes(&self) -> usize {
        self.sparse.width * (self.batches.dtype.bytes() + 3)
    }

    async fn write(&self, unit: &Unit, mut reader: RowReader<'_>, files: &mut Files) -> Result<LeftOut> {
        let ranks = unit.files.len();
        let meta = self.metas.get(&unit.split).map(Vec::as_slice).unwrap_or_default();
        for rank in 0..ranks {
            files.put(rank, tar_member(META, meta)).await?;
        }
        let mut filling = Filling::new(&self.batches, &self.sparse);
        let mut iteration = unit.rows.start / u64::from(self.batches.run.global_batch);
        while let Some((batch, shard)) = reader.next().await? {
            let damaged = |e: String| PipelineError::new(ErrorKind::DataSet, format!("{shard}: {e}"));
            let read = self.sparse.batch(&batch).map_err(|e| damaged(e.to_string()))?;
            for number in 0..read.len() {
                let made = filling.row(&read, number).map_err(|e| damaged(format!("row {number} of a batch {e}")))?;
                for (rank, file) in made.into_iter().flatten().enumerate() {
                    files.put(rank, tar_member(&member(iteration), &file)).await?;
                    iteration += u64::from(rank + 1 == ranks);
                }
            }
        }
        for rank in 0..ranks {
            files.put(rank, TAR_END.to_vec()).await?;
        }
        Ok(LeftOut::default())
    }

    fn incomplete_batch_rows(&self) -> u64 {
        self.rest
    }

    fn small_files(&self, manifest: &Manifest) -> Vec<(&'static str, Vec<u8>)> {
        let global = u64::from(self.batches.run.global_batch);
        let iterations: Vec<(String, u64)> = (rows_of_splits(manifest).into_iter())
            .map(|(split, rows)| (split, rows / global))
            .filter(|(_, iterations)| *iterations > 0)
            .collect();
        vec![(CARD, card(&self.batches, self.sparse.signal, &iterations).into_bytes())]
    }
}

/// Collects rows into iterations.
struct Filling<'a> {
    batches: &'a Batches,
    sparse: &'a Sparse,
    entries: Entries,
    /// Index of the next row in the iteration.
    row: usize,
    micro: Micro,
    /// Finished micro-batches of each rank: values, low bits, 17th bits.
    ranks: Vec<[Vec<Tensor>; 3]>,
}

/// A micro-batch: entries [S, batch, k], and the largest number of entries of a position.
struct Micro {
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    most: usize,
}

impl<'a> Filling<'a> {
    pub fn new(batches: &'a Batches, sparse: &'a Sparse) -> Self {
        let size = batches.length * batches.run.micro_batch as usize * sparse.width;
        let ranks = (0..batches.run.data_parallel).map(|_| [Vec::new(), Vec::new(), Vec::new()]).collect();
        let micro = Micro { ids: vec![0; size], logprobs: vec![0.0; size], most: 1 };
        Self { batches, sparse, entries: Entries::new(sparse), row: 0, micro, ranks }
    }

    /// Adds a row. If it completes an iteration, returns the compressed file of each rank.
    ///
    /// # Errors
    /// A message, if the row is invalid.
    pub fn row(&mut self, batch: &SparseBatch<'_>, number: usize) -> Result<Option<Vec<Vec<u8>>>, String> {
        let row = batch.row(number)?;
        if row.tokens.len() != self.batches.row {
            return Err(format!(
                "has {} tokens, others {}: Megatron-LM takes rows of one length (`pack.remainder: keep` makes others)",
                row.tokens.len(),
                self.batches.row
            ));
        }
        let (rows, ranks) = (self.batches.run.micro_batch as usize, self.batches.run.data_parallel as usize);
        let (place, rank) = (self.row % rows, self.row / rows % ranks);
        let width = self.sparse.width;
        for t in 0..self.batches.length {
            let known = t + 1 < row.length && t + 1 >= row.given;
            if known {
                self.micro.most = self.micro.most.max(self.entries.read(batch, &row, t + 1));
            } else {
                self.entries.fill_empty(width);
            }
            let at = (t * rows + place) * width;
            self.micro.ids[at..at + width].copy_from_slice(&self.entries.ids);
            self.micro.logprobs[at..at + width].copy_from_slice(&self.entries.logprobs);
        }
        self.row += 1;
        if place + 1 == rows {
            self.micro_batch(rank);
        }
        if self.row < self.batches.run.global_batch as usize {
            return Ok(None);
        }
        self.row = 0;
        let files = self.ranks.iter_mut().map(|lists| {
            let [values, low, high] = lists;
            let file = encode(&[("values", values), ("indices_low", low), ("bit_17", high)]);
            lists.iter_mut().for_each(Vec::clear);
            // `bulk::compress` writes the content size, without which Megatron cannot decompress
            zstd::bulk::compress(&file.map_err(|e| e.to_string())?, ZSTD_LEVEL).map_err(|e| e.to_string())
        });
        files.collect::<Result<_, String>>().map(Some)
    }

    /// Finishes a micro-batch: three tensors, as wide as its position with the most entries.
    fn micro_batch(&mut self, rank: usize) {
        let (width, kept) = (self.sparse.width, self.micro.most);
        let shape = [self.batches.length, self.batches.run.micro_batch as usize, kept];
        let size = shape.iter().product::<usize>();
        let (mut values, mut low, mut high) = (
            Vec::with_capacity(size * self.batches.dtype.bytes()),
            Vec::with_capacity(size * 2),
            Vec::with_capacity(size),
        );
        for (ids, logprobs) in self.micro.ids.chunks(width).zip(self.micro.logprobs.chunks(width)) {
            self.batches.dtype.put(&logprobs[..kept], &mut values);
            low.extend(ids[..kept].iter().flat_map(|id| (*id as u16).to_le_bytes()));
            high.extend(ids[..kept].iter().map(|id| u8::from(id >> 16 & 1 == 1)));
        }
        let kind = match self.batches.dtype {
            ValueType::Float32 => Kind::Float32,
            ValueType::Float16 => Kind::Float16,
            ValueType::Bfloat16 => Kind::Bfloat16,
        };
        let parts = [(kind, values), (Kind::UInt16, low), (Kind::Bool, high)];
        for (list, (kind, bytes)) in self.ranks[rank].iter_mut().zip(parts) {
            list.push(Tensor { kind, shape, bytes });
        }
        self.micro.most = 1;
    }
}

/// Name of an iteration's member in its tar file.
fn member(iteration: u64) -> String {
    format!("{iteration}.pt.zst")
}

/// Name of the first member of each tar file.
const META: &str = "_meta.json";

/// A member of a tar file: header, content, zero padding up to the block size.
fn tar_member(name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{:011o}\0", content.len()).as_bytes());
    put(136, b"00000000000\0");
    // the checksum is computed with spaces in its own field
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut member = Vec::with_capacity(BLOCK + content.len().next_multiple_of(BLOCK));
    member.extend(header);
    member.extend(content);
    member.resize(member.len().next_multiple_of(BLOCK), 0);
    member
}

/// End-of-archive marker of a tar file: two zero blocks.
const TAR_END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// The card: lists the options that the run must have.
fn card(batches: &Batches, signal: Signal, iterations: &[(String, u64)]) -> String {
    let MegatronRun { micro_batch, global_batch, data_parallel, .. } = batches.run;
    let splits: String = iterations
        .iter()
        .map(|(split, n)| format!("    data/{split}    iterations 0 to {}\n", n.max(&1) - 1))
        .collect();
    format!(
        "Log-probabilities of a teacher (`{}`), written by `stillhouse export --format megatron-kd` for Megatron-LM's cached-logits distillation; \
         `export.json` says from what.\n\n{splits}\nThe run: `--seq-length {} --micro-batch-size {micro_batch} --global-batch-size {global_batch}`, data parallel \
         {data_parallel} (or a multiple or part of it), no context parallelism, and samples in the order of the rows: sample n is row n of \
         the split, from iteration 0 on. Its hash must be the one in `_meta.json`.\n",
        signal.name(),
        batches.length,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::sparse::tests as tests_of_sparse;

    #[test]
    fn the_hash_is_that_of_pythons_json() {
        // Python: hashlib.md5(json.dumps({...}, separators=(",", ":")).encode()).hexdigest()
        let text =
            identifiers(1234, 4096, 512_000, &[(1.0, "/data/owt_text_document".into()), (0.25, "x.y.bin".into())]);
        let expected = r#"{"seed":1234,"sequence_length":4096,"train_samples":512000,"blend":{"kind":"blend","blend":[[1.0,"owt_text_document"],[0.25,"x.y"]]}}"#;
        assert_eq!(text.as_deref(), Ok(expected));
        assert!(identifiers(1, 2, 3, &[(1e-7, "a".into())]).is_err());
        assert!(identifiers(1, 2, 3, &[(1.0, "dät".into())]).is_err());
        assert!(identifiers(1, 2, 3, &[(1.0, "data/".into())]).is_err());
        assert!(identifiers(1, 2, 3, &[(1.0, "a/.hidden".into())]).unwrap().contains("\".hidden\""));
    }

    fn run(micro_batch: u32, global_batch: u32, data_parallel: u32, sequence_length: Option<u32>) -> MegatronRun {
        let identity = Identity::Hash("0".repeat(32));
        MegatronRun { micro_batch, global_batch, data_parallel, sequence_length, iterations_per_file: 1, identity }
    }

    #[test]
    fn ids_have_a_17th_bit_and_ranks_take_micro_batches_in_turn() {
        let sparse = tests_of_sparse::sparse(Signal::TopK, 2, 1 << 17);
        // two rows of three tokens: the entries at position p of row r are 65,536 · (p odd) + 10r + p + 2, and 1
        let ids = (0..2).flat_map(|row| (0..3).flat_map(move |p| [(p & 1) << 16 | (10 * row + p + 2), 1]));
        let batch = tests_of_sparse::topk(3, ids.collect(), (0..12).map(|n| -(n as f32)).collect());
        let read = sparse.batch(&batch).unwrap();
        let batches = Batches::of(&run(1, 4, 2, None), 3, &sparse, ValueType::Float32).unwrap();
        let mut filling = Filling::new(&batches, &sparse);
        for row in [0, 1] {
            assert!(filling.row(&read, row).unwrap().is_none());
        }
        for (rank, [values, low, high]) in filling.ranks.iter().enumerate() {
            assert_eq!((values.len(), values[0].shape), (1, [2, 1, 2]));
            // index t holds position t + 1
            let first = (10 * rank + 3) as u16;
            let expected = [first, 1, first + 1, 1].into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
            assert_eq!((low[0].kind, &low[0].bytes), (Kind::UInt16, &expected));
            assert_eq!((high[0].kind, high[0].bytes.as_slice()), (Kind::Bool, &[1, 0, 0, 0][..]));
            let values: Vec<f32> =
                values[0].bytes.chunks(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
            let first = (6 * rank + 2) as f32;
            assert_eq!(values, [first, first + 1.0, first + 2.0, first + 3.0].map(|v| -v));
        }
        // S = L includes the last position, which has no prediction; then a row that is too short for the run
        let whole = Batches::of(&run(1, 4, 2, Some(3)), 3, &sparse, ValueType::Float32).unwrap();
        let mut filling = Filling::new(&whole, &sparse);
        filling.row(&read, 0).unwrap();
        let values: Vec<f32> =
            filling.ranks[0][0][0].bytes.chunks(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect();
        assert_eq!(values[4..], [-1000.0, -1000.0]);
        let longer = Batches::of(&run(1, 4, 2, Some(3)), 4, &sparse, ValueType::Float32).unwrap();
        assert!(Filling::new(&longer, &sparse).row(&read, 0).unwrap_err().contains("pack.remainder"));
    }

    #[test]
    fn a_run_that_cannot_be_is_named_by_its_option() {
        let sparse = tests_of_sparse::sparse(Signal::TopK, 1000, 1 << 17);
        let of = |run: &MegatronRun, row| Batches::of(run, row, &sparse, ValueType::Float32).map(|b| b.length);
        assert_eq!(of(&run(2, 8, 2, None), 513), Ok(512));
        assert!(of(&run(3, 8, 2, None), 513).unwrap_err().contains("--global-batch: got 8"));
        assert!(of(&run(0, 8, 2, None), 513).unwrap_err().contains("--global-batch"));
        assert!(of(&run(1, 8, 1, Some(510)), 512).unwrap_err().contains("--sequence-length: got 510, valid: 511"));
        assert!(of(&run(1, 8, 1, None), 1).unwrap_err().contains("--sequence-length"));
        assert!(of(&run(1, 4096, 1, None), 1025).unwrap_err().contains("valid up to 3221225472"));
        assert_eq!(of(&run(1, 4096, 16, None), 1025), Ok(1024));
    }

    #[test]
    fn a_member_of_a_tar_is_whole_blocks() {
        let member = tar_member("12.pt.zst", b"abc");
        assert_eq!(member.len(), 1024);
        assert_eq!(&member[..9], b"12.pt.zst");
        assert_eq!(&member[124..135], b"00000000003");
        assert_eq!(&member[512..516], b"abc\0");
    }
}
