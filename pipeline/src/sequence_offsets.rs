//! The position of each split's sequences in the whole data set, for settings that change over it (`orders.schedule`).
//!
//! ```text
//!   split           0            1            2       │ 3 (validation)    │ 4 (appended)
//!   planned         1,000        1,000        400     │ 50                │ 700
//!   first sequence  0 …          1,000 …      2,000 … │ 2,400 …           │ 2,400 …
//!   actual rows     1,080        960          390     │                   │
//! ```
//!
//! The content of a split must not depend on the actual rows of other splits. So a split starts after the planned
//! sequences of the splits before it; the plan divides the bytes that a split reads by the bytes per sequence. Rows
//! beyond the planned number get the position of the last planned one, so that ρ never decreases within a split. A
//! holdout continues after `train`. `derive` plans with the actual rows, which a finished data set knows.
//!
//! The plan and the manifest store the positions, so a resumed run, an append and `verify` use the same ones.

use std::collections::BTreeMap;

use stillhouse_operators::orders::{OrderSchedule, OrdersSection};
use stillhouse_schemas::manifest::{Manifest, SplitRecord};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_schemas::spec::{Boundary, JobSpec, PackMode};

use crate::source::TRAIN;

/// Bytes of English text per token, for estimates only.
pub(crate) const TEXT_BYTES_PER_TOKEN: f64 = 4.2;

/// Warn when the planned and the actual number of sequences differ by more than this factor.
const MAX_FACTOR: f64 = 1.25;

/// The orders' schedule, if they change over the data set.
pub(crate) fn schedule(spec: &JobSpec) -> Option<OrderSchedule> {
    orders(spec)?.schedule
}

fn orders(spec: &JobSpec) -> Option<OrdersSection> {
    // a section that does not parse is a problem that the operator reports
    spec.sections.get().ok().flatten()
}

/// The epoch of the orders.
fn epoch(spec: &JobSpec) -> u32 {
    orders(spec).map_or(0, |orders| orders.epoch)
}

/// Input per sequence, in the unit that weighs splits: bytes of text, numbers, or documents. `None` if it cannot be
/// known before reading.
fn sequence_weight(spec: &JobSpec) -> Option<f64> {
    let given = schedule(spec).and_then(|schedule| schedule.bytes_per_sequence);
    let ends = if spec.pack.boundary == Boundary::BosEos { 2 } else { 0 };
    let text = || f64::from(spec.pack.length.saturating_sub(ends).max(1)) * TEXT_BYTES_PER_TOKEN;
    match (given, spec.input.row_length(), spec.input.documents) {
        (Some(bytes), ..) => Some(bytes as f64),
        (None, Some(numbers), _) => Some(numbers as f64),
        (None, None, Some(_)) => Some(1.0),
        (None, None, None) => (spec.pack.mode != PackMode::Pad && spec.sequential().is_none()).then(text),
    }
}

/// Reports what is missing to plan the schedule.
pub(crate) fn check_schedule(spec: &JobSpec) -> Option<Problem> {
    schedule(spec).filter(|schedule| schedule.sequences_per_split.is_none())?;
    if sequence_weight(spec).is_some() {
        return None;
    }
    let why = "a sequence is a document here, and how long these are is not known before they are read; valid: the mean number of bytes of a record";
    Some(Problem::missing("orders.schedule.bytes_per_sequence", why))
}

/// Sets the positions of the splits after the first `earlier_count`, which have theirs, if the job has a schedule.
pub(crate) fn plan_ranges(spec: &JobSpec, splits: &mut [SplitRecord], earlier_count: usize, weights: &[f64]) {
    let (Some(_), Some(weight)) = (schedule(spec), sequence_weight(spec)) else { return };
    let sequences: Vec<u64> = weights.iter().map(|bytes| ((bytes / weight).round() as u64).max(1)).collect();
    assign_ranges(splits, earlier_count, &sequences, epoch(spec));
}

