//! The words and labels of a model, and the features of a text: indices of rows of the input matrix.

use std::collections::HashMap;

use super::reader::Reader;
use super::{FasttextError, LABEL_PREFIX, Options};

/// The word that stands for the end of a line.
const END_OF_LINE: &[u8] = b"</s>";
/// Stands in the table where no entry is.
const EMPTY: u32 = u32::MAX;

pub(super) struct Dictionary {
    /// Where each word, then each label, begins in the bytes of the model, and its length.
    entries: Vec<(u64, u32)>,
    /// Number of words.
    words: usize,
    /// Indices of entries, by hash, with open addressing. Its size is a power of two.
    table: Vec<u32>,
    labels: Vec<String>,
    label_counts: Vec<i64>,
    word_ngrams: usize,
    /// Shortest and longest part of a word, in characters.
    parts: (usize, usize),
    buckets: Buckets,
}

/// Where the rows of n-grams are, which share rows by the hash.
struct Buckets {
    count: u32,
    /// The buckets that `fasttext quantize -cutoff` left, and where each lies now.
    kept: Option<HashMap<u32, u32>>,
    /// Number of rows.
    rows: usize,
}

impl Buckets {
    fn row(&self, hash: u64) -> Option<usize> {
        let bucket = (hash % u64::from(self.count.max(1))) as u32;
        match &self.kept {
            Some(kept) => kept.get(&bucket).map(|&row| row as usize),
            None => Some(bucket as usize),
        }
    }
}

/// A hash that grows with each byte: 32-bit FNV-1a, with bytes as signed numbers as in fastText.
#[derive(Clone, Copy)]
struct Hash(u32);

impl Hash {
    const EMPTY: Self = Self(2_166_136_261);

    fn with(self, byte: u8) -> Self {
        Self((self.0 ^ (byte as i8) as u32).wrapping_mul(16_777_619))
    }

    fn of(bytes: &[u8]) -> Self {
        bytes.iter().fold(Self::EMPTY, |hash, &byte| hash.with(byte))
    }
}

impl Dictionary {
    pub(super) fn read(reader: &mut Reader<'_>, options: &Options) -> Result<Self, FasttextError> {
        const PART: &str = "the dictionary";
        /// Bytes of an entry with an empty text: a zero byte, how often it occurs, its type.
        const ENTRY: usize = 1 + 8 + 1;
        let size = reader.int(PART)?;
        let words = reader.count("nwords", ENTRY, false)?;
        let labels = reader.count("nlabels", ENTRY, false)?;
        reader.long(PART)?; // ntokens
        let kept_buckets = reader.long(PART)?;
        if size as i64 != (words + labels) as i64 || labels == 0 {
            let valid = format!("{words} words and at least one label");
            return Err(FasttextError::Invalid { field: "size", got: size.into(), valid });
        }
        let mut dictionary = Self {
            entries: Vec::with_capacity(words + labels),
            words,
            table: vec![EMPTY; ((words + labels) * 3 / 2 + 1).next_power_of_two()],
            labels: Vec::with_capacity(labels),
            label_counts: Vec::with_capacity(labels),
            word_ngrams: options.word_ngrams,
            parts: options.parts,
            buckets: Buckets { count: options.bucket, kept: None, rows: options.bucket as usize },
        };
        for index in 0..words + labels {
            let at = reader.position();
            let text = reader.until_zero(PART)?;
            let count = reader.long(PART)?;
            let is_label = reader.flag("the type of an entry")?;
            if is_label != (index >= words) {
                let valid = "0 for the words, which are first, then 1 for the labels".into();
                return Err(FasttextError::Invalid { field: "type", got: is_label.into(), valid });
            }
            if is_label {
                let name = String::from_utf8_lossy(text);
                dictionary.labels.push(name.strip_prefix(LABEL_PREFIX).unwrap_or(&name).to_owned());
                dictionary.label_counts.push(count);
            }
            dictionary.entries.push((at as u64, text.len() as u32));
            let slot = dictionary.slot(reader.bytes(), text, Hash::of(text));
            if dictionary.table[slot] == EMPTY {
                dictionary.table[slot] = index as u32;
            }
        }
        if kept_buckets >= 0 {
            dictionary.buckets.kept_of(reader, kept_buckets)?;
        }
        Ok(dictionary)
    }

    pub(super) fn labels(&self) -> &[String] {
        &self.labels
    }

