//! MAUVE: the similarity of two sets of texts, from a model's features of them (Pillutla et al. 2021; the smoothed
//! variants, 2023).
//!
//! ```text
//!   features [n, H] of both sides ─► rows of length 1 ─► PCA to 90 % of the variance ─► k-means, k = round(min(n, m) / 10)
//!      ─► histograms p, q over the clusters ─► curve (exp(−5 KL(q ‖ r)), exp(−5 KL(p ‖ r))), r = w p + (1 − w) q ─► area under the curve
//! ```
//!
//! Follows the authors' `compute_mauve` with its defaults. The feature of a text is the final hidden state of its last
//! token, of at most 1,024. There are 25 mixtures w from 10⁻⁶ to 1 − 10⁻⁶. The area is the mean of the two integrals by
//! the trapezoidal rule. `mauve_star` adds ½ to every count. k-means starts from points drawn with the seed, five
//! times; the best result counts. The authors use another generator, so the two programs agree as well as two seeds of
//! one program (a few hundredths at 1,000 texts).
//!
//! Cost: (n + m)·H² for the covariance, H³ for its eigenvectors, 5·(n + m)·k·d per iteration of k-means. Memory: (n + m
//! + 2 H)·H numbers.

use nalgebra::{DMatrix, SymmetricEigen};
use rayon::prelude::*;
use serde::Serialize;
use stillhouse_noise::keyed_uniforms;

/// Features of texts, `[n, H]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Features {
    values: Vec<f32>,
    width: usize,
}

impl Features {
    /// Adds the features of a text. All texts have the same number of features.
    pub fn push(&mut self, features: &[f32]) {
        self.width = features.len();
        self.values.extend_from_slice(features);
    }

