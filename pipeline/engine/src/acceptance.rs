//! Decides whether the output of a job is acceptable: it holds sequences, and skipped records stay within the limit.
//!
//! The verdict covers the whole input and does not depend on the order in which splits end. A run, a resumed run and a
//! later check of the data set therefore agree. A run stops early only when the verdict is certain: unread
//! records could no longer bring the share of skipped records below the limit.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, Range, ShardRecord, SplitRecord, Statistic, Statistics, TRAINED_TOKENS};
use stillhouse_schemas::spec::{Input, JobSpec, OnError, PackMode, Remainder};

/// Records to read before warning that the job will probably fail; a smaller sample proves little.
const MIN_RECORDS_TO_WARN: u64 = 1000;

/// Checks that the data set with this manifest is acceptable.
///
/// # Errors
/// When the data set holds no training sequence, or when more records were skipped than `input.max_skipped` allows. The
/// message lists what was read, what was skipped and why, what packing dropped, and what to check.
pub fn check_dataset(spec: &JobSpec, manifest: &Manifest) -> Result<()> {
    let rows = |name: &str| manifest.totals.get(name).map_or(0, |t| t.rows);
    let total_rows: u64 = manifest.totals.values().map(|t| t.rows).sum();
    let s = &manifest.statistics;
    if total_rows == 0 {
        return Err(empty_error(spec, s));
    }
    if manifest.totals.contains_key("train") && rows("train") == 0 {
        let message = format!(
            "the job made no sequence of train; all {total_rows} are held out: {}; check `input.holdout`, or {}",
            describe(s),
            advice(spec, s)
        );
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    if skips_too_many(&spec.input, s, 0) {
        return Err(too_many_skipped_error(&spec.input, s));
    }
    if spec.input.messages.is_some() && s.operators.get(TRAINED_TOKENS) == Some(&Statistic::Sum(0)) {
        let message = format!(
            "no token of the {total_rows} sequences trains the model: `loss_mask` is false everywhere; raise `pack.length` \
             ({}), which cuts off the answers, or check `chat.train`",
            spec.pack.length
        );
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    Ok(())
}

fn empty_error(spec: &JobSpec, s: &Statistics) -> PipelineError {
    let message = format!("this job produced no sequences: {}; {}", describe(s), advice(spec, s));
    PipelineError::new(ErrorKind::Input, message)
}

/// Describes the input of a data set in words: documents read, records skipped by reason, tokens dropped by packing.
pub fn describe(s: &Statistics) -> String {
    let mut text = format!("{} read", with_unit(s.documents, "document"));
    if s.empty_documents > 0 {
        text += &format!(" ({} of them without a token)", s.empty_documents);
    }
    text += &format!(", {} skipped", with_unit(s.records_skipped(), "record"));
    if !s.skipped.is_empty() {
        text += &format!(" ({})", reasons(&s.skipped));
    }
    if !s.dropped.is_empty() {
        text += &format!(", {} dropped ({})", s.documents_dropped(), reasons(&s.dropped));
    }
    text + &format!(", {} dropped by packing", with_unit(s.dropped_tokens, "token"))
}

fn reasons(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(reason, n)| format!("{n} {reason}")).collect::<Vec<_>>().join(", ")
}

fn total(counts: &BTreeMap<String, u64>) -> u64 {
    counts.values().sum()
}

fn with_unit(n: u64, unit: &str) -> String {
    format!("{n} {unit}{}", if n == 1 { "" } else { "s" })
}

/// Suggests why the job made no sequences, based on the statistics.
fn advice(spec: &JobSpec, s: &Statistics) -> String {
    let input = &spec.input;
    if s.records() == 0 {
        return "the input holds no records; check `input.paths`, `input.format` and `input.compression`".into();
    }
    if s.documents == 0 {
        return format!(
            "check `input.text` ({:?}), `input.format`, `input.compression` and that the files are UTF-8; `input.on_error: fail` names the first bad record",
            input.text
        );
    }
    if s.documents_kept() == 0 {
        return match input.messages {
            Some(_) => "every conversation was dropped; check `input.messages` and `chat.train`; `input.on_error: fail` names the first bad one",
            None => "the filters dropped every document; check `filter.rules`",
        }
        .into();
    }
    if s.text_tokens == 0 {
        return format!("the documents are empty; check `input.text` ({:?}) and `clean`", input.text);
    }
    match (spec.pack.mode, spec.pack.remainder) {
        (PackMode::Wrap, Remainder::Drop) => format!(
            "no split fills a sequence of {} tokens, and `pack.remainder: drop` drops shorter ones; lower `pack.length`, raise `input.split_megabytes`, or set `pack.remainder` to pad or keep",
            spec.pack.length
        ),
        _ => "check `input.text` and `pack`".into(),
    }
}

/// Whether more records are skipped than allowed, even if `more_good` good ones follow.
fn skips_too_many(input: &Input, s: &Statistics, more_good: u64) -> bool {
    let records = s.records().saturating_add(more_good);
    input.on_error == OnError::Skip && total(&s.bad_records()) as f64 > input.max_skipped * records as f64
}

fn too_many_skipped_error(input: &Input, s: &Statistics) -> PipelineError {
    let bad = s.bad_records();
    let share = 100.0 * total(&bad) as f64 / s.records().max(1) as f64;
    let message = format!(
        "{} of {} were skipped ({}: {}), and `input.max_skipped: {}` allows {}; correct the input, or allow more and run again: prepared splits are kept",
        total(&bad),
        with_unit(s.records(), "record"),
        percent(share),
        reasons(&bad),
        input.max_skipped,
        percent(100.0 * input.max_skipped),
    );
    PipelineError::new(ErrorKind::Input, message)
}

fn percent(value: f64) -> String {
    match value {
        v if v != 0.0 && v < 0.1 => format!("{v:.4} %"),
        v => format!("{v:.1} %"),
    }
}

/// Running totals of a run, independent of the order in which its splits end.
#[derive(Debug)]
pub struct Tally<'a> {
    spec: &'a JobSpec,
    sums: Mutex<Sums>,
}

