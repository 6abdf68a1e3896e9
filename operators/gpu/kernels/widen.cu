// Weights as files store them, widened and put where products read them: each element is read once and written once.
//
// Bound by the copy that brings the bytes here (a PCIe of 55 GB/s brings 27 G elements of bf16 a second, or 98 G of Q4_K), so a thread takes
// an element, and nothing is staged in shared memory.
#include "portable.cuh"

#define WIDEN_KERNEL_(name, threads, blocks) KERNEL_BOUNDS(name, threads, blocks)
#define WIDEN_EXPORT_(name) EXPORT(name)
#define WIDEN_KERNELS(T)                                                                                                              \
    WIDEN_KERNEL_(WIDEN_NAME(widen_##T), 256, 4)(const unsigned char* from, unsigned format, unsigned count, T* to, unsigned first_row, \
                                                 unsigned first_column, unsigned columns, unsigned row_own, unsigned row_dim,         \
                                                 unsigned neighbours, unsigned column_own, unsigned column_dim, unsigned row_stride,  \
                                                 unsigned column_stride) {                                                            \
        widen<T>(from, format, count, to,                                                                                             \
                 Target{first_row, first_column, columns, Axis{row_own, row_dim, neighbours}, Axis{column_own, column_dim, 0},        \
                        row_stride, column_stride});                                                                                  \
    }                                                                                                                                 \
    WIDEN_EXPORT_(WIDEN_NAME(widen_##T))

#define WIDEN_NAME(name) name
namespace widening {
#include "widen/formats.cuh"
#include "widen/place.cuh"
WIDEN_KERNELS(f32)
WIDEN_KERNELS(bf16)
WIDEN_KERNELS(f16)

// Zeros, for what heads are filled up with: so many 16-bit words.
KERNEL_BOUNDS(clear_words, 256, 4)(unsigned short* to, unsigned long long count) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = 0;
    }
}
EXPORT(clear_words)
}  // namespace widening
#undef WIDEN_NAME

#ifndef __CUDACC__
// The same with a mistake each: a test shows that it is seen.
#define STILLHOUSE_BROKEN_TAIL
#define WIDEN_NAME(name) broken_tail_##name
namespace widening_broken_tail {
#include "widen/formats.cuh"
#include "widen/place.cuh"
WIDEN_KERNELS(f32)
}  // namespace widening_broken_tail
#undef WIDEN_NAME
#undef STILLHOUSE_BROKEN_TAIL

#define STILLHOUSE_BROKEN_SCALE
#define WIDEN_NAME(name) broken_scale_##name
namespace widening_broken_scale {
#include "widen/formats.cuh"
#include "widen/place.cuh"
WIDEN_KERNELS(f32)
}  // namespace widening_broken_scale
#undef WIDEN_NAME
#undef STILLHOUSE_BROKEN_SCALE
#endif

#undef WIDEN_KERNELS
#undef WIDEN_KERNEL_
#undef WIDEN_EXPORT_
