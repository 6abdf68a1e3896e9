use proptest::prelude::*;
use stillhouse_schemas::columns::SHAPE;

use super::*;
use crate::testing::drive;

#[test]
fn bases_of_the_paper() {
    let published = [
        (50_257, 2, 225),
        (50_257, 3, 37),
        (50_257, 4, 15),
        (50_257, 6, 7),
        (50_257, 8, 4),
        (256, 2, 16),
        (256, 3, 7),
        (256, 4, 4),
    ];
    for (vocab_size, length, expected) in published {
        assert_eq!(base(vocab_size, length), expected, "C = {vocab_size}, ℓ = {length}");
    }
}

#[test]
fn an_elbow_is_farthest_below_the_line_between_the_ends() {
    assert_eq!(elbow(&[(1.0, 1.0), (2.0, 0.2), (3.0, 0.1), (4.0, 0.0)]), Some(1));
    assert_eq!(elbow(&[(1.0, 1.0), (2.0, 0.5), (3.0, 0.1), (4.0, 0.0)]), Some(2));
    // no elbow: a straight line, a rising one, one that falls faster and faster, one point, and no point
    assert_eq!(elbow(&[(0.0, 2.0), (1.0, 1.0), (2.0, 0.0)]), None);
    assert_eq!(elbow(&[(0.0, 0.0), (1.0, 1.0)]), None);
    assert_eq!(elbow(&[(0.0, 2.0), (1.0, 1.5), (2.0, 0.0)]), None);
    assert_eq!((elbow(&[(1.0, 1.0)]), elbow(&[])), (None, None));
}

/// MDM-Prime, A.2.4: ℓ = 4 for text, 2 for images, each with its schedule.
#[test]
fn the_published_lengths_stand_at_the_elbow() {
    let text = [(50_257, 1024), (30_522, 128), (151_936, 2048)];
    for (vocab_size, positions) in text {
        assert_eq!(elbow_length(&PLANNED_LENGTHS, vocab_size, positions, 1.0), Some(4), "C = {vocab_size}");
    }
    for (positions, power) in [(3072, 3.0), (1024, 3.0), (3072, 1.0)] {
        assert_eq!(elbow_length(&PLANNED_LENGTHS, 256, positions, power), Some(2), "(1 − t)^{power}");
    }
    // over all lengths the ends of the chord decide, which is why [`ELBOW_BASES`] limits them
    let over_all = |power, positions| {
        let ratio = |&length: &u32| (f64::from(length), idle_step_ratio(length, positions, positions, power));
        elbow(&PLANNED_LENGTHS.iter().map(ratio).collect::<Vec<_>>()).map(|at| PLANNED_LENGTHS[at])
    };
    assert_eq!((over_all(1.0, 1024), over_all(3.0, 3072)), (Some(3), Some(3)));
    assert_eq!(elbow_length(&PLANNED_LENGTHS, 3, 16, 1.0), None);
}

#[test]
fn bases_at_exact_powers() {
    for (power, length) in
        [(65_536u64, 2u32), (65_536, 4), (65_536, 16), (1 << 32, 2), (59_049, 10), (1_000_000, 6), (3_486_784_401, 20)]
    {
        let exact = base(power, length);
        assert_eq!(exact.pow(length), power, "{power} is {exact}^{length}");
        assert_eq!(base(power - 1, length), exact);
        assert_eq!(base(power + 1, length), exact + 1);
    }
    assert_eq!(base(7, 1), 7);
    assert_eq!(base(1, 4), 1);
    assert_eq!(base(u64::MAX, 1), u64::MAX);
    assert_eq!(base(u64::MAX, 64), 2);
}

#[test]
fn the_strings_of_the_paper() {
    let mut digits = [0; 3];
    let valid: Vec<_> = (0..7)
        .map(|id| {
            encode(id, 2, &mut digits);
            digits
        })
        .collect();
    assert_eq!(valid[..4], [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]);
    assert_eq!(decode(&[1, 1, 1], 2, 7), None);
    assert_eq!(decode(&[1, 1, 0], 2, 7), Some(6));
    assert_eq!(decode(&[0, 2, 0], 2, 7), None);
    assert_eq!(decode(&[u16::MAX; 32], 65_536, 7), None);
}

