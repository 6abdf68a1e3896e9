// Rows as e4m3 (8 bits: a sign, 4 of the exponent, 3 of the mantissa; finite up to 448), each with a scale of its own: what products of 8 bits
// read. Bound by memory: a row is read twice, the second time from the cache.
#include "portable.cuh"

#include "forward/vectors.cuh"

#define FP8_KERNEL_(name, threads, blocks) KERNEL_BOUNDS(name, threads, blocks)
#define FP8_EXPORT_(name) EXPORT(name)
#define FP8_KERNELS(T)                                                                                                       \
    FP8_KERNEL_(FP8_NAME(quantise_rows_##T), 256, 4)(const T* x, unsigned char* rows, float* scales, unsigned width) {       \
        quantise<T>(x, rows, scales, width);                                                                                 \
    }                                                                                                                        \
    FP8_EXPORT_(FP8_NAME(quantise_rows_##T))

#define FP8_NAME(name) name
namespace fp8 {
#include "forward/quantise.cuh"
FP8_KERNELS(f32)
FP8_KERNELS(bf16)
FP8_KERNELS(f16)
}  // namespace fp8
#undef FP8_NAME

#ifndef __CUDACC__
// The same with a mistake each: a test shows that it is seen.
#define STILLHOUSE_BROKEN_ROUNDING
#define FP8_NAME(name) broken_rounding_##name
namespace fp8_broken_rounding {
#include "forward/quantise.cuh"
FP8_KERNELS(f32)
}  // namespace fp8_broken_rounding
#undef FP8_NAME
#undef STILLHOUSE_BROKEN_ROUNDING

#define STILLHOUSE_BROKEN_REDUCTION
#define FP8_NAME(name) broken_reduction_##name
namespace fp8_broken_reduction {
#include "forward/quantise.cuh"
FP8_KERNELS(f32)
}  // namespace fp8_broken_reduction
#undef FP8_NAME
#undef STILLHOUSE_BROKEN_REDUCTION
#endif

#undef FP8_KERNELS
#undef FP8_KERNEL_
#undef FP8_EXPORT_
