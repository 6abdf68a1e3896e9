//! The keys of documents and of their parts, on the disk of the machine that runs the job.
//!
//! ```text
//!   split 0 ──► 0000000000.keys, 0000000000.parts
//!   split 1 ──► 0000000001.keys, 0000000001.parts
//! ```
//!
//! A file has 24 bytes for each key of a document, or 28 for each key of a part, and at its end the numbers of documents and
//! keys and a checksum. A run that was interrupted keeps the files that are whole.

#![expect(clippy::disallowed_methods, reason = "callers run it through `blocking`")]

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use stillhouse_operators::deduplicate::KeysOfDocument;
use stillhouse_schemas::ids::{DocumentId, SplitId};

use crate::error::{ErrorKind, PipelineError, Result};

pub(super) type Key = u128;

/// Bytes of a key of a document: the key, and the document.
const DOCUMENT_KEY_BYTES: usize = 16 + 8;
/// Numbers of documents and keys, and a SHA-256.
const END_BYTES: usize = 8 + 8 + 32;
/// The kind of a key, in the bit of its document that no document has: there are fewer than 2^31 splits.
pub(super) const MINHASH: u64 = 1 << 63;
pub(super) const BUFFER_BYTES: usize = 64 << 10;

pub(super) fn failed(path: &Path) -> impl FnOnce(io::Error) -> PipelineError {
    PipelineError::output(format!("{}: the keys of documents", path.display()))
}

/// A key, the document that has it, and the ordinal of the part among those of the document that have a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) key: Key,
    pub(super) document: u64,
    /// 0 for a key of the document.
    pub(super) part: u32,
}

impl Record {
    pub(super) const BYTES: usize = DOCUMENT_KEY_BYTES + 4;

    /// In a file of keys of documents, the bytes of the part are left out.
    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (key, rest) = bytes.split_at_mut(16);
        let (document, part) = rest.split_at_mut(8);
        key.copy_from_slice(&self.key.to_le_bytes());
        document.copy_from_slice(&self.document.to_le_bytes());
        part.copy_from_slice(&self.part.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (mut key, mut document, mut part) = ([0; 16], [0; 8], [0; 4]);
        let (of_key, rest) = bytes.split_at(16);
        let (of_document, of_part) = rest.split_at(8);
        key.copy_from_slice(of_key);
        document.copy_from_slice(of_document);
        part.copy_from_slice(of_part);
        Self { key: u128::from_le_bytes(key), document: u64::from_le_bytes(document), part: u32::from_le_bytes(part) }
    }
}

/// Records at the beginning of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Records {
    pub(super) path: PathBuf,
    pub(super) count: u64,
    pub(super) record_bytes: usize,
}

impl Records {
    pub(super) fn open(&self) -> Result<RecordsReader> {
        let file = BufReader::with_capacity(BUFFER_BYTES, File::open(&self.path).map_err(failed(&self.path))?);
        Ok(RecordsReader { file, records: self.clone() })
    }

    pub(super) fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path).map_err(failed(&self.path))
    }
}

pub(super) struct RecordsReader {
    file: BufReader<File>,
    /// Those that are not read yet.
    records: Records,
}

impl RecordsReader {
    pub(super) fn next(&mut self) -> Result<Option<Record>> {
        let Some(left) = self.records.count.checked_sub(1) else { return Ok(None) };
        self.records.count = left;
        let mut bytes = [0; Record::BYTES];
        let read = self.file.read_exact(&mut bytes[..self.records.record_bytes]);
        read.map_err(failed(&self.records.path))?;
        Ok(Some(Record::from_bytes(&bytes)))
    }
}

/// The whole keys of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SplitKeys {
    pub(super) documents: KeyFile,
    /// Keys of parts, if they are compared.
    pub(super) parts: Option<KeyFile>,
}

/// A whole file of keys of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeyFile {
    pub(super) records: Records,
    pub(super) split: SplitId,
    /// Documents of the split, with those that were dropped before: one more than the last ordinal.
    pub(super) documents: u64,
}

impl SplitKeys {
    pub(super) fn split(&self) -> SplitId {
        self.documents.split
    }

    /// The keys of a split that an earlier run has written, if they are whole. Reads all of them.
    pub(super) fn written_before(folder: &Path, split: SplitId, with_parts: bool) -> Result<Option<Self>> {
        let Some(documents) = KeyFile::written_before(folder, split, DOCUMENT_KEY_BYTES)? else { return Ok(None) };
        if !with_parts {
            return Ok(Some(Self { documents, parts: None }));
        }
        let parts = KeyFile::written_before(folder, split, Record::BYTES)?;
        Ok(parts.map(|parts| Self { documents, parts: Some(parts) }))
    }
}

