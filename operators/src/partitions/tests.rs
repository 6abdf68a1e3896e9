use arrow::array::{AsArray, Int32Array, UInt64Array};
use arrow::datatypes::{Float32Type, Schema};

use super::*;
use crate::registry::job_format;
use crate::testing::{drive, job_with};

const SEQUENCES: u64 = 4000;

fn config(views: u32, sampling: Sampling) -> PartitionsConfig {
    PartitionsConfig::new(
        &PartitionsSection { views, sampling, ..Default::default() },
        20_261_121,
        RowLength::Fixed(64),
    )
}

/// Returns the Kolmogorov–Smirnov distance between the numbers and the uniform distribution, times √n.
fn kolmogorov_smirnov(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let n = numbers.len() as f64;
    let distance =
        numbers.iter().enumerate().map(|(i, &x)| (x - i as f64 / n).abs().max(((i + 1) as f64 / n - x).abs()));
    distance.fold(0.0, f64::max) * n.sqrt()
}

/// Critical value of √n·D at p = 0.001. The seeds are fixed, so the result never changes.
const KS_LIMIT: f64 = 1.95;

fn to_unit(t: f32, eps: f64) -> f64 {
    (f64::from(t) - eps) / (1.0 - 2.0 * eps)
}

#[test]
fn t_is_uniform_between_its_bounds() {
    for sampling in [Sampling::Independent, Sampling::Stratified] {
        for view in [0, 2] {
            let config = config(3, sampling);
            let ts = (0..SEQUENCES).map(|id| partition_row(&config, id, &[true; 8])[view].t);
            let units: Vec<f64> = ts.map(|t| to_unit(t, config.eps)).collect();
            assert!(units.iter().all(|u| (0.0..=1.0).contains(u)));
            let distance = kolmogorov_smirnov(units);
            assert!(distance < KS_LIMIT, "{sampling:?}, view {view}: {distance}");
        }
    }
}

#[test]
fn strata_hold_one_t_each_in_random_order() {
    let config = config(4, Sampling::Stratified);
    let mut first = [0u32; 4];
    let mut within = Vec::new();
    for id in 0..SEQUENCES {
        let scaled: Vec<f64> =
            partition_row(&config, id, &[true; 4]).iter().map(|view| to_unit(view.t, config.eps) * 4.0).collect();
        let mut strata: Vec<usize> = scaled.iter().map(|&s| (s as usize).min(3)).collect();
        first[strata[0]] += 1;
        strata.sort_unstable();
        assert_eq!(strata, [0, 1, 2, 3]);
        within.push(scaled[1].fract());
    }
    let expected = SEQUENCES as f64 / 4.0;
    let chi2: f64 = first.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
    assert!(chi2 < 16.3, "{first:?}"); // p = 0.001 at three degrees of freedom
    assert!(kolmogorov_smirnov(within) < KS_LIMIT);
}

#[test]
fn group_one_has_its_share() {
    for (schedule, power) in
        [(Schedule::Linear, 3.0), (Schedule::Polynomial, 3.0), (Schedule::Polynomial, 0.5), (Schedule::Arccos, 3.0)]
    {
        let config = PartitionsConfig { schedule, power, ..config(2, Sampling::Stratified) };
        // Σ (g_i − p) over all tokens has the variance Σ p(1 − p); allow 4 standard deviations.
        let (mut sum, mut variance, mut by_t) = (0.0, 0.0, [(0.0, 0.0); 5]);
        for id in 0..SEQUENCES {
            for view in partition_row(&config, id, &[true; 256]) {
                let p = group_share(schedule, power, f64::from(view.t));
                // If a group of 256 is empty, it gets one token.
                let repaired = (1.0 - p).powi(256) - p.powi(256);
                let excess = view.groups.iter().filter(|&&g| g).count() as f64 - 256.0 * p - repaired;
                sum += excess;
                variance += 256.0 * p * (1.0 - p);
                let bin = &mut by_t[((view.t * 5.0) as usize).min(4)];
                bin.0 += excess;
                bin.1 += 256.0 * p * (1.0 - p);
            }
        }
        assert!(sum.abs() < 4.0 * variance.sqrt(), "{schedule:?}: {}", sum / variance.sqrt());
        for (excess, variance) in by_t {
            assert!(
                excess.abs() < 4.0 * f64::sqrt(variance).max(20.0),
                "{schedule:?}: {excess} with variance {variance}"
            );
        }
    }
}