#[test]
fn a_base_that_is_too_large_names_a_length() {
    let error = SubtokensConfig::new(100_000, 1, RowLength::Fixed(4)).unwrap_err().to_string();
    assert!(
        error.contains("subtokens.length: got 1, which needs base 100000") && error.contains("valid: 2 or more"),
        "{error}"
    );
    assert!(SubtokensConfig::new(65_536, 1, RowLength::Fixed(4)).is_ok());
    let wrong = SubtokensConfig { base: 9, ..SubtokensConfig::new(50_257, 4, RowLength::Fixed(4)).unwrap() };
    assert!(wrong.build().unwrap_err().to_string().contains("base: got 9, valid: 15"));
}

fn batch(rows: RowLength, ids: &[Vec<i32>]) -> RecordBatch {
    let fields = [columns::sequence_id(), rows.field(columns::INPUT_IDS, DataType::Int32, None, None)];
    let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
    let values = list_column(&fields[1], Arc::new(Int32Array::from(ids.concat())), &lengths).unwrap();
    let sequences = arrow::array::UInt64Array::from_iter_values(40..40 + ids.len() as u64);
    RecordBatch::try_new(Arc::new(arrow::datatypes::Schema::new(fields.to_vec())), vec![Arc::new(sequences), values])
        .unwrap()
}

#[test]
fn columns_have_their_type_and_shape() {
    let cases = [
        (50_257, 4, RowLength::Fixed(2), DataType::UInt8, "[2,4]"),
        (50_257, 1, RowLength::Fixed(2), DataType::UInt16, "[2,1]"),
        (50_257, 4, RowLength::UpTo(3), DataType::UInt8, "[*,4]"),
    ];
    for (vocab_size, length, rows, item, shape) in cases {
        let config = SubtokensConfig::new(vocab_size, length, rows).unwrap();
        let field = config.fields().remove(0);
        assert_eq!(field.metadata()[SHAPE], shape);
        let mut ids = vec![vec![50_256, 0], vec![1, 15]];
        if matches!(rows, RowLength::UpTo(_)) {
            ids.push(vec![7]);
        }
        let input = batch(rows, &ids);
        let output = drive(&mut config.build().unwrap(), &[input.clone(), input.slice(1, 1)]).unwrap();
        assert_eq!(output[0].schema().field(2), &field);
        assert_eq!(output[1].column(2).to_data(), output[0].slice(1, 1).column(2).to_data());
        let digits = ListRows::from_batch(&output[0], columns::SUBTOKENS).unwrap();
        let digits: Vec<u16> = match item {
            DataType::UInt8 => digits.values::<UInt8Array>("x").unwrap().values().iter().map(|&d| d.into()).collect(),
            _ => digits.values::<UInt16Array>("x").unwrap().values().to_vec(),
        };
        let decoded: Vec<i32> =
            digits.chunks(length as usize).map(|d| decode(d, config.base, vocab_size).unwrap() as i32).collect();
        assert_eq!(decoded, ids.concat());
        if length == 4 {
            assert_eq!(digits[..4], [14, 13, 5, 6]);
        }
    }
}

#[test]
fn an_id_past_the_vocabulary_names_the_sequence() {
    let config = SubtokensConfig::new(100, 2, RowLength::Fixed(2)).unwrap();
    for id in [100, -1] {
        let error =
            drive(&mut config.build().unwrap(), &[batch(RowLength::Fixed(2), &[vec![1, 2], vec![3, id]])]).unwrap_err();
        assert_eq!(error.to_string(), format!("subtokens: sequence 41, position 1: got token id {id}, valid: 0 to 99"));
    }
}

