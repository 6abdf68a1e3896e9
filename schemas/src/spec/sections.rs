//! Sections of the job file that operators declare, in addition to the built-in keys.
//!
//! ```text
//!   lengths: {}          key ─► SectionKind of the operator: its JSON Schema, its defaults, its checks ─► JobSpec::sections
//! ```

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::problems::Problem;
use crate::spec::JobSpec;

/// The type of a section. Its doc comments, bounds and defaults define the JSON Schema, the validation and the
/// documentation.
///
/// Implementors must refuse unknown keys with `#[serde(deny_unknown_fields)]`.
pub trait Section: Serialize + DeserializeOwned + JsonSchema + 'static {
    /// Key of the section in the job file.
    const KEY: &'static str;

    /// Checks the section against other sections of the job.
    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        let _ = (job, problems);
    }
}

/// A section, independent of its Rust type.
#[derive(Debug, Clone, Copy)]
pub struct SectionKind {
    /// Key of the section in the job file.
    pub key: &'static str,
    pub(crate) schema: fn(&mut SchemaGenerator) -> Schema,
    /// Fills in the defaults of a value.
    pub(crate) complete: fn(Value) -> Result<Value, serde_json::Error>,
    pub(crate) check: fn(&JobSpec, &mut Vec<Problem>),
}

impl SectionKind {
    /// Creates the section kind of a type.
    pub const fn of<T: Section>() -> Self {
        Self {
            key: T::KEY,
            schema: |generator| generator.subschema_for::<T>(),
            complete: |value| serde_json::to_value(serde_json::from_value::<T>(value)?),
            check: |job, problems| match job.sections.get::<T>() {
                Ok(Some(section)) => section.check(job, problems),
                Ok(None) => {}
                Err(problem) => problems.push(problem),
            },
        }
    }
}

/// The operator sections of a job, by key.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sections(BTreeMap<String, Value>);

impl Sections {
    /// Returns the section of a type; `None` if the job has none.
    ///
    /// # Errors
    /// If the value does not deserialize, for example in a data set made by another version of the operator.
    pub fn get<T: Section>(&self) -> Result<Option<T>, Problem> {
        let read = |value: &Value| {
            serde_json::from_value(value.clone()).map_err(|e| Problem::new(T::KEY, value, e.to_string()))
        };
        self.0.get(T::KEY).map(read).transpose()
    }

    /// The keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Fills in the defaults of a section. Removes a section that cannot be parsed.
    pub(crate) fn complete(&mut self, kind: &SectionKind) -> Result<(), serde_json::Error> {
        let Some(value) = self.0.remove(kind.key) else { return Ok(()) };
        let complete = (kind.complete)(value)?;
        self.0.insert(kind.key.to_owned(), complete);
        Ok(())
    }
}
