//! From the text of a job file to a [`JobSpec`], with every problem told at once.
//!
//! ```text
//!  YAML ─► value tree ─► JSON Schema (made from the types) ─► problems ─┐
//!              └── wrong parts taken out ─► JobSpec ─► named checks ────┴─► all problems, or the job
//! ```
//!
//! Taking the wrong parts out lets the checks of [`crate::checks`] look at everything else, so that a
//! user mends a job file once and not once per mistake. A check whose field is already
//! reported is not reported again.

use std::sync::OnceLock;

use jsonschema::error::ValidationErrorKind;
use serde_json::{Map, Value, json};

use crate::checks;
use crate::problems::{Problem, Problems};
use crate::spec::JobSpec;

/// A job file that was read as far as it could be: the job, where one can be made, and what is wrong.
#[derive(Debug, Clone)]
pub struct Parsed {
    /// The job with wrong parts replaced by defaults; `None` where a required part is missing or wrong.
    pub spec: Option<JobSpec>,
    /// Everything wrong so far.
    pub problems: Problems,
}

impl Parsed {
    /// Parses YAML (or JSON, which is YAML) and runs all checks that need no I/O.
    ///
    /// Cost: about linear in the text. What would cost a YAML parser more (deep nesting, many anchors) is refused before.
    pub fn from_yaml(text: &str) -> Self {
        if let Some(message) = too_tangled(text) {
            return Self { spec: None, problems: Problems(vec![Problem::missing("", message)]) };
        }
        match serde_yaml_ng::from_str::<Value>(text) {
            Ok(value) => Self::from_value(value),
            Err(e) => Self { spec: None, problems: Problems(vec![Problem::missing("", format!("is not YAML: {e}"))]) },
        }
    }

    /// Checks a value tree.
    pub fn from_value(mut value: Value) -> Self {
        drop_nulls(&mut value);
        let mut problems = structural_problems(&value);
        for problem in &problems.0 {
            remove(&mut value, whole(&problem.field));
        }
        fill_required(&mut value);
        let spec = serde_json::from_value::<JobSpec>(value).ok();
        if let Some(spec) = &spec {
            for problem in checks::all(spec) {
                if problems.0.len() >= MOST_PROBLEMS {
                    if !problems.touches("") {
                        problems.push(there_may_be_more());
                    }
                    break;
                }
                if !problems.touches(&problem.field) {
                    problems.push(problem);
                }
            }
        } else if problems.0.is_empty() {
            problems.push(Problem::missing("", "could not be read as a job"));
        }
        Self { spec, problems }
    }

    /// The job, when nothing is wrong.
    ///
    /// # Errors
    /// All problems.
    pub fn into_result(self) -> Result<JobSpec, Problems> {
        match (self.spec, self.problems.into_result()) {
            (_, Err(problems)) => Err(problems),
            (Some(spec), Ok(())) => Ok(spec),
            (None, Ok(())) => Err(Problems(vec![Problem::missing("", "could not be read as a job")])),
        }
    }
}

impl JobSpec {
    /// Parses and checks a job file, without I/O.
    ///
    /// # Errors
    /// All problems, each with its field.
    pub fn from_yaml(text: &str) -> Result<Self, Problems> {
        Parsed::from_yaml(text).into_result()
    }

    /// The JSON Schema of the job file (draft 2020-12).
    pub fn json_schema() -> Value {
        static SCHEMA: OnceLock<Value> = OnceLock::new();
        SCHEMA
            .get_or_init(|| {
                let mut schema = Value::from(schemars::schema_for!(JobSpec));
                simplify(&mut schema);
                schema
            })
            .clone()
    }
}

/// A key without a value (`orders:`) means the same as no key.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Rewrites what schemars makes of `Option` and of documented enums into the plain form: `$ref`, `enum`.
///
/// The plain form gives messages that name the valid values instead of "not valid under any of the schemas".
fn simplify(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::Array(options)) = map.get_mut("anyOf") {
                options.retain(|o| o.get("type") != Some(&json!("null")));
                if let [Value::Object(only)] = options.as_slice() {
                    let only = only.clone();
                    map.remove("anyOf");
                    map.extend(only);
                }
            }
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|t| t != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".into(), only);
                }
            }
            flatten_enum(map);
            map.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}

