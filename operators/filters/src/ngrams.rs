//! Characters in repeated n-grams of words, as datatrove's `find_top_duplicate` and `find_all_duplicate` count them.
//!
//! Both take time and memory linear in the text for each n, and skip most n-grams that occur once.

use std::hash::{Hash, Hasher};

use crate::document::Words;
use crate::hashing::{FastMap, FastSet, FoldHasher, fold};
use crate::python;

/// An n-gram that occurs once, so no longer n-gram that contains it occurs twice.
const UNIQUE: u32 = u32::MAX;

/// Counts n-grams of ascending n. An n-gram is the pair of its first and last n − 1 words.
pub(crate) struct TopNgrams<'a> {
    words: Words<'a>,
    n: usize,
    /// The number of the n-gram that starts at each word, in the order of first occurrences, or [`UNIQUE`].
    numbers: Vec<u32>,
    /// First word and count of the most frequent n-gram; of the first one among equals.
    top: (usize, usize),
}

impl<'a> TopNgrams<'a> {
    pub(crate) fn new(words: Words<'a>) -> Self {
        Self { words, n: 0, numbers: Vec::new(), top: (0, 1) }
    }

    /// Returns the characters of the most frequent n-gram, joined by spaces, times its count. `None` if the text has fewer
    /// than n words.
    pub(crate) fn characters(&mut self, n: usize) -> Option<usize> {
        if n == 0 || n > self.words.len() {
            return None;
        }
        if n < self.n {
            *self = Self::new(self.words);
        }
        while self.n < n {
            self.lengthen();
        }
        let (first, count) = self.top;
        let characters: usize = self.words.iter().skip(first).take(n).map(python::len).sum();
        Some((characters + n - 1) * count)
    }

    /// Goes from n to n + 1.
    fn lengthen(&mut self) {
        let mut first_and_count: Vec<(usize, usize)> = Vec::new();
        let mut register = |number: &mut u32, start| {
            // documents have fewer than 2³² − 1 different n-grams, as spaCy takes at most 2³⁰ characters
            if *number == UNIQUE {
                *number = first_and_count.len() as u32;
                first_and_count.push((start, 1));
            } else if let Some((_, count)) = first_and_count.get_mut(*number as usize) {
                *count += 1;
            }
            *number
        };
        let mut numbers = Vec::with_capacity(self.words.len());
        if self.n == 0 {
            let mut seen: FastMap<&str, u32> = FastMap::default();
            for (start, word) in self.words.iter().enumerate() {
                numbers.push(register(seen.entry(word).or_insert(UNIQUE), start));
            }
        } else {
            let mut seen: FastMap<u64, u32> = FastMap::default();
            for (start, (&first, &last)) in self.numbers.iter().zip(self.numbers.iter().skip(1)).enumerate() {
                numbers.push(match first.max(last) {
                    UNIQUE => UNIQUE,
                    _ => register(seen.entry(u64::from(first) << 32 | u64::from(last)).or_insert(UNIQUE), start),
                });
            }
        }
        self.top = (0, 1);
        for &(start, count) in &first_and_count {
            if count > self.top.1 {
                self.top = (start, count);
            }
        }
        let is_unique = |number: u32| first_and_count.get(number as usize).is_some_and(|&(_, count)| count == 1);
        numbers.iter_mut().filter(|number| is_unique(**number)).for_each(|number| *number = UNIQUE);
        self.numbers = numbers;
        self.n += 1;
    }
}

/// Bytes of the text from a word on that tell most n-grams apart.
const FINGERPRINT: usize = 16;

/// The words of a text written without anything between them. datatrove compares n-grams so: `a bc` equals `ab c`.
pub(crate) struct DuplicatedNgrams {
    joined: String,
    /// The start of each word, and the end of the last.
    starts: Vec<usize>,
    /// Whether the [`FINGERPRINT`] bytes from a word on occur from no other word on. Longer n-grams that start there occur
    /// once.
    unique: Vec<bool>,
}

