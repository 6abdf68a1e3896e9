use std::collections::BTreeMap;

use stillhouse_datasets::inspect::{
    Blueprint, BlueprintEntry, ColumnSummary, DocumentView, OperatorView, RowView, StatisticView, TokenView,
};
use stillhouse_schemas::manifest::{Statistic, Statistics, Totals};

use super::*;

const PLAIN: View = View { width: 90, terminal: true, colour: false };

fn token(id: u32, text: &str, group: bool) -> TokenView {
    TokenView {
        id,
        text: text.into(),
        valid: true,
        group: Some(group),
        logprob: Some(-(id as f32) / 100.0),
        corrections: Some(id % 5),
        subtokens: vec![id / 225 % 15, id / 15 % 15, id % 15],
    }
}

fn row() -> RowView {
    let words = [" It", " was", " the", " best", " of", " times", ",\n", " it", " was", " 漢字", "\x1b[31m", " worst"];
    let mut tokens: Vec<TokenView> =
        words.iter().enumerate().map(|(i, w)| token(100 + 37 * i as u32, w, matches!(i, 1 | 2 | 5 | 11))).collect();
    tokens.push(TokenView { valid: false, group: Some(false), logprob: Some(0.0), ..token(0, "<pad>", false) });
    let entry = |id, text: &str, weight, xi| BlueprintEntry { id, text: text.into(), weight, xi };
    let top = vec![entry(11, " of", 0.41, 9.21), entry(470, " \u{9b}31m", 0.25, 8.71), entry(7, "\"", 0.003, 4.3)];
    let blueprint = |position, token, text: &str, weight, rank| Blueprint {
        position,
        token,
        text: text.into(),
        logprob: -1.234,
        xi: 8.71,
        weight,
        rank,
        top: top.clone(),
    };
    RowView {
        shard: "data/train-00001-of-00003.parquet".into(),
        row: 17,
        sequence_id: (1 << 32) + 17,
        documents: vec![
            DocumentView { offset: 0, document_id: (1 << 32) + 4, record: 4, file: "corpus/prose.jsonl".into() },
            DocumentView { offset: 9, document_id: (1 << 32) + 5, record: 5, file: "corpus/prose.jsonl".into() },
        ],
        partition_t: Some(0.3456),
        tokens,
        subtoken_base: Some(15),
        operators: Vec::new(),
        picture: None,
        numbers: false,
        blueprints: vec![blueprint(10, 470, " \u{9b}31m", 0.25, 2), blueprint(11, 507, " worst", 0.00002, 1234)],
    }
}

fn inspection() -> Inspection {
    let totals = |shards, rows| Totals { shards, rows, tokens: rows * 1024, bytes: rows * 9400 };
    let column = |name: &str, data_type: &str, shape: Option<&str>, bytes: u64| ColumnSummary {
        name: name.into(),
        data_type: data_type.into(),
        shape: shape.map(String::from),
        bytes,
        bytes_per_token: bytes as f64 / 1_263_616.0,
    };
    let statistics = Statistics {
        sources: BTreeMap::new(),
        empty_documents: 0,
        documents: 1500,
        dropped: BTreeMap::new(),
        filtered_bytes: 0,
        skipped: BTreeMap::from([("invalid UTF-8".into(), 2), ("broken JSON".into(), 1)]),
        text_bytes: 5_300_000,
        text_tokens: 1_265_000,
        dropped_tokens: 1384,
        predicted_tokens: 1_262_382,
        logprob_sum: -3_900_000.0,
        corrections: 1_300_000,
        corrections_histogram: vec![700_000, 200_000, 250_000, 100_000, 12_382],
        corrections_max: 13,
        total_variation_max: 9.98e-4,
        operators: BTreeMap::new(),
    };
    Inspection {
        name: "demo".into(),
        job_hash: "0123456789abcdef".into(),
        tokenizer: "assets/teacher-nano-gpt2 (50257 tokens)".into(),
        teacher: Some("assets/teacher-nano-gpt2 (gpt2, 14.5M parameters, f32, cpu)".into()),
        vocab_size: 50_257,
        length: 1024,
        totals: BTreeMap::from([("train".into(), totals(2, 1200)), ("validation".into(), totals(1, 34))]),
        operator_statistics: Vec::new(),
        perplexity: statistics.perplexity(),
        corrections_mean: Some(1.03),
        statistics,
        columns: vec![
            column("sequence_id", "uint64", None, 1_500),
            column("input_ids", "fixed_size_list<int32>[1024]", Some("[1024]"), 2_200_000),
            column("noise_logprob", "list<halffloat>", None, 2_600_000),
        ],
        row: Some(row()),
        values: Vec::new(),
    }
}

