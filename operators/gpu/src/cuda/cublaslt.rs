//! Loads cuBLASLt from the loader's path or the folders of [`crate::machine::library_folders`].
//!
//! All functions come from the file that was opened. cudarc's bindings have their own loader, which tries
//! `libcublasLt.so` before `libcublasLt.so.13`. That loader could call an older toolkit instead of the library found
//! here.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::machine::library_folders::folders;

const NAME: &str = "libcublasLt.so.13";

type Status = sys::cublasStatus_t;
type Handle = sys::cublasLtHandle_t;
type Description = sys::cublasLtMatmulDesc_t;
type Layout = sys::cublasLtMatrixLayout_t;
type Preference = sys::cublasLtMatmulPreference_t;
type CublasResult<T = ()> = Result<T, CublasError>;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        /// The cuBLASLt functions that this crate calls, all from one file that stays open.
        pub(super) struct CublasLt {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl CublasLt {
            /// # Safety
            /// The library is cuBLASLt, and is never closed.
            unsafe fn from_library(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the functions have these types in cublasLt.h
                unsafe { Ok(Self { $($field: *library.get(concat!($name, "\0").as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    version = "cublasLtGetVersion": fn() -> usize;
    create = "cublasLtCreate": fn(*mut Handle) -> Status;
    destroy = "cublasLtDestroy": fn(Handle) -> Status;
    description_create = "cublasLtMatmulDescCreate": fn(*mut Description, sys::cublasComputeType_t, sys::cudaDataType) -> Status;
    description_set = "cublasLtMatmulDescSetAttribute":
        fn(Description, sys::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> Status;
    description_destroy = "cublasLtMatmulDescDestroy": fn(Description) -> Status;
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Layout, sys::cudaDataType, u64, u64, i64) -> Status;
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Layout) -> Status;
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut Preference) -> Status;
    preference_set = "cublasLtMatmulPreferenceSetAttribute":
        fn(Preference, sys::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> Status;
    preference_destroy = "cublasLtMatmulPreferenceDestroy": fn(Preference) -> Status;
    heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(
        Handle, Description, Layout, Layout, Layout, Layout, Preference, c_int, *mut sys::cublasLtMatmulHeuristicResult_t, *mut c_int,
    ) -> Status;
    matmul = "cublasLtMatmul": fn(
        Handle, Description, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void, *const c_void, Layout,
        *mut c_void, Layout, *const sys::cublasLtMatmulAlgo_t, *mut c_void, usize, sys::cudaStream_t,
    ) -> Status;
}

/// Opens cuBLASLt once, for the rest of the process.
pub(super) fn load() -> Result<&'static CublasLt, String> {
    static LOADED: OnceLock<Result<CublasLt, String>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<CublasLt, String> {
    let folders = folders();
    let paths = std::iter::once(PathBuf::from(NAME)).chain(folders.iter().map(|folder| folder.join(NAME)));
    for path in paths {
        // SAFETY: cuBLASLt's own initialisers run, as in every program that links it
        let Ok(library) = (unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }) else { continue };
        // SAFETY: by its name, this is cuBLASLt; `forget` below keeps it open
        let functions = unsafe { CublasLt::from_library(&library) }.map_err(|e| format!("{}: {e}", path.display()));
        std::mem::forget(library);
        return functions;
    }
    let searched: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(format!(
        "no {NAME} (CUDA 13) on the loader's path or in {}; valid: a toolkit in CUDA_HOME, or an environment with PyTorch for \
         CUDA 13 in VIRTUAL_ENV",
        if searched.is_empty() { "any known folder".into() } else { searched.join(", ") }
    ))
}

/// Returns the value that a function writes on success.
///
/// # Safety
/// On success, the function writes a whole value.
unsafe fn call_with_output<T>(make: impl FnOnce(*mut T) -> Status) -> CublasResult<T> {
    let mut output = MaybeUninit::uninit();
    make(output.as_mut_ptr()).result()?;
    // SAFETY: the call succeeded, so the caller guarantees a whole value
    Ok(unsafe { output.assume_init() })
}

/// For all unsafe methods: handles, descriptions, layouts and preferences are live, attributes have their documented
/// types, and addresses are of device memory.
impl CublasLt {
    pub fn version(&self) -> usize {
        // SAFETY: the function only returns a number
        unsafe { (self.version)() }
    }

    pub fn create_handle(&self) -> CublasResult<Handle> {
        // SAFETY: on success, the function writes a whole value
        unsafe { call_with_output(|to| (self.create)(to)) }
    }

    pub unsafe fn destroy_handle(&self, handle: Handle) -> CublasResult {
        // SAFETY: see the `impl` block; the same holds for all methods below
        unsafe { (self.destroy)(handle) }.result()
    }

    pub fn create_description(
        &self,
        compute: sys::cublasComputeType_t,
        scale: sys::cudaDataType,
    ) -> CublasResult<Description> {
        // SAFETY: on success, the function writes a whole value
        unsafe { call_with_output(|to| (self.description_create)(to, compute, scale)) }
    }

    pub unsafe fn set_description<T>(
        &self,
        description: Description,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> CublasResult {
        // SAFETY: as above; the value is copied
        unsafe { (self.description_set)(description, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
            .result()
    }

    pub unsafe fn destroy_description(&self, description: Description) -> CublasResult {
        // SAFETY: as above
        unsafe { (self.description_destroy)(description) }.result()
    }

    pub fn create_layout(
        &self,
        data_type: sys::cudaDataType,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> CublasResult<Layout> {
        // SAFETY: on success, the function writes a whole value
        unsafe { call_with_output(|to| (self.layout_create)(to, data_type, rows, columns, stride)) }
    }

    pub unsafe fn destroy_layout(&self, layout: Layout) -> CublasResult {
        // SAFETY: as above
        unsafe { (self.layout_destroy)(layout) }.result()
    }

    pub fn create_preference(&self) -> CublasResult<Preference> {
        // SAFETY: on success, the function writes a whole value
        unsafe { call_with_output(|to| (self.preference_create)(to)) }
    }

    pub unsafe fn set_preference<T>(
        &self,
        preference: Preference,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> CublasResult {
        // SAFETY: as above; the value is copied
        unsafe { (self.preference_set)(preference, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
            .result()
    }

    pub unsafe fn destroy_preference(&self, preference: Preference) -> CublasResult {
        // SAFETY: as above
        unsafe { (self.preference_destroy)(preference) }.result()
    }

    /// Returns the algorithm that the library expects to be fastest, or `NOT_SUPPORTED` if it has none.
    pub unsafe fn best_algorithm(
        &self,
        handle: Handle,
        description: Description,
        [a, b, c, d]: [Layout; 4],
        preference: Preference,
    ) -> CublasResult<sys::cublasLtMatmulAlgo_t> {
        let (mut found, mut count) = (MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(), 0);
        // SAFETY: as above; `found` has space for the one result requested
        unsafe {
            (self.heuristic)(handle, description, a, b, c, d, preference, 1, found.as_mut_ptr(), &raw mut count)
                .result()?;
            if count == 0 {
                return Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED));
            }
            let found = found.assume_init();
            found.state.result()?;
            Ok(found.algo)
        }
    }

    /// D = alpha · A · B + beta · D, enqueued on the stream.
    pub unsafe fn matmul(&self, handle: Handle, description: Description, product: &MatmulArgs) -> CublasResult {
        let MatmulArgs {
            alpha,
            beta,
            pointers: [a, b, d],
            layouts: [layout_a, layout_b, layout_d],
            algorithm,
            workspace,
            stream,
        } = *product;
        let address = |pointer: u64| pointer as *mut c_void;
        let number = |of: &f32| std::ptr::from_ref(of).cast::<c_void>();
        let (alpha, beta) = (number(alpha), number(beta));
        let (a, b, d) = (address(a), address(b), address(d));
        let (work, bytes) = (address(workspace.0), workspace.1);
        // SAFETY: as above
        unsafe {
            (self.matmul)(
                handle,
                description,
                alpha,
                a,
                layout_a,
                b,
                layout_b,
                beta,
                d,
                layout_d,
                d,
                layout_d,
                algorithm,
                work,
                bytes,
                stream,
            )
        }
        .result()
    }
}

/// The arguments of a product in cuBLASLt's column-major terms.
pub(super) struct MatmulArgs<'a> {
    pub alpha: &'a f32,
    pub beta: &'a f32,
    /// A, B, D.
    pub pointers: [u64; 3],
    pub layouts: [Layout; 3],
    pub algorithm: &'a sys::cublasLtMatmulAlgo_t,
    /// Address and size in bytes.
    pub workspace: (u64, usize),
    pub stream: sys::cudaStream_t,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An older `libcublasLt.so` on the loader's path changes nothing. Without a cuBLASLt (`CUDA_HOME` of
    /// scripts/cuda-build has one), the test checks the error message.
    #[test]
    fn the_functions_are_those_of_the_file_that_was_found() {
        match load() {
            Ok(library) => assert!(library.version() / 10_000 == 13, "{}", library.version()),
            Err(message) => assert!(message.starts_with("no libcublasLt.so.13 (CUDA 13)"), "{message}"),
        }
    }
}
