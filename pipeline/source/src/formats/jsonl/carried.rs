//! The values of `input.carry` in a line of JSON.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::records::Carried;

/// Finds the values of `names` in an object, in their order: strings without their quotes, other values as they are written.
/// A key that is missing or null has no value.
///
/// Names are resolved as `input.text` is: the key with the whole name, else the part before the first dot, with the rest
/// inside its object. If a key occurs twice, the last one counts.
///
/// # Errors
/// When the line is not an object.
pub(super) fn read(line: &[u8], names: &[String]) -> serde_json::Result<Carried> {
    let wanted: Vec<Wanted<'_>> = names.iter().enumerate().map(|(index, name)| Wanted { index, name }).collect();
    let mut values = vec![None; names.len()];
    let mut json = serde_json::Deserializer::from_slice(line);
    json.deserialize_map(ObjectVisitor { wanted: &wanted, values: &mut values })?;
    Ok(values)
}

/// A name, or the rest of one inside an object.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    index: usize,
    name: &'a str,
}

impl<'a> Wanted<'a> {
    /// The rest of the name inside the object under `key`.
    fn inside(self, key: &str) -> Option<Self> {
        let (_, rest) = self.name.split_once('.').filter(|(head, _)| *head == key)?;
        Some(Self { name: rest, ..self })
    }
}

struct ObjectVisitor<'a> {
    wanted: &'a [Wanted<'a>],
    values: &'a mut Carried,
}

impl<'de> Visitor<'de> for ObjectVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let Self { wanted, values } = self;
        let mut whole = vec![false; wanted.len()];
        while let Some(key) = entries.next_key_seed(KeyVisitor(wanted))? {
            let Some(key) = key else {
                entries.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = entries.next_value::<&RawValue>()?.get();
            let mut inner = Vec::new();
            for (wanted, whole) in wanted.iter().zip(&mut whole) {
                if wanted.name == key {
                    *whole = true;
                    values[wanted.index] = text_of(value).map_err(A::Error::custom)?;
                } else if let Some(inside) = wanted.inside(&key).filter(|_| !*whole) {
                    values[wanted.index] = None;
                    inner.push(inside);
                }
            }
            if !inner.is_empty() && value.starts_with('{') {
                let mut json = serde_json::Deserializer::from_str(value);
                let visitor = ObjectVisitor { wanted: &inner, values: &mut *values };
                json.deserialize_map(visitor).map_err(A::Error::custom)?;
            }
        }
        Ok(())
    }
}

fn text_of(value: &str) -> serde_json::Result<Option<String>> {
    match value.as_bytes().first() {
        Some(b'"') => serde_json::from_str(value).map(Some),
        _ if value == "null" => Ok(None),
        _ => Ok(Some(value.to_owned())),
    }
}

/// Keeps a key only if one of the names begins with it.
struct KeyVisitor<'a>(&'a [Wanted<'a>]);

impl<'de> DeserializeSeed<'de> for KeyVisitor<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyVisitor<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
        let is_wanted = self.0.iter().any(|wanted| wanted.name == key || wanted.inside(key).is_some());
        Ok(is_wanted.then(|| key.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_as_the_text_is() {
        let names = ["url", "id", "meta.lang", "meta.a.b", "tags", "dotted.key", "none"].map(str::to_owned);
        let values = |line: &str| read(line.as_bytes(), &names).unwrap();
        let some = |value: &str| Some(value.to_owned());
        let line = r#"{"text": "x", "url": "a\n\u00e9\"", "id": 12345678901234567890123, "meta": {"a": {"b": true}, "lang": "en"},
            "tags": ["x", 1.50], "dotted": {"key": 2}, "dotted.key": 1e400}"#;
        assert_eq!(
            values(line),
            [
                some("a\né\""),
                some("12345678901234567890123"),
                some("en"),
                some("true"),
                some(r#"["x", 1.50]"#),
                some("1e400"),
                None
            ]
        );
        assert_eq!(
            values(r#"{"url": null, "meta": 3, "id": -0.0}"#),
            [None, some("-0.0"), None, None, None, None, None]
        );
        // the last of two keys counts, and a key with the whole name before a part of it
        let twice = r#"{"id": 1, "id": 2, "meta": {"lang": "en"}, "meta": {"a": {"b": 1}}, "dotted.key": 1, "dotted": {"key": 2}}"#;
        assert_eq!(values(twice), [None, some("2"), None, some("1"), None, some("1"), None]);
        assert!(read(b"[1]", &names).is_err() && read(br#"{"url": "#, &names).is_err());
    }
}