fn flatten_enum(map: &mut Map<String, Value>) {
    let Some(Value::Array(options)) = map.get("oneOf") else { return };
    let mut values = Vec::new();
    let mut lines = Vec::new();
    for option in options {
        let given: Vec<&Value> = match (option.get("const"), option.get("enum")) {
            (Some(v), _) => vec![v],
            (None, Some(Value::Array(vs))) => vs.iter().collect(),
            _ => return,
        };
        for value in given {
            if let (Some(name), Some(text)) = (value.as_str(), option.get("description")) {
                lines.push(format!("{name}: {}", text.as_str().unwrap_or_default()));
            }
            values.push(value.clone());
        }
    }
    let head = map.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    map.remove("oneOf");
    map.insert("type".into(), json!("string"));
    map.insert("enum".into(), Value::Array(values));
    map.insert("description".into(), json!(format!("{head}\n\n{}", lines.join("\n")).trim()));
}

fn structural_problems(value: &Value) -> Problems {
    static VALIDATOR: OnceLock<Result<jsonschema::Validator, String>> = OnceLock::new();
    let mut problems = Problems::default();
    let made = VALIDATOR.get_or_init(|| jsonschema::validator_for(&JobSpec::json_schema()).map_err(|e| e.to_string()));
    let validator = match made {
        Ok(validator) => validator,
        Err(e) => {
            problems.push(Problem::missing("", format!("the schema of this program is broken: {e}")));
            return problems;
        }
    };
    for error in validator.iter_errors(value) {
        let field = field_path(error.instance_path().as_str());
        describe(&field, error.instance(), error.kind(), &mut problems);
        if problems.0.len() >= MOST_PROBLEMS {
            break;
        }
    }
    problems.0.sort_by(|a, b| a.field.cmp(&b.field));
    if problems.0.len() >= MOST_PROBLEMS {
        problems.0.truncate(MOST_PROBLEMS);
        problems.push(there_may_be_more());
    }
    problems
}

fn there_may_be_more() -> Problem {
    Problem::missing("", format!("there may be more than these {MOST_PROBLEMS} problems"))
}

/// Problems that are told at once: nobody mends more, and a hostile file has as many as it has bytes.
const MOST_PROBLEMS: usize = 100;
/// Deepest nesting: a job has five levels.
const DEEPEST: usize = 64;
/// Widest beginning of a line: YAML nests by indentation, and by `- - -` and `? ? ?`.
const WIDEST: usize = 256;
const MOST_ANCHORS: usize = 256;

/// What a YAML parser would take more than linear time over.
fn too_tangled(text: &str) -> Option<String> {
    let (mut depth, mut anchors, mut before) = (0_usize, 0_usize, b'\n');
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'&' if matches!(before, b'\n' | b' ' | b'\t' | b',' | b'[' | b'{') => anchors += 1,
            _ => {}
        }
        if depth > DEEPEST {
            return Some(format!("has more than {DEEPEST} levels of brackets"));
        }
        before = byte;
    }
    if anchors > MOST_ANCHORS {
        return Some(format!("has more than {MOST_ANCHORS} anchors"));
    }
    let beginning = |line: &str| line.bytes().take_while(|b| matches!(b, b' ' | b'\t' | b'-' | b'?' | b':')).count();
    let wide = text.lines().position(|line| beginning(line) > WIDEST)?;
    Some(format!("begins line {} with more than {WIDEST} spaces or dashes", wide + 1))
}