    /// Number of texts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Whether there are no texts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Largest absolute difference of two corresponding features.
    #[cfg(test)]
    pub(super) fn distance(&self, other: &Self) -> f32 {
        self.values.iter().zip(&other.values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

/// Settings of MAUVE; the defaults are the authors'.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MauveOptions {
    /// Number of clusters; `None` means a tenth of the smaller side, at least two.
    pub clusters: Option<usize>,
    /// Share of the variance that the principal components keep.
    pub explained_variance: f64,
    /// The constant c of the divergence curve.
    pub scaling: f64,
    /// Seed of k-means.
    pub seed: u64,
}

impl Default for MauveOptions {
    fn default() -> Self {
        Self { clusters: None, explained_variance: 0.9, scaling: 5.0, seed: 25 }
    }
}

/// MAUVE and related scores.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mauve {
    /// The score, from 0 to 1; higher means more similar.
    pub mauve: f64,
    /// `mauve` with ½ added to every count.
    pub mauve_star: f64,
    /// The frontier integral, from 0 to 1; lower means more similar.
    pub frontier_integral: f64,
    /// `frontier_integral` with ½ added to every count.
    pub frontier_integral_star: f64,
    /// Number of texts used.
    pub texts: u64,
    /// Number of reference texts used.
    pub reference_texts: u64,
    /// Number of clusters, k.
    pub clusters: u64,
    /// Number of principal components.
    pub components: u64,
}

/// Maximum iterations of k-means, and number of starts.
const ITERATIONS: usize = 500;
const BEGINNINGS: u32 = 5;
/// Number of mixtures on the curve.
const MIXTURES: usize = 25;

/// Computes MAUVE of texts `p` against the reference `q`.
///
/// # Errors
/// A message with the valid values, if a side has fewer than two texts or there are fewer texts than clusters, or if
/// features differ in width or are not finite.
pub fn mauve(p: &Features, q: &Features, options: &MauveOptions) -> Result<Mauve, String> {
    let smaller = p.len().min(q.len());
    if smaller < 2 {
        return Err(format!("MAUVE of {} and {} texts; valid: two or more on each side", p.len(), q.len()));
    }
    if p.width != q.width {
        return Err(format!("features of {} and {} numbers; valid: those of one teacher", p.width, q.width));
    }
    if p.values.iter().chain(&q.values).any(|value| !value.is_finite()) {
        return Err("a hidden state that is no number; valid: numbers".into());
    }
    let clusters = options.clusters.unwrap_or_else(|| ((smaller as f64 / 10.0).round_ties_even() as usize).max(2));
    if !(2..=p.len() + q.len()).contains(&clusters) {
        return Err(format!("{clusters} clusters of {} texts; valid: 2 to the number of texts", p.len() + q.len()));
    }
    let points = components(&unit_rows(q, p), q.width, options.explained_variance);
    let labels = cluster(&points, clusters, options.seed);
    let (of_q, of_p) = labels.split_at(q.len());
    let counts = |labels: &[usize], smooth: f64| {
        let mut counts = vec![smooth; clusters];
        labels.iter().for_each(|label| counts[*label] += 1.0);
        let all: f64 = counts.iter().sum();
        counts.iter().map(|count| count / all).collect::<Vec<f64>>()
    };
    let (plain, smooth) = ((counts(of_p, 0.0), counts(of_q, 0.0)), (counts(of_p, 0.5), counts(of_q, 0.5)));
    Ok(Mauve {
        mauve: area(&plain.0, &plain.1, options.scaling),
        mauve_star: area(&smooth.0, &smooth.1, options.scaling),
        frontier_integral: frontier_integral(&plain.0, &plain.1),
        frontier_integral_star: frontier_integral(&smooth.0, &smooth.1),
        texts: p.len() as u64,
        reference_texts: q.len() as u64,
        clusters: clusters as u64,
        components: points.width as u64,
    })
}

/// Points in row-major order.
struct Points {
    values: Vec<f32>,
    width: usize,
}

/// All rows, scaled to length 1; zero rows stay zero.
fn unit_rows(first: &Features, second: &Features) -> Vec<f64> {
    let rows = first.values.chunks_exact(first.width).chain(second.values.chunks_exact(second.width));
    rows.flat_map(|row| {
        let length = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let length = if length > 0.0 { length } else { 1.0 };
        row.iter().map(move |&v| f64::from(v) / length)
    })
    .collect()
}

/// Projects the rows onto the principal components that keep this share of the variance.
fn components(rows: &[f64], width: usize, share: f64) -> Points {
    let count = rows.len() / width;
    let mut mean = vec![0.0; width];
    for row in rows.chunks_exact(width) {
        mean.iter_mut().zip(row).for_each(|(mean, value)| *mean += value / count as f64);
    }
    let centred = DMatrix::from_fn(count, width, |row, column| rows[row * width + column] - mean[column]);
    let eigen = SymmetricEigen::new(centred.tr_mul(&centred));
    let mut order: Vec<usize> = (0..width).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]).then(a.cmp(&b)));
    let all: f64 = eigen.eigenvalues.iter().map(|value| value.max(0.0)).sum();
    let mut kept = 0.0;
    let enough = order.iter().position(|&at| {
        kept += eigen.eigenvalues[at].max(0.0);
        kept >= share * all
    });
    order.truncate(enough.unwrap_or(0) + 1);
    let basis = eigen.eigenvectors.select_columns(&order);
    let projected = centred * basis;
    let values = (0..count).flat_map(|row| (0..order.len()).map(move |column| (row, column)));
    Points { values: values.map(|at| projected[at] as f32).collect(), width: order.len() }
}

/// The cluster of every point, from the best of several k-means runs.
fn cluster(points: &Points, clusters: usize, seed: u64) -> Vec<usize> {
    let count = points.values.len() / points.width;
    let runs = (0..BEGINNINGS).map(|beginning| {
        let mut order: Vec<u32> = (0..count as u32).collect();
        keyed_uniforms(seed, "mauve_kmeans", u64::from(beginning), 0).shuffle(&mut order);
        let centres: Vec<f64> =
            order[..clusters].iter().flat_map(|&at| points.row(at as usize).map(f64::from)).collect();
        lloyd(points, centres)
    });
    let best = runs.min_by(|a, b| a.0.total_cmp(&b.0));
    best.map(|(_, labels)| labels).unwrap_or_default()
}

impl Points {
    fn row(&self, at: usize) -> impl Iterator<Item = f32> {
        self.values[at * self.width..(at + 1) * self.width].iter().copied()
    }
}

