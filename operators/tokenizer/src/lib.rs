//! Fast tokenizers whose ids equal those of Hugging Face's `tokenizers`: byte-level BPE (GPT-2, GPT-4, Llama 3, Qwen,
//! SmolLM), SentencePiece BPE (Llama 2, Mistral, Phi-3) and BERT's WordPiece.
//!
//! ```text
//!  tokenizers::Tokenizer ─of─► FastTokenizer if it supports all components, else NotFast, which names one it does not
//!
//!  text ──added tokens──► pieces ──NFC──► words (hand-written scanner) ──► cache ──► ids
//!                                                                            └─ on a miss: BPE merges, or WordPiece
//! ```
//!
//! The ids are those of `tokenizer.encode_fast(text, false)`, including added tokens with all their flags, special
//! tokens encoded as text or as tokens, a prefix space, and `ignore_merges`. [`FastTokenizer::encode`] rejects a few
//! texts with [`Slow`]; these need `tokenizers` itself.
//!
//! Text is UTF-8, ids are u32. All threads can share one [`FastTokenizer`]. A [`Scratch`] (2.5 MB, mostly the word
//! cache) serves one thread at a time. Encoding takes time linear in the text: it reads each byte a bounded number of
//! times, except for BPE merges, which take O(n log n) in a word of n bytes. It allocates nothing once the buffers have
//! grown.

mod added;
mod bert;
mod bpe;
mod cache;
mod classes;
mod normal;
mod recognise;
mod scan;
mod sentencepiece;
mod table;

use std::sync::atomic::{AtomicU64, Ordering};

use added::{AddedTokens, Part};
use bert::Bert;
use bpe::Bpe;
use cache::Cache;
use classes::{Classes, SPACE};
use normal::Normalizer;
pub use scan::Words;
use sentencepiece::{MARK_TEXT, Prefix};
use tokenizers::Tokenizer;

/// Largest accepted run of white space, in bytes. fancy-regex gives up at a run of about a million bytes, and
/// `tokenizers` then takes the rest of the text as one word.
const LONGEST_RUN: usize = 100_000;

/// The first component of a tokenizer that [`FastTokenizer`] does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotFast {
    /// The model.
    #[error("the model is {0}; known: byte-level BPE, SentencePiece's BPE, WordPiece")]
    Model(String),
    /// The normalizer.
    #[error(
        "the normalizer is {0}; known: none or NFC with BPE, spaces to U+2581 with SentencePiece's, BertNormalizer with WordPiece"
    )]
    Normalizer(String),
    /// The pre-tokenizer.
    #[error(
        "the pre-tokenizer is {0}; known: ByteLevel, also after single digits or the pattern of GPT-4, GPT-4o, Llama 3 or Qwen 2, and BertPreTokenizer"
    )]
    PreTokenizer(String),
    /// The post-processor.
    #[error("the post-processor is {0}; known: those that only add special tokens")]
    PostProcessor(String),
    /// The tokens added to the vocabulary.
    #[error("added tokens: {0}")]
    AddedTokens(String),
    /// Truncation or padding is enabled.
    #[error("ids are cut off or filled up; known: neither truncation nor padding")]
    Length,
}

/// The reason why a text needs `tokenizers` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Slow {
    /// A run of white space so long that regular expressions give up.
    #[error("a run of white space of more than {LONGEST_RUN} bytes")]
    Run,
    /// A character that BERT's normalizer does not map on its own, such as a combining character that it reorders and
    /// keeps.
    #[error("a character that BERT's normalizer does not treat for itself")]
    Combining,
    /// The text has 2^32 bytes or more; offsets are 32 bits.
    #[error("a text of 4 GB or more")]
    Size,
}

/// A fast version of a tokenizer with only supported components.
#[derive(Debug)]
pub struct FastTokenizer {
    /// Identifies the tokenizer that filled a [`Scratch`]'s cache.
    owner: u64,
    model: Model,
    normalizer: Normalizer,
    /// Added tokens that are matched before the normalizer (`before`) and after it (`after`).
    before: Option<AddedTokens>,
    after: Option<AddedTokens>,
    name: String,
}

#[derive(Debug)]
enum Model {
    Bpe { bpe: Bpe, words: Words, prefix: Prefix },
    Bert(Box<Bert>),
}

/// Working memory of one thread: the word cache and some buffers.
#[derive(Debug)]
pub struct Scratch {
    owner: u64,
    cache: Cache,
    work: bpe::Workspace,
    /// A normalized piece.
    normal: String,
    /// A piece with a prefix space, or a normalized word.
    text: String,
}

impl Default for Scratch {
    fn default() -> Self {
        let (work, normal, text) = Default::default();
        Self { owner: 0, cache: Cache::new(), work, normal, text }
    }
}