proptest! {
    #[test]
    fn the_base_is_the_smallest(vocab_size in 2u64..=u64::from(u32::MAX) + 1, length in 1u32..=32) {
        let b = base(vocab_size, length);
        let reaches = |b: u64| u128::from(b).checked_pow(length).is_none_or(|p| p >= u128::from(vocab_size));
        prop_assert!(reaches(b) && !reaches(b - 1));
    }

    #[test]
    fn digits_decode_to_the_id(vocab_size in 2usize..200_000, length in 2usize..=20, id: u32) {
        let id = id % vocab_size as u32;
        let base = base(vocab_size as u64, length as u32) as u32;
        let mut digits = vec![0; length];
        encode(id, base, &mut digits);
        prop_assert!(digits.iter().all(|&d| u32::from(d) < base));
        prop_assert_eq!(decode(&digits, base, vocab_size), Some(id));
    }
}

fn permuted(vocab_size: usize, length: u32, numbers: &[i64]) -> SubtokensConfig {
    let permutation = Some(Permutation::new(numbers, vocab_size).unwrap());
    let rows = RowLength::Fixed(vocab_size);
    SubtokensConfig { permutation, filter_table: true, ..SubtokensConfig::new(vocab_size, length, rows).unwrap() }
}

/// Returns the values of a `.npy` file after checking its header for `shape` and `descr`.
fn values<'a>(npy: &'a [u8], descr: &str, shape: &str) -> &'a [u8] {
    let end = npy.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    assert!(npy.starts_with(b"\x93NUMPY\x01\x00") && end % 64 == 0);
    assert_eq!(usize::from(u16::from_le_bytes([npy[8], npy[9]])), end - 10);
    let header = std::str::from_utf8(&npy[10..end]).unwrap();
    assert!(
        header.contains(&format!("'descr': '{descr}'")) && header.contains(&format!("'shape': ({shape})")),
        "{header}"
    );
    &npy[end..]
}

#[test]
fn digits_are_of_the_permuted_number() {
    // C = 7, ℓ = 3, b = 2: id 0 has the number 5 = 101, id 6 the number 3 = 011
    let config = permuted(7, 3, &[5, 0, 4, 6, 1, 2, 3]);
    let output = drive(&mut config.build().unwrap(), &[batch(RowLength::Fixed(7), &[(0..7).collect()])]).unwrap();
    let digits = ListRows::from_batch(&output[0], columns::SUBTOKENS).unwrap();
    let digits: Vec<u8> = digits.values::<UInt8Array>("x").unwrap().values().to_vec();
    assert_eq!(digits, [1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1]);
    let limits =
        CheckContext { vocab_size: 7, length: 7, split: stillhouse_schemas::ids::SplitId(0), sequence_range: None };
    let broken = |config: &SubtokensConfig| {
        let mut broken = Vec::new();
        config.check(&output[0], &limits, &mut broken).unwrap();
        broken.len()
    };
    assert_eq!(broken(&config), 0);
    // with another permutation, or none, the digits do not match
    assert_eq!(broken(&permuted(7, 3, &[5, 0, 4, 6, 1, 3, 2])), 1);
    assert_eq!(broken(&SubtokensConfig { permutation: None, ..config.clone() }), 1);
    let short = SubtokensConfig { vocab_size: 8, ..config };
    assert!(short.build().unwrap_err().to_string().contains("permutation: got 7 numbers, valid: 8"));
    let plain = SubtokensConfig::new(7, 3, RowLength::Fixed(7)).unwrap();
    assert!(plain.sidecar_files().is_empty());
}

