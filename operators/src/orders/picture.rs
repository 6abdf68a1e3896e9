//! The masks of an order as a person sees them: tokens in the order of generation, what each may see in a row.
//!
//! ```text
//!   strictly causal     causal            N = 8, S = 2
//!   ·               ·   █ · …             a cell is a part of the sequence: · nothing of it is seen, ░ ▒ ▓ some, █ all
//! ```

/// Cells of a side at most.
const CELLS: usize = 16;
/// Positions and blocks that are listed at most.
const LISTED: usize = 16;

/// What is shown of an order, padding left out.
pub(super) fn facts(order: &[u32], block: &[u32]) -> Vec<(String, String)> {
    let listed = |values: &[u32]| {
        let shown: Vec<String> = values.iter().take(LISTED).map(ToString::to_string).collect();
        shown.join(" ") + if values.len() > LISTED { " …" } else { "" }
    };
    let mut facts = vec![("order".to_owned(), listed(order)), ("block".to_owned(), listed(block))];
    let width = CELLS.min(block.len());
    if width == 0 {
        return facts;
    }
    facts.push(("sees".to_owned(), format!("{:<1$}   causal", "strictly causal", 2 * width - 1)));
    let (strict, causal) = (raster(block, width, false), raster(block, width, true));
    facts
        .extend(strict.into_iter().zip(causal).map(|(strict, causal)| (String::new(), format!("{strict}   {causal}"))));
    facts
}

/// The mask in `width` × `width` cells, a line for each part of the queries.
fn raster(block: &[u32], width: usize, own: bool) -> Vec<String> {
    let part = |cell: usize| cell * block.len() / width;
    (0..width)
        .map(|row| {
            let queries = &block[part(row)..part(row + 1)];
            // blocks never fall, so what a query sees is a beginning of the keys
            let seen = |query: u32| block.partition_point(|&key| if own { key <= query } else { key < query });
            let cell = |column: usize| {
                let (from, to) = (part(column), part(column + 1));
                let pairs: usize = queries.iter().map(|&query| seen(query).clamp(from, to) - from).sum();
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
    fn long_sequences_are_drawn_in_parts() {
        let block: Vec<u32> = (1..=1000).collect();
        let drawn = raster(&block, CELLS, true);
        assert_eq!(drawn.len(), CELLS);
        assert!(drawn[0].starts_with("▒ ·") && drawn[15].ends_with("█ ▒"), "{drawn:?}");
        assert_eq!(facts(&[], &[]).len(), 2);
    }
}