/// The splits of a finished data set, with positions from the actual rows of its shards.
pub(crate) fn splits_with_actual_ranges(spec: &JobSpec, manifest: &Manifest) -> Vec<SplitRecord> {
    let mut splits = manifest.splits.clone();
    if schedule(spec).is_some() {
        let rows: BTreeMap<_, _> = manifest.shards.iter().map(|shard| (shard.split, shard.rows)).collect();
        let rows: Vec<u64> = splits.iter().map(|split| rows.get(&split.split).copied().unwrap_or(0)).collect();
        assign_ranges(&mut splits, 0, &rows, epoch(spec));
    }
    splits
}

/// Sets the positions of the splits after the first `earlier_count`: `train` continues `train`; a holdout continues
/// `train` and itself.
fn assign_ranges(splits: &mut [SplitRecord], earlier_count: usize, sequences: &[u64], epoch: u32) {
    let (earlier, new) = splits.split_at_mut(earlier_count.min(splits.len()));
    let (mut train, mut holdouts) = (0, BTreeMap::<String, u64>::new());
    let mut take = |split: &SplitRecord, place: SequenceRange| match split.dataset_split.as_str() {
        TRAIN => train = train.max(place.end()),
        name => *holdouts.entry(name.to_owned()).or_default() += place.sequences,
    };
    earlier.iter().filter_map(|split| Some((split, split.place?))).for_each(|(split, place)| take(split, place));
    let is_first = earlier.is_empty();
    for (split, &sequences) in new.iter_mut().zip(sequences) {
        let first = match split.dataset_split.as_str() {
            TRAIN => train,
            name => train + holdouts.get(name).copied().unwrap_or(0),
        };
        let place = SequenceRange { first, sequences };
        match split.dataset_split.as_str() {
            TRAIN => train = place.end(),
            name => *holdouts.entry(name.to_owned()).or_default() += sequences,
        }
        split.place = Some(place);
    }
    // each earlier epoch went over all of train
    let before = if is_first { u64::from(epoch).saturating_mul(train) } else { 0 };
    for place in new.iter_mut().filter_map(|split| split.place.as_mut()) {
        place.first = place.first.saturating_add(before);
    }
}

/// Number of sequences of `train` that were planned.
fn planned_train_sequences(splits: &[SplitRecord]) -> Option<u64> {
    let train = splits.iter().filter(|split| split.dataset_split == TRAIN);
    train.map(|split| split.place.map(|place| place.sequences)).sum()
}

/// What `plan` reports of a schedule: the sequences of `train`, ρ of the first and the last one, and a warning.
pub(crate) fn outlook(spec: &JobSpec, splits: &[SplitRecord]) -> Option<(u64, [u32; 2], Option<String>)> {
    let schedule = schedule(spec)?;
    let sequences = planned_train_sequences(splits)?;
    let train = || splits.iter().filter(|split| split.dataset_split == TRAIN);
    let rho = |split: &SplitRecord, row: u64| {
        let id = u64::from(split.split.0) << 32 | row;
        schedule.position_of(id, split.place).map_or(0, |place| schedule.rho(place))
    };
    let (first, last) = (train().next()?, train().next_back()?);
    let ends = [rho(first, 0), rho(last, last.place.map_or(0, |place| place.sequences.saturating_sub(1)))];
    let average = sequences as f64 / train().count().max(1) as f64;
    let guessed = schedule.sequences_per_split.filter(|rows| is_far(*rows as f64, average));
    Some((sequences, ends, guessed.map(|rows| wrong_guess_message(rows, format!("about {average:.0} are planned")))))
}

fn is_far(one: f64, other: f64) -> bool {
    one > MAX_FACTOR * other || other > MAX_FACTOR * one
}

fn wrong_guess_message(rows: u64, are: String) -> String {
    format!(
        "orders.schedule.sequences_per_split: a split is counted as {rows} sequences, and {are}, so ρ is not that of the place where a sequence stands and \
         falls back or jumps where a split begins; leave it out: places are then planned by what each split reads"
    )
}

