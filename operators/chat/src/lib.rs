//! Conversations as text: chat templates with the results of transformers, and the text that a model is trained on.
//!
//! ```
//! use std::collections::BTreeMap;
//! use stillhouse_chat::{ChatTemplate, Conversation, TrainOn};
//!
//! let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}\
//!                 {% if add_generation_prompt %}<|assistant|>{% endif %}";
//! let template = ChatTemplate::new(template, &BTreeMap::new(), None, None)?;
//! let messages = r#"[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]"#;
//! let rendered = template.render_trained(&Conversation::parse(messages, None)?, TrainOn::Assistant)?;
//! assert_eq!(rendered.text, "<|user|>2 + 2?<|end|><|assistant|>4<|end|>");
//! assert_eq!(&rendered.text[rendered.trained[0].range.clone()], "4<|end|>");
//! # Ok::<(), stillhouse_chat::ChatError>(())
//! ```
//!
//! ```text
//!   messages, tools (JSON) ─Conversation::parse─► Conversation ─┐
//!                                                               ├─ render ─────────► text
//!   Jinja source, tokens, options ─ChatTemplate::new────────────┴─ render_trained ─► text and trained ranges
//! ```
//!
//! # Equality with transformers
//!
//! The text is that of `apply_chat_template(…, tokenize=False)` of transformers 5.24. Templates that transformers rejects
//! for a conversation are errors here, too. Known differences:
//! - Missing, so always an error: `'…' % (…)`, the filters `center`, `filesizeformat`, `random`, `striptags`, `urlencode`
//!   and `wordcount`, the globals `cycler`, `joiner` and `lipsum`, and `int` of text that is no number.
//! - After `|safe`, Jinja2 escapes HTML in strings that are added with `+`; here nothing is ever escaped.
//! - `tojson` of a generator, such as the result of `selectattr` without `list`, fails in Python; here it is a list.
//! - Integers of JSON beyond 64 bits are floats.
//! - `a ~ b` writes a float of at least 1e16 or below 1e-4 with all its digits.
//! - `x.items` without a call is the key `items`; in Python it is the method.
//!
//! # Which text is trained on
//!
//! With `{% generation %}` blocks: exactly these. Without, what follows the generation prompt up to the end of what the
//! template writes for the message, including the end-of-turn marker and a line break that follows it. The prompt is text
//! that the model is given, so neither the header of the turn nor a `<think>` of the prompt is trained on. Each range
//! contains the content of its message and the names of the functions that it calls. If a template gives no proof of
//! the place, the result is [`ChatError::Untraceable`], never a guess.
//!
//! # Cost
//!
//! [`ChatTemplate::render`] is one render. [`ChatTemplate::render_trained`] takes 3 with generation blocks. Without, it
//! takes 1, and for each trained message 2 of the conversation's beginning, or up to 9 if the template rewrites earlier
//! turns. The length of beginnings grows with the message, so the cost is quadratic in the number of messages.
//! [`MAX_MESSAGES`] bounds it.
//!
//! # Strangers' templates and records
//!
//! A render has 8,000,000 units of fuel, about one for each instruction and for 64 bytes of text; all renders of one
//! conversation together have 256,000,000. [`MAX_TEXT_BYTES`], [`MAX_TEMPLATE_BYTES`] and [`MAX_CONVERSATION_BYTES`]
//! bound texts; values have at most 200 levels. There is no clock, no randomness and no access to files.

mod conversation;
mod environment;
mod error;
mod generation;
mod json;
mod repr;
mod rewrite;
mod strftime;
mod strings;
mod template;
mod tojson;
mod trained;

pub use conversation::{Conversation, MAX_CONVERSATION_BYTES, MAX_MESSAGES, MessageInfo};
pub use error::ChatError;
pub use template::{ChatTemplate, MAX_TEMPLATE_BYTES, MAX_TEXT_BYTES, Rendered, TrainOn, TrainedRange};
