//! The tokenizer of a job, with its special tokens resolved by name.
//!
//! ```text
//!  tokenizer.json ─┐                                             ┌─► encode: text → ids (tokenize)
//!  folder ─────────┼─► Tokenizer, truncation and padding off ────┼─► special(role), require(role) (pack)
//!  *.gguf ─────────┘        + bos, eos, pad, mask                └─► to_json: the data set's tokenizer.json
//! ```
//!
//! A special token comes from the first of these that names one that the vocabulary holds:
//!
//! 1. the job (`tokenizer.bos`, …), where a text that is not one token is an error;
//! 2. in a folder, `tokenizer_config.json` and `special_tokens_map.json` (`bos_token`, else `cls_token`; `eos_token`, else `sep_token`),
//!    then `generation_config.json` and `config.json` (`bos_token_id`, …); in a GGUF its metadata;
//! 3. the teacher's ids;
//! 4. well-known names: `<s>`, `</s>`, `[CLS]`, `[SEP]`, `<|endoftext|>`, `[PAD]`, `[MASK]`, …
//!
//! The padding token falls back to eos. It is never `encode("")[0]`: that gives `[CLS]` as BERT's eos.
//!
//! Text that spells a special token is text (`tokenizer.special_tokens: text`): its characters are encoded, as `encode_special_tokens` of
//! Hugging Face's tokenizers and tiktoken's `encode_ordinary` do, and a token that is added to the vocabulary and has a role counts as
//! special. With `parse` it becomes that token, as in Hugging Face's tokenizers by default. Added tokens that are not special are found in
//! the text both ways. A tokenizer whose model itself makes a special token of text is refused at that text, not believed.
//!
//! Text is encoded by [`FastTokenizer`] where it knows every part of the tokenizer, else by `tokenizers` itself; the ids are the same, and
//! [`Vocabulary::way`] says which. The fast one hands single texts back, such as a megabyte of spaces, and `tokenizers` encodes those.
//!
//! A key of a `tokenizer.json` that would be ignored, or decides ids at random, is refused; `honoured` has the table.
//!
//! Ids are u32; `vocab_size` is the largest id + 1, added tokens included.

mod byte_level;
mod fit;
mod honoured;
mod specials;

pub use fit::TeacherVocabulary;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec;
use stillhouse_schemas::spec::SpecialTokens;
use stillhouse_tokenizer::{FastTokenizer, NotFast, Scratch};
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;

/// What a special token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Begins a sequence.
    Bos,
    /// Ends a document.
    Eos,
    /// Fills a row up.
    Pad,
    /// Stands for a masked token in training.
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

/// Special tokens that the teacher's configuration names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TeacherSpecials {
    /// Begins a sequence.
    pub bos: Option<u32>,
    /// Ends a document.
    pub eos: Option<u32>,
}