fn rendered(inspection: &Inspection, view: View) -> String {
    render(inspection, &InspectOptions::default(), view).render(view.colour)
}

#[test]
fn everything_without_colours() {
    insta::assert_snapshot!(rendered(&inspection(), PLAIN), @r#"
    demo  job 0123456789ab
      tokenizer  assets/teacher-nano-gpt2 (50257 tokens)
      teacher    assets/teacher-nano-gpt2 (gpt2, 14.5M parameters, f32, cpu)
      shape      L = 1,024 tokens per sequence, V = 50,257

      data set    shards  sequences     tokens      size
      train            2      1,200  1,228,800   11.3 MB
      validation       1         34     34,816  319.6 kB
      all              3      1,234  1,263,616   11.6 MB

    Statistics
      documents    1,500 read, 3 skipped
                   1 broken JSON
                   2 invalid UTF-8
      text         5.3 MB, 1,265,000 tokens, 4.19 bytes per token
      remainders   1,384 tokens dropped
      perplexity   21.96 under the teacher, over 1,262,382 predicted tokens
      noise        largest total variation 9.98e-4
      corrections  1.03 per token on average, 13 at most
        corrections   tokens   share
                  0  700,000  55.5 %  ██████████████████████████████
                  1  200,000  15.8 %  ████████▋
                2–3  250,000  19.8 %  ██████████▊
                4–7  100,000   7.9 %  ████▎
               8–15   12,382   1.0 %  ▌

    Columns
      name           type                          shape   bytes/token    share
      sequence_id    uint64                                      0.001  0.031 %
      input_ids      fixed_size_list<int32>[1024]  [1024]        1.741   45.8 %
      noise_logprob  list<halffloat>                             2.058   54.1 %

    Row 17 of data/train-00001-of-00003.parquet
      sequence_id 4294967313, 13 tokens, 1 of them padding
      from    document  record
         0  4294967300  4 of split 1, corpus/prose.jsonl
         9  4294967301  5 of split 1, corpus/prose.jsonl

      view 0, t = 0.3456: group 0 9 tokens, ‹group 1› 4 tokens
      │  It‹ was the› best of‹ times›,↵ it was 漢字\u{1b}[31m‹ worst›

    Tokens
      position   id  text          group    ln p  corrections  base 15
             0  100  " It"             0  -1.000            0  0 6 10
             1  137  " was"            1  -1.370            2  0 9 2
             2  174  " the"            1  -1.740            4  0 11 9
             3  211  " best"           0  -2.110            1  0 14 1
             4  248  " of"             0  -2.480            3  1 1 8
             5  285  " times"          1  -2.850            0  1 4 0
             6  322  ",\n"             0  -3.220            2  1 6 7
             7  359  " it"             0  -3.590            4  1 8 14
             …
            10  470  "\u{1b}[31m"      0  -4.700            0  2 1 5
            11  507  " worst"          1  -5.070            2  2 3 12

    Noise blueprints, draw 0: top of softmax(ξ), ► observed
      position 10, observed " \u{9b}31m"
        rank 2 of 50,257, weight 25.0 %, ξ 8.710, ln p -1.234
        rank     token          id                            weight      ξ
           1     " of"          11  ████████████████████████  41.0 %  9.210
           2  ►  " \u{9b}31m"  470  ██████████████▋           25.0 %  8.710
           3     "\""            7  ▏                          0.3 %  4.300

      position 11, observed " worst"
        rank 1,234 of 50,257, weight 0.002 %, ξ 8.710, ln p -1.234
         rank     token          id                             weight      ξ
            1     " of"          11  ████████████████████████   41.0 %  9.210
            2     " \u{9b}31m"  470  ██████████████▋            25.0 %  8.710
            3     "\""            7  ▏                           0.3 %  4.300
            …
        1,234  ►  " worst"      507  ▏                         0.002 %  8.710
    "#);
}

#[test]
fn a_data_set_without_teacher_views_and_rows() {
    let inspection = Inspection {
        teacher: None,
        perplexity: None,
        corrections_mean: None,
        statistics: Statistics {
            documents: 1,
            text_bytes: 11,
            text_tokens: 2,
            dropped_tokens: 2,
            ..Statistics::default()
        },
        totals: BTreeMap::from([("train".into(), Totals::default())]),
        columns: Vec::new(),
        row: None,
        ..inspection()
    };
    insta::assert_snapshot!(rendered(&inspection, PLAIN), @r"
    demo  job 0123456789ab
      tokenizer  assets/teacher-nano-gpt2 (50257 tokens)
      shape      L = 1,024 tokens per sequence, V = 50,257

      data set  shards  sequences  tokens  size
      train          0          0       0   0 B

    Statistics
      documents   1 read, 0 skipped
      text        11 B, 2 tokens, 5.50 bytes per token
      remainders  2 tokens dropped
    ");
}

#[test]
fn groups_are_brackets_without_colours_and_colours_with_them() {
    let plain = rendered(&inspection(), PLAIN);
    assert!(plain.contains("It‹ was the› best of‹ times›,↵ it was 漢字"), "{plain}");
    let colour = rendered(&inspection(), View { colour: true, ..PLAIN });
    assert!(colour.contains("\x1b[35m was the\x1b[0m\x1b[36m best of\x1b[0m"), "{colour:?}");
    assert!(!colour.contains('‹'));
}

#[test]
fn no_token_acts_on_the_terminal() {
    let mut hostile = inspection();
    let bomb = "\x1b]0;owned\x07\x1b[2J\r\u{9b}H\u{202e}\u{0}";
    hostile.name = bomb.into();
    hostile.tokenizer = bomb.into();
    hostile.statistics.skipped.insert(bomb.into(), 1);
    hostile.columns[0].name = bomb.into();
    let row = hostile.row.as_mut().unwrap();
    row.shard = bomb.into();
    row.documents[0].file = bomb.into();
    row.tokens.iter_mut().for_each(|t| t.text = bomb.into());
    row.blueprints[0].text = bomb.into();
    row.blueprints[0].top[0].text = bomb.into();
    let acts = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    assert!(!rendered(&hostile, PLAIN).contains(acts));
    let colour = rendered(&hostile, View { colour: true, ..PLAIN });
    for (at, _) in colour.match_indices('\x1b') {
        let end = colour[at..].find('m').unwrap();
        assert!(
            colour[at + 2..at + end].bytes().all(|b| b.is_ascii_digit() || b == b';'),
            "{:?}",
            &colour[at..at + end]
        );
    }
    assert!(!colour.replace('\x1b', "").contains(acts));
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    for width in [80, 90, 120] {
        for line in rendered(&inspection(), View { width, ..PLAIN }).lines() {
            let cells = unicode_width::UnicodeWidthStr::width(line);
            assert!(cells <= width, "{cells} > {width}: {line}");
        }
    }
}

/// Operators without a view of their own are shown by what they declare.
#[test]
fn what_other_operators_show_stands_beside_it() {
    let mut inspection = inspection();
    let (meaning, value) = ("Short sequences".to_owned(), Statistic::Sum(1234));
    inspection.operator_statistics = vec![StatisticView { name: "short".into(), meaning, value }];
    let tokens = (0..13).map(|i| format!("mark{i}")).collect();
    let facts = vec![("length".to_owned(), "12".to_owned())];
    inspection.row.as_mut().unwrap().operators =
        vec![OperatorView { operator: "marks".into(), facts, tokens, ..OperatorView::default() }];
    let text = rendered(&inspection, PLAIN);
    for says in ["Short sequences  1,234", "\n  length: 12\n", "marks", "mark7", "mark11"] {
        assert!(text.contains(says), "{says:?} is not in\n{text}");
    }
    assert!(!text.contains("mark9"), "{text}");
}

/// Without colours a picture has one character per pixel, with colours half a block.
#[test]
fn an_image_is_seen() {
    let token = |id: u32| TokenView {
        id,
        text: id.to_string(),
        valid: true,
        group: None,
        logprob: None,
        corrections: None,
        subtokens: vec![],
    };
    let pixels = [[0u32; 3], [255; 3], [255, 0, 0], [0, 0, 255], [128; 3], [10, 20, 30]];
    let mut row = row();
    row.tokens = pixels.iter().flatten().map(|id| token(*id)).collect();
    let shape = stillhouse_datasets::inspect::Shape { height: 3, width: 2, channels: 3 };
    let shown = |colour: bool| {
        let mut page = Page::new();
        picture::render(&row, shape, View { width: 80, terminal: colour, colour }, &mut page);
        page.render(colour)
    };
    assert_eq!(shown(false), "  │   @@\n  │ ::..\n  │ ==\n");
    let coloured = shown(true);
    assert_eq!(coloured.lines().count(), 2);
    assert!(
        coloured.contains("\x1b[38;2;0;0;0m\x1b[48;2;255;0;0m▀") && coloured.contains("\x1b[38;2;128;128;128m▀"),
        "{coloured:?}"
    );
}
