//! The views of a sequence at each level: a list of times t and a list of groups.
//!
//! ```text
//!   token     t, t′               g: L bits per view            [`partition_row`]
//!   block     t₀ t₁ … , t′₀ …     g: L bits per view            block b has share 1 − α(t_b)
//!   subtoken  t, t′               g: L·ℓ bits per view          digit after digit
//! ```
//!
//! At the levels `block` and `subtoken`, group 1 is what a masked model has masked, and empty groups are not repaired:
//! the papers also train on blocks that are masked completely or not at all.
//!
//! The results equal `views.bd3lm.mask` and `views.prime.mask` of the Python package in epoch 0, bit for bit. This holds
//! with one view, `t_range=(eps, 1 - eps)` (or the job's) and `sampling="sequence"`.
//!
//! | level | purpose | stream | use |
//! |---|---|---|---|
//! | `block` | `bd3lm_t` | view | the b-th number gives t of block b |
//! | | `bd3lm_mask` | view | the i-th number decides position i |
//! | `subtoken` | `prime_t` | view | the first number gives t |
//! | | `prime_mask` | view | the (i·ℓ + j)-th number decides digit j of position i |
//! | both | `partition_strata` | 0 | order of the strata; block b of view v has stratum list\[(v + b) mod views\] |

use stillhouse_noise::keyed_uniforms;

use super::{PartitionLevel, PartitionsConfig, Sampling, group_share, partition_row};
use crate::extract::Sequence;

/// All views of a sequence, concatenated.
pub(super) struct Views {
    pub times: Vec<f32>,
    pub groups: Vec<bool>,
}

impl PartitionsConfig {
    pub(super) fn draw_views(&self, sequence: &Sequence) -> Views {
        let (length, valid) = (sequence.tokens.len(), sequence.valid);
        match self.level {
            PartitionLevel::Token => {
                let mask: Vec<bool> = (0..length).map(|i| i < valid).collect();
                let views = partition_row(self, sequence.id, &mask);
                Views {
                    times: views.iter().map(|view| view.t).collect(),
                    groups: views.into_iter().flat_map(|view| view.groups).collect(),
                }
            }
            PartitionLevel::Block => {
                let size = self.block_length.max(1) as usize;
                self.draw_level(sequence.id, ("bd3lm_t", "bd3lm_mask"), self.blocks(), (length, valid), |i| i / size)
            }
            PartitionLevel::Subtoken => {
                let digits = self.digits as usize;
                self.draw_level(sequence.id, ("prime_t", "prime_mask"), 1, (length * digits, valid * digits), |_| 0)
            }
        }
    }

    /// Draws views with `times` times each. A view has `positions.0` groups; the first `positions.1` of them are not
    /// padding. `block_of` maps a position to the index of its time.
    fn draw_level(
        &self,
        id: u64,
        (time, mask): (&'static str, &'static str),
        times: usize,
        positions: (usize, usize),
        block_of: impl Fn(usize) -> usize,
    ) -> Views {
        let mut strata: Vec<u32> = (0..self.views).collect();
        keyed_uniforms(self.seed, "partition_strata", id, 0).shuffle(&mut strata);
        let mut views = Views { times: Vec::new(), groups: Vec::new() };
        for view in 0..self.views {
            let mut uniforms = keyed_uniforms(self.seed, time, id, view);
            let drawn: Vec<f32> = (0..times)
                .map(|block| {
                    let u = uniforms.next_f64();
                    let stratum = strata[(view as usize + block) % strata.len()];
                    self.time_at(match self.sampling {
                        Sampling::Independent => u,
                        Sampling::Stratified => (f64::from(stratum) + u) / f64::from(self.views),
                    })
                })
                .collect();
            let share = |t: f32| group_share(self.schedule, self.power, f64::from(t));
            let shares: Vec<f64> = drawn.iter().map(|&t| share(t)).collect();
            let mut uniforms = keyed_uniforms(self.seed, mask, id, view);
            let groups = (0..positions.0).map(|i| (uniforms.next_f64() < shares[block_of(i)]) & (i < positions.1));
            views.groups.extend(groups);
            views.times.extend(drawn);
        }
        views
    }

    /// Returns the time at fraction `part` of \[eps, 1 − eps\] or of `t_range`, as an f32 inside these bounds. The
    /// order of operations is that of the Python package's `times`.
    fn time_at(&self, part: f64) -> f32 {
        let [low, high] = self.t_range.unwrap_or([self.eps, 1.0 - self.eps]);
        let stored = (low + (high - low) * part) as f32;
        let inside = if f64::from(stored) < low {
            stored.next_up()
        } else if f64::from(stored) > high {
            stored.next_down()
        } else {
            stored
        };
        // α(1) = 0 would make some weights infinite
        inside.min(1f32.next_down())
    }
}
