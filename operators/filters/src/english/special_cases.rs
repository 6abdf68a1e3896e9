//! Special cases: words that spaCy splits by table, such as `don't` or `:)`.

use std::sync::LazyLock;

use super::Span;
use super::affixes::{prefix_length, push_lengths, split, suffix_length};
use super::special_case_table::{SPECIAL_CASES, SUFFIXES_AFTER_DIGIT};
use crate::hashing::FastMap;
use crate::unicode::{INFIX, classes};

/// The special cases, and the sequences of tokens that spell one.
pub(super) struct SpecialCases {
    /// The lengths of the tokens in bytes.
    cases: ShortStrings<Vec<u8>>,
    spellings: Spellings,
}

static CASES: LazyLock<SpecialCases> = LazyLock::new(SpecialCases::build);

static AFTER_DIGIT: LazyLock<ShortStrings<()>> = LazyLock::new(|| {
    let mut suffixes = ShortStrings::default();
    SUFFIXES_AFTER_DIGIT.split_ascii_whitespace().for_each(|suffix| suffixes.insert(suffix, ()));
    suffixes
});

/// Returns the bytes after the last ASCII digit if they are a unit, a currency or `+`; 0 otherwise.
pub(super) fn length_after_digit(piece: &str) -> usize {
    let tail = piece.bytes().rev().take(AFTER_DIGIT.longest + 1);
    let Some(length) = tail.into_iter().position(|byte| byte.is_ascii_digit()) else { return 0 };
    let suffix = piece.get(piece.len() - length..).unwrap_or_default();
    if AFTER_DIGIT.get(suffix).is_some() { length } else { 0 }
}

impl SpecialCases {
    /// Returns the global table.
    pub(super) fn get() -> &'static Self {
        &CASES
    }

    fn build() -> Self {
        let mut cases = ShortStrings::default();
        let mut spellings = Spellings::default();
        for case in SPECIAL_CASES.lines().flat_map(|line| line.split("  ")).filter(|case| !case.is_empty()) {
            let text = case.replace(' ', "");
            if has_affix(&text) {
                let mut tokens = Vec::new();
                split(&text, None, &mut tokens);
                spellings.insert(tokens.iter().map(|token| token.of(&text)));
            }
            cases.insert(&text, case.split(' ').map(|token| token.len() as u8).collect());
        }
        Self { cases, spellings }
    }

    /// Returns whether the text is a special case.
    #[inline]
    pub(super) fn contains(&self, text: &str) -> bool {
        self.cases.get(text).is_some()
    }

    /// Returns the lengths of the tokens of a special case.
    #[inline]
    pub(super) fn tokens(&self, text: &str) -> Option<&[u8]> {
        self.cases.get(text).map(Vec::as_slice)
    }

    /// Replaces sequences of tokens that spell a special case by the tokens of that case.
    ///
    /// spaCy also finds sequences with white space between the tokens. They replace nothing, but no shorter or later
    /// sequence is replaced that overlaps them.
    pub(super) fn merge(&self, text: &str, tokens: &mut Vec<Span>) {
        let mut matches = self.spellings.find(text, tokens);
        if matches.is_empty() {
            return;
        }
        matches.sort_unstable_by_key(|&(first, count)| (std::cmp::Reverse(count), first));
        let mut covered = vec![false; tokens.len()];
        matches.retain(|&(first, count)| {
            let Some(span) = covered.get_mut(first..first + count) else { return false };
            let free = span.first() == Some(&false) && span.last() == Some(&false);
            span.fill(true);
            free
        });
        matches.sort_unstable();
        let mut merged = Vec::with_capacity(tokens.len());
        let mut next = 0;
        for (first, count) in matches {
            let (Some(kept), Some(spelling)) = (tokens.get(next..first), tokens.get(first..first + count)) else {
                break;
            };
            merged.extend_from_slice(kept);
            let (start, end) = (spelling.first().map_or(0, |t| t.start), spelling.last().map_or(0, |t| t.end));
            let piece = Span { start, end };
            match self.tokens(piece.of(text)) {
                Some(lengths) => push_lengths(piece, lengths, &mut merged),
                None => merged.extend_from_slice(spelling),
            }
            next = first + count;
        }
        merged.extend_from_slice(tokens.get(next..).unwrap_or_default());
        *tokens = merged;
    }
}

