//! Compares the scanners with fancy-regex and the patterns themselves: every text up to some length over the classes
//! that a pattern distinguishes, every code point in several places, and random texts.
//!
//! A pattern distinguishes characters only by its sets, so characters in the same sets are equivalent. One character
//! represents each class. `every_code_point`, together with the comparison of all classes in `classes.rs`, shows that
//! the scanner treats the other characters of the class equally.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::LazyLock;

use fancy_regex::Regex;
use proptest::prelude::*;
use stillhouse_tokenizer::WordSplitter;

const WITH_PATTERN: [WordSplitter; 4] =
    [WordSplitter::Gpt2, WordSplitter::Cl100k, WordSplitter::Qwen2, WordSplitter::O200k];

fn regex(splitter: WordSplitter) -> &'static Regex {
    static COMPILED: LazyLock<Vec<Regex>> =
        LazyLock::new(|| WITH_PATTERN.map(|splitter| Regex::new(splitter.pattern().unwrap()).unwrap()).into());
    &COMPILED[WITH_PATTERN.iter().position(|known| *known == splitter).unwrap()]
}

fn reference<'a>(regex: &Regex, text: &'a str) -> Vec<&'a str> {
    let words: Vec<&str> = regex.find_iter(text).map(|word| word.unwrap().as_str()).collect();
    assert_eq!(words.concat(), text, "the pattern leaves something out");
    words
}

/// The pre-tokenizer `Digits` with single digits, followed by GPT-2's pattern.
fn reference_between_digits<'a>(gpt2: &Regex, text: &'a str) -> Vec<&'a str> {
    let digits = text.match_indices(char::is_numeric).flat_map(|(at, digit)| [at, at + digit.len()]);
    let ends: Vec<usize> = std::iter::once(0).chain(digits).chain([text.len()]).collect();
    ends.windows(2).flat_map(|ends| reference(gpt2, &text[ends[0]..ends[1]])).collect()
}

/// Calls `check` with every text of `length` characters over the alphabet.
fn every_text(alphabet: &[char], length: u32, mut check: impl FnMut(&str)) {
    let mut text = String::new();
    for number in 0..alphabet.len().pow(length) {
        text.clear();
        let mut rest = number;
        for _ in 0..length {
            text.push(alphabet[rest % alphabet.len()]);
            rest /= alphabet.len();
        }
        check(&text);
    }
}

/// Returns one character for each class that the sets of a pattern distinguish: the first of the class in Unicode. With
/// `last`, the last of the class, which has several bytes if the class has such a character.
fn classes(sets: &[&str], last: bool) -> Vec<char> {
    let sets: Vec<Set> = sets.iter().map(|set| Set::new(set)).collect();
    let mut classes: HashMap<Vec<bool>, char> = HashMap::new();
    for c in '\0'..=char::MAX {
        let class = sets.iter().map(|set| set.has(c)).collect();
        let representative = classes.entry(class).or_insert(c);
        if last {
            *representative = c;
        }
    }
    let mut classes: Vec<char> = classes.into_values().collect();
    classes.sort_unstable();
    classes
}

/// A set of characters, as the regular expression engine defines it.
struct Set(Vec<bool>);

impl Set {
    fn new(set: &str) -> Self {
        let regex = Regex::new(&format!("^{set}$")).unwrap();
        let mut utf8 = [0; 4];
        let has = |code| char::from_u32(code).is_some_and(|c| regex.is_match(c.encode_utf8(&mut utf8)).unwrap());
        Self((0..0x11_0000).map(has).collect())
    }

    fn has(&self, c: char) -> bool {
        self.0[c as usize]
    }
}

const GPT2: [&str; 13] = [r"\p{L}", r"\p{N}", r"\s", " ", "'", "s", "t", "r", "e", "v", "m", "l", "d"];
const CL100K: [&str; 14] = [
    r"\p{L}", r"\p{N}", r"\s", "[\r\n]", " ", "'", "(?i:s)", "(?i:t)", "(?i:r)", "(?i:e)", "(?i:v)", "(?i:m)",
    "(?i:l)", "(?i:d)",
];
/// Only some letters of the contractions: one that stands alone (`s`), and those of `'ll` and `'re`. The classes of
/// case would otherwise be too many.
const O200K: [&str; 12] = [
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"\p{L}",
    r"\p{N}",
    r"\s",
    "[\r\n]",
    " ",
    "/",
    "'",
    "(?i:s)",
    "(?i:l)",
    "(?i:[re])",
];

