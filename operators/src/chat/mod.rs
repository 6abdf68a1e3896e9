//! `chat`: turns conversations into tokens by the chat template of a model, and marks the tokens on which it is trained.
//!
//! ```text
//!  [document_id, text = record as JSON, end] ──► messages, tools ──► template ──► text, trained ranges
//!                                                                                        │ tokenizer, with offsets
//!                                        [document_id, tokens, end] ◄── bit 31: trained ─┘ block: fill after answers
//! ```
//!
//! It takes the place of `tokenize`. The ids are those of `apply_chat_template` of transformers, and without `chat.block`
//! nothing is added to them. [`stillhouse_chat`] says which text is trained on; a token is if it contains a byte of such text.
//! `pack` turns the mark of a token into the column `loss_mask`.
//!
//! A record that is no conversation, or that the template rejects, ends the job, or with `input.on_error: skip` is counted as
//! `chat.bad_conversation`. A conversation without a token to train on is dropped and counted as `chat.nothing_to_train`.
//!
//! Cost: about three renders per trained message, and the library `tokenizers`: a few megabytes of text per second and
//! core. Memory: one input batch with its texts and tokens, and one open record of up to 16 MB.

mod section;

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use rayon::prelude::*;
use serde::Deserialize;
use serde_json::value::RawValue;
use stillhouse_chat::{ChatError, ChatTemplate, Conversation, MAX_CONVERSATION_BYTES, TrainOn, TrainedRange};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{BAD_CONVERSATION, Statistic};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;
use stillhouse_schemas::spec::OnError;

pub use section::{AnswerBlock, BlockFill, ChatSection, TrainedMessages};

use crate::config::{JobContext, OperatorConfig, OperatorView, StatisticKind};
use crate::document_pieces::{WholeDocument, WholeDocuments, document_name, document_pieces};
use crate::dropped::DroppedDocuments;
use crate::operator::{
    Emit, Measure, Meter, Operator, OperatorError, SharedStatistics, SplitContext, TRAINED, tokens_schema,
};
use crate::rows::{ListRows, list_column};
use crate::vocabulary::{EncodedText, Role, Vocabulary};

const NAME: &str = "chat";

/// Field of the section that names the template.
pub const TEMPLATE_FIELD: &str = "chat.template";
/// Name of the template beside the shards, which is its name in a tokenizer's folder.
pub const TEMPLATE: &str = "chat_template.jinja";

/// Reason for a conversation on which nothing is trained.
const NOTHING: &str = "chat.nothing_to_train";

/// Name of the statistic of tokens that fill blocks.
const FILLED_TOKENS: &str = "block_fill_tokens";

/// Configuration of `chat`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatConfig {
    /// Key of the messages in a record.
    pub messages: String,
    /// Key of the tools in a record.
    pub tools: Option<String>,
    /// Jinja source.
    pub template: String,
    /// Texts of the special tokens: `bos_token`, ….
    pub special_tokens: BTreeMap<String, String>,
    /// Variables of the template, as JSON.
    pub options: String,
    /// The day that templates write.
    pub date: Option<String>,
    /// The messages on which the model is trained.
    pub train: TrainedMessages,
    /// Tokens per block, the token that fills an answer's last block, and whether the model is trained on that.
    pub block: Option<(usize, u32, bool)>,
    /// Whether bad records are skipped.
    pub on_error: OnError,
}

impl ChatConfig {
    fn compiled(&self) -> Result<ChatTemplate, ChatError> {
        ChatTemplate::new(&self.template, &self.special_tokens, Some(&self.options), self.date.as_deref())
    }
}

