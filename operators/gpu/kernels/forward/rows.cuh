// Rows by their number: embeddings in, hidden states out to the head. A block per row.
#pragma once

#include "vectors.cuh"

namespace forward {

template <typename T, unsigned W>
__device__ __forceinline__ void embed_row(const T* __restrict__ token, const T* __restrict__ position, T* __restrict__ x, unsigned width) {
    for (unsigned at = threadIdx.x * W; at < width; at += blockDim.x * W) {
        Values<W> values = load<T, W>(token + at);
        if (position != nullptr) {
            const Values<W> more = load<T, W>(position + at);
            UNROLL
            for (unsigned i = 0; i < W; i++) {
                values.at[i] += more.at[i];
            }
        }
        store<T, W>(x + at, values);
    }
}

// x[t] = wte[token t] (+ wpe[position t]).
template <typename T>
__device__ __forceinline__ void embed(const unsigned* tokens, const unsigned* positions, const T* wte, const T* wpe, T* x, unsigned width) {
    const size_t row = blockIdx.x;
    const T* token = wte + size_t{tokens[row]} * width;
    const T* position = wpe == nullptr ? nullptr : wpe + size_t{positions[row]} * width;
    if (in_vectors<T>(width)) {
        embed_row<T, PER_VECTOR<T>>(token, position, x + row * width, width);
    } else {
        embed_row<T, 1>(token, position, x + row * width, width);
    }
}

// to[i] = from[rows[i]].
template <typename T> __device__ __forceinline__ void gather(const T* from, const unsigned* rows, T* to, unsigned width) {
    const T* row = from + size_t{rows[blockIdx.x]} * width;
    T* out = to + size_t{blockIdx.x} * width;
    if (in_vectors<T>(width)) {
        embed_row<T, PER_VECTOR<T>>(row, nullptr, out, width);
    } else {
        embed_row<T, 1>(row, nullptr, out, width);
    }
}

}  // namespace forward