#[derive(Debug)]
struct Sums {
    statistics: Statistics,
    /// Upper bound of the records in each split that is not committed.
    remaining: BTreeMap<SplitId, u64>,
    rows: u64,
    warned: bool,
}

impl<'a> Tally<'a> {
    /// Totals the splits that are already committed.
    pub fn new(spec: &'a JobSpec, splits: &[SplitRecord], done: &BTreeMap<SplitId, ShardRecord>) -> Self {
        let mut statistics = Statistics::default();
        done.values().for_each(|shard| statistics.add(&shard.statistics));
        let remaining =
            splits.iter().filter(|s| !done.contains_key(&s.split)).map(|s| (s.split, max_records(s))).collect();
        let rows = done.values().map(|shard| shard.rows).sum();
        Self { spec, sums: Mutex::new(Sums { statistics, remaining, rows, warned: false }) }
    }

    /// Adds a committed split. Returns a warning, at most once, when the job will fail unless the rest is better.
    ///
    /// # Errors
    /// When the job is certain to fail: too many records are skipped.
    pub fn add_committed(&self, shard: &ShardRecord) -> Result<Option<String>> {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if sums.remaining.remove(&shard.split).is_none() {
            // A shard that `repair` rewrote is already counted.
            return Ok(None);
        }
        sums.statistics.add(&shard.statistics);
        sums.rows += shard.rows;
        let (input, s) = (&self.spec.input, &sums.statistics);
        if sums.remaining.is_empty() {
            // [`check_dataset`] checks the complete data set.
            return Ok(None);
        }
        if sums.is_certain_to_fail(input) {
            return Err(match s.documents {
                0 => empty_error(self.spec, s),
                _ => too_many_skipped_error(input, s),
            });
        }
        if sums.warned || s.records() < MIN_RECORDS_TO_WARN || !skips_too_many(input, s, 0) {
            return Ok(None);
        }
        sums.warned = true;
        let s = &sums.statistics;
        let bad = s.bad_records();
        Ok(Some(format!(
            "{} of {} so far were skipped ({}), more than `input.max_skipped: {}` allows; if the rest is no better, the job fails at its end",
            total(&bad),
            with_unit(s.records(), "record"),
            reasons(&bad),
            input.max_skipped
        )))
    }

    /// Whether the job is certain to fail and has read nothing, so that its output is not worth keeping.
    pub fn is_fruitless(&self) -> bool {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.rows == 0 && sums.statistics.documents == 0 && sums.is_certain_to_fail(&self.spec.input)
    }
}

impl Sums {
    /// Whether too many records are skipped, whatever the remaining splits hold.
    fn is_certain_to_fail(&self, input: &Input) -> bool {
        let max_remaining = self.remaining.values().fold(0_u64, |sum, n| sum.saturating_add(*n));
        skips_too_many(input, &self.statistics, max_remaining)
    }
}

