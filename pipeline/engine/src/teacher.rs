//! Loading a teacher onto a device.

use std::error::Error;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result, with_causes};
use stillhouse_noise::ExtractionSpec;
use stillhouse_schemas::spec::{Dtype, TeacherSpec};
use stillhouse_teacher::{LoadOptions, Precision, Teacher, TeacherError};

/// Loads the teacher in `path` in the arithmetic `dtype`, for sequences of up to `length` tokens.
///
/// # Errors
/// When the teacher's files or the device cannot be used, or the device does not compute `dtype`.
pub fn load(path: &Path, spec: &TeacherSpec, dtype: Dtype, length: usize, device: &str) -> Result<Arc<dyn Teacher>> {
    TeacherLoader { path, spec, dtype, length, extraction: None, of_run: false }.load(device, None)
}

/// The settings that are the same on every device of a job.
pub struct TeacherLoader<'a> {
    /// Folder or GGUF file of the model.
    pub path: &'a Path,
    /// The teacher's section of the job file.
    pub spec: &'a TeacherSpec,
    /// The arithmetic, already decided.
    pub dtype: Dtype,
    /// Longest sequence, in tokens.
    pub length: usize,
    /// What the device computes of the logits itself; `None` for logits alone.
    pub extraction: Option<ExtractionSpec>,
    /// Whether the run's own process decided the tokens of a pass, as it does for executors of a cluster.
    pub of_run: bool,
}

impl TeacherLoader<'_> {
    /// Loads onto one device. `pass_tokens` is the number of tokens of a forward pass, where it is already decided.
    ///
    /// # Errors
    /// As [`load`].
    pub fn load(&self, device: &str, pass_tokens: Option<u64>) -> Result<Arc<dyn Teacher>> {
        if self.dtype == Dtype::Int8 {
            let message = "extract.teacher.dtype: the data set was computed in int8, which this version does not compute; valid: a data set of \
                           another type (`stillhouse run --overwrite` with f32, bf16, f16, bf16x3 or fp8 makes it again)";
            return Err(PipelineError::new(ErrorKind::Model, message));
        }
        let options = LoadOptions {
            device: device.parse().map_err(teacher_error)?,
            batch_tokens: self.spec.batch_tokens as usize,
            length: self.length,
            dtype: precision(self.dtype).unwrap_or_default(),
            pass_tokens: pass_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)),
            extraction: self.extraction.clone(),
            ignore_tensors: self.spec.ignore_tensors.clone(),
        };
        stillhouse_teacher::load(self.path, &options).map(Arc::from).map_err(|error| {
            // another executor may have more memory
            let machine_specific = self.of_run && pass_tokens.is_some() && matches!(error, TeacherError::Device { .. });
            let error = teacher_error(error);
            if machine_specific { error.machine_specific() } else { error }
        })
    }
}

/// The error of a teacher as an error of the pipeline.
pub fn teacher_error(e: TeacherError) -> PipelineError {
    let message = format!("teacher: {}", with_causes(e.to_string(), e.source()));
    let error = PipelineError::new(ErrorKind::Model, message);
    // too little memory, a missing device, or a CPU without the instructions: another machine may have them
    if matches!(e, TeacherError::Device { .. }) { error.machine_specific() } else { error }
}

/// The arithmetic of a dtype; `None` for `auto`, and for what this version no longer computes.
pub fn precision(dtype: Dtype) -> Option<Precision> {
    match dtype {
        Dtype::Auto | Dtype::Int8 => None,
        Dtype::F32 => Some(Precision::F32),
        Dtype::Bf16 => Some(Precision::Bf16),
        Dtype::F16 => Some(Precision::F16),
        Dtype::Bf16x3 => Some(Precision::Bf16x3),
        Dtype::Fp8 => Some(Precision::Fp8),
    }
}

/// SHA-256 of a file of a teacher, in hexadecimal. Reads 1 MB at a time.
///
/// # Errors
/// When the file cannot be read.
#[expect(clippy::disallowed_methods, reason = "called where the teacher is loaded, outside of async code")]
pub fn file_sha256(path: &Path) -> Result<String> {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex::encode(hasher.finalize())),
                n => hasher.update(&buffer[..n]),
            }
        }
    };
    read().map_err(|e| PipelineError::caused(ErrorKind::Model, format!("cannot read {}", path.display()), e))
}