#[test]
fn shares_of_the_schedules() {
    assert_eq!(group_share(Schedule::Linear, 3.0, 0.25), 0.25);
    assert_eq!(group_share(Schedule::Polynomial, 3.0, 0.5), 0.875);
    assert_eq!(group_share(Schedule::Polynomial, 1.0, 0.25), 0.25);
    assert_eq!(group_share(Schedule::Polynomial, 0.01, 1.0), 1.0);
    assert_eq!([0.0, 0.5, 1.0].map(|t| (group_share(Schedule::Arccos, 3.0, t) * 3.0).round()), [0.0, 2.0, 3.0]);
}

/// Returns Pearson's correlation of pairs of numbers, times √n: standard normal if they are independent.
fn correlation(pairs: &[(f64, f64)]) -> f64 {
    let n = pairs.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| pairs.iter().map(f).sum::<f64>() / n;
    let (a, b) = (mean(|p| p.0), mean(|p| p.1));
    let covariance = pairs.iter().map(|p| (p.0 - a) * (p.1 - b)).sum::<f64>();
    let spread = |f: fn(&(f64, f64)) -> f64, m: f64| pairs.iter().map(|p| (f(p) - m).powi(2)).sum::<f64>();
    covariance / (spread(|p| p.0, a) * spread(|p| p.1, b)).sqrt() * n.sqrt()
}

#[test]
fn views_sequences_and_positions_are_independent() {
    // Residuals: group minus its expected share.
    let config = config(2, Sampling::Independent);
    let residuals: Vec<Vec<Vec<f64>>> = (0..SEQUENCES)
        .map(|id| {
            let views = partition_row(&config, id, &[true; 32]);
            views.iter().map(|v| v.groups.iter().map(|&g| f64::from(u8::from(g)) - f64::from(v.t)).collect()).collect()
        })
        .collect();
    let between_views: Vec<_> = residuals.iter().flat_map(|r| r[0].iter().copied().zip(r[1].iter().copied())).collect();
    let between_positions: Vec<_> = residuals.iter().map(|r| (r[0][3], r[0][4])).collect();
    let between_sequences: Vec<_> = residuals.windows(2).map(|r| (r[0][1][7], r[1][1][7])).collect();
    for (name, pairs) in [("views", between_views), ("positions", between_positions), ("sequences", between_sequences)]
    {
        let z = correlation(&pairs);
        assert!(z.abs() < 3.3, "{name}: {z}");
    }
    let ts: Vec<_> = (0..SEQUENCES)
        .map(|id| partition_row(&config, id, &[true; 2]))
        .map(|v| (f64::from(v[0].t), f64::from(v[1].t)))
        .collect();
    assert!(correlation(&ts).abs() < 3.3);
}

#[test]
fn no_group_is_empty_and_padding_is_in_none() {
    let config = PartitionsConfig { eps: 0.0, ..config(4, Sampling::Independent) };
    let mut filled = [0u32; 4];
    for id in 0..2000 {
        for length in [2usize, 3, 9] {
            let mask: Vec<bool> = (0..length + 3).map(|i| i < length).collect();
            for view in partition_row(&config, id, &mask) {
                let ones = view.groups.iter().filter(|&&g| g).count();
                assert!(ones > 0 && ones < length, "{ones} of {length}");
                assert!(view.groups[length..].iter().all(|&g| !g));
                if length == 3 && ones == 1 {
                    filled[view.groups.iter().position(|&g| g).unwrap()] += 1;
                }
            }
        }
    }
    assert!(filled[..3].iter().all(|&n| n > 500), "{filled:?}");
    assert_eq!(partition_row(&config, 1, &[false, false])[0].groups, [false, false]);
    assert_eq!(partition_row(&config, 1, &[true, false]).len(), 4);
}

