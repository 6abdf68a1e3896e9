// Maximum and Σ exp of a row in one read: every thread keeps its own maximum and a sum in f64, rescaled where the maximum grows.
// The term of the largest logit is exactly 1, so that ln p of a sure teacher keeps its digits.

struct RowState {
    double z, ln_z;
    float max;
    // Nothing can be encoded here: the CPU says why.
    unsigned broken;
};

struct Online {
    float max = -3.40282347e+38f;
    // l·0: 0, or NaN where a logit is not finite
    float bad = 0.0f;
    double sum = 0.0;

    __device__ __forceinline__ void raise(float largest) {
        if (largest > max) {
            sum *= exp(static_cast<double>(max) - static_cast<double>(largest));
            max = largest;
        }
    }
    __device__ __forceinline__ void take(float logit) {
        sum += static_cast<double>(exp_f32(sub(logit, max)));
        bad = add(bad, mul(logit, 0.0f));
    }
    __device__ __forceinline__ void take_one(float logit) {
        raise(logit);
        take(logit);
    }
    __device__ __forceinline__ void take_four(const float4& v) {
        take(v.x);
        take(v.y);
        take(v.z);
        take(v.w);
    }
    static __device__ __forceinline__ float largest(const float4& v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

    // A thread's share of a row: aligned groups of four, four of them at a time, and what sticks out at both ends.
    __device__ __forceinline__ void read(const float* row, unsigned vocab) {
        const unsigned ahead = (4 - static_cast<unsigned>(reinterpret_cast<uintptr_t>(row) / 4 % 4)) % 4;
        const unsigned head = min(ahead, vocab);
        const unsigned groups = (vocab - head) / 4, tail = head + groups * 4;
        const float4* fours = reinterpret_cast<const float4*>(row + head);
        unsigned i = threadIdx.x;
        for (; i + 3 * THREADS < groups; i += 4 * THREADS) {
            const float4 a = fours[i], b = fours[i + THREADS], c = fours[i + 2 * THREADS], d = fours[i + 3 * THREADS];
            raise(fmaxf(fmaxf(largest(a), largest(b)), fmaxf(largest(c), largest(d))));
            take_four(a);
            take_four(b);
            take_four(c);
            take_four(d);
        }
        for (; i < groups; i += THREADS) {
            const float4 a = fours[i];
            raise(largest(a));
            take_four(a);
        }
        if (threadIdx.x < head) {
            take_one(row[threadIdx.x]);
        }
#ifdef STILLHOUSE_BROKEN_TAIL
        if (tail + threadIdx.x + 1 < vocab) {
#else
        if (tail + threadIdx.x < vocab) {
#endif
            take_one(row[tail + threadIdx.x]);
        }
    }
};

__device__ __forceinline__ double logprob_of(const RowState& state, float logit) {
    return (static_cast<double>(logit) - static_cast<double>(state.max)) - state.ln_z;
}

// As it is stored: below −64 never above the exact one.
__device__ __forceinline__ float stored_logprob(double exact) {
    return exact < -64.0 ? floor_value(false, exact) : static_cast<float>(exact);
}

// Grid: rows. ln p_x is NaN where a row is the CPU's to look at.
NOISE_KERNEL(softmax, THREADS, 3)(const float* logits, unsigned long long stride, unsigned vocab, const unsigned* tokens, RowState* states,
                                  float* logprobs) {
    SHARED(double, sums, WARPS);
    SHARED(float, maxima, WARPS);
    const float* row = logits + blockIdx.x * stride;
    Online online;
    online.read(row, vocab);
    float max = online.max;
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        max = fmaxf(max, __shfl_xor_sync(FULL, max, lanes));
    }
    if (threadIdx.x % 32 == 0) {
        maxima[threadIdx.x / 32] = max;
    }
    const bool bad = __syncthreads_or(online.bad != 0.0f) != 0;
    for (unsigned warp = 0; warp < WARPS; warp++) {
        max = fmaxf(max, maxima[warp]);
    }
    const double scaled = online.sum * exp(static_cast<double>(online.max) - static_cast<double>(max));
    const double z = block_sum(scaled, sums);
    if (threadIdx.x == 0) {
        const unsigned token = tokens[blockIdx.x];
        RowState state;
        state.z = z;
        state.ln_z = log(z);
        state.max = max;
        const float stored = bad || token >= vocab ? 0.0f : stored_logprob(logprob_of(state, row[token]));
        state.broken = bad || token >= vocab || !(fabsf(stored) < 3.4e38f) ? 1 : 0;
        states[blockIdx.x] = state;
        logprobs[blockIdx.x] = state.broken != 0 ? __uint_as_float(0x7fc00000u) : stored;
    }
}
NOISE_EXPORT(softmax)
