// Causal grouped-query attention over runs of different lengths, in memory that does not grow with L².
//
// In: fused rows of q, k and v and a list of work, see forward/work.cuh; out: [T, heads · D]. A block takes one item for one head: 32 query
// rows in f32 and 128 or 64 (M = 2, 1) otherwise. What the launch has to know of that stands in src/net/kernels.rs.
//
// Flops per token of a run of length L: 2 L heads · D, half of 4 L: blocks of the future are skipped.
#include "portable.cuh"

#include "forward/flash.cuh"
#include "forward/plain.cuh"

namespace forward {

#define FLASH_KERNEL(T, D, M, BLOCKS)                                                                                            \
    KERNEL_BOUNDS(attention_##D##_##T, 128, BLOCKS)(const T* qkv, T* out, const unsigned* items, unsigned heads, unsigned kv_heads, \
                                                    float scale) {                                                               \
        flash<T, D, M>(qkv, out, items, Heads{heads, kv_heads, scale});                                                          \
    }                                                                                                                            \
    EXPORT(attention_##D##_##T)
#define ATTENTION_KERNELS(D, M, BLOCKS)                                                                                          \
    KERNEL_BOUNDS(attention_##D##_f32, 128, 2)(const float* qkv, float* out, const unsigned* items, unsigned heads,              \
                                               unsigned kv_heads, float scale) {                                                 \
        plain<D>(qkv, out, items, Heads{heads, kv_heads, scale});                                                                \
    }                                                                                                                            \
    EXPORT(attention_##D##_f32)                                                                                                  \
    FLASH_KERNEL(bf16, D, M, BLOCKS)                                                                                             \
    FLASH_KERNEL(f16, D, M, BLOCKS)

// As many blocks on a multiprocessor as have registers without spilling any. M = 2 halves what a product reads from shared memory,
// and is worth more than more blocks where both do not fit.
ATTENTION_KERNELS(16, 1, 4)
ATTENTION_KERNELS(32, 1, 4)
ATTENTION_KERNELS(64, 2, 2)
ATTENTION_KERNELS(80, 2, 2)
ATTENTION_KERNELS(96, 1, 3)
ATTENTION_KERNELS(128, 1, 3)
ATTENTION_KERNELS(192, 1, 2)
ATTENTION_KERNELS(256, 1, 2)
#undef ATTENTION_KERNELS
#undef FLASH_KERNEL

}  // namespace forward
