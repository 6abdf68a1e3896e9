// Rotary positions, in place in the fused rows of q, k and v; before them, where asked for, an RMS norm of each head (Qwen3).
//
//     (a, b) = (a cos - b sin, a sin + b cos)      a from a head's first half, b from the same place of its second
//
// A head is the work of `lanes` neighbours in a warp (a power of two), each with 16 bytes of either half.
#pragma once

#include "vectors.cuh"

namespace forward {

struct RopeShape {
    unsigned tokens;
    unsigned heads;
    unsigned kv_heads;
    // As heads lie in memory, a multiple of 16, and how many of these are the model's own: the rest are zeros.
    unsigned dim;
    unsigned own_dim;
    unsigned lanes;
    float eps;
};

template <typename T>
__device__ __forceinline__ void rope(T* qkv, const float* __restrict__ cos, const float* __restrict__ sin, const unsigned* positions,
                                     const T* q_norm, const T* k_norm, const RopeShape& shape) {
    constexpr unsigned W = PER_VECTOR<T>;
    const unsigned half = shape.dim / 2, turned = shape.heads + shape.kv_heads;
    const size_t which = size_t{blockIdx.x} * (blockDim.x / shape.lanes) + threadIdx.x / shape.lanes;
    const unsigned token = static_cast<unsigned>(which / turned), head = static_cast<unsigned>(which % turned);
    const unsigned at = threadIdx.x % shape.lanes * W;
    // Lanes without work take part in the sums all the same.
    const bool works = token < shape.tokens && at < half;
    T* low = qkv + (size_t{token} * (turned + shape.kv_heads) + head) * shape.dim + at;
    Values<W> a{}, b{};
    if (works) {
        a = load<T, W>(low);
        b = load<T, W>(low + half);
    }
    if (q_norm != nullptr) {
        float sum = 0.0f;
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            sum += a.at[i] * a.at[i] + b.at[i] * b.at[i];
        }
        for (unsigned distance = shape.lanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(WARP, sum, static_cast<int>(distance));
        }
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(shape.own_dim) + shape.eps);
        if (works) {
            const T* weight = (head < shape.heads ? q_norm : k_norm) + at;
            const Values<W> wa = load<T, W>(weight), wb = load<T, W>(weight + half);
            UNROLL
            for (unsigned i = 0; i < W; i++) {
                a.at[i] *= scale * wa.at[i];
                b.at[i] *= scale * wb.at[i];
            }
        }
    }
    if (!works) {
        return;
    }
    const size_t angle = size_t{positions[token]} * half + at;
    UNROLL
    for (unsigned i = 0; i < W; i += 4) {
        const Values<4> c = load<float, 4>(cos + angle + i), s = load<float, 4>(sin + angle + i);
        UNROLL
        for (unsigned j = 0; j < 4; j++) {
            const float x = a.at[i + j], y = b.at[i + j];
            a.at[i + j] = x * c.at[j] - y * s.at[j];
            b.at[i + j] = x * s.at[j] + y * c.at[j];
        }
    }
    store<T, W>(low, a);
    store<T, W>(low + half, b);
}

}  // namespace forward
