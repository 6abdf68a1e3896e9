use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use stillhouse_cpu::Arithmetic;
use stillhouse_gpu::Device;

use crate::error::{Result, TeacherError};

/// The device that runs the teacher: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The first CUDA device if the binary was built with the feature `cuda` and there is one, else the CPU. An
    /// unusable CUDA device is an error, not a fallback to the slower CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device with this ordinal; an error if it does not exist.
    Cuda(usize),
}

const DEVICES: &str = "auto, cpu, cuda, cuda:N, all, or several cuda:N with commas between them";

/// Parses the devices of a job: one [`DeviceChoice`], `all` GPUs, or several of them (`cuda:0,cuda:1`).
///
/// # Errors
/// If a name is invalid or repeated, or for `all` on a machine without GPUs.
pub fn parse_devices(text: &str) -> Result<Vec<DeviceChoice>> {
    let invalid = |what, got: &str| TeacherError::Input { what, got: format!("`{got}`"), valid: DEVICES.into() };
    if text == "all" {
        return match gpu_count()? {
            0 => {
                Err(TeacherError::Device { device: text.into(), message: "this machine has no GPU, valid: cpu".into() })
            }
            count => Ok((0..count).map(DeviceChoice::Cuda).collect()),
        };
    }
    let mut choices = Vec::new();
    for name in text.split(',') {
        let choice = name.parse()?;
        if choices.contains(&choice) {
            return Err(invalid("device, there twice", name));
        }
        choices.push(choice);
    }
    let several = choices.len() > 1;
    match choices.iter().find(|choice| several && !matches!(choice, DeviceChoice::Cuda(_))) {
        Some(other) => Err(invalid("one of several devices", &other.to_string())),
        None => Ok(choices),
    }
}

/// Opens a GPU by its ordinal.
pub type OpenGpu = Box<dyn Fn(usize) -> Result<Arc<dyn Device>> + Send + Sync>;

/// GPUs that replace this machine's.
static PROVIDED_GPUS: OnceLock<(usize, OpenGpu)> = OnceLock::new();

/// Replaces the machine's GPUs with `count` others for this process, such as a test's GPU emulated on the host. Only
/// the first call has an effect.
pub fn provide_gpus(count: usize, open: OpenGpu) {
    let _ = PROVIDED_GPUS.set((count, open));
}

fn gpu_count() -> Result<usize> {
    PROVIDED_GPUS.get().map_or_else(system_gpus::count, |(count, _)| Ok(*count))
}

/// Returns the folders searched for CUDA libraries besides the loader's path, computed once per process. Empty if the
/// program was built without CUDA.
#[must_use]
pub fn library_folders() -> &'static [std::path::PathBuf] {
    system_gpus::library_folders()
}

fn open_gpu(ordinal: usize) -> Result<Arc<dyn Device>> {
    match PROVIDED_GPUS.get() {
        Some((_, open)) => open(ordinal),
        None => system_gpus::open(ordinal),
    }
}

/// The machine's GPUs.
#[cfg(feature = "cuda")]
mod system_gpus {
    use super::{Arc, Device, Result};

    pub fn count() -> Result<usize> {
        Ok(stillhouse_gpu::cuda::count()?)
    }

    pub fn library_folders() -> &'static [std::path::PathBuf] {
        stillhouse_gpu::library_folders()
    }

    pub fn open(ordinal: usize) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(stillhouse_gpu::cuda::Cuda::open(ordinal)?))
    }
}

/// Stand-ins for a program that was built without CUDA.
#[cfg(not(feature = "cuda"))]
mod system_gpus {
    use super::{Arc, Device, DeviceChoice, Result, TeacherError};

    #[expect(clippy::unnecessary_wraps, reason = "as with CUDA")]
    pub fn count() -> Result<usize> {
        Ok(0)
    }

    pub const fn library_folders() -> &'static [std::path::PathBuf] {
        &[]
    }

    pub fn open(ordinal: usize) -> Result<Arc<dyn Device>> {
        let message = "this binary was built without CUDA, valid: cpu".into();
        Err(TeacherError::Device { device: DeviceChoice::Cuda(ordinal).to_string(), message })
    }
}

