use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use stillhouse_cpu::Arithmetic;
use stillhouse_gpu::Device;

use crate::error::{Result, TeacherError};

/// Where the teacher runs: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The first CUDA device if this binary was built with the feature `cuda` and one is there (that it cannot be used then is an
    /// error, not a reason to be slow), else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA device of this ordinal; an error where it is not there.
    Cuda(usize),
}

const DEVICES: &str = "auto, cpu, cuda, cuda:N, all, or several cuda:N with commas between them";

/// The devices that a job names: one of [`DeviceChoice`], `all` GPUs, or several of them (`cuda:0,cuda:1`).
///
/// # Errors
/// With a name that is none, one that is there twice, or `all` where there is no GPU.
pub fn devices(text: &str) -> Result<Vec<DeviceChoice>> {
    let invalid = |what, got: &str| TeacherError::Input { what, got: format!("`{got}`"), valid: DEVICES.into() };
    if text == "all" {
        return match gpus()? {
            0 => Err(TeacherError::Device { device: text.into(), message: "there is no GPU here, valid: cpu".into() }),
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

/// Opens a GPU by its number.
pub type OpenGpu = Box<dyn Fn(usize) -> Result<Arc<dyn Device>> + Send + Sync>;

/// GPUs in the place of this machine's.
static OTHERS: OnceLock<(usize, OpenGpu)> = OnceLock::new();

/// Gives this program so many GPUs of its own in the place of the machine's, as a test does whose GPU is the host; the first ones stay.
pub fn provide_gpus(count: usize, open: OpenGpu) {
    let _ = OTHERS.set((count, open));
}

fn gpus() -> Result<usize> {
    OTHERS.get().map_or_else(here::count, |(count, _)| Ok(*count))
}

/// Folders in which CUDA's libraries are looked for, besides the loader's path; none where this program was built without CUDA. Looked up once for the process.
#[must_use]
pub fn library_folders() -> &'static [std::path::PathBuf] {
    here::library_folders()
}

fn open_gpu(ordinal: usize) -> Result<Arc<dyn Device>> {
    match OTHERS.get() {
        Some((_, open)) => open(ordinal),
        None => here::open(ordinal),
    }
}

/// The machine's own.
#[cfg(feature = "cuda")]
mod here {
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

/// The machine's own, for which this program was not built.
#[cfg(not(feature = "cuda"))]
mod here {
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
    /// Whether this is the CPU: without opening a GPU, which takes a second and memory there.
    #[must_use]
    pub fn is_cpu(self) -> bool {
        match self {
            Self::Cpu => true,
            // that a driver does not begin is told where the GPU is opened
            Self::Auto => matches!(gpus(), Ok(0)),
            Self::Cuda(_) => false,
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// [`TeacherError::Device`] when a CUDA device was asked for by name, or is there, and cannot be had.
    pub fn open(self) -> Result<Opened> {
        match self {
            choice if choice.is_cpu() => Ok(Opened::Cpu),
            Self::Cpu | Self::Auto => open_gpu(0).map(Opened::Gpu),
            Self::Cuda(ordinal) => open_gpu(ordinal).map(Opened::Gpu),
        }
    }
}

/// A device that is there.
#[derive(Debug, Clone)]
pub enum Opened {
    /// The CPU.
    Cpu,
    /// A GPU.
    Gpu(Arc<dyn Device>),
}

impl Opened {
    /// Whether it is the CPU.
    #[must_use]
    pub fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }
}

/// The type that weights and activations have; logits are f32 whatever it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit: the default.
    #[default]
    F32,
    /// bfloat16. On a CPU the products are in it, activations are f32; where the machine has no such products, weights are rounded to it.
    Bf16,
    /// IEEE half; on a CPU as with bfloat16.
    F16,
    /// f32 products, each of three of bf16: nearly f32's accuracy at a CPU's speed in bf16; f32 where the machine has no such products.
    Bf16x3,
    /// 8-bit floats (e4m3) in the products of layers, a scale for each output of a weight and each token; everything else, the head too, in
    /// bfloat16. Only on GPUs that have such products. What it costs is to be asked of a [`crate::probe::Reference`] first.
    Fp8,
}

impl Precision {
    /// Whether this machine's CPU has instructions for products of this type.
    #[must_use]
    pub fn is_native(self) -> bool {
        self.arithmetic().is_some_and(Arithmetic::available)
    }

    /// What the products of a CPU are in.
    pub(crate) fn on_cpu(self) -> Result<Arithmetic> {
        self.arithmetic().ok_or_else(|| {
            let (got, valid) = (self.to_string(), "f32, bf16, f16, bf16x3; fp8 is for GPUs".into());
            TeacherError::Input { what: "dtype of a teacher on a CPU", got, valid }
        })
    }

    /// The same; none for a type that is for GPUs.
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