fn describe(field: &str, got: &Value, kind: &ValidationErrorKind, problems: &mut Problems) {
    use ValidationErrorKind as K;
    // somebody may have tried to give a secret there
    let hidden = field.split('.').any(|part| part == "storage");
    let problem = |field: String, got: String, message: String| match hidden {
        true => Problem::missing(field, message),
        false => Problem::new(field, got, message),
    };
    let at = |message: String| problem(field.to_owned(), shown(got), message);
    match kind {
        K::AdditionalProperties { unexpected } => {
            let valid = known_keys(field).join(", ");
            for key in unexpected.iter().take(MOST_PROBLEMS) {
                let value = got.get(key).map(shown).unwrap_or_default();
                problems.push(problem(join(field, key), value, format!("unknown key; valid keys here: {valid}")));
            }
        }
        K::Required { property } => {
            let key = property.as_str().unwrap_or_default();
            problems.push(Problem::missing(join(field, key), "is required and missing"));
        }
        K::Enum { options } => {
            let valid: Vec<String> = options.as_array().into_iter().flatten().map(shown).collect();
            problems.push(at(format!("not valid; valid: {}", valid.join(", "))));
        }
        K::Type { kind } => {
            let wanted = match kind {
                jsonschema::error::TypeKind::Single(t) => t.to_string(),
                jsonschema::error::TypeKind::Multiple(_) => "another type".into(),
            };
            problems.push(at(format!("has type {}; valid: {wanted}", type_name(got))));
        }
        K::Minimum { limit } => problems.push(at(format!("too small; valid: {limit} or more"))),
        K::Maximum { limit } => problems.push(at(format!("too large; valid: {limit} or less"))),
        K::MinItems { limit } => problems.push(at(format!("too few items; valid: {limit} or more"))),
        K::MaxProperties { limit } => problems.push(at(format!("too many entries; valid: at most {limit}"))),
        K::Pattern { pattern } => problems.push(at(format!("not valid; must match {pattern}"))),
        _ => problems.push(at(kind.keyword().to_owned() + " does not hold")),
    }
}

/// Keys that the schema knows at a field, for "unknown key" messages.
fn known_keys(field: &str) -> Vec<String> {
    let schema = JobSpec::json_schema();
    let resolve = |node: &Value| -> Value {
        match node.get("$ref").and_then(Value::as_str) {
            Some(r) => schema.pointer(r.trim_start_matches('#')).cloned().unwrap_or(Value::Null),
            None => node.clone(),
        }
    };
    let mut node = schema.clone();
    for part in field.split('.').filter(|p| !p.is_empty()) {
        let next = node
            .pointer(&format!("/properties/{part}"))
            .or_else(|| node.get("additionalProperties"))
            .cloned()
            .unwrap_or(Value::Null);
        node = resolve(&next);
    }
    node.get("properties").and_then(Value::as_object).map(|m| m.keys().cloned().collect()).unwrap_or_default()
}

