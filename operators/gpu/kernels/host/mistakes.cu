// Kernels of the forward pass with a mistake each: a test shows that the suite sees them. The headers are those of `forward/` in which the
// build has changed one place (`mistakes.rs` of the host), in a namespace of the mistake's name.

#define MISTAKEN_NORMS(mistake, T)                                                                                                     \
    KERNEL_BOUNDS(mistake##_add_layer_norm_##T, 256, 4)(T* x, const T* y, const T* weight, const T* bias, T* out, unsigned width,      \
                                                        float eps) {                                                                   \
        ::mistake::add_norm<T, true>(x, y, weight, bias, out, width, eps);                                                             \
    }                                                                                                                                  \
    EXPORT(mistake##_add_layer_norm_##T)                                                                                               \
    KERNEL_BOUNDS(mistake##_add_rms_norm_##T, 256, 4)(T* x, const T* y, const T* weight, T* out, unsigned width, float eps) {          \
        ::mistake::add_norm<T, false>(x, y, weight, nullptr, out, width, eps);                                                         \
    }                                                                                                                                  \
    EXPORT(mistake##_add_rms_norm_##T)
#define MISTAKEN_ROPE(mistake, T)                                                                                                      \
    KERNEL_BOUNDS(mistake##_rope_##T, 256, 4)(T* qkv, const float* cos, const float* sin, const unsigned* positions, const T* q_norm,  \
                                              const T* k_norm, unsigned tokens, unsigned heads, unsigned kv_heads, unsigned dim,       \
                                              unsigned own_dim, unsigned lanes, float eps) {                                           \
        ::mistake::rope<T>(qkv, cos, sin, positions, q_norm, k_norm,                                                                   \
                           ::mistake::RopeShape{tokens, heads, kv_heads, dim, own_dim, lanes, eps});                                   \
    }                                                                                                                                  \
    EXPORT(mistake##_rope_##T)
#define MISTAKEN_PLAIN(mistake)                                                                                                        \
    KERNEL_BOUNDS(mistake##_attention_32_f32, 128, 2)(const float* qkv, float* out, const unsigned* items, unsigned heads,             \
                                                      unsigned kv_heads, float scale) {                                                \
        ::mistake::plain<32>(qkv, out, items, ::mistake::Heads{heads, kv_heads, scale});                                               \
    }                                                                                                                                  \
    EXPORT(mistake##_attention_32_f32)
#define MISTAKEN_FLASH(mistake, T)                                                                                                     \
    KERNEL_BOUNDS(mistake##_attention_32_##T, 128, 4)(const T* qkv, T* out, const unsigned* items, unsigned heads, unsigned kv_heads,  \
                                                      float scale) {                                                                   \
        ::mistake::flash<T, 32, 1>(qkv, out, items, ::mistake::Heads{heads, kv_heads, scale});                                         \
    }                                                                                                                                  \
    EXPORT(mistake##_attention_32_##T)

#include "norm_reduction/norm.cuh"
#include "norm_tail/norm.cuh"
#include "norm_race/norm.cuh"
#include "rope_reduction/rope.cuh"
#include "rope_tail/rope.cuh"
#include "attention_reduction/flash.cuh"
#include "attention_reduction/plain.cuh"
#include "plain_tail/plain.cuh"
#include "plain_race/plain.cuh"
#include "plain_order/plain.cuh"
#include "flash_tail/flash.cuh"
#include "flash_race/flash.cuh"
#include "flash_end/flash.cuh"

namespace mistakes {

typedef float f32;
MISTAKEN_NORMS(norm_reduction, f32)
MISTAKEN_NORMS(norm_reduction, bf16)
MISTAKEN_NORMS(norm_tail, f32)
MISTAKEN_NORMS(norm_tail, bf16)
MISTAKEN_NORMS(norm_race, f32)
MISTAKEN_NORMS(norm_race, bf16)
MISTAKEN_ROPE(rope_reduction, f32)
MISTAKEN_ROPE(rope_reduction, bf16)
MISTAKEN_ROPE(rope_tail, f32)
MISTAKEN_ROPE(rope_tail, bf16)
MISTAKEN_PLAIN(attention_reduction)
MISTAKEN_FLASH(attention_reduction, bf16)
MISTAKEN_PLAIN(plain_tail)
MISTAKEN_PLAIN(plain_race)
MISTAKEN_PLAIN(plain_order)
MISTAKEN_FLASH(flash_tail, bf16)
MISTAKEN_FLASH(flash_race, bf16)
MISTAKEN_FLASH(flash_end, bf16)

}  // namespace mistakes

#undef MISTAKEN_NORMS
#undef MISTAKEN_ROPE
#undef MISTAKEN_PLAIN
#undef MISTAKEN_FLASH
