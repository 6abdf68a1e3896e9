//! A record's conversation: the messages in the shape of OpenAI's API, also from ShareGPT's, and the tools.

use minijinja::Value;

use crate::ChatError;
use crate::json::{Json, map_value};

/// Most messages of a conversation. Finding the trained text takes renders of every prefix, so its cost is quadratic.
pub const MAX_MESSAGES: usize = 1_000;

/// Most bytes of JSON, messages and tools together.
pub const MAX_CONVERSATION_BYTES: usize = 16 << 20;

/// Roles of the messages that a model writes.
const ASSISTANT_ROLES: [&str; 3] = ["assistant", "model", "chatbot"];

/// Names of the reasoning, in the order in which transformers looks for it.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

const ROLES: &str = "a string, such as \"system\", \"user\", \"assistant\" or \"tool\"";
const CONTENT: &str =
    "a string, a list of {\"type\": \"text\", \"text\": …} parts, or null in a message with `tool_calls` or reasoning";

/// One record's conversation.
#[derive(Debug, Clone)]
pub struct Conversation {
    messages: Vec<Message>,
    tools: Value,
    tools_json: Json,
}

/// What [`Conversation::messages`] says of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageInfo<'a> {
    /// The role, as the record has it.
    pub role: &'a str,
    /// Whether a model writes messages of this role.
    pub assistant: bool,
    /// Whether the message is trained on: an assistant's, without `weight: 0` or `train: false`.
    pub trained: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Message {
    role: String,
    trained: bool,
    fields: Vec<(String, Json)>,
    value: Value,
}

impl Conversation {
    /// Reads a conversation from the JSON text of a `messages` or `conversations` column and of a `tools` column.
    ///
    /// `json` is a list of messages. Each has OpenAI's shape (`role`, `content`, `tool_calls`, …) or ShareGPT's
    /// (`from`, `value`). `tools` is a list of tools, or a string that contains the JSON of one; null and the empty
    /// string are no tools.
    ///
    /// As in transformers 5, keys with the value null are dropped, and the reasoning is available to the template as
    /// `reasoning_content` and as `thinking`. Other keys keep their order.
    ///
    /// ```
    /// let json = r#"[{"role": "user", "content": "2 + 2?"}, {"from": "gpt", "value": "4"}]"#;
    /// let conversation = stillhouse_chat::Conversation::parse(json, None)?;
    /// assert_eq!(conversation.messages().map(|message| message.trained).collect::<Vec<_>>(), [false, true]);
    /// # Ok::<(), stillhouse_chat::ChatError>(())
    /// ```
    pub fn parse(json: &str, tools: Option<&str>) -> Result<Self, ChatError> {
        if json.len() + tools.map_or(0, str::len) > MAX_CONVERSATION_BYTES {
            let limit = format!("{} MiB of JSON", MAX_CONVERSATION_BYTES >> 20);
            return Err(ChatError::Limit { what: "the conversation", limit });
        }
        let tools_json = match tools {
            Some(text) => parse_tools(text)?,
            None => Json::Null,
        };
        let items = match Json::parse("messages", json)? {
            Json::List(items) if !items.is_empty() => items,
            other => {
                let valid = "a list of at least one message";
                return Err(ChatError::Column { column: "messages", got: other.describe(), valid });
            }
        };
        if items.len() > MAX_MESSAGES {
            return Err(ChatError::Limit { what: "the conversation", limit: format!("{MAX_MESSAGES} messages") });
        }
        let messages =
            items.into_iter().enumerate().map(|(index, item)| parse_message(index, item)).collect::<Result<_, _>>()?;
        Ok(Self { messages, tools: tools_json.to_value(), tools_json })
    }

    /// The messages, in their order.
    pub fn messages(&self) -> impl ExactSizeIterator<Item = MessageInfo<'_>> {
        self.messages.iter().map(|message| MessageInfo {
            role: &message.role,
            assistant: message.is_assistant(),
            trained: message.trained,
        })
    }

    pub(crate) fn entries(&self) -> &[Message] {
        &self.messages
    }

    /// The messages as the template sees them.
    pub(crate) fn values(&self) -> Vec<Value> {
        self.messages.iter().map(|message| message.value.clone()).collect()
    }

    pub(crate) fn tools(&self) -> &Value {
        &self.tools
    }

    /// Whether a string of the conversation contains the character.
    pub(crate) fn contains(&self, c: char) -> bool {
        let mut test = |text: &str| text.contains(c);
        self.tools_json.any_text(&mut test)
            || self.messages.iter().any(|message| {
                message
                    .fields
                    .iter()
                    .any(|(key, value)| key.contains(c) || value.any_text(&mut |text| text.contains(c)))
            })
    }
}

impl Message {
    pub fn is_assistant(&self) -> bool {
        ASSISTANT_ROLES.contains(&self.role.as_str())
    }

