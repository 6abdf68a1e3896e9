//! The keys of documents, on the disk of the machine that runs the job, and the duplicates that follow from them.
//!
//! ```text
//!   split 0 ──► 0000000000.keys ──┐                        ┌─► bucket 0 ──► first document of each key ──┐
//!   split 1 ──► 0000000001.keys ──┼─► by the key's high ───┼─► bucket 1 ──► …                            ├─► Clusters ─► list
//!   split 2 ──► 0000000002.keys ──┘   bits                 └─► …                                         ┘
//! ```
//!
//! A file of keys has 24 bytes for each key, and at its end the numbers of documents and keys and a checksum. A run that was
//! interrupted keeps the files that are whole. A bucket has as many keys as fit into the memory; with one bucket, the files
//! are read as they are. Memory: that of a bucket, up to 128 bytes for each key, and 16 bytes for each document of the input.

#![expect(clippy::disallowed_methods, reason = "callers run it through `blocking`")]

use std::collections::HashMap;
use std::fs::{self, File};
use std::hash::{BuildHasherDefault, Hasher};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use stillhouse_dedup::{ClusterError, Clusters, FinishedClusters};
use stillhouse_operators::deduplicate::KeysOfDocument;
use stillhouse_operators::operator::{Duplicate, DuplicateKind};
use stillhouse_schemas::ids::{DocumentId, SplitId};

use crate::error::{ErrorKind, PipelineError, Result};

const KEY_BYTES: usize = 24;
/// Numbers of documents and keys, and a SHA-256.
const END_BYTES: usize = 8 + 8 + 32;
/// The kind of a key, in the bit of its document that no document has: there are fewer than 2^31 splits.
const MINHASH: u64 = 1 << 63;
/// Memory of a key that is compared, at most: an entry of 33 bytes in a hash table that has just grown to twice its size, beside
/// the smaller one.
const TABLE_BYTES: u64 = 128;
/// Most buckets, which are open at once.
const MOST_BUCKETS: u64 = 512;
const BUFFER_BYTES: usize = 64 << 10;

fn failed(path: &Path) -> impl FnOnce(io::Error) -> PipelineError {
    PipelineError::output(format!("{}: the keys of documents", path.display()))
}

/// The whole keys of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeyFile {
    path: PathBuf,
    split: SplitId,
    /// Documents of the split, with those that were dropped before: one more than the last ordinal.
    documents: u64,
    keys: u64,
}

fn path_of(folder: &Path, split: SplitId) -> PathBuf {
    folder.join(format!("{:010}.keys", split.0))
}

/// Writes the keys of a split.
pub(super) struct KeyFileWriter {
    file: BufWriter<File>,
    path: PathBuf,
    split: SplitId,
    sum: Sha256,
    documents: u64,
    keys: u64,
}

impl KeyFileWriter {
    pub(super) fn create(folder: &Path, split: SplitId) -> Result<Self> {
        let path = path_of(folder, split);
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create(part_of(&path)).map_err(failed(&path))?);
        Ok(Self { file, path, split, sum: Sha256::new(), documents: 0, keys: 0 })
    }

    pub(super) fn push(&mut self, keys: &KeysOfDocument) -> Result<()> {
        let (split, ordinal) = DocumentId(keys.id).parts();
        if split != self.split || keys.id & MINHASH != 0 {
            let message = format!(
                "document {ordinal} of split {} among those of split {}: a bug in this program",
                split.0, self.split.0
            );
            return Err(PipelineError::new(ErrorKind::Input, message));
        }
        self.documents = self.documents.max(u64::from(ordinal) + 1);
        keys.exact.map_or(Ok(()), |key| self.write(key, keys.id))?;
        keys.bands.iter().try_for_each(|&key| self.write(key, keys.id | MINHASH))
    }

    fn write(&mut self, key: u128, document: u64) -> Result<()> {
        let bytes = to_bytes(key, document);
        self.sum.update(bytes);
        self.keys += 1;
        self.file.write_all(&bytes).map_err(failed(&self.path))
    }

    pub(super) fn finish(mut self) -> Result<KeyFile> {
        let Self { path, split, documents, keys, .. } = self;
        let mut end = [documents.to_le_bytes(), keys.to_le_bytes()].concat();
        self.sum.update(&end);
        end.extend(self.sum.finalize());
        let written = self.file.write_all(&end).and_then(|()| self.file.flush());
        written.and_then(|()| fs::rename(part_of(&path), &path)).map_err(failed(&path))?;
        Ok(KeyFile { path, split, documents, keys })
    }
}

