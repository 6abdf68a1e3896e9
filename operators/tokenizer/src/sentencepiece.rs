//! SentencePiece BPE (Llama 1 and 2, Mistral, TinyLlama, Phi-3, Gemma): U+2581 represents a space, the symbols are
//! characters, and a character without a token is encoded as byte tokens.
//!
//! ```text
//!  a text  ──► ▁a▁text  ──►  ▁a │ ▁text  ──► (cache) ──► merges
//! ```
//!
//! The model merges a whole text. It can still be split into words if no merge joins a token that ends with another
//! character to one that begins with U+2581. Then no merge ever crosses such a boundary. [`build_bpe`] checks all
//! merges for this and refuses a vocabulary that violates it. Every text can be encoded, because all 256 bytes have
//! tokens.

use std::collections::HashMap;

use tokenizers::NormalizerWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::split::SplitPattern;

use crate::UnsupportedComponent;
use crate::bpe::{Alphabet, Bpe};

/// The character that represents a space.
const SPACE_MARK: char = '\u{2581}';
pub(crate) const SPACE_MARK_STR: &str = "\u{2581}";

/// When a space is inserted before a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpacePrefix {
    /// Never.
    Never,
    /// Before a text that does not begin with a space (`add_prefix_space` of byte-level BPE).
    UnlessSpace,
    /// Before a text that begins with neither a space nor U+2581.
    UnlessSpaceOrMark,
    /// As [`SpacePrefix::UnlessSpaceOrMark`], but only at the beginning of the whole text, not after an added token.
    UnlessSpaceOrMarkAtStart,
    /// Before every text.
    Always,
}

/// Recognises the known ways to write spaces as U+2581; `None` for any other.
pub(crate) fn known_prefix(
    normalizer: Option<&NormalizerWrapper>,
    pre_tokenizer: Option<&PreTokenizerWrapper>,
) -> Option<SpacePrefix> {
    let normalizers = match normalizer {
        Some(NormalizerWrapper::Sequence(all)) => all.as_ref(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    let replaces = |normalizer: &NormalizerWrapper| {
        let written = serde_json::to_value(normalizer).unwrap_or_default();
        let space = serde_json::to_value(ReplacePattern::from(" ")).unwrap_or_default();
        written["type"] == "Replace" && written["pattern"] == space && written["content"] == SPACE_MARK_STR
    };
    match (normalizers, pre_tokenizer) {
        ([NormalizerWrapper::Prepend(prepend), replace], None)
            if prepend.prepend == SPACE_MARK_STR && replaces(replace) =>
        {
            Some(SpacePrefix::Always)
        }
        ([replace], None) if replaces(replace) => Some(SpacePrefix::Never),
        // The normalizer has replaced all spaces, so the split finds none.
        ([replace], Some(PreTokenizerWrapper::Split(split))) if replaces(replace) => {
            (split.pattern == SplitPattern::String(" ".into()) && !split.invert).then_some(SpacePrefix::Never)
        }
        ([], Some(PreTokenizerWrapper::Metaspace(metaspace))) => metaspace_prefix(metaspace),
        _ => None,
    }
}

fn metaspace_prefix(metaspace: &Metaspace) -> Option<SpacePrefix> {
    if metaspace.get_replacement() != SPACE_MARK || metaspace.get_split() {
        return None;
    }
    Some(match metaspace.get_prepend_scheme() {
        PrependScheme::Never => SpacePrefix::Never,
        PrependScheme::Always => SpacePrefix::UnlessSpaceOrMark,
        PrependScheme::First => SpacePrefix::UnlessSpaceOrMarkAtStart,
    })
}

/// Creates the BPE over characters, with spaces in place of U+2581.
pub(crate) fn build_bpe(model: &BPE, merges: &[(&str, &str)]) -> Result<Bpe, UnsupportedComponent> {
    let unsupported = |what: &str| UnsupportedComponent::Model(format!("BPE over characters {what}"));
    if model.ignore_merges {
        return Err(unsupported("that takes a whole text that is a token"));
    }
    let vocabulary = model.get_vocab();
    let bytes: Option<Vec<u32>> = (0..=255u8).map(|byte| vocabulary.get(&format!("<{byte:#04X}>")).copied()).collect();
    let Some(bytes) = bytes.filter(|_| model.byte_fallback).and_then(|bytes| bytes.try_into().ok()) else {
        return Err(unsupported("without a token for each byte"));
    };
    let mut chars: HashMap<u32, u32> = HashMap::new();
    for (token, &id) in &vocabulary {
        let mut characters_of_token = token.chars();
        if let (Some(c), None) = (characters_of_token.next(), characters_of_token.next()) {
            chars.insert(u32::from(c), id);
        }
    }
    let Some(&mark) = chars.get(&u32::from(SPACE_MARK)) else { return Err(unsupported("without U+2581")) };
    chars.insert(u32::from(' '), mark);
    if merges.iter().any(|(left, right)| !left.ends_with(SPACE_MARK) && right.starts_with(SPACE_MARK)) {
        return Err(unsupported("whose merges cross words"));
    }
    let ids = merges.iter().map(|(left, right)| {
        Some((*vocabulary.get(*left)?, *vocabulary.get(*right)?, *vocabulary.get(&format!("{left}{right}"))?))
    });
    let ids: Vec<_> = ids.collect::<Option<_>>().ok_or_else(|| unsupported("with merges that are not tokens"))?;
    Ok(Bpe::new(Alphabet::chars(chars, bytes), &ids, None))
}
