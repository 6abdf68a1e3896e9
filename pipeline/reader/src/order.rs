//! The order of an epoch: position ↦ row. It does not depend on the number of trainers and workers.
//!
//! ```text
//! rows       0 ………………………………………… N        split into blocks of R consecutive rows
//! blocks     b0 b1 b2 … b_F                  in a keyed random order (a Feistel permutation: no memory, random access)
//! windows    [ b7 b3 b91 … ][ b0 b55 … ] …   about `window_blocks` blocks each: the shuffle buffer
//! lanes      b7→0  b3→1 …  (mod `lanes`)     rows are shuffled within a lane, and the lanes take turns row by row
//! ```
//!
//! So a window mixes rows from as many places as it has blocks. A trainer of rank r among W takes every W-th position,
//! starting at r. So it reads only the blocks of its lanes, which are 1/gcd(W, lanes) of all lanes: ranks read
//! different data. The last window also contains the blocks that do not fill a turn of the lanes, and the rows that do not fill a
//! block; it is shuffled as a whole.
//!
//! Every random choice is Philox of (seed, purpose, window and lane or round, epoch). Finding a position takes
//! O(window) time.

use std::ops::Range;

use stillhouse_noise::{fnv1a64, keyed_uniforms, philox4x32_10, splitmix64};

/// Number of lanes of a window. If the number of ranks divides it, no two ranks read the same block in a window.
pub const LANES: u64 = 64;

/// Parameters of the shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shuffle {
    /// Seed of the order.
    pub seed: u64,
    /// Maximum blocks of a window, rounded up to full turns of the lanes. (The last window has up to 63 more.)
    pub window_blocks: u64,
}

/// The order of one epoch over `rows` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    rows: u64,
    block_rows: u64,
    epoch: u32,
    shuffle: Option<Shuffle>,
}

impl Order {
    /// Creates the order of an epoch over rows that are read in blocks of `block_rows`. Without `shuffle`, row equals
    /// position.
    pub fn new(rows: u64, block_rows: u64, epoch: u32, shuffle: Option<Shuffle>) -> Self {
        Self { rows, block_rows: block_rows.max(1), epoch, shuffle }
    }

    /// Number of rows, which is also the number of positions.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of windows.
    pub fn windows(&self) -> u64 {
        match self.shuffle {
            Some(shuffle) => {
                let turns = self.full_blocks() / LANES;
                turns.div_ceil(shuffle.window_blocks.div_ceil(LANES).max(1)).max(1)
            }
            // without a shuffle, windows only determine how far to read ahead
            None => self.rows.div_ceil(LANES * self.block_rows).max(1),
        }
    }

    /// The window that contains a position.
    pub fn window_of(&self, position: u64) -> u64 {
        let (mut low, mut high) = (0, self.windows());
        while high - low > 1 {
            let middle = low.midpoint(high);
            if self.positions(middle).start <= position { low = middle } else { high = middle }
        }
        low
    }

    /// The range of positions of a window.
    pub fn positions(&self, window: u64) -> Range<u64> {
        let last = window + 1 >= self.windows();
        let blocks = match self.shuffle {
            Some(_) => self.window_blocks(window),
            None => window * LANES..(window + 1) * LANES,
        };
        blocks.start * self.block_rows..if last { self.rows } else { blocks.end * self.block_rows }
    }

    /// The rows of a window in the order of their positions; `None` without a shuffle, where row equals position.
    pub fn window(&self, window: u64) -> Option<Vec<u64>> {
        let shuffle = self.shuffle?;
        let permuted = self.window_blocks(window);
        let full = self.full_blocks();
        let blocks: Vec<u64> = permuted.map(|index| self.permute(shuffle, index, full)).collect();
        let rows_of = |block: u64| block * self.block_rows..(block + 1) * self.block_rows;
        if window + 1 >= self.windows() {
            let mut rows: Vec<u64> = blocks.into_iter().flat_map(rows_of).collect();
            rows.extend(full * self.block_rows..self.rows);
            keyed_uniforms(shuffle.seed, "order_window", window, self.epoch).shuffle(&mut rows);
            return Some(rows);
        }
        let lanes: Vec<Vec<u64>> = (0..LANES)
            .map(|lane| {
                let lane_blocks = blocks.iter().skip(lane as usize).step_by(LANES as usize);
                let mut rows: Vec<u64> = lane_blocks.copied().flat_map(rows_of).collect();
                keyed_uniforms(shuffle.seed, "order_lane", window * LANES + lane, self.epoch).shuffle(&mut rows);
                rows
            })
            .collect();
        let depth = lanes.first().map_or(0, Vec::len);
        Some((0..depth).flat_map(|i| lanes.iter().filter_map(move |lane| lane.get(i).copied())).collect())
    }

    fn full_blocks(&self) -> u64 {
        self.rows / self.block_rows
    }

