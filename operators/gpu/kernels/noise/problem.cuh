// Candidates of one (row, draw) in f64, and the total variation that a choice among them leaves. It follows operators/noise/src/replay;
// where that one reads the row again, the bins say what the rest adds at most.

// Candidates of one (row, draw), in shared memory; `most` of them, arrays one after another.
struct Candidates {
    double *weight, *excess, *error;
    unsigned long long* keys;
    float *first, *second, *third, *logit, *e;
    unsigned *index, *count, *order, *other_order;
    unsigned size, rivals;

    static constexpr unsigned BYTES = 4 * 8 + 9 * 4;

    __device__ __forceinline__ void place(unsigned char* memory, unsigned most) {
        weight = reinterpret_cast<double*>(memory);
        excess = weight + most;
        error = excess + most;
        keys = reinterpret_cast<unsigned long long*>(error + most);
        first = reinterpret_cast<float*>(keys + most);
        second = first + most;
        third = second + most;
        logit = third + most;
        e = logit + most;
        index = reinterpret_cast<unsigned*>(e + most);
        count = index + most;
        order = count + most;
        other_order = order + most;
    }
    __device__ __forceinline__ Values values(unsigned c) const { return {first[c], second[c], third[c], count[c]}; }
    __device__ __forceinline__ void store(unsigned c, const Values& v, double of_error) {
        first[c] = v.first;
        second[c] = v.second;
        third[c] = v.third;
        count[c] = v.count;
        error[c] = of_error;
    }
};

struct Estimate {
    // What x and the corrected entries add; with the most that all others can add.
    double lower, upper, a, g;
};

// What does not change during a search.
struct Problem {
    const RestSums* rest;
    double total, weight_x, shift_x, rest_excess, rest_weight, bins_excess;
    double target, bar, ln_z;
    float max, e0, lowest;
    bool half;

    __device__ __forceinline__ double logprob(float logit) const {
        return (static_cast<double>(logit) - static_cast<double>(max)) - ln_z;
    }
    __device__ __forceinline__ double least(double p, float e) const { return p * bar - static_cast<double>(e) / static_cast<double>(e0); }
    // δ of an entry with these values
    __device__ __forceinline__ double error(const Values& v, double logprob, float e, double weight) const {
        const double added = exp(logprob) * static_cast<double>(e0);
        const double shift = added * excess_over(v, logprob);
        return -shift * (1.0 / (static_cast<double>(e) + added + shift)) * weight;
    }
    __device__ __forceinline__ bool accepts(const Values& v, double logprob, float e) const {
        return sum_of(v) >= least(exp(logprob), e) * (1.0 - 1e-10);
    }
    // The rest but for its bins, over a.
    __device__ __forceinline__ double rest_outside(double rho) const {
        if (rho < 0.0) {
            return rest_excess - positive(rest_weight) * rho;
        }
        return rho < static_cast<double>(lowest) ? positive(rest_excess - bins_excess) : 0.0;
    }
};

