mod best_fit;

use arrow::array::{AsArray, BooleanArray, ListArray, UInt64Array};
use arrow::datatypes::{Int32Type, UInt64Type};
use proptest::prelude::*;
use serde::Deserialize;

use super::*;
use crate::operator::{Counters, Measure, tokens_schema};
use crate::testing::{bert, context, drive, gpt2, statistics};

fn config(mode: PackMode, length: usize, boundary: Boundary, remainder: Remainder) -> PackConfig {
    let keep = mode == PackMode::Wrap && remainder == Remainder::Keep;
    PackConfig {
        mode,
        length,
        separator: Some(901),
        boundary,
        bos: Some(900),
        eos: Some(901),
        pad: Some(902),
        remainder,
        remainder_by_holdout: BTreeMap::new(),
        segment_breaks: SegmentBreaks::default(),
        rows: if keep { RowLength::UpTo(length) } else { RowLength::Fixed(length) },
        has_mask: mode.pads() || remainder == Remainder::Pad,
        has_loss_mask: false,
        rows_per_batch: 3,
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Row {
    id: u64,
    tokens: Vec<i32>,
    mask: Option<Vec<bool>>,
    offsets: Vec<i32>,
    documents: Vec<u64>,
}

fn rows(batches: &[RecordBatch], config: &PackConfig) -> Vec<Row> {
    let mut rows = Vec::new();
    for batch in batches {
        assert_eq!(batch.schema(), config.schema());
        assert!(batch.num_rows() <= config.rows_per_batch);
        let ids = ListRows::from_batch(batch, columns::INPUT_IDS).unwrap();
        let offsets = batch[columns::DOCUMENT_OFFSETS].as_list::<i32>();
        let documents = batch[columns::DOCUMENT_IDS].as_list::<i32>();
        for i in 0..batch.num_rows() {
            let range = ids.range(i);
            rows.push(Row {
                id: batch[columns::SEQUENCE_ID].as_primitive::<UInt64Type>().value(i),
                tokens: ids.values::<arrow::array::Int32Array>("x").unwrap().values()[range].to_vec(),
                mask: batch.column_by_name(columns::ATTENTION_MASK).map(|column| {
                    let masks = ListRows::new("mask", column).unwrap();
                    masks.range(i).map(|k| masks.values::<BooleanArray>("mask").unwrap().value(k)).collect()
                }),
                offsets: offsets.value(i).as_primitive::<Int32Type>().values().to_vec(),
                documents: documents.value(i).as_primitive::<UInt64Type>().values().to_vec(),
            });
        }
    }
    rows
}

/// Builds a batch of whole documents or pieces: (document, tokens, end).
fn batch(pieces: &[(u64, Vec<u32>, bool)]) -> RecordBatch {
    let lists = ListArray::from_iter_primitive::<arrow::datatypes::UInt32Type, _, _>(
        pieces.iter().map(|p| Some(p.1.iter().map(|&t| Some(t)))),
    );
    let (_, offsets, values, nulls) = lists.into_parts();
    let schema = tokens_schema();
    let DataType::List(item) = schema.field(1).data_type() else { panic!("no list") };
    RecordBatch::try_new(
        schema.clone(),
        vec![
            Arc::new(UInt64Array::from_iter_values(pieces.iter().map(|p| p.0))),
            Arc::new(ListArray::new(item.clone(), offsets, values, nulls)),
            Arc::new(pieces.iter().map(|p| Some(p.2)).collect::<BooleanArray>()),
        ],
    )
    .unwrap()
}

fn whole(documents: &[Vec<u32>]) -> RecordBatch {
    let pieces: Vec<_> = (10..).zip(documents).map(|(id, tokens)| (id, tokens.clone(), true)).collect();
    batch(&pieces)
}

fn pack(config: &PackConfig, batches: &[RecordBatch]) -> (Vec<Row>, SplitContext) {
    let context = context(&gpt2());
    (pack_in(&context, config, batches), context)
}

fn pack_in(context: &SplitContext, config: &PackConfig, batches: &[RecordBatch]) -> Vec<Row> {
    let mut operator = config.build(context).unwrap();
    rows(&drive(operator.as_mut(), batches).unwrap(), config)
}

#[derive(Deserialize)]
struct Vector {
    length: usize,
    bos: u32,
    eos: u32,
    documents: Vec<Vec<u32>>,
    sequences: Vec<Vec<i32>>,
}

#[test]
fn equals_the_official_code() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../../testdata/packing_vectors.json")).unwrap();
    assert_eq!(vectors.len(), 3);
    for vector in vectors {
        let config = PackConfig {
            separator: Some(vector.eos),
            bos: Some(vector.bos),
            eos: Some(vector.eos),
            ..config(PackMode::Wrap, vector.length, Boundary::BosEos, Remainder::Drop)
        };
        let counters = Arc::new(Counters::default());
        let context = SplitContext { meter: counters.clone(), ..context(&gpt2()) };
        let rows = pack_in(&context, &config, &[whole(&vector.documents)]);
        assert_eq!(rows.iter().map(|row| row.tokens.clone()).collect::<Vec<_>>(), vector.sequences);
        let stream: usize = vector.documents.iter().map(|d| d.len() + 1).sum();
        let packed = vector.sequences.len() * (vector.length - 2);
        assert_eq!(statistics(&context).dropped_tokens, (stream - packed) as u64);
        assert_eq!(counters.get(Measure::Sequences), vector.sequences.len() as u64);
    }
}

#[test]
fn wrapped_rows_report_their_documents() {
    let documents = [vec![1, 2, 3], vec![], vec![4, 5, 6, 7, 8, 9], vec![10]];
    let config = config(PackMode::Wrap, 6, Boundary::BosEos, Remainder::Pad);
    let (rows, context) = pack(&config, &[whole(&documents)]);
    let all = |tokens: [i32; 6], valid: usize, offsets: &[i32], documents: &[u64], row: u32| Row {
        id: (3 << 32) + u64::from(row),
        tokens: tokens.to_vec(),
        mask: Some((0..6).map(|i| i < valid).collect()),
        offsets: offsets.to_vec(),
        documents: documents.to_vec(),
    };
    assert_eq!(statistics(&context).empty_documents, 1);
    assert_eq!(
        rows,
        [
            all([900, 1, 2, 3, 901, 901], 6, &[0], &[10], 0),
            all([900, 901, 4, 5, 6, 901], 6, &[0, 2], &[11, 12], 1),
            all([900, 7, 8, 9, 901, 901], 6, &[0], &[12], 2),
            all([900, 10, 901, 901, 902, 902], 4, &[0], &[13], 3),
        ]
    );
}

#[test]
fn remainders() {
    let documents = [vec![1, 2, 3], vec![4, 5]];
    let run = |boundary, remainder| {
        let config = config(PackMode::Wrap, 5, boundary, remainder);
        let (rows, context) = pack(&config, &[whole(&documents)]);
        (rows.into_iter().map(|row| row.tokens).collect::<Vec<_>>(), statistics(&context).dropped_tokens)
    };
    // the stream: 1 2 3 901 4 5 901
    assert_eq!(run(Boundary::None, Remainder::Drop), (vec![vec![1, 2, 3, 901, 4]], 2));
    assert_eq!(run(Boundary::None, Remainder::Keep), (vec![vec![1, 2, 3, 901, 4], vec![5, 901]], 0));
    assert_eq!(run(Boundary::None, Remainder::Pad), (vec![vec![1, 2, 3, 901, 4], vec![5, 901, 902, 902, 902]], 0));
    let blocks = vec![vec![900, 1, 2, 3, 901], vec![900, 901, 4, 5, 901]];
    let with = |row: &[i32]| blocks.iter().cloned().chain([row.to_vec()]).collect::<Vec<_>>();
    assert_eq!(run(Boundary::BosEos, Remainder::Drop), (blocks.clone(), 1));
    assert_eq!(run(Boundary::BosEos, Remainder::Keep), (with(&[900, 901, 901]), 0));
    assert_eq!(run(Boundary::BosEos, Remainder::Pad), (with(&[900, 901, 901, 902, 902]), 0));
}

#[test]
fn an_empty_split_gives_no_rows() {
    for remainder in [Remainder::Drop, Remainder::Keep, Remainder::Pad] {
        assert_eq!(pack(&config(PackMode::Wrap, 5, Boundary::BosEos, remainder), &[]).0, []);
    }
}

#[test]
fn padded_rows() {
    let documents = [vec![1, 2], vec![], vec![3, 4, 5, 6, 7, 8]];
    let run = |boundary, separator| {
        let config = PackConfig { separator, ..config(PackMode::Pad, 5, boundary, Remainder::Drop) };
        let (rows, context) = pack(&config, &[whole(&documents)]);
        assert!(rows.iter().all(|row| row.offsets == [0]));
        assert_eq!(rows.iter().map(|row| row.documents[0]).collect::<Vec<_>>(), [10, 12]);
        assert_eq!(statistics(&context).empty_documents, 1);
        let valid =
            rows.iter().map(|row| row.mask.as_ref().unwrap().iter().filter(|&&m| m).count()).collect::<Vec<_>>();
        (rows.into_iter().map(|row| row.tokens).collect::<Vec<_>>(), valid, statistics(&context).dropped_tokens)
    };
    let expected = (vec![vec![900, 1, 2, 901, 902], vec![900, 3, 4, 5, 901]], vec![4, 5], 3);
    assert_eq!(run(Boundary::BosEos, Some(901)), expected);
    let expected = (vec![vec![1, 2, 901, 902, 902], vec![3, 4, 5, 6, 901]], vec![3, 5], 2);
    assert_eq!(run(Boundary::None, Some(901)), expected);
    assert_eq!(run(Boundary::None, None), (vec![vec![1, 2, 902, 902, 902], vec![3, 4, 5, 6, 7]], vec![2, 5], 1));
}

#[test]
fn special_tokens_are_required_where_they_are_used() {
    let pack = |boundary, separator| spec::Pack {
        mode: PackMode::Wrap,
        length: 8,
        separator,
        boundary,
        remainder: Remainder::Drop,
    };
    let new = |pack: &spec::Pack| {
        PackConfig::new(pack, [], RowLength::Fixed(8), false, 4, &SpecialIds::from_vocabulary(&bert()))
    };
    let config = new(&pack(Boundary::BosEos, Separator::Eos)).unwrap();
    assert_eq!((config.bos, config.eos, config.separator, config.pad), (Some(101), Some(102), Some(102), None));
    let config = new(&pack(Boundary::None, Separator::None)).unwrap();
    assert_eq!((config.bos, config.eos, config.separator, config.pad), (None, None, None, None));
}

#[test]
fn each_data_set_split_has_its_own_rule_for_the_remainder() {
    let config = PackConfig {
        remainder_by_holdout: [("validation".to_owned(), Remainder::Pad)].into(),
        has_mask: true,
        ..config(PackMode::Wrap, 5, Boundary::BosEos, Remainder::Drop)
    };
    assert_eq!(config.remainder_of("validation"), Remainder::Pad);
    // seven tokens with the separator: two rows of three, and one token left
    let of_six = [whole(&[vec![1, 2, 3, 4, 5, 6]])];
    let rows_of = |dataset_split: &str| {
        let context = SplitContext { dataset_split: dataset_split.into(), ..context(&gpt2()) };
        let mut operator = config.build(&context).unwrap();
        rows(&drive(operator.as_mut(), &of_six).unwrap(), &config).len()
    };
    assert_eq!(["train", "validation", "test"].map(rows_of), [2, 3, 2]);
}

#[test]
fn configs_that_cannot_work_are_refused() {
    let good = config(PackMode::Wrap, 5, Boundary::BosEos, Remainder::Pad);
    let bad = [
        (PackConfig { bos: None, ..good.clone() }, "bos: got none"),
        (PackConfig { eos: Some(u32::MAX), ..good.clone() }, "eos: got 4294967295"),
        (PackConfig { pad: None, ..good.clone() }, "pad: got none"),
        (PackConfig { has_mask: false, ..good.clone() }, "has_mask: got false"),
        (PackConfig { rows: RowLength::Fixed(6), ..good.clone() }, "rows: got length 6, valid: 5"),
        (PackConfig { length: 2, rows: RowLength::Fixed(2), ..good.clone() }, "length: got 2, valid: 3 or more"),
        (
            PackConfig { mode: PackMode::Pad, length: 2, rows: RowLength::Fixed(2), ..good.clone() },
            "length: got 2, valid: 3",
        ),
        (
            PackConfig { mode: PackMode::BestFit, length: 2, rows: RowLength::Fixed(2), ..good.clone() },
            "length: got 2, valid: 3",
        ),
        (PackConfig { remainder: Remainder::Keep, ..good.clone() }, "rows: got fixed"),
    ];
    for (config, message) in bad {
        let error = config.build(&context(&gpt2())).err().unwrap().to_string();
        assert!(error.contains(message), "{error}");
    }
    let mut operator = good.build(&context(&gpt2())).unwrap();
    let error = drive(operator.as_mut(), &[batch(&[(1, vec![u32::MAX], true)])]).unwrap_err().to_string();
    assert_eq!(error, "pack: document 1 of split 0: got token id 4294967295, valid: ids up to 2147483647");
    let mut operator = good.build(&context(&gpt2())).unwrap();
    assert!(drive(operator.as_mut(), &[batch(&[(1, vec![4], false)])]).is_err());
}

/// Cuts documents into pieces, spread over several batches.
fn pieces(documents: &[Vec<u32>], sizes: &[usize], per_batch: usize) -> Vec<RecordBatch> {
    let mut sizes = sizes.iter().cycle();
    let mut all = Vec::new();
    for (id, tokens) in (10..).zip(documents) {
        let mut rest = tokens.as_slice();
        while let Some((piece, later)) =
            sizes.next().and_then(|&size| rest.split_at_checked(size)).filter(|s| !s.1.is_empty())
        {
            all.push((id, piece.to_vec(), false));
            rest = later;
        }
        all.push((id, rest.to_vec(), true));
    }
    all.chunks(per_batch).map(batch).collect()
}

fn documents() -> impl Strategy<Value = Vec<Vec<u32>>> {
    prop::collection::vec(prop::collection::vec(0u32..800, 0..40), 0..12)
}

proptest! {
    #[test]
    fn rows_joined_are_the_stream(
        documents in documents(),
        length in 3usize..12,
        ends: bool,
        separator: bool,
        remainder in prop::sample::select(vec![Remainder::Drop, Remainder::Keep, Remainder::Pad]),
        sizes in prop::collection::vec(0usize..9, 1..4),
        per_batch in 1usize..5,
    ) {
        let boundary = if ends { Boundary::BosEos } else { Boundary::None };
        let config = PackConfig {
            separator: separator.then_some(901),
            ..config(PackMode::Wrap, length, boundary, remainder)
        };
        let (rows, context) = pack(&config, &[whole(&documents)]);
        // Steps of size zero alone would never end, so one of the sizes is at least 1.
        let sizes: Vec<usize> = sizes.into_iter().chain([1]).collect();
        prop_assert_eq!(&pack(&config, &pieces(&documents, &sizes, per_batch)).0, &rows);

        let mut stream: Vec<(u64, i32)> = Vec::new();
        for (id, tokens) in (10..).zip(&documents) {
            stream.extend(tokens.iter().map(|&t| (id, t as i32)));
            stream.extend(separator.then_some((id, 901)));
        }
        let mut rebuilt = Vec::new();
        for (i, row) in rows.iter().enumerate() {
            prop_assert_eq!(row.id, (3u64 << 32) + i as u64);
            prop_assert_eq!(row.offsets[0], 0);
            prop_assert!(row.offsets.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(row.offsets.len(), row.documents.len());
            prop_assert!(row.documents.is_sorted_by(|a, b| a < b));
            let valid = row.mask.as_ref().map_or(row.tokens.len(), |m| m.iter().filter(|&&m| m).count());
            if let Some(mask) = &row.mask {
                prop_assert!(mask.iter().enumerate().all(|(k, &m)| m == (k < valid)));
            }
            prop_assert!(row.tokens[valid..].iter().all(|&t| t == 902));
            let text = if ends { 1..valid - 1 } else { 0..valid };
            if ends {
                prop_assert_eq!((row.tokens[0], row.tokens[valid - 1]), (900, 901));
            }
            let mut listed = Vec::new();
            for k in text {
                let segment = row.offsets.partition_point(|&o| o as usize <= k) - 1;
                rebuilt.push((row.documents[segment], row.tokens[k]));
                listed.push(row.documents[segment]);
            }
            listed.dedup();
            prop_assert_eq!(&listed, &row.documents);
        }
        let dropped = statistics(&context).dropped_tokens as usize;
        let empty = documents.iter().filter(|d| d.is_empty()).count() as u64;
        prop_assert_eq!(statistics(&context).empty_documents, empty);
        prop_assert_eq!(rebuilt.len() + dropped, stream.len());
        prop_assert!(dropped < length);
        prop_assert_eq!(&rebuilt[..], &stream[..rebuilt.len()]);
    }

    #[test]
    fn padded_rows_do_not_depend_on_pieces(
        documents in documents(),
        length in 3usize..12,
        ends: bool,
        sizes in prop::collection::vec(0usize..9, 1..4),
        per_batch in 1usize..5,
    ) {
        let boundary = if ends { Boundary::BosEos } else { Boundary::None };
        let config = config(PackMode::Pad, length, boundary, Remainder::Drop);
        let (rows, context) = pack(&config, &[whole(&documents)]);
        let sizes: Vec<usize> = sizes.into_iter().chain([1]).collect();
        prop_assert_eq!(&pack(&config, &pieces(&documents, &sizes, per_batch)).0, &rows);
        let kept: usize = rows.iter().map(|row| row.tokens.iter().filter(|&&t| t < 900).count()).sum();
        let all: usize = documents.iter().map(Vec::len).sum();
        prop_assert_eq!(kept + statistics(&context).dropped_tokens as usize, all);
        prop_assert_eq!(rows.len(), documents.iter().filter(|d| !d.is_empty()).count());
    }
}

/// Labels every token with its segment by the rules of FORMAT.md: a parsed eos (2) ends one, a parsed bos (1) begins
/// one.
fn labelled(document: u64, tokens: &[u32]) -> Vec<(i32, (u64, usize))> {
    let mut segment = 0;
    let mut labelled = Vec::new();
    for (i, &token) in tokens.iter().enumerate() {
        if i > 0 && (token == 1 || tokens[i - 1] == 2) {
            segment += 1;
        }
        labelled.push((token as i32, (document, segment)));
    }
    labelled
}

proptest! {
    /// Rows are cuts of the stream of labelled tokens. Offsets are where the label changes; ids are those of the
    /// labels.
    #[test]
    fn offsets_know_parsed_tokens(
        documents in prop::collection::vec(prop::collection::vec(0u32..5, 0..20), 1..8),
        length in 3usize..12,
        pieces in 1usize..7,
        ends in any::<bool>(),
        separated in any::<bool>(),
        padded in any::<bool>(),
    ) {
        let mode = if padded { PackMode::Pad } else { PackMode::Wrap };
        let boundary = if ends { Boundary::BosEos } else { Boundary::None };
        let config = PackConfig {
            separator: separated.then_some(901),
            segment_breaks: SegmentBreaks { before: Some(1), after: Some(2) },
            ..config(mode, length, boundary, Remainder::Keep)
        };
        let mut cut = Vec::new();
        for (id, tokens) in (10..).zip(&documents) {
            let parts: Vec<_> = tokens.chunks(pieces).collect();
            cut.extend(parts.iter().enumerate().map(|(i, part)| (id, part.to_vec(), i + 1 == parts.len())));
            if parts.is_empty() {
                cut.push((id, Vec::new(), true));
            }
        }
        let (rows, _) = pack(&config, &[batch(&cut)]);
        let room = length - 2 * usize::from(ends);
        let mut blocks: Vec<Vec<(i32, (u64, usize))>> = Vec::new();
        let mut stream = Vec::new();
        for (id, tokens) in (10..).zip(&documents) {
            let mut labelled = labelled(id, tokens);
            if padded {
                labelled.truncate(room - usize::from(separated && !ends));
                if labelled.is_empty() {
                    continue;
                }
            }
            let last = labelled.last().map_or((id, 0), |token| token.1);
            if separated && !(padded && ends) {
                labelled.push((901, last));
            }
            if padded { blocks.push(labelled) } else { stream.extend(labelled) }
        }
        blocks.extend(stream.chunks(room).map(<[_]>::to_vec));
        prop_assert_eq!(rows.len(), blocks.len());
        for (row, block) in rows.iter().zip(&blocks) {
            let text = usize::from(ends)..usize::from(ends) + block.len();
            prop_assert_eq!(&row.tokens[text], block.iter().map(|token| token.0).collect::<Vec<_>>());
            let starts: Vec<usize> = (0..block.len()).filter(|&i| i == 0 || block[i].1 != block[i - 1].1).collect();
            let offsets: Vec<i32> = starts.iter().map(|&i| if i == 0 { 0 } else { i as i32 + i32::from(ends) }).collect();
            prop_assert_eq!(&row.offsets, &offsets);
            prop_assert_eq!(&row.documents, &starts.iter().map(|&i| block[i].1.0).collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_mark_of_a_token_becomes_its_loss_mask_in_every_mode() {
    let documents = [vec![1 | TRAINED, 2, 3 | TRAINED], vec![4, 5 | TRAINED], vec![6 | TRAINED; 7]];
    for mode in [PackMode::Wrap, PackMode::Pad, PackMode::BestFit] {
        let config = PackConfig { has_loss_mask: true, ..config(mode, 6, Boundary::BosEos, Remainder::Pad) };
        let plain = PackConfig { has_loss_mask: false, has_mask: config.has_mask, ..config.clone() };
        let unmarked: Vec<Vec<u32>> =
            documents.iter().map(|tokens| tokens.iter().map(|token| token & !TRAINED).collect()).collect();
        let (expected, _) = pack(&plain, &[whole(&unmarked)]);
        let mut operator = config.build(&context(&gpt2())).unwrap();
        let batches = drive(operator.as_mut(), &[whole(&documents)]).unwrap();
        assert_eq!(rows(&batches, &config), expected, "{mode:?}");
        let masks = batches.iter().flat_map(|batch| {
            let lists = ListRows::from_batch(batch, columns::LOSS_MASK).unwrap();
            let values = lists.values::<BooleanArray>("x").unwrap();
            (0..lists.len()).map(|i| lists.range(i).map(|k| values.value(k)).collect::<Vec<_>>()).collect::<Vec<_>>()
        });
        let is_trained = |token: &i32| matches!(token, 1 | 3 | 5 | 6);
        let expected: Vec<Vec<bool>> = expected.iter().map(|row| row.tokens.iter().map(is_trained).collect()).collect();
        assert_eq!(masks.collect::<Vec<_>>(), expected, "{mode:?}");
    }
}
