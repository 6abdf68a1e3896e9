//! Weights by name, from any file format.
//!
//! Architectures request tensors by the names and shapes of Hugging Face checkpoints. [`Weights`] returns each as f32,
//! or as the bytes in the file, and records its name. A tensor that nothing requests is an error, because the
//! configuration then describes another model.
//!
//! With [`Read::Headers`], names, types and shapes are checked in the same way, but no weight is read. Each tensor is
//! then a single zero, broadcast to its shape without memory. A check before the work therefore asks exactly what
//! loading asks.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::safetensors::{Load, MmapedSafetensors};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use stillhouse_gpu::net::{StorageFormat, StorageOrder, StoredTensor};

use crate::error::{Result, TeacherError, check_shape, message_of};
use crate::gguf::Gguf;

/// How much of the files to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    /// Only names, types and shapes.
    Headers,
    /// Also the weights.
    Weights,
}

/// Maximum number of tensors named in one message.
const MAX_NAMED: usize = 4;

enum Store {
    Safetensors { files: Vec<(PathBuf, MmapedSafetensors)>, file_of_tensor: HashMap<String, usize> },
    Gguf(Gguf),
}

pub(crate) struct Weights {
    store: Store,
    read: Read,
    prefix: &'static str,
    parameters: AtomicU64,
    /// Names of the requested tensors, in the files' spelling.
    used: RefCell<BTreeSet<String>>,
}

impl Weights {
    pub(crate) fn safetensors(paths: &[PathBuf], read: Read) -> Result<Self> {
        let mut files: Vec<(PathBuf, MmapedSafetensors)> = Vec::with_capacity(paths.len());
        let mut file_of_tensor = HashMap::new();
        for path in paths {
            std::fs::File::open(path).map_err(|source| TeacherError::Io { path: path.clone(), source })?;
            // SAFETY: the map lives only while the weights are copied out of it; changing a model's files meanwhile is
            // undefined for every reader that maps them.
            let file = unsafe { MmapedSafetensors::new(path) }.map_err(|error| TeacherError::Damaged {
                path: path.clone(),
                format: "safetensors",
                message: message_of(&error),
            })?;
            for (name, _) in file.tensors() {
                if let Some((other, _)) = file_of_tensor.get(&name).and_then(|i: &usize| files.get(*i)) {
                    return Err(TeacherError::DuplicateTensor { path: path.clone(), other: other.clone(), name });
                }
                file_of_tensor.insert(name, files.len());
            }
            files.push((path.clone(), file));
        }
        Ok(Self::new(Store::Safetensors { files, file_of_tensor }, read))
    }

    pub(crate) fn gguf(file: Gguf, read: Read) -> Result<Self> {
        file.check_extents()?;
        Ok(Self::new(Store::Gguf(file), read))
    }

    fn new(store: Store, read: Read) -> Self {
        Self { store, read, prefix: "", parameters: AtomicU64::new(0), used: RefCell::default() }
    }

    /// Prepends `prefix` to all later names if the tensor `prefix` + `probe` exists (checkpoints of a bare model lack
    /// the prefix).
    pub(crate) fn with_prefix_if(mut self, prefix: &'static str, probe: &str) -> Self {
        if self.has(&format!("{prefix}{probe}")) {
            self.prefix = prefix;
        }
        self
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        match &self.store {
            Store::Safetensors { file_of_tensor, .. } => file_of_tensor.contains_key(name),
            Store::Gguf(gguf) => gguf.has(name),
        }
    }