/// A warning if the planned number of sequences is far from the actual one.
pub(crate) fn schedule_warning(manifest: &Manifest) -> Option<String> {
    let schedule = schedule(&manifest.job)?;
    let train: Vec<_> = manifest.shards.iter().filter(|shard| shard.dataset_split == TRAIN).collect();
    let rows: u64 = train.iter().map(|shard| shard.rows).sum();
    if let Some(guess) = schedule.sequences_per_split {
        let average = rows as f64 / train.len().max(1) as f64;
        let most = train.iter().map(|shard| shard.rows).max().unwrap_or(0);
        // with one row more than guessed, the next split starts before the end of this one
        return (most > guess || is_far(guess as f64, average))
            .then(|| wrong_guess_message(guess, format!("they have {average:.0} on average, {most} at most")));
    }
    let planned = planned_train_sequences(&manifest.splits)?;
    let weight = sequence_weight(&manifest.job)?;
    if rows == 0 || !is_far(planned as f64, rows as f64) {
        return None;
    }
    let better = (weight * planned as f64 / rows as f64).round().max(1.0);
    Some(format!(
        "orders.schedule: planned for {planned} sequences of train, and there are {rows}; orders.schedule.bytes_per_sequence: {better:.0} (it was {weight:.0}) \
         would plan as many"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stillhouse_schemas::ids::SplitId;

    use super::*;
    use stillhouse_operators::registry::job_format;

    fn spec(schedule: &str, more: &str) -> JobSpec {
        let text = format!(
            "version: 1\nname: x\ninput: {{format: parquet, paths: [a]}}\ntokenizer: {{path: t}}\noutput: {{path: o}}\n\
             orders: {{kind: progressive, schedule: {{i_ar_sequences: 4608000, i_perm_sequences: 24576000, rho_max: 32{schedule}}}}}\n{more}"
        );
        job_format().read(&text).unwrap()
    }

    fn splits(names: &[&str]) -> Vec<SplitRecord> {
        let split = |(n, name): (u32, &&str)| SplitRecord {
            split: SplitId(n),
            dataset_split: (*name).into(),
            pieces: Vec::new(),
            keys: None,
            appended: 0,
            place: None,
        };
        (0..).zip(names).map(split).collect()
    }

    fn firsts(splits: &[SplitRecord]) -> Vec<u64> {
        splits.iter().map(|split| split.place.unwrap().first).collect()
    }

    const WRAP: &str = "pack: {length: 1024, boundary: none}\n";

    /// OpenWebText as the paper's job reads it: 39.8 GB of text in splits of about 240 MB.
    #[test]
    fn the_papers_job_shuffles_in_its_first_epoch() {
        let spec = spec("", WRAP);
        let mut all = splits(&["train"; 164]);
        plan_ranges(&spec, &mut all, 0, &[242_700_000.0; 164]);
        let (sequences, rho, wrong) = outlook(&spec, &all).unwrap();
        assert!((9_000_000..9_500_000).contains(&sequences), "{sequences}");
        assert_eq!((rho, wrong), ([0, 8], None));
        // with the job's earlier guess, no sequence of an epoch reaches the start of shuffling; the outlook warns about
        // it
        let guessed = self::spec(", sequences_per_split: 20000", WRAP);
        let (_, rho, wrong) = outlook(&guessed, &all).unwrap();
        assert_eq!(rho, [0, 0]);
        assert!(wrong.unwrap().contains("counted as 20000 sequences, and about 56431 are planned"));
    }

    #[test]
    fn places_count_on_over_train_and_holdouts_and_appends() {
        let spec = spec(", bytes_per_sequence: 10", WRAP);
        let mut all = splits(&["train", "train", "a", "a", "b"]);
        plan_ranges(&spec, &mut all, 0, &[100.0, 44.0, 20.0, 30.0, 1.0]);
        assert_eq!(firsts(&all), [0, 10, 14, 16, 14]);
        assert_eq!(all[4].place.unwrap().sequences, 1);
        let was = all.clone();
        all.extend(splits(&["train", "a", "train"]));
        plan_ranges(&spec, &mut all, 5, &[50.0, 10.0, 10.0]);
        assert_eq!(firsts(&all), [0, 10, 14, 16, 14, 14, 24, 19]);
        assert_eq!(all[..5], was);
        // ρ never decreases, however many rows a split has
        let place = all[0].place.unwrap();
        assert_eq!([0, 9, 10, 5000].map(|row| place.of_row(row)), [0, 9, 9, 9]);
    }

    #[test]
    fn a_later_epoch_stands_behind_those_before_it() {
        let mut spec = spec(", bytes_per_sequence: 10", WRAP);
        let orders: OrdersSection = spec.sections.get().unwrap().unwrap();
        spec.sections.set(&OrdersSection { epoch: 2, ..orders }).unwrap();
        let mut all = splits(&["train", "train", "a"]);
        plan_ranges(&spec, &mut all, 0, &[100.0, 40.0, 20.0]);
        assert_eq!(firsts(&all), [28, 38, 42]);
        all.extend(splits(&["train"]));
        plan_ranges(&spec, &mut all, 3, &[50.0]);
        assert_eq!(firsts(&all), [28, 38, 42, 42]);
    }

    #[test]
    fn what_a_sequence_takes_is_asked_where_nothing_tells_it() {
        let weight = |schedule, more| sequence_weight(&spec(schedule, more));
        assert_eq!(weight("", WRAP), Some(1024.0 * 4.2));
        assert_eq!(weight("", "pack: {length: 1024}\n"), Some(1022.0 * 4.2));
        assert_eq!(weight(", bytes_per_sequence: 140", "pack: {length: 128, mode: pad}\n"), Some(140.0));
        let padded = spec("", "pack: {length: 128, mode: pad}\n");
        assert!(check_schedule(&padded).unwrap().to_string().contains("orders.schedule.bytes_per_sequence"));
        assert_eq!(check_schedule(&spec("", WRAP)), None);
        assert_eq!(check_schedule(&spec(", sequences_per_split: 9", "pack: {length: 128, mode: pad}\n")), None);
    }

    #[test]
    fn what_was_planned_far_off_is_told() {
        let manifest = |schedule: &str, planned: [u64; 2], rows: [u64; 2]| {
            let job = spec(schedule, WRAP);
            let mut all = splits(&["train", "train"]);
            for (split, sequences) in all.iter_mut().zip(planned) {
                split.place = Some(SequenceRange { first: 0, sequences });
            }
            let shard = |(n, rows): (u32, u64)| {
                json!({"path": "p", "dataset_split": "train", "split": n, "rows": rows, "tokens": 1, "bytes": 1, "sha256": "", "column_bytes": {},
                       "statistics": {"documents": 1, "text_bytes": 1, "text_tokens": 1, "dropped_tokens": 0}})
            };
            let shards: Vec<_> = (0..).zip(rows).map(shard).collect();
            let value = json!({
                "format_version": 1, "job": job, "job_hash": "", "vocab_size": 9, "columns": [], "splits": all, "shards": shards, "totals": {},
                "tokenizer": {"source": "", "sha256": "", "vocab_size": 9, "special_tokens": {}},
                "statistics": {"documents": 1, "text_bytes": 1, "text_tokens": 1, "dropped_tokens": 0},
            });
            schedule_warning(&serde_json::from_value(value).unwrap())
        };
        assert_eq!(manifest("", [100, 100], [90, 110]), None);
        let far = manifest(", bytes_per_sequence: 1000", [100, 100], [45, 55]).unwrap();
        assert!(
            far.contains("planned for 200 sequences of train, and there are 100")
                && far.contains(": 2000 (it was 1000)"),
            "{far}"
        );
        assert!(
            manifest(", sequences_per_split: 20", [100, 100], [56, 57])
                .unwrap()
                .contains("they have 56 on average, 57 at most")
        );
        assert!(manifest(", sequences_per_split: 50", [100, 100], [50, 51]).is_some());
        assert_eq!(manifest(", sequences_per_split: 50", [100, 100], [50, 49]), None);
    }
}
