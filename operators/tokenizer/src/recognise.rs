//! Recognises the components of a `tokenizers::Tokenizer` that the fast tokenizer supports exactly.

use std::collections::{HashMap, HashSet};

use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::models::wordpiece;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{AddedToken, Model as _, NormalizerWrapper, SplitDelimiterBehavior, Tokenizer};

use crate::added::AddedTokens;
use crate::bert::{Bert, WordPiece};
use crate::bpe::{Alphabet, Bpe};
use crate::normalizer::Normalizer;
use crate::sentencepiece::{self, SpacePrefix};
use crate::word_splitter::WordSplitter;
use crate::{FastTokenizer, Model, UnsupportedComponent};

/// AddedTokensPair tokens matched before the normalizer, and after it.
type AddedTokensPair = (Option<AddedTokens>, Option<AddedTokens>);

pub(crate) fn recognise(tokenizer: &Tokenizer) -> Result<FastTokenizer, UnsupportedComponent> {
    if tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some() {
        return Err(UnsupportedComponent::Length);
    }
    tokenizer.get_post_processor().map_or(Ok(()), check_post_processor)?;
    let (model, normalizer, name) = match (tokenizer.get_model(), tokenizer.get_normalizer()) {
        (ModelWrapper::BPE(model), normalizer) => {
            if let Some(prefix) = sentencepiece::known_prefix(normalizer, tokenizer.get_pre_tokenizer()) {
                return recognise_sentencepiece(tokenizer, model, prefix, normalizer.is_some());
            }
            let normalizer = known_normalizer(normalizer)?;
            let (splitter, prefix_space) = known_splitter(tokenizer.get_pre_tokenizer())?;
            let name =
                format!("{}, byte-level BPE{}", splitter.name(), if normalizer.is_identity() { "" } else { ", NFC" });
            let prefix = if prefix_space { SpacePrefix::UnlessSpace } else { SpacePrefix::Never };
            (Model::Bpe { bpe: known_bpe(model)?, splitter, prefix }, normalizer, name)
        }
        (ModelWrapper::WordPiece(model), Some(NormalizerWrapper::BertNormalizer(normalizer))) => {
            match tokenizer.get_pre_tokenizer() {
                Some(PreTokenizerWrapper::BertPreTokenizer(_)) => {}
                other => return Err(UnsupportedComponent::PreTokenizer(truncated_debug(&other))),
            }
            let bert = Bert::new(*normalizer, known_pieces(model)?);
            (Model::Bert(Box::new(bert)), Normalizer::identity(), "BERT's words, WordPiece".into())
        }
        (ModelWrapper::WordPiece(_), other) => return Err(UnsupportedComponent::Normalizer(truncated_debug(&other))),
        (ModelWrapper::Unigram(_), _) => return Err(UnsupportedComponent::Model("Unigram".into())),
        (ModelWrapper::WordLevel(_), _) => return Err(UnsupportedComponent::Model("WordLevel".into())),
    };
    let (before_normalizer, after_normalizer) = added_tokens(tokenizer, &normalizer)?;
    if after_normalizer.is_some() && matches!(model, Model::Bert(_)) {
        return Err(UnsupportedComponent::AddedTokens("one that is matched after BertNormalizer".into()));
    }
    Ok(FastTokenizer {
        tokenizer_id: crate::next_tokenizer_id(),
        model,
        normalizer,
        before_normalizer,
        after_normalizer,
        name,
    })
}

/// Recognises BPE over characters. The normalizer or the pre-tokenizer writes spaces as U+2581.
fn recognise_sentencepiece(
    tokenizer: &Tokenizer,
    model: &BPE,
    prefix: SpacePrefix,
    normalized: bool,
) -> Result<FastTokenizer, UnsupportedComponent> {
    check_bpe_features(model)?;
    let merges = read_merges(model)?;
    let merges: Vec<(&str, &str)> = merges.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
    let bpe = sentencepiece::build_bpe(model, &merges)?;
    let normalizer = Normalizer::identity();
    let (before_normalizer, after_normalizer) = added_tokens(tokenizer, &normalizer)?;
    if after_normalizer.is_some() && normalized {
        return Err(UnsupportedComponent::AddedTokens("one that is matched after spaces became U+2581".into()));
    }
    let (name, splitter) = (format!("{}, SentencePiece's BPE", WordSplitter::Spaces.name()), WordSplitter::Spaces);
    let model = Model::Bpe { bpe, splitter, prefix };
    Ok(FastTokenizer {
        tokenizer_id: crate::next_tokenizer_id(),
        model,
        normalizer,
        before_normalizer,
        after_normalizer,
        name,
    })
}

