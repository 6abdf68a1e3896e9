// What every kernel includes: one set of names that nvcc maps to the device and a plain C++ compiler to host/emulation.h,
// so that a machine without a GPU runs the kernels' own source. A file of kernels looks so on both sides:
//
//     #include "portable.cuh"
//     namespace example {                              // helpers live in a namespace: the host compiles all files as one
//     template <typename T> __device__ __forceinline__ void body(const T* in, float* out, unsigned n) { ... }
//     KERNEL(example_bf16)(const bf16* in, float* out, unsigned n) { body(in, out, n); }
//     EXPORT(example_bf16)
//     }
//
// A template gets its names through such wrappers: `extern "C"` cannot be deduced from an instance, so there is no EXPORT_AS.
// Write UNROLL (UNROLL_BY(4)) where CUDA has `#pragma unroll` (g++ 12 warns of pragmas that it does not know, and cannot be told not to).
//
// Stricter on the host than on the device, on purpose: a thread that has ended is missed at every barrier and in every warp
// mask that names it; reads before a barrier, before `cp_async_wait` or of shared memory nobody wrote give poison.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __CUDACC__

#include "host/emulation.h"

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cmath>

#define KERNEL(name) extern "C" __global__ void name
#define KERNEL_BOUNDS(name, threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name
#define EXPORT(name)
#define UNROLL _Pragma("unroll")
#define STILLHOUSE_PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(times) STILLHOUSE_PRAGMA(unroll times)

// SHARED(float, tile, 4 * 32): an array of that many elements. The count comes last so that it may contain commas; a type with
// commas needs an alias. More than 48 KiB in a kernel must be dynamic.
#define SHARED(type, name, ...) __shared__ __align__(128) type name[__VA_ARGS__]
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(stillhouse_dynamic_shared)
// Declared once: a declaration in each function would be another variable to the compiler in a template.
extern __shared__ __align__(128) unsigned char stillhouse_dynamic_shared[];

typedef __nv_bfloat16 bf16;
typedef __half f16;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(f16 value) { return __half2float(value); }

// Round to nearest, ties to even; every NaN becomes 0x7fff.
template <typename T> __device__ __forceinline__ T from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float value) { return __float2bfloat16_rn(value); }
template <> __device__ __forceinline__ f16 from_float<f16>(float value) { return __float2half_rn(value); }

__device__ __forceinline__ unsigned short to_bits(bf16 value) { return __bfloat16_as_ushort(value); }
__device__ __forceinline__ unsigned short to_bits(f16 value) { return __half_as_ushort(value); }
template <typename T> __device__ __forceinline__ T from_bits(unsigned short bits);
template <> __device__ __forceinline__ bf16 from_bits<bf16>(unsigned short bits) { return __ushort_as_bfloat16(bits); }
template <> __device__ __forceinline__ f16 from_bits<f16>(unsigned short bits) { return __ushort_as_half(bits); }

// One register of a fragment; the device's code is the two halves' conversion fused into one instruction.
template <typename T> __device__ __forceinline__ unsigned pack_pair(float low, float high);
template <> __device__ __forceinline__ unsigned pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return to_bits(pair.x) | static_cast<unsigned>(to_bits(pair.y)) << 16;
}
template <> __device__ __forceinline__ unsigned pack_pair<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return to_bits(__low2half(pair)) | static_cast<unsigned>(to_bits(__high2half(pair))) << 16;
}

namespace stillhouse_device {
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
}  // namespace stillhouse_device

// c += a·b for a 16x16 (row major), b 16x8 (column major): fragments as PTX lays them out, see host/tensor.h.
template <typename T> __device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
#define STILLHOUSE_MMA(type, name)                                                                                            \
    template <>                                                                                                               \
    __device__ __forceinline__ void mma_m16n8k16<type>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {       \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                                   \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                             \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                     \
    }
STILLHOUSE_MMA(bf16, "bf16")
STILLHOUSE_MMA(f16, "f16")
#undef STILLHOUSE_MMA

// Matrices of 8x8 16-bit values: lane 8·i + r gives the address of row r of matrix i (16 bytes, aligned).
#define STILLHOUSE_LDMATRIX4(name, kind)                                                                    \
    __device__ __forceinline__ void name(unsigned (&r)[4], const void* row) {                               \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0,%1,%2,%3}, [%4];"                \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                       \
                     : "r"(stillhouse_device::shared_address(row))                                          \
                     : "memory");                                                                           \
    }
#define STILLHOUSE_LDMATRIX2(name, kind)                                                                    \
    __device__ __forceinline__ void name(unsigned (&r)[2], const void* row) {                               \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" kind ".shared.b16 {%0,%1}, [%2];"                      \
                     : "=r"(r[0]), "=r"(r[1])                                                               \
                     : "r"(stillhouse_device::shared_address(row))                                          \
                     : "memory");                                                                           \
    }
STILLHOUSE_LDMATRIX4(ldmatrix_x4, "")
STILLHOUSE_LDMATRIX4(ldmatrix_x4_trans, ".trans")
STILLHOUSE_LDMATRIX2(ldmatrix_x2, "")
STILLHOUSE_LDMATRIX2(ldmatrix_x2_trans, ".trans")
#undef STILLHOUSE_LDMATRIX4
#undef STILLHOUSE_LDMATRIX2

// 16 bytes that arrive at some time before the wait for their group returns. Other threads see them after a barrier as well.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stillhouse_device::shared_address(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
}
// Zeros where `valid` is false; `global` is not read then.
__device__ __forceinline__ void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(stillhouse_device::shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all but the last N committed groups of this thread have arrived.
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#endif

// Both sides from here on.

// The register of two values that are of the type already; `pack_pair<T>` rounds two floats to it.
template <typename T> __device__ __forceinline__ unsigned join_pair(T low, T high) {
    return to_bits(low) | static_cast<unsigned>(to_bits(high)) << 16;
}

template <typename T> __device__ __forceinline__ float2 unpack_pair(unsigned pair) {
    return make_float2(to_float(from_bits<T>(static_cast<unsigned short>(pair & 0xffffu))),
                       to_float(from_bits<T>(static_cast<unsigned short>(pair >> 16))));
}
