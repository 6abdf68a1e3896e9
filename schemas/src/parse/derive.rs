//! Parses a job that derives columns from a finished data set. Its keys replace those of the data set's own job.
//!
//! A key with the same value as in the data set's job has no effect, so the whole job file can be given.
//!
//! ```text
//!   the data set's job ──┐
//!                        ├─► one job, checked as any other ─► what differs from the data set's job is computed
//!   name, output, and ───┘
//!   subtokens, partitions, orders, extract.noise.tolerance
//! ```

use serde_json::{Map, Value};

use super::{JobFormat, MAX_PROBLEMS, Parsed, Positions};
use crate::document::Document;
use crate::problems::{Problem, Problems};
use crate::spec::{Dtype, JobSpec};
use std::sync::Arc;

/// Keys that are never taken from the data set's job.
const NEVER_INHERITED: [&str; 5] = ["version", "name", "output", "storage", "engine"];

impl JobFormat {
    /// Parses the job that derives a data set from one with the job `source`.
    ///
    /// The problems are those of the whole job, with positions in this file. A key that would require another pass over
    /// the text or the teacher is a problem.
    pub fn parse_derived(&self, text: &str, source: &JobSpec) -> Parsed {
        let unreadable = |problem| {
            let problems = Problems(vec![problem]);
            Parsed { spec: None, problems, positions: Positions::default() }
        };
        let document = match Document::read(text) {
            Ok(document) => document,
            Err(problem) => return unreadable(problem),
        };
        let given = match document.value() {
            Value::Object(given) => given,
            _ => {
                return unreadable(Problem::missing(
                    "",
                    "a job file consists of keys and values, such as `name: views`",
                ));
            }
        };
        let job = match serde_json::to_value(source) {
            Ok(Value::Object(job)) => job,
            _ => return unreadable(Problem::missing("", "the job of the data set cannot be read")),
        };
        let mut found = document.duplicate_keys(MAX_PROBLEMS);
        // a whole job file contains defaults and other spellings of numbers, so it is compared in normalized form if it
        // parses as a job
        let (normalized, unread) = self.check(Value::Object(given.clone()), Vec::new());
        let mut normalized = match normalized.and_then(|spec| serde_json::to_value(spec).ok()) {
            Some(Value::Object(normalized)) => normalized,
            _ => Map::new(),
        };
        for problem in &unread.0 {
            normalized.remove(problem.field.split(['.', '[']).next().unwrap_or_default());
        }
        let (spec, mut problems) = {
            let derivable = self.sections.iter().filter(|kind| kind.is_derivable).map(|kind| kind.key).collect();
            let mut merger = Merger { derivable, problems: &mut found };
            let mut merged = Value::Object(merger.merge(job, given, &normalized));
            // jobs can no longer request this type, but nothing that is derived needs the teacher
            let dtype = merged.pointer_mut(DTYPE).filter(|_| dtype_of(source) == Some(Dtype::Int8));
            let is_retired = dtype.map(|dtype| *dtype = Dtype::F32.name().into()).is_some();
            let (mut spec, problems) = self.check(merged, found);
            if let Some(extract) = spec.as_mut().and_then(|spec| spec.extract.as_mut()).filter(|_| is_retired) {
                extract.teacher.dtype = Dtype::Int8;
            }
            (spec, problems)
        };
        let positions = Positions(Some(Arc::new(document)));
        positions.locate(&mut problems);
        problems.sort();
        Parsed { spec, problems, positions }
    }
}

impl JobFormat {
    /// Removes from a job that derives, as JSON, the keys that change no byte of the result, as
    /// [`JobFormat::retain_identity`] does. The keys of the data set's own job stay: they are part of what it derives
    /// from.
    pub fn retain_derived_identity(&self, job: &mut Value) {
        let Value::Object(job) = job else { return };
        let derivable = self.sections.iter().filter(|kind| kind.is_derivable).map(|kind| kind.key);
        let own = NEVER_INHERITED.into_iter().chain(derivable).filter_map(|key| job.remove_entry(key));
        let mut own = Value::Object(own.collect());
        self.retain_identity(&mut own);
        if let Value::Object(own) = own {
            job.extend(own);
        }
    }
}

