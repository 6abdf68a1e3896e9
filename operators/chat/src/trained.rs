//! Which parts of a rendered conversation are trained on.
//!
//! T is the text of the whole conversation. For assistant message i, with renders of the conversation's beginnings:
//!
//! ```text
//!   P = messages before i                  …<|im_start|>user\nHi<|im_end|>\n
//!   G = P with the generation prompt       …<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
//!   Q = messages up to i                   …<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
//!                                                                                                 └─ trained: Q − G ─┘
//! ```
//!
//! If G and Q are beginnings of T, the trained text is what Q adds to G. A template that rewrites earlier turns, such as
//! one that drops their reasoning, breaks this. Then the text of message i is located by a render in which a mark
//! replaces its content, and G and Q only tell the generation prompt and what the template writes after the content.

use std::ops::Range;

use minijinja::Value;

use crate::conversation::Message;
use crate::generation::unmark;
use crate::template::Renderer;
use crate::{ChatError, ChatTemplate, Conversation, Rendered, TrainOn, TrainedRange};

/// How the part of a generation prompt begins that follows the header of the turn.
const REASONING_TAGS: [&str; 5] = ["<think", "</think", "[THINK]", "<|channel>", "<|START_THINKING|>"];

/// The indices of the messages that are trained on.
fn selected(messages: &[Message], train: TrainOn) -> Vec<usize> {
    let mut assistants = (0..messages.len()).filter(|&index| messages[index].is_assistant());
    match train {
        TrainOn::Last => assistants.next_back().filter(|&index| messages[index].is_trained()).into_iter().collect(),
        _ => assistants.filter(|&index| messages[index].is_trained()).collect(),
    }
}

impl ChatTemplate {
    /// The text without a generation prompt, and the parts of it that are trained on.
    ///
    /// With `{% generation %}` blocks these are the blocks, as in transformers' `return_assistant_tokens_mask`, less those
    /// of messages that are left out. Without, they are derived from renders of the conversation's beginnings; see the
    /// [crate documentation](crate).
    pub fn render_trained(&self, conversation: &Conversation, train: TrainOn) -> Result<Rendered, ChatError> {
        let mut renderer = Renderer::new(self, conversation);
        let text = renderer.render(&conversation.values(), false)?;
        let trained = match train {
            TrainOn::All if text.is_empty() => Vec::new(),
            TrainOn::All => vec![TrainedRange { range: 0..text.len(), message: None }],
            _ if self.has_generation_blocks() => blocks(&mut renderer, &text, train)?,
            _ => derive(&mut renderer, &text, train)?,
        };
        Ok(Rendered { text, trained })
    }
}

/// The generation blocks of the selected messages.
fn blocks(renderer: &mut Renderer, text: &str, train: TrainOn) -> Result<Vec<TrainedRange>, ChatError> {
    let messages = renderer.conversation.entries();
    let open = renderer.unused_char(&[])?;
    let close = renderer.unused_char(&[open])?;
    let marked = renderer.render_marked(&renderer.conversation.values(), false, Some([open, close]))?;
    let (unmarked, ranges) = unmark(&marked, open, close)?;
    if unmarked != text {
        return Err(ChatError::Generation("the template reads the text of a block again and changes it".into()));
    }
    let owners = owners(renderer, &ranges, [open, close])?;
    let selected = selected(messages, train);
    let all = messages.iter().enumerate().all(|(index, message)| !message.is_assistant() || selected.contains(&index));
    let mut trained = Vec::new();
    for (range, message) in ranges.into_iter().zip(owners) {
        let keep = match message {
            Some(message) => all || selected.contains(&message),
            None if all => true,
            None => {
                let block = text[range.clone()].chars().take(20).collect::<String>();
                let problem = format!("the block {block:?}… belongs to no message, and some messages are left out");
                return Err(ChatError::Generation(problem));
            }
        };
        if keep && !range.is_empty() {
            trained.push(TrainedRange { range, message });
        }
    }
    Ok(trained)
}

/// The message of each block: from a render in which every assistant message carries its own mark.
fn owners(renderer: &mut Renderer, ranges: &[Range<usize>], marks: [char; 2]) -> Result<Vec<Option<usize>>, ChatError> {
    let messages = renderer.conversation.entries();
    let [open, close] = marks;
    let quote = renderer.unused_char(&marks)?;
    let mut values = renderer.conversation.values();
    for (index, message) in messages.iter().enumerate().filter(|(_, message)| message.is_assistant()) {
        values[index] = message.marked(&format!("{quote}{index}{quote}"), true);
    }
    let mut owners = vec![None; ranges.len()];
    // a template can reject the marks, for example as function names; then no block has a known message
    let Ok(marked) = renderer.render_marked(&values, false, Some(marks)) else { return Ok(owners) };
    let (text, blocks) = unmark(&marked, open, close)?;
    if blocks.len() != ranges.len() {
        return Ok(owners);
    }
    for (place, block) in blocks.iter().enumerate() {
        let mut found = text[block.clone()].split(quote).skip(1).step_by(2).map(|index| index.parse::<usize>().ok());
        let first = found.next().flatten();
        owners[place] = match first {
            Some(_) => first.filter(|_| found.all(|other| other == first)),
            // text right after a block is of the same message, such as the end-of-text token after the last turn
            None if place > 0 && ranges[place - 1].end == ranges[place].start => owners[place - 1],
            None => None,
        };
    }
    Ok(owners)
}