#[test]
fn a_mask_changes_no_other_position() {
    let config = PartitionsConfig { eps: 0.4, ..config(1, Sampling::Independent) };
    for id in 0..200 {
        let all = partition_row(&config, id, &[true; 64]);
        let some = partition_row(&config, id, &[[true; 40].as_slice(), &[false; 24]].concat());
        assert_eq!(all[0].groups[..40], some[0].groups[..40]);
    }
}

#[test]
fn t_stays_in_its_bounds_as_f32() {
    for eps in [0.0, 1e-3, 0.1, 0.3, 0.49] {
        for t in [eps, 1.0 - eps] {
            let stored = f64::from(stored_t(t, eps));
            assert!((eps..=1.0 - eps).contains(&stored), "{stored} for {t}");
        }
    }
}

#[test]
fn columns_hold_the_views_of_each_row() {
    for rows in [RowLength::Fixed(4), RowLength::UpTo(4)] {
        let config = PartitionsConfig { rows, ..config(2, Sampling::Stratified) };
        let mask = [true, true, true, true, true, true, false, false];
        let fields = vec![
            columns::sequence_id(),
            rows.field(columns::INPUT_IDS, DataType::Int32, None, None),
            rows.field(columns::ATTENTION_MASK, DataType::Boolean, None, None),
            columns::list_field(columns::DOCUMENT_OFFSETS, DataType::Int32),
        ];
        let arrays = vec![
            Arc::new(UInt64Array::from(vec![7, 8])) as ArrayRef,
            list_column(&fields[1], Arc::new(Int32Array::from(vec![0; 8])), &[4, 4]).unwrap(),
            list_column(&fields[2], Arc::new(BooleanArray::from(mask.to_vec())), &[4, 4]).unwrap(),
            list_column(&fields[3], Arc::new(Int32Array::from(vec![0, 0])), &[1, 1]).unwrap(),
        ];
        let input = RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap();
        let output = drive(&mut config.build().unwrap(), &[input.clone(), input.slice(1, 1)]).unwrap();
        assert_eq!(output[0].slice(1, 1).columns()[4].to_data(), output[1].columns()[4].to_data());
        assert_eq!(
            output[0].schema().fields()[4..].iter().map(|f| f.as_ref().clone()).collect::<Vec<_>>(),
            config.fields()
        );
        let partitions = ListRows::from_batch(&output[0], columns::PARTITION).unwrap();
        let groups: &BooleanArray = partitions.values("x").unwrap();
        for (row, id) in [7, 8].into_iter().enumerate() {
            let expected = partition_row(&config, id, &mask[4 * row..4 * row + 4]);
            let got: Vec<bool> = partitions.range(row).map(|i| groups.value(i)).collect();
            assert_eq!(got, [expected[0].groups.as_slice(), &expected[1].groups].concat());
            let ts = output[0].column(5).as_fixed_size_list().value(row);
            assert_eq!(ts.as_primitive::<Float32Type>().values()[..], [expected[0].t, expected[1].t]);
        }
    }
}

#[test]
fn known_values_do_not_change() {
    let config = PartitionsConfig { seed: 42, ..config(2, Sampling::Stratified) };
    let views = partition_row(&config, 3 << 32 | 5, &[true; 12]);
    let shown: Vec<(f32, String)> =
        views.iter().map(|v| (v.t, v.groups.iter().map(|&g| if g { '1' } else { '0' }).collect())).collect();
    // From an independent Python version of Philox and of the table in the module's doc.
    assert_eq!(shown, [(0.551_556_8, "011011100101".into()), (0.344_231_07, "110000100000".into())]);
}

