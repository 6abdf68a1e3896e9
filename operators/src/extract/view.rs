//! What `inspect` and the web page show of a row's signals: means as facts, a strip per column, and a line per token.
//!
//! Only predicted positions count. Given positions and padding are certain and say nothing about the teacher.

use arrow::array::{Int32Array, RecordBatch};
use arrow::error::ArrowError;
use stillhouse_noise::RowSignals;
use stillhouse_schemas::columns;

use super::hidden::StoredStates;
use super::signals::{SignalsConfig, StoredSignals};
use super::{ExtractConfig, NAME};
use crate::config::{Chart, OperatorView};
use crate::invariants::float_column;
use crate::rows::ListRows;
use crate::sparkline::{strip_chart, value_range};

/// Builds the view of a batch's only row; `predicted` marks the predicted positions. Returns `None` if the row has no
/// signals.
///
/// # Errors
/// Fails if a column is missing, has another type than the format defines, or does not match the others.
pub(crate) fn view(
    config: &ExtractConfig,
    row: &RecordBatch,
    predicted: &[bool],
) -> Result<Option<OperatorView>, ArrowError> {
    let mut builder =
        ViewBuilder { predicted, facts: Vec::new(), pictures: Vec::new(), tokens: vec![Vec::new(); predicted.len()] };
    builder.topk(config, row)?;
    builder.signals(config, row)?;
    builder.states(config, row)?;
    Ok((!builder.facts.is_empty()).then(|| builder.build()))
}

struct ViewBuilder<'a> {
    predicted: &'a [bool],
    facts: Vec<(String, String)>,
    pictures: Vec<Chart>,
    tokens: Vec<Vec<String>>,
}

