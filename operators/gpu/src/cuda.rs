//! NVIDIA GPUs through the driver API and cuBLASLt. Both are loaded when a device is opened, so the program starts
//! without them.

mod cublaslt;
mod products;

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use crate::device::{Arg, Device, Element, Event, Launch, Memory, Product, Result, ScaledProduct, Stream};
use crate::error::GpuError;
use crate::machine::versions;
use products::{Matmul, Products};

/// Machine code of the kernels; empty if the crate was built without a CUDA toolkit.
const IMAGES: [&[u8]; 5] = [&NOISE.0, &FORWARD.0, &ATTENTION.0, &WIDEN.0, &FP8.0];
static NOISE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/noise.fatbin")));
static FORWARD: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/forward.fatbin")));
static ATTENTION: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/attention.fatbin")));
static WIDEN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/widen.fatbin")));
static FP8: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/fp8.fatbin")));

/// Aligns an image, because the driver reads its numbers in place.
#[repr(C, align(64))]
struct Aligned<B: ?Sized>(B);

/// Events per stream, used in rotation. A reused event marks a later point of the same stream, so an earlier waiter
/// waits longer than needed, but always for long enough.
const EVENTS_PER_STREAM: usize = 64;
/// Compute capability 9 (Hopper): in CUDA 13, cuBLASLt scales rows of e4m3
/// (`CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`) on this one only.
const FP8_CAPABILITY: c_int = 9;
/// Bytes of dynamic shared memory that a kernel gets without an opt-in. The driver's limit is 48 KiB, including static
/// memory.
const DEFAULT_SHARED_BYTES: u32 = 40 << 10;

/// A GPU.
pub struct Cuda {
    name: String,
    model: String,
    arithmetic: String,
    multiprocessors: u32,
    /// Major number of the compute capability.
    compute_major: c_int,
    /// Maximum shared memory of a block with an opt-in, in bytes.
    max_shared_bytes: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    streams: [sys::CUstream; 2],
    events: [Vec<sys::CUevent>; 2],
    next_event: [AtomicUsize; 2],
    modules: Vec<sys::CUmodule>,
    functions: Mutex<HashMap<&'static str, Function>>,
    products: Mutex<Products>,
    lost: AtomicBool,
}

#[derive(Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    /// Static shared memory.
    static_bytes: u32,
    /// Dynamic shared memory that it may use at present.
    shared_bytes: u32,
}

// SAFETY: the driver API may be called from any thread. Every method makes the context current on its thread first; all
// mutable state is behind a lock or atomic
unsafe impl Send for Cuda {}
// SAFETY: as above
unsafe impl Sync for Cuda {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("name", &self.name).field("model", &self.model).finish_non_exhaustive()
    }
}

