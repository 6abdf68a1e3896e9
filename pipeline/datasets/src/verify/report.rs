//! The faithfulness report: compares the error of storing with the error of running the teacher in another way.
//!
//! ```text
//!   stored      ξ̂, ln p from the shards                   ─┐
//!   batch       the teacher, each sequence in its own pass  ├─ against the live teacher, computed as the job did: ½ Σ |softmax(ξ) − softmax(ξ′)|,
//!   arithmetic  the teacher in another dtype               ─┘                                                    |ln p_x − ln p′_x|, KL(p ‖ p′)
//! ```
//!
//! The first row is our storage error; the others occur in every training that runs its teacher live. All noise uses
//! the same random words. On another kind of machine than the job's, the live teacher differs from the stored one. Then
//! the first row contains both errors, and the report says so.
//!
//! Memory: live logits of sampled tokens, at most [`MAX_LOGIT_BYTES`], spread over the sample; two numbers for every
//! stored token of the sample.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use arrow::array::RecordBatch;
use rayon::prelude::*;
use serde::Serialize;
use stillhouse_noise::{DrawKey, NoiseError, NoiseStream, TeacherDifference, measure_difference};
use stillhouse_operators::extract::pass::{PredictedPosition, Sequence, Slice, TeacherPass};
use stillhouse_operators::extract::sequences;
use stillhouse_operators::operator::{Counters, OperatorError};
use stillhouse_schemas::manifest::{Manifest, TeacherRecord};
use stillhouse_schemas::spec::Extract;
use stillhouse_teacher::{Teacher, TeacherInfo};

/// Maximum size of the live logits that are kept for comparison, in bytes.
const MAX_LOGIT_BYTES: usize = 128 << 20;
/// Bins of a histogram: four per power of ten, from 10⁻⁹ to 10.
const BINS: usize = 40;
const MIN_POWER: f64 = -9.0;
const BINS_PER_DECADE: f64 = 4.0;

/// The error of storing beside the error of computing in another way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Name of the data set.
    pub dataset: String,
    /// Source of the teacher.
    pub teacher: String,
    /// Arithmetic of the live teacher.
    pub arithmetic: String,
    /// Arithmetic with which the data set was computed.
    pub stored_arithmetic: String,
    /// Whether the two are the same. If not, the stored values differ from the live teacher by both errors: storing and
    /// computing.
    pub computed_alike: bool,
    /// Total variation that the job promises.
    pub tolerance: Option<f64>,
    /// Comparisons with the live teacher.
    pub comparisons: Vec<Comparison>,
}

/// One comparison with the live teacher.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// `stored`, `batch` or `arithmetic`.
    pub kind: &'static str,
    /// Description for the reader.
    pub what: String,
    /// ½ Σ |softmax(ξ) − softmax(ξ′)| of each token and draw; `None` if there is no noise.
    pub total_variation: Option<Distribution>,
    /// |ln p_x − ln p′_x| of each token, in nat.
    pub logprob_change_nats: Distribution,
    /// KL(p ‖ p′) of each token, in nat; `None` for stored values, which have no full p.
    pub kl_nats: Option<Distribution>,
}

/// Distribution of non-negative numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Number of values that are exactly 0.
    pub zeros: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
    /// Non-empty bins: log10 of the lower end, and the count. The lowest bin also counts everything below it, except
    /// zeros.
    pub histogram: Vec<(f64, u64)>,
}

impl Distribution {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values.get(((values.len().max(1) - 1) as f64 * share).round() as usize).copied();
        let mut bins = [0u64; BINS];
        for value in values.iter().filter(|value| **value > 0.0) {
            let bin = ((value.log10() - MIN_POWER) * BINS_PER_DECADE).floor();
            bins[(bin.max(0.0) as usize).min(BINS - 1)] += 1;
        }
        let lower = |bin: usize| MIN_POWER + bin as f64 / BINS_PER_DECADE;
        Self {
            count: values.len() as u64,
            zeros: values.iter().filter(|value| **value == 0.0).count() as u64,
            mean: values.iter().sum::<f64>() / values.len().max(1) as f64,
            median: at(0.5).unwrap_or(0.0),
            p99: at(0.99).unwrap_or(0.0),
            max: values.last().copied().unwrap_or(0.0),
            histogram: bins.iter().enumerate().filter(|(_, n)| **n > 0).map(|(bin, n)| (lower(bin), *n)).collect(),
        }
    }
}

/// Differences of the stored values, collected during the check.
#[derive(Default)]
pub(super) struct StoredDifferences {
    pub logprob_changes: Vec<f64>,
    pub variations: Vec<f64>,
}

