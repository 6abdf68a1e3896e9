// CUDA's small vectors and 16-bit floats, with its rounding.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define STILLHOUSE_VECTOR2(name, type, bytes)                   \
    struct alignas(bytes) name {                                \
        type x, y;                                              \
    };                                                          \
    static inline name make_##name(type x, type y) { return {x, y}; }
#define STILLHOUSE_VECTOR4(name, type, bytes)                                             \
    struct alignas(bytes) name {                                                          \
        type x, y, z, w;                                                                  \
    };                                                                                    \
    static inline name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }

STILLHOUSE_VECTOR2(uchar2, unsigned char, 2)
STILLHOUSE_VECTOR4(uchar4, unsigned char, 4)
STILLHOUSE_VECTOR2(ushort2, unsigned short, 4)
STILLHOUSE_VECTOR4(ushort4, unsigned short, 8)
STILLHOUSE_VECTOR2(int2, int, 8)
STILLHOUSE_VECTOR4(int4, int, 16)
STILLHOUSE_VECTOR2(uint2, unsigned, 8)
STILLHOUSE_VECTOR4(uint4, unsigned, 16)
STILLHOUSE_VECTOR2(float2, float, 8)
STILLHOUSE_VECTOR4(float4, float, 16)
STILLHOUSE_VECTOR2(double2, double, 16)
STILLHOUSE_VECTOR2(longlong2, long long, 16)
STILLHOUSE_VECTOR2(ulonglong2, unsigned long long, 16)
#undef STILLHOUSE_VECTOR2
#undef STILLHOUSE_VECTOR4
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

namespace stillhouse_host {

template <typename To, typename From> inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace stillhouse_host

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

static inline unsigned short to_bits(bf16 value) { return value.bits; }
static inline unsigned short to_bits(f16 value) { return value.bits; }
template <typename T> inline T from_bits(unsigned short bits) { return T{bits}; }

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) { return stillhouse_host::bit_cast<float>(uint32_t{value.bits} << 16); }

static inline float to_float(f16 value) {
    const uint32_t sign = (value.bits & 0x8000u) << 16;
    const uint32_t rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00) {
        return stillhouse_host::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    }
    if (rest < 0x0400) {
        // Exact: the product of a small integer and a power of two.
        const float size = static_cast<float>(rest) * 0x1p-24f;
        return sign != 0 ? -size : size;
    }
    return stillhouse_host::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
}

// Round to nearest, ties to even; every NaN becomes 0x7fff, as the device's conversions have it.
template <typename T> inline T from_float(float value);

template <> inline float from_float<float>(float value) { return value; }

template <> inline bf16 from_float<bf16>(float value) {
    const uint32_t bits = stillhouse_host::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return {0x7fff};
    }
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

template <> inline f16 from_float<f16>(float value) {
    const uint32_t bits = stillhouse_host::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u) {
        return {0x7fff};
    }
    if (rest >= 0x47800000u) {
        half = 0x7c00;
    } else if (rest >= 0x38800000u) {
        // A carry out of the mantissa is the next exponent, up to infinity.
        half = (rest + 0xfffu + (rest >> 13 & 1) - 0x38000000u) >> 13;
    } else {
        // Floats just above 1/2 have the spacing of f16's subnormals, so the addition rounds.
        const float sum = stillhouse_host::bit_cast<float>(rest) + 0.5f;
        half = stillhouse_host::bit_cast<uint32_t>(sum) - 0x3f000000u;
    }
    return {static_cast<uint16_t>(sign | half)};
}

template <typename T> inline unsigned pack_pair(float low, float high) {
    return to_bits(from_float<T>(low)) | static_cast<unsigned>(to_bits(from_float<T>(high))) << 16;
}
