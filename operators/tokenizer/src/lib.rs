//! Fast tokenizers whose ids equal those of Hugging Face's `tokenizers`: byte-level BPE (GPT-2, GPT-4, Llama 3, Qwen,
//! SmolLM), SentencePiece BPE (Llama 2, Mistral, Phi-3) and BERT's WordPiece.
//!
//! ```text
//!  tokenizers::Tokenizer ─from_tokenizer─► FastTokenizer, or UnsupportedComponent, which names one that it lacks
//!
//!  text ──added tokens──► pieces ──NFC──► words (hand-written scanner) ──► cache ──► ids
//!                                                                            └─ on a miss: BPE merges, or WordPiece
//! ```
//!
//! The ids are those of `tokenizer.encode_fast(text, false)`, including added tokens with all their flags, special
//! tokens encoded as text or as tokens, a prefix space, and `ignore_merges`. [`FastTokenizer::encode`] rejects a few
//! texts with [`NeedsFallback`]; these need `tokenizers` itself.
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
mod normalizer;
mod recognise;
mod sentencepiece;
mod table;
mod word_splitter;

use std::sync::atomic::{AtomicU64, Ordering};

use added::{AddedTokens, Part};
use bert::Bert;
use bpe::Bpe;
use cache::WordCache;
use classes::{Classes, SPACE};
use normalizer::Normalizer;
use sentencepiece::{SPACE_MARK_STR, SpacePrefix};
use tokenizers::Tokenizer;
pub use word_splitter::WordSplitter;

/// Largest accepted run of white space, in bytes. fancy-regex gives up at a run of about a million bytes, and
/// `tokenizers` then takes the rest of the text as one word.
const MAX_WHITESPACE_BYTES: usize = 100_000;

/// The first component of a tokenizer that [`FastTokenizer`] does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedComponent {
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
    #[error("it truncates or pads; known: neither")]
    Length,
}

/// The reason why a text needs `tokenizers` itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NeedsFallback {
    /// A run of white space so long that regular expressions give up.
    #[error("a run of white space of more than {MAX_WHITESPACE_BYTES} bytes")]
    LongWhitespace,
    /// A character that BERT's normalizer does not map on its own, such as a combining character that it reorders and
    /// keeps.
    #[error("a character whose normalization by BertNormalizer depends on its neighbours")]
    UnsupportedCharacter,
    /// The text has 2^32 bytes or more; offsets are 32 bits.
    #[error("a text of 4 GB or more")]
    TooLarge,
}

/// A fast version of a tokenizer with only supported components.
#[derive(Debug)]
pub struct FastTokenizer {
    /// Identifies the tokenizer that filled a [`Scratch`]'s cache.
    tokenizer_id: u64,
    model: Model,
    normalizer: Normalizer,
    /// Added tokens that are matched before the normalizer, and after it.
    before_normalizer: Option<AddedTokens>,
    after_normalizer: Option<AddedTokens>,
    name: String,
}

#[derive(Debug)]
enum Model {
    Bpe { bpe: Bpe, splitter: WordSplitter, prefix: SpacePrefix },
    Bert(Box<Bert>),
}

/// Working memory of one thread: the word cache and some buffers.
#[derive(Debug)]
pub struct Scratch {
    tokenizer_id: u64,
    cache: WordCache,
    workspace: bpe::Workspace,
    /// A normalized piece.
    normal: String,
    /// A piece with a prefix space, or a normalized word.
    text: String,
}

impl Default for Scratch {
    fn default() -> Self {
        let (workspace, normal, text) = Default::default();
        Self { tokenizer_id: 0, cache: WordCache::new(), workspace, normal, text }
    }
}

