//! A compiled chat template.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use minijinja::{Environment, ErrorKind, Value};

use crate::environment::{NAME, describe, environment};
use crate::json::Json;
use crate::strftime::Date;
use crate::{ChatError, Conversation, generation, rewrite};

/// Most bytes of a rendered text.
pub const MAX_TEXT_BYTES: usize = 64 << 20;

/// Most bytes of a template. Published ones have up to 20 kB.
pub const MAX_TEMPLATE_BYTES: usize = 128 << 10;

/// Fuel of all renders of one conversation, about 20 s of work.
const CONVERSATION_FUEL: u64 = 256_000_000;

/// Variables of a template that are not options.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "documents",
    generation::MARKS,
    generation::FUNCTION,
    rewrite::BOUNDED,
    rewrite::ITERABLE,
];

/// Which messages [`ChatTemplate::render_trained`] trains on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainOn {
    /// Every assistant message without `weight: 0` or `train: false`.
    Assistant,
    /// The last assistant message, unless it has `weight: 0` or `train: false`.
    Last,
    /// The whole text.
    All,
}

/// Text that is trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainedRange {
    /// Bytes of the text.
    pub range: Range<usize>,
    /// Index of the message that the text belongs to. `None` with [`TrainOn::All`], and for the text of a generation
    /// block that contains none of the message's fields.
    pub message: Option<usize>,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The whole text.
    pub text: String,
    /// The text that is trained on: ascending, disjoint and not empty.
    pub trained: Vec<TrainedRange>,
}

/// A compiled chat template with its special tokens and options. All threads can share it.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<String>,
    has_blocks: bool,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles `template`, the Jinja source of `tokenizer_config.json` or `chat_template.jinja`.
    ///
    /// `special_tokens` maps `bos_token`, `eos_token` and their kind to their texts. `options` is the JSON text of an
    /// object with further variables of the template, such as `{"enable_thinking": false}`; they override special tokens.
    /// `date` is the day that `strftime_now` formats, as `YYYY-MM-DD`: templates never see the clock.
    pub fn new(
        template: &str,
        special_tokens: &BTreeMap<String, String>,
        options: Option<&str>,
        date: Option<&str>,
    ) -> Result<Self, ChatError> {
        if template.len() > MAX_TEMPLATE_BYTES {
            let limit = format!("{} KiB", MAX_TEMPLATE_BYTES >> 10);
            return Err(ChatError::Limit { what: "the chat template", limit });
        }
        let date = match date {
            Some(text) => Some(Date::parse(text).ok_or_else(|| ChatError::Date { got: text.into() })?),
            None => None,
        };
        let options = parse_options(options)?;
        Ok(Self {
            environment: environment(template, special_tokens, &options, date)?,
            source: template.to_string(),
            special_tokens: special_tokens.values().filter(|token| !token.is_empty()).cloned().collect(),
            has_blocks: rewrite::has_blocks(template),
        })
    }

    /// Whether the template says by `{% generation %}` blocks which text is trained on.
    pub fn has_generation_blocks(&self) -> bool {
        self.has_blocks
    }

    /// The text of transformers' `apply_chat_template(…, tokenize=False)`.
    pub fn render(&self, conversation: &Conversation, add_generation_prompt: bool) -> Result<String, ChatError> {
        Renderer::new(self, conversation).render(&conversation.values(), add_generation_prompt)
    }
}

fn parse_options(options: Option<&str>) -> Result<Vec<(String, Json)>, ChatError> {
    let column = "options";
    let Some(text) = options else { return Ok(Vec::new()) };
    match Json::parse(column, text)? {
        Json::Map(fields) => match fields.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
            None => Ok(fields),
            Some((name, _)) => {
                let valid = "variables other than messages, tools, documents and add_generation_prompt";
                Err(ChatError::Column { column, got: format!("an object with the key {name:?}"), valid })
            }
        },
        other => {
            Err(ChatError::Column { column, got: other.describe(), valid: "an object of the template's variables" })
        }
    }
}

/// Renders of one conversation, with their common budget.
pub(crate) struct Renderer<'a> {
    template: &'a ChatTemplate,
    pub conversation: &'a Conversation,
    fuel: u64,
}

impl<'a> Renderer<'a> {
    pub fn new(template: &'a ChatTemplate, conversation: &'a Conversation) -> Self {
        Self { template, conversation, fuel: CONVERSATION_FUEL }
    }

    /// Special tokens that are not empty.
    pub fn special_tokens(&self) -> &'a [String] {
        &self.template.special_tokens
    }

    /// A character for private use that neither the template nor the conversation contains, and not one of `taken`.
    pub fn unused_char(&self, taken: &[char]) -> Result<char, ChatError> {
        ('\u{e000}'..='\u{e0ff}')
            .find(|&c| !taken.contains(&c) && !self.template.source.contains(c) && !self.conversation.contains(c))
            .ok_or(ChatError::Limit {
                what: "the number of private-use characters in the conversation",
                limit: "255".into(),
            })
    }

    /// The text of `messages`.
    pub fn render(&mut self, messages: &[Value], add_generation_prompt: bool) -> Result<String, ChatError> {
        self.render_marked(messages, add_generation_prompt, None)
    }

    /// The text of `messages`, with `marks` around generation blocks.
    pub fn render_marked(
        &mut self,
        messages: &[Value],
        add_generation_prompt: bool,
        marks: Option<[char; 2]>,
    ) -> Result<String, ChatError> {
        if self.fuel == 0 {
            let limit = format!("{CONVERSATION_FUEL} template instructions for all renders of a conversation");
            return Err(ChatError::Limit { what: "the template", limit });
        }
        let mut context = vec![
            ("messages", Value::from(messages.to_vec())),
            ("tools", self.conversation.tools().clone()),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        if let Some(marks) = marks {
            context.push((generation::MARKS, Value::from(marks.iter().collect::<String>())));
        }
        let template =
            self.template.environment.get_template(NAME).map_err(|error| ChatError::Template(describe(&error)))?;
        let mut output = Bounded(Vec::new());
        let captured = template.render_captured_to(Value::from_pairs(context), &mut output).map_err(render_error)?;
        if let Some((used, _)) = captured.state().fuel_levels() {
            self.fuel = self.fuel.saturating_sub(used);
        }
        String::from_utf8(output.0).map_err(|error| ChatError::Render(error.to_string()))
    }
}

fn render_error(error: minijinja::Error) -> ChatError {
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Limit {
            what: "the template",
            limit: format!("{} instructions for one render", crate::environment::RENDER_FUEL),
        },
        ErrorKind::WriteFailure => {
            ChatError::Limit { what: "the rendered text", limit: format!("{} MiB", MAX_TEXT_BYTES >> 20) }
        }
        _ => ChatError::Render(describe(&error)),
    }
}

/// A buffer of at most [`MAX_TEXT_BYTES`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT_BYTES {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
