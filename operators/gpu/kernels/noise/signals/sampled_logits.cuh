// N entries from q ∝ p^power by inversion of uniforms. Constants: power (double). Input: N uniforms (double). Scratch: ⌈V/1024⌉ running sums
// (double). Output: the entries (unsigned), then p/q of each (float).

// The sum over the lanes up to this one.
__device__ __forceinline__ double warp_running(double value) {
    const unsigned lane = threadIdx.x % 32;
    UNROLL
    for (unsigned delta = 1; delta < 32; delta *= 2) {
        const double below = __shfl_up_sync(FULL, value, delta);
        value += lane >= delta ? below : 0.0;
    }
    return value;
}

// The first block whose running sum is above a target; the last block with a weight if rounding leaves the target above all.
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

SIGNAL_KERNEL(sampled_logits, 2) {
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const double power = *reinterpret_cast<const double*>(constants);
    const double* uniforms = reinterpret_cast<const double*>(inputs) + static_cast<size_t>(blockIdx.x) * count;
    unsigned* indices = reinterpret_cast<unsigned*>(out) + static_cast<size_t>(blockIdx.x) * 2 * count;
    float* ratios = reinterpret_cast<float*>(indices + count);
    const float factor = static_cast<float>(power);
    const unsigned blocks = (vocab + SUMMED - 1) / SUMMED, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double* of_row = reinterpret_cast<double*>(scratch) + static_cast<size_t>(blockIdx.x) * blocks;
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
    for (unsigned d = warp; d < count; d += WARPS) {
        const double target = uniforms[d] * total;
        const unsigned b = block_of_target(of_row, blocks, target);
        const unsigned end = min((b + 1) * SUMMED, vocab);
        double below = b == 0 ? 0.0 : of_row[b - 1];
        // The sum of single entries may round to a little less than the sum of the block: the last entry with a weight takes the rest.
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
            indices[d] = found;
            ratios[d] = power == 1.0 ? 1.0f : static_cast<float>(exp(logprob_of(state, row[found]) - (power * distance - log(total))));
        }
    }
}
NOISE_EXPORT(sampled_logits)
