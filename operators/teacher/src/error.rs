use std::path::{Path, PathBuf};

use stillhouse_cpu::ProductError;
use stillhouse_gpu::GpuError;

/// Errors of loading and running a teacher. Only [`TeacherError::Io`] may succeed on a retry.
#[derive(Debug, thiserror::Error)]
pub enum TeacherError {
    /// A file could not be opened or read.
    #[error("cannot read {path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file is not in the format that its name implies, or is truncated.
    #[error("{path} is not a readable {format} file (damaged or cut short?): {message}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// `json`, `safetensors` or `gguf`.
        format: &'static str,
        /// The parser's message.
        message: String,
    },
    /// A field of `config.json` or of the GGUF metadata is missing or has an unsupported value.
    #[error("{path}: field `{field}`: got {got}, valid: {valid}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field as the file spells it.
        field: String,
        /// The value found, or `nothing`.
        got: String,
        /// The accepted values.
        valid: String,
    },
    /// The weights lack a tensor that the architecture needs.
    #[error("{path}: tensor `{name}` is missing: the configuration describes a model that has it")]
    MissingTensor {
        /// The file or folder of the weights.
        path: PathBuf,
        /// The tensor's name in the naming of the file.
        name: String,
    },
    /// A tensor does not have the shape that the configuration requires.
    #[error("{path}: tensor `{name}` has shape {got:?}, valid: {valid:?}")]
    Shape {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor as the file spells it.
        name: String,
        /// The shape found.
        got: Vec<usize>,
        /// The shape that the configuration requires.
        valid: Vec<usize>,
    },
    /// The weights hold tensors that the configuration does not describe, so they belong to another model.
    #[error(
        "{path}{}: {count} {} not part of the model that the configuration describes ({quoted_fields}): {names}; valid: a configuration that describes all of the weights",
        and_other_files(*files),
        if *count == 1 { "tensor is" } else { "tensors are" }
    )]
    Unused {
        /// The first file with such tensors.
        path: PathBuf,
        /// Number of files with such tensors.
        files: usize,
        /// Number of such tensors.
        count: usize,
        /// Names of the first of them.
        names: String,
        /// What the configuration says about the weights.
        quoted_fields: String,
    },
    /// A pattern of tensors to ignore is wrong: it matches no tensor, or one that the model uses.
    #[error("{path}: tensors to ignore: `{pattern}` {message}")]
    IgnorePattern {
        /// The first file, or the file that holds the matched tensor.
        path: PathBuf,
        /// The pattern.
        pattern: String,
        /// What the pattern matches, and what is valid.
        message: String,
    },
    /// Two files of a model hold a tensor of the same name.
    #[error("{path}: tensor `{name}` is in {other} too; valid: each tensor in one file only")]
    DuplicateTensor {
        /// The second file.
        path: PathBuf,
        /// The first file.
        other: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The configuration ties the head to the embedding, but the file holds a different head.
    #[error(
        "{path}: tensor `{name}` is not equal to `{embedding}`, and the configuration says `tie_word_embeddings`: true; valid: false there if the model has its own head, or a file without this tensor"
    )]
    NotTied {
        /// The file.
        path: PathBuf,
        /// The head.
        name: String,
        /// The embedding.
        embedding: String,
    },
    /// A tensor has a type that weights cannot have.
    #[error("{path}: tensor `{name}` has type {got}, valid: F16, BF16, F32, F64 (quantised weights: a .gguf file)")]
    Type {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor as the file spells it.
        name: String,
        /// The type found.
        got: String,
    },
    /// An input to the teacher is invalid, such as its tokens.
    #[error("{what}: got {got}, valid: {valid}")]
    Input {
        /// Name of the input.
        what: &'static str,
        /// The value given.
        got: String,
        /// The accepted values.
        valid: String,
    },
    /// The requested device is not available.
    #[error("device `{device}`: {message}")]
    Device {
        /// The requested device.
        device: String,
        /// Why it cannot be used, and what can.
        message: String,
    },
    /// The tokenizer in a GGUF file cannot be built.
    #[error("{path}: tokenizer: {message}")]
    Tokenizer {
        /// The GGUF file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A tensor operation failed, for lack of memory or on a device.
    #[error("teacher arithmetic failed: {0}")]
    Compute(String),
    /// A GPU failed or ran out of memory.
    #[error(transparent)]
    Gpu(GpuError),
}

impl From<GpuError> for TeacherError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::Unavailable { device, message } => Self::Device { device, message },
            GpuError::Input { what, got, valid } => Self::Input { what, got, valid },
            other => Self::Gpu(other),
        }
    }
}

impl From<ProductError> for TeacherError {
    fn from(error: ProductError) -> Self {
        match error {
            // Device errors, because another machine may support the arithmetic.
            ProductError::Unavailable { .. } => Self::Device { device: "cpu".into(), message: error.to_string() },
            other => Self::Compute(other.to_string()),
        }
    }
}

impl From<candle_core::Error> for TeacherError {
    fn from(error: candle_core::Error) -> Self {
        Self::Compute(message_of(&error))
    }
}

/// The message of [`message_of`] for a file that ends too early.
pub(crate) const ENDS_EARLY: &str = "it ends too early";

/// Returns candle's message on one line, without the backtrace, which does not help someone who runs a job.
pub(crate) fn message_of(error: &candle_core::Error) -> String {
    use candle_core::Error as E;
    match error {
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } => message_of(inner),
        E::Context { inner, context } => format!("{}: {}", one_line(&context.to_string()), message_of(inner)),
        E::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => ENDS_EARLY.into(),
        other => one_line(&other.to_string()),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn and_other_files(files: usize) -> String {
    match files {
        0 | 1 => String::new(),
        2 => " and another file".into(),
        _ => format!(" and {} other files", files - 1),
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, TeacherError>;

/// Checks that a tensor has the shape that the configuration requires.
pub(crate) fn check_shape(path: &Path, name: &str, got: &[usize], valid: &[usize]) -> Result<()> {
    if got == valid {
        return Ok(());
    }
    Err(TeacherError::Shape { path: path.into(), name: name.into(), got: got.into(), valid: valid.into() })
}