/// Runs the teacher in other ways over the batches of the sample.
pub(super) struct LiveComparison {
    live: Arc<dyn Teacher>,
    other: Arc<dyn Teacher>,
    /// Number of tokens to compare in each batch.
    tokens_of_a_batch: usize,
    batch: Vec<TeacherDifference>,
    arithmetic: Vec<TeacherDifference>,
}

/// A sampled token with its live logits.
struct LiveLogits<'a> {
    sequence: &'a Sequence,
    position: usize,
    logits: Vec<f32>,
}

impl LiveComparison {
    /// `live` computes as the job did, `other` in another dtype. `batches` is the size of the sample.
    pub(super) fn new(live: &Arc<dyn Teacher>, other: Arc<dyn Teacher>, batches: usize) -> Self {
        let row = live.info().vocab_size * size_of::<f32>();
        let tokens_of_a_batch = (MAX_LOGIT_BYTES / row.max(1) / batches.max(1)).max(1);
        Self { live: Arc::clone(live), other, tokens_of_a_batch, batch: Vec::new(), arithmetic: Vec::new() }
    }

    /// Compares a batch of the sample.
    pub(super) fn add(
        &mut self,
        batch: &RecordBatch,
        extract: &Extract,
        bos: u32,
        seed: u64,
    ) -> Result<(), OperatorError> {
        let sequences = sequences(batch).map_err(OperatorError::arrow("verify"))?;
        let counters = Counters::default();
        let pass = |teacher| TeacherPass {
            teacher,
            bos,
            context: extract.context,
            batch_tokens: extract.teacher.batch_tokens as usize,
            hidden_layers: &[],
            meter: &counters,
        };
        let (live, other) = (Arc::clone(&self.live), Arc::clone(&self.other));
        let kept = self.live_logits(&pass(live.as_ref()), &sequences)?;
        for (row, sequence) in sequences.iter().enumerate() {
            let alone = std::slice::from_ref(sequence);
            let found = differences(&pass(live.as_ref()), alone, row, &kept, seed)?;
            self.batch.extend(found);
        }
        let found = differences(&pass(other.as_ref()), &sequences, 0, &kept, seed)?;
        self.arithmetic.extend(found);
        Ok(())
    }

    /// The live logits of tokens spread evenly over the batch.
    fn live_logits<'a>(
        &self,
        pass: &TeacherPass<'_>,
        sequences: &'a [Sequence],
    ) -> Result<HashMap<(usize, usize), LiveLogits<'a>>, OperatorError> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.valid).sum();
        let every = tokens.div_ceil(self.tokens_of_a_batch).max(1);
        let vocab = pass.teacher.info().vocab_size;
        let (mut kept, mut seen) = (HashMap::new(), 0);
        pass.run(sequences, &mut pass.teacher.buffer()?, &mut |Slice { positions, logits, .. }| {
            let on_host = logits.on_host()?;
            for (p, logits) in positions.iter().zip(on_host.chunks_exact(vocab)) {
                if seen % every == 0 {
                    let (sequence, position) = (&sequences[p.row], p.position);
                    kept.insert((p.row, position), LiveLogits { sequence, position, logits: logits.to_vec() });
                }
                seen += 1;
            }
            drop(on_host);
            Ok(logits)
        })?;
        Ok(kept)
    }

    /// Builds the report. `stored` holds the differences of the stored values.
    pub(super) fn report(self, manifest: &Manifest, stored: StoredDifferences) -> Report {
        let noise = manifest.job.extract.as_ref().and_then(|extract| extract.noise.as_ref());
        let of = |kind, what: String, found: Vec<TeacherDifference>| Comparison {
            kind,
            what,
            total_variation: noise.map(|_| Distribution::of(found.iter().map(|c| c.total_variation).collect())),
            logprob_change_nats: Distribution::of(found.iter().map(|c| c.logprob_change).collect()),
            kl_nats: Some(Distribution::of(found.iter().map(|c| c.divergence).collect())),
        };
        let (live, other) = (self.live.info(), self.other.info());
        let record = manifest.teacher.as_ref();
        let computed_alike = record.is_none_or(|record| alike(record, live));
        let arithmetic = format!("{} on {}", live.arithmetic, live.device);
        let was = record.map(|record| format!("{} on {}", record.arithmetic, record.device));
        let storage = Comparison {
            kind: "stored",
            what: if computed_alike { "what is stored" } else { "stored, and this machine's arithmetic" }.into(),
            total_variation: (!stored.variations.is_empty()).then(|| Distribution::of(stored.variations)),
            logprob_change_nats: Distribution::of(stored.logprob_changes),
            kl_nats: None,
        };
        Report {
            dataset: manifest.job.name.clone(),
            teacher: record.map(|teacher| teacher.source.clone()).unwrap_or_default(),
            stored_arithmetic: was.unwrap_or_else(|| arithmetic.clone()),
            arithmetic,
            computed_alike,
            tolerance: noise.map(|noise| noise.tolerance),
            comparisons: vec![
                storage,
                of("batch", "the teacher live, each sequence in a pass of its own".into(), self.batch),
                of("arithmetic", format!("the teacher live, in {}", other.arithmetic), self.arithmetic),
            ],
        }
    }
}

