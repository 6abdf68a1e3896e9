use super::*;
use crate::registry::job_format;
use crate::testing::job_with;

fn config(rule: OrderRule) -> OrdersConfig {
    OrdersConfig { rule, seed: 42, rows: RowLength::Fixed(8) }
}

fn schedule(i_ar_sequences: u64, i_perm_sequences: u64, rho_max: u32) -> OrderSchedule {
    OrderSchedule { i_ar_sequences, i_perm_sequences, rho_max, bytes_per_sequence: None, sequences_per_split: None }
}

fn rules() -> Vec<OrderRule> {
    let schedule = schedule(5, 20, 6);
    vec![
        OrderRule::Progressive(Shuffled::Rho(4)),
        OrderRule::Progressive(Shuffled::Schedule(schedule)),
        OrderRule::Strided(vec![1, 2, 4]),
        OrderRule::Strided(vec![3]),
        OrderRule::Random(3),
        OrderRule::Random(1),
    ]
}

/// The example of METHODS.md §5, which counts from 1; this test counts from 0.
#[test]
fn strided_orders_are_those_of_the_paper() {
    let found = generation_order(&config(OrderRule::Strided(vec![2])), 9, 0, 8, 8);
    assert_eq!(found.order, [0, 4, 1, 5, 2, 6, 3, 7]);
    assert_eq!(found.block, [1, 2, 3, 3, 4, 4, 5, 5]);
    // streams of unequal length, and padding
    let found = generation_order(&config(OrderRule::Strided(vec![3])), 9, 0, 10, 8);
    assert_eq!(found.order, [0, 3, 6, 1, 4, 7, 2, 5, 8, 9]);
    assert_eq!(found.block, [1, 2, 3, 4, 4, 4, 5, 5, 6, 6]);
    // more streams than tokens: one token at a time
    let found = generation_order(&config(OrderRule::Strided(vec![9])), 9, 0, 4, 3);
    assert_eq!((found.order, found.block), (vec![0, 1, 2, 3], vec![1, 2, 3, 4]));
}

/// Checks the masking steps directly: τ = T − B + 1 falls along the order, and equal steps are sorted by position.
#[test]
fn random_masking_sorts_by_step() {
    for id in 0..200 {
        let found = generation_order(&config(OrderRule::Random(3)), id, 0, 8, 6);
        assert_eq!((&found.order[6..], &found.block[6..]), (&[6, 7][..], &[4, 4][..]));
        for n in 1..6 {
            let (before, here) = (found.block[n - 1], found.block[n]);
            assert!(before < here || (before == here && found.order[n - 1] < found.order[n]));
            assert!((1..=3).contains(&here));
        }
    }
}

/// A token never attends to its own or a later block: all pairs, all rules.
#[test]
fn the_strictly_causal_property_by_brute_force() {
    for rule in rules() {
        for (length, valid) in [(1, 1), (2, 1), (5, 0), (8, 8), (8, 5), (7, 7)] {
            for id in [0, 3, 17, (4 << 32) | 2, (9 << 32) | 7] {
                let found = generation_order(&config(rule.clone()), id, (id >> 32) * 10 + (id & 0xFFFF), length, valid);
                let mut positions = found.order.clone();
                positions.sort_unstable();
                assert_eq!(positions, (0..length as u32).collect::<Vec<_>>(), "a permutation");
                assert!(found.block.is_sorted() && found.block.first().is_none_or(|&first| first >= 1));
                assert!(found.order[..valid].iter().all(|&position| (position as usize) < valid), "padding last");
                assert!(found.order[valid..].is_sorted());
                for query in 0..valid {
                    for key in 0..length {
                        let seen = found.block[key] < found.block[query];
                        // what is visible was generated before it and is not padding
                        assert!(!seen || (key < query && key < valid));
                    }
                }
                let last = found.block[..valid].last().copied().unwrap_or(0);
                let padding = if let OrderRule::Random(steps) = rule { steps + 1 } else { last + 1 };
                assert!(found.block[valid..].iter().all(|&block| block == padding && block > last));
            }
        }
    }
}

