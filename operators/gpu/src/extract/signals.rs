//! The signals of a slice (`stillhouse_noise::Signal`): memory and launches of their kernels.
//!
//! All kernels have the parameters of `SIGNAL_KERNEL` in kernels/noise/signals.cuh. They run after
//! `noise_topk`, which lists the most likely tokens of each row.

use std::sync::Arc;

use stillhouse_noise::SignalKernel;

use super::launches::{SliceLaunch, THREADS};
use super::slots::{Mirrored, Slot};
use super::{ExtractRequest, Positions};
use crate::device::{Arg, Buffer, Device, Result, Stream, allocated_bytes};

/// A signal's kernel with the device memory that all slices share.
#[derive(Debug)]
pub(super) struct SignalLaunch {
    kernel: SignalKernel,
    constants: Buffer,
    scratch: Buffer,
}

impl SignalLaunch {
    /// Device bytes of a kernel's constants and scratch memory.
    pub fn bytes(kernel: &SignalKernel, max_rows: usize) -> u64 {
        allocated_bytes(&[kernel.constants.len(), max_rows * kernel.scratch_bytes])
    }

    pub fn all(device: &Arc<dyn Device>, request: &ExtractRequest, max_rows: usize) -> Result<Vec<Self>> {
        let launch = |kernel: SignalKernel| {
            let constants = Buffer::from_bytes(device, &kernel.constants)?;
            let scratch = Buffer::new(device, max_rows * kernel.scratch_bytes)?;
            Ok(Self { kernel, constants, scratch })
        };
        request.signals.kernels(request.vocab).into_iter().map(launch).collect()
    }
}

/// The memory of a signal of one slice in flight.
#[derive(Debug)]
pub(super) struct SignalSlot {
    input: Mirrored,
    output: Mirrored,
    output_bytes: usize,
}

impl SignalSlot {
    /// Device bytes of inputs and outputs.
    pub fn bytes(kernel: &SignalKernel, max_rows: usize) -> u64 {
        allocated_bytes(&[max_rows * kernel.input_bytes, max_rows * kernel.output_bytes])
    }

    pub fn output_of_row(&self, row: usize) -> &[u8] {
        &self.output.host[row * self.output_bytes..(row + 1) * self.output_bytes]
    }
}

/// Allocates the memory of all signals of a slice of at most `max_rows` rows.
pub(super) fn signal_slots(
    device: &Arc<dyn Device>,
    request: &ExtractRequest,
    max_rows: usize,
) -> Result<Vec<SignalSlot>> {
    let slot = |kernel: SignalKernel| {
        Ok(SignalSlot {
            input: Mirrored::new(device, max_rows * kernel.input_bytes)?,
            output: Mirrored::new(device, max_rows * kernel.output_bytes)?,
            output_bytes: kernel.output_bytes,
        })
    };
    request.signals.kernels(request.vocab).into_iter().map(slot).collect()
}

impl SliceLaunch<'_> {
    /// Launches the kernels of all signals after `noise_topk`, and the copies to the host.
    ///
    /// # Safety
    /// As `Scratch::launch`.
    pub unsafe fn signals(&self, slot: &mut Slot, positions: &Positions<'_>) -> Result<()> {
        let (rows, k) = (self.layout.rows, self.request.top_count());
        let [logits, stride, vocab] = self.logits_args();
        let top_tokens = slot.top_tokens.device.pointer();
        let signals = self.request.signals.iter().zip(self.signal_launches()).zip(&mut slot.signals);
        for ((signal, SignalLaunch { kernel, constants, scratch }), slot) in signals {
            let Some(name) = kernel.name else { continue };
            let inputs = slot.input.device.pointer();
            if kernel.input_bytes > 0 {
                let staged = slot.input.host[..rows * kernel.input_bytes].chunks_exact_mut(kernel.input_bytes);
                for (row, input) in staged.enumerate() {
                    signal.write_kernel_input(positions.sequence_ids[row], positions.positions[row], input);
                }
                // SAFETY: the staged inputs stay unchanged until the slice is collected
                unsafe {
                    let from = slot.input.host.as_ptr();
                    self.device.copy_to_device(Stream::Extract, inputs, from, rows * kernel.input_bytes)?;
                }
            }
            let args = [
                logits,
                stride,
                vocab,
                self.states_arg(),
                Arg::Pointer(constants.pointer()),
                Arg::U32(kernel.count),
                Arg::Pointer(inputs),
                Arg::Pointer(scratch.pointer()),
                Arg::Pointer(top_tokens),
                Arg::Pointer(top_tokens + (rows * k * 4) as u64),
                Arg::U32(k as u32),
                Arg::Pointer(slot.output.device.pointer()),
            ];
            // SAFETY: the arguments are the kernel's; the buffers hold this many rows
            unsafe {
                self.run(name, [rows as u32, 1, 1], THREADS, 0, &args)?;
                slot.output.fetch(self.device, 0..rows * kernel.output_bytes)?;
            }
        }
        Ok(())
    }
}