/// V(y) of METHODS.md: C = 7, ℓ = 3, b = 2; m is 2.
#[test]
fn the_filter_table_gives_the_valid_sets_of_the_paper() {
    let valid = |config: &SubtokensConfig, y: [usize; 3]| -> Vec<usize> {
        let beside = config.sidecar_files();
        let (_, npy) = beside.iter().find(|(name, _)| *name == FILTER_TABLE).unwrap();
        let table = values(npy, "|b1", "3, 3, 7");
        assert_eq!(table.len(), 3 * 3 * 7);
        (0..7).filter(|id| (0..3).all(|j| table[(j * 3 + y[j]) * 7 + id] == 1)).collect()
    };
    let plain = SubtokensConfig { filter_table: true, ..SubtokensConfig::new(7, 3, RowLength::Fixed(7)).unwrap() };
    assert_eq!(valid(&plain, [2, 2, 2]), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(valid(&plain, [0, 2, 2]), [0, 1, 2, 3]);
    assert_eq!(valid(&plain, [0, 0, 2]), [0, 1]);
    assert_eq!(valid(&plain, [1, 1, 1]), [0usize; 0]);
    // the same strings, with the ids that have them under the permutation
    let config = permuted(7, 3, &[5, 0, 4, 6, 1, 2, 3]);
    assert_eq!(valid(&config, [0, 2, 2]), [1, 4, 5, 6]);
    assert_eq!(valid(&config, [0, 0, 2]), [1, 4]);
    assert_eq!(valid(&config, [1, 0, 1]), [0]);
}

#[test]
fn permutations_are_read_as_numpy_and_json_write_them() {
    let config = permuted(7, 3, &[5, 0, 4, 6, 1, 2, 3]);
    let beside = config.sidecar_files();
    assert_eq!(
        beside.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        <SubtokensConfig as crate::config::OperatorConfig>::SIDECAR_FILES
    );
    assert_eq!(values(&beside[0].1, "<i4", "7,").len(), 28);
    assert_eq!(files::parse_numbers(&beside[0].1).unwrap(), [5, 0, 4, 6, 1, 2, 3]);
    assert_eq!(files::parse_numbers(b" [2, 0, -1]\n").unwrap(), [2, 0, -1]);
    let npy = |descr: &str, shape: &str, bytes: &[u8]| {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        let two = [b"\x93NUMPY\x02\x00".as_slice(), &(header.len() as u32).to_le_bytes(), header.as_bytes(), bytes];
        files::parse_numbers(&two.concat())
    };
    assert_eq!(npy("<i8", "2,", &[[255; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat()).unwrap(), [-1, 1]);
    assert_eq!(npy("<u8", "1,", &[255; 8]).unwrap(), [i64::MAX]);
    assert_eq!(npy("|u1", "2,", &[200, 1]).unwrap(), [200, 1]);
    assert_eq!(npy("<u2", "1,", &[0, 128]).unwrap(), [32768]);
    for (found, says) in [
        (npy("<f4", "2,", &[0; 8]), "is a .npy file of \"<f4\" with shape (2); valid: little-endian integers"),
        (npy(">i4", "2,", &[0; 8]), "valid: little-endian integers"),
        (npy("<i4", "2, 1", &[0; 8]), "with shape (2, 1)"),
        (npy("<i4", "3,", &[0; 8]), "its header says 3 numbers, and 8 bytes follow"),
        (files::parse_numbers(b"\x93NUMPY\x01\x00\xff\xff{"), "is a truncated .npy file"),
        (files::parse_numbers(b"\x93NUMPY"), "is a truncated .npy file"),
        (files::parse_numbers(b""), "is not JSON"),
        (files::parse_numbers(b"{}"), "is JSON but not a list"),
        (files::parse_numbers(b"[0, 1.5]"), "has 1.5 for id 1"),
    ] {
        let error = found.unwrap_err();
        assert!(error.contains(says), "{error}");
    }
}

/// Expected values computed once with the Python package: `keyed.below` and the shuffle of docs/FORMAT.md.
/// (python/tests/test_views_prime.py has the same numbers.)
#[test]
fn the_shipped_permutation_never_changes() {
    let small = shipped_permutation(8).unwrap();
    let large = shipped_permutation(50_257).unwrap();
    assert_eq!(small.numbers(), SHIPPED_OF_8);
    assert_eq!(large.numbers()[..6], SHIPPED_OF_50257);
    let fixed = (0..50_257).filter(|&id| large.number(id) == Some(id)).count();
    assert!(fixed < 10, "{fixed} ids have their own number");
}

const SHIPPED_OF_8: [u32; 8] = [0, 5, 7, 6, 1, 4, 3, 2];
const SHIPPED_OF_50257: [u32; 6] = [42549, 43130, 17803, 32943, 8641, 47974];