/// Returns a number that is unique per tokenizer, from 1 on.
fn next_owner() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl FastTokenizer {
    /// Creates the fast version of a tokenizer. Takes some tenths of a second for a large vocabulary.
    ///
    /// # Errors
    /// [`NotFast`] if a component is not supported.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, NotFast> {
        recognise::recognise(tokenizer)
    }

    /// A short description for users, such as `GPT-2 pattern, byte-level BPE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends the ids of a text, without the special tokens that a post-processor would add.
    ///
    /// # Errors
    /// [`Slow`] for a text that only `tokenizers` itself can encode. Then it appends nothing.
    pub fn encode(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Slow> {
        if u32::try_from(text.len()).is_err() {
            return Err(Slow::Size);
        }
        if scratch.owner != self.owner {
            scratch.cache.clear();
            scratch.owner = self.owner;
        }
        let before = ids.len();
        let result = split(self.before.as_ref(), text, |part| match part {
            Part::Token(id) => push(id, ids),
            Part::Text(part) => self.normalized(part, part.as_ptr() == text.as_ptr(), scratch, ids),
        });
        result.inspect_err(|_| ids.truncate(before))
    }

    /// Normalizes and encodes a piece. `first`: whether the piece begins the whole text.
    fn normalized(&self, text: &str, first: bool, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Slow> {
        if self.normalizer.leaves(text) {
            return self.found(text, first, scratch, ids);
        }
        let mut normal = std::mem::take(&mut scratch.normal);
        self.normalizer.write(text, &mut normal);
        let result = self.found(&normal, first, scratch, ids);
        scratch.normal = normal;
        result
    }

    fn found(&self, whole: &str, first: bool, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Slow> {
        split(self.after.as_ref(), whole, |part| match part {
            Part::Token(id) => push(id, ids),
            Part::Text(text) => match &self.model {
                Model::Bert(bert) => wordpiece(bert, text, scratch, ids),
                Model::Bpe { bpe, words, prefix } if prefix.wanted(text, first && text.as_ptr() == whole.as_ptr()) => {
                    let mut spaced = std::mem::take(&mut scratch.text);
                    spaced.clear();
                    spaced.push(' ');
                    spaced.push_str(text);
                    let result = merge(bpe, *words, &spaced, scratch, ids);
                    scratch.text = spaced;
                    result
                }
                Model::Bpe { bpe, words, .. } => merge(bpe, *words, text, scratch, ids),
            },
        })
    }
}

impl Prefix {
    fn wanted(self, text: &str, first: bool) -> bool {
        let missing = || !text.starts_with(' ') && !text.starts_with(MARK_TEXT);
        match self {
            Self::Never => false,
            Self::Space => !text.starts_with(' '),
            Self::Missing => missing(),
            Self::MissingAtFirst => first && missing(),
            Self::Always => true,
        }
    }
}

fn push(id: u32, ids: &mut Vec<u32>) -> Result<(), Slow> {
    ids.push(id);
    Ok(())
}

/// Calls `part` with the parts of a text; never for an empty text.
fn split<'a>(
    added: Option<&AddedTokens>,
    text: &'a str,
    mut part: impl FnMut(Part<'a>) -> Result<(), Slow>,
) -> Result<(), Slow> {
    match added {
        _ if text.is_empty() => Ok(()),
        None => part(Part::Text(text)),
        Some(added) => added.split(text, part),
    }
}

fn merge(bpe: &Bpe, words: Words, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Slow> {
    let text = text.as_bytes();
    let Scratch { cache, work, .. } = scratch;
    words.each(text, |start, end| {
        let Some(place) = cache.find(text, start, end, ids) else { return Ok(()) };
        if end - start > LONGEST_RUN && !matches!(words, Words::Whole | Words::Spaces) && is_space(&text[start..end]) {
            return Err(Slow::Run);
        }
        let first = ids.len();
        bpe.encode(&text[start..end], work, ids);
        cache.keep(place, &ids[first..]);
        Ok(())
    })
}

/// Whether a word is a run of white space. Its first two characters decide: other words begin with at most one space.
fn is_space(word: &[u8]) -> bool {
    let (first, length) = Classes::get().at(word, 0);
    first & Classes::get().at(word, length).0 & SPACE != 0
}

fn wordpiece(bert: &Bert, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), Slow> {
    let Scratch { cache, text: normal, .. } = scratch;
    bert.each(text.as_bytes(), |start, end| {
        let Some(place) = cache.find(text.as_bytes(), start, end, ids) else { return };
        let first = ids.len();
        bert.encode(&text[start..end], normal, ids);
        cache.keep(place, &ids[first..]);
    })
}