fn sequence(id: u64, length: usize, valid: usize) -> crate::extract::Sequence {
    crate::extract::Sequence { id, tokens: vec![0; length], valid, offsets: vec![0] }
}

/// The goldens come from the Python package: `scripts/view-goldens` calls `stillhouse.views`.
#[test]
fn stored_blocks_and_digits_are_those_that_the_package_draws() {
    let goldens: serde_json::Value = serde_json::from_str(include_str!("../../testdata/views.json")).unwrap();
    for case in goldens["partitions"].as_array().unwrap() {
        let spec: PartitionsSection = serde_json::from_value(case["partitions"].clone()).unwrap();
        let config = PartitionsConfig {
            digits: 3,
            ..PartitionsConfig::new(&spec, case["seed"].as_u64().unwrap(), RowLength::Fixed(12))
        };
        let valid = case["valid"].as_u64().unwrap() as usize;
        let views = config.draw_views(&sequence(case["sequence_id"].as_u64().unwrap(), 12, valid));
        let times: Vec<f64> = views.times.iter().map(|&t| f64::from(t)).collect();
        assert_eq!(serde_json::json!(times), case["t"], "{case}");
        let groups: Vec<u8> = views.groups.iter().map(|&group| u8::from(group)).collect();
        assert_eq!(serde_json::json!(groups), case["groups"], "{case}");
    }
}

#[test]
fn blocks_have_times_of_their_own_in_all_strata() {
    let spec =
        PartitionsSection { views: 4, level: PartitionLevel::Block, block_length: Some(3), ..Default::default() };
    let config = PartitionsConfig::new(&spec, 5, RowLength::Fixed(8));
    assert_eq!((config.blocks(), config.t_field().metadata()[columns::SHAPE].as_str()), (3, "[4,3]"));
    let mut all = Vec::new();
    for id in 0..SEQUENCES {
        let views = config.draw_views(&sequence(id, 8, 8));
        for block in 0..3 {
            let of_block = (0..4).map(|view| to_unit(views.times[view * 3 + block], config.eps));
            let mut strata: Vec<usize> = of_block.clone().map(|u| ((u * 4.0) as usize).min(3)).collect();
            strata.sort_unstable();
            assert_eq!(strata, [0, 1, 2, 3]);
            all.extend(of_block.take(1));
        }
    }
    assert!(kolmogorov_smirnov(all) < KS_LIMIT);
}

#[test]
fn groups_of_blocks_and_digits_have_their_share() {
    for (level, block_length) in [(PartitionLevel::Block, Some(4)), (PartitionLevel::Subtoken, None)] {
        let spec = PartitionsSection { views: 2, level, block_length, ..Default::default() };
        let config = PartitionsConfig { digits: 4, ..PartitionsConfig::new(&spec, 11, RowLength::Fixed(16)) };
        let per_token = config.groups_per_token() as usize;
        // Σ (g − p) has the variance Σ p(1 − p); allow 4 standard deviations
        let (mut sum, mut variance) = (0.0, 0.0);
        for id in 0..SEQUENCES {
            let views = config.draw_views(&sequence(id, 16, 13));
            assert_eq!(views.groups.len(), 2 * 16 * per_token);
            for (place, &group) in views.groups.iter().enumerate() {
                let (view, i) = (place / (16 * per_token), place % (16 * per_token) / per_token);
                let t = if block_length.is_some() { views.times[view * 4 + i / 4] } else { views.times[view] };
                if i >= 13 {
                    assert!(!group, "padding");
                    continue;
                }
                let p = f64::from(t);
                sum += f64::from(u8::from(group)) - p;
                variance += p * (1.0 - p);
            }
        }
        assert!(sum.abs() < 4.0 * variance.sqrt(), "{level:?}: {}", sum / variance.sqrt());
    }
}

