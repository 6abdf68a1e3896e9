//! Teachers on this machine's CPU: a net from `families/` and its work buffers.

mod decoding;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{Device, Tensor};

use self::decoding::CpuDecoding;
use crate::config::TeacherConfig;
use crate::contract::{Decoding, Hidden, Logits, Runs, check_slice, floats, host_slice_rows};
use crate::device::Precision;
use crate::error::{Result, TeacherError};
use crate::model::{BuiltNet, build, check_tokens, describe};
use crate::net::{
    Arithmetic, Net, PassBuffers, ProductScratch, StateCapture, attention_level_name, level_name, soft_cap,
};
use crate::weights::{Read, Weights};
use crate::{HostTeacher, Teacher, TeacherInfo};

/// A teacher on the CPU.
pub(crate) struct CpuTeacher {
    pub(crate) info: TeacherInfo,
    pub(crate) net: Net,
    work: Mutex<PassBuffers>,
    head: Mutex<HeadBuffers>,
}

fn info(
    path: &Path,
    config: &TeacherConfig,
    weights: &Weights,
    (dtype, arithmetic): (Precision, Arithmetic),
) -> TeacherInfo {
    let info = describe(path, config, weights, dtype, "cpu");
    TeacherInfo { arithmetic: format!("{}, {}", info.arithmetic, instructions(arithmetic)), ..info }
}

/// Returns the arithmetic that a teacher on this machine's CPU would report ([`TeacherInfo::arithmetic`]). Reads only
/// headers.
///
/// # Errors
/// As [`check_weights`](crate::check_weights).
pub fn cpu_arithmetic(path: &Path, dtype: Precision, ignore: &[String]) -> Result<String> {
    let arithmetic = dtype.on_cpu()?;
    let config = TeacherConfig::read(path)?;
    let BuiltNet { weights, .. } = build(path, &config, Arithmetic::F32, Read::Headers, ignore)?;
    Ok(info(path, &config, &weights, (dtype, arithmetic)).arithmetic)
}

/// Names the instructions that affect the bits of a pass: those of products and attention. Everything else has the same
/// bits on every machine.
fn instructions(arithmetic: Arithmetic) -> String {
    let (products, of) = match arithmetic {
        Arithmetic::F32 => ("products", arithmetic),
        other if other.is_available() => ("products", other),
        _ => ("f32 products", Arithmetic::F32),
    };
    let (on, attention) = (level_name(of), attention_level_name(of));
    let machine = std::env::consts::ARCH;
    match on == attention {
        true => format!("{products} and attention on {machine} {on}"),
        false => format!("{products} on {machine} {on}, attention on {attention}"),
    }
}

/// Work buffers for slices of logits.
#[derive(Default)]
struct HeadBuffers {
    rows: Vec<f32>,
    product: ProductScratch,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that a teacher has the layers whose states are requested.
pub(crate) fn check_layers(info: &TeacherInfo, layers: &[usize]) -> Result<()> {
    let Some(layer) = layers.iter().find(|layer| **layer > info.layers) else { return Ok(()) };
    let (got, valid) = (layer.to_string(), format!("0 to {}", info.layers));
    Err(TeacherError::Input { what: "layer of hidden states", got, valid })
}

impl CpuTeacher {
    pub(crate) fn load(path: &Path, dtype: Precision, ignore: &[String]) -> Result<Self> {
        let arithmetic = dtype.on_cpu()?;
        let config = TeacherConfig::read(path)?;
        let BuiltNet { net, weights, .. } = build(path, &config, arithmetic, Read::Weights, ignore)?;
        let info = info(path, &config, &weights, (dtype, arithmetic));
        Ok(Self { info, net, work: Mutex::default(), head: Mutex::default() })
    }

    fn states(&self, runs: &Runs, capture: &mut StateCapture<'_>) -> Result<Tensor> {
        let (tokens, width) = (runs.tokens().len(), self.info.hidden_size);
        let mut states = vec![0.0; tokens * width];
        self.net.states(runs, &mut locked(&self.work), &mut states, capture)?;
        Ok(Tensor::from_vec(states, (tokens, width), &Device::Cpu)?)
    }