/// Runs Lloyd's iterations from these centres. Returns the sum of squared distances and the labels. An empty cluster
/// takes the point that is farthest from its centre.
fn lloyd(points: &Points, mut centres: Vec<f64>) -> (f64, Vec<usize>) {
    let width = points.width;
    let nearest = |centres: &[f64]| -> Vec<(usize, f64)> {
        let of_point = |point: &[f32]| {
            let distances = centres
                .chunks_exact(width)
                .map(|centre| point.iter().zip(centre).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum::<f64>());
            distances.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0))
        };
        points.values.par_chunks_exact(width).map(of_point).collect()
    };
    let mut labels = nearest(&centres);
    for _ in 0..ITERATIONS {
        let clusters = centres.len() / width;
        let (mut sums, mut sizes) = (vec![0.0; centres.len()], vec![0usize; clusters]);
        for (point, (label, _)) in points.values.chunks_exact(width).zip(&labels) {
            sizes[*label] += 1;
            sums[label * width..][..width].iter_mut().zip(point).for_each(|(sum, &v)| *sum += f64::from(v));
        }
        let mut far: Vec<usize> = (0..labels.len()).collect();
        far.sort_by(|&a, &b| labels[b].1.total_cmp(&labels[a].1).then(a.cmp(&b)));
        let mut far = far.into_iter();
        for (cluster, size) in sizes.iter().enumerate() {
            let centre = &mut centres[cluster * width..][..width];
            match size {
                0 => far
                    .by_ref()
                    .take(1)
                    .for_each(|at| centre.iter_mut().zip(points.row(at)).for_each(|(c, v)| *c = f64::from(v))),
                size => centre.iter_mut().zip(&sums[cluster * width..]).for_each(|(c, sum)| *c = sum / *size as f64),
            }
        }
        let next = nearest(&centres);
        let same = next.iter().map(|n| n.0).eq(labels.iter().map(|l| l.0));
        labels = next;
        if same {
            break;
        }
    }
    (labels.iter().map(|label| label.1).sum(), labels.into_iter().map(|label| label.0).collect())
}

/// KL(p ‖ q), in nat.
fn divergence(p: &[f64], q: &[f64]) -> f64 {
    p.iter().zip(q).filter(|(p, _)| **p > 0.0).map(|(p, q)| p * (p / q).ln()).sum()
}

/// The area under the divergence curve.
fn area(p: &[f64], q: &[f64], scaling: f64) -> f64 {
    let (low, high) = (1e-6, 1.0 - 1e-6);
    let mixtures = (0..MIXTURES).map(|i| low + (high - low) * i as f64 / (MIXTURES - 1) as f64);
    let curve = mixtures.map(|w| {
        let r: Vec<f64> = p.iter().zip(q).map(|(p, q)| w * p + (1.0 - w) * q).collect();
        ((-scaling * divergence(q, &r)).exp(), (-scaling * divergence(p, &r)).exp())
    });
    let curve: Vec<(f64, f64)> = [(1.0, 0.0)].into_iter().chain(curve).chain([(0.0, 1.0)]).collect();
    let flipped: Vec<(f64, f64)> = curve.iter().map(|(x, y)| (*y, *x)).collect();
    0.5 * (trapezoids(curve) + trapezoids(flipped))
}

/// ∫ y dx by the trapezoidal rule, in ascending x; of equal x, the largest y comes first. (The authors' code leaves
/// that order to its sort, which gives 0.75 instead of 1 for two equal histograms, whose curve is a corner.)
fn trapezoids(mut curve: Vec<(f64, f64)>) -> f64 {
    curve.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    curve.windows(2).map(|ends| (ends[1].0 - ends[0].0) * (ends[0].1 + ends[1].1) / 2.0).sum()
}

/// The frontier integral of two histograms.
fn frontier_integral(p: &[f64], q: &[f64]) -> f64 {
    let of_one = |(&p, &q): (&f64, &f64)| {
        if p == 0.0 || q == 0.0 {
            (p + q) / 4.0
        } else if (p - q).abs() > 1e-8 {
            0.25 * (p + q) - 0.5 * (p * q * (p.ln() - q.ln()) / (p - q))
        } else {
            0.0
        }
    };
    2.0 * p.iter().zip(q).map(of_one).sum::<f64>()
}
