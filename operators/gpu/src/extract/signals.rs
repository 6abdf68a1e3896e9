//! The other signals of a slice (`stillhouse_noise::SignalSpec`): kernel launches and results.
//!
//! | kernel | passes over a row | results per row |
//! |---|---|---|
//! | `noise_scalars` | one per temperature other than 1, one for the entropy | a float per temperature and candidate, and the entropy |
//! | `noise_drawn` | one, and the blocks that draws fall into | N entries with their ratios; the host, which has the keys, sends the uniforms |
//! | `noise_trimmed` | one, after the top-k | the number of kept most likely tokens, and the tail |

use std::sync::Arc;

use stillhouse_noise::{RowSignals, SampledLogit};

use super::launches::{SliceLaunch, THREADS};
use super::slots::{Mirrored, Slot, f32s, u32s};
use super::{ExtractRequest, Positions};
use crate::device::{Arg, Buffer, Device, Result, Stream, allocated_bytes};

/// Entries per block of running sums, as in kernels/noise/signals.cuh.
const SUM_BLOCK_ENTRIES: usize = 1024;

/// Device memory that all slices share: constants and scratch.
#[derive(Debug)]
pub(super) struct SharedBuffers {
    temperatures: Buffer,
    candidates: Buffer,
    /// Running sums of the blocks of each row (f64).
    running_sums: Buffer,
}

impl SharedBuffers {
    /// Bytes of the running sums.
    fn running_sum_bytes(request: &ExtractRequest, max_rows: usize) -> usize {
        max_rows * request.signals.sampling.map_or(0, |_| request.vocab.div_ceil(SUM_BLOCK_ENTRIES)) * 8
    }

    /// Device bytes of all three buffers.
    pub fn bytes(request: &ExtractRequest, max_rows: usize) -> u64 {
        let signals = &request.signals;
        let [temperatures, candidates] =
            [size_of_val(signals.temperatures.as_slice()), size_of_val(signals.candidates.as_slice())];
        allocated_bytes(&[temperatures, candidates, Self::running_sum_bytes(request, max_rows)])
    }

