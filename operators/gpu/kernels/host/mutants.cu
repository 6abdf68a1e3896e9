// Kernels of the forward pass with a mistake each: a test shows that the suite sees them. The headers are those of `forward/` in which the
// build has changed one place (`mutants.rs` of the host), in a namespace of the mistake's name.

#define MUTANT_NORMS(mutant, T)                                                                                                        \
    KERNEL_BOUNDS(mutant##_add_layer_norm_##T, 256, 4)(T* x, const T* y, const T* weight, const T* bias, T* out, unsigned width,       \
                                                        float eps) {                                                                   \
        ::mutant::add_norm<T, true>(x, y, weight, bias, out, width, eps);                                                              \
    }                                                                                                                                  \
    EXPORT(mutant##_add_layer_norm_##T)                                                                                                \
    KERNEL_BOUNDS(mutant##_add_rms_norm_##T, 256, 4)(T* x, const T* y, const T* weight, T* out, unsigned width, float eps) {           \
        ::mutant::add_norm<T, false>(x, y, weight, nullptr, out, width, eps);                                                          \
    }                                                                                                                                  \
    EXPORT(mutant##_add_rms_norm_##T)
#define MUTANT_ROPE(mutant, T)                                                                                                         \
    KERNEL_BOUNDS(mutant##_rope_##T, 256, 4)(T* qkv, const float* cos, const float* sin, const unsigned* positions, const T* q_norm,   \
                                              const T* k_norm, unsigned tokens, unsigned heads, unsigned kv_heads, unsigned dim,       \
                                              unsigned own_dim, unsigned lanes, float eps) {                                           \
        ::mutant::rope<T>(qkv, cos, sin, positions, q_norm, k_norm,                                                                    \
                           ::mutant::RopeShape{tokens, heads, kv_heads, dim, own_dim, lanes, eps});                                    \
    }                                                                                                                                  \
    EXPORT(mutant##_rope_##T)
#define MUTANT_PLAIN(mutant)                                                                                                           \
    KERNEL_BOUNDS(mutant##_attention_32_f32, 128, 2)(const float* qkv, float* out, const unsigned* items, unsigned heads,              \
                                                      unsigned kv_heads, float scale) {                                                \
        ::mutant::plain<32>(qkv, out, items, ::mutant::Heads{heads, kv_heads, scale});                                                 \
    }                                                                                                                                  \
    EXPORT(mutant##_attention_32_f32)
#define MUTANT_FLASH(mutant, T)                                                                                                        \
    KERNEL_BOUNDS(mutant##_attention_32_##T, 128, 4)(const T* qkv, T* out, const unsigned* items, unsigned heads, unsigned kv_heads,   \
                                                      float scale) {                                                                   \
        ::mutant::flash<T, 32, 1>(qkv, out, items, ::mutant::Heads{heads, kv_heads, scale});                                           \
    }                                                                                                                                  \
    EXPORT(mutant##_attention_32_##T)

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

namespace mutants {

typedef float f32;
MUTANT_NORMS(norm_reduction, f32)
MUTANT_NORMS(norm_reduction, bf16)
MUTANT_NORMS(norm_tail, f32)
MUTANT_NORMS(norm_tail, bf16)
MUTANT_NORMS(norm_race, f32)
MUTANT_NORMS(norm_race, bf16)
MUTANT_ROPE(rope_reduction, f32)
MUTANT_ROPE(rope_reduction, bf16)
MUTANT_ROPE(rope_tail, f32)
MUTANT_ROPE(rope_tail, bf16)
MUTANT_PLAIN(attention_reduction)
MUTANT_FLASH(attention_reduction, bf16)
MUTANT_PLAIN(plain_tail)
MUTANT_PLAIN(plain_race)
MUTANT_PLAIN(plain_order)
MUTANT_FLASH(flash_tail, bf16)
MUTANT_FLASH(flash_race, bf16)
MUTANT_FLASH(flash_end, bf16)

}  // namespace mutants

#undef MUTANT_NORMS
#undef MUTANT_ROPE
#undef MUTANT_PLAIN
#undef MUTANT_FLASH
