//! Checks the keys of a `tokenizer.json`: which are applied, which are ignored on purpose, and which are refused.
//!
//! | key | treatment |
//! |---|---|
//! | `normalizer`, `pre_tokenizer` | applied, every type that `tokenizers` supports |
//! | `post_processor` | applied without its special tokens, which `pack` adds (`pack.boundary`, `pack.separator`) |
//! | `decoder` | not applied to ids; it only displays them as text (`inspect`) |
//! | `truncation`, `padding` | not applied: `pack` cuts and pads rows; the data set's `tokenizer.json` has neither |
//! | `added_tokens`: `single_word`, `lstrip`, `rstrip`, `normalized`, `special` | applied; `special` according to `tokenizer.special_tokens` |
//! | `added_tokens[].id` | refused if loading assigns another id |
//! | `model` BPE: `unk_token`, `fuse_unk`, `byte_fallback`, `ignore_merges`, `continuing_subword_prefix`, `end_of_word_suffix` | applied |
//! | `model` BPE: `dropout` | refused unless null or 0: it uses random numbers without a seed |
//! | `model` Unigram: `unk_id`, `byte_fallback` | applied: the best segmentation; the format has no keys for sampling (`alpha`, `nbest_size`, …) |
//! | `model` WordPiece: `unk_token`, `continuing_subword_prefix`, `max_input_chars_per_word`; WordLevel: `unk_token` | applied |
//! | `version` | refused unless `1.0` |
//! | every other key that is not null | refused: `tokenizers` would ignore it |
//!
//! Of the files beside it (`tokenizer_config.json`, …) only the names of special tokens are read ([`super`]). What
//! `transformers` does to a tokenizer in Python (`add_bos_token`, `add_prefix_space`, chat templates) is not applied.
//!
//! "Applied" means by `tokenizers`, or by `stillhouse-tokenizer` with the same ids.

use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

/// Keys that `tokenizers` reads, by type of model.
const MODEL_KEYS: [(&str, &[&str]); 4] = [
    (
        "BPE",
        &[
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "fuse_unk",
            "byte_fallback",
            "ignore_merges",
        ],
    ),
    ("Unigram", &["unk_id", "byte_fallback"]),
    ("WordPiece", &["unk_token", "continuing_subword_prefix", "max_input_chars_per_word"]),
    ("WordLevel", &["unk_token"]),
];
const ADDED_TOKEN_KEYS: [&str; 7] = ["id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"];
/// Keys of `Metaspace` from older versions: `tokenizers` reads them, but writes `prepend_scheme`.
const LEGACY_METASPACE_KEYS: [&str; 2] = ["add_prefix_space", "str_rep"];

/// The keys of a `tokenizer.json`, without its vocabulary.
#[derive(serde::Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default, rename = "version")]
    _version: Option<IgnoredAny>,
    #[serde(default, rename = "truncation")]
    _truncation: Option<IgnoredAny>,
    #[serde(default, rename = "padding")]
    _padding: Option<IgnoredAny>,
    #[serde(default)]
    added_tokens: Vec<Map<String, Value>>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: ModelJson,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(serde::Deserialize)]
struct ModelJson {
    #[serde(default, rename = "vocab")]
    _vocab: Option<IgnoredAny>,
    #[serde(default, rename = "merges")]
    _merges: Option<IgnoredAny>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl TokenizerJson {
    /// Returns a message about the first key that would be ignored or makes ids random.
    pub(super) fn refusal_reason(&self, loaded: &Tokenizer) -> Option<String> {
        if let Some(dropout) = self.model.others.get("dropout").filter(|value| value.as_f64().is_some_and(|d| d != 0.0))
        {
            return Some(format!(
                "model.dropout: got {dropout}, which tokenizes the same text differently each time, whatever the seed; valid: null or 0 \
                 (dropout is for training: remove the key)"
            ));
        }
        let ignored_key = |place: String, value: &Value, valid: &str| {
            let mut got = value.to_string();
            got.truncate(got.floor_char_boundary(80));
            format!(
                "{place}: got {got}, an unknown key, which would be ignored; valid: {valid} (remove the key if it has no effect)"
            )
        };
        let is_set = |value: &Value| !value.is_null();
        if let Some((key, value)) = self.others.iter().find(|(_, value)| is_set(value)) {
            let valid =
                "version, truncation, padding, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model";
            return Some(ignored_key(key.clone(), value, valid));
        }
        let kind = self.model.others.get("type").and_then(Value::as_str);
        let known: Vec<&str> = MODEL_KEYS
            .iter()
            .filter(|(name, _)| kind.is_none_or(|kind| kind == *name))
            .flat_map(|(_, keys)| keys.iter().copied())
            .collect();
        let of_model = self
            .model
            .others
            .iter()
            .find(|(key, value)| is_set(value) && key.as_str() != "type" && !known.contains(&key.as_str()));
        if let Some((key, value)) = of_model {
            return Some(ignored_key(
                format!("model.{key}"),
                value,
                &format!("type, vocab, merges, {}", known.join(", ")),
            ));
        }
        for (n, token) in self.added_tokens.iter().enumerate() {
            let other = token.iter().find(|(key, value)| is_set(value) && !ADDED_TOKEN_KEYS.contains(&key.as_str()));
            if let Some((key, value)) = other {
                return Some(ignored_key(format!("added_tokens[{n}].{key}"), value, &ADDED_TOKEN_KEYS.join(", ")));
            }
        }
        // `tokenizers` writes back every key of a part that it has read
        let parts = [
            ("normalizer", &self.normalizer, serde_json::to_value(loaded.get_normalizer())),
            ("pre_tokenizer", &self.pre_tokenizer, serde_json::to_value(loaded.get_pre_tokenizer())),
            ("post_processor", &self.post_processor, serde_json::to_value(loaded.get_post_processor())),
            ("decoder", &self.decoder, serde_json::to_value(loaded.get_decoder())),
        ];
        parts.into_iter().find_map(|(name, written, read)| {
            let (place, value) = first_ignored_key(name.to_owned(), written, &read.ok()?)?;
            Some(ignored_key(place, value, "the keys that the library tokenizers has for this type"))
        })
    }
}

/// Returns the first key of `written` that `read` lacks.
fn first_ignored_key<'a>(place: String, written: &'a Value, read: &Value) -> Option<(String, &'a Value)> {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => written.iter().find_map(|(key, value)| {
            let place = format!("{place}.{key}");
            match read.get(key) {
                Some(read) => first_ignored_key(place, value, read),
                None if value.is_null() || LEGACY_METASPACE_KEYS.contains(&key.as_str()) => None,
                None => Some((place, value)),
            }
        }),
        (Value::Array(written), Value::Array(read)) => written
            .iter()
            .zip(read)
            .enumerate()
            .find_map(|(n, (written, read))| first_ignored_key(format!("{place}[{n}]"), written, read)),
        _ => None,
    }
}