fn part_of(path: &Path) -> PathBuf {
    path.with_extension("part")
}

fn to_bytes(key: u128, document: u64) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    let (high, low) = bytes.split_at_mut(16);
    high.copy_from_slice(&key.to_le_bytes());
    low.copy_from_slice(&document.to_le_bytes());
    bytes
}

fn from_bytes(bytes: &[u8; KEY_BYTES]) -> (u128, u64) {
    let (mut key, mut document) = ([0; 16], [0; 8]);
    let (high, low) = bytes.split_at(16);
    key.copy_from_slice(high);
    document.copy_from_slice(low);
    (u128::from_le_bytes(key), u64::from_le_bytes(document))
}

impl KeyFile {
    pub(super) fn split(&self) -> SplitId {
        self.split
    }

    /// The keys of a split that an earlier run has written, if they are whole. Reads all of them.
    pub(super) fn written_before(folder: &Path, split: SplitId) -> Result<Option<Self>> {
        let path = path_of(folder, split);
        match read_end(&path) {
            Ok(Some((documents, keys))) => Ok(Some(Self { path, split, documents, keys })),
            Ok(None) => Ok(None),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => Ok(None),
            Err(e) => Err(failed(&path)(e)),
        }
    }

    /// Passes the keys on, with the documents as numbers from `first` on.
    fn read(&self, first: u64, each: &mut impl FnMut(u128, u64) -> Result<()>) -> Result<()> {
        let to_number = |document: u64| (document & MINHASH) | (first + (document & u64::from(u32::MAX)));
        read_keys(&self.path, self.keys, &mut |key, document| each(key, to_number(document)))
    }
}

