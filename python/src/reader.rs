//! Data sets, rows as numpy arrays, and epochs.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use numpy::{Element, IntoPyArray, PyArray1, PyArrayMethods, PyReadonlyArray1};
use pyo3::exceptions::{PyRuntimeWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use stillhouse_reader::process::runtime;
use stillhouse_reader::stream::Next;
use stillhouse_reader::{
    Column, DiskCacheOptions, Layout, OpenOptions, Order, Plan, ReadError, ReadMode, Shuffle, Values,
};

/// How long Python's signals (Ctrl-C) may wait.
const PATIENCE: Duration = Duration::from_millis(100);

/// The package's exception for an error.
fn raise(py: Python<'_>, error: ReadError) -> PyErr {
    let name = match error {
        ReadError::DataSet(_) => "DatasetError",
        ReadError::Column(_) => "ColumnError",
        ReadError::Store(_) => "StoreError",
        ReadError::Usage(_) => return PyValueError::new_err(error.to_string()),
    };
    match py.import("stillhouse.errors").and_then(|m| m.getattr(name)).and_then(|e| e.call1((error.to_string(),))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(e) => e,
    }
}

/// Waits for a task without the interpreter's lock, looking at Python's signals now and then.
fn wait<T: Send + 'static>(
    py: Python<'_>,
    work: impl Future<Output = Result<T, ReadError>> + Send + 'static,
) -> PyResult<T> {
    let runtime = runtime().map_err(|e| raise(py, e))?;
    let mut task = runtime.spawn(work);
    loop {
        let waited = py.detach(|| runtime.block_on(async { tokio::time::timeout(PATIENCE, &mut task).await }));
        match waited {
            Ok(Ok(result)) => return result.map_err(|e| raise(py, e)),
            Ok(Err(e)) => return Err(raise(py, ReadError::Usage(format!("reading stopped: {e}")))),
            Err(_) => {
                if let Err(interrupt) = py.check_signals() {
                    task.abort();
                    return Err(interrupt);
                }
            }
        }
    }
}

/// Tells what went wrong with the disk cache, once.
fn warn(py: Python<'_>, dataset: &stillhouse_reader::DataSet) -> PyResult<()> {
    let Some(text) = dataset.take_warning() else { return Ok(()) };
    let text = CString::new(text).unwrap_or_default();
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 2)
}

fn dense<'py, T: Element>(py: Python<'py>, values: Vec<T>, shape: Option<Vec<usize>>) -> PyResult<Bound<'py, PyAny>> {
    let flat: Bound<'py, PyArray1<T>> = values.into_pyarray(py);
    match shape {
        Some(shape) => Ok(flat.reshape(shape)?.into_any()),
        None => Ok(flat.into_any()),
    }
}

/// A column as (name, values, offsets or None).
fn column(py: Python<'_>, column: Column, rows: usize) -> PyResult<Bound<'_, PyTuple>> {
    let (shape, offsets) = match column.layout {
        Layout::Dense(shape) => (Some(std::iter::once(rows).chain(shape).collect()), None),
        Layout::Ragged(offsets) => (None, Some(offsets.into_pyarray(py))),
    };
    let values = match column.values {
        Values::Bool(v) => dense(py, v, shape),
        Values::U8(v) => dense(py, v, shape),
        Values::U16(v) => dense(py, v, shape),
        Values::U32(v) => dense(py, v, shape),
        Values::U64(v) => dense(py, v, shape),
        Values::I32(v) => dense(py, v, shape),
        Values::F16(v) => dense(py, v, shape),
        Values::F32(v) => dense(py, v, shape),
    }?;
    (column.name, values, offsets).into_pyobject(py)
}

fn columns(py: Python<'_>, found: Vec<Column>, rows: usize) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for one in found {
        list.append(column(py, one, rows)?)?;
    }
    Ok(list)
}

/// One split of a finished data set.
#[pyclass(frozen, module = "stillhouse._core")]
pub struct DataSet(Arc<stillhouse_reader::DataSet>);

#[pymethods]
impl DataSet {
    /// `disk_cache` is a folder and the bytes that it may hold.
    #[staticmethod]
    #[pyo3(signature = (url, split, storage, cache_bytes, disk_cache=None))]
    fn open(
        py: Python<'_>,
        url: String,
        split: String,
        storage: &str,
        cache_bytes: usize,
        disk_cache: Option<(PathBuf, u64)>,
    ) -> PyResult<Self> {
        let storage =
            serde_json::from_str(storage).map_err(|e| PyValueError::new_err(format!("storage: {}", first_line(&e))))?;
        let disk_cache = disk_cache.map(|(folder, bytes)| DiskCacheOptions { folder, bytes });
        let options = OpenOptions { split, storage, cache_bytes, disk_cache };
        let opened = wait(py, async move { stillhouse_reader::DataSet::open(&url, options).await })?;
        Ok(Self(Arc::new(opened)))
    }

