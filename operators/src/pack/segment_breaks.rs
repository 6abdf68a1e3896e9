//! Cuts documents into segments at special tokens parsed from their text (`tokenizer.special_tokens: parse`).
//!
//! ```text
//!  a b </s> <s> c d <s> e    ─►  [a b </s>] [<s> c d] [<s> e]         the document's separator joins the last segment
//! ```

use crate::config::SpecialIds;
use crate::vocabulary::Role;

/// The special tokens that cut a document into segments. Without any, a document is one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SegmentBreaks {
    /// A segment begins before this token: bos, unless it is also eos.
    pub before: Option<u32>,
    /// A segment begins after this token: eos.
    pub after: Option<u32>,
}

/// A run of tokens within one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentRun<'a> {
    pub tokens: &'a [u32],
    /// Whether a segment begins at the first token.
    pub begins_segment: bool,
    /// Whether the next token begins another segment.
    pub ends_segment: bool,
}

impl SegmentBreaks {
    /// Returns the breaks of a tokenizer; none if it does not parse special tokens from text.
    pub fn from_special_ids(special_ids: &SpecialIds) -> Self {
        let after = special_ids.parsed(Role::Eos);
        Self { before: special_ids.parsed(Role::Bos).filter(|bos| Some(*bos) != after), after }
    }

    /// Whether a segment may begin at `start` within a document.
    pub(crate) fn is_at(self, tokens: &[i32], start: usize) -> bool {
        let is = |id: Option<u32>, at: usize| id.is_some() && tokens.get(at).and_then(|t| u32::try_from(*t).ok()) == id;
        is(self.before, start) || (start > 0 && is(self.after, start - 1))
    }

    /// Cuts tokens into runs, none of which crosses a segment boundary.
    pub(crate) fn segment_runs<'a>(self, mut tokens: &'a [u32]) -> impl Iterator<Item = SegmentRun<'a>> {
        std::iter::from_fn(move || {
            let first = *tokens.first()?;
            let ending = tokens.iter().position(|&id| Some(id) == self.after).map(|at| at + 1);
            let inside = tokens.iter().skip(1).position(|&id| Some(id) == self.before).map(|at| at + 1);
            let length = ending.unwrap_or(tokens.len()).min(inside.unwrap_or(tokens.len()));
            let (run, rest) = tokens.split_at(length);
            tokens = rest;
            Some(SegmentRun {
                tokens: run,
                begins_segment: Some(first) == self.before,
                ends_segment: ending == Some(length),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use stillhouse_schemas::manifest::SpecialToken;
    use stillhouse_schemas::spec::SpecialTokens;

    use super::*;

    #[test]
    fn a_document_may_be_cut_where_a_parsed_token_is() {
        let recorded = |mode, bos, eos| {
            let token = |id| SpecialToken { token: String::new(), id };
            let tokens = [("bos".to_owned(), token(bos)), ("eos".to_owned(), token(eos))].into();
            SegmentBreaks::from_special_ids(&SpecialIds::from_manifest(&tokens, mode))
        };
        let text = recorded(SpecialTokens::Text, 1, 2);
        let parsed = recorded(SpecialTokens::Parse, 1, 2);
        let one = recorded(SpecialTokens::Parse, 2, 2);
        let tokens = [7, 2, 5, 1, 6];
        let places =
            |breaks: SegmentBreaks| (0..=tokens.len()).filter(|&at| breaks.is_at(&tokens, at)).collect::<Vec<_>>();
        assert_eq!((places(text), places(parsed), places(one)), (vec![], vec![2, 3], vec![2]));
    }

    #[test]
    fn stretches_end_after_eos_and_begin_before_bos() {
        let cut = |breaks: SegmentBreaks, tokens: &[u32]| -> Vec<(Vec<u32>, bool, bool)> {
            breaks.segment_runs(tokens).map(|s| (s.tokens.to_vec(), s.begins_segment, s.ends_segment)).collect()
        };
        let breaks = SegmentBreaks { before: Some(1), after: Some(2) };
        assert_eq!(
            cut(breaks, &[1, 5, 2, 2, 6, 1, 1, 7]),
            [
                (vec![1, 5, 2], true, true),
                (vec![2], false, true),
                (vec![6], false, false),
                (vec![1], true, false),
                (vec![1, 7], true, false)
            ]
        );
        assert_eq!(
            cut(SegmentBreaks { before: None, after: Some(2) }, &[2, 1]),
            [(vec![2], false, true), (vec![1], false, false)]
        );
        assert_eq!(cut(SegmentBreaks::default(), &[1, 2]), [(vec![1, 2], false, false)]);
        assert!(cut(breaks, &[]).is_empty());
    }
}