    pub fn new(device: &Arc<dyn Device>, request: &ExtractRequest, max_rows: usize) -> Result<Self> {
        let signals = &request.signals;
        let temperatures: Vec<u8> = signals.temperatures.iter().flat_map(|t| t.to_ne_bytes()).collect();
        let candidates: Vec<u8> = signals.candidates.iter().flat_map(|k| k.to_ne_bytes()).collect();
        Ok(Self {
            temperatures: Buffer::from_bytes(device, &temperatures)?,
            candidates: Buffer::from_bytes(device, &candidates)?,
            running_sums: Buffer::new(device, Self::running_sum_bytes(request, max_rows))?,
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

fn draws_per_row(request: &ExtractRequest) -> usize {
    request.signals.sampling.map_or(0, |sampling| sampling.draws as usize)
}

/// Floats of a row of `scalars`.
fn scalars_per_row(request: &ExtractRequest) -> usize {
    let signals = &request.signals;
    if signals.temperatures.is_empty() && !signals.entropy && signals.candidates.is_empty() {
        return 0;
    }
    signals.temperatures.len() + 1 + signals.candidates.len()
}

impl SignalSlot {
    /// Bytes of the four regions.
    pub fn sizes(request: &ExtractRequest, max_rows: usize) -> [usize; 4] {
        let (draws, trimmed) = (draws_per_row(request), if request.signals.top_p.is_some() { 8 } else { 0 });
        [scalars_per_row(request) * 4, draws * 8, draws * 8, trimmed].map(|bytes_per_row| max_rows * bytes_per_row)
    }

    pub fn new(device: &Arc<dyn Device>, request: &ExtractRequest, max_rows: usize) -> Result<Self> {
        let [scalars, uniforms, drawn, trimmed] = Self::sizes(request, max_rows);
        Ok(Self {
            scalars: Mirrored::new(device, scalars)?,
            uniforms: Mirrored::new(device, uniforms)?,
            drawn: Mirrored::new(device, drawn)?,
            trimmed: Mirrored::new(device, trimmed)?,
        })
    }

    /// Returns the signals of all rows. Those of rows left to the CPU are meaningless. `top_tokens` holds the most likely
    /// tokens of every row.
    pub fn row_signals(
        &self,
        request: &ExtractRequest,
        rows: usize,
        top_tokens: (Vec<u32>, Vec<f32>),
    ) -> Vec<RowSignals> {
        let (signals, width, draws) = (&request.signals, scalars_per_row(request), draws_per_row(request));
        let values = f32s(&self.scalars.host[..rows * width * 4]);
        let (entries, ratios) = self.drawn.host[..rows * draws * 8].split_at(rows * draws * 4);
        let (entries, ratios) = (u32s(entries), f32s(ratios));
        let trimmed = signals.top_p.map(|_| self.trimmed.host[..rows * 8].split_at(rows * 4));
        let trimmed = trimmed.map(|(counts, tails)| (u32s(counts), f32s(tails)));
        let temperatures = signals.temperatures.len();
        let signals_of_row = |row: usize| {
            let mut row_signals = RowSignals::default();
            if let Some((logz, [entropy, candidates @ ..])) =
                values[row * width..(row + 1) * width].split_at_checked(temperatures)
            {
                (row_signals.logz, row_signals.entropy, row_signals.candidates) =
                    (logz.to_vec(), *entropy, candidates.to_vec());
            }
            let draw_range = row * draws..(row + 1) * draws;
            row_signals.sampled =
                count_distinct(entries[draw_range.clone()].iter().copied().zip(ratios[draw_range].iter().copied()));
            if let Some((counts, tails)) = &trimmed {
                let (k, first) = (request.top_count(), row * request.top_count());
                let kept = first..first + (counts[row] as usize).min(k);
                row_signals.top_p =
                    top_tokens.0[kept.clone()].iter().copied().zip(top_tokens.1[kept].iter().copied()).collect();
                row_signals.tail = tails[row];
            }
            row_signals
        };
        (0..rows).map(signals_of_row).collect()
    }
}

/// Merges draws into distinct entries, ascending, with the number of times that each was drawn.
fn count_distinct(draws: impl Iterator<Item = (u32, f32)>) -> Vec<SampledLogit> {
    let mut draws: Vec<(u32, f32)> = draws.collect();
    draws.sort_unstable_by_key(|draw| draw.0);
    let same = draws.chunk_by(|a, b| a.0 == b.0);
    same.filter_map(|run| run.first().map(|&(index, ratio)| SampledLogit { index, count: run.len() as u32, ratio }))
        .collect()
}

impl SliceLaunch<'_> {
    /// Launches the requested signals after the top-k, and the copies to the host.
    ///
    /// # Safety
    /// As `Scratch::launch`.
    pub unsafe fn signals(&self, slot: &mut Slot, positions: &Positions<'_>) -> Result<()> {
        let (request, rows) = (self.request, self.layout.rows);
        let [logits, stride, vocab] = self.logits_args();
        let (grid, shared) = ([rows as u32, 1, 1], self.shared_buffers());
        let (top_tokens, signal_slot) = (slot.topk.device.pointer(), &mut slot.signals);
        let width = scalars_per_row(request);
        if width > 0 {
            let signals = &request.signals;
            let args = [
                logits,
                stride,
                vocab,
                self.states_arg(),
                Arg::Pointer(shared.temperatures.pointer()),
                Arg::U32(signals.temperatures.len() as u32),
                Arg::U32(u32::from(signals.entropy)),
                Arg::Pointer(shared.candidates.pointer()),
                Arg::U32(signals.candidates.len() as u32),
                Arg::Pointer(signal_slot.scalars.device.pointer()),
            ];
            // SAFETY: the arguments are the kernel's; the buffers hold this many rows
            unsafe {
                self.run("noise_scalars", grid, THREADS, 0, &args)?;
                signal_slot.scalars.fetch(self.device, 0..rows * width * 4)?;
            }
        }
        if let Some(sampling) = &request.signals.sampling {
            let draws = draws_per_row(request);
            let staged = signal_slot.uniforms.host[..rows * draws * 8].as_chunks_mut::<8>().0;
            for (row, to) in staged.chunks_mut(draws.max(1)).enumerate() {
                let mut uniforms = sampling.uniforms(positions.sequence_ids[row], positions.positions[row]);
                to.iter_mut().for_each(|to| *to = uniforms.next_f64().to_ne_bytes());
            }
            let (uniforms, drawn) = (signal_slot.uniforms.device.pointer(), signal_slot.drawn.device.pointer());
            let args = [
                logits,
                stride,
                vocab,
                self.states_arg(),
                Arg::F64(sampling.power),
                Arg::Pointer(uniforms),
                Arg::U32(sampling.draws),
                Arg::Pointer(shared.running_sums.pointer()),
                Arg::Pointer(drawn),
                Arg::Pointer(drawn + (rows * draws * 4) as u64),
            ];
            // SAFETY: as above; the staged uniforms stay unchanged until the slice is collected
            unsafe {
                self.device.copy_to_device(
                    Stream::Extract,
                    uniforms,
                    signal_slot.uniforms.host.as_ptr(),
                    rows * draws * 8,
                )?;
                self.run("noise_drawn", grid, THREADS, 0, &args)?;
                signal_slot.drawn.fetch(self.device, 0..rows * draws * 8)?;
            }
        }
        if let Some(top_p) = &request.signals.top_p {
            let (k, trimmed) = (request.top_count(), signal_slot.trimmed.device.pointer());
            let args = [
                logits,
                stride,
                vocab,
                self.states_arg(),
                Arg::U32(k as u32),
                Arg::Pointer(top_tokens),
                Arg::Pointer(top_tokens + (rows * k * 4) as u64),
                Arg::F64(top_p.mass),
                Arg::U32(top_p.max_entries.min(k) as u32),
                Arg::Pointer(trimmed),
                Arg::Pointer(trimmed + (rows * 4) as u64),
            ];
            // SAFETY: as above
            unsafe {
                self.run("noise_trimmed", grid, THREADS, 0, &args)?;
                signal_slot.trimmed.fetch(self.device, 0..rows * 8)?;
            }
        }
        Ok(())
    }
}
