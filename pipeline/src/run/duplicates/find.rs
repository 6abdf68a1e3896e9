//! The duplicates that follow from the keys of all splits.
//!
//! ```text
//!   keys of documents ──► buckets by the key's high bits ──► first document of each key ──► Clusters ──► documents to drop ──┐
//!   keys of parts ──────► buckets by the key's high bits ──► first part of each key, in a document that stays ──► runs ──────┴─► list
//! ```
//!
//! A bucket has as many keys as fit into the memory; with one bucket, the files of the splits are read as they are. Memory: that
//! of a bucket, up to 128 bytes for each key, and 16 bytes for each document of the input.

#![expect(clippy::disallowed_methods, reason = "callers run it through `blocking`")]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{BufWriter, Write};
use std::path::Path;

use stillhouse_dedup::{ClusterError, Clusters, FinishedClusters};
use stillhouse_operators::operator::{Duplicate, DuplicateKind};
use stillhouse_schemas::ids::SplitId;

use super::key_files::{BUFFER_BYTES, Key, KeyFile, MINHASH, Record, Records, RecordsReader, SplitKeys, failed};
use crate::error::{ErrorKind, PipelineError, Result};

/// Memory of a key that is compared, at most: an entry of 33 bytes in a hash table that has just grown to twice its size, beside
/// the smaller one.
const TABLE_BYTES: u64 = 128;
/// Most buckets, which are open at once.
const MOST_BUCKETS: u64 = 512;

/// Finds the duplicates among the documents of these splits, in the order of splits, and passes them to `each`, in the order
/// of documents. Keys that do not fit into `memory_bytes` are sorted into buckets in `folder`.
pub(super) fn find_duplicates(
    splits: &[SplitKeys],
    folder: &Path,
    memory_bytes: u64,
    each: &mut impl FnMut(Duplicate) -> Result<()>,
) -> Result<()> {
    let files: Vec<&KeyFile> = splits.iter().map(|split| &split.documents).collect();
    let documents = Documents::of(&files);
    let clusters = || Clusters::new(documents.count).map_err(out_of_memory);
    let (mut exact, mut minhash) = (clusters()?, clusters()?);
    for bucket in buckets(&files, &documents, folder, memory_bytes)? {
        let mut firsts = Firsts::default();
        bucket.read(&mut |record| firsts.join(record.key, record.document, &mut exact, &mut minhash))?;
        bucket.remove()?;
    }
    let (exact, minhash) = (exact.finish().map_err(out_of_memory)?, minhash.finish().map_err(out_of_memory)?);
    let first_of = |clusters: &FinishedClusters, number: u64| clusters.first(number).filter(|first| *first != number);
    let duplicate_of = |number: u64| {
        let found = first_of(&exact, number).map(|first| (first, DuplicateKind::Exact));
        found.or_else(|| first_of(&minhash, number).map(|first| (first, DuplicateKind::MinHash)))
    };

    let files: Vec<&KeyFile> = splits.iter().filter_map(|split| split.parts.as_ref()).collect();
    let mut runs = Vec::new();
    for bucket in buckets(&files, &documents, folder, memory_bytes)? {
        let path = folder.join(format!("{:03}.run", runs.len()));
        runs.push(repeated_parts(&bucket, &path, &|number| duplicate_of(number).is_some())?);
        bucket.remove()?;
    }
    let mut parts = SortedRuns::open(&runs)?;
    for number in 0..documents.count {
        let (document, id) = (documents.id(number), |number| documents.id(number));
        if let Some((first, kind)) = duplicate_of(number) {
            each(Duplicate { document, first: id(first), kind, part: None })?;
        }
        while let Some(Record { key: first, part, .. }) = parts.next_of(number)? {
            each(Duplicate { document, first: id(first as u64), kind: DuplicateKind::Parts, part: Some(part) })?;
        }
    }
    runs.iter().try_for_each(Records::remove)
}

fn out_of_memory(e: ClusterError) -> PipelineError {
    PipelineError::caused(ErrorKind::Input, "deduplicate", e)
}

/// Numbers all documents of the splits, in the order of their ids.
struct Documents {
    splits: Vec<SplitId>,
    /// Number of the first document of each split.
    firsts: Vec<u64>,
    count: u64,
}

impl Documents {
    fn of(files: &[&KeyFile]) -> Self {
        let mut count = 0;
        let mut firsts = Vec::with_capacity(files.len());
        for file in files {
            firsts.push(count);
            count += file.documents;
        }
        Self { splits: files.iter().map(|file| file.split).collect(), firsts, count }
    }

    fn id(&self, number: u64) -> u64 {
        // a split without documents begins where the next one does
        let at = self.firsts.partition_point(|first| *first <= number) - 1;
        self.splits[at].document((number - self.firsts[at]) as u32).0
    }
}

/// The first document of each key.
#[derive(Default)]
struct Firsts {
    exact: FirstOfKey,
    minhash: FirstOfKey,
}

type FirstOfKey = HashMap<Key, u64, BuildHasherDefault<KeyHasher>>;

impl Firsts {
    /// Joins a document with the first one of its key.
    fn join(&mut self, key: Key, document: u64, exact: &mut Clusters, minhash: &mut Clusters) -> Result<()> {
        let (firsts, clusters) =
            if document & MINHASH == 0 { (&mut self.exact, exact) } else { (&mut self.minhash, minhash) };
        let document = document & !MINHASH;
        let first = *firsts.entry(key).or_insert(document);
        clusters.union(first, document).map(drop).map_err(out_of_memory)
    }
}

