//! The tokenizer of a job, with its special tokens resolved.
//!
//! ```text
//!  tokenizer.json ─┐                                             ┌─► encode: text → ids (tokenize)
//!  folder ─────────┼─► Tokenizer, truncation and padding off ────┼─► special(role), require(role) (pack)
//!  *.gguf ─────────┘        + bos, eos, pad, mask                └─► to_json: the data set's tokenizer.json
//! ```
//!
//! A special token comes from the first of these sources that names a token of the vocabulary:
//!
//! 1. The job (`tokenizer.bos`, …). A text that is not one token of the vocabulary is an error.
//! 2. In a folder, `tokenizer_config.json` and `special_tokens_map.json` (`bos_token`, else `cls_token`; `eos_token`,
//!    else `sep_token`), then `generation_config.json` and `config.json` (`bos_token_id`, …). In a GGUF file, its
//!    metadata.
//! 3. The teacher's ids.
//! 4. Well-known names: `<s>`, `</s>`, `[CLS]`, `[SEP]`, `<|endoftext|>`, `[PAD]`, `[MASK]`, …
//!
//! The padding token falls back to eos. It is never taken from `encode("")[0]`, which would be `[CLS]` as BERT's eos.
//!
//! With `tokenizer.special_tokens: text`, text that spells a special token stays text: its characters are encoded, as
//! by `encode_special_tokens` of Hugging Face's tokenizers and tiktoken's `encode_ordinary`. A token that is added to
//! the vocabulary and has a role counts as special. With `parse`, such text becomes that token, as by default in
//! Hugging Face's tokenizers. With both, added tokens that are not special are found in the text. If the tokenizer's
//! model itself produces a special token from text, encoding that text fails.
//!
//! [`FastTokenizer`] encodes the text if it supports every part of the tokenizer; otherwise `tokenizers` does. The ids
//! are the same, and [`Vocabulary::encoder_description`] tells which one is used. The fast one rejects single texts,
//! such as a megabyte of spaces; `tokenizers` encodes those.
//!
//! Loading refuses a `tokenizer.json` with a key that would be ignored or that makes ids random; `json_keys` has the
//! table.
//!
//! Ids are u32; `vocab_size` is the largest id + 1, added tokens included.

mod byte_level;
mod chat_template;
mod json_keys;
mod specials;
mod teacher_vocabulary;

pub use teacher_vocabulary::TeacherVocabulary;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec;
use stillhouse_schemas::spec::SpecialTokens;
use stillhouse_tokenizer::{FastTokenizer, Scratch, UnsupportedComponent};
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::processors::PostProcessorWrapper;

/// The purpose of a special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Begins a sequence.
    Bos,
    /// Ends a document.
    Eos,
    /// Pads a row.
    Pad,
    /// Replaces a masked token in training.
    Mask,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 4] = [Role::Bos, Role::Eos, Role::Pad, Role::Mask];

    /// Name in the job file, after `tokenizer.`, and in the manifest.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bos => "bos",
            Self::Eos => "eos",
            Self::Pad => "pad",
            Self::Mask => "mask",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Special tokens from the teacher's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TeacherSpecials {
    /// Begins a sequence.
    pub bos: Option<u32>,
    /// Ends a document.
    pub eos: Option<u32>,
}

