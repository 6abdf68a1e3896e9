//! cuBLASLt, opened from where it may be: see [`crate::machine::places`].
//!
//! Its functions are taken from the very file that was opened. The bindings of cudarc have a loader of their own, which asks for `libcublasLt.so` before
//! `libcublasLt.so.13`: an older toolkit that the loader knows would be called in the place of the one that was found.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::OnceLock;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::machine::places::folders;

const NAME: &str = "libcublasLt.so.13";

type Status = sys::cublasStatus_t;
type Handle = sys::cublasLtHandle_t;
type Description = sys::cublasLtMatmulDesc_t;
type Layout = sys::cublasLtMatrixLayout_t;
type Preference = sys::cublasLtMatmulPreference_t;
type Done<T = ()> = Result<T, CublasError>;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        /// The functions of cuBLASLt that this crate calls, of one file that stays open.
        pub(super) struct CublasLt {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl CublasLt {
            /// # Safety
            /// The library is cuBLASLt, and is never closed.
            unsafe fn of(library: &Library) -> Result<Self, libloading::Error> {
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

/// Opens cuBLASLt for the rest of the process, once.
pub(super) fn cublaslt() -> Result<&'static CublasLt, String> {
    static LOADED: OnceLock<Result<CublasLt, String>> = OnceLock::new();
    LOADED.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> Result<CublasLt, String> {
    let folders = folders();
    let paths = std::iter::once(PathBuf::from(NAME)).chain(folders.iter().map(|folder| folder.join(NAME)));
    for path in paths {
        // SAFETY: cuBLASLt's own initialisers run, as in every program that links it
        let Ok(library) = (unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) }) else { continue };
        // SAFETY: it is, by its name, and it is forgotten below
        let functions = unsafe { CublasLt::of(&library) }.map_err(|e| format!("{}: {e}", path.display()));
        std::mem::forget(library);
        return functions;
    }
    let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(format!(
        "no {NAME} (CUDA 13) on the loader's path or in {}; valid: a toolkit in CUDA_HOME, or an environment with PyTorch for \
         CUDA 13 in VIRTUAL_ENV",
        if looked.is_empty() { "any known folder".into() } else { looked.join(", ") }
    ))
}

/// What a function writes where it succeeds.
///
/// # Safety
/// It writes a whole value then.
unsafe fn written<T>(make: impl FnOnce(*mut T) -> Status) -> Done<T> {
    let mut made = MaybeUninit::uninit();
    make(made.as_mut_ptr()).result()?;
    // SAFETY: as the caller says
    Ok(unsafe { made.assume_init() })
}

/// Handles, descriptions, layouts and preferences are live, attributes of the types that they have, addresses of the device's memory.
impl CublasLt {
    pub fn version(&self) -> usize {
        // SAFETY: it only returns a number
        unsafe { (self.version)() }
    }

    pub fn create_handle(&self) -> Done<Handle> {
        // SAFETY: as `written` asks
        unsafe { written(|to| (self.create)(to)) }
    }

    pub unsafe fn destroy_handle(&self, handle: Handle) -> Done {
        // SAFETY: as the type says, of all below
        unsafe { (self.destroy)(handle) }.result()
    }

    pub fn create_description(&self, compute: sys::cublasComputeType_t, scale: sys::cudaDataType) -> Done<Description> {
        // SAFETY: as `written` asks
        unsafe { written(|to| (self.description_create)(to, compute, scale)) }
    }

    pub unsafe fn set_description<T>(
        &self,
        description: Description,
        what: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Done {
        // SAFETY: as above; the value is copied
        unsafe { (self.description_set)(description, what, std::ptr::from_ref(value).cast(), size_of::<T>()) }.result()
    }

    pub unsafe fn destroy_description(&self, description: Description) -> Done {
        // SAFETY: as above
        unsafe { (self.description_destroy)(description) }.result()
    }

    pub fn create_layout(&self, kind: sys::cudaDataType, rows: u64, columns: u64, stride: i64) -> Done<Layout> {
        // SAFETY: as `written` asks
        unsafe { written(|to| (self.layout_create)(to, kind, rows, columns, stride)) }
    }

    pub unsafe fn destroy_layout(&self, layout: Layout) -> Done {
        // SAFETY: as above
        unsafe { (self.layout_destroy)(layout) }.result()
    }

    pub fn create_preference(&self) -> Done<Preference> {
        // SAFETY: as `written` asks
        unsafe { written(|to| (self.preference_create)(to)) }
    }

    pub unsafe fn set_preference<T>(
        &self,
        preference: Preference,
        what: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Done {
        // SAFETY: as above; the value is copied
        unsafe { (self.preference_set)(preference, what, std::ptr::from_ref(value).cast(), size_of::<T>()) }.result()
    }

    pub unsafe fn destroy_preference(&self, preference: Preference) -> Done {
        // SAFETY: as above
        unsafe { (self.preference_destroy)(preference) }.result()
    }

    /// The algorithm that the library holds for the fastest; `NOT_SUPPORTED` where it has none.
    pub unsafe fn algorithm(
        &self,
        handle: Handle,
        description: Description,
        [a, b, c, d]: [Layout; 4],
        preference: Preference,
    ) -> Done<sys::cublasLtMatmulAlgo_t> {
        let (mut found, mut count) = (MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed(), 0);
        // SAFETY: as above; room for one result
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

    /// D = alpha · A · B + beta · D, in the stream.
    pub unsafe fn multiply(&self, handle: Handle, description: Description, product: &Multiply) -> Done {
        let Multiply { alpha, beta, pointers: [a, b, d], layouts: [of_a, of_b, of_d], algorithm, workspace, stream } =
            *product;
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
                of_a,
                b,
                of_b,
                beta,
                d,
                of_d,
                d,
                of_d,
                algorithm,
                work,
                bytes,
                stream,
            )
        }
        .result()
    }
}

/// A product, in cuBLASLt's words: columns where this crate has rows.
pub(super) struct Multiply<'a> {
    pub alpha: &'a f32,
    pub beta: &'a f32,
    /// A, B, D.
    pub pointers: [u64; 3],
    pub layouts: [Layout; 3],
    pub algorithm: &'a sys::cublasLtMatmulAlgo_t,
    /// Where, and how many bytes.
    pub workspace: (u64, usize),
    pub stream: sys::cudaStream_t,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where there is a cuBLASLt: `CUDA_HOME` of scripts/cuda-build. An older `libcublasLt.so` on the loader's path changes nothing.
    #[test]
    fn the_functions_are_those_of_the_file_that_was_found() {
        match cublaslt() {
            Ok(library) => assert!(library.version() / 10_000 == 13, "{}", library.version()),
            Err(message) => assert!(message.starts_with("no libcublasLt.so.13 (CUDA 13)"), "{message}"),
        }
    }
}