impl OperatorConfig for ChatConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<ChatSection>());
    const SIDECAR_FILES: &'static [&'static str] = &[TEMPLATE];
    const STATISTICS: &'static [StatisticKind] =
        &[StatisticKind { name: FILLED_TOKENS, meaning: "Tokens that fill the last blocks of answers" }];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<ChatSection>()? else { return Ok(None) };
        let Some(messages) = context.spec.input.messages.clone() else { return Ok(None) };
        let template = context.spec.sections.file(TEMPLATE_FIELD).ok_or_else(|| {
            Problem::missing(TEMPLATE_FIELD, "the tokenizer has no chat template; valid: the path of a Jinja file")
        })?;
        let template = String::from_utf8(template.to_vec())
            .map_err(|e| Problem::missing(TEMPLATE_FIELD, format!("is not UTF-8: {e}")))?;
        let fill = |block: AnswerBlock| {
            let (role, trained) = match block.fill {
                BlockFill::Eos => (Role::Eos, true),
                BlockFill::Pad => (Role::Pad, false),
            };
            Ok::<_, Problem>((block.length as usize, context.require(role, "chat.block.fill")?, trained))
        };
        let config = Self {
            messages,
            tools: context.spec.input.tools.clone(),
            template,
            special_tokens: context.special_ids.template_variables(),
            options: serde_json::to_string(&section.options)
                .map_err(|e| Problem::missing("chat.options", e.to_string()))?,
            date: section.date.clone(),
            train: section.train,
            block: section.block.map(fill).transpose()?,
            on_error: context.spec.input.on_error,
        };
        let Err(e) = config.compiled() else { return Ok(Some(config)) };
        let field = match e {
            ChatError::Date { .. } => "chat.date",
            ChatError::Column { .. } | ChatError::Json { .. } => "chat.options",
            _ => TEMPLATE_FIELD,
        };
        Err(Problem::missing(field, e.to_string()))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        tokens_schema()
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![(TEMPLATE, self.template.clone().into_bytes())]
    }

    fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)> {
        vec![(TEMPLATE_FIELD, self.template.as_bytes().into())]
    }

    /// The tokens on which the model is trained. `pack` checks the column.
    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let rows = ListRows::from_batch(row, columns::LOSS_MASK)?;
        let mask = rows.values::<BooleanArray>(columns::LOSS_MASK)?;
        let trained: Vec<bool> = rows.range(0).map(|position| mask.value(position)).collect();
        let count = trained.iter().filter(|trained| **trained).count();
        let facts = vec![("trained".to_owned(), format!("{count} of {} tokens", trained.len()))];
        let tokens = trained.iter().map(|trained| if *trained { "trained".into() } else { String::new() }).collect();
        Ok(Some(OperatorView { operator: NAME.into(), facts, tokens, ..OperatorView::default() }))
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let template = self.compiled().map_err(|e| OperatorError::Config { operator: NAME, message: e.to_string() })?;
        Ok(Box::new(Chat {
            config: self.clone(),
            template,
            vocabulary: context.vocabulary.clone(),
            documents: WholeDocuments::new(NAME, MAX_CONVERSATION_BYTES),
            dropped: DroppedDocuments::new(NAME, context),
            statistics: context.statistics.clone(),
            meter: context.meter.clone(),
        }))
    }
}

/// The operator.
struct Chat {
    config: ChatConfig,
    template: ChatTemplate,
    vocabulary: Arc<Vocabulary>,
    documents: WholeDocuments,
    dropped: DroppedDocuments,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
}

/// The tokens of a conversation.
#[derive(Debug, Default, PartialEq, Eq)]
struct TokenizedConversation {
    /// Ids, with the bit [`TRAINED`].
    tokens: Vec<u32>,
    trained: u64,
    filled: u64,
}

/// The answer to which the tokens belong.
struct Answer {
    message: Option<usize>,
    /// Tokens since it began.
    tokens: usize,
}

impl Chat {
    /// Returns the tokens of a record, or why it has none.
    fn tokenize(&self, document: &WholeDocument<'_>) -> Result<TokenizedConversation, String> {
        if document.is_too_large {
            return Err(format!("the record has {} bytes; valid: up to {MAX_CONVERSATION_BYTES}", document.bytes));
        }
        let conversation = self.conversation(&document.text)?;
        let rendered =
            self.template.render_trained(&conversation, self.config.train.rule()).map_err(|e| e.to_string())?;
        let EncodedText { ids, offsets } =
            self.vocabulary.encode_with_offsets(&rendered.text).map_err(|e| e.to_string())?;
        if let Some(id) = ids.iter().find(|id| **id & TRAINED != 0) {
            return Err(format!("got token id {id}, valid: ids up to {}", i32::MAX));
        }
        Ok(self.marked(&ids, &offsets, &rendered.trained))
    }

    fn conversation(&self, record: &str) -> Result<Conversation, String> {
        let ChatConfig { messages, tools, .. } = &self.config;
        let record: BTreeMap<String, &RawValue> =
            serde_json::from_str::<Record<'_>>(record).map_err(|e| format!("is not a JSON object: {e}"))?.0;
        let found = record.get(messages).ok_or_else(|| {
            let keys: Vec<&str> = record.keys().take(20).map(String::as_str).collect();
            format!("the record has no key {messages:?}, which `input.messages` names; its keys: {}", keys.join(", "))
        })?;
        let tools = tools.as_ref().and_then(|tools| record.get(tools)).map(|tools| tools.get());
        // some data sets store the list as a string that holds its JSON
        match serde_json::from_str::<String>(found.get()) {
            Ok(json) => Conversation::parse(&json, tools),
            Err(_) => Conversation::parse(found.get(), tools),
        }
        .map_err(|e| e.to_string())
    }