impl ViewBuilder<'_> {
    fn build(self) -> OperatorView {
        let count = self.predicted.iter().filter(|predicted| **predicted).count();
        let of = ("predicted by the teacher".to_owned(), format!("{count} of {} positions", self.predicted.len()));
        let facts = std::iter::once(of).chain(self.facts).collect();
        let tokens = self.tokens.into_iter().map(|parts| parts.join(" · ")).collect();
        OperatorView { operator: NAME.into(), facts, tokens, pictures: self.pictures }
    }

    /// Returns a value for each predicted position, and `None` for the others.
    fn values(&self, of: impl Fn(usize) -> f64) -> Vec<Option<f64>> {
        self.predicted.iter().enumerate().map(|(i, predicted)| predicted.then(|| of(i))).collect()
    }

    /// Adds the mean over predicted positions and the strip of a column.
    fn add_column(
        &mut self,
        title: &str,
        values: Vec<Option<f64>>,
        bounds: (f64, f64),
        fact: impl FnOnce(f64) -> (String, String),
    ) {
        let present: Vec<f64> = values.iter().flatten().copied().collect();
        let mean = present.iter().sum::<f64>() / present.len().max(1) as f64;
        let (chart, line) = strip_chart(title, values, bounds);
        self.facts.push(if present.is_empty() { (title.into(), "of no position".into()) } else { fact(mean) });
        self.facts.push(line);
        self.pictures.push(chart);
    }

    fn add_token_text(&mut self, of: impl Fn(usize) -> String) {
        for (i, parts) in self.tokens.iter_mut().enumerate() {
            parts.push(of(i));
        }
    }

    fn topk(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        let k = config.topk;
        if k == 0 || row.column_by_name(columns::TOPK_INDEX).is_none() {
            return Ok(());
        }
        let indices = ListRows::from_batch(row, columns::TOPK_INDEX)?;
        let ids = &indices.values::<Int32Array>(columns::TOPK_INDEX)?.values()[indices.range(0)];
        let logprobs = float_column(row, columns::TOPK_LOGPROB)?;
        let logprobs = logprobs.row(0);
        check_length(columns::TOPK_INDEX, ids.len(), self.predicted.len() * k)?;
        check_length(columns::TOPK_LOGPROB, logprobs.len(), self.predicted.len() * k)?;
        let mass = |i: usize| logprobs[i * k..(i + 1) * k].iter().map(|v| f64::from(*v).exp()).sum::<f64>();
        let to_fact = |mean: f64| ("top-k".into(), format!("{k} tokens hold {mean:.4} of the mass on average"));
        self.add_column(&format!("mass of the {k} likeliest"), self.values(mass), (0.0, 1.0), to_fact);
        self.add_token_text(|i| format!("likeliest {} with {:.3}", ids[i * k], f64::from(logprobs[i * k]).exp()));
        Ok(())
    }

    fn signals(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        let asked = &config.signals;
        if asked.is_none() {
            return Ok(());
        }
        let (stored, misfits) = StoredSignals::of(asked, row)?;
        if let Some(misfit) = misfits.first() {
            return Err(ArrowError::InvalidArgumentError(misfit.message.clone()));
        }
        let all: Vec<RowSignals> = (0..self.predicted.len()).map(|i| stored.at(0, i)).collect();
        for (n, temperature) in asked.logz_temperatures.iter().enumerate() {
            let values = self.values(|i| f64::from(all[i].logz[n]));
            let bounds = value_range(values.iter());
            let title = format!("ln Σ exp(l/{temperature})");
            self.add_column(&title, values, bounds, |mean| (format!("mean of {title}"), format!("{mean:.3}")));
        }
        if asked.entropy {
            let to_fact = |nats: f64| {
                let value = format!("{nats:.3} nat, as of {:.1} equally likely tokens", nats.exp());
                ("mean entropy".into(), value)
            };
            let most = (config.vocab_size.max(2) as f64).ln();
            self.add_column("entropy in nat", self.values(|i| f64::from(all[i].entropy)), (0.0, most), to_fact);
        }
        for (n, id) in asked.candidates.iter().enumerate() {
            let values = self.values(|i| f64::from(all[i].candidates[n]).exp());
            let to_fact = |mean: f64| (format!("mean probability of candidate {id}"), format!("{mean:.5}"));
            let bounds = (0.0, value_range(values.iter()).1);
            self.add_column(&format!("probability of candidate {id}"), values, bounds, to_fact);
        }
        if let Some(samples) = &asked.samples {
            let to_fact = |mean: f64| {
                let value = format!("{} draws, {mean:.1} distinct on average", samples.draws);
                ("sampled logits".into(), value)
            };
            let bounds = (0.0, f64::from(samples.draws));
            self.add_column("distinct tokens drawn", self.values(|i| all[i].sampled.len() as f64), bounds, to_fact);
        }
        if let Some(top_p) = &asked.top_p {
            let to_fact = |kept: f64| {
                let value = format!("{kept:.1} tokens on average for {} of the mass", top_p.mass);
                ("top-p".into(), value)
            };
            let bounds = (0.0, top_p.most as f64);
            self.add_column("tokens kept by top-p", self.values(|i| all[i].top_p.len() as f64), bounds, to_fact);
            let tails = self.values(|i| f64::from(all[i].tail).exp());
            let bounds = (0.0, value_range(tails.iter()).1);
            self.add_column("mass outside of top-p", tails, bounds, |mean| {
                ("mass outside of top-p".into(), format!("{mean:.4} on average"))
            });
        }
        self.add_token_text(|i| token_line(asked, &all[i]));
        Ok(())
    }

    /// Adds the Euclidean norm of each layer's state.
    fn states(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        let Some(stored) = StoredStates::of(config.hidden.as_ref(), row)? else { return Ok(()) };
        let (layers, width) = (&stored.config().layers, stored.config().width);
        check_length(columns::HIDDEN_STATES, stored.row(0).len(), self.predicted.len() * layers.len() * width)?;
        let length = |state: &[f32]| state.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let lengths: Vec<Vec<f64>> = (0..self.predicted.len())
            .map(|i| stored.at(0, i).chunks_exact(width.max(1)).map(length).collect())
            .collect();
        self.facts.push(("hidden states".into(), format!("{} of width {width}", layers.len())));
        for (n, layer) in layers.iter().enumerate() {
            let values = self.values(|i| lengths[i][n]);
            let bounds = (0.0, value_range(values.iter()).1);
            let to_fact = |mean: f64| (format!("mean length of the state of layer {layer}"), format!("{mean:.2}"));
            self.add_column(&format!("length of the state of layer {layer}"), values, bounds, to_fact);
        }
        self.add_token_text(|i| {
            let each = layers.iter().zip(&lengths[i]).map(|(layer, length)| format!("|h{layer}| {length:.1}"));
            each.collect::<Vec<_>>().join(" ")
        });
        Ok(())
    }
}

fn check_length(name: &str, got: usize, valid: usize) -> Result<(), ArrowError> {
    let wrong = || ArrowError::InvalidArgumentError(format!("{name} has {got} values, valid: {valid}"));
    if got == valid { Ok(()) } else { Err(wrong()) }
}

/// Formats the signals of one token in short form.
fn token_line(config: &SignalsConfig, signals: &RowSignals) -> String {
    let mut parts = Vec::new();
    if !signals.logz.is_empty() {
        let values: Vec<String> = signals.logz.iter().map(|v| format!("{v:.2}")).collect();
        parts.push(format!("logz {}", values.join(" ")));
    }
    if config.entropy {
        parts.push(format!("H {:.2}", signals.entropy));
    }
    if !signals.candidates.is_empty() {
        let values: Vec<String> = signals.candidates.iter().map(|v| format!("{v:.2}")).collect();
        parts.push(format!("candidates {}", values.join(" ")));
    }
    if config.samples.is_some() {
        let mut drawn = signals.sampled.clone();
        drawn.sort_by_key(|s| (std::cmp::Reverse(s.count), s.index));
        let values: Vec<String> = drawn.iter().take(3).map(|s| format!("{}×{}", s.count, s.index)).collect();
        parts.push(format!("drawn {}{}", values.join(" "), if drawn.len() > 3 { " …" } else { "" }));
    }
    if config.top_p.is_some() {
        parts.push(format!("top-p {} + {:.1e}", signals.top_p.len(), f64::from(signals.tail).exp()));
    }
    parts.join(" · ")
}
