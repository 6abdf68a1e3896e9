//! What `inspect` and the web page show of a row's signals: means as facts, a strip per column, and a line per token.
//!
//! Only predicted positions count. Given positions and padding are certain and say nothing about the teacher.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use stillhouse_noise::{RowSignals, Values};
use stillhouse_schemas::columns;
use stillhouse_signals::{Axis, Series, StoredSignal, split};

use super::hidden::StoredStates;
use super::signals::StoredSignals;
use super::{ExtractConfig, NAME};
use crate::config::{Chart, OperatorView};
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

    fn signals(&mut self, config: &ExtractConfig, row: &RecordBatch) -> Result<(), ArrowError> {
        if config.signals.is_empty() {
            return Ok(());
        }
        let stored = StoredSignals::read(&config.signals, row)?;
        let rows: Vec<RowSignals> = (0..self.predicted.len()).map(|i| stored.at(0, i)).collect();
        let by_position: Vec<Vec<_>> = rows.iter().map(|row| split(&config.signals, row).collect()).collect();
        for (n, signal) in config.signals.iter().enumerate() {
            let positions: Vec<&[Values]> = by_position.iter().map(|signals| signals[n].1).collect();
            for Series { title, values, axis, describe_mean } in signal.view(&positions, config.vocab_size) {
                let values = self.values(|i| values[i]);
                let bounds = match axis {
                    Axis::Values => value_range(values.iter()),
                    Axis::FromZero => (0.0, value_range(values.iter()).1),
                    Axis::UpTo(most) => (0.0, most),
                };
                self.add_column(&title, values, bounds, describe_mean);
            }
        }
        let summary = |signals: &Vec<(&dyn StoredSignal, &[Values])>| {
            let parts: Vec<String> = signals.iter().map(|(signal, values)| signal.summary(values)).collect();
            parts.join(" · ")
        };
        self.add_token_text(|i| summary(&by_position[i]));
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