/// Keys are hashes already. The high bits choose the bucket, so these are the low ones.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Keys that are compared with each other, in the order of documents.
struct Bucket {
    /// Files, and what to add to the ordinals of their documents to have their numbers.
    files: Vec<(Records, u64)>,
    /// Whether the file was made for the bucket.
    is_own: bool,
}

impl Bucket {
    fn read(&self, each: &mut impl FnMut(Record) -> Result<()>) -> Result<()> {
        for (records, first) in &self.files {
            let mut reader = records.open()?;
            while let Some(record) = reader.next()? {
                each(Record { document: to_number(record.document, *first), ..record })?;
            }
        }
        Ok(())
    }

    fn remove(&self) -> Result<()> {
        if self.is_own { self.files.iter().try_for_each(|(records, _)| records.remove()) } else { Ok(()) }
    }
}

/// The number of a document whose split begins with number `first`.
fn to_number(document: u64, first: u64) -> u64 {
    (document & MINHASH) | (first + (document & u64::from(u32::MAX)))
}

/// Buckets of which each fits into the memory. They are in the order of keys, and within a bucket in that of documents.
fn buckets(files: &[&KeyFile], documents: &Documents, folder: &Path, memory_bytes: u64) -> Result<Vec<Bucket>> {
    let Some(file) = files.first() else { return Ok(Vec::new()) };
    let record_bytes = file.records.record_bytes;
    let keys: u64 = files.iter().map(|file| file.records.count).sum();
    let count = (keys * TABLE_BYTES).div_ceil(memory_bytes).max(1);
    if count > MOST_BUCKETS {
        let least = (keys * TABLE_BYTES).div_ceil(MOST_BUCKETS * 1_000_000);
        let message = format!(
            "deduplicate.memory_megabytes: got {}, and the input has {keys} keys; valid: at least {least}",
            memory_bytes / 1_000_000
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let numbered = files.iter().zip(&documents.firsts);
    if count == 1 {
        let files = numbered.map(|(file, first)| (file.records.clone(), *first)).collect();
        return Ok(vec![Bucket { files, is_own: false }]);
    }
    let create = |number: u64| {
        let path = folder.join(format!("{number:03}.bucket"));
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create(&path).map_err(failed(&path))?);
        Ok((file, Records { path, count: 0, record_bytes }))
    };
    let mut open = (0..count).map(create).collect::<Result<Vec<_>>>()?;
    for (file, first) in numbered {
        let mut reader = file.records.open()?;
        while let Some(record) = reader.next()? {
            let bucket = ((record.key >> 64) * u128::from(count)) >> 64;
            let (file, records) = &mut open[bucket as usize];
            records.count += 1;
            let bytes = Record { document: to_number(record.document, *first), ..record }.to_bytes();
            file.write_all(&bytes[..record_bytes]).map_err(failed(&records.path))?;
        }
    }
    let close = |(mut file, records): (BufWriter<File>, Records)| {
        file.flush().map_err(failed(&records.path))?;
        Ok(Bucket { files: vec![(records, 0)], is_own: true })
    };
    open.into_iter().map(close).collect()
}

/// Writes the parts of a bucket whose key an earlier part has, in the order of documents. The key of a record is the number of
/// the document with the first part. Parts of documents that are dropped do not count: another document keeps its text.
fn repeated_parts(bucket: &Bucket, path: &Path, is_dropped: &impl Fn(u64) -> bool) -> Result<Records> {
    let mut run = Records { path: path.to_owned(), count: 0, record_bytes: Record::BYTES };
    let mut file = BufWriter::with_capacity(BUFFER_BYTES, File::create(path).map_err(failed(path))?);
    let mut firsts = FirstOfKey::default();
    bucket.read(&mut |record| {
        if is_dropped(record.document) {
            return Ok(());
        }
        let mut is_first = false;
        let first = *firsts.entry(record.key).or_insert_with(|| {
            is_first = true;
            record.document
        });
        if !is_first {
            run.count += 1;
            file.write_all(&Record { key: first.into(), ..record }.to_bytes()).map_err(failed(path))?;
        }
        Ok(())
    })?;
    file.flush().map_err(failed(path))?;
    Ok(run)
}

/// Merges runs of parts, each of which is in the order of documents.
struct SortedRuns {
    readers: Vec<RecordsReader>,
    /// The next part of each run: number of its document, its ordinal, the run, and the number of the document with the first.
    next: BinaryHeap<Reverse<(u64, u32, usize, u64)>>,
}

impl SortedRuns {
    fn open(runs: &[Records]) -> Result<Self> {
        let readers = runs.iter().map(Records::open).collect::<Result<Vec<_>>>()?;
        let mut sorted = Self { next: BinaryHeap::with_capacity(readers.len()), readers };
        (0..sorted.readers.len()).try_for_each(|run| sorted.advance(run))?;
        Ok(sorted)
    }

    fn advance(&mut self, run: usize) -> Result<()> {
        if let Some(Record { key, document, part }) = self.readers[run].next()? {
            self.next.push(Reverse((document, part, run, key as u64)));
        }
        Ok(())
    }

    /// The next part, if it is one of this document.
    fn next_of(&mut self, number: u64) -> Result<Option<Record>> {
        match self.next.peek() {
            Some(&Reverse((document, part, run, first))) if document == number => {
                self.next.pop();
                self.advance(run)?;
                Ok(Some(Record { key: first.into(), document, part }))
            }
            _ => Ok(None),
        }
    }
}
