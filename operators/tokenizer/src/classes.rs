//! The Unicode classes that the character sets of the known patterns distinguish, as flags of each code point.
//!
//! The ranges come from `regex-syntax`, which fancy-regex also uses to compile the patterns, so both have the same
//! Unicode version. [`Classes::get`] builds the table at the first call, which takes some milliseconds. A test compares
//! all code points with the regular expressions.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

use crate::table::{CodePointTable, decode_utf8};

/// `\p{L}`.
pub(crate) const LETTER: u8 = 1;
/// `\p{N}`.
pub(crate) const NUMBER: u8 = 2;
/// `\s`.
pub(crate) const SPACE: u8 = 4;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`.
pub(crate) const UPPER: u8 = 8;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`.
pub(crate) const LOWER: u8 = 16;
/// `[\r\n]`.
pub(crate) const LINE: u8 = 32;
/// `[^\s\p{L}\p{N}]`.
pub(crate) const OTHER: u8 = 64;
/// `char::is_numeric`, the criterion of the pre-tokenizer `Digits`.
pub(crate) const NUMERIC: u8 = 128;

/// Flags with the regular expression of their class. `LINE` and `NUMERIC` are set separately.
pub(crate) const SETS: [(u8, &str); 6] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
    (OTHER, r"[^\s\p{L}\p{N}]"),
];

/// The flags of all code points.
#[derive(Debug)]
pub(crate) struct Classes {
    ascii: [u8; 128],
    table: CodePointTable,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::build);

impl Classes {
    /// Returns the global table.
    pub(crate) fn get() -> &'static Self {
        &CLASSES
    }

    fn build() -> Self {
        let mut flags = vec![0u8; 0x11_0000];
        for (flag, set) in SETS {
            for (first, last) in ranges(set) {
                flags[first as usize..=last as usize].iter_mut().for_each(|flags| *flags |= flag);
            }
        }
        let table = CodePointTable::from_fn(|c| {
            let line = if matches!(c, '\r' | '\n') { LINE } else { 0 };
            flags[c as usize] | line | if c.is_numeric() { NUMERIC } else { 0 }
        });
        Self { ascii: std::array::from_fn(|i| table.get(i as u32)), table }
    }

    /// Returns the flags and the length in bytes of the character at `at`; (0, 0) at the end of the text.
    #[inline]
    pub(crate) fn at(&self, text: &[u8], at: usize) -> (u8, usize) {
        match text.get(at) {
            None => (0, 0),
            Some(&byte) if byte < 128 => (self.ascii[usize::from(byte)], 1),
            Some(_) => {
                let (code, length) = decode_utf8(text, at);
                (self.table.get(code), length)
            }
        }
    }

    /// Returns the end of the run of characters from `at` that have one of the flags.
    #[inline]
    pub(crate) fn end_of_run(&self, text: &[u8], mut at: usize, flags: u8) -> usize {
        loop {
            let (class, length) = self.at(text, at);
            if class & flags == 0 {
                return at;
            }
            at += length;
        }
    }
}

/// Returns the ranges of a character class; none for any other expression, which the tests would detect.
fn ranges(set: &str) -> Vec<(u32, u32)> {
    match regex_syntax::parse(set).as_ref().map(|hir| hir.kind()) {
        Ok(HirKind::Class(Class::Unicode(class))) => {
            class.ranges().iter().map(|range| (range.start().into(), range.end().into())).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_point_has_the_classes_of_the_regular_expressions() {
        let sets = SETS.into_iter().chain([(LINE, r"[\r\n]")]);
        let sets: Vec<_> =
            sets.map(|(flag, set)| (flag, fancy_regex::Regex::new(&format!("^{set}$(?!x)")).unwrap())).collect();
        let (classes, mut utf8) = (Classes::get(), [0; 4]);
        for c in '\0'..=char::MAX {
            let text = c.encode_utf8(&mut utf8);
            let (class, length) = classes.at(text.as_bytes(), 0);
            assert_eq!(length, text.len());
            for (flag, set) in &sets {
                assert_eq!(class & flag != 0, set.is_match(text).unwrap(), "{c:?} and {set}");
            }
            assert_eq!(class & NUMERIC != 0, c.is_numeric());
        }
        assert_eq!(classes.at(b"", 0), (0, 0));
    }
}
