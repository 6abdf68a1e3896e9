//! Noise of many tokens into an array of the caller's: `stillhouse.noise` on the CPU.
//!
//! Arrays are borrowed as they are, the interpreter's lock is let go of while the threads work.

use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use numpy::{PyReadonlyArrayDyn, PyReadwriteArrayDyn};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use stillhouse_noise::{
    DrawKey, Element, FloatColumn, IntegerColumn, NoiseError, Output, OutputKind, RequestedTokens, StoredColumns,
    StoredNoise, prior_rows, replay_rows,
};

use crate::threads;

pyo3::import_exception!(stillhouse.errors, ColumnError);

fn python_error(error: NoiseError) -> PyErr {
    match error {
        NoiseError::Temperature { .. } | NoiseError::Range { .. } | NoiseError::Vocabulary { .. } => {
            PyValueError::new_err(error.to_string())
        }
        _ => ColumnError::new_err(error.to_string()),
    }
}

#[derive(FromPyObject)]
pub enum IntegerArray<'py> {
    U8(PyReadonlyArrayDyn<'py, u8>),
    U16(PyReadonlyArrayDyn<'py, u16>),
    U32(PyReadonlyArrayDyn<'py, u32>),
    I32(PyReadonlyArrayDyn<'py, i32>),
    I64(PyReadonlyArrayDyn<'py, i64>),
}

impl IntegerArray<'_> {
    fn get(&self) -> PyResult<IntegerColumn<'_>> {
        Ok(match self {
            Self::U8(array) => IntegerColumn::U8(array.as_slice()?),
            Self::U16(array) => IntegerColumn::U16(array.as_slice()?),
            Self::U32(array) => IntegerColumn::U32(array.as_slice()?),
            Self::I32(array) => IntegerColumn::I32(array.as_slice()?),
            Self::I64(array) => IntegerColumn::I64(array.as_slice()?),
        })
    }
}

/// f32, or f16 as its bits.
#[derive(FromPyObject)]
pub enum RealArray<'py> {
    F32(PyReadonlyArrayDyn<'py, f32>),
    F16(PyReadonlyArrayDyn<'py, u16>),
}

impl RealArray<'_> {
    fn get(&self) -> PyResult<FloatColumn<'_>> {
        Ok(match self {
            Self::F32(array) => FloatColumn::F32(array.as_slice()?),
            Self::F16(array) => FloatColumn::F16(array.as_slice()?.reinterpret_cast::<f16>()),
        })
    }
}

/// f32, or the bits of f16 or bf16.
#[derive(FromPyObject)]
pub enum OutArray<'py> {
    Single(PyReadwriteArrayDyn<'py, f32>),
    Half(PyReadwriteArrayDyn<'py, u16>),
}

/// The columns of codec `replay`, by name.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct ReplayColumns<'py> {
    sequence_id: PyReadonlyArrayDyn<'py, u64>,
    input_ids: PyReadonlyArrayDyn<'py, i32>,
    logprob: PyReadonlyArrayDyn<'py, f32>,
    noise_count: IntegerArray<'py>,
    offsets: PyReadonlyArrayDyn<'py, i64>,
    noise_index: IntegerArray<'py>,
    noise_logprob: RealArray<'py>,
}

/// What to make, and how.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Request {
    kind: String,
    temperature: f64,
    /// Type of the output.
    element: String,
    /// 0: as many as this process may use.
    threads: usize,
    vocab: usize,
    seed: u64,
    draw: u32,
}

impl Request {
    fn output(&self) -> PyResult<Output> {
        let kind = match self.kind.as_str() {
            "softmax" => OutputKind::Softmax,
            "gumbel" => OutputKind::Gumbel,
            "gaussian" => OutputKind::Gaussian,
            "uniform" => OutputKind::Uniform,
            other => return Err(PyValueError::new_err(format!("unknown kind of noise {other:?}"))),
        };
        Output::new(kind, self.temperature).map_err(python_error)
    }

    /// Runs `job` on the output in its type, on as many threads as asked for, without the interpreter's lock.
    fn run<J: Job>(&self, py: Python<'_>, out: &mut OutArray<'_>, job: &J) -> PyResult<()> {
        let output = self.output()?;
        let pool = threads::pool(py, self.threads)?;
        fn on<J: Job, T: Element>(
            py: Python<'_>,
            pool: Option<&rayon::ThreadPool>,
            job: &J,
            output: Output,
            out: &mut [T],
        ) -> PyResult<()> {
            let work = || match pool {
                Some(pool) => pool.install(|| job.run(output, out)),
                None => job.run(output, out),
            };
            py.detach(work).map_err(python_error)
        }
        let pool = pool.as_deref();
        match (out, self.element.as_str()) {
            (OutArray::Single(out), "float32") => on(py, pool, job, output, out.as_slice_mut()?),
            (OutArray::Half(out), "float16") => {
                on(py, pool, job, output, out.as_slice_mut()?.reinterpret_cast_mut::<f16>())
            }
            (OutArray::Half(out), "bfloat16") => {
                on(py, pool, job, output, out.as_slice_mut()?.reinterpret_cast_mut::<bf16>())
            }
            (_, element) => Err(PyRuntimeError::new_err(format!("the output array is not of {element}"))),
        }
    }
}

