// Causal attention in f32, for those who ask for every bit: 32 queries and 32 keys at a time, four threads per row.
//
// Thread c of a row makes the scores of keys c, c + 4, .. and sums the columns 4c .. 4c + 4, 16 + 4c .. of the output. Shared rows are
// one vector longer than D, so that the rows which a warp reads at once lie in different banks.
#pragma once

#include "work.cuh"

namespace forward {

constexpr unsigned PLAIN_ROWS = 32;
constexpr unsigned PLAIN_THREADS = 4 * PLAIN_ROWS;

template <int D>
__device__ __forceinline__ void fetch_plain(float* shared, const float* rows, unsigned from, const Work<float, D>& work) {
    constexpr unsigned CHUNKS = D / 4;
    for (unsigned chunk = threadIdx.x; chunk < PLAIN_ROWS * CHUNKS; chunk += PLAIN_THREADS) {
        const unsigned row = chunk / CHUNKS, column = chunk % CHUNKS * 4;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (from + row < work.length) {
            value = *reinterpret_cast<const float4*>(rows + size_t{from + row} * work.stride + column);
        }
        *reinterpret_cast<float4*>(shared + row * (D + 4) + column) = value;
    }
}

__device__ __forceinline__ float4 vector_at(const float* from) { return *reinterpret_cast<const float4*>(from); }

template <int D> __device__ __forceinline__ void plain(const float* qkv, float* to, const unsigned* items, const Heads& shape) {
    constexpr unsigned STRIDE = D + 4, COUNT = PLAIN_ROWS / 4;
    DYNAMIC_SHARED(float, shared);
    float* q = shared;
    float* k = q + PLAIN_ROWS * STRIDE;
    float* v = k + PLAIN_ROWS * STRIDE;
    SHARED(float, weights, PLAIN_ROWS * (PLAIN_ROWS + 1));
    const Work<float, D> work(qkv, to, items, shape);
    const unsigned row = threadIdx.x / 4, part = threadIdx.x % 4;
    const unsigned keys = min(work.first + PLAIN_ROWS, work.length);
    float* own = weights + row * (PLAIN_ROWS + 1);
    float4 out[D / 16];
    UNROLL
    for (int i = 0; i < D / 16; i++) {
        out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float most = -INFINITY, sum = 0.0f;
    fetch_plain<D>(q, work.q, work.first, work);
    for (unsigned key = 0; key < keys; key += PLAIN_ROWS) {
        fetch_plain<D>(k, work.k, key, work);
        fetch_plain<D>(v, work.v, key, work);
        __syncthreads();
        float score[COUNT];
        UNROLL
        for (unsigned j = 0; j < COUNT; j++) {
            score[j] = 0.0f;
        }
        UNROLL_BY(4)
        for (unsigned d = 0; d < D; d += 4) {
            const float4 a = vector_at(q + row * STRIDE + d);
            UNROLL
            for (unsigned j = 0; j < COUNT; j++) {
                const float4 b = vector_at(k + (part + 4 * j) * STRIDE + d);
                score[j] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
            }
        }
        float top = most;
        UNROLL
        for (unsigned j = 0; j < COUNT; j++) {
            score[j] = key + part + 4 * j > work.first + row ? -INFINITY : score[j] * shape.scale;
            top = fmaxf(top, score[j]);
        }
        // The first keys hold one that every row sees: finite from then on.
        top = quad_max(top);
        const float shrink = power_of_two(most - top);
        most = top;
        sum *= shrink;
        UNROLL
        for (unsigned j = 0; j < COUNT; j++) {
            const float weight = power_of_two(score[j] - top);
            sum += weight;
            own[part + 4 * j] = weight;
        }
        // A row's weights are made and read by neighbours in a warp.
        __syncwarp();
        UNROLL
        for (int i = 0; i < D / 16; i++) {
            out[i] = make_float4(out[i].x * shrink, out[i].y * shrink, out[i].z * shrink, out[i].w * shrink);
        }
        UNROLL_BY(2)
        for (unsigned j = 0; j < PLAIN_ROWS; j++) {
            const float weight = own[j];
            UNROLL
            for (int i = 0; i < D / 16; i++) {
                const float4 b = vector_at(v + j * STRIDE + 16 * i + 4 * part);
                out[i].x += weight * b.x;
                out[i].y += weight * b.y;
                out[i].z += weight * b.z;
                out[i].w += weight * b.w;
            }
        }
        __syncthreads();
    }
    const float scale = 1.0f / quad_sum(sum);
    if (work.first + row < work.length) {
        float* to_row = work.out + size_t{work.first + row} * work.out_stride + 4 * part;
        UNROLL
        for (int i = 0; i < D / 16; i++) {
            *reinterpret_cast<float4*>(to_row + 16 * i) =
                make_float4(out[i].x * scale, out[i].y * scale, out[i].z * scale, out[i].w * scale);
        }
    }
}

}  // namespace forward