/// What can go wrong with a tokenizer. Only [`VocabularyError::Io`] may succeed when tried again.
#[derive(Debug, thiserror::Error)]
pub enum VocabularyError {
    /// A file could not be read.
    #[error("tokenizer.path: cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("tokenizer.path: {path}: {message}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        message: String,
    },
    /// The tokenizer inside a GGUF file cannot be built.
    #[error("tokenizer.path: {0}")]
    Gguf(#[from] stillhouse_teacher::TeacherError),
    /// The job names a special token that the vocabulary does not hold.
    #[error("tokenizer.{role}: got {got:?}, which is not one token of {tokenizer}; valid: {valid}")]
    NotAToken {
        /// Which token.
        role: Role,
        /// As the job has it.
        got: String,
        /// The tokenizer, as the job names it.
        tokenizer: String,
        /// Special tokens that the vocabulary holds.
        valid: String,
    },
    /// A special token is needed and nothing names one.
    #[error("tokenizer.{role}: is required here: {tokenizer} names no {role} token; valid: {valid}")]
    NoSpecial {
        /// Which token.
        role: Role,
        /// The tokenizer, as the job names it.
        tokenizer: String,
        /// Special tokens that the vocabulary holds.
        valid: String,
    },
    /// A text could not be encoded.
    #[error("{tokenizer} cannot encode a text: {message}")]
    Encode {
        /// The tokenizer, as the job names it.
        tokenizer: String,
        /// What the tokenizer said.
        message: String,
    },
    /// A text became a special token, though special tokens in a text are text.
    #[error(
        "{tokenizer}: its model makes the special token {token:?} (id {id}) of ordinary text, so the text cannot be told from the token; valid: text without it, or tokenizer.special_tokens: parse"
    )]
    SpecialOfText {
        /// The tokenizer, as the job names it.
        tokenizer: String,
        /// The token.
        token: String,
        /// Its id.
        id: u32,
    },
    /// The tokenizer cannot be written as `tokenizer.json`.
    #[error("{tokenizer} cannot be written as tokenizer.json: {message}")]
    Write {
        /// The tokenizer, as the job names it.
        tokenizer: String,
        /// What the tokenizer said.
        message: String,
    },
}

/// A tokenizer with its special tokens.
#[derive(Debug)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    /// What encodes, where that is not `tokenizer`.
    encoder: Option<Box<Tokenizer>>,
    /// The same, fast; made when it is first asked for.
    fast: OnceLock<Result<FastTokenizer, NotFast>>,
    /// Memory of the threads that encode, while none does.
    scratches: Mutex<Vec<Scratch>>,
    /// By id: what no text may become.
    refused: Vec<bool>,
    special_tokens: SpecialTokens,
    source: String,
    specials: BTreeMap<Role, SpecialToken>,
    vocab_size: usize,
    byte_level: bool,
}

