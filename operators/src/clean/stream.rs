//! The rules over a text that comes in pieces: the same text comes out, wherever the pieces were cut.
//!
//! ```text
//!  piece ─► pass 1 ─► pass 2 ─► … ─► pass n ─► text that no later piece can change
//!            └ keeps what it cannot decide yet: the beginning of a match, white space that a bracket may take away
//! ```
//!
//! Every rule of a table is one pass. It hands on what is decided and keeps the rest, so its output does not know of the cuts, and so the
//! next pass does not either. What a pass keeps:
//!
//! | rule | keeps |
//! |---|---|
//! | text or a pattern of fixed length | one character less than it is long |
//! | ` word . ` | ` .`, and whether a word with a space before it goes on: words of any length pass through |
//! | `$` | ` ?` and a newline |
//! | `( x )` → `(x)` | white space before a possible `)`; the text after `( `, until its `)` comes |
//! | strip | white space |
//!
//! The last two rows are without a bound: whether the space of `( ` stays is only known at the next `)`, or at the end of the document. A
//! pass that would keep more than its limit says so; the text is never cleaned otherwise instead.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use regex::Regex;
use stillhouse_schemas::spec::Detokenizer;

use super::rules::{Rule, is_python_space, tables};

/// A rule had to keep more text than it may.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("got more than {limit} bytes {what}")]
pub(super) struct TooLong {
    limit: usize,
    what: String,
}

/// A document on its way through the rules.
#[derive(Debug)]
pub(super) struct Stream {
    passes: Vec<Pass>,
}

impl Stream {
    /// A document that begins; every pass keeps up to `limit` bytes.
    pub(super) fn new(detokenizer: Detokenizer, limit: usize) -> Result<Self, regex::Error> {
        let rules = tables(detokenizer).iter().copied().flatten();
        let passes = rules.flat_map(|rule| std::iter::repeat_n(rule, rule.times())).map(|rule| Pass::new(rule, limit));
        Ok(Self { passes: passes.collect::<Result<_, _>>()? })
    }

    /// Takes the next piece; gives the text that is decided now.
    pub(super) fn feed(&mut self, text: &str) -> Result<String, TooLong> {
        let mut text = Cow::Borrowed(text);
        for pass in &mut self.passes {
            let mut out = String::with_capacity(text.len());
            pass.feed(&text, &mut out)?;
            text = Cow::Owned(out);
        }
        Ok(text.into_owned())
    }

    /// The rest of the document, which ends here.
    pub(super) fn finish(mut self) -> Result<String, TooLong> {
        let mut text = String::new();
        for pass in &mut self.passes {
            let mut out = String::new();
            pass.feed(&text, &mut out)?;
            pass.finish(&mut out);
            text = out;
        }
        Ok(text)
    }
}

/// A pattern of a table, compiled once for all documents.
fn compiled(pattern: &'static str) -> Result<Regex, regex::Error> {
    static COMPILED: Mutex<BTreeMap<&'static str, Regex>> = Mutex::new(BTreeMap::new());
    let mut all = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = all.get(pattern) {
        return Ok(found.clone());
    }
    let new = Regex::new(pattern)?;
    all.insert(pattern, new.clone());
    Ok(new)
}

/// A rule at work.
#[derive(Debug)]
enum Pass {
    Window(Window),
    WordStop(WordStop),
    Tail(Tail),
    Stripped(Stripped),
    Spaced(Spaced),
    Strip(Strip),
}

