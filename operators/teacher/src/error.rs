use std::path::{Path, PathBuf};

use stillhouse_cpu::ProductError;
use stillhouse_gpu::GpuError;

/// What can go wrong with a teacher. Only [`TeacherError::Io`] may succeed when tried again.
#[derive(Debug, thiserror::Error)]
pub enum TeacherError {
    /// A file could not be opened or read.
    #[error("cannot read {path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is not what its name says, or is cut short.
    #[error("{path} is not a readable {format} file (damaged or cut short?): {message}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// `json`, `safetensors` or `gguf`.
        format: &'static str,
        /// What the reader said.
        message: String,
    },
    /// A field of `config.json` or of the GGUF metadata is missing or has a value that is not supported.
    #[error("{path}: field `{field}`: got {got}, valid: {valid}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field as the file spells it.
        field: String,
        /// The value found, or `nothing`.
        got: String,
        /// What would have been accepted.
        valid: String,
    },
    /// A tensor that the architecture needs is not among the weights.
    #[error("{path}: tensor `{name}` is missing: the configuration describes a model that has it")]
    MissingTensor {
        /// The file or folder of the weights.
        path: PathBuf,
        /// The tensor as the file would spell it.
        name: String,
    },
    /// A tensor does not have the shape that the configuration asks for.
    #[error("{path}: tensor `{name}` has shape {got:?}, valid: {valid:?}")]
    Shape {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor as the file spells it.
        name: String,
        /// The shape found.
        got: Vec<usize>,
        /// The shape that the configuration asks for.
        valid: Vec<usize>,
    },
    /// The weights hold tensors that the model of the configuration does not have: it is another model.
    #[error(
        "{path}{}: {count} {} no part of the model that the configuration describes ({says}): {names}; valid: a configuration that describes all of the weights",
        other_files(*files),
        if *count == 1 { "tensor is" } else { "tensors are" }
    )]
    Unused {
        /// The first of the files that hold such tensors.
        path: PathBuf,
        /// How many files hold some.
        files: usize,
        /// How many tensors.
        count: usize,
        /// The first of them.
        names: String,
        /// What the configuration says about the weights.
        says: String,
    },
    /// A pattern of tensors to be ignored does something else than that.
    #[error("{path}: tensors to ignore: `{pattern}` {message}")]
    Ignored {
        /// The first of the files, or the one that holds the tensor.
        path: PathBuf,
        /// The pattern.
        pattern: String,
        /// What it does, and what is valid.
        message: String,
    },
    /// Two files of a model hold a tensor of the same name.
    #[error("{path}: tensor `{name}` is in {other} too; valid: files that each hold other tensors")]
    TwiceThere {
        /// The second file.
        path: PathBuf,
        /// The first file.
        other: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The configuration calls the head tied to the embedding, and the file holds another head.
    #[error(
        "{path}: tensor `{name}` is not equal to `{embedding}`, and the configuration says `tie_word_embeddings`: true; valid: false there, where the head is the model's own, or a file without it"
    )]
    NotTied {
        /// The file.
        path: PathBuf,
        /// The head.
        name: String,
        /// The embedding.
        embedding: String,
    },
    /// A tensor has a type that weights do not have.
    #[error("{path}: tensor `{name}` has type {got}, valid: F16, BF16, F32, F64 (quantised weights: a .gguf file)")]
    Type {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor as the file spells it.
        name: String,
        /// The type found.
        got: String,
    },
    /// The tokens handed to the teacher do not fit it.
    #[error("{what}: got {got}, valid: {valid}")]
    Input {
        /// Which of the inputs.
        what: &'static str,
        /// What was handed over.
        got: String,
        /// What would have been accepted.
        valid: String,
    },
    /// The device asked for is not there.
    #[error("device `{device}`: {message}")]
    Device {
        /// The device as asked for.
        device: String,
        /// Why it cannot be used, and what can.
        message: String,
    },
    /// The tokenizer inside a GGUF file cannot be built.
    #[error("{path}: tokenizer: {message}")]
    Tokenizer {
        /// The GGUF file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A tensor operation failed, for want of memory or on a device.
    #[error("teacher arithmetic failed: {0}")]
    Compute(String),
    /// A GPU failed, or cannot hold what it should.
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
            // another machine may have them
            ProductError::Unavailable { .. } => Self::Device { device: "cpu".into(), message: error.to_string() },
            other => Self::Compute(other.to_string()),
        }
    }
}

impl From<candle_core::Error> for TeacherError {
    fn from(error: candle_core::Error) -> Self {
        Self::Compute(words(&error))
    }
}

/// What [`words`] says of a file that ends where more was expected.
pub(crate) const ENDS_EARLY: &str = "it ends too early";

/// What candle says, on one line and without the trace of its calls, which is for nobody who runs a job.
pub(crate) fn words(error: &candle_core::Error) -> String {
    use candle_core::Error as E;
    match error {
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } => words(inner),
        E::Context { inner, context } => format!("{}: {}", one_line(&context.to_string()), words(inner)),
        E::Io(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => ENDS_EARLY.into(),
        other => one_line(&other.to_string()),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn other_files(files: usize) -> String {
    match files {
        0 | 1 => String::new(),
        2 => " and another file".into(),
        _ => format!(" and {} other files", files - 1),
    }
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, TeacherError>;

/// Whether a tensor has the shape that the configuration gives it.
pub(crate) fn check_shape(path: &Path, name: &str, got: &[usize], valid: &[usize]) -> Result<()> {
    if got == valid {
        return Ok(());
    }
    Err(TeacherError::Shape { path: path.into(), name: name.into(), got: got.into(), valid: valid.into() })
}
