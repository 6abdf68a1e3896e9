//! One file for each rule: its options, their check, and the judgement of a document.

pub(crate) mod c4;
pub(crate) mod c4_paragraphs;
pub(crate) mod fasttext;
pub(crate) mod fineweb;
pub(crate) mod gopher_quality;
pub(crate) mod gopher_repetition;
pub(crate) mod language;
pub(crate) mod length;
pub(crate) mod pattern;
pub(crate) mod pii;

use crate::RuleError;

/// Returns the limit of a test that is on: `None` and 0 switch a test off, as in datatrove.
fn active(limit: Option<f64>) -> Option<f64> {
    limit.filter(|&limit| limit != 0.0)
}

/// Checks that a limit is a number of at least 0, at most `largest`.
fn check_limit(field: &str, got: Option<f64>, largest: f64) -> Result<(), RuleError> {
    match got {
        Some(got) if !(0.0..=largest).contains(&got) => {
            let valid = if largest.is_finite() { format!("0 to {largest}") } else { "at least 0".to_owned() };
            Err(RuleError::new(field, got, valid))
        }
        _ => Ok(()),
    }
}

/// Checks that a minimum is not above its maximum.
fn check_order<T: PartialOrd + Copy + std::fmt::Display>(
    minimum: (&str, Option<T>),
    maximum: (&str, Option<T>),
) -> Result<(), RuleError> {
    match (minimum.1, maximum.1) {
        (Some(least), Some(most)) if least > most => {
            Err(RuleError::new(minimum.0, least, format!("at most {}, the value of {}", most, maximum.0)))
        }
        _ => Ok(()),
    }
}

/// `count / total` as Python divides integers; NaN for 0 / 0.
fn share(count: usize, total: usize) -> f64 {
    count as f64 / total as f64
}

/// Returns the number of elements that occurred before, and their code points (datatrove's `find_duplicates`).
fn duplicates<'a>(elements: impl Iterator<Item = &'a str>) -> (usize, usize) {
    let mut seen = crate::hashing::FastSet::default();
    elements
        .filter(|element| !seen.insert(*element))
        .fold((0, 0), |(count, characters), element| (count + 1, characters + crate::python::len(element)))
}
