//! Parses a job file into a [`JobSpec`], and reports all problems at once.
//!
//! ```text
//!  YAML ─► value tree ─► JSON Schema (generated from the types) ─► problems ─┐
//!              └── invalid parts removed ─► JobSpec ─► checks ───────────────┴─► all problems, or the job
//! ```
//!
//! The invalid parts are removed so that the checks of [`crate::checks`] can inspect everything else. A user can then
//! fix all mistakes at once. A problem of a field that is already reported is not reported again.

mod derive;
mod describe;
mod schema;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::{Value, json};

use self::describe::{describe, field_path};
use crate::checks::{self, JobPath};
use crate::document::Document;
use crate::problems::{Problem, Problems};
use crate::sections::{SectionFile, SectionKind};
use crate::spec::JobSpec;

/// The result of parsing a job file: the job, if one can be built, and all problems.
#[derive(Debug, Clone)]
pub struct Parsed {
    /// The job with invalid parts replaced by defaults; `None` if a required part is missing or invalid.
    pub spec: Option<JobSpec>,
    /// All problems found so far.
    pub problems: Problems,
    /// Positions of the fields in the file.
    pub positions: Positions,
}

/// Positions of a job's fields in its file, for problems that are found later.
#[derive(Debug, Clone, Default)]
pub struct Positions(Option<Arc<Document>>);

impl Positions {
    /// Whether the file contains a field, even with its default value.
    pub fn contains(&self, field: &str) -> bool {
        self.0.as_ref().is_some_and(|document| document.has(field))
    }

    /// Sets the position of every problem that names a field and has none.
    pub fn locate(&self, problems: &mut Problems) {
        let Some(document) = &self.0 else { return };
        for problem in problems.0.iter_mut().filter(|p| !p.field.is_empty()) {
            problem.position.get_or_insert_with(|| document.position(&problem.field));
        }
    }
}

impl Parsed {
    /// Returns the job if there are no problems.
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

/// The format of job files: the built-in keys, and the sections that operators declare.
#[derive(Debug)]
pub struct JobFormat {
    sections: Vec<SectionKind>,
    /// The schema that validates values after single values were wrapped in lists. It gives one message per mistake.
    schema: Value,
    validator: Result<jsonschema::Validator, String>,
}

/// Returns `; did you mean `X`?` if one of the names is similar to what was found, else an empty string.
pub fn did_you_mean(got: &str, names: &[&str]) -> String {
    describe::nearest(got, names).map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}

/// Converts floats such as `16.0` and `1e2` to integers: JSON Schema accepts them as integers, serde does not.
fn convert_integral_floats(value: &mut Value) {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            if let Some(whole) = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() <= EXACT) {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(convert_integral_floats),
        Value::Object(map) => map.values_mut().for_each(convert_integral_floats),
        _ => {}
    }
}

impl JobFormat {
    /// Creates the format with the sections of operators.
    pub fn new(sections: Vec<SectionKind>) -> Self {
        let schema = schema::plain_schema(&sections);
        let validator = jsonschema::validator_for(&schema).map_err(|e| e.to_string());
        Self { sections, schema, validator }
    }

    /// Parses YAML or JSON, and runs all checks that need no I/O. Text that begins with a brace and is valid JSON is
    /// parsed as JSON.
    ///
    /// Cost: linear in the text. Input that would take longer (deep nesting, aliases of aliases) is refused when it
    /// occurs.
    pub fn parse(&self, text: &str) -> Parsed {
        self.checked(Document::read(text))
    }

    /// Parses JSON only.
    pub fn parse_json(&self, text: &str) -> Parsed {
        self.checked(Document::read_json(text))
    }

    /// Parses and checks a job file, without I/O.
    ///
    /// # Errors
    /// All problems, each with its field and position.
    pub fn read(&self, text: &str) -> Result<JobSpec, Problems> {
        self.parse(text).into_result()
    }

    /// Returns the JSON Schema of the job file (draft 2020-12), for editors. Where a list of strings is required, it
    /// also accepts one string.
    pub fn json_schema(&self) -> Value {
        let mut schema = self.schema.clone();
        schema::allow_single_values(&mut schema);
        schema::remove_identity_keyword(&mut schema);
        schema
    }