fn all_short_texts(splitter: WordSplitter, sets: &[&str], length: u32) {
    let regex = regex(splitter);
    for last in [false, true] {
        let alphabet = classes(sets, last);
        assert!(alphabet.len() >= sets.len(), "{alphabet:?}");
        for length in 0..=(if last { length - 1 } else { length }) {
            every_text(&alphabet, length, |text| assert_eq!(splitter.split(text), reference(regex, text), "{text:?}"));
        }
    }
}

#[test]
fn every_short_text_gpt2() {
    all_short_texts(WordSplitter::Gpt2, &GPT2, 5);
}

#[test]
fn every_short_text_cl100k() {
    all_short_texts(WordSplitter::Cl100k, &CL100K, 5);
}

#[test]
fn every_short_text_qwen2() {
    all_short_texts(WordSplitter::Qwen2, &CL100K, 5);
}

#[test]
fn every_short_text_o200k() {
    all_short_texts(WordSplitter::O200k, &O200K, 5);
}

/// Longer texts over fewer classes, without the letters of contractions: tests runs of spaces, lines, numbers and
/// marks.
#[test]
fn every_longer_text_of_the_few_classes() {
    for (splitter, alphabet) in [
        (WordSplitter::Gpt2, " \nx1!'".to_owned()),
        (WordSplitter::Cl100k, " \n\tx1!'".to_owned()),
        (WordSplitter::O200k, " \naA\u{301}!/".to_owned()),
    ] {
        let (regex, alphabet): (_, Vec<char>) = (regex(splitter), alphabet.chars().collect());
        every_text(&alphabet, 7, |text| assert_eq!(splitter.split(text), reference(regex, text), "{text:?}"));
    }
}

#[test]
fn every_short_text_between_digits() {
    let gpt2 = regex(WordSplitter::Gpt2);
    // ² is a number for the pattern but not a digit; ½ and Ⅷ are numeric.
    let alphabet: Vec<char> = " \n\txs'!1²½Ⅷ一".chars().collect();
    for length in 0..=5 {
        every_text(&alphabet, length, |text| {
            assert_eq!(WordSplitter::DigitsGpt2.split(text), reference_between_digits(gpt2, text), "{text:?}");
        });
    }
}

#[test]
fn every_code_point() {
    let mut text = String::new();
    // Qwen 2 uses the scanner of cl100k.
    for splitter in [WordSplitter::Gpt2, WordSplitter::Cl100k, WordSplitter::O200k] {
        for c in '\0'..=char::MAX {
            text.clear();
            text.extend(['a', c, 'a', '\'', c, 'x', '\'', 'l', c, ' ', c, '1', c, '!', c, c]);
            assert!(splitter.split(&text) == reference(regex(splitter), &text), "{c:?}");
        }
    }
}

/// Runs of every class with many lengths, and single characters that patterns treat specially.
fn text() -> impl Strategy<Value = String> {
    let unit = prop_oneof![
        4 => "[a-zA-Z]{1,8}", 2 => "[0-9]{1,5}", 3 => Just(" ".to_owned()), 2 => "[ \t\n\r\u{a0}\u{3000}\u{85}]{1,6}",
        2 => "['’](s|S|ſ|t|re|rE|ve|m|ll|lL|d|K|l|r)", 2 => "[.,!?/\\-_]{1,4}", 2 => "[à-ÿÀ-ßſKǅʰªא一ก가]{1,4}",
        1 => "[\u{300}-\u{304}\u{903}\u{200d}]{1,3}", 1 => "[²½Ⅷ٣𝟘]{1,4}", 1 => any::<char>().prop_map(String::from), 1 => "\\PC{1,4}",
    ];
    prop::collection::vec(unit, 0..40).prop_map(|units| units.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn any_text(text in text()) {
        for splitter in WITH_PATTERN {
            prop_assert_eq!(splitter.split(&text), reference(regex(splitter), &text));
        }
        prop_assert_eq!(WordSplitter::DigitsGpt2.split(&text), reference_between_digits(regex(WordSplitter::Gpt2), &text));
        prop_assert_eq!(WordSplitter::Whole.split(&text).concat(), text);
    }
}