impl Pass {
    fn new(rule: &Rule, limit: usize) -> Result<Self, regex::Error> {
        Ok(match *rule {
            Rule::Literal(from, to) | Rule::Repeat(_, from, to) => {
                Self::Window(Window { finder: Finder::Text(from, to), held: String::new() })
            }
            Rule::Pattern { pattern, to, longest } => {
                Self::Window(Window { finder: Finder::Pattern(compiled(pattern)?, to, longest), held: String::new() })
            }
            Rule::WordStop => Self::WordStop(WordStop::new(false)?),
            Rule::WordStopAtEnd => Self::WordStop(WordStop::new(true)?),
            Rule::SpacedAtEnd(mark) => Self::Tail(Tail { mark, held: String::new() }),
            Rule::Stripped(open, close) => {
                let what = format!("after a {open} and white space with no {close} yet");
                Self::Stripped(Stripped { open, close, held: BoundedText::new(limit, what), at: Bracket::Outside })
            }
            Rule::Spaced(open, close) => {
                let what = format!("after a {open} and a space with no {close} yet");
                Self::Spaced(Spaced { open, close, held: BoundedText::new(limit, what), at: Quote::Outside })
            }
            Rule::NewlineThenStripped => {
                let held = BoundedText::new(limit, "of white space with no text yet".into());
                Self::Strip(Strip { begun: false, has_text: false, held })
            }
        })
    }

    fn feed(&mut self, text: &str, out: &mut String) -> Result<(), TooLong> {
        match self {
            Self::Window(pass) => pass.feed(text, out),
            Self::WordStop(pass) => text.chars().for_each(|c| pass.step(c, out)),
            Self::Tail(pass) => pass.feed(text, out),
            Self::Stripped(pass) => pass.feed(text, out)?,
            Self::Spaced(pass) => pass.feed(text, out)?,
            Self::Strip(pass) => pass.feed(text, out)?,
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut String) {
        match self {
            Self::Window(pass) => out.push_str(&pass.held),
            Self::WordStop(pass) => pass.finish(out),
            Self::Tail(pass) => pass.finish(out),
            Self::Stripped(pass) => out.push_str(&pass.held.text),
            Self::Spaced(pass) => out.push_str(&pass.held.text),
            Self::Strip(pass) => pass.begin(out),
        }
    }
}

/// Text that is kept, up to a limit.
#[derive(Debug)]
struct BoundedText {
    text: String,
    limit: usize,
    what: String,
}

impl BoundedText {
    fn new(limit: usize, what: String) -> Self {
        Self { text: String::new(), limit, what }
    }

    /// Whether it fits does not depend on the pieces that the text comes in.
    fn push(&mut self, text: &str) -> Result<(), TooLong> {
        if self.text.len() + text.len() > self.limit {
            return Err(TooLong { limit: self.limit, what: self.what.clone() });
        }
        self.text.push_str(text);
        Ok(())
    }

    fn hand_on(&mut self, out: &mut String) {
        out.push_str(&self.text);
        self.text.clear();
    }
}

/// Text or a pattern that takes a fixed number of characters: what it finds in a text does not change when more text follows.
#[derive(Debug)]
struct Window {
    finder: Finder,
    held: String,
}

#[derive(Debug)]
enum Finder {
    Text(&'static str, &'static str),
    /// Pattern, replacement, longest match in bytes.
    Pattern(Regex, &'static str, usize),
}

impl Window {
    fn feed(&mut self, text: &str, out: &mut String) {
        self.held.push_str(text);
        let held = self.held.as_str();
        let mut done = 0;
        let longest = match &self.finder {
            Finder::Text(from, to) => {
                for (at, _) in held.match_indices(from) {
                    out.push_str(&held[done..at]);
                    out.push_str(to);
                    done = at + from.len();
                }
                from.len()
            }
            Finder::Pattern(pattern, to, longest) => {
                for found in pattern.captures_iter(held) {
                    let whole = found.get_match();
                    out.push_str(&held[done..whole.start()]);
                    found.expand(to, out);
                    done = whole.end();
                }
                *longest
            }
        };
        // a match that is not whole yet begins in what is kept
        let decided = held.floor_char_boundary(held.len().saturating_sub(longest - 1)).max(done);
        out.push_str(&held[done..decided]);
        self.held.drain(..decided);
    }
}

/// ` word . ` → ` word. `, or ` word .` → ` word.` at the end of the document.
#[derive(Debug)]
struct WordStop {
    at_end: bool,
    word: Regex,
    at: Word,
}

/// What was read last. What is in brackets is kept.
#[derive(Debug, Clone, Copy)]
enum Word {
    Other,
    /// A space that may begin a match.
    Space,
    /// Such a space and letters of a word.
    Letters,
    /// The same and \[space\].
    Gap,
    /// The same and \[space, full stop\].
    Stop,
    /// The same and \[space, full stop, newline\].
    Line,
}

impl WordStop {
    fn new(at_end: bool) -> Result<Self, regex::Error> {
        Ok(Self { at_end, word: compiled(r"[\p{L}\p{N}_]")?, at: Word::Other })
    }