    pub fn is_trained(&self) -> bool {
        self.trained
    }

    fn field(&self, name: &str) -> Option<&Json> {
        self.fields.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// The texts of the content, one for each part.
    pub fn contents(&self) -> Vec<&str> {
        match self.field("content") {
            Some(Json::Text(text)) => vec![text],
            Some(Json::List(parts)) => parts.iter().filter_map(|part| part.get("text")?.as_text()).collect(),
            _ => Vec::new(),
        }
    }

    /// The names of the called functions.
    pub fn calls(&self) -> Vec<&str> {
        let Some(Json::List(calls)) = self.field("tool_calls") else { return Vec::new() };
        calls.iter().filter_map(|call| call.get("function").unwrap_or(call).get("name")?.as_text()).collect()
    }

    /// The message with `mark` for its content and for the names of the functions that it calls. An absent content stays
    /// absent, and an empty one stays empty if there are calls: templates branch on both.
    pub fn marked(&self, mark: &str, reasoning: bool) -> Value {
        let has_calls = !self.calls().is_empty();
        let mut fields = self.fields.clone();
        let mut marked = has_calls;
        for (key, value) in &mut fields {
            match (key.as_str(), value) {
                ("content", Json::Text(text)) if !(has_calls && text.is_empty()) => {
                    *text = mark.to_string();
                    marked = true;
                }
                ("content", Json::List(parts)) => {
                    for part in parts {
                        set_text(part, "text", mark);
                        marked = true;
                    }
                }
                ("tool_calls", Json::List(calls)) => {
                    for call in calls {
                        match call {
                            Json::Map(fields) if fields.iter().any(|(key, _)| key == "function") => {
                                for (_, function) in fields.iter_mut().filter(|(key, _)| key == "function") {
                                    set_text(function, "name", mark);
                                }
                            }
                            call => set_text(call, "name", mark),
                        }
                    }
                }
                _ => {}
            }
        }
        if reasoning || !marked {
            for (_, value) in fields.iter_mut().filter(|(key, _)| REASONING_FIELDS.contains(&key.as_str())) {
                if let Json::Text(text) = value {
                    *text = mark.to_string();
                }
            }
        }
        map_value(&fields)
    }
}

/// Replaces the text of `key`, if `value` is a map that has one.
fn set_text(value: &mut Json, key: &str, mark: &str) {
    if let Json::Map(fields) = value {
        for (_, value) in fields.iter_mut().filter(|(name, _)| name == key) {
            if let Json::Text(text) = value {
                *text = mark.to_string();
            }
        }
    }
}

fn parse_tools(text: &str) -> Result<Json, ChatError> {
    const VALID: &str = "a list of objects, a string that contains the JSON of one, or null";
    if text.trim().is_empty() {
        return Ok(Json::Null);
    }
    let tools = match Json::parse("tools", text)? {
        Json::Text(inner) if inner.trim().is_empty() => Json::Null,
        Json::Text(inner) => Json::parse("tools", &inner)?,
        tools => tools,
    };
    let got = match &tools {
        Json::Null => return Ok(tools),
        Json::List(items) => match items.iter().find(|item| !matches!(item, Json::Map(_))) {
            None => return Ok(tools),
            Some(item) => format!("a list that contains {}", item.describe()),
        },
        other => other.describe(),
    };
    Err(ChatError::Column { column: "tools", got, valid: VALID })
}

fn parse_message(index: usize, item: Json) -> Result<Message, ChatError> {
    let invalid = |field: &str, got: String, valid: &'static str| ChatError::Field {
        message: index,
        field: field.to_string(),
        got,
        valid,
    };
    let Json::Map(fields) = item else {
        let valid = "objects with `role` and `content`, or with `from` and `value`";
        return Err(ChatError::Column {
            column: "messages",
            got: format!("a list that contains {}", item.describe()),
            valid,
        });
    };
    let has = |name: &str| fields.iter().any(|(key, _)| key == name);
    let fields = if !has("role") && has("from") { from_sharegpt(index, fields)? } else { fields };
    let mut fields = fields.into_iter().filter(|(_, value)| *value != Json::Null).collect::<Vec<_>>();
    let get = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);

    let role = match get("role") {
        Some(Json::Text(role)) if !role.is_empty() => role.clone(),
        Some(other) => return Err(invalid("role", other.describe(), ROLES)),
        None => return Err(invalid("role", "missing".into(), ROLES)),
    };
    for name in ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"] {
        if let Some(other) = get(name).filter(|value| value.as_text().is_none()) {
            return Err(invalid(name, other.describe(), "a string or null"));
        }
    }
    match get("tool_calls") {
        None => {}
        Some(Json::List(calls)) if calls.iter().all(|call| matches!(call, Json::Map(_))) => {}
        Some(other) => return Err(invalid("tool_calls", other.describe(), "a list of objects, or null")),
    }
    match get("content") {
        Some(Json::Text(_)) => {}
        Some(Json::List(parts)) => {
            for (place, part) in parts.iter().enumerate() {
                check_part(part).map_err(|(key, got, valid)| invalid(&format!("content[{place}]{key}"), got, valid))?;
            }
        }
        Some(other) => return Err(invalid("content", other.describe(), CONTENT)),
        None if get("tool_calls").is_some() || REASONING_FIELDS.iter().any(|name| get(name).is_some()) => {}
        None => return Err(invalid("content", "null or missing".into(), CONTENT)),
    }
    let weight = match get("weight") {
        None | Some(Json::Int(1)) => true,
        Some(Json::Int(0)) => false,
        Some(Json::Float(weight)) if *weight == 0.0 || *weight == 1.0 => *weight == 1.0,
        Some(other) => return Err(invalid("weight", other.describe(), "0, which leaves the message out, or 1")),
    };
    let train = match get("train") {
        None => true,
        Some(Json::Bool(train)) => *train,
        Some(other) => return Err(invalid("train", other.describe(), "true or false")),
    };

    let reasoning = REASONING_FIELDS.iter().find_map(|name| get(name)).cloned();
    if let Some(reasoning) = reasoning {
        if get("thinking").is_none() {
            fields.insert(0, ("thinking".into(), reasoning.clone()));
        }
        match fields.iter_mut().find(|(key, _)| key == "reasoning_content") {
            Some((_, value)) => *value = reasoning,
            None => fields.push(("reasoning_content".into(), reasoning)),
        }
    }
    let trained = ASSISTANT_ROLES.contains(&role.as_str()) && weight && train;
    let value = map_value(&fields);
    Ok(Message { role, trained, fields, value })
}

