//! Checks that a tokenizer and a teacher use the same tokens: compares them id by id, not only their number.
//!
//! ```text
//!  the teacher's folder: tokenizer.json ─┐
//!  the teacher's .gguf: its tokens ──────┴─► TeacherVocabulary ◄──differences──► the job's Vocabulary
//! ```
//!
//! The comparison covers the token of every id, added tokens included, and bos and eos unless the job names them. It
//! ignores how text is cut into tokens (normalizer, words, merges), because the teacher sees only ids. Filler tokens
//! such as `[PAD7]` with the id 7 (in GGUF files) count as no token.

use std::collections::BTreeMap;
use std::path::Path;

use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec;

use super::{Role, TeacherSpecials, Vocabulary, VocabularyError};

/// Maximum ids named in one message.
const MAX_NAMED_IDS: usize = 3;

/// The tokens of a teacher's ids, from its own tokenizer.
#[derive(Debug)]
pub struct TeacherVocabulary {
    tokens: BTreeMap<u32, Vec<String>>,
    specials: BTreeMap<Role, SpecialToken>,
}

impl TeacherVocabulary {
    /// Reads the tokenizer beside a teacher (`tokenizer.json`) or in its `.gguf`; returns `None` if there is none.
    ///
    /// `specials` are the ids from the teacher's configuration.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot be read or parsed.
    pub fn load(path: &Path, specials: TeacherSpecials) -> Result<Option<Self>, VocabularyError> {
        if !path.is_dir() {
            let Some(gguf) = stillhouse_teacher::gguf_vocabulary(path)? else { return Ok(None) };
            let to_special = |id: Option<u32>| {
                let id = id?;
                Some(SpecialToken { token: gguf.tokens.get(id as usize)?.clone(), id })
            };
            let roles = [(Role::Bos, to_special(gguf.bos_token_id)), (Role::Eos, to_special(gguf.eos_token_id))];
            let specials = roles.into_iter().filter_map(|(role, token)| Some((role, token?))).collect();
            let tokens = by_id((0..).zip(gguf.tokens).map(|(id, token)| (token, id)));
            return Ok(Some(Self { tokens, specials }));
        }
        if !path.join("tokenizer.json").exists() {
            return Ok(None);
        }
        let own = Vocabulary::load(path, &path.display().to_string(), &spec::Tokenizer::default(), Some(specials))?;
        Ok(Some(Self { tokens: own.tokens_by_id(), specials: own.specials }))
    }

    /// Returns bos and eos from the teacher's own tokenizer.
    pub fn specials(&self) -> TeacherSpecials {
        let id = |role| self.specials.get(&role).map(|token| token.id);
        TeacherSpecials { bos: id(Role::Bos), eos: id(Role::Eos) }
    }

    /// Describes how a tokenizer differs, with the first few ids; `None` if it does not. `spec` says which special
    /// tokens the job names itself.
    pub fn differences(&self, tokenizer: &Vocabulary, spec: &spec::Tokenizer) -> Option<String> {
        let tokens = tokenizer.tokens_by_id();
        let nothing = Vec::new();
        let mut ids: Vec<u32> = self.tokens.keys().chain(tokens.keys()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        let differ: Vec<String> = ids
            .into_iter()
            .map(|id| (id, tokens.get(&id).unwrap_or(&nothing), self.tokens.get(&id).unwrap_or(&nothing)))
            .filter(|(_, got, own)| got != own)
            .map(|(id, got, own)| format!("id {id} is {}, the teacher's {}", quote_tokens(got), quote_tokens(own)))
            .collect();
        if differ.is_empty() {
            return self.special_token_difference(tokenizer, spec);
        }
        let more = differ.len().saturating_sub(MAX_NAMED_IDS);
        let shown = differ.into_iter().take(MAX_NAMED_IDS).collect::<Vec<_>>().join("; ");
        Some(if more > 0 { format!("{shown}; and {more} more ids") } else { shown })
    }

    /// Compares bos and eos if both tokenizers name one and the job does not.
    fn special_token_difference(&self, tokenizer: &Vocabulary, spec: &spec::Tokenizer) -> Option<String> {
        [(Role::Bos, &spec.bos), (Role::Eos, &spec.eos)].into_iter().find_map(|(role, named)| {
            let (got, own) = (tokenizer.special(role)?, self.specials.get(&role)?);
            (named.is_none() && got.id != own.id).then(|| {
                format!("its {role} is {:?}, the teacher's {:?}: name one in `tokenizer.{role}`", got.token, own.token)
            })
        })
    }
}

impl Vocabulary {
    fn tokens_by_id(&self) -> BTreeMap<u32, Vec<String>> {
        by_id(self.tokenizer.get_vocab(true))
    }

    /// Returns the tokens with ids of `rows` or more, in order. A teacher with `rows` rows does not have them.
    pub fn tokens_from(&self, rows: usize) -> Vec<(u32, String)> {
        let tokens = self.tokens_by_id().into_iter().filter(|(id, _)| *id as usize >= rows);
        tokens.map(|(id, mut names)| (id, names.swap_remove(0))).collect()
    }
}

/// Whether a token only pads the vocabulary.
fn is_filler(token: &str, id: u32) -> bool {
    token.strip_prefix("[PAD").and_then(|rest| rest.strip_suffix(']')).is_some_and(|number| number == id.to_string())
}

fn by_id(tokens: impl IntoIterator<Item = (String, u32)>) -> BTreeMap<u32, Vec<String>> {
    let mut by_id: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (token, id) in tokens.into_iter().filter(|(token, id)| !is_filler(token, *id)) {
        by_id.entry(id).or_default().push(token);
    }
    by_id.values_mut().for_each(|names| names.sort_unstable());
    by_id
}

fn quote_tokens(tokens: &[String]) -> String {
    match tokens {
        [] => "nothing".into(),
        [one] => format!("{one:?}"),
        [first, rest @ ..] => format!("{first:?} (and {} other spellings)", rest.len()),
    }
}

#[cfg(test)]
mod tests;
