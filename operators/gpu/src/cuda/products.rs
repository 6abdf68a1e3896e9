//! Matrix products by cuBLASLt. What a shape needs (descriptors, the algorithm that cuBLASLt chooses) is cached as a
//! plan.
//!
//! cuBLASLt matrices are column-major. It therefore computes the row-major D `[m, n]` = A · Bᵀ as the column-major
//! `[n, m]` = B'ᵀ · A', where ' is the column-major view of the same memory. Nothing is copied to transpose it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ptr::null_mut;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::result::{free_sync, malloc_sync};
use cudarc::driver::sys::CUstream;

use super::cublaslt::{CublasLt, MatmulArgs};
use crate::device::{Element, Matrix, Product, Result, ScaledMatrix, ScaledProduct, Stream};
use crate::error::GpuError;

/// NVIDIA's recommendation for Hopper. Each stream has its own workspace, because products of both streams may run at
/// once.
const WORKSPACE_BYTES: usize = 32 << 20;
/// cuBLASLt of CUDA 13, the toolkit that compiles the kernels.
const MIN_VERSION: usize = 130_000;
/// Maximum cached plans. Passes of different lengths need different plans.
const MAX_PLANS: usize = 4096;
/// Values of `cublasOperation_t`, which the bindings of cuBLASLt lack.
const NO_TRANSPOSE: i32 = 0;
const TRANSPOSE: i32 = 1;

/// The cuBLASLt handle, its workspaces and the cached plans.
#[derive(Default)]
pub(super) struct Products {
    library: Option<OpenLibrary>,
    version: usize,
    workspaces: [u64; 2],
    /// `None` if the library has no algorithm.
    plans: HashMap<PlanKey, Option<Plan>>,
}

/// The library and its handle.
#[derive(Clone, Copy)]
struct OpenLibrary {
    library: &'static CublasLt,
    handle: sys::cublasLtHandle_t,
}

/// A matrix as cuBLASLt needs it described.
#[derive(Clone, Copy)]
struct Operand {
    pointer: u64,
    data_type: sys::cudaDataType,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// A product in any number format.
pub(super) struct Matmul {
    a: Operand,
    b: Operand,
    d: Operand,
    bias: u64,
    accumulate: bool,
    gelu: bool,
    /// Scales of the rows of A and of B.
    scales: Option<[u64; 2]>,
}

impl Matmul {
    pub fn from_product(product: &Product) -> Result<Self> {
        let Product { a, b, d, bias, accumulate, gelu } = *product;
        let [a, b, d] = [a, b, d].map(|matrix| operand(&matrix));
        Self { a, b, d, bias, accumulate, gelu, scales: None }.checked()
    }

    pub fn from_scaled_product(product: &ScaledProduct) -> Result<Self> {
        let ScaledProduct { a, b, d, bias, accumulate } = *product;
        let fp8_operand = |ScaledMatrix { pointer, rows, columns, .. }: ScaledMatrix| {
            let data_type = sys::cudaDataType::CUDA_R_8F_E4M3;
            Operand { pointer, data_type, rows, columns, stride: columns }
        };
        let scales = Some([a.scales, b.scales]);
        Self { a: fp8_operand(a), b: fp8_operand(b), d: operand(&d), bias, accumulate, gelu: false, scales }.checked()
    }

    fn checked(self) -> Result<Self> {
        let Self { a, b, d, .. } = &self;
        if a.columns == b.columns && (d.rows, d.columns) == (a.rows, b.rows) {
            return Ok(self);
        }
        let shape = |m: &Operand| format!("[{}, {}]", m.rows, m.columns);
        Err(GpuError::Input {
            what: "shapes of a product A · Bᵀ into D",
            got: format!("{} · {}ᵀ into {}", shape(a), shape(b), shape(d)),
            valid: "[m, k] · [n, k]ᵀ into [m, n]".into(),
        })
    }

    fn key(&self) -> PlanKey {
        let Self { a, b, d, bias, accumulate, gelu, .. } = *self;
        PlanKey {
            shape: [a.rows, b.rows, a.columns],
            strides: [a.stride, b.stride, d.stride],
            data_types: [a.data_type, b.data_type, d.data_type].map(|data_type| data_type as u32),
            has_bias: bias != 0,
            accumulate,
            gelu,
        }
    }

