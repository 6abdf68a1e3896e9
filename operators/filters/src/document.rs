//! The text of one document while the rules judge it, with what several rules compute from it.

use std::borrow::Cow;

use crate::english::{self, Span};

/// A text and, once a rule asked for them, its words.
pub(crate) struct Document<'t> {
    text: Cow<'t, str>,
    words: Option<Vec<Span>>,
}

/// The words of a text.
#[derive(Clone, Copy)]
pub(crate) struct Words<'a> {
    pub(crate) text: &'a str,
    pub(crate) spans: &'a [Span],
}

impl<'t> Document<'t> {
    pub(crate) fn new(text: &'t str) -> Self {
        Self { text: Cow::Borrowed(text), words: None }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn into_text(self) -> Cow<'t, str> {
        self.text
    }

    /// Replaces the text unless the new text is equal.
    pub(crate) fn replace(&mut self, text: String) {
        if *self.text != *text {
            self.text = Cow::Owned(text);
            self.words = None;
        }
    }

    /// Returns the words. The first call splits the text.
    pub(crate) fn words(&mut self) -> Words<'_> {
        let text = &*self.text;
        let spans = self.words.get_or_insert_with(|| {
            let mut tokens = english::tokens(text);
            english::keep_words(text, &mut tokens);
            tokens
        });
        Words { text, spans }
    }
}

impl<'a> Words<'a> {
    pub(crate) fn len(self) -> usize {
        self.spans.len()
    }

    pub(crate) fn iter(self) -> impl ExactSizeIterator<Item = &'a str> {
        self.spans.iter().map(move |span| span.of(self.text))
    }
}
