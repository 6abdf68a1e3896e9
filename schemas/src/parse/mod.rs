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

mod derive;
mod describe;
mod schema;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::{Value, json};

use self::describe::{describe, field_path};
use crate::checks;
use crate::document::Document;
use crate::problems::{Problem, Problems};
use crate::sections::SectionKind;
use crate::spec::JobSpec;

/// A job file that was read as far as it could be: the job, where one can be made, and what is wrong.
#[derive(Debug, Clone)]
pub struct Parsed {
    /// The job with wrong parts replaced by defaults; `None` where a required part is missing or wrong.
    pub spec: Option<JobSpec>,
    /// Everything wrong so far.
    pub problems: Problems,
    /// Where the fields stand.
    pub positions: Positions,
}

/// Where the fields of a job stand in its file, for problems that are found later.
#[derive(Debug, Clone, Default)]
pub struct Positions(Option<Arc<Document>>);

impl Positions {
    /// Gives every problem of a field without a place the one of the field.
    pub fn locate(&self, problems: &mut Problems) {
        let Some(document) = &self.0 else { return };
        for problem in problems.0.iter_mut().filter(|p| !p.field.is_empty()) {
            problem.position.get_or_insert_with(|| document.position(&problem.field));
        }
    }
}

impl Parsed {
    /// Whether the file says something of a field, be it what it is anyway.
    pub fn says(&self, field: &str) -> bool {
        self.positions.0.as_ref().is_some_and(|document| document.has(field))
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

/// What a job file may say: the keys of the house, and the sections that operators declare.
#[derive(Debug)]
pub struct JobFormat {
    sections: Vec<SectionKind>,
    /// The schema that values are held against, once lists of one are lists: it gives one message for one mistake.
    schema: Value,
    validator: Result<jsonschema::Validator, String>,
}

/// `; did you mean `X`?`, where one of these names is near what was got.
pub fn did_you_mean(got: &str, names: &[&str]) -> String {
    describe::nearest(got, names).map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}

/// `16.0` and `1e2` are whole numbers, as JSON Schema has it; serde has them as floats.
fn whole_numbers(value: &mut Value) {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            if let Some(whole) = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() <= EXACT) {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(map) => map.values_mut().for_each(whole_numbers),
        _ => {}
    }
}

impl JobFormat {
    /// The format with these sections of operators.
    pub fn new(sections: Vec<SectionKind>) -> Self {
        let schema = schema::strict(&sections);
        let validator = jsonschema::validator_for(&schema).map_err(|e| e.to_string());
        Self { sections, schema, validator }
    }

    /// Parses YAML or JSON and runs all checks that need no I/O. JSON is what begins with a brace and is JSON.
    ///
    /// Cost: linear in the text. What would take more (deep nesting, aliases of aliases) is refused where it is met.
    pub fn parse(&self, text: &str) -> Parsed {
        self.checked(Document::read(text))
    }

    /// Parses JSON, and nothing else.
    pub fn parse_json(&self, text: &str) -> Parsed {
        self.checked(Document::read_json(text))
    }

    /// Parses and checks a job file, without I/O.
    ///
    /// # Errors
    /// All problems, each with its field and its place.
    pub fn read(&self, text: &str) -> Result<JobSpec, Problems> {
        self.parse(text).into_result()
    }

    /// The JSON Schema of the job file (draft 2020-12), as editors take it: where a list of text is meant, one text is taken too.
    pub fn json_schema(&self) -> Value {
        let mut schema = self.schema.clone();
        schema::one_or_more(&mut schema);
        schema
    }

    fn checked(&self, read: Result<Document, Problem>) -> Parsed {
        match read {
            Err(problem) => Parsed { spec: None, problems: Problems(vec![problem]), positions: Positions::default() },
            Ok(document) => {
                let (spec, mut problems) = self.check(document.value(), document.twice(MOST_PROBLEMS));
                let positions = Positions(Some(Arc::new(document)));
                positions.locate(&mut problems);
                problems.sort();
                Parsed { spec, problems, positions }
            }
        }
    }

    /// The job, as far as one can be made, and everything that is wrong, after what was `found` before.
    fn check(&self, mut value: Value, found: Vec<Problem>) -> (Option<JobSpec>, Problems) {
        drop_nulls(&mut value);
        self.list_ones(&mut value);
        let mut problems = self.structural_problems(&value);
        for problem in &problems.0 {
            remove(&mut value, whole(&problem.field));
        }
        problems.0.splice(0..0, found);
        fill_required(&mut value);
        whole_numbers(&mut value);
        let (mut spec, unread) = match serde_json::from_value::<JobSpec>(value) {
            Ok(spec) => (Some(spec), None),
            Err(e) => (None, Some(e)),
        };
        if let Some(spec) = &mut spec {
            self.complete_sections(spec, &mut problems);
            if let Some(problem) = checks::too_many_alternatives(spec) {
                problems.push(problem);
                spec.input.paths.clear();
                spec.input.tables.clear();
            }
            for problem in self.problems_of(spec) {
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
            let why = unread.map_or(String::new(), |e| format!(": {e}"));
            problems.push(Problem::missing("", format!("could not be read as a job{why}")));
        }
        (spec, problems)
    }

    /// Fills in the defaults of the sections. One that cannot be read goes; the schema has said why, or this does.
    fn complete_sections(&self, spec: &mut JobSpec, problems: &mut Problems) {
        for kind in &self.sections {
            let is_below = |field: &str| field == kind.key || field.starts_with(&format!("{}.", kind.key));
            if let Err(e) = spec.sections.complete(kind)
                && !problems.0.iter().any(|p| is_below(&p.field))
            {
                problems.push(Problem::missing(kind.key, e.to_string()));
            }
        }
    }

    fn problems_of(&self, spec: &JobSpec) -> Vec<Problem> {
        let mut problems = checks::all(spec);
        for kind in &self.sections {
            (kind.check)(spec, &mut problems);
        }
        problems
    }

    fn structural_problems(&self, value: &Value) -> Problems {
        let mut problems = Problems::default();
        let validator = match &self.validator {
            Ok(validator) => validator,
            Err(e) => {
                problems.push(Problem::missing("", format!("the schema of this program is broken: {e}")));
                return problems;
            }
        };
        for error in validator.iter_errors(value) {
            let field = field_path(error.instance_path().as_str());
            describe(self, &field, error.instance(), error.kind(), &mut problems);
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

fn there_may_be_more() -> Problem {
    Problem::missing("", format!("there may be more than these {MOST_PROBLEMS} problems"))
}

/// Problems that are told at once: nobody mends more, and a hostile file has as many as it has bytes.
const MOST_PROBLEMS: usize = 100;

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
