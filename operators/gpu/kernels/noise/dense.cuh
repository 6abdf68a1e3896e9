// All of the noise in the type it is stored in. Where rounding lets another token win, ξ_x goes up and what still wins goes down.

constexpr double DENSE_LEAD = 1.0 / 4096.0;

template <typename T> __device__ __forceinline__ void store_value(T* out, float value) { *out = from_float<T>(value); }

struct DenseRow {
    const float* row;
    unsigned vocab, x;
    double limit;

    __device__ __forceinline__ bool beats(unsigned k, float logit, float xi) const {
        return k != x && static_cast<double>(logit) + static_cast<double>(xi) > limit;
    }
};

// Four values; whether one of them wins or is not finite.
template <typename T>
__device__ __forceinline__ void dense_four(const DenseRow& at, unsigned k, const float4& l, const uint4& words, float max, float scale, T* out,
                                           bool& beaten, bool& unstorable) {
    const float logit[4] = {l.x, l.y, l.z, l.w};
    const unsigned word[4] = {words.x, words.y, words.z, words.w};
    UNROLL
    for (unsigned i = 0; i < 4; i++) {
        if (k + i < at.vocab && k + i != at.x) {
            const float e = exponential_from_word(word[i]);
            const T stored = from_float<T>(-ln_f32(add(e, mul(exp_f32(sub(logit[i], max)), scale))));
            const float xi = to_float(stored);
            out[k + i] = stored;
            beaten |= at.beats(k + i, logit[i], xi);
            unstorable |= !finite(xi);
        }
    }
}

template <typename T>
__device__ __forceinline__ void dense_row(const float* row, unsigned vocab, unsigned x, const Stream& stream, const RowState& state,
                                          unsigned condition, T* out, unsigned* flag) {
    const bool half = sizeof(T) == 2;
    const float e0 = auxiliary_exponential(stream), scale = scale_of(state, e0);
    const float exact = static_cast<float>(-logprob_of(state, row[x]) - log(static_cast<double>(e0)));
    float xi_x = round_value(half, exact);
    const double logit_x = static_cast<double>(row[x]);
    DenseRow at{row, vocab, x, logit_x + static_cast<double>(xi_x) - DENSE_LEAD};
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    bool beaten = false, unstorable = false;
    for (unsigned k = threadIdx.x * 4; k < vocab; k += THREADS * 4) {
        dense_four<T>(at, k, load_four(row, k, vocab, aligned), philox(stream, k / 4), state.max, scale, out, beaten, unstorable);
    }
    if (__syncthreads_or(beaten) != 0 && condition != 0) {
        xi_x = ceil_value(half, exact);
        at.limit = logit_x + static_cast<double>(xi_x) - DENSE_LEAD;
        for (unsigned first = threadIdx.x * 4; first < vocab; first += THREADS * 4) {
            for (unsigned k = first; k < min(first + 4, vocab); k++) {
                if (k != x && at.beats(k, row[k], to_float(out[k]))) {
                    const float lowered = floor_value(half, at.limit - static_cast<double>(row[k]));
                    out[k] = from_float<T>(lowered);
                    unstorable |= !finite(lowered);
                }
            }
        }
    }
    const bool broken = __syncthreads_or(unstorable || !finite(xi_x)) != 0;
    if (threadIdx.x == 0) {
        store_value(&out[x], xi_x);
        *flag = broken ? FALL_BACK : 0;
    }
}

// Grid: draws, rows. Both kernels: `flags` says where the CPU has to look at a row.
#define STILLHOUSE_DENSE(name, T)                                                                                                      \
    NOISE_KERNEL(name, THREADS, 2)(const float* logits, unsigned long long stride, unsigned vocab, const unsigned* tokens,             \
                                   const unsigned* positions, const unsigned long long* sequences, const uint2* keys,                  \
                                   const RowState* states, unsigned condition, T* out, unsigned* flags) {                              \
        const size_t list = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;                                                  \
        const RowState state = states[blockIdx.y];                                                                                     \
        if (state.broken != 0) {                                                                                                       \
            if (threadIdx.x == 0) {                                                                                                    \
                flags[list] = FALL_BACK;                                                                                               \
            }                                                                                                                          \
            return;                                                                                                                    \
        }                                                                                                                              \
        const Stream stream = stream_of(keys[blockIdx.x], positions[blockIdx.y], sequences[blockIdx.y]);                               \
        dense_row<T>(logits + blockIdx.y * stride, vocab, tokens[blockIdx.y], stream, state, condition, out + list * vocab, &flags[list]); \
    }                                                                                                                                  \
    NOISE_EXPORT(name)
STILLHOUSE_DENSE(dense_f16, f16)
STILLHOUSE_DENSE(dense_f32, float)
#undef STILLHOUSE_DENSE
