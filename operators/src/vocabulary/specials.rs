//! Finds the bos, eos, pad and mask tokens, in the order documented in [`super`].

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec;
use tokenizers::Tokenizer;

use super::{Role, VocabularyError};

/// A reference to a token.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Hint {
    Name(String),
    Id(u32),
}

/// References from the files beside the tokenizer and from the teacher, strongest first.
#[derive(Debug, Default)]
pub(super) struct Hints(Vec<(Role, Hint)>);

impl Hints {
    pub(super) fn add_id(&mut self, role: Role, id: Option<u32>) {
        self.0.extend(id.map(|id| (role, Hint::Id(id))));
    }

    /// Reads the configuration files in a folder; all of them are optional.
    pub(super) fn add_folder(&mut self, folder: &Path) -> Result<(), VocabularyError> {
        for file in ["tokenizer_config.json", "special_tokens_map.json"] {
            let Some(config) = read_object(&folder.join(file))? else {
                continue;
            };
            for role in Role::ALL {
                for key in name_keys(role) {
                    self.0.extend(token_name(&config[*key]).map(|name| (role, Hint::Name(name))));
                }
            }
        }
        for file in ["generation_config.json", "config.json"] {
            let Some(config) = read_object(&folder.join(file))? else {
                continue;
            };
            for role in Role::ALL {
                self.add_id(role, token_id(&config[format!("{role}_token_id")]));
            }
        }
        Ok(())
    }
}

/// Keys of `tokenizer_config.json`. Encoders such as BERT have only `cls_token` and `sep_token`.
fn name_keys(role: Role) -> &'static [&'static str] {
    match role {
        Role::Bos => &["bos_token", "cls_token"],
        Role::Eos => &["eos_token", "sep_token"],
        Role::Pad => &["pad_token"],
        Role::Mask => &["mask_token"],
    }
}

/// Names in widely used tokenizers, the most specific first.
fn well_known(role: Role) -> &'static [&'static str] {
    match role {
        Role::Bos => &["<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "[CLS]", "<|endoftext|>"],
        Role::Eos => &["</s>", "<eos>", "[EOS]", "<|end_of_text|>", "[SEP]", "<|endoftext|>"],
        Role::Pad => &["<pad>", "[PAD]", "<|pad|>", "<|padding|>"],
        Role::Mask => &["<mask>", "[MASK]", "<|mask|>"],
    }
}

pub(super) fn read_object(path: &Path) -> Result<Option<Value>, VocabularyError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(VocabularyError::Io { path: path.into(), source });
        }
    };
    match serde_json::from_slice(&bytes) {
        Ok(value @ Value::Object(_)) => Ok(Some(value)),
        Ok(_) => Err(VocabularyError::Damaged { path: path.into(), message: "is not a JSON object".into() }),
        Err(e) => Err(VocabularyError::Damaged { path: path.into(), message: format!("is not JSON: {e}") }),
    }
}

/// Parses a token in a configuration file: a text, or an object with `content`.
fn token_name(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// Parses an id in a configuration file; takes the first of several.
fn token_id(value: &Value) -> Option<u32> {
    let first = value.as_array().and_then(|ids| ids.first()).unwrap_or(value);
    first.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Finds the special token of every role that has one.
pub(super) fn resolve(
    tokenizer: &Tokenizer,
    source: &str,
    spec: &spec::Tokenizer,
    hints: &Hints,
) -> Result<BTreeMap<Role, SpecialToken>, VocabularyError> {
    let named = |name: &str| {
        let id = tokenizer.token_to_id(name)?;
        Some(SpecialToken { token: name.to_owned(), id })
    };
    let numbered = |id: u32| Some(SpecialToken { token: tokenizer.id_to_token(id)?, id });
    let is_added = |token: &SpecialToken| tokenizer.get_added_vocabulary().get_vocab().contains_key(&token.token);

    let mut specials = BTreeMap::new();
    for (role, wanted) in
        [(Role::Bos, &spec.bos), (Role::Eos, &spec.eos), (Role::Pad, &spec.pad), (Role::Mask, &spec.mask)]
    {
        if let Some(name) = wanted {
            let token = named(name).ok_or_else(|| VocabularyError::NotAToken {
                role,
                got: name.clone(),
                tokenizer: source.to_owned(),
                valid: choices(tokenizer),
            })?;
            specials.insert(role, token);
            continue;
        }
        let hinted = hints.0.iter().filter(|(of, _)| *of == role).find_map(|(_, hint)| match hint {
            Hint::Name(name) => named(name),
            Hint::Id(id) => numbered(*id),
        });
        let known = || well_known(role).iter().filter_map(|name| named(name));
        let found = hinted.or_else(|| known().find(&is_added)).or_else(|| known().next());
        specials.extend(found.map(|token| (role, token)));
    }
    if let (None, Some(eos)) = (specials.get(&Role::Pad), specials.get(&Role::Eos)) {
        specials.insert(Role::Pad, eos.clone());
    }
    Ok(specials)
}

/// Lists the tokens that a user is likely to want, for messages.
pub(super) fn choices(tokenizer: &Tokenizer) -> String {
    let mut added: Vec<_> =
        tokenizer.get_added_tokens_decoder().into_iter().map(|(id, token)| (id, token.content)).collect();
    added.sort_unstable();
    let shown: Vec<String> = added.iter().take(12).map(|(_, token)| format!("{token:?}")).collect();
    match (shown.is_empty(), added.len() > shown.len()) {
        (true, _) => "a token of its vocabulary, spelled as there".into(),
        (false, false) => format!("{}, or another token of its vocabulary, spelled as there", shown.join(", ")),
        (false, true) => format!("{}, …, or another token of its vocabulary, spelled as there", shown.join(", ")),
    }
}