const DTYPE: &str = "/extract/teacher/dtype";

fn dtype_of(job: &JobSpec) -> Option<Dtype> {
    job.extract.as_ref().map(|extract| extract.teacher.dtype)
}

/// Merges the job that derives into the job of the data set.
struct Merger<'p> {
    /// Keys of the sections that replace those of the data set's job as a whole.
    derivable: Vec<&'static str>,
    problems: &'p mut Vec<Problem>,
}

impl Merger<'_> {
    fn merge(
        &mut self,
        mut job: Map<String, Value>,
        given: Map<String, Value>,
        normalized: &Map<String, Value>,
    ) -> Map<String, Value> {
        for key in NEVER_INHERITED {
            job.remove(key);
        }
        for (key, value) in given {
            match key.as_str() {
                key if NEVER_INHERITED.contains(&key) || self.derivable.contains(&key) => {
                    job.insert(key.to_owned(), value);
                }
                "extract" => self.merge_extract(&mut job, &value, normalized.get("extract")),
                key => self.report_differences(key, &value, job.get(key), normalized.get(key)),
            }
        }
        job
    }

    /// Applies `extract: {noise: {tolerance: 1e-2}}`. All other keys of `extract` must match the data set's job.
    fn merge_extract(&mut self, job: &mut Map<String, Value>, given: &Value, normalized: Option<&Value>) {
        let tolerance = given.get("noise").and_then(|noise| noise.get("tolerance")).filter(|value| !value.is_null());
        let mut others = given.clone();
        if let Some(noise) = others.get_mut("noise").and_then(Value::as_object_mut) {
            noise.remove("tolerance");
        }
        if others.get("noise").and_then(Value::as_object).is_some_and(Map::is_empty)
            && let Some(others) = others.as_object_mut()
        {
            others.remove("noise");
        }
        self.report_differences("extract", &others, job.get("extract"), normalized);
        let Some(tolerance) = tolerance else { return };
        let stored = job.get_mut("extract").and_then(|extract| extract.get_mut("noise"));
        match stored.and_then(Value::as_object_mut) {
            Some(stored) => drop(stored.insert("tolerance".into(), tolerance.clone())),
            None => {
                let message = "the data set has no noise whose tolerance could be raised; leave it out";
                self.problems.push(Problem::missing("extract.noise.tolerance", message));
            }
        }
    }

    /// Reports keys whose values differ from the data set's job. `read` is the file's value as a job of its own parses
    /// it, with defaults and normalized; `None` if it does not parse.
    fn report_differences(&mut self, field: &str, given: &Value, stored: Option<&Value>, read: Option<&Value>) {
        let stored = stored.unwrap_or(&Value::Null);
        if given == stored || given.is_null() || read == Some(stored) {
            return;
        }
        match (given, stored) {
            (Value::Object(given), Value::Object(of_data_set)) => {
                for (key, value) in given {
                    let read = read.and_then(|read| read.get(key));
                    self.report_differences(&format!("{field}.{key}"), value, of_data_set.get(key), read);
                }
            }
            _ if same_number(given, stored) => {}
            _ => {
                let problem = self.unchangeable(field, given, stored);
                self.problems.push(problem);
            }
        }
    }

    fn unchangeable(&self, field: &str, given: &Value, stored: &Value) -> Problem {
        let shown = |value: &Value| {
            let mut text = value.to_string();
            text.truncate(text.floor_char_boundary(80));
            text
        };
        let has = match stored {
            Value::Null => "none".to_owned(),
            stored => shown(stored),
        };
        let sections = self.derivable.join(", ");
        let message = format!(
            "cannot change: got {}, the data set has {has}; another value needs its text or its teacher again (`stillhouse run`); \
             what may be different: name, {sections}, extract.noise.tolerance, output, storage, engine",
            shown(given)
        );
        Problem::missing(field, message)
    }
}

