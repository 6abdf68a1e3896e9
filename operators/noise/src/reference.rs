//! Straightforward versions of the passes over a row, one entry after another. The tests compare the vector passes with
//! them, bit for bit, at every instruction level of the machine.

use crate::kernels::{self, Block, BlockSums};
use crate::philox::BLOCK;
use crate::{
    DrawKey, Level, NoiseStream, Softmax, exponential_from_word, keyed_uniforms, philox4x32_10, top_k_of_loaded,
};

const VOCABULARIES: [usize; 10] = [1, 2, 5, 63, 1000, 1023, 1024, 1025, 3001, 50_257];
const ROWS: u64 = 8;

/// Philox4x32-10 as in the paper, in 32-bit arithmetic.
fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// e of a word by the steps of the format's f32 version; the negation comes last.
fn exponential(r: u32) -> f32 {
    let (f, n) = if r < 1_257_966_796 {
        (-((r as f32 + 0.5) * 2f32.powi(-32)), 0.0)
    } else {
        let bits = ((!r) as f32 + 0.5).to_bits();
        let n = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
        (f32::from_bits(bits.wrapping_sub((n as u32) << 23)) - 1.0, n as f32 - 32.0)
    };
    let coefficients = [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1f32,
    ];
    let p = coefficients.iter().fold(7.037_683_6e-2f32, |p, c| p * f + c);
    let z = f * f;
    -((f + ((p * f * z + n * -2.121_944_4e-4) - 0.5 * z)) + n * 0.693_359_4)
}

/// Folds a block with `f` (such as a sum): the upper half onto the lower half until one value is left.
fn fold(block: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut values = block.to_vec();
    while values.len() > 1 {
        let half = values.len() / 2;
        values = (0..half).map(|i| f(values[i], values[i + half])).collect();
    }
    values[0]
}

/// Logits of five kinds: flat, peaked, Zipf-like with a long tail, with ties, with excluded entries.
fn logits(vocab: usize, row: u64) -> Vec<f32> {
    let mut u = keyed_uniforms(row, "reference", vocab as u64, 0);
    let logit = |_| {
        let v = u.next_f64();
        (match row % 5 {
            0 => 0.0,
            1 => v * v * v * v * v * v * v * v * 60.0,
            2 => 1.0 / (0.01 + v) - 100.0 + v,
            3 => f64::from((v * 5.0) as u32) * 3.0,
            _ if v < 0.3 => f64::from(f32::MIN),
            _ => v * 12.0,
        }) as f32
    };
    (0..vocab).map(logit).collect()
}

fn for_all(check: impl Fn(Level, usize, &[f32], &NoiseStream)) {
    for vocab in VOCABULARIES {
        for row in 0..ROWS {
            let stream = NoiseStream::new(DrawKey::new(row, row as u32 % 3), row << 32 | 77, (row * row) as u32);
            let logits = logits(vocab, row);
            Level::available().into_iter().flatten().for_each(|level| check(level, vocab, &logits, &stream));
        }
    }
}

