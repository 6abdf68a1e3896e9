//! Draws the attention masks of an order: tokens in generation order, one line per query.
//!
//! ```text
//!   strictly causal     causal            N = 8, S = 2
//!   ·               ·   █ · …             a cell is a part of the sequence: · none of it visible, ░ ▒ ▓ some, █ all
//! ```

use crate::config::Chart;

/// Maximum cells per side.
const MAX_CELLS: usize = 16;
/// Maximum positions and blocks listed.
const MAX_LISTED: usize = 16;

/// Returns the facts about an order, without padding.
pub(super) fn facts(order: &[u32], block: &[u32]) -> Vec<(String, String)> {
    let listed = |values: &[u32]| {
        let shown: Vec<String> = values.iter().take(MAX_LISTED).map(ToString::to_string).collect();
        shown.join(" ") + if values.len() > MAX_LISTED { " …" } else { "" }
    };
    let mut facts = vec![("order".to_owned(), listed(order)), ("block".to_owned(), listed(block))];
    let width = MAX_CELLS.min(block.len());
    if width == 0 {
        return facts;
    }
    facts.push(("sees".to_owned(), format!("{:<1$}   causal", "strictly causal", 2 * width - 1)));
    let (strict, causal) = (draw_mask(block, width, false), draw_mask(block, width, true));
    facts
        .extend(strict.into_iter().zip(causal).map(|(strict, causal)| (String::new(), format!("{strict}   {causal}"))));
    facts
}

/// Returns both masks, for the web page.
pub(super) fn masks(block: &[u32]) -> Vec<Chart> {
    let sees = |includes_own_block: bool| {
        block.iter().map(|&query| visible_count(block, query, includes_own_block) as u32).collect()
    };
    let mask =
        |(title, includes_own_block): (&str, bool)| Chart::Mask { title: title.into(), sees: sees(includes_own_block) };
    [("strictly causal", false), ("causal", true)].map(mask).into()
}

/// Returns how many tokens a token of block `query` may attend to. Blocks never fall, so these are the first ones.
fn visible_count(block: &[u32], query: u32, includes_own_block: bool) -> usize {
    block.partition_point(|&key| if includes_own_block { key <= query } else { key < query })
}

/// Draws the mask in `width` × `width` cells, a line per group of queries.
fn draw_mask(block: &[u32], width: usize, includes_own_block: bool) -> Vec<String> {
    let part = |cell: usize| cell * block.len() / width;
    (0..width)
        .map(|row| {
            let queries = &block[part(row)..part(row + 1)];
            let cell = |column: usize| {
                let (from, to) = (part(column), part(column + 1));
                let pairs: usize = queries
                    .iter()
                    .map(|&query| visible_count(block, query, includes_own_block).clamp(from, to) - from)
                    .sum();
                shade(pairs as f64 / (queries.len() * (to - from)).max(1) as f64)
            };
            (0..width).map(cell).collect::<Vec<_>>().join(" ")
        })
        .collect()
}

fn shade(share: f64) -> &'static str {
    match share {
        s if s <= 0.0 => "·",
        s if s < 1.0 / 3.0 => "░",
        s if s < 2.0 / 3.0 => "▒",
        s if s < 1.0 => "▓",
        _ => "█",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_masks_of_the_papers_example() {
        let (order, block) = ([0, 4, 1, 5, 2, 6, 3, 7], [1, 2, 3, 3, 4, 4, 5, 5]);
        let lines: Vec<String> = facts(&order, &block).into_iter().map(|(_, value)| value).collect();
        assert_eq!(
            lines,
            [
                "0 4 1 5 2 6 3 7",
                "1 2 3 3 4 4 5 5",
                "strictly causal   causal",
                "· · · · · · · ·   █ · · · · · · ·",
                "█ · · · · · · ·   █ █ · · · · · ·",
                "█ █ · · · · · ·   █ █ █ █ · · · ·",
                "█ █ · · · · · ·   █ █ █ █ · · · ·",
                "█ █ █ █ · · · ·   █ █ █ █ █ █ · ·",
                "█ █ █ █ · · · ·   █ █ █ █ █ █ · ·",
                "█ █ █ █ █ █ · ·   █ █ █ █ █ █ █ █",
                "█ █ █ █ █ █ · ·   █ █ █ █ █ █ █ █",
            ]
        );
    }

    #[test]
    fn the_page_gets_the_same_masks_as_numbers() {
        let masks = masks(&[1, 2, 3, 3, 4, 4, 5, 5]);
        let mask = |title: &str, sees: &[u32]| Chart::Mask { title: title.into(), sees: sees.into() };
        assert_eq!(
            masks,
            [mask("strictly causal", &[0, 1, 2, 2, 4, 4, 6, 6]), mask("causal", &[1, 2, 4, 4, 6, 6, 8, 8])]
        );
        let text = serde_json::to_string(&masks[0]).unwrap();
        assert_eq!(text, r#"{"kind":"mask","title":"strictly causal","sees":[0,1,2,2,4,4,6,6]}"#);
    }

    #[test]
    fn long_sequences_are_drawn_in_parts() {
        let block: Vec<u32> = (1..=1000).collect();
        let drawn = draw_mask(&block, MAX_CELLS, true);
        assert_eq!(drawn.len(), MAX_CELLS);
        assert!(drawn[0].starts_with("▒ ·") && drawn[15].ends_with("█ ▒"), "{drawn:?}");
        assert_eq!(facts(&[], &[]).len(), 2);
    }
}
