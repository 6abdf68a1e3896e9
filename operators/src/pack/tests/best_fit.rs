//! Mode `best_fit`, compared with a slow copy of its rule.

use stillhouse_schemas::manifest::Statistic;

use super::super::best_fit::BestFit;
use super::super::rows::RowWriter;
use super::*;

/// A token with the segment that it belongs to.
type Labelled = (i32, (u64, usize));

fn best_fit(length: usize, boundary: Boundary, separator: Option<u32>) -> PackConfig {
    PackConfig {
        separator,
        segment_breaks: SegmentBreaks { before: Some(1), after: Some(2) },
        ..config(PackMode::BestFit, length, boundary, Remainder::Drop)
    }
}

/// Packs with at most so many open rows.
fn pack_with(config: &PackConfig, max_open: usize, batches: &[RecordBatch]) -> (Vec<Row>, SplitContext) {
    let context = context(&gpt2());
    let boundary = config.boundary_tokens().unwrap();
    let separator = config.separator.map(|id| id as i32);
    let made = BestFit::new(config, boundary, separator, 902, RowWriter::new(config, &context)).unwrap();
    let mut operator = made.with_max_open(max_open);
    (rows(&drive(&mut operator, batches).unwrap(), config), context)
}

/// The text of each row, in order: every open row is looked at for every document.
fn reference(documents: &[Vec<u32>], room: usize, separator: bool, max_open: usize) -> Vec<Vec<Labelled>> {
    let mut closed = Vec::new();
    // in the order of opening
    let mut open: Vec<Vec<Labelled>> = Vec::new();
    for (id, tokens) in (10..).zip(documents).filter(|(_, tokens)| !tokens.is_empty()) {
        let mut whole = labelled(id, tokens);
        let last = whole[whole.len() - 1].1;
        whole.extend(separator.then_some((901, last)));
        let mut parts: Vec<Vec<Labelled>> = whole.chunks(room).map(<[_]>::to_vec).collect();
        let rest = parts.pop_if(|part| part.len() < room);
        closed.extend(parts);
        let Some(rest) = rest else { continue };
        let fits = |row: &&mut Vec<Labelled>| row.len() + rest.len() <= room;
        match open.iter_mut().filter(fits).rev().max_by_key(|row| row.len()) {
            Some(row) => row.extend(rest),
            None => open.push(rest),
        }
        let is_over = open.len() > max_open;
        let fullest = (0..open.len()).rev().max_by_key(|&i| open[i].len());
        if let Some(i) = fullest.filter(|&i| open[i].len() == room || is_over) {
            closed.push(open.remove(i));
        }
    }
    closed.extend(open);
    closed
}

#[test]
fn documents_go_whole_where_they_leave_the_least_space() {
    let documents = [vec![3; 4], vec![4; 2], vec![], vec![5; 3], vec![6; 1], vec![7; 9]];
    // rows of 6 tokens, with a separator after each document: 5, 3, 4, 2, 10 tokens
    let (rows, context) = pack_with(&best_fit(6, Boundary::None, Some(901)), 9, &[whole(&documents)]);
    let row = |row: u32, tokens: [i32; 6], offsets: &[i32], documents: &[u64]| Row {
        id: (3 << 32) + u64::from(row),
        tokens: tokens.to_vec(),
        mask: Some(tokens.iter().map(|&token| token != 902).collect()),
        offsets: offsets.to_vec(),
        documents: documents.to_vec(),
    };
    assert_eq!(
        rows,
        [
            row(0, [5, 5, 5, 901, 6, 901], &[0, 4], &[13, 14]),
            row(1, [7, 7, 7, 7, 7, 7], &[0], &[15]),
            row(2, [3, 3, 3, 3, 901, 902], &[0], &[10]),
            row(3, [4, 4, 901, 902, 902, 902], &[0], &[11]),
            row(4, [7, 7, 7, 901, 902, 902], &[0], &[15]),
        ]
    );
    let counted = statistics(&context);
    assert_eq!((counted.empty_documents, counted.dropped_tokens), (1, 0));
    let of_pack = [("cut_documents", Statistic::Sum(1)), ("padding", Statistic::Sum(6))];
    assert_eq!(counted.operators, of_pack.map(|(name, n)| (name.to_owned(), n)).into());
}

