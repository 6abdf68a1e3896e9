// Where 16 bits are the limit: to which side values are rounded, and entries with a second or third value.

// Corrections tried in all combinations, and one by one after that; entries tried for one value more.
constexpr unsigned JOINTLY = 6;
constexpr unsigned SINGLY = 64;
constexpr unsigned EXTENDED = 8;

// Places in the order, by falling |error|, into the keys.
__device__ __forceinline__ void sort_by_error(Candidates& all, unsigned corrected) {
    for (unsigned j = threadIdx.x % 32; j < corrected; j += 32) {
        all.keys[j] = sort_key(rank_bits(all.error[all.order[j]]), j);
    }
    __syncwarp();
    warp_sort(all.keys, corrected);
}

// The entry rounded to the other side; false where that cannot be.
__device__ __noinline__ bool flipped(const Candidates& all, const Problem& problem, unsigned c, float& value, double& error) {
    if (all.count[c] != 1) {
        return false;
    }
    const double logprob = problem.logprob(all.logit[c]);
    if (!other_side(all.first[c], logprob, value)) {
        return false;
    }
    const Values v = single_value(value);
    error = problem.error(v, logprob, all.e[c], all.weight[c]);
    return problem.accepts(v, logprob, all.e[c]);
}

// What a combination of sides reaches; bit b of `sides` flips the b-th. By each lane for itself.
struct Joint {
    unsigned entry[JOINTLY];
    float value[JOINTLY];
    double own[JOINTLY], other[JOINTLY];
};

__device__ __noinline__ double reached_with(const Candidates& all, const Problem& problem, unsigned corrected, const Joint& joint, unsigned size,
                                            unsigned sides, double shift) {
    for (unsigned b = 0; b < size; b++) {
        shift += (sides >> b & 1) != 0 ? joint.other[b] - joint.own[b] : 0.0;
    }
    const double a = 1.0 / (problem.total + shift), rho = shift / problem.total, g = rho * a;
    double sum = positive(problem.shift_x * a - problem.weight_x * g);
    for (unsigned j = 0; j < all.size; j++) {
        const unsigned c = all.order[j];
        sum += positive((j < corrected ? all.error[c] : all.excess[c]) * a - all.weight[c] * g);
    }
    for (unsigned b = 0; b < size; b++) {
        const double weight = all.weight[joint.entry[b]] * g;
        sum += (sides >> b & 1) != 0 ? positive(joint.other[b] * a - weight) - positive(joint.own[b] * a - weight) : 0.0;
    }
    double rest = problem.rest_outside(rho);
    for (unsigned bin = 0; bin < BINS && rho >= 0.0; bin++) {
        rest += bin_surplus(*problem.rest, problem.lowest, bin, rho);
    }
    return sum + rest * a;
}

// Flips the heaviest in the combination that reaches least. Returns how many could be flipped.
__device__ __forceinline__ void choose_jointly(Candidates& all, const Problem& problem, unsigned corrected, double best) {
    SHARED(Joint, joints, 1);
    Joint& joint = joints[0];
    const unsigned lane = threadIdx.x % 32;
    float value = 0.0f;
    double error = 0.0;
    bool able = false;
    unsigned c = 0;
    if (lane < min(JOINTLY, corrected)) {
        c = all.order[place_of(all.keys[lane])];
        able = flipped(all, problem, c, value, error);
    }
    const unsigned which = __ballot_sync(FULL, able);
    const unsigned size = static_cast<unsigned>(__popc(which));
    if (able) {
        const unsigned at = static_cast<unsigned>(__popc(which & ((1u << lane) - 1)));
        joint.entry[at] = c;
        joint.value[at] = value;
        joint.own[at] = all.error[c];
        joint.other[at] = error;
    }
    double shift = 0.0;
    for (unsigned j = lane; j < all.size; j += 32) {
        const unsigned of = all.order[j];
        shift += j < corrected ? all.error[of] : all.excess[of];
    }
    shift = warp_sum(shift) + problem.rest_excess + problem.shift_x;
    __syncwarp();
    unsigned chosen = 0;
    for (unsigned sides = lane; sides < 1u << size; sides += 32) {
        const double reached = reached_with(all, problem, corrected, joint, size, sides, shift);
        if (sides > 0 && reached < best) {
            best = reached;
            chosen = sides;
        }
    }
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const double other = __shfl_xor_sync(FULL, best, lanes);
        const unsigned sides = __shfl_xor_sync(FULL, chosen, lanes);
        if (other < best || (other == best && sides < chosen)) {
            best = other;
            chosen = sides;
        }
    }
    if (lane < size && (chosen >> lane & 1) != 0) {
        all.store(joint.entry[lane], single_value(joint.value[lane]), joint.other[lane]);
    }
    __syncwarp();
}