/// Returns a number that is unique per tokenizer, from 1 on.
fn next_tokenizer_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl FastTokenizer {
    /// Creates the fast version of a tokenizer. Takes some tenths of a second for a large vocabulary.
    ///
    /// # Errors
    /// [`UnsupportedComponent`] if a component is not supported.
    pub fn from_tokenizer(tokenizer: &Tokenizer) -> Result<Self, UnsupportedComponent> {
        recognise::recognise(tokenizer)
    }

    /// A short description for users, such as `GPT-2 pattern, byte-level BPE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends the ids of a text, without the special tokens that a post-processor would add.
    ///
    /// # Errors
    /// [`NeedsFallback`] for a text that only `tokenizers` itself can encode. Then it appends nothing.
    pub fn encode(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), NeedsFallback> {
        if u32::try_from(text.len()).is_err() {
            return Err(NeedsFallback::TooLarge);
        }
        if scratch.tokenizer_id != self.tokenizer_id {
            scratch.cache.clear();
            scratch.tokenizer_id = self.tokenizer_id;
        }
        let before = ids.len();
        let result = split_at_added_tokens(self.before_normalizer.as_ref(), text, |part| match part {
            Part::Token(id) => push(id, ids),
            Part::Text(part) => self.encode_piece(part, part.as_ptr() == text.as_ptr(), scratch, ids),
        });
        result.inspect_err(|_| ids.truncate(before))
    }

    /// Normalizes and encodes a piece. `first`: whether the piece begins the whole text.
    fn encode_piece(
        &self,
        text: &str,
        first: bool,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), NeedsFallback> {
        if self.normalizer.leaves_unchanged(text) {
            return self.encode_normalized(text, first, scratch, ids);
        }
        let mut normal = std::mem::take(&mut scratch.normal);
        self.normalizer.normalize_into(text, &mut normal);
        let result = self.encode_normalized(&normal, first, scratch, ids);
        scratch.normal = normal;
        result
    }

    fn encode_normalized(
        &self,
        whole: &str,
        first: bool,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), NeedsFallback> {
        split_at_added_tokens(self.after_normalizer.as_ref(), whole, |part| match part {
            Part::Token(id) => push(id, ids),
            Part::Text(text) => match &self.model {
                Model::Bert(bert) => encode_wordpiece(bert, text, scratch, ids),
                Model::Bpe { bpe, splitter, prefix }
                    if prefix.applies_to(text, first && text.as_ptr() == whole.as_ptr()) =>
                {
                    let mut spaced = std::mem::take(&mut scratch.text);
                    spaced.clear();
                    spaced.push(' ');
                    spaced.push_str(text);
                    let result = encode_bpe(bpe, *splitter, &spaced, scratch, ids);
                    scratch.text = spaced;
                    result
                }
                Model::Bpe { bpe, splitter, .. } => encode_bpe(bpe, *splitter, text, scratch, ids),
            },
        })
    }
}

impl SpacePrefix {
    fn applies_to(self, text: &str, first: bool) -> bool {
        let missing = || !text.starts_with(' ') && !text.starts_with(SPACE_MARK_STR);
        match self {
            Self::Never => false,
            Self::UnlessSpace => !text.starts_with(' '),
            Self::UnlessSpaceOrMark => missing(),
            Self::UnlessSpaceOrMarkAtStart => first && missing(),
            Self::Always => true,
        }
    }
}

fn push(id: u32, ids: &mut Vec<u32>) -> Result<(), NeedsFallback> {
    ids.push(id);
    Ok(())
}

/// Calls `part` with the parts of a text; never for an empty text.
fn split_at_added_tokens<'a>(
    added: Option<&AddedTokens>,
    text: &'a str,
    mut part: impl FnMut(Part<'a>) -> Result<(), NeedsFallback>,
) -> Result<(), NeedsFallback> {
    match added {
        _ if text.is_empty() => Ok(()),
        None => part(Part::Text(text)),
        Some(added) => added.split(text, part),
    }
}

fn encode_bpe(
    bpe: &Bpe,
    splitter: WordSplitter,
    text: &str,
    scratch: &mut Scratch,
    ids: &mut Vec<u32>,
) -> Result<(), NeedsFallback> {
    let text = text.as_bytes();
    let Scratch { cache, workspace, .. } = scratch;
    splitter.for_each_word(text, |start, end| {
        let Some(key) = cache.lookup(text, start, end, ids) else { return Ok(()) };
        if end - start > MAX_WHITESPACE_BYTES
            && !matches!(splitter, WordSplitter::Whole | WordSplitter::Spaces)
            && is_whitespace_run(&text[start..end])
        {
            return Err(NeedsFallback::LongWhitespace);
        }
        let first = ids.len();
        bpe.encode(&text[start..end], workspace, ids);
        cache.insert(key, &ids[first..]);
        Ok(())
    })
}

/// Whether a word is a run of white space. Its first two characters decide: other words begin with at most one space.
fn is_whitespace_run(word: &[u8]) -> bool {
    let (first, length) = Classes::get().at(word, 0);
    first & Classes::get().at(word, length).0 & SPACE != 0
}

fn encode_wordpiece(bert: &Bert, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) -> Result<(), NeedsFallback> {
    let Scratch { cache, text: normal, .. } = scratch;
    bert.for_each_word(text.as_bytes(), |start, end| {
        let Some(key) = cache.lookup(text.as_bytes(), start, end, ids) else { return };
        let first = ids.len();
        bert.encode(&text[start..end], normal, ids);
        cache.insert(key, &ids[first..]);
    })
}
