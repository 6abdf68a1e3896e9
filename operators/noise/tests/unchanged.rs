//! Pins the encoder's output with hashes from before its passes were optimised.
//!
//! A change of a pass that changes a hash changes what the same job writes. The rows use multiplications only, because
//! a logarithm of the C library depends on the CPU.

#![allow(clippy::unwrap_used)] // applies to the tests' helpers too

use stillhouse_noise::{
    DrawKey, Encoder, Extract, ExtractionSpec, Level, NoiseForm, NoiseStream, ObservedTokens, RowExtractor, Softmax,
    Tolerance, ValueType, dense_noise, keyed_uniforms, splitmix64, top_k,
};

/// Vocabularies: tiny, around a block of 1,024, and sizes that are no multiple of the block.
const VOCABULARIES: [usize; 9] = [1, 2, 5, 63, 1000, 1024, 1025, 3001, 50_257];

const SHAPES: u32 = 8;

fn power(base: f64, exponent: u32) -> f64 {
    (0..exponent).fold(1.0, |product, _| product * base)
}

/// Logits of eight shapes: flat, mild, peaked, Zipf-like, a range where p underflows, ties, excluded entries, two
/// tokens that share the mass.
fn row(vocab: usize, seed: u64, shape: u32) -> Vec<f32> {
    let mut u = keyed_uniforms(seed, "unchanged", vocab as u64, shape);
    let logit = |k: usize| {
        let v = u.next_f64();
        let value = match shape {
            0 => 0.0,
            1 => v * 4.0,
            2 => power(v, 40) * 30.0,
            3 => 1.0 / (0.02 + v) + power(v, 3) - 40.0, // a few likely ones and a long tail
            4 => v * 2000.0 - 1000.0,
            5 => f64::from((v * 4.0) as u32) * if k.is_multiple_of(2) { 1.0 } else { -0.0 },
            6 if v < 0.5 && k > 0 => f64::from(f32::MIN), // practically −∞
            6 => v * 9.0,
            _ if k == vocab / 2 || k == vocab / 3 => 16.0 + v / 100.0,
            _ => v,
        };
        value as f32
    };
    (0..vocab).map(logit).collect()
}

/// Running hash of the added values, in order.
struct Hash(u64);

impl Hash {
    fn add(&mut self, bits: u64) {
        self.0 = splitmix64(self.0 ^ bits);
    }
}

/// Tokens of different likelihood: the most likely, a less likely one, and the last of the vocabulary.
fn tokens(logits: &[f32]) -> [u32; 3] {
    let best = top_k(logits, 4).unwrap();
    [best[0].0, best[best.len() - 1].0, logits.len() as u32 - 1]
}

fn encodings(level: Level, shape: u32) -> u64 {
    let mut hash = Hash(u64::from(shape));
    for vocab in VOCABULARIES {
        for (tolerance, value_type, condition) in [
            (1e-3, ValueType::F16, true),
            (1e-2, ValueType::F16, false),
            (2e-4, ValueType::F16, true),
            (1e-5, ValueType::F32, true),
        ] {
            let encoder = Encoder::at_level(vocab, Tolerance::new(tolerance).unwrap(), value_type, level).unwrap();
            let mut encoder = encoder.with_condition(condition);
            for seed in 0..if vocab > 10_000 { 1 } else { 4 } {
                let logits = row(vocab, seed, shape);
                for x in tokens(&logits) {
                    let stream = NoiseStream::new(DrawKey::new(17, seed as u32 % 2), seed << 33 | 5, x ^ 3);
                    let mut corrections = Vec::new();
                    match encoder.encode(&logits, x, &stream, &mut corrections) {
                        Ok(encoded) => {
                            hash.add(u64::from(encoded.logprob.to_bits()));
                            hash.add(encoded.total_variation.to_bits());
                        }
                        Err(_) => hash.add(1),
                    }
                    for c in &corrections {
                        hash.add(u64::from(c.index) << 32 | u64::from(c.logprob.to_bits()));
                    }
                }
            }
        }
    }
    hash.0
}

#[rustfmt::skip]
const ENCODINGS: [u64; SHAPES as usize] = [
    0x4c99_9cd7_fe29_55d5, 0x5d54_db84_4bc5_d250, 0x2c52_6ed6_c5e1_125e, 0x873a_be20_0eec_0c6a,
    0x667d_c344_5d1b_18e2, 0x0eb5_6357_08ac_d997, 0xf936_3293_24db_bff2, 0xe4af_d9a8_181b_ad21,
];

#[test]
fn every_level_encodes_the_bytes_it_encoded_before() {
    for level in Level::available().into_iter().flatten() {
        let got: Vec<u64> = (0..SHAPES).map(|shape| encodings(level, shape)).collect();
        assert_eq!(got, ENCODINGS, "{level:?}: {got:#x?}");
    }
}

#[rustfmt::skip]
const ROWS: [u64; SHAPES as usize] = [
    0x9f0b_91d2_e70a_3e47, 0x90bd_fc8a_1992_27cd, 0x3468_b3ef_237f_af4e, 0x8a74_225d_e0d0_3fe7,
    0xb2a1_c331_c37a_00bf, 0x3883_69bf_bf67_3d01, 0x4d8a_9464_21fe_fc67, 0xf176_0ee4_e89c_ec52,
];

/// Top-k, dense noise, and the whole CPU extraction of a slice keep their bits.
#[test]
fn rows_are_as_they_were_before() {
    let got: Vec<u64> = (0..SHAPES).map(rows).collect();
    assert_eq!(got, ROWS, "{got:#x?}");
}

fn rows(shape: u32) -> u64 {
    let mut hash = Hash(u64::from(shape));
    for vocab in VOCABULARIES {
        let logits = row(vocab, 7, shape);
        for k in [0, 1, 8, 64, 1500] {
            for (token, logprob) in top_k(&logits, k).unwrap() {
                hash.add(u64::from(token) << 32 | u64::from(logprob.to_bits()));
            }
        }
        let x = tokens(&logits)[1];
        let mut noise = vec![0f32; vocab];
        let stream = NoiseStream::new(DrawKey::new(3, 0), 1 << 40, 9);
        dense_noise(&mut Softmax::new(vocab).unwrap(), &logits, x, &stream, &mut noise).unwrap();
        noise.iter().for_each(|xi| hash.add(u64::from(xi.to_bits())));

        let noise = NoiseForm::Replay { tolerance: Tolerance::default(), value_type: ValueType::F16, condition: true };
        let spec =
            ExtractionSpec { vocab, keys: DrawKey::draws(11, 2), noise: Some(noise), signals: Default::default() };
        let observed = ObservedTokens { tokens: &[x, 0], positions: &[4, 5], sequence_ids: &[6, 1 << 35] };
        let two = [logits, row(vocab, 8, shape)].concat();
        let out = RowExtractor::new(spec).unwrap().extract(&two, &observed).unwrap();
        out.logprob.iter().for_each(|l| hash.add(u64::from(l.to_bits())));
        let replay = out.replay.unwrap();
        let top_of_each = two.chunks(vocab).flat_map(|logits| top_k(logits, 3.min(vocab)).unwrap());
        let (best, logprobs): (Vec<u32>, Vec<f32>) = top_of_each.unzip();
        replay.counts.iter().chain(&replay.indices).chain(&best).for_each(|&i| hash.add(u64::from(i)));
        replay.logprobs.iter().chain(&logprobs).for_each(|l| hash.add(u64::from(l.to_bits())));
        [replay.max_total_variation, replay.mean_total_variation].iter().for_each(|tv| hash.add(tv.to_bits()));
    }
    hash.0
}