/// Errors of tokenizers. Only retrying [`VocabularyError::Io`] may help.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// A file could not be read.
    #[error("tokenizer.path: cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A file does not have the format that its name promises.
    #[error("tokenizer.path: {path}: {message}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Error from the reader.
        message: String,
    },
    /// The tokenizer inside a GGUF file cannot be built.
    #[error("tokenizer.path: {0}")]
    Gguf(#[from] stillhouse_teacher::TeacherError),
    /// The job names a special token that is not in the vocabulary.
    #[error("tokenizer.{role}: got {got:?}, which is not one token of {tokenizer}; valid: {valid}")]
    NotAToken {
        /// Role of the token.
        role: Role,
        /// The text in the job file.
        got: String,
        /// Path of the tokenizer in the job file.
        tokenizer: String,
        /// Special tokens of the vocabulary.
        valid: String,
    },
    /// A special token is required, but no source names one.
    #[error("tokenizer.{role}: is required here: {tokenizer} names no {role} token; valid: {valid}")]
    NoSpecial {
        /// Role of the token.
        role: Role,
        /// Path of the tokenizer in the job file.
        tokenizer: String,
        /// Special tokens of the vocabulary.
        valid: String,
    },
    /// A text could not be encoded.
    #[error("{tokenizer} cannot encode a text: {message}")]
    Encode {
        /// Path of the tokenizer in the job file.
        tokenizer: String,
        /// Error from the tokenizer.
        message: String,
    },
    /// A text became a special token, although `special_tokens` is `text`.
    #[error(
        "{tokenizer}: its model produces the special token {token:?} (id {id}) from ordinary text, so the two cannot be told apart; valid: text without it, or tokenizer.special_tokens: parse"
    )]
    SpecialOfText {
        /// Path of the tokenizer in the job file.
        tokenizer: String,
        /// The token.
        token: String,
        /// Its id.
        id: u32,
    },
    /// The tokenizer cannot be written as `tokenizer.json`.
    #[error("{tokenizer} cannot be written as tokenizer.json: {message}")]
    Write {
        /// Path of the tokenizer in the job file.
        tokenizer: String,
        /// Error from the tokenizer.
        message: String,
    },
}

/// The tokens of a text, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedText {
    /// Ids.
    pub ids: Vec<u32>,
    /// For each token, the first byte of the text that it stands for, and the byte after the last.
    pub offsets: Vec<(usize, usize)>,
}

/// A tokenizer with its special tokens.
#[derive(Debug)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// Tokenizer to encode with, if it differs from `tokenizer`.
    encoder: Option<Box<Tokenizer>>,
    /// The fast version of the encoder; built at first use.
    fast: OnceLock<Result<FastTokenizer, UnsupportedComponent>>,
    /// Free scratch memory for threads that encode.
    scratches: Mutex<Vec<Scratch>>,
    /// The encoder without its post-processor, which may trim spaces off the offsets of tokens; built at first use.
    offset_encoder: OnceLock<Box<Tokenizer>>,
    /// For each id, whether encoding must not produce it.
    is_forbidden: Vec<bool>,
    special_tokens: SpecialTokens,
    source: String,
    specials: BTreeMap<Role, SpecialToken>,
    /// Jinja source.
    chat_template: Option<String>,
    vocab_size: usize,
    byte_level: bool,
}

