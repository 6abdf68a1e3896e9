//! Loading a teacher onto the device that is asked for.

use std::path::Path;

use crate::cpu::CpuTeacher;
use crate::device::{Opened, Precision};
use crate::error::Result;
use crate::model::LoadOptions;
use crate::{HostTeacher, Teacher, gpu};

/// Loads the model in a folder (`config.json` beside `*.safetensors`, sharded or not) or in a `.gguf` file.
///
/// # Errors
/// Names the file and the field or tensor, what was found and what is valid. Tensors that the configuration does not
/// describe are an error as missing ones are.
pub fn load(path: &Path, options: &LoadOptions) -> Result<Box<dyn Teacher>> {
    match options.device.open()? {
        Opened::Cpu => Ok(Box::new(CpuTeacher::load(path, options.dtype, &options.ignore_tensors)?)),
        Opened::Gpu(device) => gpu::load(path, &device, options),
    }
}

/// The same on the CPU, for those who want its tensors.
///
/// # Errors
/// As [`load`].
pub fn load_on_host(path: &Path, dtype: Precision) -> Result<Box<dyn HostTeacher>> {
    Ok(Box::new(CpuTeacher::load(path, dtype, &[])?))
}
