//! A model's `config.json`, or what stands for it in a GGUF file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::error::{Result, TeacherError};

/// A `config.json` whose errors name the file and the field, and which records what is read.
pub(crate) struct ConfigFile {
    path: PathBuf,
    json: Value,
    /// The fields that were read.
    fields_read: Mutex<BTreeSet<String>>,
}

impl ConfigFile {
    pub(crate) fn new(path: PathBuf, json: Value) -> Self {
        Self { path, json, fields_read: Mutex::default() }
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a field, or one inside it, was read.
    pub(crate) fn was_read(&self, field: &str) -> bool {
        let read = self.fields_read.lock().unwrap_or_else(PoisonError::into_inner);
        let inside =
            |read: &String| read.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        read.iter().any(inside)
    }

    /// Returns the keys of an object that are not null and were never read. An empty name means the whole file.
    pub(crate) fn unread(&self, object: &str) -> Vec<String> {
        let json = match object {
            "" => Some(&self.json),
            object => self.lookup(object),
        };
        let at = |key: &str| if object.is_empty() { key.to_owned() } else { format!("{object}.{key}") };
        let keys = json.and_then(Value::as_object).into_iter().flatten().filter(|(_, value)| !value.is_null());
        keys.map(|(key, _)| key.clone()).filter(|key| !self.was_read(&at(key))).collect()
    }

    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = read_file(path)?;
        let json = serde_json::from_slice(&bytes).map_err(|error| TeacherError::Damaged {
            path: path.into(),
            format: "json",
            message: error.to_string(),
        })?;
        Ok(Self::new(path.into(), json))
    }

    /// Returns `field`, where dots separate the names of nested objects. Null counts as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields_read.lock().unwrap_or_else(PoisonError::into_inner).insert(field.into());
        self.lookup(field)
    }

    fn lookup(&self, field: &str) -> Option<&Value> {
        field.split('.').try_fold(&self.json, |json, part| json.get(part)).filter(|value| !value.is_null())
    }

    pub(crate) fn invalid(&self, field: &str, valid: &str) -> TeacherError {
        TeacherError::Field {
            path: self.path.clone(),
            field: field.into(),
            got: self.lookup(field).map_or_else(|| "nothing".into(), Value::to_string),
            valid: valid.into(),
        }
    }

    /// Reads a window, in tokens; null is `None`. Returns `default` if the field is absent.
    pub(crate) fn window(&self, field: &str, default: Option<usize>) -> Result<Option<usize>> {
        match self.json.get(field) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size(field).map(Some),
        }
    }

    /// Reads a soft cap; null is `None`. Returns `default` if the field is absent.
    pub(crate) fn cap(&self, field: &str, default: Option<f64>) -> Result<Option<f32>> {
        match self.json.get(field) {
            None => Ok(default.map(|cap| cap as f32)),
            Some(Value::Null) => Ok(None),
            Some(_) => Ok(Some(self.float_or(field, 1.0)? as f32)),
        }
    }

    /// Returns the number of rotated dimensions of a head. `field`, at the top or in `rope_parameters`, holds their
    /// share.
    pub(crate) fn rotated(&self, field: &str, head_dim: usize, default: f64) -> Result<usize> {
        let inside = format!("rope_parameters.{field}");
        let field = if self.get(&inside).is_some() { inside.as_str() } else { field };
        let rotated = (head_dim as f64 * self.float_or(field, default)?) as usize;
        match rotated {
            0 => Err(self.invalid(field, &format!("a part of head_dim = {head_dim} of at least 2"))),
            odd if odd % 2 == 1 => Err(self.invalid(field, &format!("an even part of head_dim = {head_dim}"))),
            more if more > head_dim => Err(self.invalid(field, "at most 1")),
            rotated => Ok(rotated),
        }
    }

    /// Reads a whole number, which may be 0.
    pub(crate) fn count_or(&self, field: &str, default: usize) -> Result<usize> {
        let Some(value) = self.get(field) else { return Ok(default) };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
        count.ok_or_else(|| self.invalid(field, "a whole number"))
    }

    pub(crate) fn size(&self, field: &str) -> Result<usize> {
        self.size_or(field, 0)
    }

    /// Reads a whole number of at least 1. Returns `default` if the field is absent; a default of 0 makes the field
    /// mandatory.
    pub(crate) fn size_or(&self, field: &str, default: usize) -> Result<usize> {
        let value = match self.get(field) {
            Some(value) => value.as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0),
            None => default,
        };
        if value == 0 { Err(self.invalid(field, "a whole number of at least 1")) } else { Ok(value) }
    }

    pub(crate) fn float_or(&self, field: &str, default: f64) -> Result<f64> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|x| *x > 0.0 && x.is_finite())
                .ok_or_else(|| self.invalid(field, "a number above 0")),
        }
    }

    pub(crate) fn flag_or(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.invalid(field, "true, false")),
        }
    }

    /// Refuses a field whose value is not one of these.
    pub(crate) fn require_one_of(&self, field: &str, valid: &[Value]) -> Result<()> {
        match self.get(field) {
            Some(value) if !valid.contains(value) => {
                let valid: Vec<_> = valid.iter().map(Value::to_string).chain(["null".to_owned()]).collect();
                Err(self.invalid(field, &valid.join(", ")))
            }
            _ => Ok(()),
        }
    }

    /// Reads a token id, or the first of a list of ids.
    pub(crate) fn token(&self, field: &str) -> Result<Option<u32>> {
        let value = match self.get(field) {
            Some(Value::Array(list)) => list.first(),
            other => other,
        };
        match value {
            None => Ok(None),
            Some(id) => id
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .map(Some)
                .ok_or_else(|| self.invalid(field, "a token id, a list of them, null")),
        }
    }
}

pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| TeacherError::Io { path: path.into(), source })
}
