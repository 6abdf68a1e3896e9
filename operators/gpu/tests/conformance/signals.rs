//! Comparison of a device's signals with the CPU's, for the tests and for `gpu_check`.

use stillhouse_noise::{RowSignals, Signals, Values};
use stillhouse_signals::{Entropy, LogPartitions, SampledLogits, TopK, TopP};

/// Distance in units in the last place of f32.
pub fn ulp_distance(a: f32, b: f32) -> u32 {
    let ordered = |v: f32| {
        let bits = v.to_bits() as i32;
        if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
    };
    ordered(a).abs_diff(ordered(b))
}

/// Whether two ln p are equal up to rounding.
///
/// Where p is close to 1, ln p is the sum of all other probabilities. Their f32 exponentials have a relative error of
/// 1.2e-7 on either side. Added to 1, that sum has only the precision of f64.
pub fn same_logprob(a: f32, b: f32) -> bool {
    let others = -f64::from(b).exp_m1();
    ulp_distance(a, b) <= 1 || f64::from(a - b).abs() <= 2.4e-7 * others + 1e-15
}

macro_rules! holds {
    ($condition:expr, $($message:tt)*) => {
        let holds: bool = $condition;
        if !holds {
            return Err(format!($($message)*));
        }
    };
}

/// Checks against twice the bounds of the signals, as `stillhouse_signals` defines them.
pub fn check_signals(signals: &Signals, got: &RowSignals, expected: &RowSignals) -> Result<(), String> {
    holds!(got.len() == expected.len(), "{} columns of signals, the CPU has {}", got.len(), expected.len());
    let mut first = 0;
    for signal in signals.iter() {
        let sampled = signal.as_any().downcast_ref::<SampledLogits>();
        let width = match (sampled, signal.as_any().is::<TopK>(), signal.as_any().is::<TopP>()) {
            (Some(sampled), ..) => 3 + usize::from(sampled.power != 1.0),
            (None, true, _) => 2,
            (None, false, true) => 4,
            (None, false, false) => 1,
        };
        let (got, expected) = (&got[first..first + width], &expected[first..first + width]);
        match sampled {
            Some(sampled) => check_sampled(sampled, got, expected)?,
            None => {
                let sums = signal.as_any().is::<LogPartitions>() || signal.as_any().is::<Entropy>();
                let same = got.iter().zip(expected).enumerate().all(|(n, (got, expected))| {
                    // the tail of the top-p is a sum, too
                    let is_near = if sums || n == 3 { near } else { same_logprob };
                    let (a, b) = (got.f32s(), expected.f32s());
                    let floats = a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_near(*a, *b));
                    floats && got.u32s() == expected.u32s()
                });
                holds!(same, "{signal:?}: {got:?}, the CPU has {expected:?}");
            }
        }
        first += width;
    }
    Ok(())
}

/// Whether two sums over the vocabulary are equal up to twice their bound.
fn near(a: f32, b: f32) -> bool {
    a == b || ulp_distance(a, b) <= 1 || (a - b).abs() <= 2e-5
}

/// A uniform at the edge of an entry may select the entry next to it.
fn check_sampled(sampled: &SampledLogits, got: &[Values], expected: &[Values]) -> Result<(), String> {
    let (tokens, times) = (got[1].u32s(), got[2].u32s());
    holds!(times.iter().sum::<u32>() == sampled.draws, "{} draws", times.iter().sum::<u32>());
    holds!(got[0].u32s() == [tokens.len() as u32], "{} distinct draws", tokens.len());
    holds!(tokens.is_sorted_by(|a, b| a < b), "draws do not ascend");
    let from_cpu = |token: &u32| expected[1].u32s().iter().position(|other| other == token);
    let times_on_cpu = |token: &u32| from_cpu(token).map_or(0, |n| expected[2].u32s()[n]);
    let moved: u32 = tokens.iter().zip(times).map(|(token, n)| n.saturating_sub(times_on_cpu(token))).sum();
    holds!(moved <= 1 + sampled.draws / 64, "{moved} of {} draws fell elsewhere", sampled.draws);
    let Some(ratios) = got.get(3) else { return Ok(()) };
    for (token, ratio) in tokens.iter().zip(ratios.f32s()) {
        let Some(n) = from_cpu(token) else { continue };
        let exact = expected[3].f32s()[n];
        holds!((ratio / exact - 1.0).abs() <= 1e-5, "entry {token}: ratio {ratio}, the CPU has {exact}");
    }
    Ok(())
}