    fn select_columns(&self, py: Python<'_>, names: Vec<String>) -> PyResult<Self> {
        self.0.select_columns(&names).map(|selected| Self(Arc::new(selected))).map_err(|e| raise(py, e))
    }

    /// A file beside the shards that the manifest names in `beside`.
    fn beside<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyBytes>> {
        let dataset = Arc::clone(&self.0);
        let bytes = wait(py, async move { dataset.read_sidecar_file(&name).await })?;
        Ok(PyBytes::new(py, &bytes))
    }

    #[getter]
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    #[getter]
    fn block_rows(&self) -> u64 {
        self.0.block_rows()
    }

    #[getter]
    fn job_hash(&self) -> &str {
        self.0.job_hash()
    }

    #[getter]
    fn manifest(&self) -> &str {
        self.0.manifest()
    }

    /// (name, type of the values, shape per row or None) of each column.
    #[getter]
    fn columns(&self) -> Vec<(String, String, Option<Vec<usize>>)> {
        self.0.columns().iter().map(|c| (c.name.clone(), c.item().to_owned(), c.dimensions())).collect()
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        rows: PyReadonlyArray1<'py, u64>,
        whole_blocks: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let rows = rows.as_slice()?.to_vec();
        let count = rows.len();
        let reading = if whole_blocks { ReadMode::Blocks } else { ReadMode::Auto };
        let me = Arc::clone(&self.0);
        let found = wait(py, async move { me.read(&rows, reading).await })?;
        warn(py, &self.0)?;
        columns(py, found, count)
    }

    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        let me = Arc::clone(&self.0);
        wait(py, async move { me.verify().await })
    }

    /// The batches of one worker, as row numbers.
    #[pyo3(signature = (*, epoch, seed, window_blocks, start, rank, world, batch_rows, drop_last, worker, workers))]
    #[allow(clippy::too_many_arguments)] // one for each part of the plan, by name
    fn steps(
        &self,
        epoch: u32,
        seed: Option<u64>,
        window_blocks: u64,
        start: u64,
        rank: u64,
        world: u64,
        batch_rows: u64,
        drop_last: bool,
        worker: u64,
        workers: u64,
    ) -> Steps {
        let shuffle = seed.map(|seed| Shuffle { seed, window_blocks });
        let order = Order::new(self.0.rows(), self.0.block_rows(), epoch, shuffle);
        let plan = Plan { order, start, rank, world, batch_rows, drop_last, worker, workers };
        Steps { plan, steps: Mutex::new(plan.steps()), dataset: Arc::clone(&self.0) }
    }
}

/// The first line of an error of serde, without the position.
fn first_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// The batches of one worker: iterates over (row numbers [b] uint64, position after the batch).
#[pyclass(frozen, module = "stillhouse._core")]
pub struct Steps {
    plan: Plan,
    steps: Mutex<stillhouse_reader::stream::Steps>,
    dataset: Arc<stillhouse_reader::DataSet>,
}

#[pymethods]
impl Steps {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Option<(Bound<'py, PyArray1<u64>>, u64)> {
        let step = self.steps.lock().unwrap_or_else(PoisonError::into_inner).next()?;
        Some((step.rows.into_pyarray(py), step.next))
    }

    /// Batches that this trainer gets from here to the end of the epoch, over all its workers.
    #[getter]
    fn own_batches(&self) -> u64 {
        self.plan.own_batches()
    }

    /// Rows that this trainer gets, over all its workers.
    #[getter]
    fn own_rows(&self) -> u64 {
        self.plan.rows()
    }

    /// Starts to read them.
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        let stream = stillhouse_reader::Stream::start(&self.dataset, self.plan).map_err(|e| raise(py, e))?;
        Ok(Stream { stream: Mutex::new(stream), dataset: Arc::clone(&self.dataset) })
    }
}

/// Batches that are read ahead: iterates over (columns, position after the batch).
#[pyclass(frozen, module = "stillhouse._core")]
pub struct Stream {
    stream: Mutex<stillhouse_reader::Stream>,
    dataset: Arc<stillhouse_reader::DataSet>,
}

#[pymethods]
impl Stream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyList>, u64)>> {
        loop {
            let next = py.detach(|| self.stream.lock().unwrap_or_else(PoisonError::into_inner).next(PATIENCE));
            warn(py, &self.dataset)?;
            match next.map_err(|e| raise(py, e))? {
                Next::End => return Ok(None),
                Next::Waiting => py.check_signals()?,
                Next::Batch(batch) => return Ok(Some((columns(py, batch.columns, batch.rows)?, batch.next))),
            }
        }
    }
}
