//! The documents that filters dropped: counts by reason from the manifest, samples from the footers of shards.

use std::collections::BTreeMap;

use serde::Serialize;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::manifest::{DROPPED_DOCUMENTS, DroppedDocument, ShardRecord};

use crate::dataset::Dataset;

/// The documents of a data set that filters dropped for one reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DroppedReason {
    /// Rule and reason, such as `gopher_quality.gopher_short_doc`.
    pub reason: String,
    /// Number of documents.
    pub documents: u64,
    /// The first of them, as far as shards have samples.
    pub samples: Vec<DroppedDocument>,
}

/// Returns the reasons for which documents were dropped, with up to `max_samples` samples each. `wanted` is a reason, or
/// a rule for all its reasons; `None` for all.
///
/// Opens only shards of splits in which documents were dropped for these reasons, until there are enough samples.
///
/// # Errors
/// If the data set has no filters or no documents with this reason, or if a shard cannot be read.
pub async fn dropped(dataset: &Dataset, wanted: Option<&str>, max_samples: usize) -> Result<Vec<DroppedReason>> {
    let manifest = dataset.manifest();
    let is_wanted = |reason: &str| {
        wanted.is_none_or(|wanted| reason == wanted || reason.split_once('.').is_some_and(|(rule, _)| rule == wanted))
    };
    let counts = &manifest.statistics.dropped;
    let mut reasons: BTreeMap<&str, DroppedReason> = counts
        .iter()
        .filter(|(reason, _)| is_wanted(reason))
        .map(|(reason, n)| {
            let found = DroppedReason { reason: reason.clone(), documents: *n, samples: Vec::new() };
            (reason.as_str(), found)
        })
        .collect();
    if reasons.is_empty() {
        return Err(no_such_reason(dataset, wanted, counts));
    }
    for shard in &manifest.shards {
        let lacks = |reason: &str| reasons.get(reason).is_some_and(|found| found.samples.len() < max_samples);
        if !shard.statistics.dropped.keys().any(|reason| lacks(reason)) {
            continue;
        }
        for (reason, samples) in samples_of(dataset, shard).await? {
            if let Some(found) = reasons.get_mut(reason.as_str()) {
                found.samples.extend(samples.into_iter().take(max_samples - found.samples.len()));
            }
        }
    }
    Ok(reasons.into_values().collect())
}

/// The samples in a shard's footer; none in a shard that `derive` made, whose documents have no text.
pub(super) async fn samples_of(
    dataset: &Dataset,
    shard: &ShardRecord,
) -> Result<BTreeMap<String, Vec<DroppedDocument>>> {
    let Some(entry) = dataset.footer_entry(shard, DROPPED_DOCUMENTS).await? else { return Ok(BTreeMap::new()) };
    serde_json::from_str(&entry).map_err(|e| {
        let context = format!("{}: entry {DROPPED_DOCUMENTS} of the footer", dataset.shown(&shard.path));
        PipelineError::caused(ErrorKind::DataSet, context, e)
    })
}

fn no_such_reason(dataset: &Dataset, wanted: Option<&str>, counts: &BTreeMap<String, u64>) -> PipelineError {
    let shown = dataset.shown("");
    let message = match (wanted, counts.is_empty()) {
        (_, true) => format!("{shown}: no document was dropped"),
        (wanted, false) => {
            let valid: Vec<&str> = counts.keys().map(String::as_str).collect();
            format!(
                "{shown}: no document was dropped for {:?}; valid: {}",
                wanted.unwrap_or_default(),
                valid.join(", ")
            )
        }
    };
    PipelineError::new(ErrorKind::Usage, message)
}