impl Vocabulary {
    /// Loads a `tokenizer.json`, a folder that holds one, or the tokenizer inside a `.gguf`.
    ///
    /// `source` is the path as the job names it, for messages and the manifest.
    ///
    /// # Errors
    /// Fails if a file cannot be read or parsed, or if the job names a special token that is not in the vocabulary.
    pub fn load(
        path: &Path,
        source: &str,
        spec: &spec::Tokenizer,
        teacher: Option<TeacherSpecials>,
    ) -> Result<Self, VocabularyError> {
        let mut hints = specials::Hints::default();
        let mut chat_template = None;
        let tokenizer = if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
            let gguf = stillhouse_teacher::gguf_tokenizer(path)?;
            hints.add_id(Role::Bos, gguf.bos_token_id);
            hints.add_id(Role::Eos, gguf.eos_token_id);
            chat_template = gguf.chat_template;
            gguf.tokenizer
        } else if path.is_dir() {
            hints.add_folder(path)?;
            chat_template = chat_template::of_folder(path)?;
            read(&path.join("tokenizer.json"))?
        } else {
            read(path)?
        };
        if let Some(teacher) = teacher {
            hints.add_id(Role::Bos, teacher.bos);
            hints.add_id(Role::Eos, teacher.eos);
        }
        Ok(Self { chat_template, ..Self::new(tokenizer, source, spec, &hints)? })
    }

    /// Wraps a tokenizer that is already in memory, such as that of a data set.
    ///
    /// # Errors
    /// Fails if truncation cannot be disabled.
    pub fn from_tokenizer(tokenizer: Tokenizer, source: &str) -> Result<Self, VocabularyError> {
        Self::new(tokenizer, source, &spec::Tokenizer::default(), &specials::Hints::default())
    }

    /// Creates the vocabulary for rows of numbers: `n` tokens, each named by its number. It encodes no text. It lets
    /// viewers of ids, and readers of `tokenizer.json`, look up the name of a token.
    ///
    /// # Errors
    /// Fails if it cannot be built, which is a bug.
    pub fn for_numbers(n: usize, source: &str) -> Result<Self, VocabularyError> {
        let names: serde_json::Map<String, serde_json::Value> = (0..n).map(|id| (id.to_string(), id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": names, "unk_token": "?"},
        });
        let tokenizer = Tokenizer::from_bytes(json.to_string())
            .map_err(|e| VocabularyError::Damaged { path: source.into(), message: e.to_string() })?;
        Self::from_tokenizer(tokenizer, source)
    }

    fn new(
        mut tokenizer: Tokenizer,
        source: &str,
        spec: &spec::Tokenizer,
        hints: &specials::Hints,
    ) -> Result<Self, VocabularyError> {
        tokenizer.with_truncation(None).map_err(|e| VocabularyError::Damaged {
            path: source.into(),
            message: format!("truncation cannot be switched off: {e}"),
        })?;
        tokenizer.with_padding(None);
        let vocab_size = tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let specials = specials::resolve(&tokenizer, source, spec, hints)?;
        let byte_level = tokenizer.get_decoder().is_some_and(has_byte_level);
        let (mut encoder, mut is_forbidden) = (None, Vec::new());
        if spec.special_tokens == SpecialTokens::Text {
            tokenizer.set_encode_special_tokens(true);
            encoder = mark_roles_special(&tokenizer, specials.values())
                .map_err(|e| VocabularyError::Damaged { path: source.into(), message: e.to_string() })?;
            is_forbidden = forbidden_ids(encoder.as_deref().unwrap_or(&tokenizer), &specials, vocab_size);
        }
        let source = source.to_owned();
        let special_tokens = spec.special_tokens;
        let (fast, scratches) = Default::default();
        Ok(Self {
            tokenizer,
            encoder,
            offset_encoder: OnceLock::new(),
            fast,
            scratches,
            is_forbidden,
            special_tokens,
            source,
            specials,
            chat_template: None,
            vocab_size,
            byte_level,
        })
    }

    /// Path of the tokenizer in the job file.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Largest id + 1, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the special token with this role, if known.
    pub fn special(&self, role: Role) -> Option<&SpecialToken> {
        self.specials.get(&role)
    }

    /// Returns the id of the special token with this role.
    ///
    /// # Errors
    /// Fails if none is known; the message names the key of the job file to set.
    pub fn require(&self, role: Role) -> Result<u32, VocabularyError> {
        self.special(role).map(|token| token.id).ok_or_else(|| VocabularyError::NoSpecial {
            role,
            tokenizer: self.source.clone(),
            valid: specials::choices(&self.tokenizer),
        })
    }

    /// Returns the id of a role if text that spells the token becomes this id: for added tokens, with `special_tokens:
    /// parse`.
    pub fn parsed(&self, role: Role) -> Option<u32> {
        let token = self.special(role).filter(|_| self.special_tokens == SpecialTokens::Parse)?;
        is_added(&self.tokenizer, &token.token).then_some(token.id)
    }

    /// Returns the special tokens by the name of their role, as in the manifest.
    pub fn special_tokens(&self) -> BTreeMap<String, SpecialToken> {
        self.specials.iter().map(|(role, token)| (role.name().to_owned(), token.clone())).collect()
    }

    /// The Jinja source of the chat template that belongs to the tokenizer, if it has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Returns the ids of a text as [`Vocabulary::encode`] does, and for each the bytes of the text that it stands for.
    /// `tokenizers` encodes it, at a few megabytes per second.
    ///
    /// # Errors
    /// Fails if the tokenizer does.
    pub fn encode_with_offsets(&self, text: &str) -> Result<EncodedText, VocabularyError> {
        let encoder = self.offset_encoder.get_or_init(|| {
            let mut encoder = self.encoder().clone();
            encoder.with_post_processor(None::<PostProcessorWrapper>);
            Box::new(encoder)
        });
        let encoding = encoder
            .encode(text, false)
            .map_err(|e| VocabularyError::Encode { tokenizer: self.source.clone(), message: e.to_string() })?;
        Ok(EncodedText { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    /// Returns the ids of a text, without special tokens, truncation or padding.
    ///
    /// # Errors
    /// Fails if the tokenizer does, for example on a character outside its vocabulary when it has no unknown token.
    /// Also fails if it makes a special token of text although `special_tokens` is `text`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, VocabularyError> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text: see [`Vocabulary::encode`].
    ///
    /// # Errors
    /// As [`Vocabulary::encode`]; the appended ids are then meaningless.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), VocabularyError> {
        let first = ids.len();
        if !self.encode_fast(text, ids) {
            let encoding = self
                .encoder()
                .encode_fast(text, false)
                .map_err(|e| VocabularyError::Encode { tokenizer: self.source.clone(), message: e.to_string() })?;
            ids.extend_from_slice(encoding.get_ids());
        }
        match ids[first..].iter().find(|&&id| self.is_forbidden.get(id as usize) == Some(&true)) {
            Some(&id) => {
                let token = self.tokenizer.id_to_token(id).unwrap_or_default();
                Err(VocabularyError::SpecialOfText { tokenizer: self.source.clone(), token, id })
            }
            None => Ok(()),
        }
    }

    /// Appends the ids of a text and returns true, or returns false if only `tokenizers` can encode it.
    fn encode_fast(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let Ok(fast) = self.fast() else { return false };
        // threads reuse the scratch memory of others, so there is one per thread that encodes at the same time
        let lock = || self.scratches.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = lock().pop();
        let mut scratch = taken.unwrap_or_default();
        let encoded = fast.encode(text, &mut scratch, ids).is_ok();
        lock().push(scratch);
        encoded
    }

    fn encoder(&self) -> &Tokenizer {
        self.encoder.as_deref().unwrap_or(&self.tokenizer)
    }

    fn fast(&self) -> &Result<FastTokenizer, UnsupportedComponent> {
        self.fast.get_or_init(|| FastTokenizer::from_tokenizer(self.encoder()))
    }

    /// Describes how text is encoded: `GPT-2 pattern, byte-level BPE (fast)`, or `through tokenizers: ` and the reason.
    pub fn encoder_description(&self) -> String {
        match self.fast() {
            Ok(fast) => format!("{} (fast)", fast.name()),
            Err(reason) => format!("through tokenizers: {reason}"),
        }
    }

    /// Returns the text of ids, special tokens included, as the tokenizer's decoder writes it.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, false).unwrap_or_else(|_| ids.iter().map(|&id| self.token_text(id)).collect())
    }

    /// Returns one token for display. Byte-level tokens appear as the text that they encode; control characters and
    /// bytes that are not a complete character are escaped (`\n`, `\xe2`). An id without a token appears as `<id 7>`.
    pub fn token_text(&self, id: u32) -> String {
        let Some(token) = self.tokenizer.id_to_token(id) else {
            return format!("<id {id}>");
        };
        let bytes = if self.byte_level { byte_level::decode_token(&token) } else { None };
        byte_level::escape(bytes.as_deref().unwrap_or(token.as_bytes()))
    }

    /// Serializes the tokenizer as a `tokenizer.json`, without truncation and padding. The same tokenizer always gives
    /// the same bytes.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot be serialized.
    pub fn to_json(&self) -> Result<Vec<u8>, VocabularyError> {
        let json = self
            .tokenizer
            .to_string(true)
            .map_err(|e| VocabularyError::Write { tokenizer: self.source.clone(), message: e.to_string() })?;
        Ok((json + "\n").into_bytes())
    }
}

