//! JSON values that keep the order of their keys, as Python's dicts do.

use std::collections::HashMap;
use std::fmt;

use minijinja::Value;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::ChatError;

/// A JSON value. Maps keep the order of their keys; of equal keys the last value counts, at the first one's place.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Map(Vec<(String, Json)>),
}

impl Json {
    /// Parses the text of `column`. serde_json bounds the depth to 128.
    pub fn parse(column: &'static str, text: &str) -> Result<Self, ChatError> {
        serde_json::from_str(text).map_err(|problem| ChatError::Json { column, problem: problem.to_string() })
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of `key`, if this is a map that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Self::Map(fields) => fields.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The value as messages name it: its kind, and the value itself if that is short.
    pub fn describe(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Bool(value) => value.to_string(),
            Self::Int(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Text(text) if text.chars().count() > 40 => {
                format!("the string {:?}…", text.chars().take(40).collect::<String>())
            }
            Self::Text(text) => format!("the string {text:?}"),
            Self::List(items) => format!("a list of {}", items.len()),
            Self::Map(fields) => {
                let keys = fields.iter().take(6).map(|(key, _)| key.as_str()).collect::<Vec<_>>();
                format!("an object with the keys {keys:?}")
            }
        }
    }

    /// The value that templates see.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(value) => Value::from(*value),
            Self::Int(value) => match i64::try_from(*value) {
                Ok(value) => Value::from(value),
                Err(_) => Value::from(*value),
            },
            Self::Float(value) => Value::from(*value),
            Self::Text(text) => Value::from(text.as_str()),
            Self::List(items) => items.iter().map(Self::to_value).collect(),
            Self::Map(fields) => map_value(fields),
        }
    }

    /// Whether `test` holds for a string of this value, keys included.
    pub fn any_text(&self, test: &mut impl FnMut(&str) -> bool) -> bool {
        match self {
            Self::Text(text) => test(text),
            Self::List(items) => items.iter().any(|item| item.any_text(test)),
            Self::Map(fields) => fields.iter().any(|(key, value)| test(key) || value.any_text(test)),
            _ => false,
        }
    }
}

/// A map that templates see, in the order of `fields`.
pub(crate) fn map_value(fields: &[(String, Json)]) -> Value {
    Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), value.to_value())))
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Int(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut fields: Vec<(String, Json)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some((key, value)) = map.next_entry::<String, Json>()? {
            match places.get(&key) {
                Some(&place) => fields[place].1 = value,
                None => {
                    places.insert(key.clone(), fields.len());
                    fields.push((key, value));
                }
            }
        }
        Ok(Json::Map(fields))
    }
}
