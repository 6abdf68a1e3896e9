// The forward pass but for its products and its attention: what lies between them. Each for f32, bf16 and f16.
//
// Everything is bound by memory; sums are in f32 and in an order that the launch alone decides.
#include "portable.cuh"

#include "forward/activations.cuh"
#include "forward/fill.cuh"
#include "forward/norm.cuh"
#include "forward/rope.cuh"
#include "forward/rows.cuh"

namespace forward {

#define FORWARD_KERNELS(T)                                                                                                             \
    KERNEL_BOUNDS(embed_##T, 256, 4)(const unsigned* tokens, const unsigned* positions, const T* wte, const T* wpe, T* x,              \
                                     unsigned width) {                                                                                 \
        embed<T>(tokens, positions, wte, wpe, x, width);                                                                               \
    }                                                                                                                                  \
    EXPORT(embed_##T)                                                                                                                  \
    KERNEL_BOUNDS(gather_rows_##T, 256, 4)(const T* from, const unsigned* rows, T* to, unsigned width) {                               \
        gather<T>(from, rows, to, width);                                                                                              \
    }                                                                                                                                  \
    EXPORT(gather_rows_##T)                                                                                                            \
    KERNEL_BOUNDS(add_layer_norm_##T, 256, 4)(T* x, const T* y, const T* weight, const T* bias, T* out, unsigned width, float eps) {   \
        add_norm<T, true>(x, y, weight, bias, out, width, eps);                                                                        \
    }                                                                                                                                  \
    EXPORT(add_layer_norm_##T)                                                                                                         \
    KERNEL_BOUNDS(add_rms_norm_##T, 256, 4)(T* x, const T* y, const T* weight, T* out, unsigned width, float eps) {                    \
        add_norm<T, false>(x, y, weight, nullptr, out, width, eps);                                                                    \
    }                                                                                                                                  \
    EXPORT(add_rms_norm_##T)                                                                                                           \
    KERNEL_BOUNDS(rope_##T, 256, 4)(T* qkv, const float* cos, const float* sin, const unsigned* positions, const T* q_norm,            \
                                    const T* k_norm, unsigned tokens, unsigned heads, unsigned kv_heads, unsigned dim,                 \
                                    unsigned own_dim, unsigned lanes, float eps) {                                                     \
        rope<T>(qkv, cos, sin, positions, q_norm, k_norm, RopeShape{tokens, heads, kv_heads, dim, own_dim, lanes, eps});               \
    }                                                                                                                                  \
    EXPORT(rope_##T)                                                                                                                   \
    KERNEL_BOUNDS(swiglu_##T, 256, 4)(const T* gate_up, T* out, unsigned inner) { gated<T, Silu>(gate_up, out, inner); }               \
    EXPORT(swiglu_##T)                                                                                                                 \
    KERNEL_BOUNDS(geglu_##T, 256, 4)(const T* gate_up, T* out, unsigned inner) { gated<T, GeluTanh>(gate_up, out, inner); }            \
    EXPORT(geglu_##T)                                                                                                                  \
    KERNEL_BOUNDS(gelu_new_##T, 256, 4)(T* x, unsigned inner) { curved<T, GeluTanh>(x, inner); }                                       \
    EXPORT(gelu_new_##T)                                                                                                               \
    KERNEL_BOUNDS(gelu_##T, 256, 4)(T* x, unsigned inner) { curved<T, Gelu>(x, inner); }                                               \
    EXPORT(gelu_##T)                                                                                                                   \
    KERNEL_BOUNDS(fill_##T, 256, 4)(T* to, unsigned long long count, unsigned long long key, float factor, float term) {               \
        fill<T>(to, count, key, factor, term);                                                                                         \
    }                                                                                                                                  \
    EXPORT(fill_##T)

typedef float f32;
FORWARD_KERNELS(f32)
FORWARD_KERNELS(bf16)
FORWARD_KERNELS(f16)
#undef FORWARD_KERNELS

}  // namespace forward
