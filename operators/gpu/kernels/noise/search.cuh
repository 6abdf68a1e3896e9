// The search for a small set of corrections: one warp for each (row, draw).

// How many come first in the order: the rivals, and those with d above the threshold.
__device__ __forceinline__ unsigned count_above(const Candidates& all, double threshold) {
    unsigned count = 0;
    for (unsigned j = all.rivals + threadIdx.x % 32; j < all.size; j += 32) {
        count += all.excess[all.order[j]] > threshold ? 1 : 0;
    }
    return all.rivals + __reduce_add_sync(FULL, count);
}

// The smallest number found that meets the target, given that `most` do: the first of the order then.
__device__ __forceinline__ unsigned shrink(Candidates& all, const Problem& problem, unsigned most) {
    const unsigned lane = threadIdx.x % 32;
    unsigned low = all.rivals, high = most;
    while (low < high) {
        const unsigned middle = low + (high - low) / 2;
        if (meets(all, problem, middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    // With the normalisation known, rank by what each would add if it were left out: this may do with fewer.
    while (high > all.rivals) {
        const Estimate now = estimate(all, problem, high);
        const unsigned ranked = all.size - all.rivals;
        for (unsigned j = lane; j < ranked; j += 32) {
            const unsigned c = all.order[all.rivals + j];
            all.keys[j] = sort_key(rank_bits(positive(all.excess[c] * now.a - all.weight[c] * now.g)), j);
        }
        __syncwarp();
        warp_sort(all.keys, ranked);
        for (unsigned j = lane; j < all.size; j += 32) {
            all.other_order[j] = all.order[j < all.rivals ? j : all.rivals + place_of(all.keys[j - all.rivals])];
        }
        __syncwarp();
        unsigned* kept = all.order;
        all.order = all.other_order;
        all.other_order = kept;
        if (!meets(all, problem, high - 1)) {
            all.other_order = all.order;
            all.order = kept;
            break;
        }
        high--;
    }
    return high;
}

// Writes the first `kept` in ascending order of the index; returns how many values, more than `most` where they do not fit or
// one of them lets another token win.
__device__ __forceinline__ unsigned write_corrections(Candidates& all, const Problem& problem, unsigned kept, uint2* out, unsigned most) {
    const unsigned lane = threadIdx.x % 32;
    bool accepted = true;
    for (unsigned j = lane; j < kept; j += 32) {
        const unsigned c = all.order[j];
        all.keys[j] = sort_key(0xffffffffu - all.index[c], c);
        accepted = accepted && problem.accepts(all.values(c), problem.logprob(all.logit[c]), all.e[c]);
    }
    if (!__all_sync(FULL, accepted)) {
        return most + 1;
    }
    warp_sort(all.keys, kept);
    unsigned written = 0;
    for (unsigned first = 0; first < kept; first += 32) {
        const unsigned c = first + lane < kept ? place_of(all.keys[first + lane]) : 0;
        const Values v = all.values(c);
        const unsigned count = first + lane < kept ? v.count : 0;
        unsigned total;
        const unsigned at = written + warp_scan(count, total);
        if (count > 0 && at + count <= most) {
            out[at] = make_uint2(all.index[c], __float_as_uint(v.first));
            if (count > 1) {
                out[at + 1] = make_uint2(all.index[c], __float_as_uint(v.second));
            }
            if (count > 2) {
                out[at + 2] = make_uint2(all.index[c], __float_as_uint(v.third));
            }
        }
        written += total;
    }
    return written;
}

// All candidates that there are to try, in falling steps of d; false where they do not do. `most`: how many do.
__device__ __forceinline__ bool gather_enough(Candidates& all, const Problem& problem, unsigned& most) {
    most = all.rivals;
    if (meets(all, problem, most)) {
        return true;
    }
    double threshold = problem.target * problem.total / 4.0;
    for (;;) {
        most = count_above(all, threshold);
        const bool last = most == all.size;
        Estimate now = estimate(all, problem, most);
        if (now.upper <= problem.target) {
            return true;
        }
        if (problem.half && (now.lower > problem.target / 2.0 || last)) {
            now = choose_sides(all, problem, most, now);
            if (now.upper <= problem.target) {
                return true;
            }
        }
        const bool rounding_alone = now.lower > problem.target && now.upper - now.lower < problem.target / 10.0;
        if (problem.half && (rounding_alone || last) && extend(all, problem, most)) {
            return true;
        }
        if (last) {
            return false;
        }
        threshold /= 4.0;
    }
}

// The number of values written and the total variation that they leave; more than VALUES where there is no solution here.
__device__ __forceinline__ unsigned solve(Candidates& all, const Problem& problem, uint2* out, double& variation) {
    unsigned most;
    if (!gather_enough(all, problem, most)) {
        return VALUES + 1;
    }
    const unsigned kept = shrink(all, problem, most);
    variation = estimate(all, problem, kept).upper;
    return write_corrections(all, problem, kept, out, VALUES);
}

// Grid: draws, rows; a warp. Takes the draws with `low` to `high` candidates; dynamic shared memory: `high` of them.
NOISE_KERNEL(search, 32, 1)(const unsigned* positions, const unsigned long long* sequences, const uint2* keys, const unsigned* tokens,
                            const float* logits, unsigned long long stride, const RowState* states, const float* logprobs, const Found* found_all,
                            double target, double lead, unsigned condition, unsigned half, unsigned low, unsigned high, unsigned* counts,
                            double* variations, uint2* corrections) {
    const unsigned draw = blockIdx.x, row = blockIdx.y;
    const size_t list = static_cast<size_t>(row) * gridDim.x + draw;
    const Found& found = found_all[list];
    const Draw sums = found.draw;
    if (sums.count < low || sums.count > high) {
        return;
    }
    if (sums.broken != 0) {
        if (threadIdx.x == 0) {
            counts[list] = FALL_BACK;
            variations[list] = 0.0;
        }
        return;
    }
    DYNAMIC_SHARED(unsigned char, memory);
    SHARED(RestSums, rest, 1);
    Candidates all;
    all.place(memory, high);
    all.size = sums.count;
    const RowState state = states[row];
    Problem problem;
    double binned = 0.0;
    for (unsigned bin = threadIdx.x; bin < BINS; bin += 32) {
        rest[0].weight[bin] = found.rest.weight[bin];
        rest[0].excess[bin] = found.rest.excess[bin];
        binned += found.rest.excess[bin];
    }
    const float stored = logprobs[row];
    const double exact = logprob_of(state, logits[row * stride + tokens[row]]);
    problem.rest = rest;
    problem.e0 = auxiliary_exponential(stream_of(keys[draw], positions[row], sequences[row]));
    problem.total = sums.total_weight;
    problem.weight_x = weight_of_token(exact, problem.e0);
    problem.shift_x = weight_of_token(static_cast<double>(stored), problem.e0) - problem.weight_x;
    problem.rest_excess = sums.rest_excess;
    problem.bins_excess = warp_sum(binned);
    problem.target = target;
    problem.bar = bar_of(condition != 0, lead, exact, stored);
    problem.ln_z = state.ln_z;
    problem.max = state.max;
    problem.lowest = lowest_ratio(target);
    problem.half = half != 0;
    __syncwarp();
    load_candidates(all, problem, found);
    double variation = 0.0;
    const unsigned written = solve(all, problem, corrections + list * VALUES, variation);
    if (threadIdx.x == 0) {
        counts[list] = written > VALUES ? FALL_BACK : written;
        variations[list] = written > VALUES ? 0.0 : variation;
    }
}
NOISE_EXPORT(search)