    /// Returns the tensor `name` as f32. It must have this shape.
    fn bare_tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = match &self.store {
            Store::Safetensors { .. } => {
                let (view, _) = self.weight(name, shape)?;
                match self.read {
                    Read::Weights => view.load(&Device::Cpu)?,
                    Read::Headers => self.placeholder(shape)?,
                }
            }
            Store::Gguf(gguf) => {
                gguf.check_tensor(name, shape)?;
                match self.read {
                    Read::Weights => gguf.tensor(name, shape)?,
                    Read::Headers => self.placeholder(shape)?,
                }
            }
        };
        self.mark_used(name);
        self.parameters.fetch_add(tensor.elem_count() as u64, Ordering::Relaxed);
        Ok(tensor.to_dtype(DType::F32)?)
    }

    /// Returns a safetensors tensor, which must have this shape and a valid type of weights.
    fn weight(&self, name: &str, shape: &[usize]) -> Result<(TensorView<'_>, StorageFormat)> {
        let (path, view) = self.view(name)?;
        check_shape(path, name, view.shape(), shape)?;
        let format = match view.dtype() {
            Dtype::F64 => StorageFormat::F64,
            Dtype::F32 => StorageFormat::F32,
            Dtype::F16 => StorageFormat::F16,
            Dtype::BF16 => StorageFormat::Bf16,
            other => {
                let got = format!("{other:?}");
                return Err(TeacherError::Type { path: path.into(), name: name.into(), got });
            }
        };
        Ok((view, format))
    }

    /// Returns the tensor `prefix + name` as stored in the file, for a device to widen; or as f32 numbers if the file
    /// stores other numbers.
    pub(crate) fn stored(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        self.bare_stored(&format!("{}{name}", self.prefix), shape)
    }

    /// Like [`Self::stored`], without the prefix.
    pub(crate) fn bare_stored(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        let stored = match &self.store {
            Store::Safetensors { .. } => {
                let (view, format) = self.weight(name, shape)?;
                Some(StoredTensor::Bytes { bytes: view.data(), format, order: StorageOrder::RowMajor })
            }
            Store::Gguf(gguf) => {
                gguf.check_tensor(name, shape)?;
                gguf.bytes(name, shape)?
            }
        };
        let Some(stored) = stored else { return self.bare_floats(name, shape).map(StoredTensor::F32) };
        self.mark_used(name);
        self.parameters.fetch_add(shape.iter().product::<usize>() as u64, Ordering::Relaxed);
        Ok(stored)
    }

    /// Returns the tensor `prefix + name` as f32 in row order; empty if only headers are read.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.bare_floats(&format!("{}{name}", self.prefix), shape)
    }

    /// Like [`Self::floats`], without the prefix.
    pub(crate) fn bare_floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self.bare_tensor(name, shape)?;
        match self.read {
            Read::Headers => Ok(Vec::new()),
            Read::Weights => Ok(tensor.flatten_all()?.to_vec1()?),
        }
    }

    /// Whether a head other than the embedding was requested.
    pub(crate) fn has_own_head(&self) -> bool {
        let heads = ["lm_head.weight", "embed_out.weight", "output.weight"];
        self.used.borrow().iter().any(|name| heads.contains(&name.as_str()))
    }

    /// Whether weights are read, not only headers.
    pub(crate) fn is_read(&self) -> bool {
        self.read == Read::Weights
    }

    /// Checks the copy of a tied head that a file may contain: it must equal the embedding.
    ///
    /// With headers only, compares the shapes; with the weights, also the bytes.
    pub(crate) fn check_tied(&self, head: &str, embedding: &str) -> Result<()> {
        let Store::Safetensors { .. } = &self.store else { return Ok(()) };
        if !self.has(head) {
            return Ok(());
        }
        let embedding = format!("{}{embedding}", self.prefix);
        let ((path, head_view), (_, view)) = (self.view(head)?, self.view(&embedding)?);
        check_shape(path, head, head_view.shape(), view.shape())?;
        let differs = head_view.dtype() != view.dtype() || head_view.data() != view.data();
        if self.read == Read::Weights && differs {
            return Err(TeacherError::NotTied { path: path.into(), name: head.into(), embedding });
        }
        self.mark_used(head);
        Ok(())
    }

    /// Refuses tensors that were never requested, except those that `is_buffer` accepts by their name without the
    /// prefix.
    ///
    /// `quoted_fields` quotes the configuration, for the message. `ignore` are patterns of names to accept. Each must
    /// match a tensor, and none that was requested: otherwise it hides more than intended.
    pub(crate) fn check_all_used(
        &self,
        quoted_fields: &str,
        is_buffer: &dyn Fn(&str) -> bool,
        ignore: &[String],
    ) -> Result<()> {
        let used = self.used.borrow();
        for pattern in ignore {
            let matching = || self.names().into_iter().filter(|(_, name)| matches_pattern(pattern, name));
            let wrong = |path: &Path, message: String| {
                Err(TeacherError::IgnorePattern { path: path.into(), pattern: pattern.clone(), message })
            };
            if let Some((path, name)) = matching().filter(|(_, name)| used.contains(*name)).min() {
                return wrong(
                    path,
                    format!(
                        "matches `{name}`, which is part of the model; valid: names of tensors that are not part of it"
                    ),
                );
            }
            if matching().next().is_none() {
                let names = self.names();
                let path = names.first().map_or(Path::new(""), |(path, _)| path);
                return wrong(
                    path,
                    "matches no tensor; valid: names of tensors as the files spell them, * for any characters".into(),
                );
            }
        }
        let mut unused: BTreeMap<&Path, Vec<&str>> = BTreeMap::new();
        for (path, name) in self.names() {
            let bare = name.strip_prefix(self.prefix).unwrap_or("");
            let ignored = || ignore.iter().any(|pattern| matches_pattern(pattern, name));
            if !used.contains(name) && !is_buffer(bare) && !ignored() {
                unused.entry(path).or_default().push(name);
            }
        }
        let Some(first) = unused.keys().next() else { return Ok(()) };
        let path = first.to_path_buf();
        let files = unused.len();
        let mut names: Vec<&str> = unused.into_values().flatten().collect();
        names.sort_by_key(|name| natural_sort_key(name));
        let (count, shown) =
            (names.len(), names.iter().take(MAX_NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>());
        let names = shown.join(", ") + if count > MAX_NAMED { ", …" } else { "" };
        Err(TeacherError::Unused { path, files, count, names, quoted_fields: quoted_fields.into() })
    }

    /// Returns the path and name of every tensor in the files.
    fn names(&self) -> Vec<(&Path, &str)> {
        match &self.store {
            Store::Safetensors { files, file_of_tensor } => file_of_tensor
                .iter()
                .filter_map(|(name, i)| files.get(*i).map(|(path, _)| (path.as_path(), name.as_str())))
                .collect(),
            Store::Gguf(gguf) => gguf.names().map(|name| (gguf.path.as_path(), name)).collect(),
        }
    }

    fn view(&self, name: &str) -> Result<(&Path, TensorView<'_>)> {
        let Store::Safetensors { files, file_of_tensor } = &self.store else {
            return Err(TeacherError::MissingTensor { path: PathBuf::new(), name: name.into() });
        };
        let missing = || TeacherError::MissingTensor { path: folder_of(files), name: name.into() };
        let (path, file) = file_of_tensor.get(name).and_then(|i| files.get(*i)).ok_or_else(missing)?;
        Ok((path, file.get(name)?))
    }

    fn mark_used(&self, name: &str) {
        let name = match &self.store {
            Store::Safetensors { .. } => name.to_owned(),
            Store::Gguf(gguf) => gguf.name_of(name),
        };
        self.used.borrow_mut().insert(name);
    }

    /// Returns a broadcast zero that replaces a tensor's data.
    fn placeholder(&self, shape: &[usize]) -> Result<Tensor> {
        Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)
    }

    /// Number of weights in the requested tensors.
    pub(crate) fn parameters(&self) -> u64 {
        self.parameters.load(Ordering::Relaxed)
    }

    /// The types of the weights in the files, for the manifest: `F16`, or `F32/Q4_1/Q8_0`.
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