/// Returns the number of GPUs; 0 without a driver, or with a driver that finds no device.
///
/// # Errors
/// [`GpuError::Unavailable`] if a driver is present but does not initialise: there may be a GPU then.
pub fn count() -> Result<usize> {
    let failed = |call: &str, error: DriverError| GpuError::Unavailable {
        device: "cuda".into(),
        message: format!("{call}: {}, valid: a working driver, or cpu", error_text(error)),
    };
    // SAFETY: only tries to open libcuda
    if !unsafe { sys::is_culib_present() } {
        return Ok(0);
    }
    match result::init() {
        Ok(()) => {}
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_STUB_LIBRARY)) => return Ok(0),
        Err(error) => return Err(failed("cuInit", error)),
    }
    let count = result::device::get_count().map_err(|error| failed("cuDeviceGetCount", error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Cuda {
    /// Opens a GPU by its number.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] in two cases:
    ///
    /// - There is no driver, no GPU of this number, no cuBLASLt or no kernels. The message lists where it searched.
    /// - The driver, GPU or cuBLASLt is too old. The message has the version found and the version needed.
    pub fn open(ordinal: usize) -> Result<Self> {
        use sys::CUdevice_attribute as Attribute;
        let name = format!("cuda:{ordinal}");
        let unavailable = |message: String| GpuError::Unavailable { device: name.clone(), message };
        // SAFETY: only tries to open libcuda, without which the calls below would panic
        if !unsafe { sys::is_culib_present() } {
            return Err(unavailable("no NVIDIA driver (libcuda) on this machine, valid: cpu".into()));
        }
        if IMAGES.iter().any(|image| image.is_empty()) {
            return Err(unavailable("this binary was built without a CUDA toolkit, so without kernels".into()));
        }
        let failed = |call: &str, error: DriverError| unavailable(format!("{call}: {}", error_text(error)));
        let mut driver = 0;
        // SAFETY: writes one number; every driver has this function, even one too old to initialise
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().map_err(|e| failed("cuDriverGetVersion", e))?;
        versions::check_driver(driver).map_err(&unavailable)?;
        let setting = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        versions::check_settings(setting).map_err(&unavailable)?;
        let gpu_count = count()?;
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < gpu_count);
        let number = number.ok_or_else(|| {
            unavailable(format!("there are {gpu_count} GPUs, valid: cpu, or cuda:N with N below {gpu_count}"))
        })?;
        let device = result::device::get(number).map_err(|e| failed("cuDeviceGet", e))?;
        let model = result::device::get_name(device).map_err(|e| failed("cuDeviceGetName", e))?;
        let attribute = |what| {
            // SAFETY: the driver returned this device
            unsafe { result::device::get_attribute(device, what) }.map_err(|e| failed("cuDeviceGetAttribute", e))
        };
        let capability = [
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ];
        versions::check_capability(&model, capability).map_err(&unavailable)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs();
        let max_shared_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.unsigned_abs();
        let cublaslt = cublaslt::load().map_err(&unavailable)?;
        // SAFETY: the driver returned this device; `drop` releases the context
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("cuDevicePrimaryCtxRetain", e))?;
        let mut opened = Self {
            name: name.clone(),
            model,
            arithmetic: String::new(),
            multiprocessors,
            compute_major: capability[0],
            max_shared_bytes,
            device,
            context,
            streams: [std::ptr::null_mut(); 2],
            events: [Vec::new(), Vec::new()],
            next_event: Default::default(),
            modules: Vec::new(),
            functions: Mutex::default(),
            products: Mutex::default(),
            lost: AtomicBool::new(false),
        };
        opened.initialise(cublaslt)?;
        let cublaslt = opened.products().version();
        let release = versions::driver_release();
        opened.arithmetic =
            versions::arithmetic(&opened.model, multiprocessors, capability, driver, release.as_deref(), cublaslt);
        Ok(opened)
    }

    fn initialise(&mut self, cublaslt: &'static cublaslt::CublasLt) -> Result<()> {
        self.make_current()?;
        let (least, greatest) = self.call("cuCtxGetStreamPriorityRange", result::stream::get_priority_range)?;
        for stream in 0..2 {
            // The extraction is short, and a slice waits for it: its blocks take priority over those of a product.
            let priority = if stream == Stream::Extract as usize { greatest } else { least };
            let kind = result::stream::StreamKind::NonBlocking;
            self.streams[stream] =
                self.call("cuStreamCreate", || result::stream::create_with_priority(kind, priority))?;
            for _ in 0..EVENTS_PER_STREAM {
                let event = self.call("cuEventCreate", make_event)?;
                self.events[stream].push(event);
            }
        }
        for image in IMAGES {
            // SAFETY: nvcc made the image, which is static
            let module =
                self.call("cuModuleLoadData", || unsafe { result::module::load_data(image.as_ptr().cast()) })?;
            self.modules.push(module);
        }
        self.products().open(cublaslt, &self.name)
    }

    /// Makes the context current on this thread.
    fn make_current(&self) -> Result<()> {
        if self.lost.load(Ordering::Relaxed) {
            let message = "the device was lost before".into();
            return Err(GpuError::Failed { device: self.name.clone(), call: "any call".into(), message, lost: true });
        }
        // SAFETY: the context lives as long as this value
        self.call("cuCtxSetCurrent", || unsafe { result::ctx::set_current(self.context) })
    }

    fn call<T>(&self, call: &str, operation: impl FnOnce() -> std::result::Result<T, DriverError>) -> Result<T> {
        operation().map_err(|error| {
            let lost = is_lost(error.0);
            self.lost.fetch_or(lost, Ordering::Relaxed);
            GpuError::Failed { device: self.name.clone(), call: call.into(), message: error_text(error), lost }
        })
    }

    /// Turns an out-of-memory failure into [`GpuError::Memory`]. `bytes` is what the caller requested; 0 if a library
    /// or driver allocated at the first use of a kernel.
    fn as_out_of_memory(&self, error: GpuError, bytes: usize) -> GpuError {
        const MARKERS: [&str; 2] = ["CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED"];
        match (&error, self.memory()) {
            (GpuError::Failed { message, .. }, Ok(Memory { free, total }))
                if MARKERS.iter().any(|marker| message.contains(marker)) =>
            {
                GpuError::Memory { device: self.name.clone(), bytes: bytes as u64, free, total }
            }
            _ => error,
        }
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        self.streams[stream as usize]
    }

    fn products(&self) -> MutexGuard<'_, Products> {
        self.products.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the kernel, allowed to use the dynamic shared memory of this launch.
    fn function(&self, launch: &Launch) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match functions.get(launch.kernel) {
            Some(function) => *function,
            None => {
                let handle = self.find_kernel(launch.kernel)?;
                let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                // SAFETY: the function belongs to a module that lives as long as this value
                let static_bytes = self
                    .call(launch.kernel, || unsafe { result::function::get_function_attribute(handle, attribute) })?;
                Function { handle, static_bytes: static_bytes.unsigned_abs(), shared_bytes: DEFAULT_SHARED_BYTES }
            }
        };
        let shared_bytes = launch.shared_bytes.max(function.shared_bytes);
        if shared_bytes > function.shared_bytes && shared_bytes + function.static_bytes > self.max_shared_bytes {
            let got = format!("{} bytes of shared memory for {}", shared_bytes + function.static_bytes, launch.kernel);
            let valid = format!("at most {}, which {} has; bf16 and f16 take less", self.max_shared_bytes, self.model);
            return Err(GpuError::Input { what: "a kernel's block", got, valid });
        }
        if shared_bytes > function.shared_bytes {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = c_int::try_from(shared_bytes).unwrap_or(c_int::MAX);
            // SAFETY: the function belongs to a module that lives as long as this value
            self.call(launch.kernel, || unsafe {
                result::function::set_function_attribute(function.handle, attribute, bytes)
            })?;
        }
        functions.insert(launch.kernel, Function { shared_bytes, ..function });
        Ok(function.handle)
    }

    fn find_kernel(&self, kernel: &'static str) -> Result<sys::CUfunction> {
        let missing = || GpuError::Failed {
            device: self.name.clone(),
            call: kernel.into(),
            message: "there is no such kernel".into(),
            lost: false,
        };
        let name = CString::new(kernel).map_err(|_| missing())?;
        for module in &self.modules {
            // SAFETY: the modules live as long as this value
            match unsafe { result::module::get_function(*module, name.clone()) } {
                Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND)) => {}
                // The driver loads the kernel only now, so this may be a lack of memory, or an error of earlier work.
                found => return self.call("cuModuleGetFunction", || found),
            }
        }
        Err(missing())
    }
}

