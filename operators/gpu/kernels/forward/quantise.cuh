// Rows to e4m3. No guard: see ../fp8.cu.

typedef float f32;

constexpr float LARGEST = 448.0f;
// The least normal number of f32: the scale of a row that is so small, or zero.
constexpr float LEAST_SCALE = 1.17549435e-38f;

// Rounded to nearest, ties to even; what is larger than the largest is the largest.
__device__ __forceinline__ unsigned to_e4m3(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
#ifdef STILLHOUSE_BROKEN_ROUNDING
    const unsigned half = 0;
#else
    const unsigned half = 0x7ffffu + (size >> 20 & 1u);
#endif
    if (size >= __float_as_uint(LARGEST)) {
        return sign | 0x7eu;
    }
    if (size < __float_as_uint(0.015625f)) {
        // multiples of 2⁻⁹; eight of them are the least normal number, whose bits are 8
        return sign | static_cast<unsigned>(__float2int_rn(__uint_as_float(size) * 512.0f));
    }
    // three bits of the mantissa are left; the exponent's bias is 7 and not 127
    return sign | (((size + half) >> 20) - (120u << 3));
}

// The largest over a block, for all threads: the same in whatever order. `partial` holds 32.
__device__ __forceinline__ unsigned block_largest(unsigned value, unsigned* partial) {
    UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, value, distance);
        value = other > value ? other : value;
    }
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
#ifndef STILLHOUSE_BROKEN_REDUCTION
    __syncthreads();
#endif
    for (unsigned warp = 0; warp < blockDim.x / 32; warp++) {
        value = partial[warp] > value ? partial[warp] : value;
    }
    return value;
}

// A block for a row, whose width is a multiple of 16. A row with what is no number has a scale that is none.
template <typename T> __device__ __forceinline__ void quantise(const T* x, unsigned char* rows, float* scales, unsigned width) {
    constexpr unsigned W = ::forward::PER_VECTOR<T>;
    SHARED(unsigned, partial, 32);
    const T* row = x + size_t{blockIdx.x} * width;
    unsigned largest = 0;
    for (unsigned at = threadIdx.x * W; at < width; at += blockDim.x * W) {
        const ::forward::Values<W> values = ::forward::load<T, W>(row + at);
        UNROLL
        for (unsigned i = 0; i < W; i++) {
            // as numbers are ordered, so are their bits, and after them infinity and NaN
            const unsigned size = __float_as_uint(values.at[i]) & 0x7fffffffu;
            largest = size > largest ? size : largest;
        }
    }
    largest = block_largest(largest, partial);
    const bool finite = largest < 0x7f800000u;
    const float scale = finite ? fmaxf(__fdiv_rn(__uint_as_float(largest), LARGEST), LEAST_SCALE) : __uint_as_float(0x7fc00000u);
    for (unsigned at = threadIdx.x * W; at < width; at += blockDim.x * W) {
        const ::forward::Values<W> values = ::forward::load<T, W>(row + at);
        unsigned* to = reinterpret_cast<unsigned*>(rows + size_t{blockIdx.x} * width + at);
        UNROLL
        for (unsigned word = 0; word < W / 4; word++) {
            unsigned four = 0;
            UNROLL
            for (unsigned i = 0; i < 4; i++) {
                four |= (finite ? to_e4m3(__fdiv_rn(values.at[word * 4 + i], scale)) : 0u) << (8 * i);
            }
            to[word] = four;
        }
    }
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale;
    }
}