    /// Removes from a job, as JSON, the keys that change no byte of its shards: names, locations, and what says how it
    /// runs. Each of these keys declares so beside its type.
    pub fn retain_identity(&self, job: &mut Value) {
        self.retain_identity_below(job, &self.schema);
    }

    /// Returns the files on this machine that the sections of a job name.
    pub fn files(&self, job: &JobSpec) -> Vec<SectionFile> {
        self.sections.iter().flat_map(|kind| (kind.files)(&job.sections)).collect()
    }

    /// Returns every path that a job names.
    pub fn paths<'a>(&self, job: &'a JobSpec) -> Vec<JobPath<'a>> {
        checks::job_paths(job, self.files(job))
    }

    fn checked(&self, read: Result<Document, Problem>) -> Parsed {
        match read {
            Err(problem) => Parsed { spec: None, problems: Problems(vec![problem]), positions: Positions::default() },
            Ok(document) => {
                let (spec, mut problems) = self.check(document.value(), document.duplicate_keys(MAX_PROBLEMS));
                let positions = Positions(Some(Arc::new(document)));
                positions.locate(&mut problems);
                problems.sort();
                Parsed { spec, problems, positions }
            }
        }
    }

    /// Builds the job, if possible, and returns all problems after those `found` before.
    fn check(&self, mut value: Value, found: Vec<Problem>) -> (Option<JobSpec>, Problems) {
        drop_nulls(&mut value);
        self.wrap_single_values(&mut value);
        let mut problems = self.structural_problems(&value);
        for problem in &problems.0 {
            remove(&mut value, enclosing_unit(&problem.field));
        }
        problems.0.splice(0..0, found);
        fill_required(&mut value);
        convert_integral_floats(&mut value);
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
            for problem in self.semantic_problems(spec) {
                if problems.0.len() >= MAX_PROBLEMS {
                    if !problems.touches("") {
                        problems.push(too_many_problems());
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

    /// Fills in the defaults of the sections. Removes a section that cannot be parsed; either the schema has reported
    /// why, or this does.
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

    fn semantic_problems(&self, spec: &JobSpec) -> Vec<Problem> {
        let mut problems = checks::all(spec, self.files(spec));
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
            if problems.0.len() >= MAX_PROBLEMS {
                break;
            }
        }
        problems.0.sort_by(|a, b| a.field.cmp(&b.field));
        if problems.0.len() >= MAX_PROBLEMS {
            problems.0.truncate(MAX_PROBLEMS);
            problems.push(too_many_problems());
        }
        problems
    }
}

/// Removes keys without a value (`orders:`), which mean the same as absent keys.
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

fn too_many_problems() -> Problem {
    Problem::missing("", format!("there may be more than these {MAX_PROBLEMS} problems"))
}

/// Maximum number of problems reported: users do not fix more at once, and a hostile file can have one per byte.
const MAX_PROBLEMS: usize = 100;

/// Returns the part of the tree that is invalid without the value at a field path: for a holdout, the whole holdout.
fn enclosing_unit(field: &str) -> &str {
    let Some(rest) = field.strip_prefix("input.holdout.") else { return field };
    let name = rest.find('.').unwrap_or(rest.len());
    &field[..field.len() - rest.len() + name]
}

/// Removes the value at a field path from the tree.
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
            // An invalid item becomes an empty string, so that the indices of the other items do not change.
            if let Some(item) = last.parse::<usize>().ok().and_then(|i| items.get_mut(i)) {
                *item = json!("");
            }
        }
        _ => {}
    }
}

/// Inserts placeholders for required values that are missing or were removed, so that the other checks can run.
///
/// The job is refused in any case: each of these fields is in the list of problems.
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
    if let Some(Value::Object(tables)) = map.get_mut("input").and_then(|i| i.get_mut("tables")) {
        for table in tables.values_mut().filter_map(Value::as_object_mut) {
            table.entry("format").or_insert(json!("text"));
            table.entry("paths").or_insert(json!([]));
        }
    }
}