    /// Computes logits of the rows `numbers` of `states`; every number must be below their count.
    pub(crate) fn logits_of(&self, states: &[f32], numbers: &[u32], out: &mut Vec<f32>) -> Result<()> {
        let width = self.info.hidden_size;
        out.resize(numbers.len() * self.info.vocab_size, 0.0);
        if numbers.is_empty() {
            return Ok(());
        }
        let HeadBuffers { rows, product } = &mut *locked(&self.head);
        let first = numbers[0];
        let consecutive = numbers.iter().zip(first..).all(|(row, expected)| *row == expected);
        let x = if consecutive {
            &states[first as usize * width..][..numbers.len() * width]
        } else {
            rows.clear();
            numbers.iter().for_each(|row| rows.extend_from_slice(&states[*row as usize * width..][..width]));
            rows
        };
        self.net.head.weight.forward_in_pool(x, out, product)?;
        if let Some(cap) = self.net.head.soft_cap {
            soft_cap(out, cap);
        }
        Ok(())
    }
}

impl Teacher for CpuTeacher {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn slice_rows(&self) -> usize {
        host_slice_rows(self.info.vocab_size)
    }

    fn buffer(&self) -> Result<Logits> {
        Ok(Logits::Host(Vec::new()))
    }

    fn pass(&self, runs: &Runs) -> Result<Hidden> {
        Ok(self.pass_with_states(runs, &[])?.0)
    }

    fn pass_with_states(&self, runs: &Runs, layers: &[usize]) -> Result<(Hidden, Vec<f32>)> {
        for run in runs.iter() {
            check_tokens(&self.info, run, 1, run.len())?;
        }
        check_layers(&self.info, layers)?;
        let rows = (0..runs.tokens().len() as u32).collect();
        let mut captured = vec![0.0; runs.tokens().len() * layers.len() * self.info.hidden_size];
        let states = self.states(runs, &mut StateCapture { layers, out: &mut captured })?;
        Ok((Hidden::Host { states, rows }, captured))
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()> {
        let (Hidden::Host { states, rows }, Logits::Host(logits)) = (hidden, logits) else {
            let (got, valid) = ("those of a device".into(), "those of this teacher".into());
            return Err(TeacherError::Input { what: "hidden states or logits", got, valid });
        };
        check_slice(tokens, rows.len())?;
        floats(states, |states| self.logits_of(states, tokens, logits))
    }

    fn decoding(&self, slots: usize, length: usize, layers: &[usize]) -> Result<Box<dyn Decoding + '_>> {
        Ok(Box::new(CpuDecoding::new(self, slots, length, layers)?))
    }
}

impl HostTeacher for CpuTeacher {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Tensor> {
        check_tokens(&self.info, tokens, batch, length)?;
        let mut runs = Runs::new();
        tokens.chunks(length).for_each(|run| runs.push(run.iter().copied()));
        Ok(self.states(&runs, &mut StateCapture::default())?.reshape((batch, length, self.info.hidden_size))?)
    }

    fn logits(&self, hidden_rows: &Tensor) -> Result<Tensor> {
        let mut logits = Vec::new();
        self.logits_into(hidden_rows, &mut logits)?;
        Ok(Tensor::from_vec(logits, (hidden_rows.dim(0)?, self.info.vocab_size), &Device::Cpu)?)
    }

    fn logits_into(&self, hidden_rows: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        let width = self.info.hidden_size;
        let count = match hidden_rows.dims() {
            [count, got] if *count > 0 && *got == width => *count as u32,
            got => {
                let (got, valid) = (format!("{got:?}"), format!("[n, {width}] with n at least 1"));
                return Err(TeacherError::Input { what: "shape of the hidden rows", got, valid });
            }
        };
        let rows: Vec<u32> = (0..count).collect();
        floats(&hidden_rows.contiguous()?, |states| self.logits_of(states, &rows, out))
    }
}
