// Stored values of one entry: one, or up to three whose exponentials add up to p_k where one of 16 bits is too coarse. See
// operators/noise/src/replay/rounding.rs, which this follows.

struct Values {
    float first, second, third;
    unsigned count;
};

__device__ __forceinline__ Values single_value(float value) { return {value, 0.0f, 0.0f, 1}; }

// p̂.
__device__ __forceinline__ double sum_of(const Values& v) {
    double sum = exp(static_cast<double>(v.first));
    if (v.count > 1) {
        sum += exp(static_cast<double>(v.second));
    }
    if (v.count > 2) {
        sum += exp(static_cast<double>(v.third));
    }
    return sum;
}

// p̂/p − 1, without the cancellation.
__device__ __forceinline__ double excess_over(const Values& v, double logprob) {
    double sum = expm1(static_cast<double>(v.first) - logprob);
    if (v.count > 1) {
        sum += exp(static_cast<double>(v.second) - logprob);
    }
    if (v.count > 2) {
        sum += exp(static_cast<double>(v.third) - logprob);
    }
    return sum;
}

__device__ __forceinline__ bool finite(float value) { return fabsf(value) < INFINITY; }

// Falling; false where one is not finite.
__device__ __forceinline__ bool finished(Values& v) {
    if (v.count > 2 && v.third > v.second) {
        const float kept = v.second;
        v.second = v.third;
        v.third = kept;
    }
    if (v.count > 1 && v.second > v.first) {
        const float kept = v.first;
        v.first = v.second;
        v.second = kept;
    }
    if (v.count > 2 && v.third > v.second) {
        const float kept = v.second;
        v.second = v.third;
        v.third = kept;
    }
    return finite(v.first) && (v.count < 2 || finite(v.second)) && (v.count < 3 || finite(v.third));
}

__device__ __forceinline__ void set_value(Values& v, unsigned i, float value) {
    v.first = i == 0 ? value : v.first;
    v.second = i == 1 ? value : v.second;
    v.third = i == 2 ? value : v.third;
}

// The 16-bit value on the other side of `exact` ≤ 0, to which `rounded` is a neighbour; false if there is none up to 0.
__device__ __forceinline__ bool other_side(float rounded, double exact, float& other) {
    other = next_value(true, rounded, static_cast<double>(rounded) < exact);
    return finite(other) && other <= 0.0f;
}

// ln p in `count` values of 16 bits; false where fewer say it exactly, or more are not to be had.
__device__ __noinline__ bool split_value(double logprob, unsigned count, Values& out) {
    out = {0.0f, 0.0f, 0.0f, count};
    double left = 1.0;
    for (unsigned i = 0; i < count; i++) {
        const double exact = logprob + log(left);
        float value = round_value(true, exact);
        if (i + 1 < count && static_cast<double>(value) > exact) {
            float other;
            if (!other_side(value, exact, other)) {
                return false;
            }
            value = other;
        }
        set_value(out, i, value);
        left -= exp(static_cast<double>(value) - logprob);
        if (i + 1 < count && left <= 0.0) {
            return false;
        }
    }
    return count <= 3 && finished(out);
}

// The least values, none above 0, that add up to `least` or more: exactly `count` of them.
__device__ __noinline__ bool covering_value(double least, bool half, unsigned count, Values& out) {
    out = {0.0f, 0.0f, 0.0f, count};
    double left = least;
    for (unsigned i = 0; i < count; i++) {
        const double exact = log(left);
        const float value = i + 1 < count ? floor_value(half, min(exact, 0.0)) : ceil_value(half, exact);
        set_value(out, i, value);
        left -= exp(static_cast<double>(value));
        if (value > 0.0f || (i + 1 < count && left <= 0.0)) {
            return false;
        }
    }
    return count <= 3 && finished(out);
}
