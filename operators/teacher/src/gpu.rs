//! Teachers on GPUs: they read the same files, and keep the net and the logits in device memory.

mod budget;
mod shape;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use stillhouse_gpu::net::{
    Architecture as DeviceArchitecture, Net, NumberFormat, Rope as Angles, Source, StoredTensor,
};
use stillhouse_gpu::{Device, Element, GpuError, Stream};

use crate::config::TeacherConfig;
use crate::contract::{DeviceLogits, Hidden, Logits, Runs};
use crate::device::Precision;
use crate::error::{Result, TeacherError};
use crate::families;
use crate::families::Architecture;
use crate::model::{BuiltNet, LoadOptions, build, check_tokens, describe, open, quoted_fields};
use crate::net::{Arithmetic, RopeFields, Tables};
use crate::weights::{Read, Weights};
use crate::{Teacher, TeacherInfo};
use budget::{Budget, FittedNet};

struct GpuTeacher {
    info: TeacherInfo,
    device: Arc<dyn Device>,
    net: Mutex<Net>,
    slice_rows: usize,
    pass_tokens: usize,
    warning: Option<String>,
}

/// Loads a model onto a device and allocates memory for its passes. A pass gets the requested number of tokens, or a
/// half, a quarter … of it if memory is short. A resumed run gets exactly the number of the earlier run. The contents
/// of a pass affect the last bits of logits, so a reduced number is part of [`TeacherInfo::arithmetic`].
///
/// # Errors
/// As [`crate::load`]. Also if the weights and a pass over one sequence do not fit the device; the error states the
/// required and the free bytes.
pub fn load(path: &Path, device: &Arc<dyn Device>, options: &LoadOptions) -> Result<Box<dyn Teacher>> {
    let dtype = options.dtype;
    let numbers = device_numbers(dtype)?;
    let config = TeacherConfig::read(path)?;
    // Reports errors in headers before the device is filled.
    let BuiltNet { net, weights: headers, .. } =
        build(path, &config, Arithmetic::F32, Read::Headers, &options.ignore_tensors)?;
    let kind = kind(config.architecture)?;
    let length = options.length.clamp(1, config.max_positions);
    let shape = shape::shape(kind, &net, config.max_positions, length)?;
    let (json, weights) = open(path, &config, Read::Weights)?;
    let slice_rows = stillhouse_gpu::slice_rows(config.vocab_size);
    let wanted = options.batch_tokens.max(length);
    let angles = match shape.architecture {
        DeviceArchitecture::Gpt2 => None,
        DeviceArchitecture::Llama | DeviceArchitecture::Qwen3 => {
            let fields = RopeFields::from_config(&json, shape.head_dim);
            if !net.ropes.contains(&families::rope(&fields, &headers)?) {
                let (got, valid) = ("other than the family's".into(), "that of a Llama, or device: cpu".into());
                return Err(TeacherError::Input { what: "rotation of positions on a GPU", got, valid });
            }
            Some(families::rope(&fields, &weights)?.tables(shape.positions))
        }
    };
    let angles = angles.as_ref().map(|Tables { cos, sin }| Angles { cos, sin });
    if shape.tied {
        weights.check_tied("lm_head.weight", config.architecture.family().prefix().1)?;
    }
    let make = |pass_tokens| {
        let mut source = WeightSource { weights: &weights, error: None };
        let net = Net::load(device, shape, numbers, angles, &mut source, pass_tokens);
        source.error.map_or_else(|| net.map_err(TeacherError::from), Err)
    };
    let extraction = options.extraction.as_ref();
    let budget = Budget { device, shape: &shape, numbers, slice_rows, extraction };
    let FittedNet { net, pass_tokens, warning } = budget.fit([wanted, length], options.pass_tokens, make)?;
    weights.check_all_used(
        &quoted_fields(path, &config, &json),
        &|name| config.architecture.family().is_buffer(name, config.layers),
        &options.ignore_tensors,
    )?;
    let mut info = describe(path, &config, &weights, dtype, device.name());
    // Another type of GPU, or another version of cuBLASLt, changes the last bits.
    let rest = if numbers == NumberFormat::Fp8 { ", the rest in bf16" } else { "" };
    info.arithmetic = format!("{}, sums in f32{rest}, on {}", info.arithmetic, device.arithmetic());
    if pass_tokens < wanted {
        info.arithmetic += &format!(", passes of {pass_tokens} tokens");
    }
    let (device, net) = (Arc::clone(device), Mutex::new(net));
    Ok(Box::new(GpuTeacher { info, device, net, slice_rows, pass_tokens, warning }))
}