/// Creates an event whose waiters sleep: a pass takes long, and the cores have other work.
fn make_event() -> std::result::Result<sys::CUevent, DriverError> {
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
    let mut event = std::ptr::null_mut();
    // SAFETY: the driver writes the event to this pointer
    unsafe { sys::cuEventCreate(&raw mut event, flags) }.result()?;
    Ok(event)
}

/// The name and description of a driver error.
fn error_text(error: DriverError) -> String {
    let text = |part: std::result::Result<&std::ffi::CStr, DriverError>| {
        part.map_or_else(|_| format!("{:?}", error.0), |w| w.to_string_lossy().into_owned())
    };
    format!("{}, {}", text(error.error_name()), text(error.error_string()))
}

/// Whether an error makes the device, or this process's context on it, unusable.
fn is_lost(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_NO_DEVICE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_SYSTEM_NOT_READY
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

impl Device for Cuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn arithmetic(&self) -> String {
        self.arithmetic.clone()
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn memory(&self) -> Result<Memory> {
        self.make_current()?;
        let (free, total) = self.call("cuMemGetInfo", result::mem_get_info)?;
        Ok(Memory { free: free as u64, total: total as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.make_current()?;
        // SAFETY: the caller of `allocate` stays within the allocation
        let got = self.call("cuMemAlloc", || unsafe { result::malloc_sync(bytes) });
        got.map_err(|error| self.as_out_of_memory(error, bytes))
    }

    fn free(&self, pointer: u64) {
        if self.make_current().is_ok() {
            // SAFETY: `allocate` returned it, and its owner is gone; the driver waits for work that still uses it
            let _ = unsafe { result::free_sync(pointer) };
        }
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.make_current()?;
        // SAFETY: the caller of `allocate_pinned` stays within the allocation
        self.call("cuMemHostAlloc", || unsafe { result::malloc_host(bytes, 0) }).map(<*mut c_void>::cast)
    }

    fn free_pinned(&self, pointer: *mut u8, _: usize) {
        if self.make_current().is_ok() {
            // SAFETY: `allocate_pinned` returned it, and its owner is gone
            let _ = unsafe { result::free_host(pointer.cast()) };
        }
    }

    unsafe fn copy_to_device(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.make_current()?;
        // SAFETY: the caller guarantees both addresses
        self.call("cuMemcpyHtoDAsync", || unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream(stream)).result()
        })
    }

    unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.make_current()?;
        // SAFETY: the caller guarantees both addresses
        self.call("cuMemcpyDtoHAsync", || unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream(stream)).result()
        })
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        self.make_current()?;
        let function = self.function(launch).map_err(|error| self.as_out_of_memory(error, 0))?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // Every kernel has fewer than 32 arguments. Some hundred launches a batch: this allocates nothing.
        let mut values = [Arg::U64(0); 32];
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        let Some(values) = values.get_mut(..args.len()) else {
            let (got, valid) = (args.len().to_string(), "at most 32".into());
            return Err(GpuError::Input { what: "arguments of a kernel", got, valid });
        };
        values.copy_from_slice(args);
        for (pointer, value) in pointers.iter_mut().zip(values.iter_mut()) {
            *pointer = match value {
                Arg::Pointer(v) | Arg::U64(v) => std::ptr::from_mut(v).cast(),
                Arg::U32(v) => std::ptr::from_mut(v).cast(),
                Arg::I32(v) => std::ptr::from_mut(v).cast(),
                Arg::F32(v) => std::ptr::from_mut(v).cast(),
                Arg::F64(v) => std::ptr::from_mut(v).cast(),
            };
        }
        let stream = self.stream(stream);
        // SAFETY: the function belongs to a live module; the caller guarantees the arguments, which are copied before
        // this returns
        let launched = self.call(launch.kernel, || unsafe {
            result::launch_kernel(function, (gx, gy, gz), (bx, by, bz), launch.shared_bytes, stream, &mut pointers)
        });
        launched.map_err(|error| self.as_out_of_memory(error, 0))
    }

    unsafe fn product(&self, stream: Stream, product: &Product) -> Result<()> {
        self.make_current()?;
        // SAFETY: the caller guarantees the matrices
        let done =
            unsafe { self.products().run(&self.name, stream, self.stream(stream), &Matmul::from_product(product)?) };
        // cuBLASLt also reports "execution failed" for a lost device; the driver reports the real error.
        done.map_err(|error| self.check_stream(stream).err().unwrap_or_else(|| self.as_out_of_memory(error, 0)))
    }

    fn fuses_gelu(&self, product: &Product) -> Result<bool> {
        // The library does not document the accuracy of its tanh: use it for 16-bit results only.
        if product.d.element == Element::F32 || product.accumulate {
            return Ok(false);
        }
        self.make_current()?;
        self.products().has_plan(&self.name, &Matmul::from_product(product)?)
    }

    fn fp8_unsupported_reason(&self) -> Option<String> {
        let message = format!(
            "{} is of compute capability {}, and cuBLASLt scales rows of e4m3 on {FP8_CAPABILITY} (Hopper) only",
            self.model, self.compute_major
        );
        (self.compute_major != FP8_CAPABILITY).then_some(message)
    }

    unsafe fn scaled_product(&self, stream: Stream, product: &ScaledProduct) -> Result<()> {
        self.make_current()?;
        let operation = Matmul::from_scaled_product(product)?;
        // SAFETY: the caller guarantees the matrices
        let done = unsafe { self.products().run(&self.name, stream, self.stream(stream), &operation) };
        done.map_err(|error| self.check_stream(stream).err().unwrap_or_else(|| self.as_out_of_memory(error, 0)))
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        self.make_current()?;
        let number = self.next_event[stream as usize].fetch_add(1, Ordering::Relaxed) % EVENTS_PER_STREAM;
        // SAFETY: event and stream live as long as this value
        self.call("cuEventRecord", || unsafe {
            result::event::record(self.events[stream as usize][number], self.stream(stream))
        })?;
        Ok(Event::new((stream as usize * EVENTS_PER_STREAM + number) as u64))
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.make_current()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        let event = self.event(event)?;
        // SAFETY: event and stream live as long as this value
        self.call("cuStreamWaitEvent", || unsafe { result::stream::wait_event(self.stream(stream), event, flags) })
    }

    fn is_done(&self, event: Event) -> Result<bool> {
        self.make_current()?;
        let event = self.event(event)?;
        // SAFETY: the event lives as long as this value
        match unsafe { sys::cuEventQuery(event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.call("cuEventQuery", || other.result()).map(|()| true),
        }
    }

    fn wait(&self, event: Event) -> Result<()> {
        self.make_current()?;
        let event = self.event(event)?;
        // SAFETY: the event lives as long as this value
        self.call("cuEventSynchronize", || unsafe { result::event::synchronize(event) })
    }
}

