//! Weights by name, whatever file they lie in.
//!
//! Architectures ask for tensors by the names and shapes of Hugging Face checkpoints; a source hands each out on
//! the device, in the type asked for, and counts what it handed out.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{DType, Device, Tensor};

use crate::error::{Result, TeacherError, words};
use crate::gguf::Gguf;

enum Store {
    Safetensors { files: Vec<(PathBuf, MmapedSafetensors)>, routing: HashMap<String, usize> },
    Gguf(Gguf),
}

pub(crate) struct Weights {
    store: Store,
    device: Device,
    dtype: DType,
    prefix: &'static str,
    parameters: AtomicU64,
}

impl Weights {
    pub(crate) fn safetensors(paths: &[PathBuf], device: &Device, dtype: DType) -> Result<Self> {
        let mut files = Vec::with_capacity(paths.len());
        let mut routing = HashMap::new();
        for path in paths {
            std::fs::File::open(path).map_err(|source| TeacherError::Io { path: path.clone(), source })?;
            // SAFETY: the map lives only while the weights are copied out of it; changing a model's files meanwhile
            // is undefined for every reader that maps them.
            let file = unsafe { MmapedSafetensors::new(path) }.map_err(|error| TeacherError::Damaged {
                path: path.clone(),
                format: "safetensors",
                message: words(&error),
            })?;
            routing.extend(file.tensors().into_iter().map(|(name, _)| (name, files.len())));
            files.push((path.clone(), file));
        }
        Ok(Self::new(Store::Safetensors { files, routing }, device, dtype))
    }

    pub(crate) fn gguf(file: Gguf, device: &Device, dtype: DType) -> Self {
        Self::new(Store::Gguf(file), device, dtype)
    }

    fn new(store: Store, device: &Device, dtype: DType) -> Self {
        Self { store, device: device.clone(), dtype, prefix: "", parameters: AtomicU64::new(0) }
    }

    /// From here on `name` means `prefix` + `name`, if `probe` is there with it (checkpoints of a bare model lack it).
    pub(crate) fn with_prefix_if(mut self, prefix: &'static str, probe: &str) -> Self {
        if self.has(&format!("{prefix}{probe}")) {
            self.prefix = prefix;
        }
        self
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        match &self.store {
            Store::Safetensors { routing, .. } => routing.contains_key(name),
            Store::Gguf(gguf) => gguf.has(name),
        }
    }

    /// The tensor `prefix + name`, which must have this shape.
    pub(crate) fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.get_bare(&format!("{}{name}", self.prefix), shape)
    }

    /// The same, without the prefix.
    pub(crate) fn get_bare(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = match &self.store {
            Store::Safetensors { files, routing } => {
                let missing = || TeacherError::MissingTensor { path: folder_of(files), name: name.into() };
                let (path, file) = routing.get(name).and_then(|i| files.get(*i)).ok_or_else(missing)?;
                let view = file.get(name)?;
                check_shape(path, name, view.shape(), shape)?;
                view.load(&self.device)?
            }
            Store::Gguf(gguf) => gguf.tensor(name, shape, &self.device)?,
        };
        self.parameters.fetch_add(tensor.elem_count() as u64, Ordering::Relaxed);
        Ok(tensor.to_dtype(self.dtype)?)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// How many weights were handed out.
    pub(crate) fn parameters(&self) -> u64 {
        self.parameters.load(Ordering::Relaxed)
    }

    /// The types that the weights have in the files, for the manifest: `F16`, or `F32/Q4_1/Q8_0`.
    pub(crate) fn stored_types(&self) -> String {
        let mut names: Vec<String> = match &self.store {
            Store::Safetensors { files, .. } => {
                let views = files.iter().flat_map(|(_, file)| file.tensors());
                views.map(|(_, view)| format!("{:?}", view.dtype())).collect()
            }
            Store::Gguf(gguf) => gguf.stored_types(),
        };
        names.sort();
        names.dedup();
        names.join("/")
    }
}

fn folder_of(files: &[(PathBuf, MmapedSafetensors)]) -> PathBuf {
    match files {
        [(path, _)] => path.clone(),
        [(path, _), ..] => path.parent().unwrap_or(path).into(),
        [] => PathBuf::new(),
    }
}

pub(crate) fn check_shape(path: &Path, name: &str, got: &[usize], valid: &[usize]) -> Result<()> {
    if got == valid {
        return Ok(());
    }
    Err(TeacherError::Shape { path: path.into(), name: name.into(), got: got.into(), valid: valid.into() })
}