/// Whether a live teacher computes as the data set's teacher did.
pub(super) fn alike(record: &TeacherRecord, live: &TeacherInfo) -> bool {
    live.arithmetic == record.arithmetic && live.device == record.device
}

/// Compares a pass with the kept live logits. `row` is the index in the batch of the pass's first row.
fn differences(
    pass: &TeacherPass<'_>,
    sequences: &[Sequence],
    row: usize,
    kept: &HashMap<(usize, usize), LiveLogits<'_>>,
    seed: u64,
) -> Result<Vec<TeacherDifference>, OperatorError> {
    let vocab = pass.teacher.info().vocab_size;
    let mut found = Vec::new();
    pass.run(sequences, &mut pass.teacher.buffer()?, &mut |Slice { positions, logits, .. }| {
        let on_host = logits.on_host()?;
        let pairs: Vec<(&PredictedPosition, &[f32])> = positions.iter().zip(on_host.chunks_exact(vocab)).collect();
        let compared: Result<Vec<Option<TeacherDifference>>, NoiseError> = pairs
            .par_iter()
            .map(|(p, logits)| {
                kept.get(&(row + p.row, p.position)).map(|live| live.difference_from(logits, seed)).transpose()
            })
            .collect();
        let compared = compared.map_err(|e| OperatorError::Data {
            operator: "verify",
            place: "the report".into(),
            message: e.to_string(),
        })?;
        found.extend(compared.into_iter().flatten());
        drop(on_host);
        Ok(logits)
    })?;
    Ok(found)
}

impl LiveLogits<'_> {
    fn difference_from(&self, other: &[f32], seed: u64) -> Result<TeacherDifference, NoiseError> {
        let stream = NoiseStream::new(DrawKey::new(seed, 0), self.sequence.id, self.position as u32);
        measure_difference(&self.logits, other, self.sequence.tokens[self.position], &stream)
    }
}