/// Upper bound of the records in a split: one per row, or one per byte, since each record starts at its own byte.
fn max_records(split: &SplitRecord) -> u64 {
    let max_in_range = |range: &Range| match *range {
        Range::Bytes { start, end, .. } => end.saturating_sub(start).max(1),
        Range::Rows { start, end } => end.saturating_sub(start),
    };
    split.pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(max_in_range(&piece.range)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stillhouse_schemas::manifest::Piece;

    use super::*;

    fn spec(max_skipped: f64) -> JobSpec {
        stillhouse_operators::registry::job_format().read(&format!(
            "{{version: 1, name: a, input: {{format: jsonl, paths: [a], on_error: skip, max_skipped: {max_skipped}}}, tokenizer: {{path: t}}, pack: {{length: 8}}, output: {{path: o}}}}"
        ))
        .unwrap()
    }

    fn statistics(documents: u64, skipped: u64) -> Statistics {
        let skipped = (skipped > 0).then(|| ("broken JSON".to_owned(), skipped)).into_iter().collect();
        Statistics { documents, skipped, text_tokens: documents * 9, ..Statistics::default() }
    }

    fn shard(split: u32, statistics: Statistics) -> ShardRecord {
        ShardRecord {
            path: String::new(),
            dataset_split: "train".into(),
            split: SplitId(split),
            rows: statistics.documents,
            tokens: 0,
            bytes: 0,
            sha256: String::new(),
            footer: None,
            column_bytes: BTreeMap::new(),
            input_sha256: Vec::new(),
            statistics,
        }
    }

    fn rows(split: u32, records: u64) -> SplitRecord {
        let range = Range::Rows { start: 0, end: records };
        SplitRecord {
            split: SplitId(split),
            dataset_split: "train".into(),
            keys: None,
            appended: 0,
            place: None,
            pieces: vec![Piece { file: "f".into(), range }],
        }
    }

    #[test]
    fn a_share_is_of_all_records_and_its_bound_is_allowed() {
        let input = spec(0.01).input;
        assert!(!skips_too_many(&input, &statistics(99, 1), 0));
        assert!(skips_too_many(&input, &statistics(98, 2), 0));
        assert!(!skips_too_many(&input, &statistics(98, 2), 100));
        assert!(!skips_too_many(&spec(1.0).input, &statistics(0, 2), 0));
        assert!(skips_too_many(&spec(0.0).input, &statistics(1_000_000, 1), 0));
        assert_eq!(
            too_many_skipped_error(&input, &statistics(98, 2)).to_string(),
            "2 of 100 records were skipped (2.0 %: 2 broken JSON), and `input.max_skipped: 0.01` allows 1.0 %; correct the input, or allow more and run again: prepared splits are kept",
        );
    }

    #[test]
    fn a_warning_comes_once_and_not_on_a_handful_of_records() {
        let spec = spec(0.01);
        let splits: Vec<SplitRecord> = (0..4).map(|n| rows(n, 1_000_000)).collect();
        let tally = Tally::new(&spec, &splits, &BTreeMap::new());
        assert_eq!(tally.add_committed(&shard(0, statistics(9, 1))).unwrap(), None);
        let warning = tally.add_committed(&shard(1, statistics(900, 100))).unwrap().unwrap();
        assert!(warning.starts_with("101 of 1010 records so far were skipped (101 broken JSON)"), "{warning}");
        assert_eq!(tally.add_committed(&shard(2, statistics(900, 100))).unwrap(), None);
    }

    proptest! {
        /// For every order of the splits, a run stops early only if the verdict at its end would be the same.
        #[test]
        fn what_stops_a_run_early_would_fail_it_at_its_end(
            splits in prop::collection::vec((0u64..200, 0u64..8, 0u64..50), 1..12),
            order in any::<u64>(),
            share in 0.0f64..0.2,
            resumed in 0usize..12,
        ) {
            let spec = spec(share);
            let records: Vec<SplitRecord> =
                (0..).zip(&splits).map(|(n, (good, bad, spare))| rows(n, good + bad + spare)).collect();
            let mut shards: Vec<ShardRecord> =
                (0..).zip(&splits).map(|(n, &(good, bad, _))| shard(n, statistics(good, bad))).collect();
            shards.sort_by_key(|s| (u64::from(s.split.0) + 1).wrapping_mul(order | 1));
            let done: BTreeMap<SplitId, ShardRecord> =
                shards.iter().take(resumed).map(|s| (s.split, s.clone())).collect();
            let tally = Tally::new(&spec, &records, &done);
            let early = shards.iter().skip(resumed).any(|s| tally.add_committed(s).is_err());
            let mut all = Statistics::default();
            shards.iter().for_each(|s| all.add(&s.statistics));
            let verdict = skips_too_many(&spec.input, &all, 0);
            prop_assert!(!early || verdict);
            // If the last split is known to be full, the verdict is certain one split before the end.
            let last = shards.last().map_or(0, |s| s.statistics.records());
            let exact = splits.iter().all(|s| s.2 == 0) && resumed + 1 < shards.len();
            let mut before = all.clone();
            before.documents -= shards.last().map_or(0, |s| s.statistics.documents);
            *before.skipped.entry("broken JSON".into()).or_default() -= shards.last().map_or(0, |s| s.statistics.records_skipped());
            prop_assert!(!exact || !skips_too_many(&spec.input, &before, last) || early);
        }
    }
}
