//! Tokens added to a vocabulary, which are matched in the text before anything else.
//!
//! ```text
//!  text ──not normalized tokens──► pieces ──normalizer──► ──normalized tokens──► pieces for the model
//! ```
//!
//! Matches are leftmost-longest and do not overlap. They include skipped tokens: a special token that is encoded as
//! text hides the tokens that overlap with it. This equals `tokenizers`, including all flags.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

use crate::UnsupportedComponent;
use crate::classes::{Classes, SPACE};

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// Non-empty text.
    Text(&'a str),
    /// Id of an added token.
    Token(u32),
}

#[derive(Debug)]
struct Token {
    id: u32,
    /// Matched, but encoded as text.
    skipped: bool,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
}

/// Added tokens that one automaton matches.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    automaton: AhoCorasick,
    tokens: Vec<Token>,
}

impl AddedTokens {
    /// Takes the spelling, id and flags of each token, and whether it is skipped. Returns `None` if no token can match.
    pub(crate) fn new(tokens: Vec<(String, u32, &AddedToken, bool)>) -> Result<Option<Self>, UnsupportedComponent> {
        if tokens.iter().all(|(.., skipped)| *skipped) {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(spelling, ..)| spelling))
            .map_err(|error| UnsupportedComponent::AddedTokens(error.to_string()))?;
        let tokens = tokens.into_iter().map(|(_, id, token, skipped)| {
            let AddedToken { single_word, lstrip, rstrip, .. } = *token;
            Token { id, skipped, single_word, lstrip, rstrip }
        });
        Ok(Some(Self { automaton, tokens: tokens.collect() }))
    }

    /// Calls `part` with the parts of a text in order, until it fails.
    pub(crate) fn split<'a, E>(&self, text: &'a str, mut part: impl FnMut(Part<'a>) -> Result<(), E>) -> Result<(), E> {
        let mut done = 0;
        for found in self.automaton.find_iter(text) {
            let token = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if token.skipped || token.single_word && !is_separate_word(&text[..start], &text[end..]) {
                continue;
            }
            if token.lstrip {
                start = trimmed_len(&text[..start]).max(done);
            }
            if token.rstrip {
                end = Classes::get().end_of_run(text.as_bytes(), end, SPACE);
            }
            if done < start {
                part(Part::Text(&text[done..start]))?;
            }
            part(Part::Token(token.id))?;
            done = end;
        }
        if done < text.len() { part(Part::Text(&text[done..])) } else { Ok(()) }
    }
}

/// Whether no word character is adjacent on either side.
fn is_separate_word(before: &str, after: &str) -> bool {
    // Cannot fail: `regex` enables the feature of regex-syntax that contains the tables.
    let word = |c: Option<char>| c.is_some_and(|c| regex_syntax::try_is_word_character(c).unwrap_or(false));
    !word(before.chars().next_back()) && !word(after.chars().next())
}

fn trimmed_len(text: &str) -> usize {
    let space = |c: char| {
        let mut utf8 = [0; 4];
        Classes::get().at(c.encode_utf8(&mut utf8).as_bytes(), 0).0 & SPACE != 0
    };
    text.trim_end_matches(space).len()
}