    /// Marks the tokens that contain a byte of the trained ranges, which ascend, and fills the last block of each answer.
    fn marked(&self, ids: &[u32], offsets: &[(usize, usize)], trained: &[TrainedRange]) -> TokenizedConversation {
        let mut made = TokenizedConversation { tokens: Vec::with_capacity(ids.len()), trained: 0, filled: 0 };
        let mut ranges = trained.iter().peekable();
        let mut answer: Option<Answer> = None;
        for (&id, &(start, end)) in ids.iter().zip(offsets) {
            while ranges.next_if(|trained| trained.range.end <= start).is_some() {}
            let next = ranges.peek();
            let contains = |range: &std::ops::Range<usize>| range.start < end || (start == end && range.start == start);
            let is_trained = next.is_some_and(|trained| contains(&trained.range));
            let message = next.and_then(|trained| trained.message);
            // text between two ranges of a message does not end its answer
            let continues = |answer: &Answer| answer.message == message && (is_trained || message.is_some());
            if answer.as_ref().is_some_and(|answer| !continues(answer)) {
                self.fill_block(answer.take(), &mut made);
            }
            if is_trained {
                answer.get_or_insert(Answer { message, tokens: 0 });
            }
            if let Some(answer) = &mut answer {
                answer.tokens += 1;
            }
            made.trained += u64::from(is_trained);
            made.tokens.push(if is_trained { id | TRAINED } else { id });
        }
        self.fill_block(answer, &mut made);
        made
    }

    /// Fills the last block of an answer.
    fn fill_block(&self, answer: Option<Answer>, made: &mut TokenizedConversation) {
        let block = self.config.block.filter(|_| self.config.train.rule() != TrainOn::All);
        let (Some(Answer { tokens, .. }), Some((length, id, is_trained))) = (answer, block) else { return };
        let missing = tokens.next_multiple_of(length) - tokens;
        made.tokens.extend(std::iter::repeat_n(if is_trained { id | TRAINED } else { id }, missing));
        made.trained += if is_trained { missing as u64 } else { 0 };
        made.filled += missing as u64;
    }

    fn bad(&mut self, document: &WholeDocument<'_>, message: String) -> Result<(), OperatorError> {
        if self.config.on_error == OnError::Fail {
            return Err(OperatorError::Data { operator: NAME, place: document_name(document.id), message });
        }
        self.dropped.add(BAD_CONVERSATION, document, Some(&message))
    }
}

/// The values of a record, not parsed. Of a key that occurs twice the last value counts, as in Python's `json`.
#[derive(Deserialize)]
struct Record<'r>(#[serde(borrow)] BTreeMap<String, &'r RawValue>);

impl Operator for Chat {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut documents = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, NAME)? {
            documents.extend(self.documents.add(piece)?);
        }
        let tokenized: Vec<_> = documents.par_iter().map(|document| self.tokenize(document)).collect();
        let (mut kept, mut tokens, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        let mut filled = 0;
        for (document, tokenized) in documents.iter().zip(tokenized) {
            match tokenized {
                Err(message) => self.bad(document, message)?,
                Ok(made) if made.trained == 0 => self.dropped.add(NOTHING, document, None)?,
                Ok(made) => {
                    kept.push(document.id);
                    lengths.push(made.tokens.len());
                    tokens.extend(made.tokens);
                    filled += made.filled;
                }
            }
        }
        self.meter.add(Measure::Tokens, tokens.len() as u64);
        {
            let mut statistics = self.statistics.lock();
            statistics.text_tokens += tokens.len() as u64;
            if self.config.block.is_some() {
                statistics.count(FILLED_TOKENS, Statistic::Sum(filled));
            }
        }
        if kept.is_empty() {
            return Ok(());
        }
        let schema = tokens_schema();
        let arrow = OperatorError::arrow(NAME);
        let tokens = list_column(schema.field(1), Arc::new(UInt32Array::from(tokens)), &lengths).map_err(&arrow)?;
        let ends = BooleanArray::from(vec![true; kept.len()]);
        let columns: Vec<arrow::array::ArrayRef> = vec![Arc::new(UInt64Array::from(kept)), tokens, Arc::new(ends)];
        emit(RecordBatch::try_new(schema, columns).map_err(&arrow)?)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.documents.finish()?;
        self.dropped.finish()
    }
}

#[cfg(test)]
mod tests;