impl Cuda {
    /// Returns the error of a stream that has failed. A stream that is still busy has not failed.
    fn check_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream lives as long as this value
        let state = unsafe { sys::cuStreamQuery(self.stream(stream)) };
        match state {
            CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            other => self.call("cuStreamQuery", || other.result()),
        }
    }

    fn event(&self, event: Event) -> Result<sys::CUevent> {
        let number = usize::try_from(event.number()).unwrap_or(usize::MAX);
        let found =
            self.events.get(number / EVENTS_PER_STREAM).and_then(|events| events.get(number % EVENTS_PER_STREAM));
        found.copied().ok_or_else(|| GpuError::Input {
            what: "event",
            got: number.to_string(),
            valid: format!("0 to {}", 2 * EVENTS_PER_STREAM - 1),
        })
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let is_alive = self.make_current().is_ok();
        self.products().close(is_alive);
        if !is_alive {
            return;
        }
        // SAFETY: this value made all of it, and nothing else uses it; each stream is synchronised before it is
        // destroyed
        unsafe {
            for (stream, events) in self.streams.iter().zip(&self.events).filter(|(stream, _)| !stream.is_null()) {
                let _ = result::stream::synchronize(*stream);
                for event in events {
                    let _ = result::event::destroy(*event);
                }
                let _ = result::stream::destroy(*stream);
            }
            for module in &self.modules {
                let _ = result::module::unload(*module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