impl Vocabulary {
    /// Loads a `tokenizer.json`, a folder that holds one, or the tokenizer inside a `.gguf`.
    ///
    /// `source` is the path as the job names it, for messages and the manifest.
    ///
    /// # Errors
    /// When a file cannot be read or understood, or the job names a special token that is none.
    pub fn load(
        path: &Path,
        source: &str,
        spec: &spec::Tokenizer,
        teacher: Option<TeacherSpecials>,
    ) -> Result<Self, VocabularyError> {
        let mut hints = specials::Hints::default();
        let tokenizer = if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
            let gguf = stillhouse_teacher::gguf_tokenizer(path)?;
            hints.add_id(Role::Bos, gguf.bos_token_id);
            hints.add_id(Role::Eos, gguf.eos_token_id);
            gguf.tokenizer
        } else if path.is_dir() {
            hints.add_folder(path)?;
            read(&path.join("tokenizer.json"))?
        } else {
            read(path)?
        };
        if let Some(teacher) = teacher {
            hints.add_id(Role::Bos, teacher.bos);
            hints.add_id(Role::Eos, teacher.eos);
        }
        Self::new(tokenizer, source, spec, &hints)
    }

    /// A tokenizer that is in memory already, such as that of a data set.
    ///
    /// # Errors
    /// When its truncation cannot be switched off.
    pub fn of(tokenizer: Tokenizer, source: &str) -> Result<Self, VocabularyError> {
        Self::new(tokenizer, source, &spec::Tokenizer::default(), &specials::Hints::default())
    }

    /// The vocabulary of rows of numbers: `n` tokens, each named by its number. It encodes no text; it is there so that whoever shows an
    /// id, and every reader of `tokenizer.json`, finds its name.
    ///
    /// # Errors
    /// When it cannot be built: a fault of this program.
    pub fn of_numbers(n: usize, source: &str) -> Result<Self, VocabularyError> {
        let names: serde_json::Map<String, serde_json::Value> = (0..n).map(|id| (id.to_string(), id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": names, "unk_token": "?"},
        });
        let tokenizer = Tokenizer::from_bytes(json.to_string())
            .map_err(|e| VocabularyError::Damaged { path: source.into(), message: e.to_string() })?;
        Self::of(tokenizer, source)
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
        let (mut encoder, mut refused) = (None, Vec::new());
        if spec.special_tokens == SpecialTokens::Text {
            tokenizer.set_encode_special_tokens(true);
            encoder = with_roles_special(&tokenizer, specials.values())
                .map_err(|e| VocabularyError::Damaged { path: source.into(), message: e.to_string() })?;
            refused = of_no_text(encoder.as_deref().unwrap_or(&tokenizer), &specials, vocab_size);
        }
        let source = source.to_owned();
        let special_tokens = spec.special_tokens;
        let (fast, scratches) = Default::default();
        Ok(Self {
            tokenizer,
            encoder,
            fast,
            scratches,
            refused,
            special_tokens,
            source,
            specials,
            vocab_size,
            byte_level,
        })
    }

    /// The tokenizer as the job names it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Largest id + 1, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The special token of a role, where one is known.
    pub fn special(&self, role: Role) -> Option<&SpecialToken> {
        self.specials.get(&role)
    }

    /// The id of the special token of a role.
    ///
    /// # Errors
    /// When none is known; the message says which key of the job file to set.
    pub fn require(&self, role: Role) -> Result<u32, VocabularyError> {
        self.special(role).map(|token| token.id).ok_or_else(|| VocabularyError::NoSpecial {
            role,
            tokenizer: self.source.clone(),
            valid: specials::choices(&self.tokenizer),
        })
    }

    /// The id of a role, where text that spells the token becomes it: with `special_tokens: parse`, for added tokens.
    pub fn parsed(&self, role: Role) -> Option<u32> {
        let token = self.special(role).filter(|_| self.special_tokens == SpecialTokens::Parse)?;
        is_added(&self.tokenizer, &token.token).then_some(token.id)
    }

    /// The special tokens by the name of their role, as the manifest has them.
    pub fn special_tokens(&self) -> BTreeMap<String, SpecialToken> {
        self.specials.iter().map(|(role, token)| (role.name().to_owned(), token.clone())).collect()
    }

    /// The ids of a text: no special tokens added, nothing cut off, nothing filled up.
    ///
    /// # Errors
    /// When the tokenizer fails, such as for a character that it knows no token for and no unknown token, or makes a special token of
    /// text that is to be text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, VocabularyError> {
        let mut ids = Vec::new();
        self.encode_into(text, &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text, as [`Vocabulary::encode`] gives them.
    ///
    /// # Errors
    /// The same; then what is appended is of no use.
    pub fn encode_into(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), VocabularyError> {
        let first = ids.len();
        if !self.encode_fast(text, ids) {
            let encoding = self
                .encoder()
                .encode_fast(text, false)
                .map_err(|e| VocabularyError::Encode { tokenizer: self.source.clone(), message: e.to_string() })?;
            ids.extend_from_slice(encoding.get_ids());
        }
        match ids[first..].iter().find(|&&id| self.refused.get(id as usize) == Some(&true)) {
            Some(&id) => {
                let token = self.tokenizer.id_to_token(id).unwrap_or_default();
                Err(VocabularyError::SpecialOfText { tokenizer: self.source.clone(), token, id })
            }
            None => Ok(()),
        }
    }

    /// Appends the ids of a text unless only `tokenizers` can tell them; says whether it did.
    fn encode_fast(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let Ok(fast) = self.fast() else { return false };
        // a thread takes what another left, so there are as many as threads that encode at once
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

    fn fast(&self) -> &Result<FastTokenizer, NotFast> {
        self.fast.get_or_init(|| FastTokenizer::of(self.encoder()))
    }

    /// Which way text goes, for people: `GPT-2 pattern, byte-level BPE (fast)`, or `through tokenizers: ` and the reason.
    pub fn way(&self) -> String {
        match self.fast() {
            Ok(fast) => format!("{} (fast)", fast.name()),
            Err(reason) => format!("through tokenizers: {reason}"),
        }
    }

    /// The text of ids, special tokens included, as the tokenizer's decoder has it.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, false).unwrap_or_else(|_| ids.iter().map(|&id| self.token_text(id)).collect())
    }

    /// One token, to show: byte-level tokens as the text that they stand for, with control characters and bytes that are no
    /// whole character escaped (`\n`, `\xe2`). An id without a token is shown as `<id 7>`.
    pub fn token_text(&self, id: u32) -> String {
        let Some(token) = self.tokenizer.id_to_token(id) else {
            return format!("<id {id}>");
        };
        let bytes = if self.byte_level { byte_level::bytes(&token) } else { None };
        byte_level::shown(bytes.as_deref().unwrap_or(token.as_bytes()))
    }

    /// The tokenizer as the bytes of a `tokenizer.json`, without truncation and padding; the same for the same tokenizer.
    ///
    /// # Errors
    /// When the tokenizer cannot be serialized.
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

/// The tokenizer to encode with where a token of a role is added to the vocabulary without being marked as special.
fn with_roles_special<'a>(
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

/// By id: special tokens, but for the one that stands for what the model does not know. That one too where it is bos or eos.
fn of_no_text(encoder: &Tokenizer, roles: &BTreeMap<Role, SpecialToken>, vocab_size: usize) -> Vec<bool> {
    let mut refused = vec![false; vocab_size];
    let unknown = unknown_token(encoder);
    for (id, token) in encoder.get_added_tokens_decoder() {
        let bounds = [Role::Bos, Role::Eos].iter().any(|role| roles.get(role).is_some_and(|t| t.id == id));
        if let Some(refused) = refused.get_mut(id as usize) {
            *refused = token.special && (bounds || unknown.as_ref() != Some(&token.content));
        }
    }
    refused
}

/// What a model puts in the place of what it has no token for.
fn unknown_token(tokenizer: &Tokenizer) -> Option<String> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) => model.unk_token.clone(),
        ModelWrapper::WordPiece(model) => Some(model.unk_token.clone()),
        ModelWrapper::WordLevel(model) => Some(model.unk_token.clone()),
        ModelWrapper::Unigram(model) => {
            // the model keeps the id to itself
            let id = serde_json::to_value(model).ok()?.get("unk_id")?.as_u64()?;
            tokenizer.id_to_token(u32::try_from(id).ok()?)
        }
    }
}

