//! The tokenizer in a GGUF file: byte-level BPE (`tokenizer.ggml.model = gpt2`) or SentencePiece (`llama`).
//!
//! A byte-level file names its pre-tokenizer in `tokenizer.ggml.pre`. Only pre-tokenizers known to equal that of the
//! model's own `tokenizer.json` are accepted, because a tokenizer that is nearly right silently corrupts a corpus.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use crate::error::{Result, TeacherError};
use crate::gguf::Gguf;
use crate::gguf_sentencepiece::sentencepiece;

const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KNOWN_PRE_TOKENIZERS: &str = "gpt-2, smollm, llama-bpe, qwen2, mpt, olmo";

const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// A tokenizer from a GGUF file, with the file's special tokens.
pub struct GgufTokenizer {
    /// The tokenizer. It does not add special tokens itself.
    pub tokenizer: Tokenizer,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos_token_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos_token_id: Option<u32>,
    /// Whether the model expects a BOS token before every text (`tokenizer.ggml.add_bos_token`).
    pub add_bos: bool,
    /// The Jinja source of `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// The tokens of a GGUF file's vocabulary, for any kind of tokenizer.
pub struct GgufVocabulary {
    /// Tokens by id, in the file's spelling.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos_token_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos_token_id: Option<u32>,
}

/// Reads the tokens of a GGUF file's vocabulary; `None` if the file has none.
///
/// # Errors
/// The error names the file and the field.
pub fn gguf_vocabulary(path: &Path) -> Result<Option<GgufVocabulary>> {
    let gguf = Gguf::open(path)?;
    if gguf.value("tokenizer.ggml.tokens").is_none() {
        return Ok(None);
    }
    Ok(Some(GgufVocabulary {
        tokens: strings(&gguf, "tokenizer.ggml.tokens")?,
        bos_token_id: gguf.token("tokenizer.ggml.bos_token_id"),
        eos_token_id: gguf.token("tokenizer.ggml.eos_token_id"),
    }))
}

/// Builds the tokenizer of a GGUF file.
///
/// # Errors
/// The error names the file and the field. An unknown kind of tokenizer is an error that lists the known ones.
pub fn gguf_tokenizer(path: &Path) -> Result<GgufTokenizer> {
    let gguf = Gguf::open(path)?;
    let fail =
        |error: &dyn std::fmt::Display| TeacherError::Tokenizer { path: path.into(), message: error.to_string() };
    let tokens = strings(&gguf, "tokenizer.ggml.tokens")?;
    let kinds = token_types(&gguf);
    let mut tokenizer = match gguf.text("tokenizer.ggml.model") {
        Some("gpt2") => byte_level(&gguf, &tokens, &fail)?,
        Some("llama") => sentencepiece(&gguf, &tokens, &kinds)?.map_err(|error| fail(&error))?,
        _ => return Err(gguf.invalid("tokenizer.ggml.model", "gpt2 (byte-level BPE), llama (SentencePiece)")),
    };
    add_tokens(&tokens, &kinds, &mut tokenizer).map_err(|error| fail(&error))?;
    Ok(GgufTokenizer {
        tokenizer,
        bos_token_id: gguf.token("tokenizer.ggml.bos_token_id"),
        eos_token_id: gguf.token("tokenizer.ggml.eos_token_id"),
        add_bos: gguf.value("tokenizer.ggml.add_bos_token").and_then(|flag| flag.to_bool().ok()).unwrap_or(false),
        chat_template: gguf.text("tokenizer.chat_template").map(str::to_owned),
    })
}

fn byte_level(
    gguf: &Gguf,
    tokens: &[String],
    fail: &dyn Fn(&dyn std::fmt::Display) -> TeacherError,
) -> Result<Tokenizer> {
    let merges = strings(gguf, "tokenizer.ggml.merges")?
        .into_iter()
        .map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).ok_or(merge))
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|merge| fail(&format!("merge `{merge}` is not two tokens separated by a space")))?;
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    let pre = gguf.text("tokenizer.ggml.pre");
    let pre_tokenizers = pre_tokenizers(pre).map_err(|error| fail(&error))?;
    let pre_tokenizers = pre_tokenizers.ok_or_else(|| gguf.invalid("tokenizer.ggml.pre", KNOWN_PRE_TOKENIZERS))?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges)
        // Llama 3 keeps a word that is a token, without applying merges.
        .ignore_merges(pre == Some("llama-bpe"))
        .build()
        .map_err(|error| fail(&error))?;

    let mut tokenizer = Tokenizer::new(bpe);
    if matches!(pre, Some("qwen2" | "mpt" | "olmo")) {
        tokenizer.with_normalizer(Some(NFC)).map_err(|error| fail(&error))?;
    }
    tokenizer.with_pre_tokenizer(Some(Sequence::new(pre_tokenizers)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
    Ok(tokenizer)
}

/// Returns the pre-tokenizers for a value of `tokenizer.ggml.pre`; `None` if it is unknown.
fn pre_tokenizers(pre: Option<&str>) -> tokenizers::Result<Option<Vec<PreTokenizerWrapper>>> {
    let split =
        |pattern: &str| Split::new(SplitPattern::Regex(pattern.into()), SplitDelimiterBehavior::Isolated, false);
    let (plain, gpt2) = (ByteLevel::new(false, true, false), ByteLevel::new(false, true, true));
    Ok(Some(match pre {
        // mpt and olmo use GPT-NeoX's pre-tokenizer.
        Some("gpt-2" | "mpt" | "olmo") => vec![gpt2.into()],
        Some("smollm") => vec![Digits::new(true).into(), gpt2.into()],
        Some("llama-bpe") => vec![split(LLAMA3)?.into(), plain.into()],
        Some("qwen2") => vec![split(QWEN2)?.into(), plain.into()],
        _ => return Ok(None),
    }))
}

fn token_types(gguf: &Gguf) -> Vec<u64> {
    let kinds = gguf.value("tokenizer.ggml.token_type").and_then(|kinds| kinds.to_vec().ok());
    let kind = |kind: &Value| match kind {
        Value::I32(kind) => u64::try_from(*kind).unwrap_or(0),
        kind => kind.to_u64().unwrap_or(0),
    };
    kinds.into_iter().flatten().map(kind).collect()
}

fn add_tokens(tokens: &[String], kinds: &[u64], tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
    for (token, kind) in tokens.iter().zip(kinds) {
        let added = AddedToken::from(token.clone(), *kind != USER_DEFINED).normalized(false);
        match *kind {
            UNKNOWN | CONTROL => tokenizer.add_special_tokens([added])?,
            USER_DEFINED => tokenizer.add_tokens([added])?,
            _ => 0,
        };
    }
    Ok(())
}

fn strings(gguf: &Gguf, key: &str) -> Result<Vec<String>> {
    let items = gguf.value(key).and_then(|value| value.to_vec().ok());
    let strings = items.and_then(|items| items.iter().map(|item| item.to_string().ok().cloned()).collect());
    strings.ok_or_else(|| gguf.invalid(key, "an array of strings"))
}
