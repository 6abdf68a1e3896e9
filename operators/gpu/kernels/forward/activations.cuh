// What stands between the products of a feed-forward part: GELU of x, or silu or GELU of a gate. Blocks: (row, piece of the row).
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

// x sigmoid(x).
struct Silu {
    template <typename T> static __device__ __forceinline__ float of(float x) { return x * sigmoid<T>(x); }
};

// 0.5 x (1 + tanh v) = x sigmoid(2 v), v = sqrt(2/pi) (x + 0.044715 x³).
struct GeluTanh {
    template <typename T> static __device__ __forceinline__ float of(float x) {
        constexpr float TWICE = 2.0f * 0.7978845608f;
        return x * sigmoid<T>(TWICE * (x + 0.044715f * x * x * x));
    }
};

// x Φ(x), by the complement, which does not cancel where x is far below 0.
struct Gelu {
    template <typename T> static __device__ __forceinline__ float of(float x) { return 0.5f * x * erfcf(-0.7071067812f * x); }
};

template <typename T, typename F, unsigned W>
__device__ __forceinline__ void gated_at(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, unsigned inner) {
    const unsigned at = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (at < inner) {
        Values<W> g = load<T, W>(gate + at);
        const Values<W> u = load<T, W>(up + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            g.at[i] = F::template of<T>(g.at[i]) * u.at[i];
        }
        store<T, W>(out + at, g);
    }
}

template <typename T, typename F, unsigned W> __device__ __forceinline__ void curved_at(T* x, unsigned inner) {
    const unsigned at = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (at < inner) {
        Values<W> values = load<T, W>(x + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            values.at[i] = F::template of<T>(values.at[i]);
        }
        store<T, W>(x + at, values);
    }
}

// Rows of gate ‖ up to rows of f(gate) ⊙ up.
template <typename T, typename F> __device__ __forceinline__ void gated(const T* gate_up, T* out, unsigned inner) {
    const T* gate = gate_up + size_t{blockIdx.x} * 2 * inner;
    T* row = out + size_t{blockIdx.x} * inner;
    if (in_vectors<T>(inner)) {
        gated_at<T, F, PER_VECTOR<T>>(gate, gate + inner, row, inner);
    } else {
        gated_at<T, F, 1>(gate, gate + inner, row, inner);
    }
}

// Rows of x to rows of f(x), in place.
template <typename T, typename F> __device__ __forceinline__ void curved(T* x, unsigned inner) {
    T* row = x + size_t{blockIdx.x} * inner;
    if (in_vectors<T>(inner)) {
        curved_at<T, F, PER_VECTOR<T>>(row, inner);
    } else {
        curved_at<T, F, 1>(row, inner);
    }
}

}  // namespace forward
