//! Applies the rules to a text in pieces. The output does not depend on where the pieces were cut.
//!
//! ```text
//!  piece ─► pass 1 ─► pass 2 ─► … ─► pass n ─► text that no later piece can change
//!            └ buffers what it cannot decide yet: the start of a match, white space that a bracket may remove
//! ```
//!
//! Every rule of a table is one pass. A pass emits the text that is decided and buffers the rest. Therefore its output
//! does not depend on the cuts, and neither does that of the next pass. What a pass buffers:
//!
//! | rule | buffers |
//! |---|---|
//! | literal text, or a pattern of fixed length | one character less than its length |
//! | ` word . ` | ` .`, and whether a word after a space is still going on: words of any length pass through |
//! | `$` | ` ?` and a newline |
//! | `( x )` → `(x)` | white space before a possible `)`; the text after `( ` up to its `)` |
//! | strip | white space |
//!
//! The last two rows have no bound: only the next `)`, or the end of the document, decides whether the space of `( `
//! stays. A pass that would buffer more than its limit returns an error; it never cleans the text differently instead.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use regex::Regex;

use super::Detokenizer;
use super::rules::{Rule, is_python_space, tables};

/// The error of a rule that would have to buffer more text than its limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("got more than {limit} bytes {what}")]
pub(super) struct TooLong {
    limit: usize,
    what: String,
}

/// A document that passes through the rules.
#[derive(Debug)]
pub(super) struct Stream {
    passes: Vec<Pass>,
}

impl Stream {
    /// Starts a document; every pass may buffer up to `limit` bytes.
    pub(super) fn new(detokenizer: Detokenizer, limit: usize) -> Result<Self, regex::Error> {
        let rules = tables(detokenizer).iter().copied().flatten();
        let passes = rules.flat_map(|rule| std::iter::repeat_n(rule, rule.times())).map(|rule| Pass::new(rule, limit));
        Ok(Self { passes: passes.collect::<Result<_, _>>()? })
    }

    /// Processes the next piece; returns the text that is now decided.
    pub(super) fn feed(&mut self, text: &str) -> Result<String, TooLong> {
        let mut text = Cow::Borrowed(text);
        for pass in &mut self.passes {
            let mut out = String::with_capacity(text.len());
            pass.feed(&text, &mut out)?;
            text = Cow::Owned(out);
        }
        Ok(text.into_owned())
    }

    /// Ends the document; returns the rest of its text.
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

/// Returns a compiled pattern of a table. All documents share it.
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

/// A rule and its state.
#[derive(Debug)]
enum Pass {
    Window(Window),
    WordStop(WordStop),
    SpacedAtEnd(SpacedAtEnd),
    Stripped(Stripped),
    Spaced(Spaced),
    NewlineThenStripped(NewlineThenStripped),
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
            Rule::SpacedAtEnd(mark) => Self::SpacedAtEnd(SpacedAtEnd { mark, held: String::new() }),
            Rule::Stripped(open, close) => {
                let what = format!("after a {open} and white space with no {close} yet");
                Self::Stripped(Stripped { open, close, held: BoundedText::new(limit, what), state: Bracket::Outside })
            }
            Rule::Spaced(open, close) => {
                let what = format!("after a {open} and a space with no {close} yet");
                Self::Spaced(Spaced { open, close, held: BoundedText::new(limit, what), state: Quote::Outside })
            }
            Rule::NewlineThenStripped => {
                let held = BoundedText::new(limit, "of white space with no text yet".into());
                Self::NewlineThenStripped(NewlineThenStripped { begun: false, has_text: false, held })
            }
        })
    }

    fn feed(&mut self, text: &str, out: &mut String) -> Result<(), TooLong> {
        match self {
            Self::Window(pass) => pass.feed(text, out),
            Self::WordStop(pass) => text.chars().for_each(|c| pass.step(c, out)),
            Self::SpacedAtEnd(pass) => pass.feed(text, out),
            Self::Stripped(pass) => pass.feed(text, out)?,
            Self::Spaced(pass) => pass.feed(text, out)?,
            Self::NewlineThenStripped(pass) => pass.feed(text, out)?,
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut String) {
        match self {
            Self::Window(pass) => out.push_str(&pass.held),
            Self::WordStop(pass) => pass.finish(out),
            Self::SpacedAtEnd(pass) => pass.finish(out),
            Self::Stripped(pass) => out.push_str(&pass.held.text),
            Self::Spaced(pass) => out.push_str(&pass.held.text),
            Self::NewlineThenStripped(pass) => pass.begin(out),
        }
    }
}

/// Buffered text of limited size.
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

    /// Appends text. Whether it fits does not depend on the division into pieces.
    fn push(&mut self, text: &str) -> Result<(), TooLong> {
        if self.text.len() + text.len() > self.limit {
            return Err(TooLong { limit: self.limit, what: self.what.clone() });
        }
        self.text.push_str(text);
        Ok(())
    }

    fn move_to(&mut self, out: &mut String) {
        out.push_str(&self.text);
        self.text.clear();
    }
}

/// Replaces literal text or a pattern that matches a fixed number of characters: text that follows a match never
/// changes it.
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
        // an incomplete match at the end begins in the part that stays buffered
        let decided = held.floor_char_boundary(held.len().saturating_sub(longest - 1)).max(done);
        out.push_str(&held[done..decided]);
        self.held.drain(..decided);
    }
}

/// Replaces ` word . ` by ` word. `, or ` word .` by ` word.` at the end of the document.
#[derive(Debug)]
struct WordStop {
    at_end: bool,
    word: Regex,
    state: Word,
}