/// The trained text of the selected messages, for a template without generation blocks.
fn derive(renderer: &mut Renderer, text: &str, train: TrainOn) -> Result<Vec<TrainedRange>, ChatError> {
    let messages = renderer.conversation.entries();
    let values = renderer.conversation.values();
    let selected = selected(messages, train);
    if selected.is_empty() {
        return Ok(Vec::new());
    }
    let mark = renderer.unused_char(&[])?.to_string();
    let mut trained: Vec<TrainedRange> = Vec::new();
    for index in selected {
        let mut search =
            Search { renderer, text, values: &values, messages, index, mark: &mark, place: None, prompt: None };
        let range = search.start()?..search.end()?;
        search.check(&range)?;
        if trained.last().is_some_and(|last| last.range.end > range.start) {
            return Err(untraceable(index, "the template writes it into the text of another message"));
        }
        if !range.is_empty() {
            trained.push(TrainedRange { range, message: Some(index) });
        }
    }
    Ok(trained)
}

fn untraceable(message: usize, feature: impl Into<String>) -> ChatError {
    ChatError::Untraceable { message, feature: feature.into() }
}

/// The search for the text of one message.
struct Search<'a, 'r> {
    renderer: &'a mut Renderer<'r>,
    text: &'a str,
    values: &'a [Value],
    messages: &'a [Message],
    index: usize,
    mark: &'a str,
    /// The bytes of the text that depend on the content of the message.
    place: Option<Range<usize>>,
    /// G, and its length without the generation prompt.
    prompt: Option<(String, usize)>,
}

impl Search<'_, '_> {
    /// The text of the first `count` messages.
    fn beginning(&mut self, count: usize, add_generation_prompt: bool) -> Result<String, ChatError> {
        self.renderer.render(&self.values[..count], add_generation_prompt).map_err(|error| {
            untraceable(self.index, format!("the template rejects the conversation's first {count} messages: {error}"))
        })
    }

    /// `text`, of the first `count` messages, compared with the same render in which message `index` is marked: the
    /// bytes of `text` from the first to the last difference.
    fn difference(&mut self, text: &str, count: usize, prompt: bool, index: usize) -> Result<Range<usize>, ChatError> {
        let mut values = self.values[..count].to_vec();
        values[index] = self.messages[index].marked(self.mark, false);
        let other = self.renderer.render(&values, prompt).map_err(|error| {
            untraceable(self.index, format!("the template rejects another content of message {index}: {error}"))
        })?;
        if !other.contains(self.mark) {
            return Err(untraceable(self.index, format!("the template does not write the content of message {index}")));
        }
        let start = common_prefix(text, &other);
        let end = text.len() - common_suffix(text, &other);
        Ok(start..end.max(start))
    }

    fn place(&mut self) -> Result<Range<usize>, ChatError> {
        if self.place.is_none() {
            let text = self.text;
            self.place = Some(self.difference(text, self.values.len(), false, self.index)?);
        }
        Ok(self.place.clone().unwrap_or_default())
    }

    /// G, and where its generation prompt begins.
    fn prompt(&mut self) -> Result<(String, usize), ChatError> {
        if let Some(prompt) = &self.prompt {
            return Ok(prompt.clone());
        }
        let before = self.beginning(self.index, false)?;
        let prompt = self.beginning(self.index, true)?;
        let mut start = common_prefix(&before, &prompt);
        if start < before.len() {
            // Phi-3 writes the end-of-text token instead of a generation prompt; both can begin with `<|`
            start = self
                .renderer
                .special_tokens()
                .iter()
                .filter_map(|token| before.strip_suffix(token.as_str()))
                .map(str::len)
                .find(|&length| length <= start && prompt.is_char_boundary(length))
                .ok_or_else(|| untraceable(self.index, "the generation prompt replaces text of earlier messages"))?;
        }
        self.prompt = Some((prompt.clone(), start));
        Ok((prompt, start))
    }

