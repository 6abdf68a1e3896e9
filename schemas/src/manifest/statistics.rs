//! Counts over the documents of a shard or a data set, and how those of several shards become one.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use super::is_zero;

/// Statistics of a shard or a data set. Every field can be merged over shards: sums by addition, maxima by the larger
/// value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of documents read.
    pub documents: u64,
    /// Records skipped, by reason. Not included in `documents`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, u64>,
    /// Documents that filters dropped, by rule and reason. Included in `documents`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped: BTreeMap<String, u64>,
    /// Documents of a mixture, by the name of their table.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, SourceStatistics>,
    /// Bytes of text that filters removed: dropped documents, and what rules cut from kept ones. Included in `text_bytes`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub filtered_bytes: u64,
    /// Documents without tokens. They are counted as read, but contribute at most a separator to a sequence.
    #[serde(default)]
    pub empty_documents: u64,
    /// Bytes of text after cleaning.
    pub text_bytes: u64,
    /// Tokens of text, before packing.
    pub text_tokens: u64,
    /// Tokens dropped with the remainder.
    pub dropped_tokens: u64,
    /// Tokens that the teacher predicted.
    #[serde(default)]
    pub predicted_tokens: u64,
    /// Σ ln p over the predicted tokens.
    #[serde(default)]
    pub logprob_sum: f64,
    /// Corrections, summed over tokens and draws.
    #[serde(default)]
    pub corrections: u64,
    /// Histogram of corrections per token and draw: counts for 0, 1, 2–3, 4–7, … corrections (powers of two).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corrections_histogram: Vec<u64>,
    /// Largest number of corrections of one token.
    #[serde(default)]
    pub corrections_max: u64,
    /// Largest total variation between stored and exact softmax(ξ), over all tokens and draws.
    #[serde(default)]
    pub total_variation_max: f64,
    /// Further statistics of operators, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub operators: BTreeMap<String, Statistic>,
}

/// Reason for a record that is no conversation, or that the chat template rejects. `input.max_skipped` bounds their number.
pub const BAD_CONVERSATION: &str = "chat.bad_conversation";

/// Name of the statistic of positions of conversations on which the model is trained, after packing.
pub const TRAINED_TOKENS: &str = "trained_tokens";

/// Key of a shard's footer with samples of the documents that filters dropped: an object of lists of [`DroppedDocument`] by
/// rule and reason. Shards of splits without such documents do not have it.
pub const DROPPED_DOCUMENTS: &str = "stillhouse.dropped_documents";

/// A sample of the documents that filters dropped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedDocument {
    /// Id of the document.
    pub document_id: u64,
    /// Bytes of its text after cleaning.
    pub bytes: u64,
    /// The beginning of its text.
    pub text: String,
    /// What is wrong with it, where the reason alone does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Documents of one table of a mixture. A document that the mixture has several times counts as many.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatistics {
    /// Number of documents read.
    pub documents: u64,
    /// Number of documents that no filter dropped.
    pub kept_documents: u64,
    /// Tokens of the kept documents, before packing.
    pub text_tokens: u64,
    /// Documents that filters dropped, by rule and reason. With `kept_documents`, they are all `documents`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped: BTreeMap<String, u64>,
    /// Records of the table that were skipped, by reason. Not included in `documents`: a table is read as a whole before
    /// documents are chosen from it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, u64>,
}

impl AddAssign<&Self> for SourceStatistics {
    fn add_assign(&mut self, more: &Self) {
        self.documents += more.documents;
        self.kept_documents += more.kept_documents;
        self.text_tokens += more.text_tokens;
        for (reason, n) in &more.dropped {
            *self.dropped.entry(reason.clone()).or_default() += n;
        }
        for (reason, n) in &more.skipped {
            *self.skipped.entry(reason.clone()).or_default() += n;
        }
    }
}

/// A statistic of an operator, with the rule for merging two values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// Merged by addition.
    Sum(u64),
    /// Merged by the maximum.
    Max(f64),
}

impl Statistic {
    /// Merges two values. For different kinds, the first value is kept.
    fn merge(self, other: Self) -> Self {
        match (self, other) {
            (Self::Sum(a), Self::Sum(b)) => Self::Sum(a + b),
            (Self::Max(a), Self::Max(b)) => Self::Max(a.max(b)),
            (one, _) => one,
        }
    }
}

impl Statistics {
    /// Adds another shard's statistics.
    pub fn add(&mut self, other: &Statistics) {
        self.documents += other.documents;
        for (reason, n) in &other.skipped {
            *self.skipped.entry(reason.clone()).or_default() += n;
        }
        for (reason, n) in &other.dropped {
            *self.dropped.entry(reason.clone()).or_default() += n;
        }
        for (table, counts) in &other.sources {
            *self.sources.entry(table.clone()).or_default() += counts;
        }
        self.filtered_bytes += other.filtered_bytes;
        self.empty_documents += other.empty_documents;
        self.text_bytes += other.text_bytes;
        self.text_tokens += other.text_tokens;
        self.dropped_tokens += other.dropped_tokens;
        self.predicted_tokens += other.predicted_tokens;
        self.logprob_sum += other.logprob_sum;
        self.corrections += other.corrections;
        if self.corrections_histogram.len() < other.corrections_histogram.len() {
            self.corrections_histogram.resize(other.corrections_histogram.len(), 0);
        }
        for (sum, n) in self.corrections_histogram.iter_mut().zip(&other.corrections_histogram) {
            *sum += n;
        }
        self.corrections_max = self.corrections_max.max(other.corrections_max);
        self.total_variation_max = self.total_variation_max.max(other.total_variation_max);
        for (name, statistic) in &other.operators {
            self.count(name, *statistic);
        }
    }

    /// Merges a value into a statistic of an operator.
    pub fn count(&mut self, name: &str, more: Statistic) {
        match self.operators.get_mut(name) {
            Some(sum) => *sum = sum.merge(more),
            None => drop(self.operators.insert(name.to_owned(), more)),
        }
    }

    /// Number of skipped records, over all reasons.
    pub fn records_skipped(&self) -> u64 {
        self.skipped.values().sum()
    }

    /// Number of documents that filters dropped, over all reasons.
    pub fn documents_dropped(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Records that could not be used, by reason: those that the reader skipped, and bad conversations.
    pub fn bad_records(&self) -> BTreeMap<String, u64> {
        let conversations = self.dropped.iter().filter(|(reason, _)| *reason == BAD_CONVERSATION);
        self.skipped.iter().chain(conversations).map(|(reason, n)| (reason.clone(), *n)).collect()
    }

    /// Number of documents that filters kept.
    pub fn documents_kept(&self) -> u64 {
        self.documents.saturating_sub(self.documents_dropped())
    }

    /// Number of input records: documents and skipped records.
    pub fn records(&self) -> u64 {
        self.documents + self.records_skipped()
    }

    /// Counts the corrections of one token.
    pub fn count_corrections(&mut self, corrections: u64) {
        let bin = (u64::BITS - corrections.leading_zeros()) as usize;
        if self.corrections_histogram.len() <= bin {
            self.corrections_histogram.resize(bin + 1, 0);
        }
        self.corrections_histogram[bin] += 1;
        self.corrections += corrections;
        self.corrections_max = self.corrections_max.max(corrections);
    }

    /// Perplexity of the text under the teacher, exp(−mean ln p); `None` without predicted tokens.
    pub fn perplexity(&self) -> Option<f64> {
        (self.predicted_tokens > 0).then(|| (-self.logprob_sum / self.predicted_tokens as f64).exp())
    }
}
