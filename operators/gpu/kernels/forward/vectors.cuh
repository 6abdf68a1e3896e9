// Rows in accesses of 16 bytes, as f32 values; W is their number of elements, or 1 where a row's length is no multiple of it.
#pragma once

#include "../portable.cuh"

namespace forward {

constexpr unsigned WARP = 0xffffffffu;

template <typename T> constexpr unsigned PER_VECTOR = 16 / sizeof(T);

// Always indexed by constants once loops are unrolled, so that it lives in registers.
template <unsigned W> struct Values {
    float at[W];
};

template <typename T, unsigned W> __device__ __forceinline__ Values<W> load(const T* from) {
    Values<W> values;
    if constexpr (W == 1) {
        values.at[0] = to_float(*from);
    } else if constexpr (sizeof(T) == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        values.at[0] = four.x;
        values.at[1] = four.y;
        values.at[2] = four.z;
        values.at[3] = four.w;
    } else {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        const float2 a = unpack_pair<T>(four.x), b = unpack_pair<T>(four.y), c = unpack_pair<T>(four.z), d = unpack_pair<T>(four.w);
        values.at[0] = a.x;
        values.at[1] = a.y;
        values.at[2] = b.x;
        values.at[3] = b.y;
        values.at[4] = c.x;
        values.at[5] = c.y;
        values.at[6] = d.x;
        values.at[7] = d.y;
    }
    return values;
}

template <typename T, unsigned W> __device__ __forceinline__ void store(T* to, const Values<W>& values) {
    if constexpr (W == 1) {
        *to = from_float<T>(values.at[0]);
    } else if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(values.at[0], values.at[1], values.at[2], values.at[3]);
    } else {
        *reinterpret_cast<uint4*>(to) =
            make_uint4(pack_pair<T>(values.at[0], values.at[1]), pack_pair<T>(values.at[2], values.at[3]),
                       pack_pair<T>(values.at[4], values.at[5]), pack_pair<T>(values.at[6], values.at[7]));
    }
}

// Whether all rows of this many elements begin where a vector may.
template <typename T> __device__ __forceinline__ bool in_vectors(unsigned width) { return width % PER_VECTOR<T> == 0; }

// Sum over a block in an order that depends on its size alone, for all threads. `partial` holds 32.
__device__ __forceinline__ float block_sum(float value, float* partial) {
    UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(WARP, value, distance);
    }
    // Whoever still reads the sums of the call before comes first.
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) {
        sum += partial[warp];
    }
    return sum;
}

}  // namespace forward