/// Whether a name matches a pattern, in which `*` stands for any characters.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

fn folder_of(files: &[(PathBuf, MmapedSafetensors)]) -> PathBuf {
    match files {
        [(path, _)] => path.clone(),
        [(path, _), ..] => path.parent().unwrap_or(path).into(),
        [] => PathBuf::new(),
    }
}

/// A sort key that orders names by the numbers in them: `h.9` before `h.10`.
fn natural_sort_key(name: &str) -> Vec<(usize, &str)> {
    name.split('.').map(|part| (part.parse().map_or(0, |n: usize| n + 1), part)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_handed_out_as_they_are_stored() {
        let file = |model: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(model);
        let path = file("llama-gqa/model.safetensors");
        let weights = Weights::safetensors(&[path], Read::Weights).unwrap();
        let weights = weights.with_prefix_if("model.", "embed_tokens.weight");
        for (name, shape) in [("norm.weight", &[48][..]), ("layers.1.self_attn.k_proj.weight", &[16, 48])] {
            let before = weights.parameters();
            let stored = weights.stored(name, shape).unwrap();
            let StoredTensor::Bytes { bytes, format: StorageFormat::F32, order: StorageOrder::RowMajor } = stored
            else {
                panic!("{name}: {stored:?}")
            };
            let numbers: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(numbers, weights.floats(name, shape).unwrap());
            assert_eq!(weights.parameters(), before + 2 * numbers.len() as u64);
        }
        let error_of = |name: &str, shape: &[usize]| {
            let stored = weights.stored(name, shape).map(|_| ()).unwrap_err().to_string();
            assert_eq!(stored, weights.floats(name, shape).unwrap_err().to_string());
            stored
        };
        assert!(error_of("norm.weight", &[49]).contains("[49]"));
        assert!(error_of("norm.bias", &[48]).contains("is missing"));
    }

    #[test]
    fn a_star_is_any_characters() {
        for (pattern, name, is) in [
            ("medusa_head.*", "medusa_head.0.0.linear.weight", true),
            ("medusa_head.*", "base.medusa_head.0", false),
            ("*.bias", "a.bias", true),
            ("*.bias", "a.bias.x", false),
            ("a*b*c", "axxbyyc", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("*", "", true),
            ("exact", "exact", true),
            ("exact", "exactly", false),
            ("", "x", false),
        ] {
            assert_eq!(matches_pattern(pattern, name), is, "{pattern} {name}");
        }
    }
}
