//! The fast parser of the text in a line of JSON that is completely in memory. It accepts only good lines.
//!
//! It accepts a line only if the parser of [`super`] does, with the same text. At the first irregularity it gives up,
//! and the other parser says what is wrong, and where. It parses the whole line: it validates every value.

use std::fmt;
use std::io;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::records::{ReadError, push};
use crate::spool::Spool;

/// Writes the text of a line into the spool. Returns false if the caller must clear the spool and use the other parser.
///
/// # Errors
/// When the temporary file fails.
pub(crate) fn read(line: &[u8], name: &str, text: &mut Spool) -> io::Result<bool> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let mut failed = None;
    let found = ObjectVisitor { name, text, failed: &mut failed }.deserialize(&mut json);
    let good = matches!(found, Ok(true)) && json.end().is_ok();
    failed.map_or(Ok(good), Err)
}

/// Visits an object with the text under a key: the key with the whole name, else the part before the first dot, with
/// the rest inside its object. The value is true if it found the text.
struct ObjectVisitor<'a> {
    name: &'a str,
    text: &'a mut Spool,
    failed: &'a mut Option<io::Error>,
}

impl<'de> DeserializeSeed<'de> for ObjectVisitor<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<bool, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for ObjectVisitor<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<bool, A::Error> {
        let Self { name, text, failed } = self;
        // whether the key with the whole name was present, and whether the last value had the text
        let (mut whole, mut found) = (false, false);
        while let Some(key) = entries.next_key_seed(KeyVisitor(name))? {
            match key {
                Key::Whole => {
                    entries.next_value_seed(TextVisitor { text: &mut *text, failed: &mut *failed })?;
                    (whole, found) = (true, true);
                }
                Key::Head(name) if !whole => {
                    found = entries.next_value_seed(ObjectVisitor { name, text: &mut *text, failed: &mut *failed })?;
                }
                Key::Head(_) | Key::Other => entries.next_value::<IgnoredValue>().map(|_| ())?,
            }
        }
        Ok(found)
    }
}

/// Relation of a key to the name of the text.
enum Key<'a> {
    Whole,
    /// The part before the first dot; holds the rest of the name.
    Head(&'a str),
    Other,
}

struct KeyVisitor<'a>(&'a str);

impl<'a, 'de> DeserializeSeed<'de> for KeyVisitor<'a> {
    type Value = Key<'a>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Key<'a>, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for KeyVisitor<'a> {
    type Value = Key<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Key<'a>, E> {
        if key == self.0 {
            return Ok(Key::Whole);
        }
        let head = self.0.split_once('.').filter(|(head, _)| *head == key);
        Ok(head.map_or(Key::Other, |(_, rest)| Key::Head(rest)))
    }
}

/// Visits a string and writes it into the spool, replacing its content.
struct TextVisitor<'a> {
    text: &'a mut Spool,
    failed: &'a mut Option<io::Error>,
}

impl<'de> DeserializeSeed<'de> for TextVisitor<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for TextVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        let pushed = self.text.clear().map_err(ReadError::Spool).and_then(|()| push(self.text, value.as_bytes()));
        match pushed {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(E::custom("not UTF-8")),
            Err(ReadError::Spool(e) | ReadError::Input(e)) => {
                *self.failed = Some(e);
                Err(E::custom("no room"))
            }
        }
    }
}

/// A value that is skipped. Unlike serde's `IgnoredAny`, for which serde_json checks neither the depth nor escapes.
struct IgnoredValue;

impl<'de> serde::Deserialize<'de> for IgnoredValue {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for IgnoredValue {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Self, A::Error> {
        while values.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}
