// SwiGLU and the GELU of GPT-2, which both are x · sigmoid(u). Blocks: (row, piece of the row).
#pragma once

#include "vectors.cuh"

namespace forward {

template <typename T> __device__ __forceinline__ float sigmoid(float u) {
    if constexpr (sizeof(T) == 4) {
        return 1.0f / (1.0f + expf(-u));
    } else {
        // A few units of f32's last place are nothing in T, and the exact forms would cost more than the memory does.
        return __fdividef(1.0f, 1.0f + __expf(-u));
    }
}

// 0.5 x (1 + tanh v) = x sigmoid(2 v), v = sqrt(2/pi) (x + 0.044715 x³).
template <typename T> __device__ __forceinline__ float gelu_new(float x) {
    constexpr float TWICE = 2.0f * 0.7978845608f;
    return x * sigmoid<T>(TWICE * (x + 0.044715f * x * x * x));
}

template <typename T, unsigned W>
__device__ __forceinline__ void swiglu_at(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, unsigned inner) {
    const unsigned at = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (at < inner) {
        Values<W> g = load<T, W>(gate + at);
        const Values<W> u = load<T, W>(up + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            g.at[i] = g.at[i] * sigmoid<T>(g.at[i]) * u.at[i];
        }
        store<T, W>(out + at, g);
    }
}

template <typename T, unsigned W> __device__ __forceinline__ void gelu_at(T* x, unsigned inner) {
    const unsigned at = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (at < inner) {
        Values<W> values = load<T, W>(x + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            values.at[i] = gelu_new<T>(values.at[i]);
        }
        store<T, W>(x + at, values);
    }
}

// Rows of gate ‖ up to rows of silu(gate) ⊙ up.
template <typename T> __device__ __forceinline__ void swiglu(const T* gate_up, T* out, unsigned inner) {
    const T* gate = gate_up + size_t{blockIdx.x} * 2 * inner;
    T* row = out + size_t{blockIdx.x} * inner;
    if (in_vectors<T>(inner)) {
        swiglu_at<T, PER_VECTOR<T>>(gate, gate + inner, row, inner);
    } else {
        swiglu_at<T, 1>(gate, gate + inner, row, inner);
    }
}

template <typename T> __device__ __forceinline__ void gelu(T* x, unsigned inner) {
    T* row = x + size_t{blockIdx.x} * inner;
    if (in_vectors<T>(inner)) {
        gelu_at<T, PER_VECTOR<T>>(row, inner);
    } else {
        gelu_at<T, 1>(row, inner);
    }
}

}  // namespace forward