impl Report {
    /// Renders the report as a self-contained HTML page.
    pub fn html(&self) -> String {
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{0}: faithfulness</title>\n<style>{STYLE}</style>\n<h1>{0}: faithfulness</h1>\n",
            escaped(&self.dataset)
        );
        let _ = writeln!(
            page,
            "<p>Beside the live teacher {}, computed in {}.{}{}</p>",
            escaped(&self.teacher),
            escaped(&self.arithmetic),
            match self.computed_alike {
                true => String::new(),
                false => format!(
                    " The data set was computed in {}: what is stored differs from this teacher by storing and by computing, and the two cannot be told \
                     apart here. Where it was made they can.",
                    escaped(&self.stored_arithmetic)
                ),
            },
            self.tolerance
                .map(|t| format!(" The job promised a total variation of at most {t:e} for every token."))
                .unwrap_or_default()
        );
        page += "<table><tr><th><th colspan=4>½ Σ |softmax(ξ) − softmax(ξ′)|<th colspan=4>|ln p<sub>x</sub> − ln p′<sub>x</sub>|, nat\
                 <th colspan=2>KL, nat\n<tr><th>";
        page += &"<th>mean<th>median<th>99 %<th>largest".repeat(2);
        page += "<th>mean<th>largest\n";
        for comparison in &self.comparisons {
            let _ = write!(page, "<tr><td>{}", escaped(&comparison.what));
            for spread in [comparison.total_variation.as_ref(), Some(&comparison.logprob_change_nats)] {
                match spread {
                    Some(d) => {
                        [d.mean, d.median, d.p99, d.max].iter().for_each(|v| page += &format!("<td>{}", number(*v)))
                    }
                    None => page += "<td colspan=4>–",
                }
            }
            match &comparison.kl_nats {
                Some(d) => page += &format!("<td>{}<td>{}\n", number(d.mean), number(d.max)),
                None => page += "<td colspan=2>–\n",
            }
        }
        page += "</table>\n";
        for (title, of) in [
            (
                "½ Σ |softmax(ξ) − softmax(ξ′)|",
                (|c| c.total_variation.as_ref()) as fn(&Comparison) -> Option<&Distribution>,
            ),
            ("|ln p − ln p′| of the observed token, nat", |c| Some(&c.logprob_change_nats)),
            ("KL(p ‖ p′), nat", |c| c.kl_nats.as_ref()),
        ] {
            let drawn: Vec<(&Comparison, &Distribution)> =
                self.comparisons.iter().filter_map(|c| of(c).map(|d| (c, d))).collect();
            if !drawn.is_empty() {
                let _ = write!(
                    page,
                    "<h2>{title}</h2>\n{}",
                    plot(&drawn, self.tolerance.filter(|_| title.starts_with('½')))
                );
            }
        }
        page += "<p>Each bar is the share of the tokens in a quarter of a power of ten; exact zeros stand at the left. All noises come from the same random words.</p>\n</html>\n";
        page
    }
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}\
    table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}\
    td:first-child{text-align:left;white-space:normal}svg{width:100%;height:auto}text{font-size:11px;fill:#444}\
    @media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}text{fill:#bbb}td,th{border-color:#444}}";
const COLOURS: [&str; 3] = ["#2a6fbb", "#7a7a7a", "#c2571a"];

/// Draws the histograms one above the other over a common axis of powers of ten.
fn plot(drawn: &[(&Comparison, &Distribution)], tolerance: Option<f64>) -> String {
    let (left, width, height, gap) = (60.0, 840.0, 90.0, 34.0);
    let x = |log10: f64| left + (log10 - MIN_POWER) * BINS_PER_DECADE * width / BINS as f64;
    let total = drawn.len() as f64 * (height + gap) + 20.0;
    let mut svg = format!("<svg viewBox=\"0 0 920 {total}\" role=\"img\">\n");
    for (n, (comparison, distribution)) in drawn.iter().enumerate() {
        let floor = n as f64 * (height + gap) + gap + height - 14.0;
        let most =
            distribution.histogram.iter().map(|bin| bin.1).chain([distribution.zeros, 1]).max().unwrap_or(1) as f64;
        let mut bar = |from: f64, count: u64| {
            let tall = count as f64 / most * (height - 20.0);
            let share = 100.0 * count as f64 / distribution.count.max(1) as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{}\"><title>{share:.2} %</title></rect>",
                floor - tall,
                width / BINS as f64 - 2.0,
                COLOURS[n % COLOURS.len()]
            );
        };
        bar(left - 30.0, distribution.zeros);
        distribution.histogram.iter().for_each(|(log10, count)| bar(x(*log10), *count));
        let _ =
            writeln!(svg, "<text x=\"{left}\" y=\"{}\">{}</text>", floor - height + 16.0, escaped(&comparison.what));
        let _ =
            writeln!(svg, "<line x1=\"20\" x2=\"{}\" y1=\"{floor}\" y2=\"{floor}\" stroke=\"#999\"/>", left + width);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">0</text>", left - 24.0, floor + 12.0);
        for power in (MIN_POWER as i32)..=1 {
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">1e{power}</text>", x(f64::from(power)) - 8.0, floor + 12.0);
        }
        if let Some(bound) = tolerance {
            let at = x(bound.log10());
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{floor}\" stroke=\"#b00\" stroke-dasharray=\"4 3\"/>",
                floor - height + 20.0
            );
        }
    }
    svg + "</svg>\n"
}

fn number(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.2e}") }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_that_of_its_numbers() {
        let found = Distribution::of(vec![1e-3, 0.0, 2e-3, 1e-12, 5e-1]);
        assert_eq!((found.count, found.zeros, found.median, found.max), (5, 1, 1e-3, 0.5));
        assert!((found.mean - 0.1006).abs() < 1e-6);
        // the lowest bin counts the value below it
        assert_eq!(found.histogram, [(-9.0, 1), (-3.0, 1), (-2.75, 1), (-0.5, 1)]);
        assert_eq!(Distribution::of(Vec::new()).count, 0);
    }

    #[test]
    fn what_a_data_set_is_called_cannot_act_on_the_page() {
        let distribution = Distribution::of(vec![1e-4, 1e-5]);
        let report = Report {
            dataset: "<script>alert(1)</script>".into(),
            teacher: "\"><img src=x>".into(),
            arithmetic: "f32".into(),
            stored_arithmetic: "f32".into(),
            computed_alike: true,
            tolerance: Some(1e-3),
            comparisons: vec![Comparison {
                kind: "stored",
                what: "a & b".into(),
                total_variation: Some(distribution.clone()),
                logprob_change_nats: distribution,
                kl_nats: None,
            }],
        };
        let page = report.html();
        assert!(!page.contains("<script") && !page.contains("<img") && page.contains("a &amp; b"));
        assert!(page.contains("stroke-dasharray"), "the promise is drawn");
        assert!(!page.contains("The data set was computed in"));
        let elsewhere = Report { stored_arithmetic: "bf16 <AMX>".into(), computed_alike: false, ..report };
        assert!(elsewhere.html().contains("The data set was computed in bf16 &lt;AMX&gt;: what is stored differs"));
    }
}
