// CUDA's names for a plain C++ compiler: a kernel's source runs on the CPU as it stands. See ../portable.cuh.
#pragma once

// The names without `std::` too, of which <cmath> promises none.
#include <math.h>

#include <cmath>
#include <type_traits>
#include <utility>

#include "block.h"
#include "tensor.h"
#include "types.h"

// Kernels by name. The list is complete before `main`: it is never written afterwards.

namespace stillhouse_host {

struct Kernel {
    const char* name;
    Entry entry;
    unsigned max_threads;
    const Kernel* next;
};

inline const Kernel*& kernels() {
    static const Kernel* first = nullptr;
    return first;
}

struct Registration {
    Kernel kernel;
    Registration(const char* name, Entry entry, unsigned max_threads) : kernel{name, entry, max_threads, kernels()} { kernels() = &kernel; }
};

template <auto FUNCTION> struct Trampoline;
template <typename... Args, void (*FUNCTION)(Args...)> struct Trampoline<FUNCTION> {
    template <size_t... I> static void unpack([[maybe_unused]] void** args, std::index_sequence<I...>) {
        FUNCTION(*static_cast<std::remove_reference_t<Args>*>(args[I])...);
    }
    static void enter(void** args) { unpack(args, std::index_sequence_for<Args...>{}); }
};

template <typename T> inline T* shared_array(const void* site, size_t count) {
    return static_cast<T*>(engine->shared_array(site, sizeof(T) * count));
}

}  // namespace stillhouse_host

#define KERNEL_BOUNDS(name, threads, blocks_per_sm)                        \
    static constexpr unsigned name##_max_threads = (threads);              \
    static_assert((blocks_per_sm) >= 0, "blocks per multiprocessor");      \
    static void name
#define KERNEL(name) KERNEL_BOUNDS(name, 1024, 1)
#define EXPORT(name) \
    static const ::stillhouse_host::Registration name##_registration(#name, ::stillhouse_host::Trampoline<&name>::enter, name##_max_threads);
#define UNROLL
#define UNROLL_BY(times)

#define SHARED(type, name, ...)                                                                              \
    static char name##_site;                                                                                 \
    using name##_array = type[__VA_ARGS__];                                                                  \
    name##_array& name = *::stillhouse_host::shared_array<name##_array>(&name##_site, 1)
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::stillhouse_host::engine->dynamic_shared())

// Helpers that only some kernels use are no warning.
#define __device__ __attribute__((unused))
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)

#define threadIdx (::stillhouse_host::engine->fiber->thread)
#define blockIdx (::stillhouse_host::engine->block_index)
#define blockDim (::stillhouse_host::engine->block_size)
#define gridDim (::stillhouse_host::engine->grid_size)
constexpr int warpSize = 32;

// Barriers of the block. Kinds do not meet each other.

namespace stillhouse_host {
constexpr char SYNC = 0, SYNC_OR = 1, SYNC_AND = 2, SYNC_COUNT = 3;
inline int block_threads() { return static_cast<int>(engine->block_size.x * engine->block_size.y * engine->block_size.z); }
}  // namespace stillhouse_host

inline void __syncthreads() { stillhouse_host::engine->barrier(&stillhouse_host::SYNC, 0); }
inline int __syncthreads_or(int predicate) { return stillhouse_host::engine->barrier(&stillhouse_host::SYNC_OR, predicate) != 0; }
inline int __syncthreads_and(int predicate) {
    return stillhouse_host::engine->barrier(&stillhouse_host::SYNC_AND, predicate) == stillhouse_host::block_threads();
}
inline int __syncthreads_count(int predicate) { return stillhouse_host::engine->barrier(&stillhouse_host::SYNC_COUNT, predicate); }
inline void __threadfence() { stillhouse_host::engine->preempt(); }
inline void __threadfence_block() { stillhouse_host::engine->preempt(); }
inline void __nanosleep(unsigned) { stillhouse_host::engine->preempt(); }
inline void __trap() { stillhouse_host::engine->fail(stillhouse_host::BAD_ACCESS); }

// Warps.

namespace stillhouse_host {

struct Lane {
    uint64_t value;
    unsigned source;
};

inline void no_values(Warp&, unsigned) {}

inline void take_values(Warp& warp, unsigned mask) {
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        Fiber& lane = warp.lanes[__builtin_ctz(rest)];
        Lane own;
        std::memcpy(&own, lane.in, sizeof own);
        if ((mask >> own.source & 1) != 0) {
            std::memcpy(lane.out, warp.lanes[own.source].in, 8);
        } else {
            // A lane that takes no part has no value.
            std::memset(lane.out, 0xcb, 8);
        }
    }
}

