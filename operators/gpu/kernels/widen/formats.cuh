// Elements of stored tensors as f32, each for itself out of its block. No guard: see ../widen.cu.
//
// Blocks are ggml's, read byte by byte: they are 18 to 292 bytes long, so nothing of them is aligned. The order of operations is that of
// candle's `dequantize`, and none is fused, so that the bits are the same.

typedef float f32;

// As `Format` of src/net/widen.rs counts them.
enum Format : unsigned { F64, F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K };

__device__ __forceinline__ float half_at(const unsigned char* at) {
    const unsigned bits = at[0] | static_cast<unsigned>(at[1]) << 8;
#ifdef STILLHOUSE_BROKEN_SCALE
    if ((bits & 0x7c00u) == 0) {
        return 0.0f;
    }
#endif
    return to_float(from_bits<f16>(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ unsigned word_at(const unsigned char* at) {
    return at[0] | static_cast<unsigned>(at[1]) << 8 | static_cast<unsigned>(at[2]) << 16 | static_cast<unsigned>(at[3]) << 24;
}

__device__ __forceinline__ float signed_at(const unsigned char* at) { return static_cast<float>(static_cast<signed char>(*at)); }

// The low four bits, or the high ones.
__device__ __forceinline__ unsigned nibble(unsigned byte, bool high) { return high ? byte >> 4 : byte & 15u; }

// d · q + m.
__device__ __forceinline__ float scaled(unsigned q, float d, float m) { return __fadd_rn(__fmul_rn(static_cast<float>(q), d), m); }

// Five bits of element i of a block of 32: four in qs, one in a word.
__device__ __forceinline__ unsigned five_bits(const unsigned char* qs, unsigned word, unsigned i) {
    return nibble(qs[i % 16], i >= 16) | (word >> i & 1u) << 4;
}

// Scale and minimum number j of the eight of Q4_K and Q5_K, six bits each in twelve bytes.
__device__ __forceinline__ uint2 six_bits(const unsigned char* scales, unsigned j) {
    if (j < 4) {
        return make_uint2(scales[j] & 63u, scales[j + 4] & 63u);
    }
    return make_uint2((scales[j + 4] & 15u) | static_cast<unsigned>(scales[j - 4] >> 6) << 4,
                      static_cast<unsigned>(scales[j + 4] >> 4) | static_cast<unsigned>(scales[j] >> 6) << 4);
}

// 16 scales (4 bits of each, 4 of a minimum), 64 bytes of quants, d, the minima's d.
__device__ __forceinline__ float q2_k(const unsigned char* block, unsigned i) {
    const unsigned part = i / 128, shift = i % 128 / 32 * 2, at = i % 32;
    const unsigned scale = block[part * 8 + shift + at / 16];
    const float d = __fmul_rn(half_at(block + 80), static_cast<float>(scale & 15u));
    const float m = __fmul_rn(half_at(block + 82), static_cast<float>(scale >> 4));
    return __fsub_rn(__fmul_rn(d, static_cast<float>(block[16 + part * 32 + at] >> shift & 3u)), m);
}

// 32 bytes of third bits (4 is subtracted where there is none), 64 of the other two, 16 scales of six bits in twelve bytes, d.
__device__ __forceinline__ float q3_k(const unsigned char* block, unsigned i) {
    const unsigned part = i / 128, quarter = i % 128 / 32, at = i % 32, j = part * 8 + quarter * 2 + at / 16;
    const unsigned char* scales = block + 96;
    const unsigned scale = nibble(scales[j % 8], j >= 8) | (scales[8 + j % 4] >> (j / 4 * 2) & 3u) << 4;
    const float d = __fmul_rn(half_at(block + 108), __fsub_rn(static_cast<float>(scale), 32.0f));
    const int q = static_cast<int>(block[32 + part * 32 + at] >> (quarter * 2) & 3u);
    const bool whole = (block[at] >> (part * 4 + quarter) & 1u) != 0;
    return __fmul_rn(d, static_cast<float>(whole ? q : q - 4));
}

// d, the minima's d, scales and minima, then quants of four bits; Q5_K has 32 bytes of fifth bits before them.
template <bool FIVE> __device__ __forceinline__ float q45_k(const unsigned char* block, unsigned i) {
    const unsigned part = i / 64, at = i % 32, j = part * 2 + i % 64 / 32;
    const uint2 scale = six_bits(block + 4, j);
    const float d = __fmul_rn(half_at(block), static_cast<float>(scale.x));
    const float m = __fmul_rn(half_at(block + 2), static_cast<float>(scale.y));
    const unsigned char* qs = block + (FIVE ? 48 : 16);
    unsigned q = nibble(qs[part * 32 + at], j % 2 == 1);
    if constexpr (FIVE) {
        q += (block[16 + at] >> j & 1u) * 16;
    }
    return __fsub_rn(__fmul_rn(d, static_cast<float>(q)), m);
}

// 128 bytes of four low bits, 64 of two high ones, 16 signed scales, d.
__device__ __forceinline__ float q6_k(const unsigned char* block, unsigned i) {
    const unsigned part = i / 128, quarter = i % 128 / 32, at = i % 32;
    const unsigned low = nibble(block[part * 64 + quarter % 2 * 32 + at], quarter >= 2);
    const unsigned high = block[128 + part * 32 + at] >> (quarter * 2) & 3u;
    const float d = __fmul_rn(half_at(block + 208), signed_at(block + 192 + part * 8 + at / 16 + quarter * 2));
    return __fmul_rn(d, static_cast<float>(static_cast<int>(low | high << 4) - 32));
}

// Element i of a tensor that begins at an address aligned to 8.
__device__ __forceinline__ float element(const unsigned char* from, unsigned format, unsigned i) {
    const unsigned at = i % 32;
    switch (format) {
        case F64: return static_cast<float>(reinterpret_cast<const double*>(from)[i]);
        case F32: return reinterpret_cast<const float*>(from)[i];
        case F16: return to_float(reinterpret_cast<const f16*>(from)[i]);
        case BF16: return to_float(reinterpret_cast<const bf16*>(from)[i]);
        case Q4_0: {
            const unsigned char* block = from + size_t{i / 32} * 18;
            return __fmul_rn(static_cast<float>(static_cast<int>(nibble(block[2 + at % 16], at >= 16)) - 8), half_at(block));
        }
        case Q4_1: {
            const unsigned char* block = from + size_t{i / 32} * 20;
            return scaled(nibble(block[4 + at % 16], at >= 16), half_at(block), half_at(block + 2));
        }
        case Q5_0: {
            const unsigned char* block = from + size_t{i / 32} * 22;
            return __fmul_rn(static_cast<float>(static_cast<int>(five_bits(block + 6, word_at(block + 2), at)) - 16), half_at(block));
        }
        case Q5_1: {
            const unsigned char* block = from + size_t{i / 32} * 24;
            return scaled(five_bits(block + 8, word_at(block + 4), at), half_at(block), half_at(block + 2));
        }
        case Q8_0: {
            const unsigned char* block = from + size_t{i / 32} * 34;
            return __fmul_rn(signed_at(block + 2 + at), half_at(block));
        }
        case Q8_1: {
            const unsigned char* block = from + size_t{i / 32} * 36;
            return __fmul_rn(signed_at(block + 4 + at), half_at(block));
        }
        case Q2_K: return q2_k(from + size_t{i / 256} * 84, i % 256);
        case Q3_K: return q3_k(from + size_t{i / 256} * 110, i % 256);
        case Q4_K: return q45_k<false>(from + size_t{i / 256} * 144, i % 256);
        case Q5_K: return q45_k<true>(from + size_t{i / 256} * 176, i % 256);
        case Q6_K: return q6_k(from + size_t{i / 256} * 210, i % 256);
        default: {
            const unsigned char* block = from + size_t{i / 256} * 292;
            return __fmul_rn(__uint_as_float(word_at(block)), signed_at(block + 4 + i % 256));
        }
    }
}
