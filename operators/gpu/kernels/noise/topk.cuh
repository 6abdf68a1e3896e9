// The k largest logits of a row in one read: larger logits first, then lower indices.
//
// A buffer takes whatever is above the k-th best so far; full, it is sorted and cut to k. Keys differ in their index, so that the
// order in which threads come to the buffer leaves no trace.

constexpr unsigned BUFFER = 4096;
constexpr unsigned SCANNED = THREADS * 4;
constexpr unsigned MOST_TOPK = BUFFER - SCANNED;

__device__ __forceinline__ unsigned long long topk_key(float logit, unsigned index) {
    // −0 becomes 0
    const unsigned bits = __float_as_uint(add(logit, 0.0f));
    const unsigned ordered = bits ^ ((bits & 0x80000000u) != 0 ? 0xffffffffu : 0x80000000u);
    return static_cast<unsigned long long>(ordered) << 32 | (0xffffffffu - index);
}

__device__ __forceinline__ float logit_of(unsigned long long key) {
    const unsigned ordered = static_cast<unsigned>(key >> 32);
    return __uint_as_float(ordered ^ ((ordered & 0x80000000u) != 0 ? 0x80000000u : 0xffffffffu));
}

// Sorts falling. Begins and ends with a barrier.
__device__ __forceinline__ void block_sort(unsigned long long* keys, unsigned size) {
    unsigned padded = 2;
    while (padded < size) {
        padded *= 2;
    }
    for (unsigned i = size + threadIdx.x; i < padded; i += THREADS) {
        keys[i] = 0;
    }
    __syncthreads();
    for (unsigned width = 2; width <= padded; width *= 2) {
        for (unsigned step = width / 2; step > 0; step /= 2) {
            for (unsigned pair = threadIdx.x; pair < padded / 2; pair += THREADS) {
                const unsigned low = pair & (step - 1), i = (pair - low) * 2 + low, j = i + step;
                const unsigned long long a = keys[i], b = keys[j];
                if ((a < b) == ((i & width) == 0)) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Grid: rows. `k` is at most V and MOST_TOPK.
NOISE_KERNEL(topk, THREADS, 3)(const float* logits, unsigned long long stride, unsigned vocab, unsigned k, const RowState* states, unsigned* indices,
                               float* logprobs) {
    SHARED(unsigned long long, buffer, BUFFER);
    SHARED(unsigned, filled, 1);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    if (threadIdx.x == 0) {
        filled[0] = 0;
    }
    unsigned long long floor = 0;
    unsigned count = 0;
    __syncthreads();
    for (unsigned first = 0; first < vocab; first += SCANNED) {
        UNROLL
        for (unsigned i = 0; i < SCANNED / THREADS; i++) {
            const unsigned index = first + i * THREADS + threadIdx.x;
            const unsigned long long key = index < vocab ? topk_key(row[index], index) : 0;
            if (key > floor) {
                buffer[atomicAdd(&filled[0], 1u)] = key;
            }
        }
        __syncthreads();
        count = filled[0];
        if (count > BUFFER - SCANNED && first + SCANNED < vocab) {
            block_sort(buffer, count);
            count = min(count, k);
            floor = buffer[k - 1];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            filled[0] = count;
        }
        __syncthreads();
    }
    block_sort(buffer, count);
    for (unsigned i = threadIdx.x; i < k; i += THREADS) {
        const unsigned long long key = buffer[i];
        const size_t to = static_cast<size_t>(blockIdx.x) * k + i;
        indices[to] = 0xffffffffu - static_cast<unsigned>(key);
        logprobs[to] = static_cast<float>(logprob_of(state, logit_of(key)));
    }
}
NOISE_EXPORT(topk)