// Sorts keys falling; all of them differ.
__device__ __noinline__ void warp_sort(unsigned long long* keys, unsigned size) {
    const unsigned lane = threadIdx.x % 32;
    unsigned padded = 2;
    while (padded < size) {
        padded *= 2;
    }
    for (unsigned i = size + lane; i < padded; i += 32) {
        keys[i] = 0;
    }
    __syncwarp();
    for (unsigned width = 2; width <= padded; width *= 2) {
        for (unsigned step = width / 2; step > 0; step /= 2) {
            for (unsigned pair = lane; pair < padded / 2; pair += 32) {
                const unsigned i = pair / step * step * 2 + pair % step, j = i + step;
                const unsigned long long a = keys[i], b = keys[j];
                if ((a < b) == ((i & width) == 0)) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
            __syncwarp();
        }
    }
}

__device__ __forceinline__ unsigned long long sort_key(unsigned major, unsigned place) {
    return static_cast<unsigned long long>(major) << 32 | (0xffffffffu - place);
}
__device__ __forceinline__ unsigned place_of(unsigned long long key) { return 0xffffffffu - static_cast<unsigned>(key); }
__device__ __forceinline__ unsigned rank_bits(double value) { return __float_as_uint(static_cast<float>(fabs(value))); }

// The total variation when the first `corrected` in the order are corrected.
__device__ __noinline__ Estimate estimate(const Candidates& all, const Problem& problem, unsigned corrected) {
    const unsigned lane = threadIdx.x % 32;
    double shift = 0.0;
    for (unsigned j = lane; j < all.size; j += 32) {
        const unsigned c = all.order[j];
        shift += j < corrected ? all.error[c] : all.excess[c];
    }
    shift = warp_sum(shift) + problem.rest_excess + problem.shift_x;
    Estimate out;
    out.a = 1.0 / (problem.total + shift);
    out.g = shift * out.a / problem.total;
    const double rho = shift / problem.total;
    double lower = 0.0, others = 0.0;
    for (unsigned j = lane; j < all.size; j += 32) {
        const unsigned c = all.order[j];
        if (j < corrected) {
            lower += positive(all.error[c] * out.a - all.weight[c] * out.g);
        } else {
            others += positive(all.excess[c] * out.a - all.weight[c] * out.g);
        }
    }
    double rest = 0.0;
    if (rho >= 0.0) {
        for (unsigned bin = lane; bin < BINS; bin += 32) {
            rest += bin_surplus(*problem.rest, problem.lowest, bin, rho);
        }
    }
    others += rest * out.a;
    out.lower = warp_sum(lower) + positive(problem.shift_x * out.a - problem.weight_x * out.g);
    out.upper = out.lower + warp_sum(others) + problem.rest_outside(rho) * out.a;
    return out;
}

__device__ __forceinline__ bool meets(const Candidates& all, const Problem& problem, unsigned corrected) {
    return estimate(all, problem, corrected).upper <= problem.target;
}

// Takes the entries in, with everything about them, rivals first, then by falling d. False where an entry cannot be made to lose.
__device__ __forceinline__ void load_candidates(Candidates& all, Problem& problem, const Found& found) {
    const unsigned lane = threadIdx.x % 32;
    const double e0 = static_cast<double>(problem.e0);
    double weights = 0.0;
    unsigned rivals = 0;
    for (unsigned c = lane; c < all.size; c += 32) {
        const Entry entry = found.entries[c];
        const double logprob = problem.logprob(entry.logit), p = exp(logprob), e = static_cast<double>(entry.e);
        const double added = p * e0, weight = 1.0 / (e + added), excess = added / e * weight;
        const double least = problem.least(p, entry.e);
        Values v = single_value(round_value(problem.half, logprob));
        if (!problem.accepts(v, logprob, entry.e)) {
            Values covering;
            for (unsigned count = 1; count <= 3; count++) {
                if (covering_value(least, problem.half, count, covering)) {
                    v = covering;
                    break;
                }
            }
        }
        all.index[c] = entry.index & ~MAY_WIN;
        all.logit[c] = entry.logit;
        all.e[c] = entry.e;
        all.weight[c] = weight;
        all.excess[c] = excess;
        all.store(c, v, problem.error(v, logprob, entry.e, weight));
        weights += weight;
        rivals += least > 0.0 ? 1 : 0;
        all.keys[c] = sort_key(rank_bits(excess) | (least > 0.0 ? 0x80000000u : 0u), c);
    }
    problem.rest_weight = problem.total - problem.weight_x - warp_sum(weights);
    all.rivals = __reduce_add_sync(FULL, rivals);
    __syncwarp();
    warp_sort(all.keys, all.size);
    for (unsigned j = lane; j < all.size; j += 32) {
        all.order[j] = place_of(all.keys[j]);
    }
    __syncwarp();
}
