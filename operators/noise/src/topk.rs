//! The k most likely tokens of a row, for distillation on token-level log-probabilities.

use std::cmp::Ordering;

use crate::kernels::{self, LANES};
use crate::philox::BLOCK;
use crate::{NoiseError, Softmax};

/// Orders by larger logit, then by lower index.
fn rank(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Returns (index, ln p) of the k largest logits (`[V]` f32) in descending order, ties by lower index; all V if k > V.
///
/// # Errors
/// If there are no logits, or one is NaN or infinite.
pub fn top_k(logits: &[f32], k: usize) -> Result<Vec<(u32, f32)>, NoiseError> {
    let mut softmax = Softmax::new(logits.len())?;
    softmax.load(logits)?;
    Ok(top_k_of_loaded(&softmax, logits, k))
}

/// [`top_k`] of the row that `softmax` holds.
///
/// ```text
/// logits ─► maximum of every column ─► k-th largest maximum ≤ k-th largest logit ─► columns that reach it ─► k best
/// ```
///
/// A column is every 16th value of a block of 1,024 (64 values), so that vector instructions find its maximum without
/// operations across lanes.
#[must_use]
pub fn top_k_of_loaded(softmax: &Softmax, logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let (blocks, tail) = logits.as_chunks::<BLOCK>();
    let mut maxima = vec![[0f32; LANES]; blocks.len()];
    kernels::column_maxima(softmax.level(), blocks, &mut maxima);
    // k columns hold a logit of at least `threshold`, so no smaller logit is among the k largest.
    let threshold = if k <= maxima.len() * LANES {
        *maxima.clone().as_flattened_mut().select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::MIN
    };
    let mut best: Vec<(u32, f32)> = Vec::new();
    let mut take = |i: usize| {
        if logits[i] >= threshold {
            best.push((i as u32, logits[i] + 0.0)); // −0 and 0 are equal logits, but not to `total_cmp`
        }
    };
    for (column, _) in maxima.as_flattened().iter().enumerate().filter(|&(_, &largest)| largest >= threshold) {
        let first = column / LANES * BLOCK + column % LANES;
        (first..first + BLOCK).step_by(LANES).for_each(&mut take);
    }
    (logits.len() - tail.len()..logits.len()).for_each(&mut take);
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, rank);
        best.truncate(k);
    }
    best.sort_unstable_by(rank);
    best.into_iter().map(|(i, l)| (i, softmax.logprob(l) as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed_uniforms;

    #[test]
    fn agrees_with_a_full_sort_also_under_ties() {
        let mut uniforms = keyed_uniforms(3, "top-k", 0, 0);
        for (vocab, levels) in [(1usize, 3u32), (5, 2), (64, 4), (130, 1), (1000, 40), (5000, 1 << 30)] {
            let logits: Vec<f32> = (0..vocab).map(|_| uniforms.below(levels) as f32 * 0.1 - 1.0).collect();
            let mut sorted: Vec<(u32, f32)> = logits.iter().enumerate().map(|(i, &l)| (i as u32, l)).collect();
            sorted.sort_by(rank);
            for k in [0, 1, 2, 7, 64, 100, 6000] {
                let got: Vec<u32> = top_k(&logits, k).unwrap().into_iter().map(|t| t.0).collect();
                let expected: Vec<u32> = sorted.iter().take(k).map(|t| t.0).collect();
                assert_eq!(got, expected, "V = {vocab}, k = {k}");
            }
        }
    }

    #[test]
    fn log_probabilities_and_errors() {
        let top = top_k(&[0.0, 1.0, -0.0, 0.0], 3).unwrap();
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 0, 2]);
        let z: f64 = 3.0 + 1f64.exp();
        assert!((f64::from(top[0].1) - (1.0 - z.ln())).abs() < 1e-6);
        assert!(matches!(top_k(&[0.0, f32::NAN], 1), Err(NoiseError::NonFinite { index: 1, .. })));
        assert!(matches!(top_k(&[], 1), Err(NoiseError::Vocabulary { vocab: 0 })));
    }
}