/// Returns whether spaCy looks for the spelling of a special case: it has a prefix, a suffix or an infix.
fn has_affix(text: &str) -> bool {
    if prefix_length(text) > 0 || suffix_length(text) > 0 || text.chars().any(|c| classes().is(c, INFIX)) {
        return true;
    }
    let mut tokens = Vec::new();
    split(text, None, &mut tokens);
    tokens.len() > 1
}

/// A trie of sequences of tokens.
#[derive(Default)]
struct Spellings {
    /// The number of each token, from 1.
    numbers: ShortStrings<u32>,
    count: u32,
    /// The child of a node for a token. The root is 0.
    children: FastMap<(u64, u64), u32>,
    /// Whether a sequence ends at the node.
    ends: Vec<bool>,
}

impl Spellings {
    fn insert<'a>(&mut self, tokens: impl ExactSizeIterator<Item = &'a str>) {
        // A sequence of one token is its own special case. It is shorter than all others, so it hides none.
        if tokens.len() < 2 {
            return;
        }
        self.ends.resize(self.ends.len().max(1), false);
        let mut node = 0;
        for token in tokens {
            let number = *self.numbers.get_or_insert(token, self.count + 1);
            self.count = self.count.max(number);
            let nodes = self.ends.len() as u32;
            let child = *self.children.entry((node.into(), number.into())).or_insert(nodes);
            self.ends.resize(self.ends.len().max(child as usize + 1), false);
            node = child;
        }
        if let Some(end) = self.ends.get_mut(node as usize) {
            *end = true;
        }
    }

    /// Returns the first token and the number of tokens of each sequence in `tokens`.
    fn find(&self, text: &str, tokens: &[Span]) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        for first in 0..tokens.len() {
            let mut node = 0u32;
            for (index, token) in tokens.iter().enumerate().skip(first) {
                let Some(&number) = self.numbers.get(token.of(text)) else { break };
                let Some(&child) = self.children.get(&(node.into(), number.into())) else { break };
                node = child;
                if self.ends.get(node as usize) == Some(&true) {
                    found.push((first, index + 1 - first));
                }
            }
        }
        found
    }
}

/// A map from strings of at most 31 bytes. Most other strings are rejected by their first byte and their length.
struct ShortStrings<V> {
    map: FastMap<String, V>,
    /// For each first byte, the lengths of its strings as bits.
    lengths: [u32; 256],
    longest: usize,
}

impl<V> Default for ShortStrings<V> {
    fn default() -> Self {
        Self { map: FastMap::default(), lengths: [0; 256], longest: 0 }
    }
}

impl<V> ShortStrings<V> {
    fn insert(&mut self, text: &str, value: V) {
        self.register(text);
        self.map.insert(text.to_owned(), value);
    }

    fn get_or_insert(&mut self, text: &str, value: V) -> &V {
        self.register(text);
        self.map.entry(text.to_owned()).or_insert(value)
    }

    fn register(&mut self, text: &str) {
        if let Some(lengths) = text.bytes().next().and_then(|first| self.lengths.get_mut(usize::from(first))) {
            *lengths |= 1u32.checked_shl(text.len() as u32).unwrap_or(0);
        }
        self.longest = self.longest.max(text.len());
    }

    #[inline]
    fn get(&self, text: &str) -> Option<&V> {
        let first = *text.as_bytes().first()?;
        let lengths = *self.lengths.get(usize::from(first))?;
        if text.len() > self.longest || lengths.checked_shr(text.len() as u32)? & 1 == 0 {
            return None;
        }
        self.map.get(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_case_is_longer_than_the_filter_allows() {
        let cases = SpecialCases::get();
        assert!(cases.cases.longest <= 31 && AFTER_DIGIT.longest <= 31 && cases.spellings.numbers.longest <= 31);
        assert_eq!(cases.cases.map.len(), 1343);
    }

    #[test]
    fn cases_have_tokens() {
        assert_eq!(SpecialCases::get().tokens("don't"), Some([2, 3].as_slice()));
        assert_eq!(SpecialCases::get().tokens("°C."), Some([2, 1, 1].as_slice()));
        assert_eq!(SpecialCases::get().tokens("do"), None);
    }

    #[test]
    fn units_follow_a_digit() {
        assert_eq!(["5km", "km", "5", "5x", "a1km/h", "9US$", "3+"].map(length_after_digit), [2, 0, 0, 0, 4, 3, 1]);
    }
}