    fn is_word(&self, c: char) -> bool {
        if c.is_ascii() {
            c == '_' || c.is_ascii_alphanumeric()
        } else {
            self.word.is_match(c.encode_utf8(&mut [0; 4]))
        }
    }

    fn step(&mut self, c: char, out: &mut String) {
        self.at = match (self.at, c) {
            (Word::Letters, ' ') => Word::Gap,
            (Word::Gap, '.') => Word::Stop,
            (Word::Stop, ' ') if !self.at_end => {
                out.push_str(". ");
                Word::Other
            }
            (Word::Stop, '\n') if self.at_end => Word::Line,
            (at, c) => {
                // no match: what was kept stands as it is, and its space may begin another one
                let (kept, before) = match at {
                    Word::Gap => (" ", Word::Space),
                    Word::Stop => (" .", Word::Other),
                    Word::Line => (" .\n", Word::Other),
                    at => ("", at),
                };
                let next = match (before, c) {
                    (_, ' ') => Word::Space,
                    (Word::Space | Word::Letters, c) if self.is_word(c) => Word::Letters,
                    _ => Word::Other,
                };
                out.push_str(kept);
                out.push(c);
                next
            }
        };
    }

    fn finish(&self, out: &mut String) {
        out.push_str(match (self.at, self.at_end) {
            (Word::Gap, _) => " ",
            (Word::Stop, false) => " .",
            (Word::Stop, true) => ".",
            (Word::Line, _) => ".\n",
            _ => "",
        });
    }
}

/// ` ?` → `?` at the end of the document, also before a last newline.
#[derive(Debug)]
struct Tail {
    mark: char,
    held: String,
}

impl Tail {
    fn feed(&mut self, text: &str, out: &mut String) {
        self.held.push_str(text);
        let marked = self.held.strip_suffix('\n').unwrap_or(&self.held);
        let before = marked.strip_suffix(self.mark).unwrap_or(&self.held);
        let decided = before.strip_suffix(' ').map_or(self.held.len(), str::len);
        out.push_str(&self.held[..decided]);
        self.held.drain(..decided);
    }

