//! Sections of the job file that operators declare, in addition to the built-in keys.
//!
//! ```text
//!   lengths: {}          key ─► SectionKind of the operator: its JSON Schema, its defaults, its checks ─► JobSpec::sections
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

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

    /// Whether `stillhouse derive` can compute the operator's columns from a finished data set, without its text and
    /// without its teacher.
    const IS_DERIVABLE: bool = false;

    /// Returns the section of a job whose file has none; `None` if such a job does not use the operator.
    fn when_absent() -> Option<Self> {
        None
    }

    /// Returns the files that the section names. The pipeline reads them before operators build their configs, which
    /// find the bytes in [`Sections::file`].
    fn files(&self) -> Vec<SectionFile> {
        Vec::new()
    }

    /// Checks the section against other sections of the job.
    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        let _ = (job, problems);
    }
}

/// A file on this machine that a section names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SectionFile {
    /// Field that names it, such as `subtokens.permutation`.
    pub field: Cow<'static, str>,
    /// Its path in the job file.
    pub path: String,
    /// The kinds of files that are valid, in words, such as `a .npy or .json file`.
    pub valid: &'static str,
    /// Largest size in bytes.
    pub max_bytes: u64,
    /// Name of the file beside the shards of a finished data set that holds the same values. `None` for a file that is
    /// needed only to make the shards, and of which the data set has the checksum alone.
    pub stored_as: Option<&'static str>,
}

/// A section, independent of its Rust type.
#[derive(Debug, Clone, Copy)]
pub struct SectionKind {
    /// Key of the section in the job file.
    pub key: &'static str,
    /// See [`Section::IS_DERIVABLE`].
    pub is_derivable: bool,
    pub(crate) schema: fn(&mut SchemaGenerator) -> Schema,
    pub(crate) when_absent: fn() -> Option<Value>,
    /// Fills in the defaults of a value.
    pub(crate) complete: fn(Value) -> Result<Value, serde_json::Error>,
    pub(crate) files: fn(&Sections) -> Vec<SectionFile>,
    pub(crate) check: fn(&JobSpec, &mut Vec<Problem>),
}

impl SectionKind {
    /// Creates the section kind of a type.
    pub const fn of<T: Section>() -> Self {
        Self {
            key: T::KEY,
            is_derivable: T::IS_DERIVABLE,
            schema: |generator| generator.subschema_for::<T>(),
            when_absent: || T::when_absent().and_then(|section| serde_json::to_value(section).ok()),
            complete: |value| serde_json::to_value(serde_json::from_value::<T>(value)?),
            files: |sections| sections.get::<T>().ok().flatten().map(|section| section.files()).unwrap_or_default(),
            check: |job, problems| match job.sections.get::<T>() {
                Ok(Some(section)) => section.check(job, problems),
                Ok(None) => {}
                Err(problem) => problems.push(problem),
            },
        }
    }
}

/// The operator sections of a job, by key, and the content of the files that they name.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sections {
    values: BTreeMap<String, Value>,
    /// Keys of sections in the file that cannot be parsed; each has a problem.
    #[serde(skip)]
    invalid: BTreeSet<String>,
    /// By field, such as `subtokens.permutation`; never serialized with the job.
    #[serde(skip)]
    files: BTreeMap<String, Arc<[u8]>>,
}

impl Sections {
    /// Returns the section of a type; `None` if the job has none.
    ///
    /// # Errors
    /// If the value does not deserialize, for example in a data set made by another version of the operator.
    pub fn get<T: Section>(&self) -> Result<Option<T>, Problem> {
        let read = |value: &Value| {
            serde_json::from_value(value.clone()).map_err(|e| Problem::new(T::KEY, value, e.to_string()))
        };
        self.values.get(T::KEY).map(read).transpose()
    }

    /// Whether the job file has a section with this key, valid or not.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key) || self.invalid.contains(key)
    }

    /// The keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// Sets a section.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn set<T: Section>(&mut self, section: &T) -> Result<(), serde_json::Error> {
        self.values.insert(T::KEY.to_owned(), serde_json::to_value(section)?);
        Ok(())
    }

    /// Returns the content of the file that a field names, if it was read.
    pub fn file(&self, field: &str) -> Option<&Arc<[u8]>> {
        self.files.get(field)
    }

    /// Sets the content of the file that a field names.
    pub fn set_file(&mut self, field: &str, bytes: Arc<[u8]>) {
        self.files.insert(field.to_owned(), bytes);
    }

    /// Fills in the defaults of a section. Removes a section that cannot be parsed.
    pub(crate) fn complete(&mut self, kind: &SectionKind) -> Result<(), serde_json::Error> {
        let Some(value) = self.values.remove(kind.key) else {
            let default = (kind.when_absent)();
            self.values.extend(default.map(|value| (kind.key.to_owned(), value)));
            return Ok(());
        };
        match (kind.complete)(value) {
            Ok(complete) => drop(self.values.insert(kind.key.to_owned(), complete)),
            Err(e) => {
                self.invalid.insert(kind.key.to_owned());
                return Err(e);
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Sections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: BTreeMap<&str, usize> =
            self.files.iter().map(|(field, file)| (field.as_str(), file.len())).collect();
        f.debug_struct("Sections").field("values", &self.values).field("bytes_of_files", &bytes).finish()
    }
}