    /// The step after the sums: bias and GELU. cuBLASLt's GELU is the tanh approximation.
    fn epilogue(&self) -> sys::cublasLtEpilogue_t {
        match (self.gelu, self.bias) {
            (false, 0) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (false, _) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (true, 0) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
            (true, _) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        }
    }
}

/// Everything that the choice of an algorithm may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct PlanKey {
    shape: [usize; 3],
    strides: [usize; 3],
    data_types: [u32; 3],
    has_bias: bool,
    accumulate: bool,
    gelu: bool,
}

struct Plan {
    library: &'static CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: `plan` made them, and nothing else uses them
        unsafe {
            let _ = self.library.destroy_description(self.description);
            for layout in self.layouts {
                let _ = self.library.destroy_layout(layout);
            }
        }
    }
}

fn data_type(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
    }
}

fn operand(matrix: &Matrix) -> Operand {
    let Matrix { pointer, element, rows, columns, stride } = *matrix;
    Operand { pointer, data_type: data_type(element), rows, columns, stride }
}

fn layout(library: &CublasLt, matrix: &Operand) -> std::result::Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let stride = i64::try_from(matrix.stride).unwrap_or(i64::MAX);
    library.create_layout(matrix.data_type, matrix.columns as u64, matrix.rows as u64, stride)
}

/// Sets the scales of the rows. cuBLASLt's A is B in this crate.
///
/// # Safety
/// The description is live.
unsafe fn set_scales(
    library: &CublasLt,
    description: sys::cublasLtMatmulDesc_t,
    scales: Option<[u64; 2]>,
) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let Some([a, b]) = scales else { return Ok(()) };
    // SAFETY: the description is live, as the caller guarantees; the attributes are addresses
    unsafe {
        library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b)?;
        library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a)
    }
}

fn make_plan(OpenLibrary { library, handle }: OpenLibrary, product: &Matmul) -> std::result::Result<Plan, CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let description = library.create_description(compute, sys::cudaDataType::CUDA_R_32F)?;
    let layouts = [layout(library, &product.b)?, layout(library, &product.a)?, layout(library, &product.d)?];
    // Dropping `plan` frees description and layouts if a call below fails.
    let mut plan = Plan { library, description, layouts, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
    // SAFETY: everything was just created, and the attributes have these types
    unsafe {
        library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSE)?;
        library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &NO_TRANSPOSE)?;
        library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &product.epilogue())?;
        if product.bias != 0 {
            library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
            library.set_description(
                description,
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                &product.d.data_type,
            )?;
        }
        if product.scales.is_some() {
            let rows = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &rows)?;
            library.set_description(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows)?;
            set_scales(library, description, product.scales)?;
        }
        let preference = library.create_preference()?;
        let [b, a, d] = layouts;
        let found = set_preferences(library, preference)
            .and_then(|()| library.best_algorithm(handle, description, [b, a, d, d], preference));
        library.destroy_preference(preference)?;
        plan.algorithm = found?;
    }
    Ok(plan)
}

/// Sets the workspace size, and forbids split sums: the library may round partial sums to D's dtype before it adds
/// them.
///
/// # Safety
/// The preference is live.
unsafe fn set_preferences(
    library: &CublasLt,
    preference: sys::cublasLtMatmulPreference_t,
) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
    // SAFETY: the preference is live, as the caller guarantees; the attributes have these types
    unsafe {
        library.set_preference(preference, Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        library.set_preference(preference, Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes)
    }
}

impl Products {
    /// The version of cuBLASLt in its own numbering; 0 before [`Products::open`].
    pub const fn version(&self) -> usize {
        self.version
    }

    /// Creates a handle and workspaces. The device's context must be current.
    pub fn open(&mut self, library: &'static CublasLt, device: &str) -> Result<()> {
        let handle = library.create_handle().map_err(|error| failed(device, "cublasLtCreate", error))?;
        self.library = Some(OpenLibrary { library, handle });
        self.version = library.version();
        if self.version < MIN_VERSION {
            let message = format!("cuBLASLt {}, valid: {MIN_VERSION} (CUDA 13) or later", self.version);
            return Err(GpuError::Unavailable { device: device.into(), message });
        }
        for workspace in &mut self.workspaces {
            // SAFETY: the memory only goes to cuBLASLt, with its length
            *workspace = unsafe { malloc_sync(WORKSPACE_BYTES) }.map_err(|error| GpuError::Failed {
                device: device.into(),
                call: "cuMemAlloc".into(),
                message: format!("{error:?}"),
                lost: false,
            })?;
        }
        Ok(())
    }

