mod common;
use stillhouse_noise::*;
#[test]
fn stats() {
    let vocab = 1000;
    let mut enc = Encoder::new(vocab, Tolerance::new(1e-3).unwrap(), ValueType::F16).unwrap();
    let t = std::time::Instant::now();
    let (mut n, mut r) = (0, 0);
    'all: for row in 0..100000u64 {
        let logits = common::zipf_logits(vocab, row, 0.8 + 1.5 * (row % 40) as f64 / 40.0);
        for draw in 0..50 {
            if t.elapsed().as_secs() > 40 { break 'all }
            let s = NoiseStream::new(DrawKey::new(9, draw), row, 1);
            let x = common::sample(&logits, f64::from(draw) / 50.0);
            let mut c = Vec::new();
            enc.encode(&logits, x, &s, &mut c).unwrap();
            n += 1;
            r += usize::from(c.windows(2).any(|c| c[0].index == c[1].index));
        }
    }
    println!("STATS {r} of {n}");
}
