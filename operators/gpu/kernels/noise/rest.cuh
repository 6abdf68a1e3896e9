// What the entries without a correction add to the total variation, Σ (d·a − w·g)⁺, for any a and g, without reading them again.
//
//     r = d/w = p_k·e_0/e_k     an entry adds something where r > ρ = g/a
//
//     r:  0 ──────────── r_0 ──┬──┬──┬──┬──┬──┬──►      Σw and Σd of every bin; below r_0 (target/32) no entry matters
//          not in a bin         four bins an octave      unless ρ is smaller still
//
// In the bin that holds ρ, the entries that would add most with its Σw and Σd lie on its two edges. Everything else is exact, but for
// units of 2^-30 of the smallest sums: whole numbers, so that the order of the additions makes no difference.

constexpr unsigned BINS = 64;
// Bits of an f32 below which bins do not tell: four bins an octave.
constexpr unsigned BIN_SHIFT = 21;
constexpr float UNITS = 1073741824.0f;
// More than this in one entry is more than the sums have room for.
constexpr float MOST_UNITS = 1.7592186044416e13f;

// Two words each, so that shared memory's own 32-bit additions do.
struct Bins {
    unsigned weight[2 * BINS];
    unsigned excess[2 * BINS];
};

struct RestScale {
    // r_0, a power of two.
    float lowest;
    // Units of a weight, of an excess.
    float of_weight, of_excess;
};

__device__ __forceinline__ float lowest_ratio(double target) {
    return __uint_as_float(__float_as_uint(static_cast<float>(target) / 32.0f) & 0x7f800000u);
}

__device__ __forceinline__ void add_wide(unsigned* words, unsigned long long value) {
    const unsigned low = static_cast<unsigned>(value);
    const unsigned before = atomicAdd(&words[0], low);
    const unsigned high = static_cast<unsigned>(value >> 32) + (before + low < before ? 1u : 0u);
    if (high != 0) {
        atomicAdd(&words[1], high);
    }
}

// One entry without a correction. False where it is too large.
__device__ __forceinline__ bool bin_entry(Bins& bins, const RestScale& scale, float ratio, float w, float d) {
    const unsigned first = __float_as_uint(scale.lowest) >> BIN_SHIFT;
    const unsigned bin = min((__float_as_uint(ratio) >> BIN_SHIFT) - first, BINS - 1);
    const float weight = mul(w, scale.of_weight), excess = mul(d, scale.of_excess);
    if (!(weight < MOST_UNITS && excess < MOST_UNITS)) {
        return false;
    }
    add_wide(&bins.weight[2 * bin], static_cast<unsigned long long>(weight));
    add_wide(&bins.excess[2 * bin], static_cast<unsigned long long>(excess) + 1);
    return true;
}

__device__ __forceinline__ double bin_edge(float lowest, unsigned bin) {
    return static_cast<double>(__uint_as_float(__float_as_uint(lowest) + (bin << BIN_SHIFT)));
}

// Sums of the bins as they are stored between the two kernels.
struct RestSums {
    double weight[BINS];
    double excess[BINS];
};

// The most that a bin adds, over a.
__device__ __forceinline__ double bin_surplus(const RestSums& sums, float lowest, unsigned bin, double rho) {
    // a ratio in f32 may lie this far outside of its bin
    const double low = bin_edge(lowest, bin) * (1.0 - 2e-6), high = bin_edge(lowest, bin + 1) * (1.0 + 2e-6);
    const double weight = sums.weight[bin], excess = sums.excess[bin];
    if (rho <= low) {
        return positive(excess - weight * rho);
    }
    if (bin == BINS - 1) {
        return excess;
    }
    if (rho >= high) {
        return 0.0;
    }
    const double above = positive(excess - low * weight) / (high - low);
    return min(above * (high - rho), excess);
}
