// The residual stream and its norms. A block per row; the row waits in shared memory, where each thread reads only what it wrote itself.
//
//     x = x + y                                       where there is a y
//     n = (x - mean) / sqrt(var + eps) · w + b        CENTRED
//     n = x / sqrt(mean of x² + eps) · w              otherwise
//
// Of x what is stored, in T, is what is normalised: the bits do not depend on who made the sum.
#pragma once

#include "vectors.cuh"

namespace forward {

template <typename T, unsigned W, bool CENTRED>
__device__ __forceinline__ void norm_row(T* x, const T* y, const T* __restrict__ weight, const T* __restrict__ bias, T* out, unsigned width,
                                         float eps, T* row, float* partial) {
    const unsigned first = threadIdx.x * W, step = blockDim.x * W;
    float sum = 0.0f;
    for (unsigned at = first; at < width; at += step) {
        Values<W> values = load<T, W>(x + at);
        if (y != nullptr) {
            const Values<W> more = load<T, W>(y + at);
            UNROLL
            for (unsigned i = 0; i < W; i++) {
                values.at[i] = to_float(from_float<T>(values.at[i] + more.at[i]));
            }
            store<T, W>(x + at, values);
        }
        store<T, W>(row + at, values);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            sum += CENTRED ? values.at[i] : values.at[i] * values.at[i];
        }
    }
    float mean = 0.0f;
    float spread = block_sum(sum, partial) / static_cast<float>(width);
    if (CENTRED) {
        // A second pass: the mean of squares less the square of the mean cancels where the mean is large.
        mean = spread;
        float squares = 0.0f;
        for (unsigned at = first; at < width; at += step) {
            const Values<W> values = load<T, W>(row + at);
            UNROLL
            for (unsigned i = 0; i < W; i++) {
                squares += (values.at[i] - mean) * (values.at[i] - mean);
            }
        }
        spread = block_sum(squares, partial) / static_cast<float>(width);
    }
    const float scale = 1.0f / sqrtf(spread + eps);
    for (unsigned at = first; at < width; at += step) {
        Values<W> values = load<T, W>(row + at);
        const Values<W> w = load<T, W>(weight + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            values.at[i] = (values.at[i] - mean) * scale * w.at[i];
        }
        if (CENTRED) {
            const Values<W> b = load<T, W>(bias + at);
            UNROLL
            for (unsigned i = 0; i < W; i++) {
                values.at[i] += b.at[i];
            }
        }
        store<T, W>(out + at, values);
    }
}

template <typename T, bool CENTRED>
__device__ __forceinline__ void add_norm(T* x, const T* y, const T* weight, const T* bias, T* out, unsigned width, float eps) {
    DYNAMIC_SHARED(T, row);
    SHARED(float, partial, 32);
    const size_t start = size_t{blockIdx.x} * width;
    const T* add = y == nullptr ? nullptr : y + start;
    if (in_vectors<T>(width)) {
        norm_row<T, PER_VECTOR<T>, CENTRED>(x + start, add, weight, bias, out + start, width, eps, row, partial);
    } else {
        norm_row<T, 1, CENTRED>(x + start, add, weight, bias, out + start, width, eps, row, partial);
    }
}

}  // namespace forward