/// Whether two values are the same number: 1 equals 1.0.
fn same_number(a: &Value, b: &Value) -> bool {
    a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::sections::{Section, SectionKind};

    const SOURCE: &str = r#"{"version": 1, "name": "made", "seed": 5, "input": {"format": "text", "paths": ["x"]}, "pack": {"length": 8},
        "extract": {"teacher": {"path": "t"}, "noise": {"tolerance": 1e-3}}, "views": {"count": 2}, "output": {"path": "out"},
        "engine": {"parallel_splits": 3}}"#;

    /// A section whose columns need neither text nor teacher.
    #[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Views {
        #[schemars(range(min = 1))]
        count: u32,
    }

    impl Section for Views {
        const KEY: &'static str = "views";
        const IS_DERIVABLE: bool = true;
    }

    /// A section whose columns need the text.
    #[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Marks {}

    impl Section for Marks {
        const KEY: &'static str = "marks";
    }

    fn format() -> JobFormat {
        JobFormat::new(vec![SectionKind::of::<Views>(), SectionKind::of::<Marks>()])
    }

    fn views(spec: &JobSpec) -> Option<u32> {
        spec.sections.get::<Views>().unwrap().map(|views| views.count)
    }

    fn derived(text: &str) -> Result<JobSpec, Vec<String>> {
        let source = format().read(SOURCE).unwrap();
        let parsed = format().parse_derived(text, &source).into_result();
        parsed.map_err(|problems| problems.0.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn what_is_said_takes_the_place_of_what_was() {
        let spec = derived(
            "version: 1\nname: views\nviews: {count: 4}\nextract: {noise: {tolerance: 0.01}}\noutput: {path: there}\n",
        );
        let spec = spec.unwrap();
        assert_eq!((spec.name.as_str(), spec.seed, spec.output.path.as_str()), ("views", 5, "there"));
        assert_eq!(views(&spec), Some(4));
        assert_eq!(spec.extract.unwrap().noise.unwrap().tolerance, 0.01);
        assert_eq!(spec.engine.parallel_splits, None, "how the data set was made says nothing of how this is");
    }

    #[test]
    fn the_whole_job_may_be_given() {
        let spec = derived(&SOURCE.replace("1e-3", "0.01").replace(r#""count": 2"#, r#""count": 3"#)).unwrap();
        assert_eq!((views(&spec), spec.seed), (Some(3), 5));
        let without =
            derived("version: 1\nname: views\nextract: {noise: {tolerance: 0.01}}\noutput: {path: there}\n").unwrap();
        assert_eq!(views(&without), Some(2), "a section that the file leaves out stays");
        assert_eq!(spec.extract.unwrap().noise.unwrap().tolerance, 0.01);
        // numbers and defaults in another spelling
        let spelt = SOURCE.replace(r#""length": 8"#, r#""length": 8, "mode": null"#).replace(r#""draws": 1, "#, "");
        derived(&spelt).unwrap();
        let told = derived(&SOURCE.replace(r#""length": 8"#, r#""length": 9"#)).unwrap_err().join("\n");
        assert!(told.contains("pack.length: cannot change: got 9, the data set has 8"), "{told}");
    }

    #[test]
    fn what_needs_the_text_or_the_teacher_is_refused_where_it_stands() {
        let told = derived(
            "version: 1\nname: views\nseed: 3\nextract: {topk: 4, noise: {draws: 2}}\nviews: {count: 0}\nmarks: {}\n",
        )
        .unwrap_err();
        let told = told.join("\n");
        for expected in [
            "seed: cannot change: got 3, the data set has 5",
            "extract.topk: cannot change",
            "extract.noise.draws: cannot change",
            "views.count: got 0",
            "marks: cannot change: got {}, the data set has none",
            "what may be different: name, views, extract.noise.tolerance,",
            "output",
        ] {
            assert!(told.contains(expected), "{expected}: {told}");
        }
        let source = format().read(SOURCE).unwrap();
        let problems =
            format().parse_derived("version: 1\nname: views\nseed: 3\noutput: {path: x}\n", &source).problems;
        assert_eq!(problems.0[0].position.map(|p| (p.line, p.column)), Some((3, 1)));
        assert!(derived("[1]").unwrap_err()[0].contains("keys and values"));
    }
}
