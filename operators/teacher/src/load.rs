//! Loading a teacher onto a requested device.

use std::path::Path;

use crate::cpu::CpuTeacher;
use crate::device::{OpenedDevice, Precision};
use crate::error::Result;
use crate::model::LoadOptions;
use crate::{HostTeacher, Teacher, gpu};

/// Loads the model in a folder (`config.json` beside `*.safetensors`, sharded or not) or in a `.gguf` file.
///
/// # Errors
/// The error names the file and the field or tensor, the value found and the valid ones. A tensor that the
/// configuration does not describe is an error, just like a missing one.
pub fn load(path: &Path, options: &LoadOptions) -> Result<Box<dyn Teacher>> {
    match options.device.open()? {
        OpenedDevice::Cpu => Ok(Box::new(CpuTeacher::load(path, options.dtype, &options.ignore_tensors)?)),
        OpenedDevice::Gpu(device) => gpu::load(path, &device, options),
    }
}

/// Like [`load`], but always on the CPU and with access to the teacher's tensors.
///
/// # Errors
/// As [`load`].
pub fn load_on_host(path: &Path, dtype: Precision) -> Result<Box<dyn HostTeacher>> {
    Ok(Box::new(CpuTeacher::load(path, dtype, &[])?))
}
