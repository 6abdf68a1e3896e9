//! The section `chat` of a job: how conversations become text, and what of it the model is trained on.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use stillhouse_chat::{MAX_TEMPLATE_BYTES, TrainOn};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionFile};
use stillhouse_schemas::spec::{Boundary, JobSpec, Separator, SpecialTokens};

use super::{NAME, TEMPLATE, TEMPLATE_FIELD};

/// Conversations: records with a list of messages (`input.messages`) instead of a text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Chat")]
pub struct ChatSection {
    /// A Jinja file with the chat template. Default: the tokenizer's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Variables of the template, such as `enable_thinking: false`.
    pub options: BTreeMap<String, Value>,
    /// The day, as YYYY-MM-DD, for templates that write today's date: the same job gives the same tokens every day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// The messages on which the model is trained: where `loss_mask` is true.
    pub train: TrainedMessages,
    /// Fills what an answer leaves of its last block, for models that write whole blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<AnswerBlock>,
}

/// The messages on which a model is trained. A message with `weight: 0` or `train: false` is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedMessages {
    /// Every message of the assistant.
    #[default]
    Assistant,
    /// The last message of the assistant.
    Last,
    /// All messages, and what the template writes between them.
    All,
}

impl TrainedMessages {
    pub(super) fn rule(self) -> TrainOn {
        match self {
            Self::Assistant => TrainOn::Assistant,
            Self::Last => TrainOn::Last,
            Self::All => TrainOn::All,
        }
    }
}

/// Blocks of tokens that begin where an answer begins. Every answer is filled to whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerBlock {
    /// Tokens per block.
    #[schemars(range(min = 2, max = 4096))]
    pub length: u32,
    /// The token that fills the last block of an answer.
    #[serde(default)]
    pub fill: BlockFill,
}

/// What fills the last block of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BlockFill {
    /// The eos token, on which the model is trained.
    #[default]
    Eos,
    /// The padding token, on which the model is not trained.
    Pad,
}

impl Section for ChatSection {
    const KEY: &'static str = NAME;

    /// The template, also the tokenizer's own: it decides the tokens, so it lies beside the shards.
    fn files(&self) -> Vec<SectionFile> {
        vec![SectionFile {
            field: TEMPLATE_FIELD.into(),
            path: self.template.clone().unwrap_or_default(),
            valid: "a file with a Jinja template",
            max_bytes: MAX_TEMPLATE_BYTES as u64,
            stored_as: Some(TEMPLATE),
        }]
    }

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        let mut need = |field: &str, message: &str| problems.push(Problem::missing(field, message));
        if job.tokenizer.special_tokens != SpecialTokens::Parse {
            need("tokenizer.special_tokens", "must be parse with `chat`: the template writes special tokens as text");
        }
        if job.pack.separator != Separator::None {
            need("pack.separator", "must be none with `chat`: the template ends a conversation with its own tokens");
        }
        if job.pack.boundary != Boundary::None {
            need("pack.boundary", "must be none with `chat`: the template begins a conversation with its own tokens");
        }
        if job.sequential().is_some() {
            need("extract.mode", "must not be sequential with `chat`: the conversations are given");
        }
        if self.block.is_some() && self.train == TrainedMessages::All {
            need("chat.block", "fills answers; with `train: all` there are none; remove it");
        }
        if job.sections.contains("filter") {
            need("filter", "judges text, not conversations, in this version; remove it");
        }
    }
}