/// The debug form of a component, truncated.
fn truncated_debug(part: &impl std::fmt::Debug) -> String {
    const MAX_BYTES: usize = 120;
    let mut text = format!("{part:?}");
    if text.len() > MAX_BYTES {
        text.truncate(text.floor_char_boundary(MAX_BYTES));
        text.push('…');
    }
    text
}

/// Fails if a post-processor changes ids besides adding special tokens.
fn check_post_processor(processor: &PostProcessorWrapper) -> Result<(), UnsupportedComponent> {
    match processor {
        PostProcessorWrapper::ByteLevel(_) | PostProcessorWrapper::Bert(_) | PostProcessorWrapper::Roberta(_) => Ok(()),
        PostProcessorWrapper::Sequence(all) => all.as_ref().iter().try_for_each(check_post_processor),
        PostProcessorWrapper::Template(template) => {
            let single = serde_json::to_value(template).unwrap_or_default()["single"].take();
            let sequences: Vec<_> = single.as_array().into_iter().flatten().filter_map(|p| p.get("Sequence")).collect();
            match sequences.as_slice() {
                [one] if one["id"] == "A" => Ok(()),
                _ => Err(UnsupportedComponent::PostProcessor(truncated_debug(&single))),
            }
        }
    }
}

fn known_normalizer(normalizer: Option<&NormalizerWrapper>) -> Result<Normalizer, UnsupportedComponent> {
    match normalizer {
        None => Ok(Normalizer::identity()),
        Some(NormalizerWrapper::NFC(_)) => Ok(Normalizer::nfc()),
        Some(NormalizerWrapper::Sequence(all)) => match all.as_ref() {
            [] => Ok(Normalizer::identity()),
            [one] => known_normalizer(Some(one)),
            all => Err(UnsupportedComponent::Normalizer(truncated_debug(&all))),
        },
        Some(other) => Err(UnsupportedComponent::Normalizer(truncated_debug(other))),
    }
}

/// Returns how the pre-tokenizer splits words, and whether it adds a space before a text that does not start with one.
fn known_splitter(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Result<(WordSplitter, bool), UnsupportedComponent> {
    let unknown = || UnsupportedComponent::PreTokenizer(pre_tokenizer.map_or_else(|| "none".into(), truncated_debug));
    let parts = match pre_tokenizer {
        Some(PreTokenizerWrapper::Sequence(all)) => all.as_ref(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    match parts {
        [PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space, use_regex, .. })] => {
            Ok((if *use_regex { WordSplitter::Gpt2 } else { WordSplitter::Whole }, *add_prefix_space))
        }
        [
            PreTokenizerWrapper::Split(split),
            PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space: false, use_regex: false, .. }),
        ] => Ok((known_split(split).ok_or_else(unknown)?, false)),
        [
            PreTokenizerWrapper::Digits(digits),
            PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space: false, use_regex: true, .. }),
        ] if digits.individual_digits => Ok((WordSplitter::DigitsGpt2, false)),
        _ => Err(unknown()),
    }
}

/// Returns the known pattern whose matches are the words. Every character is part of a match, so keeping or removing
/// the rest makes no difference.
fn known_split(split: &Split) -> Option<WordSplitter> {
    let SplitPattern::Regex(pattern) = &split.pattern else { return None };
    let matches = match split.behavior {
        SplitDelimiterBehavior::Isolated => true,
        SplitDelimiterBehavior::Removed => split.invert,
        _ => false,
    };
    WordSplitter::from_pattern(pattern).filter(|_| matches)
}

fn unsupported_bpe(what: &str) -> UnsupportedComponent {
    UnsupportedComponent::Model(format!("BPE with {what}"))
}

