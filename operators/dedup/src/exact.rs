use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr_iter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::error::OptionError;
use crate::normalization::Normalization;
use crate::unicode::is_space;

/// The part of a document that has a key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// The whole text.
    #[default]
    Document,
    /// Lines between blank lines.
    Paragraph,
    /// A line, without `\n` or `\r\n` at its end.
    Line,
    /// Each run of consecutive sentences of English text; see [`ExactConfig::sentences`].
    Sentences,
}

/// Options of [`ExactKeys`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExactConfig {
    /// The part of a document that has a key.
    pub unit: Unit,
    /// Sentences of a run, 1 to 100. Only for the unit `sentences`. C4 (Raffel et al. 2020, section 2.2) has 3.
    #[schemars(range(min = 1, max = 100))]
    pub sentences: u32,
    /// Least number of characters (code points) of a part, as it is compared. Shorter parts, such as empty lines or `}`, have
    /// no key. By default 0 for documents and 20 for other units.
    pub min_characters: Option<u32>,
    /// What is made equal before parts are compared; by default nothing. White space at both ends of a paragraph, line or
    /// sentence is never compared.
    pub normalization: Normalization,
}

impl Default for ExactConfig {
    fn default() -> Self {
        Self { unit: Unit::Document, sentences: 3, min_characters: None, normalization: Normalization::NONE }
    }
}

/// Keys of 128 bits of the parts of a text. Parts with one key are equal, but for a probability of about 2⁻¹²⁸.
///
/// ```
/// use std::collections::HashSet;
///
/// use stillhouse_dedup::{ExactConfig, ExactKeys, Unit};
///
/// let exact = ExactKeys::new(&ExactConfig { unit: Unit::Line, min_characters: Some(5), ..ExactConfig::default() })?;
/// let text = "Subscribe now!\nif {\n}\nelse {\n}\nSubscribe now! \nThe end.";
/// let mut seen = HashSet::new();
/// let repeated: Vec<_> = exact.keys(text).filter(|(_, key)| !seen.insert(*key)).map(|(bytes, _)| bytes).collect();
/// assert_eq!(exact.without(text, &repeated), "Subscribe now!\nif {\n}\nelse {\n}\nThe end.");
/// # Ok::<(), stillhouse_dedup::OptionError>(())
/// ```
pub struct ExactKeys {
    config: ExactConfig,
    min_characters: usize,
}

impl ExactKeys {
    /// Checks the options.
    pub fn new(config: &ExactConfig) -> Result<Self, OptionError> {
        OptionError::check_range("exact.sentences", config.sentences, 1, 100)?;
        let default = if config.unit == Unit::Document { 0 } else { 20 };
        Ok(Self { config: config.clone(), min_characters: config.min_characters.unwrap_or(default) as usize })
    }

    /// Returns the options.
    pub fn config(&self) -> &ExactConfig {
        &self.config
    }

