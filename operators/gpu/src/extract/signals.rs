//! The other signals of a slice (`stillhouse_noise::Signals`): kernel launches and results.
//!
//! | kernel | passes over a row | results per row |
//! |---|---|---|
//! | `noise_scalars` | one per temperature other than 1, one for the entropy | a float per temperature and candidate, and the entropy |
//! | `noise_drawn` | one, and the blocks that draws fall into | N entries with their ratios; the host, which has the keys, sends the uniforms |
//! | `noise_trimmed` | one, after the top-k | the number of kept most likely tokens, and the tail |

use std::sync::Arc;

use stillhouse_noise::{RowSignals, Sampled};

use super::slots::{Mirrored, Slot, f32s, u32s};
use super::work::{Slice, THREADS};
use super::{Asked, Positions};
use crate::device::{Arg, Buffer, Device, Result, Stream, taken};

/// Entries per block of running sums, as in kernels/noise/signals.cuh.
const SUMMED: usize = 1024;

/// Device memory that all slices share: constants and scratch.
#[derive(Debug)]
pub(super) struct Constants {
    temperatures: Buffer,
    candidates: Buffer,
    /// Running sums of the blocks of each row (f64).
    running: Buffer,
}

impl Constants {
    /// Bytes of the running sums.
    fn running(asked: &Asked, most_rows: usize) -> usize {
        most_rows * asked.signals.sampling.map_or(0, |_| asked.vocab.div_ceil(SUMMED)) * 8
    }

    /// Device bytes of all three buffers.
    pub fn bytes(asked: &Asked, most_rows: usize) -> u64 {
        let signals = &asked.signals;
        let [temperatures, candidates] =
            [size_of_val(signals.temperatures.as_slice()), size_of_val(signals.candidates.as_slice())];
        taken(&[temperatures, candidates, Self::running(asked, most_rows)])
    }

    pub fn new(device: &Arc<dyn Device>, asked: &Asked, most_rows: usize) -> Result<Self> {
        let signals = &asked.signals;
        let temperatures: Vec<u8> = signals.temperatures.iter().flat_map(|t| t.to_ne_bytes()).collect();
        let candidates: Vec<u8> = signals.candidates.iter().flat_map(|k| k.to_ne_bytes()).collect();
        Ok(Self {
            temperatures: Buffer::of(device, &temperatures)?,
            candidates: Buffer::of(device, &candidates)?,
            running: Buffer::new(device, Self::running(asked, most_rows))?,
        })
    }
}

/// The memory of one slice in flight.
#[derive(Debug)]
pub(super) struct SignalSlot {
    /// Per row: the log-partitions, the entropy, the candidates (f32).
    scalars: Mirrored,
    /// Uniforms of the draws, f64 `[n, N]`.
    uniforms: Mirrored,
    /// Drawn entries `[n, N]`, then their ratios `[n, N]`.
    drawn: Mirrored,
    /// Numbers of kept tokens `[n]`, then the tails `[n]`.
    trimmed: Mirrored,
}

fn draws(asked: &Asked) -> usize {
    asked.signals.sampling.map_or(0, |sampling| sampling.draws as usize)
}

/// Floats of a row of `scalars`.
fn scalars(asked: &Asked) -> usize {
    let signals = &asked.signals;
    if signals.temperatures.is_empty() && !signals.entropy && signals.candidates.is_empty() {
        return 0;
    }
    signals.temperatures.len() + 1 + signals.candidates.len()
}

impl SignalSlot {
    /// Bytes of the four regions.
    pub fn sizes(asked: &Asked, most_rows: usize) -> [usize; 4] {
        let (draws, trimmed) = (draws(asked), if asked.signals.top_p.is_some() { 8 } else { 0 });
        [scalars(asked) * 4, draws * 8, draws * 8, trimmed].map(|of_a_row| most_rows * of_a_row)
    }

    pub fn new(device: &Arc<dyn Device>, asked: &Asked, most_rows: usize) -> Result<Self> {
        let [scalars, uniforms, drawn, trimmed] = Self::sizes(asked, most_rows);
        Ok(Self {
            scalars: Mirrored::new(device, scalars)?,
            uniforms: Mirrored::new(device, uniforms)?,
            drawn: Mirrored::new(device, drawn)?,
            trimmed: Mirrored::new(device, trimmed)?,
        })
    }