    /// Frees everything. If the context is dead or not current, nothing is left to free.
    pub fn close(&mut self, is_alive: bool) {
        self.plans.clear();
        if !is_alive {
            return;
        }
        // SAFETY: `open` made them, and nothing else uses them
        unsafe {
            for workspace in self.workspaces.iter_mut().filter(|w| **w != 0) {
                let _ = free_sync(std::mem::take(workspace));
            }
            if let Some(OpenLibrary { library, handle }) = self.library.take() {
                let _ = library.destroy_handle(handle);
            }
        }
    }

    /// Returns the cached plan of a product, or makes it; `None` if the library has no algorithm.
    fn cached_plan(&mut self, device: &str, product: &Matmul) -> Result<(sys::cublasLtHandle_t, Option<&mut Plan>)> {
        let open = self.library.ok_or_else(|| failed_with(device, "cublasLtMatmul", "the library is not open"))?;
        let key = product.key();
        if self.plans.len() >= MAX_PLANS && !self.plans.contains_key(&key) {
            // Products already launched have copied everything they need from their plans.
            self.plans.clear();
        }
        let plan = match self.plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => match make_plan(open, product) {
                Ok(made) => entry.insert(Some(made)),
                Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => entry.insert(None),
                Err(error) => return Err(failed(device, "cublasLtMatmulAlgoGetHeuristic", error)),
            },
        };
        Ok((open.handle, plan.as_mut()))
    }

    /// Whether the library has an algorithm for a product. The device's context must be current.
    pub fn has_plan(&mut self, device: &str, product: &Matmul) -> Result<bool> {
        self.cached_plan(device, product).map(|(_, plan)| plan.is_some())
    }

    /// Enqueues the product on the stream `cuda_stream`.
    ///
    /// # Safety
    /// The matrices are within live buffers of the device, whose context is current.
    pub unsafe fn run(&mut self, device: &str, stream: Stream, cuda_stream: CUstream, product: &Matmul) -> Result<()> {
        let Matmul { a, b, d, bias, accumulate, scales, .. } = *product;
        let workspace = self.workspaces[stream as usize];
        let (handle, Some(plan)) = self.cached_plan(device, product)? else {
            let data_types = [a, b, d].map(|operand| format!("{:?}", operand.data_type)).join(", ");
            let shape = format!("[{}, {}] · [{}, {}]ᵀ", a.rows, a.columns, b.rows, b.columns);
            let message = format!("{shape} of {data_types}: the library has no algorithm");
            return Err(failed_with(device, "cublasLtMatmulAlgoGetHeuristic", &message));
        };
        let call_failed = |call: &'static str| move |error| failed(device, call, error);
        let (one, zero) = (1f32, 0f32);
        let beta = if accumulate { &one } else { &zero };
        let library = plan.library;
        let multiply = MatmulArgs {
            alpha: &one,
            beta,
            pointers: [b.pointer, a.pointer, d.pointer],
            layouts: plan.layouts,
            algorithm: &plan.algorithm,
            workspace: (workspace, WORKSPACE_BYTES),
            stream: if cuda_stream.is_null() { null_mut() } else { cuda_stream.cast() },
        };
        // SAFETY: the plan fits these shapes; the caller guarantees the memory. Bias and scales of this call are set
        // first, under the lock of `Products`
        unsafe {
            if bias != 0 {
                let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                library
                    .set_description(plan.description, attribute, &bias)
                    .map_err(call_failed("cublasLtMatmulDescSetAttribute"))?;
            }
            set_scales(library, plan.description, scales).map_err(call_failed("cublasLtMatmulDescSetAttribute"))?;
            library.matmul(handle, plan.description, &multiply).map_err(call_failed("cublasLtMatmul"))
        }
    }
}

fn failed(device: &str, call: &str, error: CublasError) -> GpuError {
    failed_with(device, call, &error.to_string())
}

fn failed_with(device: &str, call: &str, message: &str) -> GpuError {
    GpuError::Failed { device: device.into(), call: call.into(), message: message.into(), lost: false }
}