template <typename T> inline T take_from(unsigned mask, T value, unsigned source) {
    static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "a 32- or 64-bit number");
    Fiber& self = *engine->fiber;
    Lane own{0, source & 31};
    std::memcpy(&own.value, &value, sizeof value);
    std::memcpy(self.in, &own, sizeof own);
    engine->collective(take_values, mask);
    T result;
    std::memcpy(&result, self.out, sizeof result);
    return result;
}

// Every lane's word, for all lanes: what votes and reductions are made of.
template <typename Reduce> inline void reduce_words(Warp& warp, unsigned mask) {
    unsigned total = Reduce::START;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        unsigned word;
        std::memcpy(&word, warp.lanes[lane].in, 4);
        total = Reduce::join(total, word, lane);
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        std::memcpy(warp.lanes[__builtin_ctz(rest)].out, &total, 4);
    }
}

template <typename Reduce> inline unsigned reduce_word(unsigned mask, unsigned word) {
    Fiber& self = *engine->fiber;
    std::memcpy(self.in, &word, 4);
    engine->collective(reduce_words<Reduce>, mask);
    unsigned total;
    std::memcpy(&total, self.out, 4);
    return total;
}

#define STILLHOUSE_REDUCE(name, start, expression)                                                                 \
    struct name {                                                                                                  \
        static constexpr unsigned START = start;                                                                   \
        static unsigned join(unsigned total, unsigned word, [[maybe_unused]] unsigned lane) { return expression; } \
    };
STILLHOUSE_REDUCE(Ballot, 0, total | (word != 0 ? 1u << lane : 0u))
STILLHOUSE_REDUCE(Any, 0, total | (word != 0 ? 1u : 0u))
STILLHOUSE_REDUCE(All, 1, total & (word != 0 ? 1u : 0u))
STILLHOUSE_REDUCE(Sum, 0, total + word)
STILLHOUSE_REDUCE(Or, 0, total | word)
STILLHOUSE_REDUCE(And, ~0u, total & word)
STILLHOUSE_REDUCE(Xor, 0, total ^ word)
STILLHOUSE_REDUCE(Largest, 0, total > word ? total : word)
STILLHOUSE_REDUCE(Smallest, ~0u, total < word ? total : word)
#undef STILLHOUSE_REDUCE

}  // namespace stillhouse_host

inline void __syncwarp(unsigned mask = 0xffffffffu) { stillhouse_host::engine->collective(stillhouse_host::no_values, mask); }

template <typename T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = stillhouse_host::engine->fiber->lane;
    const unsigned inside = static_cast<unsigned>(width) - 1;
    return stillhouse_host::take_from(mask, value, (lane & ~inside) | (static_cast<unsigned>(source) & inside));
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = stillhouse_host::engine->fiber->lane;
    const unsigned within = lane & (static_cast<unsigned>(width) - 1);
    return stillhouse_host::take_from(mask, value, delta > within ? lane : lane - delta);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = stillhouse_host::engine->fiber->lane;
    const unsigned left = static_cast<unsigned>(width) - 1 - (lane & (static_cast<unsigned>(width) - 1));
    return stillhouse_host::take_from(mask, value, delta > left ? lane : lane + delta);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned lane = stillhouse_host::engine->fiber->lane;
    const unsigned source = lane ^ static_cast<unsigned>(lanes);
    return stillhouse_host::take_from(mask, value, source > (lane | (static_cast<unsigned>(width) - 1)) ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return stillhouse_host::reduce_word<stillhouse_host::Ballot>(mask, predicate != 0 ? 1u : 0u);
}
inline int __any_sync(unsigned mask, int predicate) {
    return static_cast<int>(stillhouse_host::reduce_word<stillhouse_host::Any>(mask, predicate != 0 ? 1u : 0u));
}
inline int __all_sync(unsigned mask, int predicate) {
    return static_cast<int>(stillhouse_host::reduce_word<stillhouse_host::All>(mask, predicate != 0 ? 1u : 0u));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::Sum>(mask, value); }
inline int __reduce_add_sync(unsigned mask, int value) {
    return static_cast<int>(stillhouse_host::reduce_word<stillhouse_host::Sum>(mask, static_cast<unsigned>(value)));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::Largest>(mask, value); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::Smallest>(mask, value); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::Or>(mask, value); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::And>(mask, value); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value) { return stillhouse_host::reduce_word<stillhouse_host::Xor>(mask, value); }

// What one thread does by itself.
#include "device_math.h"