fn check_part(part: &Json) -> Result<(), (&'static str, String, &'static str)> {
    const PART: &str = "an object {\"type\": \"text\", \"text\": …}";
    if !matches!(part, Json::Map(_)) {
        return Err(("", part.describe(), PART));
    }
    match part.get("type") {
        Some(Json::Text(kind)) if kind == "text" => match part.get("text") {
            Some(Json::Text(_)) => Ok(()),
            Some(other) => Err((".text", other.describe(), "a string")),
            None => Err((".text", "missing".into(), "a string")),
        },
        Some(other) => Err((".type", other.describe(), "\"text\": images, audio and video have no text to train on")),
        None => Err((".type", "missing".into(), "\"text\"")),
    }
}

/// A message of ShareGPT's shape in OpenAI's. Keys other than `from` and `value` follow in their order.
fn from_sharegpt(index: usize, fields: Vec<(String, Json)>) -> Result<Vec<(String, Json)>, ChatError> {
    const ROLES: &str = "\"system\", \"human\" or \"user\", \"gpt\" or \"assistant\", \"function_call\", \
                         or \"observation\", \"tool\" or \"function_response\"";
    let invalid =
        |field: &str, got: String, valid| ChatError::Field { message: index, field: field.into(), got, valid };
    let mut from = Json::Null;
    let mut value = Json::Null;
    let mut others = Vec::new();
    for (key, field) in fields {
        match key.as_str() {
            "from" => from = field,
            "value" => value = field,
            _ => others.push((key, field)),
        }
    }
    let speaker = from.as_text().ok_or_else(|| invalid("from", from.describe(), ROLES))?;
    let role = match speaker {
        "system" => "system",
        "human" | "user" => "user",
        "gpt" | "assistant" | "bot" | "chatgpt" | "model" | "function_call" => "assistant",
        "observation" | "tool" | "tool_response" | "function_response" => "tool",
        _ => return Err(invalid("from", from.describe(), ROLES)),
    };
    let Json::Text(text) = value else { return Err(invalid("value", value.describe(), "a string")) };
    let mut message = vec![("role".to_string(), Json::Text(role.into()))];
    if speaker == "function_call" {
        const CALL: &str = "the JSON of {\"name\": …, \"arguments\": …}, or of a list of these";
        let calls = match serde_json::from_str(&text) {
            Ok(Json::List(calls)) if !calls.is_empty() => calls,
            Ok(call @ Json::Map(_)) => vec![call],
            _ => return Err(invalid("value", Json::Text(text).describe(), CALL)),
        };
        if calls.iter().any(|call| call.get("name").and_then(Json::as_text).is_none()) {
            return Err(invalid("value", Json::Text(text).describe(), CALL));
        }
        let function =
            |call| Json::Map(vec![("type".into(), Json::Text("function".into())), ("function".into(), call)]);
        message.push(("content".into(), Json::Text(String::new())));
        message.push(("tool_calls".into(), Json::List(calls.into_iter().map(function).collect())));
    } else {
        message.push(("content".into(), Json::Text(text)));
    }
    message.extend(others);
    Ok(message)
}