#[test]
fn rho_follows_the_schedule_by_the_place_in_the_data_set() {
    let schedule = schedule(9_000, 48_000, 32);
    // values of `views.armd.OWT.rho`
    for (at, rho) in [
        (0, 0),
        (8_999, 0),
        (9_000, 1),
        (10_258, 1),
        (10_259, 2),
        (28_500, 16),
        (47_999, 31),
        (48_000, 32),
        (u64::MAX, 32),
    ] {
        assert_eq!(schedule.rho(at), rho, "{at}");
    }
    let id = |split: u64, row: u64| split << 32 | row;
    let config = config(OrderRule::Progressive(Shuffled::Schedule(schedule)));
    let moved = |id, place| {
        let found = generation_order(&config, id, place, 1024, 1024);
        found.order.iter().enumerate().filter(|(n, p)| *n != **p as usize).count()
    };
    assert_eq!(moved(id(0, 5), 5), 0);
    assert!(moved(id(0, 9_999), 9_999) <= 1 && (20..=32).contains(&moved(id(5, 3), 50_003)));
    // the index of a sequence: from the split's planned range, or as earlier versions counted it
    let planned = Some(SequenceRange { first: 20_000, sequences: 100 });
    assert_eq!(
        [3, 99, 100, 1 << 20].map(|row| schedule.position_of(id(3, row), planned)),
        [20_003, 20_099, 20_099, 20_099].map(Some)
    );
    assert_eq!(schedule.position_of(id(3, 7), None), None);
    let counted = OrderSchedule { sequences_per_split: Some(10_000), ..schedule };
    assert_eq!(counted.position_of(id(3, 7), planned), Some(30_007));
    // equal ends: a step
    let step = self::schedule(4, 4, 3);
    assert_eq!((step.rho(3), step.rho(4)), (0, 3));
}

#[test]
fn a_growing_rho_adds_places() {
    for id in 0..50 {
        let of = |rho| generation_order(&config(OrderRule::Progressive(Shuffled::Rho(rho))), id, 0, 64, 60);
        assert_eq!(of(1), of(0));
        let places = |rho| -> Vec<usize> {
            of(rho).order.iter().enumerate().filter(|(n, p)| *n != **p as usize).map(|(n, _)| n).collect()
        };
        assert!(places(8).len() <= 8);
        assert!(of(1000).order[60..] == [60, 61, 62, 63]);
    }
}

/// Statistics with fixed seeds: all orders of three tokens are equally frequent, all S too, and τ is uniform.
#[test]
fn choices_are_uniform() {
    let draws = 6000u32;
    let expect = |counts: &[u32], kinds: u32| {
        assert_eq!(counts.len() as u32, kinds, "{counts:?}");
        let expected = f64::from(draws) / f64::from(kinds);
        let chi2: f64 = counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        // mean k − 1, and six standard deviations of √(2 (k − 1))
        let freedom = f64::from(kinds - 1);
        assert!(chi2 < freedom + 6.0 * (2.0 * freedom).sqrt(), "{chi2} of {counts:?}");
    };
    let count = |rule: OrderRule, key: fn(&Order) -> Vec<u32>, length: usize| {
        let config = config(rule);
        let mut counts = std::collections::BTreeMap::<Vec<u32>, u32>::new();
        for id in 0..u64::from(draws) {
            *counts.entry(key(&generation_order(&config, id, 0, length, length))).or_default() += 1;
        }
        counts.into_values().collect::<Vec<_>>()
    };
    expect(&count(OrderRule::Progressive(Shuffled::Rho(3)), |o| o.order.clone(), 3), 6);
    expect(&count(OrderRule::Strided(vec![1, 2, 4]), |o| o.block.clone(), 8), 3);
    // the step of the first position, from the block at its place in the order
    let step = |o: &Order| vec![o.block[o.order.iter().position(|&p| p == 0).unwrap()]];
    expect(&count(OrderRule::Random(4), step, 5), 4);
}

/// Parses a rule of the goldens: an object with one key, the kind.
fn rule(named: &serde_json::Value) -> OrderRule {
    let (kind, value) = named.as_object().unwrap().iter().next().unwrap();
    let number = |value: &serde_json::Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    match kind.as_str() {
        "strided" => OrderRule::Strided(value.as_array().unwrap().iter().map(number).collect()),
        "random" => OrderRule::Random(number(value)),
        "progressive" => OrderRule::Progressive(match value.get("rho") {
            Some(rho) => Shuffled::Rho(number(rho)),
            None => Shuffled::Schedule(serde_json::from_value(value["schedule"].clone()).unwrap()),
        }),
        other => panic!("{other}"),
    }
}

