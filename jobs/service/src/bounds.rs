//! Limits what workers and job files report before it is stored or sent: the number of problems and the length of
//! texts.
//!
//! A job file can hold as many mistakes as it has bytes, each as long as the file; users read only the first ones.

use serde_json::Value;

use stillhouse_schemas::problems::Problem;

use super::model::FieldProblem;
use stillhouse_pipeline::units;

/// Most problems to report one by one; only the number of the others is reported.
pub const MAX_PROBLEMS: usize = 100;
/// Most characters of a failure's message.
const MAX_MESSAGE_CHARS: usize = 4000;
/// Most characters of any other text.
const MAX_TEXT_CHARS: usize = 1000;
/// Most entries of a list or an object in an event.
const MAX_ENTRIES: usize = 200;

/// Truncates a text after `max_chars` characters and marks the cut with an ellipsis.
pub fn truncate_text(text: &mut String, max_chars: usize) {
    if let Some((at, _)) = text.char_indices().nth(max_chars) {
        text.truncate(at);
        text.push('…');
    }
}

/// Returns the first 80 characters of a value in quotes, with control characters escaped, for a message that refuses it.
pub fn quoted_prefix(value: &str) -> String {
    match value.char_indices().nth(80) {
        Some((end, _)) => format!("{:?}…", &value[..end]),
        None => format!("{value:?}"),
    }
}

/// Truncates a failure's message.
pub fn truncate_message(mut message: String) -> String {
    truncate_text(&mut message, MAX_MESSAGE_CHARS);
    message
}

/// The first hundred problems, with truncated texts, and the number of the others.
pub fn limit_problems(all: impl IntoIterator<Item = FieldProblem>) -> Vec<FieldProblem> {
    let mut all = all.into_iter();
    let mut kept: Vec<FieldProblem> = all.by_ref().take(MAX_PROBLEMS).collect();
    if let Some(next) = all.next() {
        // keep a single extra problem: if the list was already bounded, that one holds the number of the others
        kept.push(match 1 + all.count() {
            1 => next,
            more => {
                let message = format!("and {} more problems", units::count(more as u64));
                FieldProblem::from(&Problem::missing("", message))
            }
        });
    }
    for problem in &mut kept {
        truncate_text(&mut problem.field, MAX_TEXT_CHARS);
        truncate_text(&mut problem.message, MAX_TEXT_CHARS);
        problem.got.iter_mut().for_each(|got| truncate_text(got, MAX_TEXT_CHARS));
    }
    kept
}

/// Truncates the texts and lists of an event's data.
pub fn truncate_event(data: &mut Value) {
    match data {
        Value::String(s) => truncate_text(s, MAX_TEXT_CHARS),
        Value::Array(items) => {
            items.truncate(MAX_ENTRIES);
            items.iter_mut().for_each(truncate_event);
        }
        Value::Object(fields) => {
            while fields.len() > MAX_ENTRIES {
                let Some(last) = fields.keys().next_back().cloned() else { return };
                fields.remove(&last);
            }
            fields.values_mut().for_each(truncate_event);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problem(n: usize) -> FieldProblem {
        let long = "é".repeat(5000);
        FieldProblem {
            field: format!("input.paths[{n}]"),
            got: Some(long.clone()),
            message: long,
            line: None,
            column: None,
        }
    }

    #[test]
    fn of_many_problems_the_first_and_their_number_are_kept() {
        for (n, kept) in [(0, 0), (1, 1), (100, 100), (2000, 101), (95_000, 101)] {
            let bounded = limit_problems((0..n).map(problem));
            assert_eq!(bounded.len(), kept, "{n}");
            assert!(
                bounded
                    .iter()
                    .flat_map(|p| [Some(&p.message), p.got.as_ref()])
                    .flatten()
                    .all(|t| t.chars().count() <= MAX_TEXT_CHARS + 1)
            );
            // a second call changes nothing
            assert_eq!(limit_problems(bounded.clone()), bounded);
        }
        let last = limit_problems((0..2000).map(problem)).pop().unwrap();
        assert_eq!(last.message, "and 1,900 more problems");
    }

    #[test]
    fn texts_and_lists_of_events_are_cut() {
        let mut data =
            json!({"what": "ü".repeat(1_000_000), "stages": vec![json!({"name": "x".repeat(3000)}); 5000], "n": 7});
        truncate_event(&mut data);
        assert_eq!(data["what"].as_str().unwrap().chars().count(), MAX_TEXT_CHARS + 1);
        assert_eq!((data["stages"].as_array().unwrap().len(), &data["n"]), (MAX_ENTRIES, &json!(7)));
        assert!(data.to_string().len() < 250 * 1100);
        let mut short = json!({"a": "b", "c": [1, 2]});
        truncate_event(&mut short);
        assert_eq!(short, json!({"a": "b", "c": [1, 2]}));
        assert_eq!(truncate_message("m".repeat(9000)).chars().count(), MAX_MESSAGE_CHARS + 1);
    }

    #[test]
    fn a_refused_value_is_quoted_up_to_80_characters() {
        assert_eq!(quoted_prefix("a\n\"é"), r#""a\n\"é""#);
        assert_eq!(quoted_prefix(&"é".repeat(80)), format!("{:?}", "é".repeat(80)));
        assert_eq!(quoted_prefix(&"é".repeat(81)), format!("{:?}…", "é".repeat(80)));
    }
}
