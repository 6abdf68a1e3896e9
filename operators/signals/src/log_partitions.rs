//! `logz_temperatures`: the log-partition ln Σ_k exp(l_k / T) at each of some temperatures T.
//!
//! Cost: one pass with an exponential per entry for each temperature other than 1.

use stillhouse_noise::{LoadedRow, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::{self, Column};

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32s, f32s_of_bytes, mismatch};

pub(crate) const COLUMNS: &[Column] = &[Column {
    name: columns::LOGZ,
    dtype: "fixed list float32",
    when: "`logz_temperatures`",
    shape: "[L, temperatures]",
    contract: "ln Σ exp(l / T) for each T in the job's order; error at most 1e-5 nat or half a unit in the last place; certain: 0",
    meaning: "natural logarithm of the sum of exp(logit / T) over the vocabulary, for each temperature T of the job",
}];

/// Log-partitions.
#[derive(Debug, Clone, PartialEq)]
pub struct LogPartitions {
    /// Temperatures T.
    pub temperatures: Vec<f64>,
}

impl Signal for LogPartitions {
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        let log_partition = |temperature: &f64| {
            let ln_z = if *temperature == 1.0 {
                row.softmax().ln_z()
            } else {
                libm::log(row.sums_of_powers((1.0 / temperature) as f32).iter().sum())
            };
            (f64::from(row.softmax().max()) / temperature + ln_z) as f32
        };
        columns.push(Values::F32(self.temperatures.iter().map(log_partition).collect()));
    }

    fn kernel(&self, _: usize) -> SignalKernel {
        SignalKernel {
            name: Some("noise_log_partitions"),
            constants: self.temperatures.iter().flat_map(|t| t.to_ne_bytes()).collect(),
            count: self.temperatures.len() as u32,
            output_bytes: self.temperatures.len() * 4,
            ..SignalKernel::default()
        }
    }

    fn read_kernel_output(&self, output: &[u8], _: (&[u32], &[f32]), columns: &mut RowSignals) {
        columns.push(Values::F32(f32s_of_bytes(output)));
    }
}

impl StoredSignal for LogPartitions {
    fn columns(&self) -> Vec<SignalColumn> {
        vec![SignalColumn::new(columns::LOGZ, ItemType::F32, ColumnShape::Vector(self.temperatures.len()))]
    }

    fn certain(&self, _: u32, columns: &mut RowSignals) {
        columns.push(Values::F32(vec![0.0; self.temperatures.len()]));
    }

    fn check(&self, values: &[Values], _: usize) -> Option<String> {
        let bad = f32s(values, 0).iter().find(|logz| !logz.is_finite())?;
        Some(format!("logz {bad}, valid: finite"))
    }

    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        _: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let mut pairs = f32s(got, 0).iter().zip(f32s(expected, 0));
        let (got, expected) =
            pairs.find(|(got, expected)| differs(**got, **expected, tolerances.logit(**expected, 1e-5)))?;
        mismatch("logz", *got, *expected)
    }

    fn bytes_per_token(&self, _: f64) -> f64 {
        3.6 * self.temperatures.len() as f64
    }

    fn max_values(&self, _: usize) -> usize {
        self.temperatures.len()
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        let series = |(n, temperature): (usize, &f64)| {
            let title = format!("ln Σ exp(l/{temperature})");
            let name = format!("mean of {title}");
            Series {
                title,
                values: positions.iter().map(|values| f64::from(f32s(values, 0)[n])).collect(),
                axis: Axis::Values,
                describe_mean: Box::new(move |mean| (name.clone(), format!("{mean:.3}"))),
            }
        };
        self.temperatures.iter().enumerate().map(series).collect()
    }

    fn summary(&self, values: &[Values]) -> String {
        let values: Vec<String> = f32s(values, 0).iter().map(|v| format!("{v:.2}")).collect();
        format!("logz {}", values.join(" "))
    }
}