fn is_added(tokenizer: &Tokenizer, token: &str) -> bool {
    tokenizer.get_added_vocabulary().get_vocab().contains_key(token)
}

/// Returns a tokenizer for encoding if the token of a role is an added token that is not marked as special.
fn mark_roles_special<'a>(
    tokenizer: &Tokenizer,
    roles: impl Iterator<Item = &'a SpecialToken>,
) -> tokenizers::Result<Option<Box<Tokenizer>>> {
    let added = tokenizer.get_added_tokens_decoder();
    let plain: Vec<_> = roles
        .filter_map(|role| added.get(&role.id).filter(|token| token.content == role.token && !token.special))
        .map(|token| token.clone().special(true))
        .collect();
    if plain.is_empty() {
        return Ok(None);
    }
    let mut encoder = tokenizer.clone();
    encoder.add_special_tokens(plain)?;
    Ok(Some(Box::new(encoder)))
}

/// For each id, whether it is a special token that text must not become. The unknown token may occur, unless it is bos
/// or eos.
fn forbidden_ids(encoder: &Tokenizer, roles: &BTreeMap<Role, SpecialToken>, vocab_size: usize) -> Vec<bool> {
    let mut is_forbidden = vec![false; vocab_size];
    let unknown = unknown_token(encoder);
    for (id, token) in encoder.get_added_tokens_decoder() {
        let bounds = [Role::Bos, Role::Eos].iter().any(|role| roles.get(role).is_some_and(|t| t.id == id));
        if let Some(is_forbidden) = is_forbidden.get_mut(id as usize) {
            *is_forbidden = token.special && (bounds || unknown.as_ref() != Some(&token.content));
        }
    }
    is_forbidden
}