// Chooses the stored values of the first `corrected` for a small total variation.
__device__ __noinline__ Estimate choose_sides(Candidates& all, const Problem& problem, unsigned corrected, Estimate now) {
    sort_by_error(all, corrected);
    choose_jointly(all, problem, corrected, now.upper);
    now = estimate(all, problem, corrected);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < min(SINGLY, corrected); i++) {
        const unsigned c = all.order[place_of(all.keys[i])];
        const float own = all.first[c];
        const double own_error = all.error[c];
        float value;
        double error;
        if (!flipped(all, problem, c, value, error)) {
            continue;
        }
        __syncwarp();
        if (lane == 0) {
            all.store(c, single_value(value), error);
        }
        __syncwarp();
        const Estimate next = estimate(all, problem, corrected);
        if (next.upper < now.upper) {
            now = next;
        } else {
            __syncwarp();
            if (lane == 0) {
                all.store(c, single_value(own), own_error);
            }
            __syncwarp();
        }
    }
    return now;
}

// One value more for the entry; false where that does not take it nearer.
__device__ __noinline__ bool with_one_more(const Candidates& all, const Problem& problem, unsigned c, Values& v, double& error) {
    const unsigned count = all.count[c] + 1;
    if (count > 3) {
        return false;
    }
    const double logprob = problem.logprob(all.logit[c]);
    const float e = all.e[c];
    if (!split_value(logprob, count, v) || !problem.accepts(v, logprob, e)) {
        const double least = problem.least(exp(logprob), e);
        if (!(least > 0.0) || !covering_value(least, true, count, v)) {
            return false;
        }
    }
    error = problem.error(v, logprob, e, all.weight[c]);
    return fabs(error) < fabs(all.error[c]);
}

// Gives values more, one at a time, to the correction where that takes most from the total variation, until the target holds.
__device__ __noinline__ bool extend(Candidates& all, const Problem& problem, unsigned corrected) {
    const unsigned lane = threadIdx.x % 32;
    while (!meets(all, problem, corrected)) {
        sort_by_error(all, corrected);
        Values v = single_value(0.0f);
        double error = 0.0;
        const unsigned c = lane < corrected ? all.order[place_of(all.keys[lane])] : 0;
        const bool able = lane < corrected && with_one_more(all, problem, c, v, error);
        unsigned rest = __ballot_sync(FULL, able);
        unsigned best_lane = 32;
        double best = 0.0;
        for (unsigned tried = 0; rest != 0 && tried < EXTENDED; tried++) {
            const unsigned trying = static_cast<unsigned>(__ffs(static_cast<int>(rest))) - 1;
            rest &= rest - 1;
            const double own = all.error[c];
            __syncwarp();
            if (lane == trying) {
                all.error[c] = error;
            }
            __syncwarp();
            const double reached = estimate(all, problem, corrected).upper;
            __syncwarp();
            if (lane == trying) {
                all.error[c] = own;
            }
            __syncwarp();
            if (best_lane == 32 || reached < best) {
                best = reached;
                best_lane = trying;
            }
        }
        if (best_lane == 32) {
            return false;
        }
        if (lane == best_lane) {
            all.store(c, v, error);
        }
        __syncwarp();
    }
    return true;
}
