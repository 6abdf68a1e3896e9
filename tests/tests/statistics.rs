//! Tests the two properties of posterior Gumbel noise (METHODS.md §2) on tokens drawn from the nano teacher.
//!
//! At every position of real text the test draws a token x from the teacher's distribution, with random numbers
//! independent of the noise. Then argmax(l + ξ) = x always, and each ξ_k whose k is chosen independently of x is a
//! standard Gumbel variate. ξ_x itself is not one: x is where l + ξ is largest. That maximum, l_x + ξ_x − ln Σ exp(l) =
//! ξ_x + ln p_x, is one.

use std::path::Path;

use stillhouse_noise::{DrawKey, NoiseStream, Softmax, dense_noise};
use stillhouse_teacher::{Precision, load_on_host};
use stillhouse_tests::{corpus, nano_teacher};
use tokenizers::Tokenizer;

const ROWS: usize = 12;
const LENGTH: usize = 256;

/// The test's own random numbers (splitmix64).
struct Random(u64);

impl Random {
    /// Uniform in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws an index in proportion to its weight, from cumulative sums.
    fn draw(&mut self, sums: &[f64]) -> usize {
        let u = self.uniform() * sums[sums.len() - 1];
        sums.partition_point(|&sum| sum <= u).min(sums.len() - 1)
    }
}

/// p-value of the Kolmogorov–Smirnov test against the standard Gumbel distribution.
fn gumbel_p_value(mut sample: Vec<f64>) -> f64 {
    sample.sort_by(f64::total_cmp);
    let n = sample.len() as f64;
    let distance = sample
        .iter()
        .enumerate()
        .map(|(i, x)| {
            let cdf = (-(-x).exp()).exp();
            (cdf - i as f64 / n).max((i + 1) as f64 / n - cdf)
        })
        .fold(0.0, f64::max);
    let lambda = (n.sqrt() + 0.12 + 0.11 / n.sqrt()) * distance;
    let terms = (1..=100).map(f64::from).map(|j| (-1f64).powf(j - 1.0) * (-2.0 * j * j * lambda * lambda).exp());
    (2.0 * terms.sum::<f64>()).clamp(0.0, 1.0)
}

fn tokens(folder: &Path) -> Vec<u32> {
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let text = corpus(3, 8000);
    let tokens = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert!(tokens.len() >= ROWS * LENGTH);
    tokens[..ROWS * LENGTH].to_vec()
}

#[test]
fn noise_of_drawn_tokens_is_gumbel_and_gives_them_back() {
    let folder = nano_teacher();
    let teacher = load_on_host(&folder, Precision::F32).unwrap();
    let vocab = teacher.info().vocab_size;
    let hidden = teacher.hidden(&tokens(&folder), ROWS, LENGTH).unwrap().flatten(0, 1).unwrap();

    let mut random = Random(20_260_101);
    let mut softmax = Softmax::new(vocab).unwrap();
    let (mut logits, mut noise, mut sums) = (Vec::new(), vec![0f32; vocab], vec![0f64; vocab]);
    // Samples: ξ_x + ln p_x; ξ of an entry drawn uniformly, of one drawn by the teacher, and of the likeliest one. To
    // show that the test can fail: ξ of the likeliest one used in place of the drawn token.
    let [mut maximum, mut evenly, mut likely, mut likeliest, mut greedy] = [const { Vec::<f64>::new() }; 5];
    for first in (0..ROWS * LENGTH).step_by(32) {
        teacher.logits_into(&hidden.narrow(0, first, 32).unwrap(), &mut logits).unwrap();
        for (i, row) in logits.chunks_exact(vocab).enumerate() {
            let largest = row.iter().copied().fold(f32::MIN, f32::max);
            let mut sum = 0.0;
            for (total, &l) in sums.iter_mut().zip(row) {
                sum += f64::from(l - largest).exp();
                *total = sum;
            }
            let x = random.draw(&sums);
            let place = first + i;
            let stream = NoiseStream::new(DrawKey::new(42, 0), (place / LENGTH) as u64, (place % LENGTH) as u32);
            dense_noise(&mut softmax, row, x as u32, &stream, &mut noise).unwrap();
            let top = row.iter().position(|&l| l == largest).unwrap();
            let mut best = (f64::MIN, 0);
            for (k, (&l, &xi)) in row.iter().zip(&noise).enumerate() {
                let value = f64::from(l) + f64::from(xi);
                if value > best.0 {
                    best = (value, k);
                }
            }
            assert_eq!(best.1, x, "position {place}");
            maximum.push(f64::from(noise[x]) + f64::from(row[x] - largest) - sum.ln());
            likeliest.push(f64::from(noise[top]));
            evenly.push(f64::from(noise[(random.uniform() * vocab as f64) as usize]));
            likely.push(f64::from(noise[random.draw(&sums)]));
            dense_noise(&mut softmax, row, top as u32, &stream, &mut noise).unwrap();
            greedy.push(f64::from(noise[top]));
        }
    }
    assert_eq!(maximum.len(), ROWS * LENGTH);
    for (what, sample) in [
        ("the maximum", maximum),
        ("any entry", evenly),
        ("a likely entry", likely),
        ("the likeliest entry", likeliest),
    ] {
        let p = gumbel_p_value(sample);
        assert!(p > 1e-3, "ξ of {what} is not Gumbel: p = {p}");
    }
    let p = gumbel_p_value(greedy);
    assert!(p < 1e-6, "the test does not see that greedy tokens are not drawn: p = {p}");
}
