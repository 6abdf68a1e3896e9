//! Tests that the other signals equal their definition at predicted positions, and those of a one-hot p at certain
//! ones.

use stillhouse_noise::{RowSignals, signals_of_loaded};

use super::super::signals::check;
use super::*;

fn asking(power: f64) -> SignalsConfig {
    SignalsConfig {
        logz_temperatures: vec![1.0, 2.0],
        entropy: true,
        candidates: vec![5, 3],
        samples: Some(SamplesConfig { draws: 20, power, seed: 7 }),
        top_p: Some(TopPConfig { mass: 0.8, most: 9 }),
    }
}

fn with(signals: SignalsConfig, noise: Option<NoiseConfig>, rows: RowLength) -> ExtractConfig {
    ExtractConfig { signals, ..config(TeacherContext::Sequence, noise, 0, rows) }
}

/// Compares within the last digits of an f32: a device sums in another order.
fn alike(a: &RowSignals, b: &RowSignals) -> bool {
    let near = |(a, b): (f32, f32)| a == b || (a - b).abs() <= 4.0 * f32::EPSILON * (1.0 + b.abs());
    let all = |a: Vec<f32>, b: Vec<f32>| a.len() == b.len() && a.into_iter().zip(b).all(near);
    let reals = |row: &RowSignals| {
        let of_lists = row.sampled.iter().map(|s| s.ratio).chain(row.top_p.iter().map(|entry| entry.1));
        row.logz.iter().chain(&row.candidates).copied().chain(of_lists).chain([row.entropy, row.tail]).collect()
    };
    let entries = |row: &RowSignals| {
        let kept = row.top_p.iter().map(|entry| (entry.0, 0));
        row.sampled.iter().map(|s| (s.index, s.count)).chain(kept).collect::<Vec<_>>()
    };
    entries(a) == entries(b) && all(reals(a), reals(b))
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
        let asked = config.signals.asked();
        for (row, (tokens, _, valid)) in data.iter().enumerate() {
            for (position, token) in tokens.iter().enumerate() {
                let certain = position >= *valid || (position == 0 && *token == BOS);
                let expected = if certain {
                    asked.one_hot(*token)
                } else {
                    let logits = logits_at(tokens, position);
                    let mut softmax = Softmax::new(VOCAB).unwrap();
                    softmax.load(&logits).unwrap();
                    signals_of_loaded(&asked, &softmax, &logits, (5 << 32) + row as u64, position as u32)
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
    let none = with(SignalsConfig::default(), None, rows);
    assert_eq!(crate::config::OperatorConfig::view(&none, &out).unwrap(), None);
}

/// BOS at the start and padding at the end are certain; including them would pull every mean towards 0.
#[test]
fn means_and_strips_are_of_predicted_positions() {
    let rows = RowLength::Fixed(5);
    let config = ExtractConfig { topk: 2, ..with(asking(1.0), None, rows) };
    let (out, _) = run(Place::Cpu, &config, &batch(rows, &[(vec![BOS, 8, 1, 0, 0], vec![0], 3)], PackMode::Pad));
    let (stored, _) = StoredSignals::of(&config.signals, &out).unwrap();
    let view = crate::config::OperatorConfig::view(&config, &out).unwrap().unwrap();
    let mean = |of: &dyn Fn(&RowSignals) -> f64| (of(&stored.at(0, 1)) + of(&stored.at(0, 2))) / 2.0;
    let nats = mean(&|s| f64::from(s.entropy));
    let distinct = mean(&|s| s.sampled.len() as f64);
    for (name, value) in [
        ("predicted by the teacher", "2 of 5 positions".to_owned()),
        ("mean entropy", format!("{nats:.3} nat, as of {:.1} equally likely tokens", nats.exp())),
        ("sampled logits", format!("20 draws, {distinct:.1} distinct on average")),
        ("mass outside of top-p", format!("{:.4} on average", mean(&|s| f64::from(s.tail).exp()))),
    ] {
        assert!(view.facts.contains(&(name.to_owned(), value.clone())), "{name}: {value} of {:?}", view.facts);
    }
    // one strip per column and for each temperature and candidate, each with a line for the terminal
    let asked = config.signals.asked();
    let expected =
        asked.temperatures.len() + asked.candidates.len() + ["top-k", "entropy", "sampled", "top-p", "tail"].len();
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

#[test]
fn signals_that_are_not_asked_for_are_no_rows() {
    let config = with(asking(0.5), None, RowLength::Fixed(3));
    assert_ne!(RowSignals::default(), config.signals.asked().one_hot(0));
}

/// Signals that are not requested are equal everywhere, so that `verify` can compare whole positions.
#[test]
fn each_signal_alone_is_certain_where_nothing_is_predicted() {
    let (rows, all) = (RowLength::Fixed(4), asking(0.8));
    let data = [(vec![BOS, 3, 0, 0], vec![0], 2)];
    let none = SignalsConfig::default;
    for alone in [
        SignalsConfig { logz_temperatures: all.logz_temperatures.clone(), ..none() },
        SignalsConfig { entropy: true, ..none() },
        SignalsConfig { candidates: all.candidates.clone(), ..none() },
        SignalsConfig { samples: all.samples.clone(), ..none() },
        SignalsConfig { top_p: all.top_p.clone(), ..none() },
    ] {
        let config = with(alone, None, rows);
        let (out, _) = run(Place::Cpu, &config, &batch(rows, &data, PackMode::Pad));
        let (stored, _) = StoredSignals::of(&config.signals, &out).unwrap();
        for (position, token) in data[0].0.iter().enumerate() {
            let certain = stored.at(0, position) == config.signals.asked().one_hot(*token);
            assert_eq!(certain, position != 1, "{:?}, position {position}", config.signals);
        }
    }
}