/// Fails if BPE has a feature that the fast version does not support.
fn check_bpe_features(model: &BPE) -> Result<(), UnsupportedComponent> {
    let some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(unsupported_bpe("dropout"));
    }
    if some(&model.continuing_subword_prefix) || some(&model.end_of_word_suffix) {
        return Err(unsupported_bpe("a prefix or suffix of subwords"));
    }
    let vocabulary = model.get_vocab();
    let ids: HashSet<u32> = vocabulary.values().copied().collect();
    if ids.len() != vocabulary.len() || ids.contains(&u32::MAX) {
        return Err(unsupported_bpe("two tokens of one id"));
    }
    Ok(())
}

/// Returns the merges in rank order. The model does not expose them, so this reads its serialised form.
fn read_merges(model: &BPE) -> Result<Vec<(String, String)>, UnsupportedComponent> {
    let mut written = serde_json::to_value(model).map_err(|error| unsupported_bpe(&error.to_string()))?;
    serde_json::from_value(written["merges"].take())
        .map_err(|error| unsupported_bpe(&format!("merges that cannot be read: {error}")))
}

fn known_bpe(model: &BPE) -> Result<Bpe, UnsupportedComponent> {
    check_bpe_features(model)?;
    let vocabulary = model.get_vocab();
    let alphabet = byte_level_alphabet();
    let mut bytes = [None; 256];
    for (&c, &byte) in &alphabet {
        bytes[usize::from(byte)] = vocabulary.get(&*c.encode_utf8(&mut [0; 4])).copied();
    }
    // A byte without a token is dropped, unless an unknown token or byte fallback would replace it.
    if bytes.contains(&None) && (model.unk_token.is_some() || model.byte_fallback) {
        return Err(unsupported_bpe("bytes that are not tokens"));
    }
    let merges = read_merges(model)?;
    let merges = merges.iter().map(|(left, right)| {
        Some((*vocabulary.get(left)?, *vocabulary.get(right)?, *vocabulary.get(&format!("{left}{right}"))?))
    });
    let merges: Vec<_> = merges.collect::<Option<_>>().ok_or_else(|| unsupported_bpe("merges that are not tokens"))?;
    let whole = model.ignore_merges.then(|| {
        let spelled = |token: &str| token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Box<[u8]>>>();
        vocabulary.iter().filter_map(|(token, &id)| Some((spelled(token)?, id))).collect()
    });
    Ok(Bpe::new(Alphabet::bytes(bytes), &merges, whole))
}

/// The byte that each character of a byte-level token represents: itself if printable in Latin-1, else the next of
/// U+0100, U+0101, ….
fn byte_level_alphabet() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let (themselves, others): (Vec<u8>, Vec<u8>) = (0..=255).partition(printable);
    let others = others.into_iter().zip('\u{100}'..).map(|(byte, c)| (c, byte));
    themselves.into_iter().map(|byte| (char::from(byte), byte)).chain(others).collect()
}

fn known_pieces(model: &wordpiece::WordPiece) -> Result<WordPiece, UnsupportedComponent> {
    let vocabulary = model.get_vocab();
    let Some(&unknown) = vocabulary.get(&model.unk_token) else {
        return Err(UnsupportedComponent::Model(format!(
            "WordPiece whose unknown token {:?} is not in the vocabulary",
            model.unk_token
        )));
    };
    let tokens = vocabulary.iter().map(|(token, &id)| (token.as_str(), id));
    Ok(WordPiece::new(tokens, &model.continuing_subword_prefix, unknown, model.max_input_chars_per_word))
}

fn added_tokens(tokenizer: &Tokenizer, normalizer: &Normalizer) -> Result<AddedTokensPair, UnsupportedComponent> {
    let known = tokenizer.get_added_vocabulary();
    let skips = known.get_encode_special_tokens();
    let mut tokens: Vec<(&u32, &AddedToken)> = known.get_added_tokens_decoder().iter().collect();
    tokens.sort_unstable_by_key(|(id, _)| **id);
    let matched = |normalized: bool| {
        let tokens = tokens.iter().filter(|(_, token)| token.normalized == normalized).map(|&(&id, token)| {
            let spelling = if normalized { normalizer.normalize(&token.content) } else { token.content.clone() };
            (spelling, id, token, skips && known.is_special_token(&token.content))
        });
        AddedTokens::new(tokens.collect())
    };
    Ok((matched(false)?, matched(true)?))
}