    fn finish(&self, out: &mut String) {
        let marked = self.held.strip_prefix(' ').filter(|rest| rest.starts_with(self.mark));
        out.push_str(marked.unwrap_or(&self.held));
    }
}

/// `( x )` → `(x)`: white space on the inner sides of a pair goes.
#[derive(Debug)]
struct Stripped {
    open: char,
    close: char,
    held: BoundedText,
    at: Bracket,
}

#[derive(Debug, Clone, Copy)]
enum Bracket {
    Outside,
    /// After the opening one; its white space is kept.
    Opened,
    /// In text that nothing stands before: white space at its end is kept.
    Inside,
    /// In text after so many bytes of white space: all of it is kept.
    Waiting(usize),
}

impl Stripped {
    fn feed(&mut self, mut text: &str, out: &mut String) -> Result<(), TooLong> {
        while let Some(next) = text.chars().next() {
            match self.at {
                Bracket::Outside => {
                    let end = text.find(self.open).map(|at| at + self.open.len_utf8());
                    let (decided, rest) = text.split_at(end.unwrap_or(text.len()));
                    out.push_str(decided);
                    text = rest;
                    if end.is_some() {
                        self.at = Bracket::Opened;
                    }
                }
                Bracket::Opened if is_python_space(next) => {
                    let rest = text.trim_start_matches(is_python_space);
                    self.held.push(&text[..text.len() - rest.len()])?;
                    text = rest;
                }
                Bracket::Opened if next == self.close => {
                    self.held.text.clear();
                    self.at = Bracket::Inside;
                }
                Bracket::Opened => {
                    let spaces = self.held.text.len();
                    self.at = if spaces == 0 { Bracket::Inside } else { Bracket::Waiting(spaces) };
                }
                Bracket::Inside | Bracket::Waiting(_) => {
                    let end = text.find(self.close);
                    let (content, rest) = text.split_at(end.unwrap_or(text.len()));
                    self.take(content, out)?;
                    text = rest;
                    if end.is_some() {
                        self.close(out);
                        text = &text[self.close.len_utf8()..];
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, content: &str, out: &mut String) -> Result<(), TooLong> {
        if let Bracket::Waiting(_) = self.at {
            return self.held.push(content);
        }
        let decided = content.trim_end_matches(is_python_space);
        if !decided.is_empty() {
            self.held.hand_on(out);
            out.push_str(decided);
        }
        self.held.push(&content[decided.len()..])
    }

    fn close(&mut self, out: &mut String) {
        if let Bracket::Waiting(spaces) = self.at {
            out.push_str(self.held.text[spaces..].trim_end_matches(is_python_space));
        }
        self.held.text.clear();
        out.push(self.close);
        self.at = Bracket::Outside;
    }
}

/// `( x )` → `(x)`: exactly one space on the inner sides goes, of a pair with nothing but text in it.
#[derive(Debug)]
struct Spaced {
    open: char,
    close: char,
    held: BoundedText,
    at: Quote,
}

#[derive(Debug, Clone, Copy)]
enum Quote {
    Outside,
    Opened,
    /// After the opening one and a space; the space and what follows are kept.
    Inside,
}

impl Spaced {
    fn feed(&mut self, mut text: &str, out: &mut String) -> Result<(), TooLong> {
        while let Some(next) = text.chars().next() {
            match self.at {
                Quote::Outside => {
                    let end = text.find(self.open).map(|at| at + self.open.len_utf8());
                    let (decided, rest) = text.split_at(end.unwrap_or(text.len()));
                    out.push_str(decided);
                    text = rest;
                    if end.is_some() {
                        self.at = Quote::Opened;
                    }
                }
                Quote::Opened => self.at = if next == ' ' { Quote::Inside } else { Quote::Outside },
                Quote::Inside => {
                    let end = text.find([self.open, self.close]);
                    let (content, rest) = text.split_at(end.unwrap_or(text.len()));
                    self.held.push(content)?;
                    text = rest;
                    if let Some(mark) = text.chars().next() {
                        text = &text[mark.len_utf8()..];
                        self.end(mark, out);
                    }
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, mark: char, out: &mut String) {
        let inner = self.held.text.strip_prefix(' ').and_then(|rest| rest.strip_suffix(' '));
        let inner = inner.filter(|inner| !inner.is_empty() && mark == self.close);
        out.push_str(inner.unwrap_or(&self.held.text));
        out.push(mark);
        // a mark that closes nothing may open
        self.at = if inner.is_none() && mark == self.open { Quote::Opened } else { Quote::Outside };
        self.held.text.clear();
    }
}

/// A newline, then the text without white space at both ends.
#[derive(Debug)]
struct Strip {
    begun: bool,
    has_text: bool,
    held: BoundedText,
}

impl Strip {
    fn begin(&mut self, out: &mut String) {
        if !self.begun {
            out.push('\n');
            self.begun = true;
        }
    }

    fn feed(&mut self, text: &str, out: &mut String) -> Result<(), TooLong> {
        self.begin(out);
        let text = if self.has_text { text } else { text.trim_start_matches(is_python_space) };
        let decided = text.trim_end_matches(is_python_space);
        if !decided.is_empty() {
            self.has_text = true;
            self.held.hand_on(out);
            out.push_str(decided);
        }
        self.held.push(&text[decided.len()..])
    }
}

#[cfg(test)]
mod tests;
