// Sums and places over the threads of a block, in an order that does not depend on timing.

constexpr unsigned FULL = 0xffffffffu;
constexpr unsigned THREADS = 512;
constexpr unsigned WARPS = THREADS / 32;

__device__ __forceinline__ double warp_sum(double value) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        value += __shfl_xor_sync(FULL, value, lanes);
    }
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        value = add(value, __shfl_xor_sync(FULL, value, lanes));
    }
    return value;
}

// For every thread what the lanes below it hold; the lane's own value comes on top in `total` of the last lane.
__device__ __forceinline__ unsigned warp_scan(unsigned value, unsigned& total) {
    const unsigned lane = threadIdx.x % 32;
    unsigned sum = value;
    UNROLL
    for (unsigned delta = 1; delta < 32; delta *= 2) {
        const unsigned below = __shfl_up_sync(FULL, sum, delta);
        sum += lane >= delta ? below : 0;
    }
    total = __shfl_sync(FULL, sum, 31);
    return sum - value;
}

// The sum of the block's threads, for all of them. Ends with the shared memory still in use: the next call waits for it.
__device__ __forceinline__ double block_sum(double value, double* shared) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    double sum = 0.0;
#ifdef STILLHOUSE_BROKEN_REDUCTION
    for (unsigned warp = 0; warp < WARPS; warp += 2) {
#else
    for (unsigned warp = 0; warp < WARPS; warp++) {
#endif
        sum += shared[warp];
    }
    return sum;
}

// How many the threads before this one have, and all together. One barrier; `shared` is free again at the next one.
__device__ __forceinline__ unsigned block_scan(unsigned count, unsigned* shared, unsigned& total) {
    unsigned of_warp = 0, before = 0;
    if (__any_sync(FULL, count != 0)) {
        before = warp_scan(count, of_warp);
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = of_warp;
    }
#ifndef STILLHOUSE_BROKEN_RACE
    __syncthreads();
#endif
    total = 0;
    UNROLL
    for (unsigned warp = 0; warp < WARPS; warp++) {
        const unsigned of_other = shared[warp];
        before += warp < threadIdx.x / 32 ? of_other : 0;
        total += of_other;
    }
    return before;
}