/// `/input/paths/0` as `input.paths[0]`.
fn field_path(pointer: &str) -> String {
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

/// A value as it is shown in a message: short, on one line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The part of the tree that makes no sense without the value at a field path: of a holdout all of it.
fn whole(field: &str) -> &str {
    let Some(rest) = field.strip_prefix("input.holdout.") else { return field };
    let name = rest.find('.').unwrap_or(rest.len());
    &field[..field.len() - rest.len() + name]
}

/// Takes the value at a field path out of the tree.
fn remove(value: &mut Value, field: &str) {
    let mut parts: Vec<String> = Vec::new();
    for part in field.split('.') {
        let mut pieces = part.split('[');
        if let Some(key) = pieces.next().filter(|k| !k.is_empty()) {
            parts.push(key.to_owned());
        }
        parts.extend(pieces.map(|index| index.trim_end_matches(']').to_owned()));
    }
    let Some((last, path)) = parts.split_last() else { return };
    let mut node = value;
    for part in path {
        let next = match node {
            Value::Object(map) => map.get_mut(part),
            Value::Array(items) => part.parse::<usize>().ok().and_then(|i| items.get_mut(i)),
            _ => None,
        };
        match next {
            Some(next) => node = next,
            None => return,
        }
    }
    match node {
        Value::Object(map) => {
            map.remove(last);
        }
        Value::Array(items) => {
            // A wrong item becomes an empty string, so that the places of the others stay.
            if let Some(item) = last.parse::<usize>().ok().and_then(|i| items.get_mut(i)) {
                *item = json!("");
            }
        }
        _ => {}
    }
}

/// Required values that were missing or taken out get a stand-in, so that the other checks can run.
///
/// The job is refused anyway: each of these fields is in the list of problems.
fn fill_required(value: &mut Value) {
    let Value::Object(map) = value else { return };
    let sections = [("input", json!({})), ("pack", json!({"length": 1024})), ("output", json!({"path": ""}))];
    map.entry("version").or_insert(json!(1));
    map.entry("name").or_insert(json!("unnamed"));
    for (key, defaults) in sections {
        let section = map.entry(key).or_insert(json!({}));
        if let (Value::Object(section), Value::Object(defaults)) = (section, defaults) {
            for (k, v) in defaults {
                section.entry(k).or_insert(v);
            }
        }
    }
    if let Some(Value::Object(extract)) = map.get_mut("extract") {
        let teacher = extract.entry("teacher").or_insert(json!({}));
        if let Value::Object(teacher) = teacher {
            teacher.entry("path").or_insert(json!(""));
        }
    }
    if let Some(Value::Object(section)) = map.get_mut("subtokens") {
        section.entry("length").or_insert(json!(1));
    }
    if let Some(Value::Object(tables)) = map.get_mut("input").and_then(|i| i.get_mut("tables")) {
        for table in tables.values_mut().filter_map(Value::as_object_mut) {
            table.entry("format").or_insert(json!("text"));
            table.entry("paths").or_insert(json!([]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_files_are_refused_before_they_cost_anything() {
        let n = 100_000;
        let keys: String = (0..n).map(|i| format!("k{i}: 1\n")).collect();
        let anchors: String = (0..n).map(|i| format!("k{i}: &a{i} 1\n")).collect();
        for (text, says) in [
            ("[".repeat(n), "levels of brackets"),
            ("{\"a\":".repeat(n), "levels of brackets"),
            ("- ".repeat(n), "begins line 1"),
            (format!("a: 1\n{}b: 1", "? ".repeat(n)), "begins line 2"),
            (anchors, "anchors"),
            (keys, "more than these 100 problems"),
            (format!("input: {{paths: [{}]}}", "1,".repeat(n)), "more than these 100 problems"),
        ] {
            let parsed = Parsed::from_yaml(&text);
            assert!(parsed.problems.0.len() <= MOST_PROBLEMS + 40, "{says}: {}", parsed.problems.0.len());
            assert!(
                parsed.problems.0.iter().any(|p| p.message.contains(says)),
                "{says}: {:?}",
                parsed.problems.0.first()
            );
        }
    }

    const GOOD: &str = "version: 1\nname: a\ninput: {format: jsonl, paths: [x.jsonl]}\n\
        tokenizer: {path: t.json}\npack: {length: 16}\noutput: {path: out}\n";

    #[test]
    fn a_short_job_takes_defaults() {
        let job = JobSpec::from_yaml(GOOD).unwrap();
        assert_eq!(job.output.shard_megabytes, 500.0);
        assert_eq!(job.input.text, "text");
        assert_eq!(job.noise_seed(), 0);
    }

    #[test]
    fn every_problem_is_told_at_once() {
        let text = "version: 2\nname: A b\nfrob: 1\ninput: {format: xml, paths: [], sql: 3, holdout: {validation: {}, b: {share: 2}}}\n\
            pack: {length: two, mode: wrap}\nextract: {teacher: {device: gpu}, topk: -1, noise: {tolerance: 2, drawz: 3}}\n\
            subtokens: {length: 99}\norders: {kind: strided}\nengine: {kind: ballista}\n";
        let problems = Parsed::from_yaml(text).into_result().unwrap_err();
        let shown = problems.to_string();
        for field in [
            "version: got 2",
            "name: got \"A b\"",
            "frob: got 1: unknown key",
            "input.format: got \"xml\"",
            "input.paths: got []",
            "input.sql: got 3",
            "input.holdout.validation: got none: valid: exactly one of",
            "input.holdout.b.share: got 2",
            "pack.length: got \"two\"",
            "extract.teacher.path: is required",
            "extract.teacher.device: got \"gpu\"",
            "extract.topk: got -1",
            "extract.noise.tolerance: got 2",
            "extract.noise.drawz: got 3: unknown key",
            "subtokens.length: got 99",
            "orders.kind: got strided",
            "engine.kind: got ballista",
            "output: is required",
        ] {
            assert!(shown.contains(field), "{field} not in:\n{shown}");
        }
    }

    #[test]
    fn unknown_keys_name_the_valid_ones() {
        let problems = Parsed::from_yaml(&GOOD.replace("length: 16", "length: 16, lenght: 3")).problems;
        let text = problems.to_string();
        assert!(text.contains("pack.lenght: got 3: unknown key; valid keys here: boundary, length, mode"), "{text}");
    }

    #[test]
    fn yaml_errors_give_the_line() {
        let text = Parsed::from_yaml("version: 1\nname: [\n").problems.to_string();
        assert!(text.contains("line"), "{text}");
    }

    #[test]
    fn an_explicit_null_is_no_key() {
        assert!(JobSpec::from_yaml(&format!("{GOOD}extract:\npartitions: ~\n")).unwrap().partitions.is_none());
    }
}