impl FromStr for DeviceChoice {
    type Err = TeacherError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                text.strip_prefix("cuda:").and_then(|n| n.parse().ok()).map(Self::Cuda).ok_or_else(|| {
                    TeacherError::Input { what: "device", got: format!("`{text}`"), valid: DEVICES.into() }
                })
            }
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = TeacherError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

impl DeviceChoice {
    /// Whether this is the CPU. Does not open a GPU, which would take a second and device memory.
    #[must_use]
    pub fn is_cpu(self) -> bool {
        match self {
            Self::Cpu => true,
            // If the driver fails to start, opening the GPU reports it.
            Self::Auto => matches!(gpu_count(), Ok(0)),
            Self::Cuda(_) => false,
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Returns [`TeacherError::Device`] if a CUDA device was requested by name, or exists, but cannot be used.
    pub fn open(self) -> Result<OpenedDevice> {
        match self {
            choice if choice.is_cpu() => Ok(OpenedDevice::Cpu),
            Self::Cpu | Self::Auto => open_gpu(0).map(OpenedDevice::Gpu),
            Self::Cuda(ordinal) => open_gpu(ordinal).map(OpenedDevice::Gpu),
        }
    }
}

/// An opened device.
#[derive(Debug, Clone)]
pub enum OpenedDevice {
    /// The CPU.
    Cpu,
    /// A GPU.
    Gpu(Arc<dyn Device>),
}

impl OpenedDevice {
    /// Whether this is the CPU.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }
}

/// The precision of weights and activations; on a CPU, of weights and products. Logits are always f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats, the default.
    #[default]
    F32,
    /// bfloat16. On a CPU, products use it and activations are f32. Machines without such products round the weights to
    /// it.
    Bf16,
    /// IEEE half precision; on a CPU as for bfloat16.
    F16,
    /// f32 products made of three bf16 products each: nearly f32's accuracy at bf16 speed on a CPU. f32 on machines
    /// without bf16 products.
    Bf16x3,
    /// 8-bit floats (e4m3) in the products of layers, with a scale per output of a weight and per token; bfloat16 in
    /// everything else, including the head. Only for GPUs that support such products. Measure the loss of accuracy with
    /// [`crate::probe::Reference`] first.
    Fp8,
}

impl Precision {
    /// Whether this machine's CPU has instructions for products in this precision.
    #[must_use]
    pub fn has_cpu_instructions(self) -> bool {
        self.arithmetic().is_some_and(Arithmetic::is_available)
    }

    /// Returns the arithmetic of products on a CPU.
    pub(crate) fn on_cpu(self) -> Result<Arithmetic> {
        self.arithmetic().ok_or_else(|| {
            let (got, valid) = (self.to_string(), "f32, bf16, f16, bf16x3; fp8 is for GPUs".into());
            TeacherError::Input { what: "dtype of a teacher on a CPU", got, valid }
        })
    }

    /// Returns the arithmetic of products on a CPU, or `None` for a precision that only GPUs support.
    fn arithmetic(self) -> Option<Arithmetic> {
        match self {
            Self::F32 => Some(Arithmetic::F32),
            Self::Bf16 => Some(Arithmetic::Bf16),
            Self::F16 => Some(Arithmetic::F16),
            Self::Bf16x3 => Some(Arithmetic::Bf16x3),
            Self::Fp8 => None,
        }
    }
}

impl FromStr for Precision {
    type Err = TeacherError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            "f16" => Ok(Self::F16),
            "bf16x3" => Ok(Self::Bf16x3),
            "fp8" => Ok(Self::Fp8),
            _ => {
                let valid = "f32, bf16, f16, bf16x3, fp8".into();
                Err(TeacherError::Input { what: "dtype", got: format!("`{text}`"), valid })
            }
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Bf16x3 => "bf16x3",
            Self::Fp8 => "fp8",
        })
    }
}