    /// Returns the signals of all rows. Those of rows left to the CPU are meaningless. `listed` holds the most likely
    /// tokens of every row.
    pub fn rows(&self, asked: &Asked, rows: usize, listed: (Vec<u32>, Vec<f32>)) -> Vec<RowSignals> {
        let (signals, width, draws) = (&asked.signals, scalars(asked), draws(asked));
        let values = f32s(&self.scalars.host[..rows * width * 4]);
        let (entries, ratios) = self.drawn.host[..rows * draws * 8].split_at(rows * draws * 4);
        let (entries, ratios) = (u32s(entries), f32s(ratios));
        let trimmed = signals.top_p.map(|_| self.trimmed.host[..rows * 8].split_at(rows * 4));
        let trimmed = trimmed.map(|(counts, tails)| (u32s(counts), f32s(tails)));
        let temperatures = signals.temperatures.len();
        let of_row = |row: usize| {
            let mut made = RowSignals::default();
            if let Some((logz, [entropy, candidates @ ..])) =
                values[row * width..(row + 1) * width].split_at_checked(temperatures)
            {
                (made.logz, made.entropy, made.candidates) = (logz.to_vec(), *entropy, candidates.to_vec());
            }
            let of_draws = row * draws..(row + 1) * draws;
            made.sampled = counted(entries[of_draws.clone()].iter().copied().zip(ratios[of_draws].iter().copied()));
            if let Some((counts, tails)) = &trimmed {
                let (k, first) = (asked.listed(), row * asked.listed());
                let kept = first..first + (counts[row] as usize).min(k);
                made.top_p = listed.0[kept.clone()].iter().copied().zip(listed.1[kept].iter().copied()).collect();
                made.tail = tails[row];
            }
            made
        };
        (0..rows).map(of_row).collect()
    }
}

/// Merges draws into distinct entries, ascending, with the number of times that each was drawn.
fn counted(draws: impl Iterator<Item = (u32, f32)>) -> Vec<Sampled> {
    let mut draws: Vec<(u32, f32)> = draws.collect();
    draws.sort_unstable_by_key(|draw| draw.0);
    let same = draws.chunk_by(|a, b| a.0 == b.0);
    same.filter_map(|run| run.first().map(|&(index, ratio)| Sampled { index, times: run.len() as u32, ratio }))
        .collect()
}

impl Slice<'_> {
    /// Launches the requested signals after the top-k, and the copies to the host.
    ///
    /// # Safety
    /// As `Work::launch`.
    pub unsafe fn signals(&self, slot: &mut Slot, positions: &Positions<'_>) -> Result<()> {
        let (asked, rows) = (self.asked, self.layout.rows);
        let [logits, stride, vocab] = self.at_logits();
        let (grid, constants) = ([rows as u32, 1, 1], self.constants());
        let (listed, of) = (slot.topk.device.pointer(), &mut slot.signals);
        let width = scalars(asked);
        if width > 0 {
            let signals = &asked.signals;
            let args = [
                logits,
                stride,
                vocab,
                self.states(),
                Arg::Pointer(constants.temperatures.pointer()),
                Arg::U32(signals.temperatures.len() as u32),
                Arg::U32(u32::from(signals.entropy)),
                Arg::Pointer(constants.candidates.pointer()),
                Arg::U32(signals.candidates.len() as u32),
                Arg::Pointer(of.scalars.device.pointer()),
            ];
            // SAFETY: the arguments are the kernel's; the buffers hold this many rows
            unsafe {
                self.run("noise_scalars", grid, THREADS, 0, &args)?;
                of.scalars.fetch(self.device, 0..rows * width * 4)?;
            }
        }
        if let Some(sampling) = &asked.signals.sampling {
            let draws = draws(asked);
            let staged = of.uniforms.host[..rows * draws * 8].as_chunks_mut::<8>().0;
            for (row, to) in staged.chunks_mut(draws.max(1)).enumerate() {
                let mut uniforms = sampling.uniforms(positions.sequence_ids[row], positions.positions[row]);
                to.iter_mut().for_each(|to| *to = uniforms.next_f64().to_ne_bytes());
            }
            let (uniforms, drawn) = (of.uniforms.device.pointer(), of.drawn.device.pointer());
            let args = [
                logits,
                stride,
                vocab,
                self.states(),
                Arg::F64(sampling.power),
                Arg::Pointer(uniforms),
                Arg::U32(sampling.draws),
                Arg::Pointer(constants.running.pointer()),
                Arg::Pointer(drawn),
                Arg::Pointer(drawn + (rows * draws * 4) as u64),
            ];
            // SAFETY: as above; the staged uniforms stay unchanged until the slice is collected
            unsafe {
                self.device.copy_in(Stream::Extract, uniforms, of.uniforms.host.as_ptr(), rows * draws * 8)?;
                self.run("noise_drawn", grid, THREADS, 0, &args)?;
                of.drawn.fetch(self.device, 0..rows * draws * 8)?;
            }
        }
        if let Some(top_p) = &asked.signals.top_p {
            let (k, trimmed) = (asked.listed(), of.trimmed.device.pointer());
            let args = [
                logits,
                stride,
                vocab,
                self.states(),
                Arg::U32(k as u32),
                Arg::Pointer(listed),
                Arg::Pointer(listed + (rows * k * 4) as u64),
                Arg::F64(top_p.mass),
                Arg::U32(top_p.most.min(k) as u32),
                Arg::Pointer(trimmed),
                Arg::Pointer(trimmed + (rows * 4) as u64),
            ];
            // SAFETY: as above
            unsafe {
                self.run("noise_trimmed", grid, THREADS, 0, &args)?;
                of.trimmed.fetch(self.device, 0..rows * 8)?;
            }
        }
        Ok(())
    }
}
