//! GGUF files: metadata, tokenizer and mostly quantised weights in one file.
//!
//! Weights are widened when they are loaded, on a GPU if the GPU's loader asks for their bytes. For whole sequences
//! this is faster than products on quantised blocks. `gguf_model.rs` interprets the metadata and the tensor layouts of
//! each family.

use std::cell::OnceCell;
use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};
use memmap2::Mmap;
use stillhouse_gpu::net::{StorageFormat, StoredTensor};

use crate::error::{Result, TeacherError, check_shape, message_of};
use crate::gguf_header;

pub(crate) struct Gguf {
    pub(crate) path: PathBuf,
    content: Content,
    /// The mapped file, once its bytes have been requested.
    map: OnceCell<Mmap>,
}

impl Gguf {
    /// Reads the metadata and the index of tensors.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
        if let Some(problem) = gguf_header::find_problem(&mut reader) {
            return Err(damaged(path, &problem));
        }
        let io = |source| TeacherError::Io { path: path.into(), source };
        reader.rewind().map_err(io)?;
        let content = Content::read(&mut reader).map_err(|error| damaged(path, &gguf_header::describe(&error)))?;
        if let Some(problem) = gguf_header::find_shape_problem(&content) {
            return Err(damaged(path, &problem));
        }
        Ok(Self { path: path.into(), content, map: OnceCell::new() })
    }

    /// Returns a metadata value.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(|value| value.to_string().ok()).map(String::as_str)
    }

    /// Returns a whole number of any stored width.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            Value::I8(n) => u64::try_from(*n).ok(),
            Value::I16(n) => u64::try_from(*n).ok(),
            Value::I32(n) => u64::try_from(*n).ok(),
            Value::I64(n) => u64::try_from(*n).ok(),
            value => value.to_u64().ok(),
        }
    }

    pub(crate) fn token(&self, key: &str) -> Option<u32> {
        self.number(key).and_then(|id| u32::try_from(id).ok())
    }

    pub(crate) fn invalid(&self, key: &str, valid: &str) -> TeacherError {
        let got = match self.value(key) {
            None => "nothing".into(),
            Some(value) => gguf_header::format_value(value),
        };
        TeacherError::Field { path: self.path.clone(), field: key.into(), got, valid: valid.into() }
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        let size = self.number(key).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        size.ok_or_else(|| self.invalid(key, "a whole number of at least 1"))
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::F32(x)) if *x > 0.0 => Ok(Some(f64::from(*x))),
            Some(Value::F64(x)) if *x > 0.0 => Ok(Some(*x)),
            Some(_) => Err(self.invalid(key, "a number above 0")),
        }
    }

    pub(crate) fn vocab_size(&self) -> Result<usize> {
        // The embedding determines the size: `llama.vocab_size` and the list of tokens are often missing or padded.
        let embedding = self.content.tensor_infos.get("token_embd.weight");
        let rows = embedding.and_then(|info| info.shape.dims().first().copied());
        rows.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: "token_embd.weight".into() })
    }

    /// Whether the file has the tensor that Hugging Face calls `name`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(&self.name_of(name))
    }

    /// Reads the tensor that Hugging Face calls `name` as f32 in Hugging Face's layout; see [`Gguf::check_tensor`].
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.to_hf_row_order(name, self.stored(name)?, shape)
    }

    /// Like [`Gguf::tensor`], but in the file's layout.
    pub(crate) fn stored(&self, name: &str) -> Result<Tensor> {
        let stored = self.name_of(name);
        let info = self.content.tensor_infos.get(&stored);
        let info = info.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: stored.clone() })?;
        let mut reader = open(&self.path)?;
        info.read(&mut reader, self.content.tensor_data_offset, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .map_err(|error| damaged(&self.path, &format!("tensor `{stored}`: {}", message_of(&error))))
    }

    /// Returns the bytes of the tensor that Hugging Face calls `name`, for the caller to widen. Returns `None` if its
    /// numbers have to be computed first ([`Gguf::stored_order`]), or if its rows are not whole blocks, which reading
    /// it reports. See [`Gguf::check_tensor`].
    pub(crate) fn bytes(&self, name: &str, shape: &[usize]) -> Result<Option<StoredTensor<'_>>> {
        let stored = self.name_of(name);
        let Some(info) = self.content.tensor_infos.get(&stored) else { return Ok(None) };
        let (kind, dims) = (info.ggml_dtype, info.shape.dims());
        let Some(order) = self.stored_order(name, shape)? else { return Ok(None) };
        if !dims.last().is_some_and(|columns| columns.is_multiple_of(kind.block_size())) {
            return Ok(None);
        }
        let length = info.shape.elem_count() / kind.block_size() * kind.type_size();
        let start = self.content.tensor_data_offset.checked_add(info.offset).and_then(|at| usize::try_from(at).ok());
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        let bytes = self.map()?.get(range.unwrap_or(0..usize::MAX));
        let bytes = bytes.ok_or_else(|| damaged(&self.path, &format!("tensor `{stored}` ends after the file")))?;
        Ok(Some(StoredTensor::Bytes { bytes, format: format(kind), order }))
    }

    fn map(&self) -> Result<&[u8]> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        // SAFETY: the map lives only while the weights are copied out of it; changing a model's file meanwhile is
        // undefined for every reader that maps it
        let map = unsafe { Mmap::map(&open(&self.path)?) };
        let map = map.map_err(|source| TeacherError::Io { path: self.path.clone(), source })?;
        Ok(self.map.get_or_init(|| map))
    }

    /// Refuses a tensor that is missing or has another shape. Reads no data.
    pub(crate) fn check_tensor(&self, name: &str, shape: &[usize]) -> Result<()> {
        let stored = self.name_of(name);
        let info = self.content.tensor_infos.get(&stored);
        let info = info.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: stored.clone() })?;
        check_shape(&self.path, &stored, info.shape.dims(), &self.stored_shape(name, shape))
    }

    /// Names of the tensors in the file.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.content.tensor_infos.keys().map(String::as_str)
    }

    /// Refuses a file that ends before its tensors do, or that is one part of a split model.
    pub(crate) fn check_extents(&self) -> Result<()> {
        if self.number("split.count").is_some_and(|n| n > 1) {
            return Err(self.invalid("split.count", "1 (merge the parts into one file: llama-gguf-split --merge)"));
        }
        let held =
            open(&self.path)?.metadata().map_err(|source| TeacherError::Io { path: self.path.clone(), source })?;
        // Sorted by offset, so that the same file always gives the same message.
        let mut infos: Vec<_> = self.content.tensor_infos.iter().collect();
        infos.sort_by_key(|(name, info)| (info.offset, name.as_str()));
        for (name, info) in infos {
            let blocks = (info.shape.elem_count() / info.ggml_dtype.block_size()) as u64;
            let end = blocks
                .checked_mul(info.ggml_dtype.type_size() as u64)
                .and_then(|bytes| bytes.checked_add(info.offset))
                .and_then(|bytes| bytes.checked_add(self.content.tensor_data_offset));
            if end.is_none_or(|end| end > held.len()) {
                let end = end.map_or_else(|| "beyond any file".into(), |end| format!("at byte {end}"));
                return Err(damaged(&self.path, &format!("tensor `{name}` ends {end}, the file at {}", held.len())));
            }
        }
        Ok(())
    }

    pub(crate) fn stored_types(&self) -> Vec<String> {
        self.content.tensor_infos.values().map(|info| ggml_name(&format!("{:?}", info.ggml_dtype))).collect()
    }
}