fn read(path: &Path) -> Result<Tokenizer, VocabularyError> {
    let bytes = std::fs::read(path).map_err(|source| VocabularyError::Io { path: path.into(), source })?;
    let damaged = |message: String| VocabularyError::Damaged { path: path.into(), message };
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|e| damaged(not_understood(e.to_string())))?;
    // The library numbers tokens that its model does not hold one after the other, whatever the file says.
    let written: AddedTokens = serde_json::from_slice(&bytes).map_err(|e| damaged(not_understood(e.to_string())))?;
    let keys: honoured::WrittenTokenizer =
        serde_json::from_slice(&bytes).map_err(|e| damaged(not_understood(e.to_string())))?;
    if let Some(refusal) = keys.refusal(&tokenizer) {
        return Err(damaged(refusal));
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

/// What the parser says, where that means something to a person.
fn not_understood(said: String) -> String {
    let known = "valid: a file of Hugging Face's tokenizers, with a model BPE, Unigram, WordPiece or WordLevel";
    match said.contains("untagged enum") {
        true => format!("is not a tokenizer.json: a part of it is of a kind that is not known; {known}"),
        false => format!("is not a tokenizer.json: {said}"),
    }
}

/// What a tokenizer.json says of added tokens.
#[derive(serde::Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<WrittenToken>,
}

#[derive(serde::Deserialize)]
struct WrittenToken {
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
