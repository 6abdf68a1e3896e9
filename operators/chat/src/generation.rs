//! `{% generation %}` blocks, the extension of transformers that says which text is trained on.
//!
//! transformers parses the tag as a call block of Jinja2; [`crate::rewrite`] turns the source into one. The called function returns the block's text, between two marks if the render asks for them.

use std::ops::Range;

use minijinja::value::Kwargs;
use minijinja::{Error, State, Value};

use crate::ChatError;

/// The function that the rewritten blocks call.
pub(crate) const FUNCTION: &str = "__stillhouse_generation";

/// Variable that holds the two marks as one string. Without it, blocks are not marked.
pub(crate) const MARKS: &str = "__stillhouse_marks";

/// The function: the text of the block, marked on request.
pub(crate) fn mark(state: &mut State, kwargs: Kwargs) -> Result<Value, Error> {
    let caller: Value = kwargs.get("caller")?;
    kwargs.assert_all_used()?;
    let text = caller.call(state, &[])?;
    let Some(marks) = state.lookup(MARKS) else { return Ok(text) };
    let mut marks = marks.as_str().unwrap_or_default().chars();
    match (marks.next(), marks.next()) {
        (Some(open), Some(close)) => Ok(Value::from(format!("{open}{text}{close}"))),
        _ => Ok(text),
    }
}

/// A text without its marks, and the blocks that they enclosed.
pub(crate) fn unmark(marked: &str, open: char, close: char) -> Result<(String, Vec<Range<usize>>), ChatError> {
    let mut text = String::with_capacity(marked.len());
    let mut blocks = Vec::new();
    let mut started: Option<usize> = None;
    let nested = || ChatError::Generation("the template writes one block inside another".into());
    for c in marked.chars() {
        if c == open {
            if started.replace(text.len()).is_some() {
                return Err(nested());
            }
        } else if c == close {
            let start = started.take().ok_or_else(nested)?;
            blocks.push(start..text.len());
        } else {
            text.push(c);
        }
    }
    match started {
        Some(_) => Err(nested()),
        None => Ok((text, blocks)),
    }
}
