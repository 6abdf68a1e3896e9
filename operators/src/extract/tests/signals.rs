//! Tests that the other signals equal their definition at predicted positions, and those of a one-hot p at certain
//! ones.

use stillhouse_noise::{LoadedRow, RowSignals};
use stillhouse_signals::{Candidates, Entropy, LogPartitions, SampledLogits, TopP, certain, requested};

use super::super::signals::check;
use super::*;

fn asking(power: f64) -> JobSignals {
    vec![
        Arc::new(LogPartitions { temperatures: vec![1.0, 2.0] }),
        Arc::new(Entropy),
        Arc::new(Candidates { tokens: vec![5, 3] }),
        Arc::new(SampledLogits { draws: 20, power, seed: 7 }),
        Arc::new(TopP { mass: 0.8, max_entries: 9 }),
    ]
}

fn with(signals: JobSignals, noise: Option<NoiseConfig>, rows: RowLength) -> ExtractConfig {
    ExtractConfig { signals, ..config(TeacherContext::Sequence, noise, 0, rows) }
}

/// Compares within the last digits of an f32: a device sums in another order.
fn alike(a: &RowSignals, b: &RowSignals) -> bool {
    let near = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= 4.0 * f32::EPSILON * (1.0 + b.abs());
    let same = |(a, b): (&Values, &Values)| {
        a.len() == b.len() && a.u32s() == b.u32s() && a.f32s().iter().zip(b.f32s()).all(near)
    };
    a.len() == b.len() && a.iter().zip(b).all(same)
}

#[test]
fn columns_hold_the_signals_of_every_position() {
    let data = [(vec![BOS, 3, 4, 5, 9, 0, 0], vec![0], 5), (vec![8, 8, 1], vec![0], 3)];
    let rows = RowLength::UpTo(7);
    for (place, power, noise) in [
        (Place::Cpu, 1.0, None),
        (Place::Cpu, 0.8, noise(NoiseCodec::Replay, 2, 1e-3)),
        (Place::Cpu, 1.0, noise(NoiseCodec::Dense, 1, 1e-3)),
        (Place::Device, 1.0, None),
        (Place::Device, 0.8, noise(NoiseCodec::Replay, 2, 1e-3)),
    ] {
        let config = with(asking(power), noise, rows);
        let (out, _) = run(place, &config, &batch(rows, &data, PackMode::Pad));
        let names: Vec<String> = out.schema().fields().iter().map(|f| f.name().clone()).collect();
        assert_eq!(names.contains(&columns::SAMPLED_RATIO.to_owned()), power != 1.0);
        let mut violations = Vec::new();
        check(&config, &out, &mut violations).unwrap();
        assert_eq!(violations, []);
        let (stored, misfits) = StoredSignals::of(&config.signals, &out).unwrap();
        assert_eq!(misfits, []);
        let asked = requested(&config.signals);
        for (row, (tokens, _, valid)) in data.iter().enumerate() {
            for (position, token) in tokens.iter().enumerate() {
                let is_certain = position >= *valid || (position == 0 && *token == BOS);
                let expected = if is_certain {
                    certain(&config.signals, *token)
                } else {
                    let logits = logits_at(tokens, position);
                    let mut softmax = Softmax::new(VOCAB).unwrap();
                    softmax.load(&logits).unwrap();
                    asked.compute(&LoadedRow::new(&softmax, &logits, (5 << 32) + row as u64, position as u32))
                };
                let (got, at) = (stored.at(row, position), format!("row {row} position {position}"));
                match place {
                    Place::Cpu => assert_eq!(got, expected, "{at}"),
                    Place::Device => assert!(alike(&got, &expected), "{at}: {got:?}, the CPU has {expected:?}"),
                }
            }
        }
    }
}