fn device_numbers(dtype: Precision) -> Result<NumberFormat> {
    match dtype {
        // bf16x3 is a substitute for f32, which GPUs have.
        Precision::F32 | Precision::Bf16x3 => Ok(NumberFormat::Dtype(Element::F32)),
        Precision::Bf16 => Ok(NumberFormat::Dtype(Element::Bf16)),
        Precision::F16 => Ok(NumberFormat::Dtype(Element::F16)),
        Precision::Fp8 => Ok(NumberFormat::Fp8),
    }
}

/// Maps an architecture to a net that devices support.
fn kind(architecture: Architecture) -> Result<DeviceArchitecture> {
    architecture.family().device_kind().ok_or_else(|| {
        let on_devices = Architecture::all().filter(|known| known.family().device_kind().is_some());
        let names: Vec<_> = on_devices.map(Architecture::name).collect();
        let valid = format!("{} on a GPU; the others with device: cpu", names.join(", "));
        TeacherError::Input { what: "architecture", got: architecture.name().into(), valid }
    })
}

/// Hands out weights from files to the device.
struct WeightSource<'a> {
    weights: &'a Weights,
    error: Option<TeacherError>,
}

impl Source for WeightSource<'_> {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, GpuError> {
        let weight = match name {
            "lm_head.weight" => self.weights.bare_floats(name, shape),
            _ => self.weights.floats(name, shape),
        };
        weight.map_err(|error| self.record_error(error))
    }

    fn stored(&mut self, name: &str, shape: &[usize]) -> std::result::Result<StoredTensor<'_>, GpuError> {
        let weight = match name {
            "lm_head.weight" => self.weights.bare_stored(name, shape),
            _ => self.weights.stored(name, shape),
        };
        weight.map_err(|error| self.record_error(error))
    }
}

impl WeightSource<'_> {
    /// Keeps the original error for the caller of `load` to return.
    fn record_error(&mut self, error: TeacherError) -> GpuError {
        let (got, valid) = (error.to_string(), "a weight of this name and shape".into());
        self.error = Some(error);
        GpuError::Input { what: "weight", got, valid }
    }
}

impl GpuTeacher {
    fn net(&self) -> std::sync::MutexGuard<'_, Net> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Teacher for GpuTeacher {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn slice_rows(&self) -> usize {
        self.slice_rows
    }

    fn pass_tokens(&self) -> usize {
        self.pass_tokens
    }

    fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    fn buffer(&self) -> Result<Logits> {
        Ok(Logits::Device(DeviceLogits::new(&self.device, self.slice_rows, self.info.vocab_size)?))
    }

    fn pass(&self, runs: &Runs) -> Result<Hidden> {
        for run in runs.iter() {
            check_tokens(&self.info, run, 1, run.len())?;
        }
        self.net().hidden(runs.tokens(), runs.offsets())?;
        Ok(Hidden::Device)
    }

    fn pass_with_states(&self, runs: &Runs, layers: &[usize]) -> Result<(Hidden, Vec<f32>)> {
        if layers.is_empty() {
            return Ok((self.pass(runs)?, Vec::new()));
        }
        for run in runs.iter() {
            check_tokens(&self.info, run, 1, run.len())?;
        }
        let states = self.net().hidden_with_layers(runs.tokens(), runs.offsets(), layers)?;
        Ok((Hidden::Device, states))
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()> {
        let (Hidden::Device, Logits::Device(logits)) = (hidden, logits) else {
            let (got, valid) = ("those of the CPU".into(), "those of this teacher".into());
            return Err(TeacherError::Input { what: "hidden states or logits", got, valid });
        };
        let capacity = logits.capacity_rows();
        if tokens.len() > capacity {
            let (got, valid) = (tokens.len().to_string(), format!("at most {capacity}"));
            return Err(TeacherError::Input { what: "rows of a slice", got, valid });
        }
        // SAFETY: the buffer can hold this number of rows, and its owner has waited for the results of its previous
        // contents
        unsafe { self.net().logits_into(tokens, logits.pointer(), logits.stride())? };
        logits.set_rows(tokens.len(), self.device.record(Stream::Pass)?);
        Ok(())
    }
}
