//! Describes how two jobs differ: field by field, and the input file by file.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::identity::{JobHash, PlannedFile};
use crate::output::PlanRecord;

/// Maximum number of lines about the job, and about the input.
const MAX_LINES: usize = 12;
/// Maximum characters of a value in a message.
const MAX_VALUE_CHARACTERS: usize = 80;

/// How a plan's job differs from this one, one difference per line. At most 12 lines about the job and about the input,
/// then a count of the rest.
pub fn differences(there: &PlanRecord, now: &JobHash) -> Vec<String> {
    differences_of(there, &now.identity, &now.files)
}

/// Like [`differences`], for a job without a hash of its input, such as one of `derive`.
pub(crate) fn differences_of(there: &PlanRecord, identity: &Value, files: &[PlannedFile]) -> Vec<String> {
    if there.identity.is_null() {
        return Vec::new();
    }
    let (mut was, mut is) = (BTreeMap::new(), BTreeMap::new());
    collect_fields("", &there.identity, &mut was);
    collect_fields("", identity, &mut is);
    let keys: std::collections::BTreeSet<&String> = was.keys().chain(is.keys()).collect();
    let changed: Vec<String> = keys
        .into_iter()
        .filter(|key| was.get(*key) != is.get(*key))
        .map(|key| format!("{}: {} there, {} in this job", name(key), shown(was.get(key)), shown(is.get(key))))
        .collect();
    let changed_nothing = changed.is_empty();
    let mut lines = limit_lines(changed);
    let only_grew = changed_nothing && has_only_new_files(&there.files, files);
    lines.extend(limit_lines(input_differences(&there.files, files)));
    if only_grew {
        lines.push(
            "the input only has more files: `run --append` or `submit --append` makes the splits of these and keeps what is there".into(),
        );
    }
    lines
}

fn limit_lines(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(MAX_LINES);
    if more > 0 {
        lines.truncate(MAX_LINES);
        lines.push(format!("… and {more} more"));
    }
    lines
}

/// Collects every value that is not an object, by its path.
fn collect_fields(path: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                collect_fields(&path, value, into);
            }
        }
        // null means not set
        Value::Null => {}
        other => {
            into.insert(path.to_owned(), other.clone());
        }
    }
}

/// Name of a field in the job file.
fn name(path: &str) -> &str {
    path.strip_prefix("job.").unwrap_or(path)
}

fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "nothing".into() };
    let text = value.to_string();
    match text.char_indices().nth(MAX_VALUE_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Whether the input has all its earlier files, and others.
fn has_only_new_files(there: &[PlannedFile], now: &[PlannedFile]) -> bool {
    let sizes: BTreeMap<&str, u64> = now.iter().map(|f| (f.path.as_str(), f.state.bytes)).collect();
    let is_there = |f: &PlannedFile| sizes.get(f.path.as_str()) == Some(&f.state.bytes);
    there.len() < now.len() && there.iter().all(is_there)
}

fn input_differences(there: &[PlannedFile], now: &[PlannedFile]) -> Vec<String> {
    let by_name = |files: &[PlannedFile]| -> BTreeMap<String, u64> {
        files.iter().map(|f| (f.name.clone(), f.state.bytes)).collect()
    };
    let (was, is) = (by_name(there), by_name(now));
    let sizes = was.iter().filter_map(|(name, bytes)| match is.get(name) {
        None => Some(format!("input {name}: {bytes} bytes there, not in this job")),
        Some(now) if now != bytes => Some(format!("input {name}: {bytes} bytes there, {now} bytes in this job")),
        Some(_) => None,
    });
    let added = is.iter().filter(|(name, _)| !was.contains_key(*name));
    let added = added.map(|(name, bytes)| format!("input {name}: not there, {bytes} bytes in this job"));
    let mut lines: Vec<String> = sizes.chain(added).collect();
    if lines.is_empty() && !there.iter().map(|f| &f.name).eq(now.iter().map(|f| &f.name)) {
        lines.push("input: the same files in another order".into());
    }
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use stillhouse_base::file_state::FileState;

    fn files(files: &[(&str, u64)]) -> Vec<PlannedFile> {
        let file = |(name, bytes): &(&str, u64)| PlannedFile {
            path: (*name).into(),
            name: (*name).into(),
            state: FileState { bytes: *bytes, ..FileState::default() },
        };
        files.iter().map(file).collect()
    }

    #[test]
    fn files_are_reported_one_by_one_and_their_order_when_nothing_else_differs() {
        let was = files(&[("a", 1), ("b", 2), ("c", 3)]);
        assert_eq!(
            input_differences(&was, &files(&[("a", 1), ("c", 4), ("d", 5)])),
            [
                "input b: 2 bytes there, not in this job",
                "input c: 3 bytes there, 4 bytes in this job",
                "input d: not there, 5 bytes in this job"
            ]
        );
        assert_eq!(
            input_differences(&was, &files(&[("b", 2), ("a", 1), ("c", 3)])),
            ["input: the same files in another order"]
        );
        assert_eq!(input_differences(&was, &was), [""; 0]);
    }

    #[test]
    fn the_list_is_bounded_in_lines_and_length() {
        let was = files(&[]);
        let names: Vec<String> = (0..1000).map(|i| format!("{i:04}")).collect();
        let now: Vec<(&str, u64)> = names.iter().map(|n| (n.as_str(), 1)).collect();
        let lines = limit_lines(input_differences(&was, &files(&now)));
        assert_eq!((lines.len(), lines[MAX_LINES].as_str()), (MAX_LINES + 1, "… and 988 more"));
        assert!(shown(Some(&json!("é".repeat(1000)))).chars().count() <= MAX_VALUE_CHARACTERS + 1);
    }

    #[test]
    fn fields_are_named_as_in_the_job_file() {
        let mut found = BTreeMap::new();
        collect_fields(
            "",
            &json!({"job": {"seed": 1, "pack": {"length": 64}, "sql": null}, "teacher": {}}),
            &mut found,
        );
        let names: Vec<&str> = found.keys().map(|k| name(k)).collect();
        assert_eq!(names, ["pack.length", "seed", "teacher"]);
    }
}
