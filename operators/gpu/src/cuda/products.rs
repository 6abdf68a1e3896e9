//! Products by cuBLASLt. What a shape needs (descriptors, the algorithm that it chooses) is made once and kept.
//!
//! cuBLASLt sees columns where this crate has rows: the row-major D `[m, n]` = A · Bᵀ is to it the matrix `[n, m]` = Bᵀ' · A', both sides read
//! from the same memory, so nothing is transposed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::result::{free_sync, malloc_sync};
use cudarc::driver::sys::CUstream;

use crate::device::{Element, Matrix, Product, Result, Scaled, ScaledProduct, Stream};
use crate::error::GpuError;

/// What NVIDIA recommends for Hopper. One for each stream, as products of two streams may run at once.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Of CUDA 13, which the kernels are made with.
const OLDEST_VERSION: usize = 130_000;
/// Plans that are kept: where passes differ in length, every length has its own.
const MOST_PLANS: usize = 4096;
/// `cublasOperation_t`, which the bindings of cuBLASLt do not have.
const AS_IT_IS: i32 = 0;
const TRANSPOSED: i32 = 1;

/// The handle and what was made with it.
#[derive(Default)]
pub(super) struct Products {
    handle: Option<sys::cublasLtHandle_t>,
    version: usize,
    workspaces: [u64; 2],
    /// None where the library has no algorithm.
    plans: HashMap<Key, Option<Plan>>,
}

/// A matrix as cuBLASLt is told of it.
#[derive(Clone, Copy)]
struct Operand {
    pointer: u64,
    kind: sys::cudaDataType,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// A product, of whatever numbers.
pub(super) struct Operation {
    a: Operand,
    b: Operand,
    d: Operand,
    bias: u64,
    add: bool,
    gelu: bool,
    /// Of the rows of A and of B.
    scales: Option<[u64; 2]>,
}

impl Operation {
    pub fn of(product: &Product) -> Result<Self> {
        let Product { a, b, d, bias, add, gelu } = *product;
        let [a, b, d] = [a, b, d].map(|matrix| operand(&matrix));
        Self { a, b, d, bias, add, gelu, scales: None }.checked()
    }

    pub fn of_scaled(product: &ScaledProduct) -> Result<Self> {
        let ScaledProduct { a, b, d, bias, add } = *product;
        let eight = |Scaled { pointer, rows, columns, .. }: Scaled| {
            let kind = sys::cudaDataType::CUDA_R_8F_E4M3;
            Operand { pointer, kind, rows, columns, stride: columns }
        };
        let scales = Some([a.scales, b.scales]);
        Self { a: eight(a), b: eight(b), d: operand(&d), bias, add, gelu: false, scales }.checked()
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

    fn key(&self) -> Key {
        let Self { a, b, d, bias, add, gelu, .. } = *self;
        Key {
            shape: [a.rows, b.rows, a.columns],
            strides: [a.stride, b.stride, d.stride],
            kinds: [a.kind, b.kind, d.kind].map(|kind| kind as u32),
            has_bias: bias != 0,
            add,
            gelu,
        }
    }

    /// What is done with the sums; cuBLASLt's GELU is the tanh form.
    fn epilogue(&self) -> sys::cublasLtEpilogue_t {
        match (self.gelu, self.bias) {
            (false, 0) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (false, _) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (true, 0) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
            (true, _) => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        }
    }
}

/// All that an algorithm may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 3],
    strides: [usize; 3],
    kinds: [u32; 3],
    has_bias: bool,
    add: bool,
    gelu: bool,
}

struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `plan`, and used by nobody else
        unsafe {
            let _ = result::destroy_matmul_desc(self.description);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

fn kind(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
    }
}

fn operand(matrix: &Matrix) -> Operand {
    let Matrix { pointer, element, rows, columns, stride } = *matrix;
    Operand { pointer, kind: kind(element), rows, columns, stride }
}

fn layout(matrix: &Operand) -> std::result::Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let stride = i64::try_from(matrix.stride).unwrap_or(i64::MAX);
    result::create_matrix_layout(matrix.kind, matrix.columns as u64, matrix.rows as u64, stride)
}

