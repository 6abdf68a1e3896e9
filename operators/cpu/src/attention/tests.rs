use super::*;

fn wave(n: usize, seed: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.73 + seed).sin() * 2.0 + (i as f32 * 0.011).cos()).collect()
}

/// Heads whose rows are `group` queries, a key and a value, concatenated.
fn heads(numbers: &[f32], group: usize, dim: usize, window: Option<usize>, soft_cap: Option<f32>) -> Heads<'_> {
    let (keys, values) = (&numbers[group * dim..], &numbers[(group + 1) * dim..]);
    Heads { queries: numbers, keys, values, stride: (group + 2) * dim + 3, group, dim, scale: 0.4, soft_cap, window }
}

/// Reference attention in f64: softmax over the keys that the position sees.
fn by_definition(heads: &Heads<'_>, position: usize, head: usize) -> Vec<f64> {
    let wide = |from: &[f32]| from.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let row = |of: &[f32], position: usize| wide(&of[position * heads.stride..][..heads.dim]);
    let query = row(&heads.queries[head * heads.dim..], position);
    let from = heads.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let weights: Vec<f64> = (from..=position)
        .map(|key| {
            let score = query.iter().zip(row(heads.keys, key)).map(|(q, k)| q * k).sum::<f64>();
            let score = score * f64::from(heads.scale);
            heads.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
        })
        .collect();
    let total: f64 = weights.iter().sum();
    let mut out = vec![0.0; heads.dim];
    for (weight, key) in weights.iter().zip(from..) {
        out.iter_mut().zip(row(heads.values, key)).for_each(|(out, v)| *out += weight * v / total);
    }
    out
}

#[test]
fn every_level_computes_attention() {
    for (group, dim, length, window, soft_cap) in [
        (3, 64, 200, None, None),
        (1, 8, 70, Some(5), None),
        (2, 20, 130, Some(64), Some(5.0)),
        (4, 80, 33, None, Some(2.0)),
        (1, 128, 1, None, None),
        (5, 33, 150, Some(1), None),
        (2, 40, 1000, Some(90), None),
    ] {
        let numbers = wave(length * ((group + 2) * dim + 3), 0.1);
        let heads = heads(&numbers, group, dim, window, soft_cap);
        let levels = Level::all(Arithmetic::F32).into_iter().map(|level| (level, 2e-5));
        for (level, tolerance) in levels.chain(Level::all(Arithmetic::Bf16).into_iter().map(|level| (level, 0.1))) {
            let stride = group * dim + 1;
            let (mut out, mut scratch) = (vec![f32::NAN; length * stride], AttentionScratch::default());
            attention_at(level, &heads, 0..length, &mut out, stride, &mut scratch).unwrap();
            for (position, head) in (0..length).flat_map(|p| (0..group).map(move |h| (p, h))) {
                let got = &out[position * stride + head * dim..][..dim];
                let off = got.iter().zip(by_definition(&heads, position, head));
                let off = off.map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
                assert!(
                    off < tolerance,
                    "{level:?}, {group} x {dim}, {window:?}, {soft_cap:?}: {position} is off by {off}"
                );
            }
            let between = out.chunks_exact(stride).all(|row| row[group * dim].is_nan());
            assert!(between, "floats between rows stay as they are");
        }
    }
}

#[test]
fn a_row_depends_on_its_run_up_to_itself_only() {
    let (group, dim, length) = (3, 24, 300);
    let numbers = wave(length * ((group + 2) * dim + 3), 0.7);
    for window in [None, Some(100), Some(64), Some(7)] {
        for level in Level::all(Arithmetic::F32).into_iter().chain(Level::all(Arithmetic::Bf16)) {
            let run = |numbers: &[f32], cuts: &[usize]| {
                let (heads, width) = (heads(numbers, group, dim, window, None), group * dim);
                let (mut out, mut scratch) = (vec![0.0; length * width], AttentionScratch::default());
                for cut in cuts.windows(2) {
                    let out = &mut out[cut[0] * width..];
                    attention_at(level, &heads, cut[0]..cut[1], out, width, &mut scratch).unwrap();
                }
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let all = run(&numbers, &[0, length]);
            assert_eq!(all, run(&numbers, &[0, 1, 17, 64, 200, 201, length]), "{level:?} {window:?}");
            let mut changed = numbers.clone();
            changed[170 * ((group + 2) * dim + 3)..].iter_mut().for_each(|x| *x = 1e4 - *x);
            let until = 170 * group * dim;
            assert_eq!(all[..until], run(&changed, &[0, length])[..until], "{level:?} {window:?}");
            assert_ne!(all[until..], run(&changed, &[0, length])[until..]);
        }
    }
}

#[test]
fn a_score_that_is_no_number_stays_one() {
    let mut numbers = wave(40 * 27, 0.2);
    numbers[20 * 27 + 8] = f32::NAN;
    let (mut out, heads) = (vec![0.0; 40 * 8], heads(&numbers, 1, 8, None, None));
    attention(&heads, 0..40, Arithmetic::F32, &mut out, 8, &mut AttentionScratch::default()).unwrap();
    assert!(out[..20 * 8].iter().all(|x| x.is_finite()) && out[20 * 8..].iter().all(|x| x.is_nan()));
}

#[test]
fn memory_that_is_too_short_is_refused() {
    let numbers = wave(40 * 27, 0.2);
    let (mut out, heads) = (vec![0.0; 40 * 8], heads(&numbers, 1, 8, None, None));
    let run = |positions, out: &mut [f32]| {
        attention(&heads, positions, Arithmetic::F32, out, 8, &mut AttentionScratch::default())
    };
    assert!(matches!(run(0..41, &mut out), Err(ProductError::Memory { what: "the queries", .. })));
    assert!(matches!(run(0..40, &mut out[1..]), Err(ProductError::Memory { what: "out", .. })));
    assert_eq!((run(0..0, &mut []), run(3..40, &mut out[24..])), (Ok(()), Ok(())));
}