/// Work that is written once for every type of output.
trait Job: Sync {
    fn run<T: Element>(&self, output: Output, out: &mut [T]) -> Result<(), NoiseError>;
}

struct Replay<'a> {
    columns: StoredColumns<'a>,
    draw: usize,
    asked: RequestedTokens<'a>,
}

impl Job for Replay<'_> {
    fn run<T: Element>(&self, output: Output, out: &mut [T]) -> Result<(), NoiseError> {
        replay_rows(&self.columns, self.draw, self.asked, output, out)
    }
}

fn asked<'a>(tokens: Option<&'a PyReadonlyArrayDyn<'_, i64>>) -> PyResult<RequestedTokens<'a>> {
    Ok(match tokens {
        None => RequestedTokens::All,
        Some(tokens) => RequestedTokens::Indices(tokens.as_slice()?),
    })
}

/// Writes the noise of the tokens asked for, whatever the codec.
fn replay_stored(
    py: Python<'_>,
    noise: StoredNoise<'_>,
    (rows, draws, length): (usize, usize, usize),
    tokens: Option<&PyReadonlyArrayDyn<'_, i64>>,
    request: &Request,
    out: &mut OutArray<'_>,
) -> PyResult<()> {
    let columns = StoredColumns { rows, draws, length, vocab: request.vocab, noise };
    let job = Replay { columns, draw: request.draw as usize, asked: asked(tokens)? };
    request.run(py, out, &job)
}

/// Writes the noise of `tokens` (numbers row·L + position; None for all) of codec `replay` into `out` [n, V].
/// `shape` is (B, D, L).
#[pyfunction]
pub fn replay(
    py: Python<'_>,
    columns: ReplayColumns<'_>,
    shape: (usize, usize, usize),
    tokens: Option<PyReadonlyArrayDyn<'_, i64>>,
    request: Request,
    mut out: OutArray<'_>,
) -> PyResult<()> {
    let noise = StoredNoise::Replay {
        seed: request.seed,
        sequence_ids: columns.sequence_id.as_slice()?,
        tokens: columns.input_ids.as_slice()?,
        logprobs: columns.logprob.as_slice()?,
        counts: columns.noise_count.get()?,
        offsets: columns.offsets.as_slice()?,
        indices: columns.noise_index.get()?,
        values: columns.noise_logprob.get()?,
    };
    replay_stored(py, noise, shape, tokens.as_ref(), &request, &mut out)
}

/// As [`replay`], of the column `noise` [B, D, L, V] of codec `dense` (f16 as its bits).
#[pyfunction]
pub fn replay_dense(
    py: Python<'_>,
    noise: RealArray<'_>,
    shape: (usize, usize, usize),
    tokens: Option<PyReadonlyArrayDyn<'_, i64>>,
    request: Request,
    mut out: OutArray<'_>,
) -> PyResult<()> {
    let noise = StoredNoise::Dense(noise.get()?);
    replay_stored(py, noise, shape, tokens.as_ref(), &request, &mut out)
}

struct Prior<'a> {
    key: DrawKey,
    vocab: usize,
    sequence_ids: &'a [u64],
    positions: &'a [i64],
}

impl Job for Prior<'_> {
    fn run<T: Element>(&self, output: Output, out: &mut [T]) -> Result<(), NoiseError> {
        prior_rows(self.key, self.vocab, self.sequence_ids, self.positions, output, out)
    }
}

/// Writes prior noise of n (sequence, position) pairs into `out` [n, V].
#[pyfunction]
pub fn prior(
    py: Python<'_>,
    sequence_ids: PyReadonlyArrayDyn<'_, u64>,
    positions: PyReadonlyArrayDyn<'_, i64>,
    request: Request,
    mut out: OutArray<'_>,
) -> PyResult<()> {
    let job = Prior {
        key: DrawKey::new(request.seed, request.draw),
        vocab: request.vocab,
        sequence_ids: sequence_ids.as_slice()?,
        positions: positions.as_slice()?,
    };
    request.run(py, &mut out, &job)
}