/// # Safety
/// The description is live, and the attribute is of this type.
unsafe fn set<T>(
    description: sys::cublasLtMatmulDesc_t,
    what: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: as the caller says; the value is copied
    unsafe { result::set_matmul_desc_attribute(description, what, from_ref(value).cast(), size_of::<T>()) }
}

/// What cuBLASLt calls A is B here.
///
/// # Safety
/// The description is live.
unsafe fn set_scales(
    description: sys::cublasLtMatmulDesc_t,
    scales: Option<[u64; 2]>,
) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let Some([a, b]) = scales else { return Ok(()) };
    // SAFETY: as the caller says; the attributes are addresses
    unsafe {
        set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a)
    }
}

fn plan(handle: sys::cublasLtHandle_t, product: &Operation) -> std::result::Result<Plan, CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
    let layouts = [layout(&product.b)?, layout(&product.a)?, layout(&product.d)?];
    // frees both where a call below fails
    let mut plan = Plan { description, layouts, algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] } };
    // SAFETY: everything was just made, and the attributes are of these types
    unsafe {
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &AS_IT_IS)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &product.epilogue())?;
        if product.bias != 0 {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &product.d.kind)?;
        }
        if product.scales.is_some() {
            let rows = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &rows)?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &rows)?;
            set_scales(description, product.scales)?;
        }
        let preference = result::create_matmul_pref()?;
        let [b, a, d] = layouts;
        let found = prefer(preference)
            .and_then(|()| result::get_matmul_algo_heuristic(handle, description, b, a, d, d, preference));
        result::destroy_matmul_pref(preference)?;
        plan.algorithm = found?.algo;
    }
    Ok(plan)
}

/// Room to work in; and no sums in parts, which the library may round to D's type before it adds them up.
///
/// # Safety
/// The preference is live.
unsafe fn prefer(preference: sys::cublasLtMatmulPreference_t) -> std::result::Result<(), CublasError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let (bytes, schemes) = (WORKSPACE_BYTES, sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32);
    // SAFETY: as the caller says; the attributes are of these types
    unsafe {
        let (most, value) = (Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, from_ref(&bytes).cast());
        result::set_matmul_pref_attribute(preference, most, value, size_of::<usize>())?;
        let (mask, value) = (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, from_ref(&schemes).cast());
        result::set_matmul_pref_attribute(preference, mask, value, size_of::<u32>())
    }
}

impl Products {
    /// Of cuBLASLt, as it counts; 0 before it is open.
    pub const fn version(&self) -> usize {
        self.version
    }

    /// Opens the library; the device's context is current.
    pub fn open(&mut self, device: &str) -> Result<()> {
        self.handle = Some(result::create_handle().map_err(|error| failed(device, "cublasLtCreate", error))?);
        // SAFETY: it only returns a number
        let version = unsafe { sys::cublasLtGetVersion() };
        self.version = version;
        if version < OLDEST_VERSION {
            // a `libcublasLt.so` on the loader's path comes before the one of CUDA 13 that was opened by its full name
            let message = format!(
                "cuBLASLt {version} in {}, valid: {OLDEST_VERSION} (CUDA 13) or later; an older toolkit may be on the loader's path \
                 (LD_LIBRARY_PATH)",
                super::libraries::loaded_cublaslt()
            );
            return Err(GpuError::Unavailable { device: device.into(), message });
        }
        for workspace in &mut self.workspaces {
            // SAFETY: only handed to cuBLASLt with its length
            *workspace = unsafe { malloc_sync(WORKSPACE_BYTES) }.map_err(|error| GpuError::Failed {
                device: device.into(),
                call: "cuMemAlloc".into(),
                message: format!("{error:?}"),
                lost: false,
            })?;
        }
        Ok(())
    }

