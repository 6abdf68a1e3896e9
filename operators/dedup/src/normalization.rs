use std::borrow::Cow;

use icu_normalizer::DecomposingNormalizerBorrowed;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::unicode::{DIGIT, PUNCT, SPACE, classes, is_nonspacing_mark, is_space, is_unassigned};

/// What is made equal before texts are compared, as datatrove's `TextNormConfig`. The steps run in the order of the fields
/// `lowercase`, `numbers`, `weekdays`, `months`, `punctuation`, `whitespace`, `diacritics`. White space at both ends is
/// always removed.
///
/// ```
/// use stillhouse_dedup::Normalization;
///
/// assert_eq!(Normalization::default().apply(" The café,\non 1,200 m² "), "the cafe on 0 m²");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "DedupNormalization")]
pub struct Normalization {
    /// Writes letters in lower case.
    pub lowercase: bool,
    /// Replaces each number by 0. A number is a run of decimal digits, or two with a decimal separator between them.
    pub numbers: bool,
    /// Replaces English weekdays in lower case by `WEEKDAY`, also inside words.
    pub weekdays: bool,
    /// Replaces English months in lower case by `MONTH`, also inside words.
    pub months: bool,
    /// Replaces each punctuation or control character by a space.
    pub punctuation: bool,
    /// Replaces each run of white space by one space.
    pub whitespace: bool,
    /// Decomposes characters (Unicode's NFD) and removes nonspacing marks, such as accents.
    pub diacritics: bool,
}

impl Default for Normalization {
    fn default() -> Self {
        Self { lowercase: true, numbers: true, punctuation: true, whitespace: true, diacritics: true, ..Self::NONE }
    }
}

const WEEKDAYS: &[&str] = &["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];
const MONTHS: &[&str] = &[
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
];

impl Normalization {
    /// Changes nothing but white space at both ends.
    pub const NONE: Self = Self {
        lowercase: false,
        numbers: false,
        weekdays: false,
        months: false,
        punctuation: false,
        whitespace: false,
        diacritics: false,
    };

    /// Normalizes a text in time and memory linear in its length.
    pub fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut text = Cow::Borrowed(text);
        let is_ascii = text.is_ascii();
        if self.lowercase && !is_ascii {
            text = Cow::Owned(lowercase(&text));
        }
        let mut steps = Steps {
            ascii_lowercase: self.lowercase && is_ascii,
            numbers: self.numbers,
            punctuation: self.punctuation,
            whitespace: self.whitespace,
        };
        if self.weekdays || self.months {
            // names are replaced after numbers and before punctuation
            let before = Steps { punctuation: false, whitespace: false, ..steps };
            steps = Steps { ascii_lowercase: false, numbers: false, ..steps };
            text = Cow::Owned(before.apply(&text));
            if self.weekdays {
                text = Cow::Owned(replace_names(&text, WEEKDAYS, "WEEKDAY"));
            }
            if self.months {
                text = Cow::Owned(replace_names(&text, MONTHS, "MONTH"));
            }
        }
        if steps != Steps::NONE {
            text = Cow::Owned(steps.apply(&text));
        }
        if self.diacritics && !is_ascii {
            text = Cow::Owned(remove_diacritics(&text));
        }
        match text {
            Cow::Borrowed(text) => Cow::Borrowed(text.trim_matches(is_space)),
            Cow::Owned(text) => {
                let trimmed = text.trim_matches(is_space);
                Cow::Owned(if trimmed.len() == text.len() { text } else { trimmed.to_owned() })
            }
        }
    }
}

/// The steps that one pass over the text does.
#[derive(Clone, Copy, PartialEq)]
struct Steps {
    ascii_lowercase: bool,
    numbers: bool,
    punctuation: bool,
    whitespace: bool,
}

impl Steps {
    const NONE: Self = Self { ascii_lowercase: false, numbers: false, punctuation: false, whitespace: false };

    fn apply(self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let (mut rest, mut space_before) = (text.chars(), false);
        while let Some(mut c) = rest.next() {
            let classes = classes(c);
            let mut is_white = classes & SPACE != 0;
            if classes != 0 {
                if self.numbers && classes & DIGIT != 0 {
                    rest = after_number(rest.as_str()).chars();
                    c = '0';
                } else if self.punctuation && classes & PUNCT != 0 {
                    c = ' ';
                    is_white = true;
                }
                if is_white && self.whitespace {
                    space_before = true;
                    continue;
                }
            }
            if space_before {
                if !out.is_empty() {
                    out.push(' ');
                }
                space_before = false;
            }
            out.push(if self.ascii_lowercase { c.to_ascii_lowercase() } else { c });
        }
        out
    }
}

/// Returns what follows a number, given what follows its first digit.
fn after_number(text: &str) -> &str {
    let is_digit = |c: char| classes(c) & DIGIT != 0;
    let rest = text.trim_start_matches(is_digit);
    match rest.strip_prefix(['.', ',', '،', '٫', '⎖', '⎗', '⎘']) {
        Some(fraction) if fraction.starts_with(is_digit) => fraction.trim_start_matches(is_digit),
        _ => rest,
    }
}

/// Replaces each of the names, none of which starts with another.
fn replace_names(text: &str, names: &[&str], replacement: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    loop {
        let tail = rest.as_str();
        if let Some(after) = names.iter().find_map(|name| tail.strip_prefix(name)) {
            out.push_str(replacement);
            rest = after.chars();
        } else if let Some(c) = rest.next() {
            out.push(c);
        } else {
            return out;
        }
    }
}

/// Calls `each` with the parts between characters that Unicode 14.0.0 does not assign, which are copied. So the results do
/// not depend on the version of Unicode in the standard library and in `icu_normalizer`: such characters have no case, no
/// decomposition and no combining class in version 14, and all other characters keep theirs.
fn for_assigned(text: &str, mut each: impl FnMut(&str, &mut String)) -> String {
    let mut out = String::with_capacity(text.len());
    for part in text.split_inclusive(is_unassigned) {
        match part.char_indices().next_back() {
            Some((end, last)) if is_unassigned(last) => {
                each(part.get(..end).unwrap_or_default(), &mut out);
                out.push(last);
            }
            _ => each(part, &mut out),
        }
    }
    out
}

fn lowercase(text: &str) -> String {
    for_assigned(text, |part, out| out.push_str(&part.to_lowercase()))
}

fn remove_diacritics(text: &str) -> String {
    let nfd = DecomposingNormalizerBorrowed::new_nfd();
    for_assigned(text, |part, out| out.extend(nfd.normalize_iter(part.chars()).filter(|&c| !is_nonspacing_mark(c))))
}
