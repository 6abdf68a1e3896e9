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
use crate::config::{OperatorView, Picture};
use crate::invariants::float_column;
use crate::rows::ListRows;
use crate::sparkline::{span, strip};

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
    let mut shown =
        Shown { predicted, facts: Vec::new(), pictures: Vec::new(), tokens: vec![Vec::new(); predicted.len()] };
    shown.topk(config, row)?;
    shown.signals(config, row)?;
    shown.states(config, row)?;
    Ok((!shown.facts.is_empty()).then(|| shown.done()))
}

struct Shown<'a> {
    predicted: &'a [bool],
    facts: Vec<(String, String)>,
    pictures: Vec<Picture>,
    tokens: Vec<Vec<String>>,
}

impl Shown<'_> {
    fn done(self) -> OperatorView {
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
    fn column(
        &mut self,
        title: &str,
        values: Vec<Option<f64>>,
        bounds: (f64, f64),
        fact: impl FnOnce(f64) -> (String, String),
    ) {
        let there: Vec<f64> = values.iter().flatten().copied().collect();
        let mean = there.iter().sum::<f64>() / there.len().max(1) as f64;
        let (picture, line) = strip(title, values, bounds);
        self.facts.push(if there.is_empty() { (title.into(), "of no position".into()) } else { fact(mean) });
        self.facts.push(line);
        self.pictures.push(picture);
    }

    fn token(&mut self, of: impl Fn(usize) -> String) {
        for (i, parts) in self.tokens.iter_mut().enumerate() {
            parts.push(of(i));
        }
    }

    fn topk(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        let k = config.topk;
        if k == 0 || row.column_by_name(columns::TOPK_INDEX).is_none() {
            return Ok(());
        }
        let indices = ListRows::of(row, columns::TOPK_INDEX)?;
        let ids = &indices.values::<Int32Array>(columns::TOPK_INDEX)?.values()[indices.range(0)];
        let logprobs = float_column(row, columns::TOPK_LOGPROB)?;
        let logprobs = logprobs.row(0);
        fits(columns::TOPK_INDEX, ids.len(), self.predicted.len() * k)?;
        fits(columns::TOPK_LOGPROB, logprobs.len(), self.predicted.len() * k)?;
        let mass = |i: usize| logprobs[i * k..(i + 1) * k].iter().map(|v| f64::from(*v).exp()).sum::<f64>();
        let said = |mean: f64| ("top-k".into(), format!("{k} tokens hold {mean:.4} of the mass on average"));
        self.column(&format!("mass of the {k} likeliest"), self.values(mass), (0.0, 1.0), said);
        self.token(|i| format!("likeliest {} with {:.3}", ids[i * k], f64::from(logprobs[i * k]).exp()));
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
            let bounds = span(values.iter());
            let title = format!("ln Σ exp(l/{temperature})");
            self.column(&title, values, bounds, |mean| (format!("mean of {title}"), format!("{mean:.3}")));
        }
        if asked.entropy {
            let said = |nats: f64| {
                let value = format!("{nats:.3} nat, as of {:.1} equally likely tokens", nats.exp());
                ("mean entropy".into(), value)
            };
            let most = (config.vocab_size.max(2) as f64).ln();
            self.column("entropy in nat", self.values(|i| f64::from(all[i].entropy)), (0.0, most), said);
        }
        for (n, id) in asked.candidates.iter().enumerate() {
            let values = self.values(|i| f64::from(all[i].candidates[n]).exp());
            let said = |mean: f64| (format!("mean probability of candidate {id}"), format!("{mean:.5}"));
            let bounds = (0.0, span(values.iter()).1);
            self.column(&format!("probability of candidate {id}"), values, bounds, said);
        }
        if let Some(samples) = &asked.samples {
            let said = |mean: f64| {
                let value = format!("{} draws, {mean:.1} distinct on average", samples.draws);
                ("sampled logits".into(), value)
            };
            let bounds = (0.0, f64::from(samples.draws));
            self.column("distinct tokens drawn", self.values(|i| all[i].sampled.len() as f64), bounds, said);
        }
        if let Some(top_p) = &asked.top_p {
            let said = |kept: f64| {
                let value = format!("{kept:.1} tokens on average for {} of the mass", top_p.mass);
                ("top-p".into(), value)
            };
            let bounds = (0.0, top_p.most as f64);
            self.column("tokens kept by top-p", self.values(|i| all[i].top_p.len() as f64), bounds, said);
            let tails = self.values(|i| f64::from(all[i].tail).exp());
            let bounds = (0.0, span(tails.iter()).1);
            self.column("mass outside of top-p", tails, bounds, |mean| {
                ("mass outside of top-p".into(), format!("{mean:.4} on average"))
            });
        }
        self.token(|i| line(asked, &all[i]));
        Ok(())
    }

    /// Adds the Euclidean norm of each layer's state.
    fn states(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        let Some(stored) = StoredStates::of(config.hidden.as_ref(), row)? else { return Ok(()) };
        let (layers, width) = (&stored.config().layers, stored.config().width);
        fits(columns::HIDDEN_STATES, stored.row(0).len(), self.predicted.len() * layers.len() * width)?;
        let length = |state: &[f32]| state.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let lengths: Vec<Vec<f64>> = (0..self.predicted.len())
            .map(|i| stored.at(0, i).chunks_exact(width.max(1)).map(length).collect())
            .collect();
        self.facts.push(("hidden states".into(), format!("{} of width {width}", layers.len())));
        for (n, layer) in layers.iter().enumerate() {
            let values = self.values(|i| lengths[i][n]);
            let bounds = (0.0, span(values.iter()).1);
            let said = |mean: f64| (format!("mean length of the state of layer {layer}"), format!("{mean:.2}"));
            self.column(&format!("length of the state of layer {layer}"), values, bounds, said);
        }
        self.token(|i| {
            let each = layers.iter().zip(&lengths[i]).map(|(layer, length)| format!("|h{layer}| {length:.1}"));
            each.collect::<Vec<_>>().join(" ")
        });
        Ok(())
    }
}

fn fits(name: &str, got: usize, valid: usize) -> Result<(), ArrowError> {
    let wrong = || ArrowError::InvalidArgumentError(format!("{name} has {got} values, valid: {valid}"));
    if got == valid { Ok(()) } else { Err(wrong()) }
}

/// Formats the signals of one token in short form.
fn line(config: &SignalsConfig, signals: &RowSignals) -> String {
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
        drawn.sort_by_key(|s| (std::cmp::Reverse(s.times), s.index));
        let values: Vec<String> = drawn.iter().take(3).map(|s| format!("{}×{}", s.times, s.index)).collect();
        parts.push(format!("drawn {}{}", values.join(" "), if drawn.len() > 3 { " …" } else { "" }));
    }
    if config.top_p.is_some() {
        parts.push(format!("top-p {} + {:.1e}", signals.top_p.len(), f64::from(signals.tail).exp()));
    }
    parts.join(" · ")
}