    /// Returns the bytes and the key of each part of a text in order, but of those that are too short. Keys of other options
    /// are not comparable.
    ///
    /// A key is XXH3-128 with seed 0 of the normalized part. Sentences are normalized one by one and joined by spaces, as in
    /// datatrove's `SentenceDedupSignature`; a text with fewer sentences than a run has no keys.
    ///
    /// Time is linear in the text, for runs of sentences times their number. Memory: 16 bytes for each part.
    pub fn keys<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, u128)> + 'a {
        let parts = parts(text, self.config.unit);
        let run = if self.config.unit == Unit::Sentences { self.config.sentences as usize } else { 1 };
        let runs = (parts.len() + 1).saturating_sub(run);
        (0..runs).filter_map(move |first| {
            let run = parts.get(first..first + run)?;
            let range = run.first()?.start..run.last()?.end;
            let compared = self.compared(text, run);
            let long_enough = self.min_characters == 0 || compared.chars().nth(self.min_characters - 1).is_some();
            long_enough.then(|| (range, XxHash3_128::oneshot(compared.as_bytes())))
        })
    }

    /// Returns what is compared of a run of parts.
    fn compared<'t>(&self, text: &'t str, run: &[Range<usize>]) -> Cow<'t, str> {
        let normalization = &self.config.normalization;
        let normalize = |part: &Range<usize>| {
            let part = text.get(part.clone()).unwrap_or_default();
            match self.config.unit {
                Unit::Document if *normalization == Normalization::NONE => Cow::Borrowed(part),
                _ => normalization.apply(part),
            }
        };
        match run {
            [part] => normalize(part),
            _ => Cow::Owned(run.iter().map(normalize).collect::<Vec<_>>().join(" ")),
        }
    }

    /// Removes the parts of a text that lie in one of the ranges, such as those of [`ExactKeys::keys`]; ranges may overlap
    /// and come in any order. A part goes with the line ends or white space after it. What follows the last part, such as a
    /// final line end, stays, unless no part is left.
    ///
    /// Time is linear in the text, with a sort of the ranges.
    pub fn without<'t>(&self, text: &'t str, ranges: &[Range<usize>]) -> Cow<'t, str> {
        if ranges.is_empty() {
            return Cow::Borrowed(text);
        }
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable_by_key(|range| range.start);
        let (mut ranges, mut removed_end) = (ranges.into_iter().peekable(), None);
        let parts = parts(text, self.config.unit);
        let (mut out, mut kept) = (String::with_capacity(text.len()), 0);
        // what is written before the next part
        let mut separator = 0..parts.first().map_or(0, |part| part.start);
        let ends = parts.iter().skip(1).map(|next| next.start).chain([text.len()]);
        for (part, next) in parts.iter().zip(ends) {
            while let Some(range) = ranges.next_if(|range| range.start <= part.start) {
                removed_end = removed_end.max(Some(range.end));
            }
            if removed_end.is_some_and(|end| end >= part.end) {
                continue;
            }
            for bytes in [separator, part.clone()] {
                out.push_str(text.get(bytes).unwrap_or_default());
            }
            separator = part.end..next;
            kept += 1;
        }
        if kept == parts.len() {
            return Cow::Borrowed(text);
        }
        if kept == 0 {
            return Cow::Borrowed("");
        }
        out.push_str(text.get(parts.last().map_or(0, |part| part.end)..).unwrap_or_default());
        Cow::Owned(out)
    }
}

/// Returns the bytes of the parts of a text, in order.
fn parts(text: &str, unit: Unit) -> Vec<Range<usize>> {
    match unit {
        Unit::Document => vec![0..text.len(); 1],
        Unit::Line => lines(text).collect(),
        Unit::Paragraph => paragraphs(text),
        Unit::Sentences => sentences(text),
    }
}

fn lines(text: &str) -> impl Iterator<Item = Range<usize>> {
    let last = if text.is_empty() || text.ends_with('\n') { None } else { Some(text.len()) };
    let mut start = 0;
    memchr_iter(b'\n', text.as_bytes()).chain(last).map(move |end| {
        let line = text.get(start..end).unwrap_or_default();
        let has_return = end < text.len() && line.ends_with('\r');
        let range = start..end - usize::from(has_return);
        start = end + 1;
        range
    })
}

fn paragraphs(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut open) = (Vec::<Range<usize>>::new(), false);
    for line in lines(text) {
        let is_blank = text.get(line.clone()).unwrap_or_default().chars().all(is_space);
        match found.last_mut() {
            _ if is_blank => {}
            Some(paragraph) if open => paragraph.end = line.end,
            _ => found.push(line),
        }
        open = !is_blank;
    }
    found
}

fn sentences(text: &str) -> Vec<Range<usize>> {
    let (mut found, mut start) = (Vec::new(), 0);
    for sentence in stillhouse_filters::sentences(text) {
        let trimmed = sentence.trim_matches(is_space);
        if !trimmed.is_empty() {
            let first = start + sentence.len() - sentence.trim_start_matches(is_space).len();
            found.push(first..first + trimmed.len());
        }
        start += sentence.len();
    }
    found
}
