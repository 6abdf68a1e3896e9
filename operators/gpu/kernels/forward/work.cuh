// What a block of attention works on: a block of query rows of one run, for one head.
#pragma once

#include "../portable.cuh"

namespace forward {

// The heads of a layer, in fused rows of (heads + 2 kv_heads) · D elements: q, k, v.
struct Heads {
    unsigned heads;
    unsigned kv_heads;
    // 1/sqrt(D of the model), times log2 e, since exponents are of base 2.
    float scale;
};

template <typename T, int D> struct Work {
    const T* q;
    const T* k;
    const T* v;
    T* out;
    // Elements from one row of q, k, v to the next, and of `out`.
    unsigned stride;
    unsigned out_stride;
    // Of the run, whose rows are counted from 0.
    unsigned length;
    unsigned first;

    // Items are (first row of the run, its length, first query row, 0), the longest first. The heads of an item are neighbours among
    // the blocks: those that share keys and values find them in the cache.
    __device__ __forceinline__ Work(const T* qkv, T* to, const unsigned* items, const Heads& shape) {
        const uint4 item = reinterpret_cast<const uint4*>(items)[blockIdx.x / shape.heads];
        const unsigned head = blockIdx.x % shape.heads, kv_head = head / (shape.heads / shape.kv_heads);
        stride = (shape.heads + 2 * shape.kv_heads) * D;
        out_stride = shape.heads * D;
        length = item.y;
        first = item.z;
        const T* row = qkv + size_t{item.x} * stride;
        q = row + head * D;
        k = row + (shape.heads + kv_head) * D;
        v = row + (shape.heads + shape.kv_heads + kv_head) * D;
        out = to + size_t{item.x} * out_stride + head * D;
    }
};

// 2^x to about two units of f32's last place, and 0 for minus infinity.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// Over the four neighbours that share a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

}  // namespace forward
