// Random words, exponentials and logarithms with the bits that operators/noise has on a CPU. No multiplication is fused with a
// sum, whatever the compiler's flags are: that is what the intrinsics are for.

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }

// Philox.

struct Stream {
    unsigned key0, key1, position, low, high;
};

__device__ __forceinline__ uint4 philox(const Stream& stream, unsigned c0) {
    unsigned k0 = stream.key0, k1 = stream.key1;
    uint4 c = make_uint4(c0, stream.position, stream.low, stream.high);
    UNROLL
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(c.x, 0xD2511F53u), low0 = c.x * 0xD2511F53u;
        const unsigned high1 = __umulhi(c.z, 0xCD9E8D57u), low1 = c.z * 0xCD9E8D57u;
        c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// Functions of f32: the polynomials of math.rs, in their order.

constexpr float EXP_FLUSH = -60.0f;

__device__ __forceinline__ float exp_f32(float x) {
    const float magic = 12582912.0f;
    const float clamped = x < EXP_FLUSH ? EXP_FLUSH : x;
    const float shifted = add(mul(clamped, 1.44269504088896340736f), magic);
    const float n = sub(shifted, magic);
    const float r = sub(sub(clamped, mul(n, 0.6933594f)), mul(n, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = add(mul(p, r), 1.3981999e-3f);
    p = add(mul(p, r), 8.333452e-3f);
    p = add(mul(p, r), 4.1665796e-2f);
    p = add(mul(p, r), 1.6666665e-1f);
    p = add(mul(p, r), 0.5f);
    const float y = add(add(mul(mul(p, r), r), r), 1.0f);
    const float scale = __uint_as_float((__float_as_uint(shifted) - __float_as_uint(magic) + 127u) << 23);
    return x < EXP_FLUSH ? 0.0f : mul(y, scale);
}

__device__ __forceinline__ float ln_1p_reduced(float f, float n) {
    const float z = mul(f, f);
    float p = 7.0376836e-2f;
    p = sub(mul(p, f), 1.151461e-1f);
    p = add(mul(p, f), 1.1676999e-1f);
    p = sub(mul(p, f), 1.2420141e-1f);
    p = add(mul(p, f), 1.4249323e-1f);
    p = sub(mul(p, f), 1.6668058e-1f);
    p = add(mul(p, f), 2.0000715e-1f);
    p = sub(mul(p, f), 2.4999994e-1f);
    p = add(mul(p, f), 3.333333e-1f);
    const float tail = sub(add(mul(mul(p, f), z), mul(n, -2.1219444e-4f)), mul(0.5f, z));
    return add(add(f, tail), mul(n, 0.6933594f));
}

__device__ __forceinline__ void reduce_ln(float y, float& f, float& n) {
    const unsigned bits = __float_as_uint(y);
    const int exponent = static_cast<int>(bits - 0x3f3504f3u) >> 23;
    f = sub(__uint_as_float(bits - (static_cast<unsigned>(exponent) << 23)), 1.0f);
    n = __int2float_rn(exponent);
}

__device__ __forceinline__ float ln_f32(float y) {
    float f, n;
    reduce_ln(y, f, n);
    return ln_1p_reduced(f, n);
}

__device__ __forceinline__ float exponential_from_word(unsigned r) {
    const float from_word = -mul(add(__uint2float_rn(r), 0.5f), 2.3283064e-10f);
    float f, n;
    reduce_ln(add(__uint2float_rn(~r), 0.5f), f, n);
    const bool near_one = r < 1257966796u;
    return -ln_1p_reduced(near_one ? from_word : f, near_one ? 0.0f : sub(n, 32.0f));
}

__device__ __forceinline__ float auxiliary_exponential(const Stream& stream) {
    return exponential_from_word(philox(stream, 0xFFFFFFFFu).x);
}

// Stored values: 16 bits where `half`.

__device__ __forceinline__ float round_value(bool half, double value) {
    const float single = static_cast<float>(value);
    return half ? to_float(from_float<f16>(single)) : single;
}

// The value of the type next to this one, which is no NaN.
__device__ __forceinline__ float next_value(bool half, float value, bool up) {
    if (half) {
        const unsigned bits = to_bits(from_float<f16>(value));
        const bool positive = (bits & 0x8000u) == 0;
        const unsigned next = (bits & 0x7fffu) == 0 ? (up ? 1u : 0x8001u) : positive == up ? bits + 1 : bits - 1;
        return to_float(from_bits<f16>(static_cast<unsigned short>(next)));
    }
    const unsigned bits = __float_as_uint(value);
    const bool positive = (bits & 0x80000000u) == 0;
    return __uint_as_float((bits & 0x7fffffffu) == 0 ? (up ? 1u : 0x80000001u) : positive == up ? bits + 1 : bits - 1);
}

__device__ __forceinline__ float floor_value(bool half, double value) {
    const float nearest = round_value(half, value);
    return static_cast<double>(nearest) > value ? next_value(half, nearest, false) : nearest;
}

__device__ __forceinline__ float ceil_value(bool half, double value) {
    const float nearest = round_value(half, value);
    return static_cast<double>(nearest) < value ? next_value(half, nearest, true) : nearest;
}

// w_x = 1/(p_x·e_0) from logarithms; the bound is where all other weights are nothing beside it.
__device__ __forceinline__ double weight_of_token(double logprob, float e0) {
    return exp(min(-logprob - log(static_cast<double>(e0)), 650.0));
}

__device__ __forceinline__ double positive(double value) { return value > 0.0 ? value : 0.0; }
