//! fastText classifiers (Joulin et al. 2017, arXiv:1607.01759), as `fasttext supervised` and `fasttext quantize` write them.
//!
//! ```text
//!   bytes of the file ─► reader: options, dictionary ─► matrices, used where they lie in the bytes
//!   text ─► features: words, their parts, n-grams of words ─► mean of their rows (hidden) ─► loss ─► score of each label
//! ```
//!
//! Scores are those of fastText 0.9.3: a probability plus 10^-5, with which fastText keeps its logarithms finite. Sums are
//! taken in a fixed order, so a score does not depend on the CPU. fastText's own differ in the last bits where its
//! compiler fuses multiplication and addition.
//!
//! A model from a stranger may hold anything: every size is checked against the bytes that are there before it is used.

mod dictionary;
mod loss;
mod matrix;
mod reader;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use dictionary::Dictionary;
use loss::Loss;
use matrix::Matrix;
use reader::Reader;

/// What fastText writes before the name of a label.
const LABEL_PREFIX: &str = "__label__";

const MAGIC: i32 = 793_712_314;
/// The newest version of the format. Version 11 has no parts of words in classifiers.
const NEWEST_VERSION: i32 = 12;
/// Longest n-grams of letters and of words. fastText's default is 6 letters; the work for a text grows with it.
const MAX_NGRAM: i32 = 64;

/// A classifier. Clones share it.
#[derive(Clone)]
pub struct FasttextModel(Arc<Model>);

struct Model {
    bytes: Arc<[u8]>,
    dictionary: Dictionary,
    input: Matrix,
    output: Matrix,
    loss: Loss,
}

/// Why bytes are no classifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FasttextError {
    /// Another kind of file.
    #[error("is no fastText model; valid: a file that `fasttext supervised` or `fasttext quantize` wrote (.bin, .ftz)")]
    NotAModel,
    /// A model of word vectors.
    #[error("has word vectors and no labels; valid: a classifier, as `fasttext supervised` writes it")]
    NotAClassifier,
    /// The file ends early.
    #[error("ends within {part}, after {bytes} bytes: a part of the file is missing")]
    Truncated {
        /// What is being read.
        part: &'static str,
        /// Size of the file.
        bytes: usize,
    },
    /// A value that no model has.
    #[error("is damaged: {field} is {got}; valid: {valid}")]
    Invalid {
        /// The value's name in fastText.
        field: &'static str,
        /// The value.
        got: i64,
        /// What is valid.
        valid: String,
    },
}

impl FasttextModel {
    /// Reads a model from the bytes of its file, which it keeps. Memory: the bytes, and 20 to 30 bytes for each word.
    ///
    /// # Errors
    /// If the bytes are no classifier.
    pub fn new(bytes: Arc<[u8]>) -> Result<Self, FasttextError> {
        let mut reader = Reader::new(&bytes);
        if reader.int("the header") != Ok(MAGIC) {
            return Err(FasttextError::NotAModel);
        }
        let version = reader.int_in("version", 11, NEWEST_VERSION)?;
        let options = Options::read(&mut reader, version)?;
        let dictionary = Dictionary::read(&mut reader, &options)?;
        let is_quantized = reader.flag("the kind of the input matrix")?;
        let input = Matrix::read(&mut reader, is_quantized, "the input matrix")?;
        let is_output_quantized = reader.flag("the kind of the output matrix")?;
        let output = Matrix::read(&mut reader, is_quantized && is_output_quantized, "the output matrix")?;
        reader.end()?;
        input.check_shape("input", dictionary.features(), options.dim)?;
        output.check_shape("output", dictionary.labels().len(), options.dim)?;
        let loss = Loss::new(options.loss, dictionary.label_counts())?;
        Ok(Self(Arc::new(Model { bytes: Arc::clone(&bytes), dictionary, input, output, loss })))
    }

    /// The names of the labels, without fastText's `__label__`.
    pub fn labels(&self) -> &[String] {
        self.0.dictionary.labels()
    }

    /// Returns the scores of labels, which are given by their indices. `None` if the text has no word that the model
    /// knows. Line breaks in the text are spaces, as fastText judges one line.
    pub fn scores(&self, text: &str, labels: &[usize]) -> Option<Vec<f32>> {
        let Model { bytes, dictionary, input, output, loss } = &*self.0;
        let mut hidden = vec![0.0; input.columns()];
        let mut count = 0_u64;
        dictionary.for_each_feature(bytes, text, |row| {
            input.add_row(bytes, row, &mut hidden);
            count += 1;
        });
        if count == 0 {
            return None;
        }
        let share = (1.0 / count as f64) as f32;
        hidden.iter_mut().for_each(|value| *value *= share);
        Some(loss.scores(&|row| output.dot_row(bytes, row, &hidden), labels))
    }
}

impl PartialEq for FasttextModel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.bytes == other.0.bytes
    }
}

impl fmt::Debug for FasttextModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FasttextModel").field("labels", &self.labels().len()).finish_non_exhaustive()
    }
}

/// What the scores depend on of the options that the model was trained with.
struct Options {
    dim: usize,
    word_ngrams: usize,
    loss: i32,
    bucket: u32,
    /// Shortest and longest part of a word, in characters.
    parts: (usize, usize),
}

impl Options {
    fn read(reader: &mut Reader<'_>, version: i32) -> Result<Self, FasttextError> {
        const PART: &str = "the options";
        let dim = reader.int_in("dim", 1, 1 << 16)? as usize;
        for _unused in ["ws", "epoch", "minCount", "neg"] {
            reader.int(PART)?;
        }
        let word_ngrams = reader.int_in("wordNgrams", 0, MAX_NGRAM)? as usize;
        let loss = reader.int_in("loss", 1, 4)?;
        if reader.int_in("model", 1, 3)? != 3 {
            return Err(FasttextError::NotAClassifier);
        }
        let bucket = reader.int_in("bucket", 0, i32::MAX)? as u32;
        let shortest = reader.int_in("minn", 0, MAX_NGRAM)? as usize;
        let longest = reader.int_in("maxn", 0, MAX_NGRAM)? as usize;
        reader.int(PART)?; // lrUpdateRate
        reader.take(8, PART)?; // t
        let longest = if version == 11 { 0 } else { longest };
        if bucket == 0 && (longest > 0 || word_ngrams > 1) {
            return Err(FasttextError::Invalid { field: "bucket", got: 0, valid: "at least 1, with n-grams".into() });
        }
        Ok(Self { dim, word_ngrams, loss, bucket, parts: (shortest, longest) })
    }
}