#[test]
fn a_row_is_shown_in_words() {
    let rows = RowLength::Fixed(3);
    let config = with(asking(1.0), None, rows);
    let (out, _) = run(Place::Cpu, &config, &batch(rows, &[(vec![8, 8, 1], vec![0], 3)], PackMode::Wrap));
    let view = crate::config::OperatorConfig::view(&config, &out).unwrap().unwrap();
    let said: Vec<String> = view.facts.iter().map(|(what, value)| format!("{what}: {value}")).collect();
    assert!(said.iter().any(|fact| fact.starts_with("mean entropy: ") && fact.contains("equally likely")), "{said:?}");
    assert!(said.iter().any(|fact| fact.starts_with("sampled logits: 20 draws")), "{said:?}");
    assert_eq!(view.tokens.len(), 3);
    assert!(view.tokens[0].starts_with("logz ") && view.tokens[0].contains(" · H "), "{:?}", view.tokens);
    let none = with(Vec::new(), None, rows);
    assert_eq!(crate::config::OperatorConfig::view(&none, &out).unwrap(), None);
}

/// BOS at the start and padding at the end are certain; including them would pull every mean towards 0.
#[test]
fn means_and_strips_are_of_predicted_positions() {
    let rows = RowLength::Fixed(5);
    let mut signals: JobSignals = vec![Arc::new(TopK { k: 2 })];
    signals.extend(asking(1.0));
    let config = with(signals, None, rows);
    let (out, _) = run(Place::Cpu, &config, &batch(rows, &[(vec![BOS, 8, 1, 0, 0], vec![0], 3)], PackMode::Pad));
    let stored = StoredSignals::read(&config.signals, &out).unwrap();
    let column =
        |name: &str| out.schema().index_of(name).unwrap() - out.schema().index_of(columns::TOPK_INDEX).unwrap();
    let [entropy, sampled, tail] = [columns::ENTROPY, columns::SAMPLED_INDEX, columns::TOP_P_TAIL].map(column);
    let view = crate::config::OperatorConfig::view(&config, &out).unwrap().unwrap();
    let mean = |of: &dyn Fn(&RowSignals) -> f64| (of(&stored.at(0, 1)) + of(&stored.at(0, 2))) / 2.0;
    let nats = mean(&|s| f64::from(s[entropy].f32s()[0]));
    let distinct = mean(&|s| s[sampled].len() as f64);
    for (name, value) in [
        ("predicted by the teacher", "2 of 5 positions".to_owned()),
        ("mean entropy", format!("{nats:.3} nat, as of {:.1} equally likely tokens", nats.exp())),
        ("sampled logits", format!("20 draws, {distinct:.1} distinct on average")),
        ("mass outside of top-p", format!("{:.4} on average", mean(&|s| f64::from(s[tail].f32s()[0]).exp()))),
    ] {
        assert!(view.facts.contains(&(name.to_owned(), value.clone())), "{name}: {value} of {:?}", view.facts);
    }
    // one strip per column and for each temperature and candidate, each with a line for the terminal
    let (temperatures, candidates) = (2, 2);
    let expected = temperatures + candidates + ["top-k", "entropy", "sampled", "top-p", "tail"].len();
    assert_eq!(view.pictures.len(), expected);
    assert_eq!(view.facts.iter().filter(|(name, _)| name.is_empty()).count(), expected);
    for picture in &view.pictures {
        let Chart::Strip { title, low, high, values } = picture else { panic!("{picture:?}") };
        assert_eq!(
            values.iter().map(Option::is_some).collect::<Vec<_>>(),
            [false, true, true, false, false],
            "{title}"
        );
        assert!(values.iter().flatten().all(|v| (low - 1e-6..=high + 1e-6).contains(v)), "{picture:?}");
    }
}

/// Every signal alone marks exactly the positions that nothing is predicted of as certain.
#[test]
fn each_signal_alone_is_certain_where_nothing_is_predicted() {
    let rows = RowLength::Fixed(4);
    let data = [(vec![BOS, 3, 0, 0], vec![0], 2)];
    for alone in asking(0.8) {
        let config = with(vec![alone], None, rows);
        let (out, _) = run(Place::Cpu, &config, &batch(rows, &data, PackMode::Pad));
        let stored = StoredSignals::read(&config.signals, &out).unwrap();
        for (position, token) in data[0].0.iter().enumerate() {
            let certain = stored.is_certain(0, position, *token);
            assert_eq!(certain, position != 1, "{:?}, position {position}", config.signals);
        }
    }
}
