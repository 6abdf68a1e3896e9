// Other signals of a row: the definitions and bounds are those of operators/noise/src/signals.rs.
//
//   logits ─► a read for each temperature that is not 1, one for the entropy ─► scalars
//        ├──► a read: sums of q by blocks of 1,024 ─► draws by inversion
//   top-k └─► how many hold the mass ─► a read: ln of what all others hold

// Entries of a block of sums.
constexpr unsigned SUMMED = 1024;
#ifdef STILLHOUSE_BROKEN_TAIL
constexpr unsigned LEFT_OUT = 1;
#else
constexpr unsigned LEFT_OUT = 0;
#endif

// exp((l − max)·factor), 0 below −60 as everywhere.
__device__ __forceinline__ float power_of(const RowState& state, float logit, float factor) {
    return exp_f32(mul(sub(logit, state.max), factor));
}

// Grid: rows. Of each row ln Σ exp(l/T) of the temperatures, the entropy (0 where it is not asked for), ln p of the candidates.
NOISE_KERNEL(scalars, THREADS, 3)(const float* logits, unsigned long long stride, unsigned vocab, const RowState* states,
                                  const double* temperatures, unsigned count, unsigned entropy, const unsigned* candidates,
                                  unsigned asked, float* out) {
    SHARED(double, sums, WARPS);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    float* to = out + static_cast<size_t>(blockIdx.x) * (count + 1 + asked);
    for (unsigned t = 0; t < count; t++) {
        const double temperature = temperatures[t];
        double ln_z = state.ln_z;
        if (temperature != 1.0) {
            const float factor = static_cast<float>(1.0 / temperature);
            double sum = 0.0;
            for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
                sum += static_cast<double>(power_of(state, row[i], factor));
            }
            ln_z = log(block_sum(sum, sums));
        }
        if (threadIdx.x == 0) {
            to[t] = static_cast<float>(static_cast<double>(state.max) / temperature + ln_z);
        }
    }
    double distance = 0.0;
    if (entropy != 0) {
        for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
            const float below = sub(state.max, row[i]);
            distance += static_cast<double>(mul(exp_f32(-below), below));
        }
        distance = block_sum(distance, sums);
    }
    if (threadIdx.x == 0) {
        to[count] = entropy != 0 ? static_cast<float>(positive(state.ln_z + distance / state.z)) : 0.0f;
    }
    for (unsigned i = threadIdx.x; i < asked; i += THREADS) {
        to[count + 1 + i] = static_cast<float>(logprob_of(state, row[candidates[i]]));
    }
}
NOISE_EXPORT(scalars)

// What the lanes up to this one hold.
__device__ __forceinline__ double warp_running(double value) {
    const unsigned lane = threadIdx.x % 32;
    UNROLL
    for (unsigned delta = 1; delta < 32; delta *= 2) {
        const double below = __shfl_up_sync(FULL, value, delta);
        value += lane >= delta ? below : 0.0;
    }
    return value;
}

// The first block whose running sum is above a target; the last one with any weight where rounding leaves the target above all.
__device__ __forceinline__ unsigned block_of_target(const double* running, unsigned blocks, double target) {
    const double total = running[blocks - 1];
    const bool inside = target < total;
    unsigned low = 0, high = blocks - 1;
    while (low < high) {
        const unsigned middle = low + (high - low) / 2;
        if (inside ? running[middle] > target : running[middle] >= total) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Grid: rows. N entries from q ∝ p^power by inversion of the uniforms [rows, N]; `running` [rows, ⌈V/1024⌉] is scratch. Of each draw the
// entry and p/q.
NOISE_KERNEL(drawn, THREADS, 2)(const float* logits, unsigned long long stride, unsigned vocab, const RowState* states, double power,
                                const double* uniforms, unsigned draws, double* running, unsigned* indices, float* ratios) {
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const float factor = static_cast<float>(power);
    const unsigned blocks = (vocab + SUMMED - 1) / SUMMED, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double* of_row = running + static_cast<size_t>(blockIdx.x) * blocks;
    for (unsigned b = warp; b < blocks; b += WARPS) {
        double sum = 0.0;
        for (unsigned i = b * SUMMED + lane; i + LEFT_OUT < min((b + 1) * SUMMED, vocab); i += 32) {
            sum += static_cast<double>(power_of(state, row[i], factor));
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            of_row[b] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0.0;
        for (unsigned b = 0; b < blocks; b++) {
            sum += of_row[b];
            of_row[b] = sum;
        }
    }
    __syncthreads();
    const double total = of_row[blocks - 1];
    for (unsigned d = warp; d < draws; d += WARPS) {
        const size_t at = static_cast<size_t>(blockIdx.x) * draws + d;
        const double target = uniforms[at] * total;
        const unsigned b = block_of_target(of_row, blocks, target);
        const unsigned end = min((b + 1) * SUMMED, vocab);
        double below = b == 0 ? 0.0 : of_row[b - 1];
        // added one by one a block may come to a little less than its sum: its last entry with any weight takes what is left
        unsigned found = b * SUMMED;
        for (unsigned first = b * SUMMED; first < end; first += 32) {
            const double weight = first + lane < end ? static_cast<double>(power_of(state, row[first + lane], factor)) : 0.0;
            const double sum = below + warp_running(weight);
            const unsigned heavy = __ballot_sync(FULL, weight > 0.0);
            const unsigned beyond = __ballot_sync(FULL, weight > 0.0 && sum > target);
            if (heavy != 0) {
                found = first + 31 - __clz(static_cast<int>(heavy));
            }
            if (beyond != 0) {
                found = first + __ffs(static_cast<int>(beyond)) - 1;
                break;
            }
            below = __shfl_sync(FULL, sum, 31);
        }
        if (lane == 0) {
            const double distance = static_cast<double>(row[found]) - static_cast<double>(state.max);
            indices[at] = found;
            ratios[at] = power == 1.0 ? 1.0f : static_cast<float>(exp(logprob_of(state, row[found]) - (power * distance - log(total))));
        }
    }
}
NOISE_EXPORT(drawn)

// Grid: rows. How many of the k likeliest hold `mass`, `most` at most, and ln of the probability of all others.
NOISE_KERNEL(trimmed, THREADS, 3)(const float* logits, unsigned long long stride, unsigned vocab, const RowState* states, unsigned k,
                                  const unsigned* indices, const float* logprobs, double mass, unsigned most, unsigned* counts,
                                  float* tails) {
    SHARED(double, sums, WARPS);
    SHARED(unsigned, last, 1);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const size_t listed = static_cast<size_t>(blockIdx.x) * k;
    if (threadIdx.x == 0) {
        double held = 0.0;
        unsigned count = 0;
        while (count < min(k, most) && held < mass) {
            held += exp(static_cast<double>(logprobs[listed + count]));
            count++;
        }
        counts[blockIdx.x] = count;
        last[0] = indices[listed + count - 1];
    }
    __syncthreads();
    const unsigned index = last[0];
    const float logit = row[index];
    // a sum of its own: 1 − Σ p would keep nothing of a tail of 1e-9
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
        const float other = row[i];
        sum += other < logit || (other == logit && i > index) ? static_cast<double>(power_of(state, other, 1.0f)) : 0.0;
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) {
        tails[blockIdx.x] = static_cast<float>(log(sum) - state.ln_z);
    }
}
NOISE_EXPORT(trimmed)
