// Numbers out of a key and their place, for nets that are only measured: made where they are needed, and the same everywhere.
#pragma once

#include "vectors.cuh"

namespace forward {

// splitmix64.
__device__ __forceinline__ unsigned long long mixed(unsigned long long z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Nearly normal, of mean 0 and variance 1: the sum of four uniform numbers of 16 bits, (2^16 - 1) 2 less, in units of 2^16 / sqrt(3).
__device__ __forceinline__ float nearly_normal(unsigned long long bits) {
    const int sum = static_cast<int>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return __fmul_rn(__int2float_rn(sum - 131070), 2.6428998e-5f);
}

// to[i] = number i of the key · factor + term. Grid: any.
template <typename T> __device__ __forceinline__ void fill(T* to, unsigned long long count, unsigned long long key, float factor, float term) {
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        to[i] = from_float<T>(__fadd_rn(__fmul_rn(nearly_normal(mixed(key + i)), factor), term));
    }
}

}  // namespace forward