    /// Gives everything back; where the context is not current and alive, there is nothing left to give.
    pub fn close(&mut self, is_alive: bool) {
        self.plans.clear();
        if !is_alive {
            return;
        }
        // SAFETY: made in `open`, and used by nobody else
        unsafe {
            for workspace in self.workspaces.iter_mut().filter(|w| **w != 0) {
                let _ = free_sync(std::mem::take(workspace));
            }
            if let Some(handle) = self.handle.take() {
                let _ = result::destroy_handle(handle);
            }
        }
    }

    /// What a product needs, made once; none where the library has no algorithm for it.
    fn plan_of(&mut self, device: &str, product: &Operation) -> Result<(sys::cublasLtHandle_t, Option<&mut Plan>)> {
        let handle = self.handle.ok_or_else(|| failed_with(device, "cublasLtMatmul", "the library is not open"))?;
        let key = product.key();
        if self.plans.len() >= MOST_PLANS && !self.plans.contains_key(&key) {
            // what was launched with them has copied all it needs
            self.plans.clear();
        }
        let plan = match self.plans.entry(key) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(free) => match plan(handle, product) {
                Ok(made) => free.insert(Some(made)),
                Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => free.insert(None),
                Err(error) => return Err(failed(device, "cublasLtMatmulAlgoGetHeuristic", error)),
            },
        };
        Ok((handle, plan.as_mut()))
    }

    /// Whether the library has an algorithm for a product; the device's context is current.
    pub fn has_plan(&mut self, device: &str, product: &Operation) -> Result<bool> {
        self.plan_of(device, product).map(|(_, plan)| plan.is_some())
    }

    /// # Safety
    /// The matrices are within live buffers of the device, whose context is current.
    pub unsafe fn run(&mut self, device: &str, stream: Stream, on: CUstream, product: &Operation) -> Result<()> {
        let Operation { a, b, d, bias, add, scales, .. } = *product;
        let workspace = self.workspaces[stream as usize];
        let (handle, Some(plan)) = self.plan_of(device, product)? else {
            let kinds = [a, b, d].map(|operand| format!("{:?}", operand.kind)).join(", ");
            let shape = format!("[{}, {}] · [{}, {}]ᵀ", a.rows, a.columns, b.rows, b.columns);
            let message = format!("{shape} of {kinds}: the library has no algorithm");
            return Err(failed_with(device, "cublasLtMatmulAlgoGetHeuristic", &message));
        };
        let named = |call: &'static str| move |error| failed(device, call, error);
        let (one, zero) = (1f32, 0f32);
        let beta = if add { &one } else { &zero };
        let [b_layout, a_layout, d_layout] = plan.layouts;
        let address = |pointer: u64| pointer as *mut c_void;
        // SAFETY: the plan is of these shapes; the memory is as the caller says. The bias and the scales of this call are set before it, under
        // the lock
        unsafe {
            if bias != 0 {
                let what = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                set(plan.description, what, &bias).map_err(named("cublasLtMatmulDescSetAttribute"))?;
            }
            set_scales(plan.description, scales).map_err(named("cublasLtMatmulDescSetAttribute"))?;
            result::matmul(
                handle,
                plan.description,
                from_ref(&one).cast(),
                from_ref(beta).cast(),
                address(b.pointer),
                b_layout,
                address(a.pointer),
                a_layout,
                address(d.pointer),
                d_layout,
                address(d.pointer),
                d_layout,
                from_ref(&plan.algorithm),
                address(workspace),
                WORKSPACE_BYTES,
                if on.is_null() { null_mut() } else { on.cast() },
            )
            .map_err(named("cublasLtMatmul"))
        }
    }
}

fn failed(device: &str, call: &str, error: CublasError) -> GpuError {
    failed_with(device, call, &error.to_string())
}

fn failed_with(device: &str, call: &str, message: &str) -> GpuError {
    GpuError::Failed { device: device.into(), call: call.into(), message: message.into(), lost: false }
}
