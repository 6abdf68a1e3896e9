//! Converts errors of the JSON Schema into messages for users.

use jsonschema::error::ValidationErrorKind;
use serde_json::Value;

use super::{JobFormat, MAX_PROBLEMS};
use crate::problems::{Problem, Problems};

/// Adds the problems of a schema error at a field.
pub(super) fn describe(
    format: &JobFormat,
    field: &str,
    got: &Value,
    kind: &ValidationErrorKind,
    problems: &mut Problems,
) {
    use ValidationErrorKind as K;
    // the value may contain a secret
    let hides_value = field.split('.').any(|part| part == "storage");
    let problem = |field: String, got: String, message: String| match hides_value {
        true => Problem::missing(field, message),
        false => Problem::new(field, got, message),
    };
    let problem_here = |message: String| problem(field.to_owned(), shown(got), message);
    match kind {
        K::AdditionalProperties { unexpected } => {
            let known = format.keys(field);
            for key in unexpected.iter().take(MAX_PROBLEMS) {
                let value = got.get(key).map(shown).unwrap_or_default();
                problems.push(problem(join(field, key), value, unknown_key(format, key, &known)));
            }
        }
        K::Required { property } => {
            let key = property.as_str().unwrap_or_default();
            problems.push(Problem::missing(join(field, key), "is required and missing"));
        }
        K::Enum { options } => {
            let valid: Vec<String> = options.as_array().into_iter().flatten().map(shown).collect();
            let names: Vec<&str> = options.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let meant = got.as_str().and_then(|got| nearest(got, &names)).map(suggestion).unwrap_or_default();
            problems.push(problem_here(format!("not valid{meant}; valid: {}", valid.join(", "))));
        }
        K::Type { kind } => {
            let wanted = match kind {
                jsonschema::error::TypeKind::Single(t) => t.to_string(),
                jsonschema::error::TypeKind::Multiple(_) => "another type".into(),
            };
            problems.push(problem_here(format!("has type {}; valid: {wanted}", type_name(got))));
        }
        K::Minimum { limit } => problems.push(problem_here(format!("too small; valid: {limit} or more"))),
        K::Maximum { limit } => problems.push(problem_here(format!("too large; valid: {limit} or less"))),
        K::MinItems { limit } => problems.push(problem_here(format!("too few items; valid: {limit} or more"))),
        K::MinProperties { .. } => {
            problems.push(problem_here(format!("has no entry; valid: one of {}", format.keys(field).join(", "))));
        }
        K::MaxProperties { limit } => problems.push(problem_here(format!("too many entries; valid: at most {limit}"))),
        K::Pattern { pattern } => problems.push(problem_here(format!("not valid; must match {pattern}"))),
        _ => problems.push(problem_here(kind.keyword().to_owned() + " does not hold")),
    }
}

/// The message for an unknown key. Suggests a valid key with a similar name, or a field of another section with this
/// name.
fn unknown_key(format: &JobFormat, key: &str, known: &[&str]) -> String {
    let in_another_section = || match format.fields_named(key).as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    };
    let guess = nearest(key, known).map(str::to_owned).or_else(in_another_section);
    let meant = guess.as_deref().map(suggestion).unwrap_or_default();
    let valid = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("unknown key{meant}; valid keys here: {valid}")
}

fn suggestion(guess: &str) -> String {
    format!(", did you mean `{guess}`?")
}

/// Returns the name that was probably meant: at most one typing error per three letters, ignoring case and separators.
pub(crate) fn nearest<'a>(got: &str, names: &[&'a str]) -> Option<&'a str> {
    let normalized = |text: &str| text.to_lowercase().replace(['-', ' '], "_");
    let got = normalized(got);
    let distance = |name: &str| strsim::damerau_levenshtein(&got, name);
    // names of very different length cannot be near
    let has_similar_length = |name: &&&str| name.len().abs_diff(got.len()) <= got.len().max(name.len()) / 3;
    let best = names.iter().filter(has_similar_length).min_by_key(|name| distance(name))?;
    (distance(best) <= (got.len().max(best.len()) / 3).max(1)).then_some(*best)
}

/// Converts a JSON pointer such as `/input/paths/0` into `input.paths[0]`.
pub(super) fn field_path(pointer: &str) -> String {
    let mut out = String::new();
    for part in pointer.split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            out.push_str(&format!("[{part}]"));
        } else {
            out = join(&out, &part);
        }
    }
    out
}

fn join(field: &str, key: &str) -> String {
    if field.is_empty() { key.to_owned() } else { format!("{field}.{key}") }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Formats a value for a message: short, on one line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_of_the_pen_are_guessed_and_other_words_are_not() {
        let keys = ["format", "paths", "text", "on_error", "split_megabytes", "sql"];
        for (got, meant) in [
            ("path", Some("paths")),
            ("pahts", Some("paths")),
            ("Paths", Some("paths")),
            ("on-error", Some("on_error")),
            ("split_megabyte", Some("split_megabytes")),
            ("sqll", Some("sql")),
            ("length", None),
            ("x", None),
            ("", None),
            (&"p".repeat(100_000), None),
        ] {
            assert_eq!(nearest(got, &keys), meant, "{got:.20}");
        }
    }
}