impl KeyFile {
    fn written_before(folder: &Path, split: SplitId, record_bytes: usize) -> Result<Option<Self>> {
        let path = path_of(folder, split, record_bytes);
        match read_end(&path, record_bytes) {
            Ok(Some((documents, count))) => {
                Ok(Some(Self { records: Records { path, count, record_bytes }, split, documents }))
            }
            Ok(None) => Ok(None),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof) => Ok(None),
            Err(e) => Err(failed(&path)(e)),
        }
    }
}

fn path_of(folder: &Path, split: SplitId, record_bytes: usize) -> PathBuf {
    let kind = if record_bytes == DOCUMENT_KEY_BYTES { "keys" } else { "parts" };
    folder.join(format!("{:010}.{kind}", split.0))
}

/// Writes the keys of a split.
pub(super) struct SplitKeysWriter {
    documents: KeyFileWriter,
    parts: Option<KeyFileWriter>,
}

impl SplitKeysWriter {
    pub(super) fn create(folder: &Path, split: SplitId, with_parts: bool) -> Result<Self> {
        let create = |record_bytes| KeyFileWriter::create(folder, split, record_bytes);
        Ok(Self {
            documents: create(DOCUMENT_KEY_BYTES)?,
            parts: with_parts.then(|| create(Record::BYTES)).transpose()?,
        })
    }

    pub(super) fn push(&mut self, keys: &KeysOfDocument) -> Result<()> {
        let own = self.documents.split;
        let (split, ordinal) = DocumentId(keys.id).parts();
        if split != own || keys.id & MINHASH != 0 {
            let message = format!(
                "document {ordinal} of split {} among those of split {}: a bug in this program",
                split.0, own.0
            );
            return Err(PipelineError::new(ErrorKind::Input, message));
        }
        let file = &mut self.documents;
        file.documents = file.documents.max(u64::from(ordinal) + 1);
        let record = |key, document, part| Record { key, document, part };
        keys.exact.map_or(Ok(()), |key| file.write(record(key, keys.id, 0)))?;
        keys.bands.iter().try_for_each(|&key| file.write(record(key, keys.id | MINHASH, 0)))?;
        let Some(file) = &mut self.parts else { return Ok(()) };
        file.documents = file.documents.max(u64::from(ordinal) + 1);
        (0..).zip(&keys.parts).try_for_each(|(part, &key)| file.write(record(key, keys.id, part)))
    }

    pub(super) fn finish(self) -> Result<SplitKeys> {
        // parts first: a run that finds the keys of documents alone makes both again
        let parts = self.parts.map(KeyFileWriter::finish).transpose()?;
        Ok(SplitKeys { documents: self.documents.finish()?, parts })
    }
}

struct KeyFileWriter {
    file: BufWriter<File>,
    records: Records,
    split: SplitId,
    sum: Sha256,
    documents: u64,
}

impl KeyFileWriter {
    fn create(folder: &Path, split: SplitId, record_bytes: usize) -> Result<Self> {
        let path = path_of(folder, split, record_bytes);
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create(unfinished(&path)).map_err(failed(&path))?);
        Ok(Self { file, records: Records { path, count: 0, record_bytes }, split, sum: Sha256::new(), documents: 0 })
    }

    fn write(&mut self, record: Record) -> Result<()> {
        let bytes = record.to_bytes();
        let bytes = &bytes[..self.records.record_bytes];
        self.sum.update(bytes);
        self.records.count += 1;
        self.file.write_all(bytes).map_err(failed(&self.records.path))
    }

    fn finish(mut self) -> Result<KeyFile> {
        let Self { records, split, documents, .. } = self;
        let mut end = [documents.to_le_bytes(), records.count.to_le_bytes()].concat();
        self.sum.update(&end);
        end.extend(self.sum.finalize());
        let written = self.file.write_all(&end).and_then(|()| self.file.flush());
        let path = &records.path;
        written.and_then(|()| fs::rename(unfinished(path), path)).map_err(failed(path))?;
        Ok(KeyFile { records, split, documents })
    }
}

fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// The numbers of documents and keys of a file; `None` if its checksum is another one.
fn read_end(path: &Path, record_bytes: usize) -> io::Result<Option<(u64, u64)>> {
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
    let is_whole = sum.finalize().as_slice() == written && keys.checked_mul(record_bytes as u64) == Some(keys_bytes);
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
