//! Tests the walk-through of CONTRIBUTING.md that adds a stored signal: compiles its file and uses the signal.

use super::margin::{COLUMNS, Margin};
use super::*;

const PAGE: &str = include_str!("../../../../CONTRIBUTING.md");
const FILE: &str = include_str!("margin.rs");

#[test]
fn the_page_quotes_the_file() {
    assert!(PAGE.contains(FILE), "CONTRIBUTING.md does not quote operators/signals/src/tests/margin.rs as it is");
}

#[test]
fn a_device_and_the_cpu_give_the_same_margin() {
    for vocab in [1, 2, 500] {
        let logits = random(vocab, 9.0, 6);
        let softmax = loaded(&logits);
        let row = LoadedRow::new(&softmax, &logits, 7, 3);
        let (tokens, logprobs): (Vec<u32>, Vec<f32>) = row.top(Margin.kernel(vocab).top_entries).into_iter().unzip();
        let (mut on_cpu, mut on_device) = (RowSignals::new(), RowSignals::new());
        Margin.compute(&row, &mut on_cpu);
        Margin.read_kernel_output(&[], (&tokens, &logprobs), &mut on_device);
        assert_eq!(on_cpu, on_device);
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let expected = sorted.get(1).map_or(f32::INFINITY, |second| sorted[0] - second);
        assert!((f32_of(&on_cpu, 0) - expected).abs() <= 2e-6 || vocab == 1, "V = {vocab}: {on_cpu:?} {expected}");
        assert_eq!((Margin.check(&on_cpu, vocab), Margin.columns().len()), (None, COLUMNS.len()));
    }
}

#[test]
fn a_margin_that_is_not_the_teachers_is_found() {
    let logits = random(500, 9.0, 6);
    let softmax = loaded(&logits);
    let row = LoadedRow::new(&softmax, &logits, 7, 3);
    let mut expected = RowSignals::new();
    Margin.compute(&row, &mut expected);
    let tolerances = [Tolerances::for_arithmetic(true, "cpu"), Tolerances::other_machine()];
    for (tolerances, error) in tolerances.into_iter().zip([1e-5, 1e-2]) {
        assert_eq!(Margin.compare(&expected, &expected, &row, tolerances), None);
        let got = [Values::F32(vec![f32_of(&expected, 0) + error])];
        assert!(Margin.compare(&got, &expected, &row, tolerances).unwrap().starts_with("margin is "));
    }
    assert!(Margin.check(&[Values::F32(vec![-0.1])], 500).is_some());
    let mut certain = RowSignals::new();
    Margin.certain(3, &mut certain);
    assert_eq!(Margin.check(&certain, 500), None);
}