    /// The blocks of a window, as indices into the permutation. All windows but the last consist of full turns of the
    /// lanes, and their sizes differ by at most one turn.
    fn window_blocks(&self, window: u64) -> Range<u64> {
        let (full, windows) = (self.full_blocks(), self.windows());
        let turns = full / LANES;
        let begin = |w: u64| (u128::from(turns) * u128::from(w) / u128::from(windows)) as u64 * LANES;
        begin(window)..if window + 1 >= windows { full } else { begin(window + 1) }
    }

    /// A keyed permutation of 0..n: four Feistel rounds over the next even number of bits, repeated until the result is
    /// below n (cycle walking).
    fn permute(&self, shuffle: Shuffle, index: u64, n: u64) -> u64 {
        let half = (u64::BITS - n.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let s = splitmix64(shuffle.seed ^ fnv1a64(b"order_blocks"));
        let key = [s as u32, (s >> 32) as u32];
        let mut value = index;
        loop {
            let (mut left, mut right) = (value >> half, value & mask);
            for round in 0..4 {
                let words = philox4x32_10([right as u32, (right >> 32) as u32, round, self.epoch], key);
                (left, right) = (right, left ^ (u64::from(words[0]) & mask));
            }
            value = left << half | right;
            if value < n {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn all(order: &Order) -> Vec<u64> {
        (0..order.windows()).flat_map(|w| order.window(w).unwrap()).collect()
    }

    fn shuffled(rows: u64, block_rows: u64, window_blocks: u64, seed: u64, epoch: u32) -> Order {
        Order::new(rows, block_rows, epoch, Some(Shuffle { seed, window_blocks }))
    }

    proptest! {
        #[test]
        fn every_row_comes_once(rows in 1u64..60_000, block in 0u32..6, window in 1u64..300, seed: u64, epoch in 0u32..9) {
            let order = shuffled(rows, 1 << block, window, seed, epoch);
            let mut got = all(&order);
            got.sort_unstable();
            prop_assert!(got.into_iter().eq(0..rows));
        }

        #[test]
        fn positions_are_where_the_windows_are(rows in 1u64..60_000, window in 1u64..300, at in 0f64..1.0) {
            let order = shuffled(rows, 8, window, 1, 0);
            let position = ((rows as f64 * at) as u64).min(rows - 1);
            let found = order.window_of(position);
            prop_assert!(order.positions(found).contains(&position));
            let range = order.positions(found);
            prop_assert_eq!(order.window(found).unwrap().len() as u64, range.end - range.start);
        }
    }

    #[test]
    fn seeds_and_epochs_have_orders_of_their_own() {
        let orders: BTreeSet<Vec<u64>> =
            [(1, 0), (1, 1), (2, 0)].map(|(seed, epoch)| all(&shuffled(5_000, 8, 128, seed, epoch))).into();
        assert_eq!(orders.len(), 3);
    }

    /// A shuffle must leave no correlation of position and row, or of neighbours.
    #[test]
    fn nothing_of_the_old_order_is_left() {
        let n = 100_000u64;
        let rows = all(&shuffled(n, 32, 128, 7, 0));
        let mean = (n - 1) as f64 / 2.0;
        let variance: f64 = (0..n).map(|i| (i as f64 - mean).powi(2)).sum::<f64>();
        let with_position: f64 =
            rows.iter().enumerate().map(|(i, &row)| (i as f64 - mean) * (row as f64 - mean)).sum::<f64>() / variance;
        let with_next: f64 =
            rows.windows(2).map(|w| (w[0] as f64 - mean) * (w[1] as f64 - mean)).sum::<f64>() / variance;
        // rows of one block share a window, so the noise is that of n/32 independent blocks
        let limit = 4.0 / ((n / 32) as f64).sqrt();
        assert!(with_position.abs() < limit, "{with_position}");
        assert!(with_next.abs() < limit, "{with_next}");
        // the rows of a batch of 64 come from 64 blocks
        let blocks: BTreeSet<u64> = rows[6_400..6_464].iter().map(|row| row / 32).collect();
        assert_eq!(blocks.len(), 64);
    }

    #[test]
    fn ranks_share_no_block_in_a_window() {
        let order = shuffled(100_000, 32, 128, 3, 0);
        let rows = order.window(2).unwrap();
        for world in [2usize, 8, 64] {
            let blocks: Vec<BTreeSet<u64>> =
                (0..world).map(|rank| rows.iter().skip(rank).step_by(world).map(|row| row / 32).collect()).collect();
            let distinct = blocks.iter().flatten().collect::<BTreeSet<_>>().len();
            assert_eq!(blocks.iter().map(BTreeSet::len).sum::<usize>(), distinct, "{world}");
        }
    }

    #[test]
    fn rows_as_they_lie() {
        let order = Order::new(10_000, 8, 0, None);
        assert_eq!((order.windows(), order.window(3), order.window_of(9_999)), (20, None, 19));
        assert_eq!(order.positions(19), 9_728..10_000);
    }

    #[test]
    fn the_order_is_this_one_for_ever() {
        let order = shuffled(1_000, 4, 64, 42, 3);
        // a change to this order would break the resumption of every training run in progress
        assert_eq!(order.window(0).unwrap()[..8], [227, 639, 742, 360, 605, 261, 615, 213]);
    }
}
