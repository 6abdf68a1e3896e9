//! Products by cuBLASLt. What a shape needs (descriptors, the algorithm that it chooses) is made once and kept.
//!
//! cuBLASLt sees columns where this crate has rows: the row-major D `[m, n]` = A · Bᵀ is to it the matrix `[n, m]` = Bᵀ' · A', both sides read
//! from the same memory, so nothing is transposed.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::result::{free_sync, malloc_sync};
use cudarc::driver::sys::CUstream;

use crate::device::{Element, Matrix, Product, Result, Stream};
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
    plans: HashMap<Key, Plan>,
}

/// All that an algorithm may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 3],
    strides: [usize; 3],
    elements: [Element; 3],
    has_bias: bool,
    add: bool,
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

fn layout(matrix: &Matrix) -> std::result::Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let stride = i64::try_from(matrix.stride).unwrap_or(i64::MAX);
    result::create_matrix_layout(kind(matrix.element), matrix.columns as u64, matrix.rows as u64, stride)
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

fn plan(handle: sys::cublasLtHandle_t, product: &Product) -> std::result::Result<Plan, CublasError> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
    let layouts = [layout(&product.b)?, layout(&product.a)?, layout(&product.d)?];
    let epilogue = match product.bias {
        0 => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
        _ => sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
    };
    // SAFETY: everything was just made, and the attributes are of these types
    unsafe {
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &AS_IT_IS)?;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        if product.bias != 0 {
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &product.bias)?;
            set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &kind(product.d.element))?;
        }
        let preference = result::create_matmul_pref()?;
        let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES;
        result::set_matmul_pref_attribute(preference, most, from_ref(&bytes).cast(), size_of::<usize>())?;
        let [b, a, d] = layouts;
        let found = result::get_matmul_algo_heuristic(handle, description, b, a, d, d, preference);
        result::destroy_matmul_pref(preference)?;
        Ok(Plan { description, layouts, algorithm: found?.algo })
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
            let message =
                format!("cuBLASLt {version} on the loader's path, valid: {OLDEST_VERSION} (CUDA 13) or later");
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

    /// # Safety
    /// The matrices are within live buffers of the device, whose context is current.
    pub unsafe fn run(&mut self, device: &str, stream: Stream, on: CUstream, product: &Product) -> Result<()> {
        check(product)?;
        let Product { a, b, d, bias, add } = *product;
        let key = Key {
            shape: [a.rows, b.rows, a.columns],
            strides: [a.stride, b.stride, d.stride],
            elements: [a.element, b.element, d.element],
            has_bias: bias != 0,
            add,
        };
        let named = |call: &'static str| move |error| failed(device, call, error);
        let handle = self.handle.ok_or_else(|| failed_with(device, "cublasLtMatmul", "the library is not open"))?;
        if self.plans.len() >= MOST_PLANS && !self.plans.contains_key(&key) {
            // what was launched with them has copied all it needs
            self.plans.clear();
        }
        let plan = match self.plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => {
                let made = plan(handle, product).map_err(|error| {
                    let shape = format!("[{}, {}] · [{}, {}]ᵀ", a.rows, a.columns, b.rows, b.columns);
                    failed_with(device, "cublasLtMatmulAlgoGetHeuristic", &format!("{shape}: {error}"))
                })?;
                free.insert(made)
            }
        };
        let (one, zero) = (1f32, 0f32);
        let beta = if add { &one } else { &zero };
        let [b_layout, a_layout, d_layout] = plan.layouts;
        let address = |pointer: u64| pointer as *mut c_void;
        // SAFETY: the plan is of these shapes; the memory is as the caller says. The bias of this call is set before it, under the lock
        unsafe {
            if bias != 0 {
                let what = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                set(plan.description, what, &bias).map_err(named("cublasLtMatmulDescSetAttribute"))?;
            }
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
                address(self.workspaces[stream as usize]),
                WORKSPACE_BYTES,
                if on.is_null() { null_mut() } else { on.cast() },
            )
            .map_err(named("cublasLtMatmul"))
        }
    }
}

fn check(product: &Product) -> Result<()> {
    let Product { a, b, d, .. } = product;
    if a.columns == b.columns && (d.rows, d.columns) == (a.rows, b.rows) {
        return Ok(());
    }
    let shape = |m: &Matrix| format!("[{}, {}]", m.rows, m.columns);
    Err(GpuError::Input {
        what: "shapes of a product A · Bᵀ into D",
        got: format!("{} · {}ᵀ into {}", shape(a), shape(b), shape(d)),
        valid: "[m, k] · [n, k]ᵀ into [m, n]".into(),
    })
}

fn failed(device: &str, call: &str, error: CublasError) -> GpuError {
    failed_with(device, call, &error.to_string())
}

fn failed_with(device: &str, call: &str, message: &str) -> GpuError {
    GpuError::Failed { device: device.into(), call: call.into(), message: message.into(), lost: false }
}