/// The goldens come from the Python package: `scripts/view-goldens` calls `stillhouse.views`.
#[test]
fn stored_orders_are_those_that_the_package_draws() {
    let goldens: serde_json::Value = serde_json::from_str(include_str!("../../testdata/views.json")).unwrap();
    let numbers = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
    };
    for case in goldens["orders"].as_array().unwrap() {
        let rule = rule(&case["rule"]);
        let config = OrdersConfig { rule, seed: case["seed"].as_u64().unwrap(), rows: RowLength::Fixed(12) };
        // the golden has the job's seed; the config has that of the epoch
        let config =
            OrdersConfig { seed: epoch_seed(config.seed, case["epoch"].as_u64().unwrap_or(0) as u32), ..config };
        let (id, valid) = (case["sequence_id"].as_u64().unwrap(), case["valid"].as_u64().unwrap() as usize);
        let found = generation_order(&config, id, 0, 12, valid);
        assert_eq!((found.order, found.block), (numbers(&case["order"]), numbers(&case["block"])), "{case}");
    }
}

#[test]
fn long_sequences_have_wide_numbers() {
    let of = |rule, length| OrdersConfig { rule, seed: 0, rows: RowLength::Fixed(length) }.item_type();
    assert_eq!(of(OrderRule::Strided(vec![2]), 65_534), DataType::UInt16);
    assert_eq!(of(OrderRule::Strided(vec![2]), 65_535), DataType::UInt32);
    assert_eq!(of(OrderRule::Random(70_000), 8), DataType::UInt32);
}

#[test]
fn the_keys_of_an_order_are_those_of_its_kind() {
    let problems = |orders: &str| job_format().parse(&job_with(&format!("orders: {orders}"))).problems.to_string();
    for good in [
        "{kind: none}",
        "{kind: progressive, rho: 8}",
        "{kind: progressive, schedule: {i_ar_sequences: 1, i_perm_sequences: 9, rho_max: 3, sequences_per_split: 5}}",
        "{kind: progressive, schedule: {i_ar_sequences: 1, i_perm_sequences: 9, rho_max: 3}, epoch: 2}",
        "{kind: progressive, schedule: {i_ar_sequences: 1, i_perm_sequences: 9, rho_max: 3, bytes_per_sequence: 4000}}",
        "{kind: strided, streams: [1, 2, 4]}",
        "{kind: random, steps: 16}",
    ] {
        assert_eq!(job_format().parse(&job_with(&format!("orders: {good}"))).problems.0, [], "{good}");
    }
    for (bad, says) in [
        ("{rho: 8}", "orders.rho: is for kind progressive, and orders.kind is none"),
        ("{epoch: 1}", "orders.epoch: is for kind progressive, strided or random, and orders.kind is none"),
        (
            "{kind: progressive, schedule: {i_ar_sequences: 1, i_perm_sequences: 9, rho_max: 3, sequences_per_split: 5, bytes_per_sequence: 9}}",
            "orders.schedule.sequences_per_split: got 5: contradicts orders.schedule.bytes_per_sequence",
        ),
        ("{kind: progressive}", "orders.rho: kind progressive needs either rho or schedule"),
        ("{kind: progressive, rho: 2, steps: 4}", "orders.steps: is for kind random"),
        ("{kind: strided, streams: []}", "orders.streams"),
        ("{kind: strided, streams: [2, 0]}", "orders.streams[1]: got 0"),
        ("{kind: random}", "orders.steps: is required for kind random and missing"),
        (
            "{kind: progressive, schedule: {i_ar_sequences: 9, i_perm_sequences: 8, rho_max: 3, sequences_per_split: 5}}",
            "orders.schedule.i_perm_sequences: got 8: before orders.schedule.i_ar_sequences; valid: 9 or more",
        ),
    ] {
        assert!(problems(bad).contains(says), "{bad}: {}", problems(bad));
    }
}

/// Jobs have had this section in their hash since before it was written only if set.
#[test]
fn a_job_without_orders_has_kind_none() {
    let job = job_format().read(&job_with("")).unwrap();
    assert_eq!(job.sections.get(), Ok(Some(OrdersSection::default())));
    assert_eq!(serde_json::to_value(&job).unwrap()["orders"], serde_json::json!({"kind": "none"}));
    let schema = job_format().json_schema();
    assert_eq!(schema["properties"]["orders"]["default"], serde_json::json!({"kind": "none"}));
}