fn words(stream: &NoiseStream, vocab: usize) -> Vec<u32> {
    let (low, high) = (stream.sequence_id as u32, (stream.sequence_id >> 32) as u32);
    let of = |c0: usize| philox([c0 as u32, stream.position, low, high], stream.key.words());
    (0..vocab.div_ceil(4)).flat_map(of).take(vocab).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn words_and_exponentials() {
    assert_eq!(philox([7, 8, 9, 10], [11, 12]), philox4x32_10([7, 8, 9, 10], [11, 12]));
    for_all(|level, vocab, _, stream| {
        let expected = words(stream, vocab);
        let mut got = vec![0u32; vocab.next_multiple_of(BLOCK)];
        kernels::words(level, stream, &mut got);
        assert_eq!(got[..vocab], expected, "{level:?}, V = {vocab}");
        let mut e = vec![0f32; vocab];
        kernels::exponentials(level, stream, &mut e);
        let expected: Vec<f32> = expected.into_iter().map(exponential).collect();
        assert_eq!(bits(&e), bits(&expected), "{level:?}, V = {vocab}");
    });
}

/// Compares words around the branch point, at both ends of the range, and every 4,099th word.
#[test]
fn exponentials_of_words() {
    let ends = (0..70_000).chain((0..70_000).map(|i| u32::MAX - i));
    let seam = 1_257_966_796 - 70_000..1_257_966_796 + 70_000;
    for r in ends.chain(seam).chain((0..u32::MAX).step_by(4099)) {
        assert_eq!(exponential_from_word(r).to_bits(), exponential(r).to_bits(), "word {r}");
    }
}

#[test]
fn weights_with_their_sums() {
    for_all(|level, vocab, logits, stream| {
        let mut softmax = Softmax::at_level(vocab, level).unwrap();
        softmax.load(logits).unwrap();
        let (x, rival_threshold) = (vocab * 2 / 3, 1.0 + 1.0 / 4096.0);
        let scale = softmax.scale(stream.auxiliary_exponential());
        let u = softmax.unnormalised();
        let (mut w, mut d) = (kernels::zeros(vocab), kernels::zeros(vocab));
        let mut sums = vec![BlockSums::default(); u.len()];
        kernels::weights(level, stream, vocab, x, u, scale, rival_threshold, &mut w, &mut d, &mut sums);
        let e: Vec<f32> = words(stream, vocab).into_iter().map(exponential).collect();
        for (b, u) in u.iter().enumerate() {
            let (mut expected_w, mut expected_d, mut has_rival) = (Block::ZERO, Block::ZERO, false);
            for i in (0..BLOCK).filter(|i| b * BLOCK + i < vocab) {
                let (k, e) = (b * BLOCK + i, e[b * BLOCK + i]);
                let added = u.0[i] * scale;
                has_rival |= added * rival_threshold > e;
                let t = 1.0 / (e * (e + added));
                if k != x {
                    (expected_w.0[i], expected_d.0[i]) = (e * t, added * t);
                }
            }
            let at = format!("{level:?}, V = {vocab}, block {b}");
            assert_eq!(bits(&w[b].0), bits(&expected_w.0), "w, {at}");
            assert_eq!(bits(&d[b].0), bits(&expected_d.0), "d, {at}");
            let expected = BlockSums {
                has_rival,
                weight: f64::from(fold(&expected_w.0, |a, b| a + b)),
                excess: f64::from(fold(&expected_d.0, |a, b| a + b)),
                largest: fold(&expected_d.0, f32::max),
            };
            assert_eq!(sums[b], expected, "{at}");
        }
        for (a, g) in [(1e-6f32, 1e-9f32), (3e-7, 1e-6), (1e-6, 0.0)] {
            let terms = |b: usize| (0..BLOCK).map(move |i| (b, i));
            let term = |(b, i): (usize, usize)| f32::max(0.0, d[b].0[i] * a - w[b].0[i] * g);
            let block = |b| f64::from(fold(&terms(b).map(term).collect::<Vec<f32>>(), |a, b| a + b));
            let expected: f64 = (0..w.len()).map(block).fold(0.0, |sum, block| sum + block);
            assert_eq!(kernels::surplus(level, &w, &d, a, g).to_bits(), expected.to_bits(), "{level:?}, V = {vocab}");
        }
    });
}

#[test]
fn the_k_largest() {
    for_all(|level, vocab, logits, _| {
        let mut softmax = Softmax::at_level(vocab, level).unwrap();
        softmax.load(logits).unwrap();
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        for k in [1, 2, 15, 16, 17, 64, 1000, vocab, vocab + 1] {
            let expected: Vec<(u32, f32)> =
                sorted.iter().take(k).map(|&(i, l)| (i, softmax.logprob(l) as f32)).collect();
            assert_eq!(top_k_of_loaded(&softmax, logits, k), expected, "{level:?}, V = {vocab}, k = {k}");
        }
    });
}
