//! `block_urls`: drops documents whose URL is on a list, and counts them by list.
//!
//! ```text
//!  lists: domains, urls, words ─────────────────────┐
//!  [document_id, text, end] ──► URL of the document ┴─► is it blocked? ──┬─► no: kept, unchanged
//!                               (`input.carry`)                          └─► yes: dropped: counts and samples
//! ```
//!
//! The rules are those of datatrove's `URLFilter` ([`stillhouse_filters::UrlBlocklist`]). A sample of a dropped document has
//! its URL. Documents without a URL are kept.
//!
//! Cost: a look-up for each document, and a copy of the batches in which a document is dropped. Memory: the lists, twice, and
//! 16 bytes for each domain and URL, once for all splits of a process; one input batch.

mod section;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{BooleanArray, RecordBatch};
use arrow::compute::filter_record_batch;
use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_filters::{UrlBlocklist, UrlLists, count_entries};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use section::BlockUrlsSection;

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::{WholeDocuments, document_name, document_pieces};
use crate::dropped::DroppedDocuments;
use crate::operator::{CarriedValues, Emit, Operator, OperatorError, SplitContext, documents_schema};
use section::LISTS;

const NAME: &str = "block_urls";
/// Bytes of a dropped document that are kept for a sample.
const SAMPLE_BYTES: usize = 1024;

/// Configuration of `block_urls`.
#[derive(Clone)]
pub struct BlockUrlsConfig {
    /// Index of the column of URLs among the carried ones.
    column: usize,
    soft_banned_threshold: usize,
    /// The lists, in the order of [`LISTS`].
    lists: [Option<Arc<[u8]>>; 5],
    /// The sorted lists, once a split needs them.
    blocklist: Arc<Mutex<Option<Arc<UrlBlocklist>>>>,
}

impl fmt::Debug for BlockUrlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockUrlsConfig").field("column", &self.column).finish_non_exhaustive()
    }
}

impl PartialEq for BlockUrlsConfig {
    fn eq(&self, other: &Self) -> bool {
        let options = |config: &Self| (config.column, config.soft_banned_threshold);
        options(self) == options(other) && self.lists == other.lists
    }
}

impl BlockUrlsConfig {
    /// The lists, sorted for the first split of a process. The lock keeps other splits from sorting them as well.
    fn blocklist(&self) -> Result<Arc<UrlBlocklist>, OperatorError> {
        let mut blocklist = self.blocklist.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(blocklist) = blocklist.as_ref() {
            return Ok(Arc::clone(blocklist));
        }
        let text = |index: usize| {
            let bytes: Option<&[u8]> = self.lists[index].as_deref();
            let not_text = |e: std::str::Utf8Error| OperatorError::Config { operator: NAME, message: e.to_string() };
            bytes.map(std::str::from_utf8).transpose().map_err(not_text)
        };
        let lists = UrlLists {
            domains: text(0)?,
            urls: text(1)?,
            banned_words: text(2)?,
            soft_banned_words: text(3)?,
            banned_subwords: text(4)?,
        };
        let sorted = Arc::new(UrlBlocklist::new(lists, self.soft_banned_threshold));
        *blocklist = Some(Arc::clone(&sorted));
        Ok(sorted)
    }
}

impl OperatorConfig for BlockUrlsConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<BlockUrlsSection>());
    const SIDECAR_FILES: &'static [&'static str] =
        &[LISTS[0].stored_as, LISTS[1].stored_as, LISTS[2].stored_as, LISTS[3].stored_as, LISTS[4].stored_as];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<BlockUrlsSection>()? else { return Ok(None) };
        let carry = &context.spec.input.carry;
        let not_carried = || Problem::missing("block_urls.column", "is not in `input.carry`");
        let column = carry.iter().position(|name| *name == section.column).ok_or_else(not_carried)?;
        let mut lists = [const { None }; 5];
        for ((list, path), content) in LISTS.iter().zip(section.paths()).zip(&mut lists) {
            if path.is_none() {
                continue;
            }
            let problem = |message: String| Problem::missing(list.field, message);
            let bytes = context.spec.sections.file(list.field).ok_or_else(|| problem("was not read".into()))?;
            let text = std::str::from_utf8(bytes).map_err(|e| problem(format!("is not UTF-8: {e}")))?;
            if count_entries(text) == 0 {
                return Err(problem("has no entry; valid: at least one line that does not begin with #".into()));
            }
            *content = Some(Arc::clone(bytes));
        }
        Ok(Some(Self {
            column,
            soft_banned_threshold: section.soft_banned_threshold as usize,
            lists,
            blocklist: Arc::default(),
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        let there = LISTS.iter().zip(&self.lists);
        there.filter_map(|(list, content)| Some((list.stored_as, content.as_ref()?.to_vec()))).collect()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let missing = || OperatorError::Config {
            operator: NAME,
            message: "got no values of the documents: a bug in this program".into(),
        };
        Ok(Box::new(BlockUrls {
            blocklist: self.blocklist()?,
            urls: Arc::clone(context.carried.as_ref().ok_or_else(missing)?),
            column: self.column,
            last: None,
            blocked: WholeDocuments::new(NAME, SAMPLE_BYTES),
            dropped: DroppedDocuments::new(NAME, context),
        }))
    }
}

struct BlockUrls {
    blocklist: Arc<UrlBlocklist>,
    urls: Arc<dyn CarriedValues>,
    column: usize,
    /// The last document, and the reason and the URL if it is blocked.
    last: Option<(u64, Option<(String, String)>)>,
    /// Joins the beginnings of blocked documents.
    blocked: WholeDocuments,
    dropped: DroppedDocuments,
}

impl BlockUrls {
    /// Returns the reason why a document is blocked, and its URL.
    fn judge(&self, id: u64) -> Result<Option<(String, String)>, OperatorError> {
        let failed = |message: String| OperatorError::Data { operator: NAME, place: document_name(id), message };
        let values = self
            .urls
            .of_document(id)
            .map_err(|e| failed(format!("cannot read its URL from a temporary file (TMPDIR): {e}")))?
            .ok_or_else(|| failed("has no values of `input.carry`: a bug in this program".into()))?;
        let Some(url) = values.get(self.column).and_then(Option::as_ref) else { return Ok(None) };
        Ok(self.blocklist.judge(url).map(|blocked| (format!("{NAME}.{}", blocked.name()), url.clone())))
    }
}

impl Operator for BlockUrls {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut keep = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, NAME)? {
            let blocked = match self.last.take() {
                Some((id, blocked)) if id == piece.id => blocked,
                _ => self.judge(piece.id)?,
            };
            keep.push(blocked.is_none());
            if let Some((reason, url)) = &blocked
                && let Some(document) = self.blocked.add(piece)?
            {
                self.dropped.add(reason, &document, Some(url))?;
            }
            self.last = Some((piece.id, blocked));
        }
        if keep.iter().all(|keep| *keep) {
            return emit(batch.clone());
        }
        let kept = filter_record_batch(batch, &BooleanArray::from(keep)).map_err(OperatorError::arrow(NAME))?;
        if kept.num_rows() > 0 { emit(kept) } else { Ok(()) }
    }

    fn finish(&mut self, _: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.blocked.finish()?;
        self.dropped.finish()
    }
}

#[cfg(test)]
mod tests;