/// Returns the token that a model emits for text outside its vocabulary.
fn unknown_token(tokenizer: &Tokenizer) -> Option<String> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) => model.unk_token.clone(),
        ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
        ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
        ModelWrapper::Unigram(model) => {
            // the model does not expose the id
            let id = serde_json::to_value(model).ok()?.get("unk_id")?.as_u64()?;
            tokenizer.id_to_token(u32::try_from(id).ok()?)
        }
    }
}

fn read(path: &Path) -> Result<Tokenizer, VocabularyError> {
    let bytes = std::fs::read(path).map_err(|source| VocabularyError::Io { path: path.into(), source })?;
    let damaged = |message: String| VocabularyError::Damaged { path: path.into(), message };
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|e| damaged(parse_error_message(e.to_string())))?;
    // The library renumbers tokens that its model does not have consecutively and ignores the ids in the file.
    let written: AddedTokensJson =
        serde_json::from_slice(&bytes).map_err(|e| damaged(parse_error_message(e.to_string())))?;
    let keys: json_keys::TokenizerJson =
        serde_json::from_slice(&bytes).map_err(|e| damaged(parse_error_message(e.to_string())))?;
    if let Some(refusal_reason) = keys.refusal_reason(&tokenizer) {
        return Err(damaged(refusal_reason));
    }
    for token in written.added_tokens {
        let id = tokenizer.token_to_id(&token.content);
        if id != Some(token.id) {
            let got = id.map_or_else(|| "none".into(), |id| id.to_string());
            return Err(damaged(format!(
                "the added token {:?} has the id {}, and {got} when the file is loaded; valid: ids of added tokens that follow those of the \
                 model without a gap",
                token.content, token.id
            )));
        }
    }
    Ok(tokenizer)
}

/// Returns the parser's message in a form that users understand.
fn parse_error_message(said: String) -> String {
    let known = "valid: a file of Hugging Face's tokenizers, with a model BPE, Unigram, WordPiece or WordLevel";
    match said.contains("untagged enum") {
        true => format!("is not a tokenizer.json: it has a part of an unknown type; {known}"),
        false => format!("is not a tokenizer.json: {said}"),
    }
}

/// The added tokens of a `tokenizer.json`.
#[derive(serde::Deserialize)]
struct AddedTokensJson {
    #[serde(default)]
    added_tokens: Vec<AddedTokenJson>,
}

#[derive(serde::Deserialize)]
struct AddedTokenJson {
    id: u32,
    content: String,
}

fn has_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(all) => all.get_decoders().iter().any(has_byte_level),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