    /// How often each label occurred in the training data.
    pub(super) fn label_counts(&self) -> &[i64] {
        &self.label_counts
    }

    /// Number of rows of the input matrix that features can name.
    pub(super) fn features(&self) -> usize {
        let has_ngrams = self.parts.1 > 0 || self.word_ngrams > 1;
        self.words + if has_ngrams { self.buckets.rows } else { 0 }
    }

    fn entry<'b>(&self, bytes: &'b [u8], index: u32) -> &'b [u8] {
        let (at, length) = self.entries[index as usize];
        &bytes[at as usize..][..length as usize]
    }

    /// The place of a word in the table, or the empty one where it would be. The table has more places than entries.
    fn slot(&self, bytes: &[u8], word: &[u8], hash: Hash) -> usize {
        let mask = self.table.len() - 1;
        let mut slot = hash.0 as usize & mask;
        while self.table[slot] != EMPTY && self.entry(bytes, self.table[slot]) != word {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Calls `feature` with the row of each feature of a text: for each word its own and those of its parts, at the end
    /// those of n-grams of words. The text is one line; whatever divides words in fastText divides them here.
    pub(super) fn for_each_feature(&self, bytes: &[u8], text: &str, mut feature: impl FnMut(usize)) {
        let divides = |byte: &u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t' | 0x0b | 0x0c | 0);
        let words = text.as_bytes().split(divides).filter(|word| !word.is_empty()).chain([END_OF_LINE]);
        let mut hashes = Vec::new();
        for word in words {
            let hash = Hash::of(word);
            let known = self.table[self.slot(bytes, word, hash)];
            let is_label = match known {
                EMPTY => word.starts_with(LABEL_PREFIX.as_bytes()),
                entry => entry as usize >= self.words,
            };
            if !is_label {
                if known != EMPTY {
                    feature(known as usize);
                }
                if word != END_OF_LINE {
                    self.parts_of_word(word, &mut feature);
                }
                if self.word_ngrams > 1 {
                    hashes.push(hash.0 as i32);
                }
            }
            if word == END_OF_LINE {
                break;
            }
        }
        self.ngrams_of_words(&hashes, &mut feature);
    }

    /// The n-grams of characters of `<word>`.
    fn parts_of_word(&self, word: &[u8], feature: &mut impl FnMut(usize)) {
        let (shortest, longest) = self.parts;
        if longest == 0 {
            return;
        }
        let is_inside = |byte: &u8| byte & 0xc0 == 0x80;
        let marked: Vec<u8> = [b"<", word, b">"].concat();
        for start in (0..marked.len()).filter(|&start| !is_inside(&marked[start])) {
            let (mut hash, mut end, mut length) = (Hash::EMPTY, start, 0);
            while end < marked.len() && length < longest {
                hash = hash.with(marked[end]);
                end += 1;
                while end < marked.len() && is_inside(&marked[end]) {
                    hash = hash.with(marked[end]);
                    end += 1;
                }
                length += 1;
                let is_mark = length == 1 && (start == 0 || end == marked.len());
                if length >= shortest && !is_mark {
                    self.bucket(hash.0.into(), feature);
                }
            }
        }
    }

    fn ngrams_of_words(&self, hashes: &[i32], feature: &mut impl FnMut(usize)) {
        for (start, &first) in hashes.iter().enumerate() {
            // as in fastText, hashes are signed before they become 64 bits wide
            let mut hash = i64::from(first) as u64;
            for &next in hashes[start + 1..].iter().take(self.word_ngrams.saturating_sub(1)) {
                hash = hash.wrapping_mul(116_049_371).wrapping_add(i64::from(next) as u64);
                self.bucket(hash, feature);
            }
        }
    }

    fn bucket(&self, hash: u64, feature: &mut impl FnMut(usize)) {
        if let Some(row) = self.buckets.row(hash) {
            feature(self.words + row);
        }
    }
}

impl Buckets {
    /// Reads which buckets are left.
    fn kept_of(&mut self, reader: &mut Reader<'_>, count: i64) -> Result<(), FasttextError> {
        const PART: &str = "the kept n-grams";
        let mut kept = HashMap::new();
        self.rows = 0;
        for _ in 0..count {
            let bucket = reader.int_in(PART, 0, i32::MAX)? as u32;
            let row = reader.int_in(PART, 0, i32::MAX)? as u32;
            self.rows = self.rows.max(row as usize + 1);
            kept.insert(bucket, row);
        }
        self.kept = Some(kept);
        Ok(())
    }
}