/// What was read last. The part in brackets is buffered.
#[derive(Debug, Clone, Copy)]
enum Word {
    Other,
    /// A space that may begin a match.
    Space,
    /// Such a space and one or more characters of a word.
    Letters,
    /// The same, then \[space\].
    Gap,
    /// The same, then \[space, full stop\].
    Stop,
    /// The same, then \[space, full stop, newline\].
    Line,
}

impl WordStop {
    fn new(at_end: bool) -> Result<Self, regex::Error> {
        Ok(Self { at_end, word: compiled(r"[\p{L}\p{N}_]")?, state: Word::Other })
    }

    fn is_word(&self, c: char) -> bool {
        if c.is_ascii() {
            c == '_' || c.is_ascii_alphanumeric()
        } else {
            self.word.is_match(c.encode_utf8(&mut [0; 4]))
        }
    }

    fn step(&mut self, c: char, out: &mut String) {
        self.state = match (self.state, c) {
            (Word::Letters, ' ') => Word::Gap,
            (Word::Gap, '.') => Word::Stop,
            (Word::Stop, ' ') if !self.at_end => {
                out.push_str(". ");
                Word::Other
            }
            (Word::Stop, '\n') if self.at_end => Word::Line,
            (at, c) => {
                // no match: emit the buffered text unchanged; its space may begin another match
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
        out.push_str(match (self.state, self.at_end) {
            (Word::Gap, _) => " ",
            (Word::Stop, false) => " .",
            (Word::Stop, true) => ".",
            (Word::Line, _) => ".\n",
            _ => "",
        });
    }
}

/// Replaces ` ?` by `?` at the end of the document, also before a final newline.
#[derive(Debug)]
struct SpacedAtEnd {
    mark: char,
    held: String,
}

impl SpacedAtEnd {
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

/// Replaces `( x )` by `(x)`: removes white space on the inner sides of a pair.
#[derive(Debug)]
struct Stripped {
    open: char,
    close: char,
    held: BoundedText,
    state: Bracket,
}

#[derive(Debug, Clone, Copy)]
enum Bracket {
    Outside,
    /// After the opening bracket; buffers white space.
    Opened,
    /// In text that follows the bracket directly; buffers white space at its end.
    Inside,
    /// In text after this many bytes of white space; buffers all of it.
    Waiting(usize),
}

impl Stripped {
    fn feed(&mut self, mut text: &str, out: &mut String) -> Result<(), TooLong> {
        while let Some(next) = text.chars().next() {
            match self.state {
                Bracket::Outside => {
                    let end = text.find(self.open).map(|at| at + self.open.len_utf8());
                    let (decided, rest) = text.split_at(end.unwrap_or(text.len()));
                    out.push_str(decided);
                    text = rest;
                    if end.is_some() {
                        self.state = Bracket::Opened;
                    }
                }
                Bracket::Opened if is_python_space(next) => {
                    let rest = text.trim_start_matches(is_python_space);
                    self.held.push(&text[..text.len() - rest.len()])?;
                    text = rest;
                }
                Bracket::Opened if next == self.close => {
                    self.held.text.clear();
                    self.state = Bracket::Inside;
                }
                Bracket::Opened => {
                    let spaces = self.held.text.len();
                    self.state = if spaces == 0 { Bracket::Inside } else { Bracket::Waiting(spaces) };
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
        if let Bracket::Waiting(_) = self.state {
            return self.held.push(content);
        }
        let decided = content.trim_end_matches(is_python_space);
        if !decided.is_empty() {
            self.held.move_to(out);
            out.push_str(decided);
        }
        self.held.push(&content[decided.len()..])
    }

    fn close(&mut self, out: &mut String) {
        if let Bracket::Waiting(spaces) = self.state {
            out.push_str(self.held.text[spaces..].trim_end_matches(is_python_space));
        }
        self.held.text.clear();
        out.push(self.close);
        self.state = Bracket::Outside;
    }
}

/// Replaces `( x )` by `(x)`: removes exactly one space on each inner side of a pair with only text inside.
#[derive(Debug)]
struct Spaced {
    open: char,
    close: char,
    held: BoundedText,
    state: Quote,
}

#[derive(Debug, Clone, Copy)]
enum Quote {
    Outside,
    Opened,
    /// After the opening mark and a space; buffers the space and what follows.
    Inside,
}

impl Spaced {
    fn feed(&mut self, mut text: &str, out: &mut String) -> Result<(), TooLong> {
        while let Some(next) = text.chars().next() {
            match self.state {
                Quote::Outside => {
                    let end = text.find(self.open).map(|at| at + self.open.len_utf8());
                    let (decided, rest) = text.split_at(end.unwrap_or(text.len()));
                    out.push_str(decided);
                    text = rest;
                    if end.is_some() {
                        self.state = Quote::Opened;
                    }
                }
                Quote::Opened => self.state = if next == ' ' { Quote::Inside } else { Quote::Outside },
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
        // a mark that closes no pair may open one
        self.state = if inner.is_none() && mark == self.open { Quote::Opened } else { Quote::Outside };
        self.held.text.clear();
    }
}

/// Prepends a newline and strips white space from both ends of the text.
#[derive(Debug)]
struct NewlineThenStripped {
    begun: bool,
    has_text: bool,
    held: BoundedText,
}

impl NewlineThenStripped {
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
            self.held.move_to(out);
            out.push_str(decided);
        }
        self.held.push(&text[decided.len()..])
    }
}

#[cfg(test)]
mod tests;