impl DuplicatedNgrams {
    pub(crate) fn new(words: Words) -> Self {
        let mut joined = String::with_capacity(words.text.len());
        let mut starts = Vec::with_capacity(words.len() + 1);
        for word in words.iter() {
            starts.push(joined.len());
            joined.push_str(word);
        }
        starts.push(joined.len());
        let unique = find_unique(joined.as_bytes(), starts.get(..words.len()).unwrap_or_default());
        Self { joined, starts, unique }
    }

    /// Returns the characters of the n-grams that equal one before. After such an n-gram, the search goes on behind it.
    pub(crate) fn characters(&self, n: usize) -> usize {
        let (mut seen, mut characters, mut word) = (FastSet::default(), 0, 0);
        while let (Some(&start), Some(&end)) = (self.starts.get(word), self.starts.get(word + n)) {
            if end - start >= FINGERPRINT && self.unique.get(word) == Some(&true) {
                word += 1;
                continue;
            }
            let ngram = self.joined.get(start..end).unwrap_or_default();
            if seen.insert(Hashed::new(ngram)) {
                word += 1;
            } else {
                characters += python::len(ngram);
                word += n;
            }
        }
        characters
    }
}

/// Returns for each start whether its fingerprint occurs once. Some that do are not found.
fn find_unique(joined: &[u8], starts: &[usize]) -> Vec<bool> {
    let slots = (8 * starts.len()).next_power_of_two();
    let mut counts = vec![0u8; slots];
    let slot = |&start: &usize| {
        let (words, _) = joined.get(start..start + FINGERPRINT)?.as_chunks::<8>();
        let hash = words.iter().fold(0, |hash, word| fold(hash, u64::from_le_bytes(*word)));
        Some(hash as usize & (slots - 1))
    };
    for slot in starts.iter().filter_map(slot) {
        counts.get_mut(slot).into_iter().for_each(|count| *count = count.saturating_add(1));
    }
    starts.iter().map(|start| slot(start).and_then(|slot| counts.get(slot)) == Some(&1)).collect()
}

/// A string with its hash, so that a growing set does not read the strings again.
struct Hashed<'a> {
    text: &'a str,
    hash: u64,
}

impl<'a> Hashed<'a> {
    fn new(text: &'a str) -> Self {
        let mut hasher = FoldHasher::default();
        hasher.write(text.as_bytes());
        Self { text, hash: hasher.finish() }
    }
}

impl Hash for Hashed<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialEq for Hashed<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.text == other.text
    }
}

impl Eq for Hashed<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Document;

    fn top(text: &str, n: usize) -> Option<usize> {
        TopNgrams::new(Document::new(text).words()).characters(n)
    }

    fn duplicated(text: &str, n: usize) -> usize {
        DuplicatedNgrams::new(Document::new(text).words()).characters(n)
    }

    #[test]
    fn the_first_of_the_most_frequent_ngrams_counts() {
        assert_eq!(top("aa bb aa bb cc", 1), Some(4));
        assert_eq!(top("aa bb aa bb cc", 2), Some(10));
        assert_eq!(top("one two three", 2), Some(7));
        assert_eq!(top("one two three", 3), Some(13));
        assert_eq!(top("one two three", 4), None);
        let (mut document, mut counts) = (Document::new("x y x y x y"), Vec::new());
        let mut ngrams = TopNgrams::new(document.words());
        counts.extend([3, 2, 4, 6, 7].map(|n| ngrams.characters(n)));
        assert_eq!(counts, [Some(10), Some(9), Some(14), Some(11), None]);
    }

    #[test]
    fn joined_ngrams_are_compared() {
        assert_eq!(duplicated("ab c x a bc", 2), 3);
        assert_eq!(duplicated("é b é b é b", 2), 4);
        assert_eq!(duplicated("one two three four five six one two three four five six", 4), 15);
        assert_eq!(duplicated("one two", 5), 0);
    }
}