/// The numbers of documents and keys of a file; `None` if its checksum is another one.
fn read_end(path: &Path) -> io::Result<Option<(u64, u64)>> {
    let mut file = BufReader::with_capacity(BUFFER_BYTES, File::open(path)?);
    let bytes = file.get_ref().metadata()?.len();
    let keys_bytes = bytes.checked_sub(END_BYTES as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut sum = Sha256::new();
    add_to_sum(&mut file.by_ref().take(keys_bytes), &mut sum)?;
    let (mut documents, mut keys, mut written) = ([0; 8], [0; 8], [0; 32]);
    file.read_exact(&mut documents)?;
    file.read_exact(&mut keys)?;
    file.read_exact(&mut written)?;
    sum.update(documents);
    sum.update(keys);
    let (documents, keys) = (u64::from_le_bytes(documents), u64::from_le_bytes(keys));
    let is_whole = sum.finalize().as_slice() == written && keys_bytes == keys * KEY_BYTES as u64;
    Ok(is_whole.then_some((documents, keys)))
}

/// Adds all that a reader has to a sum; returns how many bytes these are.
pub(super) fn add_to_sum(from: &mut impl Read, sum: &mut Sha256) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut bytes = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(read) => {
                sum.update(buffer.get(..read).unwrap_or_default());
                bytes += read as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn read_keys(path: &Path, keys: u64, each: &mut impl FnMut(u128, u64) -> Result<()>) -> Result<()> {
    let mut file = BufReader::with_capacity(BUFFER_BYTES, File::open(path).map_err(failed(path))?);
    let mut bytes = [0; KEY_BYTES];
    for _ in 0..keys {
        file.read_exact(&mut bytes).map_err(failed(path))?;
        let (key, document) = from_bytes(&bytes);
        each(key, document)?;
    }
    Ok(())
}

/// Finds the duplicates among the documents of these splits, in the order of splits, and passes them to `each`, in the order
/// of documents. Keys that do not fit into `memory_bytes` are sorted into buckets in `folder`.
pub(super) fn find_duplicates(
    files: &[KeyFile],
    folder: &Path,
    memory_bytes: u64,
    each: &mut impl FnMut(Duplicate) -> Result<()>,
) -> Result<()> {
    let documents = Documents::of(files);
    let clusters = || Clusters::new(documents.count).map_err(out_of_memory);
    let (mut exact, mut minhash) = (clusters()?, clusters()?);
    let keys: u64 = files.iter().map(|file| file.keys).sum();
    let buckets = (keys * TABLE_BYTES).div_ceil(memory_bytes).max(1);
    if buckets > MOST_BUCKETS {
        let least = (keys * TABLE_BYTES).div_ceil(MOST_BUCKETS * 1_000_000);
        let message = format!(
            "deduplicate.memory_megabytes: got {}, and the input has {keys} keys; valid: at least {least}",
            memory_bytes / 1_000_000
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    if buckets == 1 {
        let mut firsts = Firsts::default();
        for (file, first) in files.iter().zip(&documents.firsts) {
            file.read(*first, &mut |key, document| firsts.join(key, document, &mut exact, &mut minhash))?;
        }
    } else {
        let buckets = Buckets::sort(files, &documents, folder, buckets)?;
        for (path, keys) in &buckets.files {
            let mut firsts = Firsts::default();
            read_keys(path, *keys, &mut |key, document| firsts.join(key, document, &mut exact, &mut minhash))?;
            fs::remove_file(path).map_err(failed(path))?;
        }
    }
    let (exact, minhash) = (exact.finish().map_err(out_of_memory)?, minhash.finish().map_err(out_of_memory)?);
    let first_of = |clusters: &FinishedClusters, number: u64| clusters.first(number).filter(|first| *first != number);
    for number in 0..documents.count {
        let found = first_of(&exact, number).map(|first| (first, DuplicateKind::Exact));
        let found = found.or_else(|| first_of(&minhash, number).map(|first| (first, DuplicateKind::MinHash)));
        if let Some((first, kind)) = found {
            each(Duplicate { document: documents.id(number), first: documents.id(first), kind })?;
        }
    }
    Ok(())
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
    fn of(files: &[KeyFile]) -> Self {
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
    exact: HashMap<u128, u64, BuildHasherDefault<KeyHasher>>,
    minhash: HashMap<u128, u64, BuildHasherDefault<KeyHasher>>,
}

impl Firsts {
    /// Joins a document with the first one of its key.
    fn join(&mut self, key: u128, document: u64, exact: &mut Clusters, minhash: &mut Clusters) -> Result<()> {
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

/// Keys by their high bits, with the numbers of documents.
struct Buckets {
    files: Vec<(PathBuf, u64)>,
}

impl Buckets {
    fn sort(files: &[KeyFile], documents: &Documents, folder: &Path, count: u64) -> Result<Self> {
        let mut open = Vec::new();
        for number in 0..count {
            let path = folder.join(format!("{number:03}.bucket"));
            let file = BufWriter::with_capacity(BUFFER_BYTES, File::create(&path).map_err(failed(&path))?);
            open.push((path, file, 0));
        }
        for (file, first) in files.iter().zip(&documents.firsts) {
            file.read(*first, &mut |key, document| {
                let bucket = ((key >> 64) * u128::from(count)) >> 64;
                let (path, file, keys) = &mut open[bucket as usize];
                *keys += 1;
                file.write_all(&to_bytes(key, document)).map_err(failed(path))
            })?;
        }
        let closed = |(path, mut file, keys): (PathBuf, BufWriter<File>, u64)| {
            file.flush().map_err(failed(&path))?;
            Ok((path, keys))
        };
        Ok(Self { files: open.into_iter().map(closed).collect::<Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Documents of two splits; the second has an ordinal without keys.
    fn written(folder: &Path) -> Vec<KeyFile> {
        let document =
            |id: u64, exact: u128, bands: &[u128]| KeysOfDocument { id, exact: Some(exact), bands: bands.to_vec() };
        // spread over all buckets
        let key = |n: u128| n.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let ids = |split: u32, ordinal: u32| SplitId(split).document(ordinal).0;
        let splits = [
            vec![document(ids(0, 0), key(1), &[key(10), key(11)]), document(ids(0, 1), key(2), &[key(20), key(21)])],
            Vec::new(),
            vec![
                document(ids(2, 0), key(3), &[key(30), key(21)]),
                // a gap: the record was bad
                document(ids(2, 2), key(1), &[key(10), key(11)]),
                document(ids(2, 3), key(4), &[key(30)]),
                document(ids(2, 4), key(5), &[]),
                // a key of one kind that is one of the other kind, too
                document(ids(2, 5), key(10), &[key(5)]),
            ],
        ];
        let write = |(split, documents): (u32, &Vec<KeysOfDocument>)| {
            let mut file = KeyFileWriter::create(folder, SplitId(split)).unwrap();
            documents.iter().for_each(|keys| file.push(keys).unwrap());
            file.finish().unwrap()
        };
        (0..).zip(&splits).map(write).collect()
    }

    fn found(files: &[KeyFile], folder: &Path, memory_bytes: u64) -> BTreeMap<u64, (u64, DuplicateKind)> {
        let mut found = BTreeMap::new();
        find_duplicates(files, folder, memory_bytes, &mut |Duplicate { document, first, kind }| {
            assert!(found.last_key_value().is_none_or(|(last, _)| *last < document));
            found.insert(document, (first, kind));
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn the_first_document_of_a_key_stays_whatever_the_memory() {
        let folder = tempfile::tempdir().unwrap();
        let files = written(folder.path());
        let ids = |split: u32, ordinal: u32| SplitId(split).document(ordinal).0;
        let expected = BTreeMap::from([
            (ids(2, 0), (ids(0, 1), DuplicateKind::MinHash)),
            (ids(2, 2), (ids(0, 0), DuplicateKind::Exact)),
            // by way of document 0 of its split
            (ids(2, 3), (ids(0, 1), DuplicateKind::MinHash)),
        ]);
        for memory_bytes in [1_000_000, 600, 100, 64] {
            assert_eq!(found(&files, folder.path(), memory_bytes), expected, "{memory_bytes}");
        }
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(left.iter().all(|path| path.extension().is_some_and(|end| end == "keys")), "{left:?}");
    }

    #[test]
    fn too_little_memory_is_an_error_that_says_how_much_is_needed() {
        let folder = tempfile::tempdir().unwrap();
        let files = written(folder.path());
        let error = find_duplicates(&files, folder.path(), 1, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(
            error.contains("deduplicate.memory_megabytes: got 0") && error.contains("valid: at least 1"),
            "{error}"
        );
    }

    #[test]
    fn keys_of_an_earlier_run_are_used_only_if_they_are_whole() {
        let folder = tempfile::tempdir().unwrap();
        let files = written(folder.path());
        let again = |split| KeyFile::written_before(folder.path(), SplitId(split)).unwrap();
        for file in &files {
            assert_eq!(again(file.split.0).as_ref(), Some(file));
        }
        assert_eq!(again(7), None);
        let (path, whole) = (&files[2].path, fs::read(&files[2].path).unwrap());
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(path, damaged).unwrap();
            assert_eq!(again(2), None, "byte {at}");
            fs::write(path, &whole[..at]).unwrap();
            assert_eq!(again(2), None, "cut at {at}");
        }
        fs::write(path, &whole).unwrap();
        assert_eq!(again(2).as_ref(), Some(&files[2]));
    }

    #[test]
    fn a_document_of_another_split_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = KeyFileWriter::create(folder.path(), SplitId(1)).unwrap();
        let keys = KeysOfDocument { id: SplitId(2).document(0).0, exact: None, bands: Vec::new() };
        assert!(file.push(&keys).unwrap_err().to_string().contains("document 0 of split 2 among those of split 1"));
    }
}
