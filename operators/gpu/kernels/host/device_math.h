// Atomics, bits and arithmetic under CUDA's names. Part of emulation.h, which it is split from for its length.
#pragma once

#include <cmath>
#include <type_traits>

#include "types.h"

// Launches on several OS threads may share memory, so these are the CPU's atomics; before each, another fiber may run.

namespace stillhouse_host {

template <typename T, typename Change> inline T exchange_with(T* address, Change change) {
    using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    engine->preempt();
    Word* word = reinterpret_cast<Word*>(address);
    Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
    Word next;
    do {
        next = bit_cast<Word>(static_cast<T>(change(bit_cast<T>(old))));
    } while (!__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return bit_cast<T>(old);
}

}  // namespace stillhouse_host

#define STILLHOUSE_ATOMIC(name, type, expression)                                                                \
    static inline type name(type* address, type value) {                                                                \
        return stillhouse_host::exchange_with(address, [value]([[maybe_unused]] type old) { return expression; }); \
    }
#define STILLHOUSE_ATOMIC_INTEGER(type)                              \
    STILLHOUSE_ATOMIC(atomicMax, type, old > value ? old : value)    \
    STILLHOUSE_ATOMIC(atomicMin, type, old < value ? old : value)    \
    STILLHOUSE_ATOMIC(atomicOr, type, old | value)                   \
    STILLHOUSE_ATOMIC(atomicAnd, type, old & value)                  \
    STILLHOUSE_ATOMIC(atomicXor, type, old ^ value)                  \
    STILLHOUSE_ATOMIC(atomicExch, type, value)                       \
    static inline type atomicCAS(type* address, type compare, type value) { \
        return stillhouse_host::exchange_with(address, [=](type old) { return old == compare ? value : old; }); \
    }
STILLHOUSE_ATOMIC_INTEGER(unsigned)
STILLHOUSE_ATOMIC_INTEGER(int)
STILLHOUSE_ATOMIC_INTEGER(unsigned long long)
STILLHOUSE_ATOMIC(atomicAdd, unsigned, old + value)
// Signed sums wrap on the device.
STILLHOUSE_ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value)))
STILLHOUSE_ATOMIC(atomicAdd, unsigned long long, old + value)
STILLHOUSE_ATOMIC(atomicAdd, float, old + value)
STILLHOUSE_ATOMIC(atomicAdd, double, old + value)
STILLHOUSE_ATOMIC(atomicSub, unsigned, old - value)
STILLHOUSE_ATOMIC(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(value)))
STILLHOUSE_ATOMIC(atomicExch, float, value)
STILLHOUSE_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1)
#undef STILLHOUSE_ATOMIC
#undef STILLHOUSE_ATOMIC_INTEGER

// Bits.

static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline int __ffsll(long long value) { return __builtin_ffsll(value); }
static inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
static inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value)); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
static inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
__extension__ typedef unsigned __int128 stillhouse_uint128;
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<stillhouse_uint128>(a) * b >> 64);
}
static inline unsigned __brev(unsigned value) {
    value = (value >> 1 & 0x55555555u) | (value & 0x55555555u) << 1;
    value = (value >> 2 & 0x33333333u) | (value & 0x33333333u) << 2;
    value = (value >> 4 & 0x0f0f0f0fu) | (value & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(value);
}
static inline unsigned long long __brevll(unsigned long long value) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(value))) << 32 | __brev(static_cast<unsigned>(value >> 32));
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = selector >> (4 * i);
        const unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xffu;
        // The selector's top bit asks for copies of the byte's sign.
        result |= ((pick & 8) == 0 ? byte : (byte & 0x80u) != 0 ? 0xffu : 0u) << (8 * i);
    }
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}

static inline unsigned __float_as_uint(float value) { return stillhouse_host::bit_cast<unsigned>(value); }
static inline float __uint_as_float(unsigned value) { return stillhouse_host::bit_cast<float>(value); }
static inline int __float_as_int(float value) { return stillhouse_host::bit_cast<int>(value); }
static inline float __int_as_float(int value) { return stillhouse_host::bit_cast<float>(value); }
static inline long long __double_as_longlong(double value) { return stillhouse_host::bit_cast<long long>(value); }
static inline double __longlong_as_double(long long value) { return stillhouse_host::bit_cast<double>(value); }

// Arithmetic. Each operation rounds by itself: the build turns contraction off.

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }

// Macros where a C library has (or may get) a function of that name itself.
namespace stillhouse_host {
inline float reciprocal_root(float a) { return 1.0f / std::sqrt(a); }
inline double reciprocal_root_double(double a) { return 1.0 / std::sqrt(a); }
}  // namespace stillhouse_host
#define rsqrtf ::stillhouse_host::reciprocal_root
#define rsqrt ::stillhouse_host::reciprocal_root_double
#define __expf ::expf
#define __logf ::logf
#define __log2f ::log2f

static inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }

static inline float __int2float_rn(int value) { return static_cast<float>(value); }
static inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }
static inline double __hiloint2double(int high, int low) {
    return stillhouse_host::bit_cast<double>(uint64_t{static_cast<unsigned>(high)} << 32 | static_cast<unsigned>(low));
}
// To the nearest integer, ties to even; out of range goes to the nearest bound, NaN to 0, as on the device.
static inline int __float2int_rn(float value) {
    if (value != value) {
        return 0;
    }
    return value >= 0x1p31f ? INT32_MAX : value < -0x1p31f ? INT32_MIN : static_cast<int>(std::nearbyint(value));
}

// CUDA's own overloads: mixed signs compare as unsigned there too.
#define STILLHOUSE_MIN_MAX(result, left, right)               \
    static inline result min(left a, right b) {               \
        const result x = static_cast<result>(a);              \
        const result y = static_cast<result>(b);              \
        return x < y ? x : y;                                 \
    }                                                         \
    static inline result max(left a, right b) {               \
        const result x = static_cast<result>(a);              \
        const result y = static_cast<result>(b);              \
        return x > y ? x : y;                                 \
    }
STILLHOUSE_MIN_MAX(int, int, int)
STILLHOUSE_MIN_MAX(unsigned, unsigned, unsigned)
STILLHOUSE_MIN_MAX(unsigned, unsigned, int)
STILLHOUSE_MIN_MAX(unsigned, int, unsigned)
STILLHOUSE_MIN_MAX(long, long, long)
STILLHOUSE_MIN_MAX(unsigned long, unsigned long, unsigned long)
STILLHOUSE_MIN_MAX(long long, long long, long long)
STILLHOUSE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef STILLHOUSE_MIN_MAX
static inline float min(float a, float b) { return std::fmin(a, b); }
static inline float max(float a, float b) { return std::fmax(a, b); }
static inline double min(double a, double b) { return std::fmin(a, b); }
static inline double max(double a, double b) { return std::fmax(a, b); }

template <typename T> inline T __ldg(const T* address) { return *address; }
template <typename T> inline T __ldcs(const T* address) { return *address; }
template <typename T> inline T __ldcg(const T* address) { return *address; }
template <typename T> inline void __stcs(T* address, T value) { *address = value; }
template <typename T> inline void __stcg(T* address, T value) { *address = value; }
