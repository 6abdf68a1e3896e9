//! What can be wrong with a conversation, a template or the pair of them.

/// Why a conversation or a template was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The text of a column is not JSON.
    #[error("`{column}` is not JSON: {problem}")]
    Json {
        /// `messages`, `tools` or `options`.
        column: &'static str,
        /// What the parser reports.
        problem: String,
    },
    /// The JSON of a column has the wrong shape.
    #[error("`{column}` is {got}; valid: {valid}")]
    Column {
        /// `messages`, `tools` or `options`.
        column: &'static str,
        /// The kind of value, or the value.
        got: String,
        /// What is accepted.
        valid: &'static str,
    },
    /// A field of a message has the wrong shape.
    #[error("message {message}: `{field}` is {got}; valid: {valid}")]
    Field {
        /// Index of the message, from 0.
        message: usize,
        /// The field.
        field: String,
        /// The kind of value, or the value.
        got: String,
        /// What is accepted.
        valid: &'static str,
    },
    /// The record or its text exceeds a limit.
    #[error("{what} exceeds the limit of {limit}")]
    Limit {
        /// What is too large.
        what: &'static str,
        /// The limit, with its unit.
        limit: String,
    },
    /// The date is not a date.
    #[error("`date` is {got:?}; valid: a date as YYYY-MM-DD, such as 2024-07-26")]
    Date {
        /// The value.
        got: String,
    },
    /// The template has a syntax error.
    #[error("the chat template does not compile: {0}")]
    Template(String),
    /// The template rejects the conversation, or fails on it.
    #[error("the chat template fails on this conversation: {0}")]
    Render(String),
    /// The place of a message in the text cannot be established.
    #[error(
        "message {message}: cannot tell which text is trained on, because {feature}; \
         use a template with {{% generation %}} blocks, or set `train: false` on the message"
    )]
    Untraceable {
        /// Index of the message, from 0.
        message: usize,
        /// What the template does.
        feature: String,
    },
    /// The generation blocks of the template cannot be used.
    #[error("the {{% generation %}} blocks of the chat template cannot be used: {0}")]
    Generation(String),
}