fn format(kind: GgmlDType) -> StorageFormat {
    match kind {
        GgmlDType::F32 => StorageFormat::F32,
        GgmlDType::F16 => StorageFormat::F16,
        GgmlDType::BF16 => StorageFormat::Bf16,
        GgmlDType::Q4_0 => StorageFormat::Q4_0,
        GgmlDType::Q4_1 => StorageFormat::Q4_1,
        GgmlDType::Q5_0 => StorageFormat::Q5_0,
        GgmlDType::Q5_1 => StorageFormat::Q5_1,
        GgmlDType::Q8_0 => StorageFormat::Q8_0,
        GgmlDType::Q8_1 => StorageFormat::Q8_1,
        GgmlDType::Q2K => StorageFormat::Q2K,
        GgmlDType::Q3K => StorageFormat::Q3K,
        GgmlDType::Q4K => StorageFormat::Q4K,
        GgmlDType::Q5K => StorageFormat::Q5K,
        GgmlDType::Q6K => StorageFormat::Q6K,
        GgmlDType::Q8K => StorageFormat::Q8K,
    }
}

/// Returns GGML's name of a type: `Q4_1` for candle's `Q4_1`, `Q6_K` for its `Q6K`.
fn ggml_name(candle: &str) -> String {
    match candle.strip_suffix('K') {
        Some(bits) if bits.starts_with('Q') => format!("{bits}_K"),
        _ => candle.into(),
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| TeacherError::Io { path: path.into(), source })
}

fn damaged(path: &Path, error: &dyn std::fmt::Display) -> TeacherError {
    TeacherError::Damaged { path: path.into(), format: "gguf", message: error.to_string() }
}
