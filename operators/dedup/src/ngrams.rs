//! Word n-grams of a normalized text.

use crate::normalization::Normalization;

/// The words of a normalized text, joined by single spaces. An n-gram is a slice of them, so it needs no memory of its own.
pub(crate) struct Words {
    joined: String,
    /// The start of each word, and the position after the space that would follow the last.
    starts: Vec<usize>,
}

impl Words {
    /// Normalizes a text and splits it into words. Needs up to 32 bytes for each byte of the text: 28 were
    /// measured where each character is a word, 8 for English.
    pub(crate) fn new(text: &str, normalization: &Normalization) -> Self {
        let normalized = normalization.apply(text);
        let words = stillhouse_filters::words(&normalized);
        let mut joined = String::with_capacity(normalized.len() + normalized.len() / 8);
        let mut starts = Vec::with_capacity(words.len() + 1);
        for word in words {
            starts.push(joined.len());
            joined.push_str(word);
            joined.push(' ');
        }
        starts.push(joined.len());
        Self { joined, starts }
    }

    pub(crate) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns all n-grams in order, with their words joined by single spaces.
    pub(crate) fn ngrams(&self, n: usize) -> impl Iterator<Item = &str> {
        self.starts.windows(n + 1).map(|starts| self.slice(starts))
    }

    /// Returns up to `count` words from the `first` on, joined by single spaces.
    pub(crate) fn range(&self, first: usize, count: usize) -> &str {
        let last = first.saturating_add(count).min(self.len());
        self.starts.get(first..=last).map_or("", |starts| self.slice(starts))
    }

    /// `starts` are those of the words and of the word after them.
    fn slice(&self, starts: &[usize]) -> &str {
        let (Some(&start), Some(&end)) = (starts.first(), starts.last()) else { return "" };
        self.joined.get(start..end.saturating_sub(1)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ngrams_are_slices_of_the_words() {
        let words = Words::new("The cat, cannot\n sit.", &Normalization::default());
        assert_eq!(words.len(), 5);
        assert_eq!(words.ngrams(1).collect::<Vec<_>>(), ["the", "cat", "can", "not", "sit"]);
        assert_eq!(words.ngrams(4).collect::<Vec<_>>(), ["the cat can not", "cat can not sit"]);
        assert_eq!(words.ngrams(6).count(), 0);
        assert_eq!(
            [words.range(0, 2), words.range(3, 9), words.range(5, 1), words.range(7, 1)],
            ["the cat", "not sit", "", ""]
        );
        assert_eq!(Words::new(" ", &Normalization::NONE).ngrams(1).count(), 0);
    }
}
