//! SentencePiece tokenizers in GGUF files (`tokenizer.ggml.model = llama`: Llama 1 and 2, Mistral, TinyLlama, Phi-3),
//! converted to the BPE of these models' own `tokenizer.json`.
//!
//! A SentencePiece model has a score per token, and merges the pair whose merged token has the highest score. A
//! `tokenizer.json` lists the pairs in order of merging. So this module finds all pairs of tokens that concatenate to a
//! token. It sorts them by the score of the merged token, and ties by its id and then the ids of the pair.
//!
//! Cost: n log n in the number of pairs, which is a few per token.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};
use tokenizers::{Model, Tokenizer};

use crate::error::Result;
use crate::gguf::Gguf;

/// The token type that merges produce. Other types cannot be spelled by a text (unknown, control) or stay whole (user
/// defined).
pub(crate) const NORMAL: u64 = 1;

/// The character for a space in SentencePiece vocabularies.
const SPACE: &str = "\u{2581}";

/// Builds the tokenizer without its added tokens. `kinds` are the types of the tokens.
pub(crate) fn sentencepiece(gguf: &Gguf, tokens: &[String], kinds: &[u64]) -> Result<tokenizers::Result<Tokenizer>> {
    // Gemma's tokenizer has no space prefix, and matches some tokens before any merge. This module is not verified for
    // it.
    if gguf.value("tokenizer.ggml.add_space_prefix").is_some_and(|flag| flag.to_bool().is_ok_and(|prefix| !prefix)) {
        return Err(gguf
            .invalid("tokenizer.ggml.add_space_prefix", "true; name the model's tokenizer.json in `tokenizer.path`"));
    }
    if !matches!(gguf.text("tokenizer.ggml.pre"), None | Some("default")) {
        return Err(gguf.invalid("tokenizer.ggml.pre", "default, as the other tokenizers of kind llama have"));
    }
    let scores = gguf.value("tokenizer.ggml.scores").and_then(|value| value.to_vec().ok());
    let scores: Option<Vec<f32>> = scores.and_then(|all| all.iter().map(|score| score.to_f32().ok()).collect());
    let scores = scores.filter(|scores| scores.len() == tokens.len() && scores.iter().all(|score| score.is_finite()));
    let Some(scores) = scores else {
        return Err(gguf.invalid("tokenizer.ggml.scores", "a finite score for each token"));
    };
    Ok(build(tokens, kinds, &scores))
}

fn build(tokens: &[String], kinds: &[u64], scores: &[f32]) -> tokenizers::Result<Tokenizer> {
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.clone(), merges(tokens, kinds, scores, &vocab))
        .unk_token("<unk>".into())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()?;
    let mut tokenizer = Tokenizer::new(bpe);
    let normalizers: Vec<NormalizerWrapper> = vec![Prepend::new(SPACE.into()).into(), Replace::new(" ", SPACE)?.into()];
    tokenizer.with_normalizer(Some(Sequence::new(normalizers)))?;
    let decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ")?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
        Strip::new(' ', 1, 0).into(),
    ];
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    debug_assert_eq!(tokenizer.get_model().get_vocab_size(), tokens.len());
    Ok(tokenizer)
}

/// Returns the pairs of tokens that concatenate to a token, in order of merging.
fn merges(tokens: &[String], kinds: &[u64], scores: &[f32], vocab: &Vocab) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(id, _)| kinds.get(*id) == Some(&NORMAL)) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(l), Some(r)) = (vocab.get(left), vocab.get(right)) {
                pairs.push((scores[id], id, *l, *r));
            }
        }
    }
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    pairs.into_iter().map(|(_, _, l, r)| (tokens[l as usize].clone(), tokens[r as usize].clone())).collect()
}
