//! The text of a line of JSON that is whole in memory, the fast way: good lines only.
//!
//! It takes a line, with the very text, only where [`super::json`]'s parser takes it, and gives up at the first oddity (whatever is no
//! good record: that parser says what is wrong, and where). The line is parsed, not searched: every value is looked at.

use std::fmt;
use std::io;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::records::{Fault, push};
use crate::spool::Spool;

/// Puts the text of a line into the spool; false where the line is to be parsed in the other way, after the spool is cleared.
///
/// # Errors
/// When the temporary file fails.
pub(crate) fn read(line: &[u8], name: &str, text: &mut Spool) -> io::Result<bool> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let mut failed = None;
    let found = Object { name, text, failed: &mut failed }.deserialize(&mut json);
    let good = matches!(found, Ok(true)) && json.end().is_ok();
    failed.map_or(Ok(good), Err)
}

/// An object, of which a key holds the text: the key as it stands, else what comes before its first dot, and the rest inside of that.
/// True where the text was found.
struct Object<'a> {
    name: &'a str,
    text: &'a mut Spool,
    failed: &'a mut Option<io::Error>,
}

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<bool, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<bool, A::Error> {
        let Self { name, text, failed } = self;
        // whether the key as it stands was there, and whether what came last held the text
        let (mut whole, mut found) = (false, false);
        while let Some(key) = entries.next_key_seed(Name(name))? {
            match key {
                Key::Whole => {
                    entries.next_value_seed(Text { text: &mut *text, failed: &mut *failed })?;
                    (whole, found) = (true, true);
                }
                Key::Head(name) if !whole => {
                    found = entries.next_value_seed(Object { name, text: &mut *text, failed: &mut *failed })?;
                }
                Key::Head(_) | Key::Other => entries.next_value::<Skipped>().map(|_| ())?,
            }
        }
        Ok(found)
    }
}

/// What a key is to the name of the text.
enum Key<'a> {
    Whole,
    /// What comes before its first dot; the rest.
    Head(&'a str),
    Other,
}

struct Name<'a>(&'a str);

impl<'a, 'de> DeserializeSeed<'de> for Name<'a> {
    type Value = Key<'a>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Key<'a>, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for Name<'a> {
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

/// A string that goes into the spool, instead of what is there.
struct Text<'a> {
    text: &'a mut Spool,
    failed: &'a mut Option<io::Error>,
}

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Text<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        let pushed = self.text.clear().map_err(Fault::Spool).and_then(|()| push(self.text, value.as_bytes()));
        match pushed {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(E::custom("not UTF-8")),
            Err(Fault::Spool(e) | Fault::Input(e)) => {
                *self.failed = Some(e);
                Err(E::custom("no room"))
            }
        }
    }
}

/// A value that is passed over. Unlike serde's `IgnoredAny`, for which serde_json looks neither at the depth nor at escapes.
struct Skipped;

impl<'de> serde::Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Skipped {
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