    /// Where the message's text begins, after the generation prompt.
    fn start(&mut self) -> Result<usize, ChatError> {
        let given = self.beginning(self.index, true)?;
        if self.text.starts_with(&given) {
            return Ok(given.len());
        }
        let (given, length) = self.prompt()?;
        let (before, prompt) = given.split_at(length);
        let place = self.place()?;
        // between the previous message's content and this one's, all text is the template's
        let rewritten = !self.text.starts_with(before);
        let after = if !rewritten {
            before.len()
        } else if self.index == 0 {
            return Err(untraceable(self.index, "the text before the first message depends on later ones"));
        } else {
            let text = self.text;
            self.difference(text, self.values.len(), false, self.index - 1)?.end
        };
        let text = self.text;
        let between = text.get(after..place.start).unwrap_or_default();
        if prompt.is_empty() && rewritten {
            // Mistral moves the system message to the last user turn; what ends the previous turn stays the same
            let own = self.difference(before, self.index, true, self.index - 1)?;
            if let Some(tail) = before.get(own.end..).filter(|tail| between.starts_with(tail)) {
                return Ok(after + tail.len());
            }
        }
        // a template can leave out of a turn what follows the header of the prompt, the reasoning or its absence
        let header = REASONING_TAGS.iter().filter_map(|tag| prompt.find(tag)).min().unwrap_or(prompt.len());
        for header in [prompt, &prompt[..header]] {
            if let Some(found) = between.find(header).filter(|_| !header.is_empty()) {
                return Ok(after + found + header.len());
            }
        }
        Err(untraceable(
            self.index,
            format!("the template writes {between:?} before it and {prompt:?} as the generation prompt"),
        ))
    }

    /// Where the message's text ends, after what the template writes when the conversation ends with the message.
    fn end(&mut self) -> Result<usize, ChatError> {
        let count = self.index + 1;
        if count == self.values.len() {
            return Ok(self.text.len());
        }
        let ended = self.beginning(count, false)?;
        if self.text.starts_with(&ended) {
            return Ok(ended.len());
        }
        // the template ends the last turn in another way than earlier ones: as before a generation prompt
        let (given, length) = self.prompt()?;
        let mut open = self.beginning(count, true)?;
        let prompt = &given[length..];
        let has_prompt = !prompt.is_empty() && open.ends_with(prompt);
        if has_prompt {
            open.truncate(open.len() - prompt.len());
        }
        if has_prompt && self.text.starts_with(&open) {
            return Ok(open.len());
        }
        let place = self.place()?;
        let rest = &self.text[place.end..];
        let own = self.difference(&ended, count, false, self.index)?;
        if let Some(tail) = ended.get(own.end..).filter(|tail| rest.starts_with(tail)) {
            return Ok(place.end + tail.len());
        }
        if has_prompt {
            let whole = format!("{open}{prompt}");
            let own = self.difference(&whole, count, true, self.index)?;
            if let Some(tail) = open.get(own.end..).filter(|tail| rest.starts_with(tail)) {
                return Ok(place.end + tail.len());
            }
        }
        Err(untraceable(self.index, "the template ends this turn in another way than the last one"))
    }

    /// The range has to contain the content: whatever is trained on comes from the message.
    fn check(&mut self, range: &Range<usize>) -> Result<(), ChatError> {
        let index = self.index;
        let Some(mut rest) = self.text.get(range.clone()) else {
            return Err(untraceable(index, "the text of the message ends before it begins"));
        };
        let text = rest;
        let mut first = None;
        for content in self.messages[index].contents() {
            let whole = content.trim();
            // templates drop reasoning that is part of the content
            let answer = content.rsplit("</think>").next().unwrap_or_default().trim();
            let found = [whole, answer].into_iter().find_map(|part| Some((rest.find(part)?, part.len())));
            let Some((place, length)) = found else {
                return Err(untraceable(index, "the template changes or drops its content"));
            };
            first.get_or_insert(place);
            rest = &rest[place + length..];
        }
        for name in self.messages[index].calls() {
            let place = text.find(name);
            let place = place.ok_or_else(|| untraceable(index, "the template changes or drops its tool calls"))?;
            first.get_or_insert(place);
        }
        // without a generation prompt, the header of the turn would be taken for the message's text
        if first.is_some_and(|first| !text[..first].trim().is_empty()) {
            let (given, length) = self.prompt()?;
            if length == given.len() && self.has_header(&given)? {
                return Err(untraceable(index, "the template has no generation prompt that ends before its text"));
            }
        }
        Ok(())
    }

    /// Whether the template writes more than white space between `given` and the content of an assistant message.
    fn has_header(&mut self, given: &str) -> Result<bool, ChatError> {
        let mut values = self.values[..self.index].to_vec();
        let role = self.renderer.conversation.messages().nth(self.index).map_or("assistant", |message| message.role);
        values.push(Value::from_pairs([("role", role), ("content", self.mark)]));
        let text = self
            .renderer
            .render(&values, false)
            .map_err(|error| untraceable(self.index, format!("the template rejects another content of it: {error}")))?;
        let header = text.strip_prefix(given).and_then(|rest| rest.split(self.mark).next());
        Ok(header.is_none_or(|header| !header.trim().is_empty()))
    }
}

/// Length of the common beginning, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    let mut length = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    while !a.is_char_boundary(length) || !b.is_char_boundary(length) {
        length -= 1;
    }
    length
}

/// Length of the common end, in whole characters.
fn common_suffix(a: &str, b: &str) -> usize {
    let mut length = a.bytes().rev().zip(b.bytes().rev()).take_while(|(a, b)| a == b).count();
    while !a.is_char_boundary(a.len() - length) || !b.is_char_boundary(b.len() - length) {
        length -= 1;
    }
    length
}