/// Charts show the stored values: a share per block, a cell per digit, of at most four views.
#[test]
fn pictures_of_blocks_and_digits() {
    let row = |config: &PartitionsConfig| {
        let views = config.draw_views(&sequence(7, 6, 6));
        let (partition, t) = (config.partition_field(), config.t_field());
        let (groups, times) = (views.groups.len(), views.times.len());
        let arrays = [
            list_column(&partition, Arc::new(BooleanArray::from(views.groups.clone())), &[groups]).unwrap(),
            list_column(&t, Arc::new(Float32Array::from(views.times.clone())), &[times]).unwrap(),
        ];
        (views, RecordBatch::try_new(Arc::new(Schema::new(vec![partition, t])), arrays.into()).unwrap())
    };
    let of = |level: PartitionLevel, block_length: Option<u32>, views: u32| {
        let spec = PartitionsSection { views, level, block_length, ..Default::default() };
        let config = PartitionsConfig { digits: 3, ..PartitionsConfig::new(&spec, 1, RowLength::Fixed(6)) };
        let (stored, row) = row(&config);
        (stored, config.view(&row).unwrap())
    };
    let (stored, view) = of(PartitionLevel::Block, Some(4), 2);
    let share = |view: usize| crate::config::Chart::Shares {
        title: format!("t of each block in view {view}"),
        length: 4,
        values: stored.times[2 * view..2 * view + 2].to_vec(),
    };
    assert_eq!(view.unwrap().pictures, [share(0), share(1)]);
    let (stored, view) = of(PartitionLevel::Subtoken, None, 9);
    let pictures = view.unwrap().pictures;
    assert_eq!(pictures.len(), 4);
    let cells: String = stored.groups[18..36].iter().map(|&g| if g { '1' } else { '0' }).collect();
    let title = "digits in group 1 of view 1".to_owned();
    assert_eq!(pictures[1], crate::config::Chart::Grid { title, height: 3, cells });
    assert_eq!(of(PartitionLevel::Token, None, 2).1, None);
}

#[test]
fn the_keys_of_partitions_are_those_of_their_level() {
    for (bad, says) in [
        ("{level: block}", "partitions.block_length: is required for level block and missing"),
        ("{block_length: 4}", "partitions.block_length: got 4: is for level block"),
        ("{level: subtoken}", "partitions.level: got subtoken: needs digits"),
        ("{t_range: [0.3, 0.8]}", "partitions.t_range: got [0.3, 0.8]: is for level block or subtoken"),
        ("{level: block, block_length: 4, t_range: [0.8, 0.3]}", "got [0.8, 0.3]: valid: two numbers from 0 to 1"),
        ("{level: block, block_length: 4, t_range: [0.8, 1.3]}", "partitions.t_range[1]: got 1.3"),
    ] {
        let problems = job_format().parse(&job_with(&format!("partitions: {bad}"))).problems.to_string();
        assert!(problems.contains(says), "{bad}: {problems}");
    }
    let digits = job_with("subtokens: {length: 2}\npartitions: {level: subtoken}");
    assert_eq!(job_format().parse(&digits).problems.0, []);
    let short = digits.replace("{length: 16}", "{length: 16, remainder: keep}");
    assert!(job_format().parse(&short).problems.to_string().contains("rows of different lengths"));
    // digits whose number is wrong are not missing
    let wrong = job_format().parse(&digits.replace("length: 2}", "length: 0}")).problems;
    assert!(wrong.0.len() == 1 && wrong.to_string().contains("subtokens.length: got 0"), "{wrong}");
    // new keys must not change the hash of older jobs, so they are not serialized
    let old = serde_json::to_value(job_format().read(&job_with("partitions: {views: 2}")).unwrap()).unwrap();
    assert_eq!(
        old["partitions"].as_object().unwrap().keys().collect::<Vec<_>>(),
        ["eps", "power", "sampling", "schedule", "views"]
    );
}