#[test]
fn the_number_of_open_rows_is_bounded() {
    let documents: Vec<Vec<u32>> = (0..1000).map(|_| vec![3; 5]).collect();
    // no two fit into a row of 8, so the first rows are closed as the third opens
    let (rows, _) = pack_with(&best_fit(8, Boundary::None, None), 2, &[whole(&documents)]);
    assert_eq!(rows.iter().map(|row| row.documents[0]).collect::<Vec<_>>(), (10..1010).collect::<Vec<_>>());
    assert!(rows.iter().all(|row| row.documents.len() == 1));
}

#[test]
fn it_pads_little() {
    let documents: Vec<Vec<u32>> =
        (0..3000u32).map(|i| vec![3; 1 + (i.wrapping_mul(2_654_435_761) >> 25) as usize]).collect();
    let padding = |mode: PackMode| {
        let config = PackConfig { mode, rows_per_batch: 64, ..best_fit(128, Boundary::None, None) };
        let context = context(&gpt2());
        let rows = pack_in(&context, &config, &[whole(&documents)]);
        let tokens: usize = documents.iter().map(Vec::len).sum();
        let Statistic::Sum(padding) = statistics(&context).operators["padding"] else { panic!("not a sum") };
        assert_eq!(rows.len() * 128, tokens + padding as usize);
        padding as f64 / (rows.len() * 128) as f64
    };
    let (pad, best_fit) = (padding(PackMode::Pad), padding(PackMode::BestFit));
    assert!(pad > 0.45 && best_fit < 0.02, "{pad} {best_fit}");
}

proptest! {
    /// Rows, offsets and ids are those of the slow rule, whatever the pieces in which documents come.
    #[test]
    fn rows_are_those_of_the_rule(
        documents in prop::collection::vec(prop::collection::vec(0u32..5, 0..20), 0..20),
        length in 3usize..14,
        sizes in prop::collection::vec(0usize..9, 1..4),
        per_batch in 1usize..5,
        ends: bool,
        separated: bool,
        max_open in 1usize..5,
    ) {
        let boundary = if ends { Boundary::BosEos } else { Boundary::None };
        let config = best_fit(length, boundary, separated.then_some(901));
        let sizes: Vec<usize> = sizes.into_iter().chain([1]).collect();
        let (rows, context) = pack_with(&config, max_open, &pieces(&documents, &sizes, per_batch));
        let room = length - 2 * usize::from(ends);
        let expected = reference(&documents, room, separated, max_open);
        prop_assert_eq!(rows.len(), expected.len());
        for (i, (row, text)) in rows.iter().zip(&expected).enumerate() {
            prop_assert_eq!(row.id, (3u64 << 32) + i as u64);
            let inner = usize::from(ends)..usize::from(ends) + text.len();
            prop_assert_eq!(&row.tokens[inner], text.iter().map(|token| token.0).collect::<Vec<_>>());
            if ends {
                prop_assert_eq!((row.tokens[0], row.tokens[text.len() + 1]), (900, 901));
            }
            let valid = text.len() + 2 * usize::from(ends);
            prop_assert_eq!(row.mask.as_ref().unwrap(), &(0..length).map(|k| k < valid).collect::<Vec<_>>());
            prop_assert!(row.tokens[valid..].iter().all(|&token| token == 902));
            let starts: Vec<usize> = (0..text.len()).filter(|&k| k == 0 || text[k].1 != text[k - 1].1).collect();
            let offsets: Vec<i32> = starts.iter().map(|&k| if k == 0 { 0 } else { k as i32 + i32::from(ends) }).collect();
            prop_assert_eq!(&row.offsets, &offsets);
            prop_assert_eq!(&row.documents, &starts.iter().map(|&k| text[k].1.0).collect::<Vec<_>>());
            prop_assert!(row.documents.is_sorted());
        }
        let cut = documents.iter().filter(|document| document.len() > room).count() as u64;
        let counted = statistics(&context).operators.get("cut_documents").copied();
        prop_assert_eq!(counted, (cut > 0).then_some(Statistic::Sum(cut)));
        prop_assert_eq!(statistics(&context).dropped_tokens, 0);
    }
}
