// Switching between the threads of a block on one OS thread, and the stacks that they run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if !defined(__x86_64__) || defined(_WIN32)
#ifndef STILLHOUSE_UCONTEXT
#define STILLHOUSE_UCONTEXT
#endif
#endif

#ifdef STILLHOUSE_UCONTEXT
#include <ucontext.h>
#endif

namespace stillhouse_host {

constexpr size_t STACK_BYTES = 64 * 1024;
// The lowest words of a stack: a kernel with too large local arrays has overwritten them.
constexpr size_t STACK_GUARD_WORDS = 8;
constexpr uint64_t STACK_GUARD = 0x5ca1ab1e0ddba115ull;

#ifdef STILLHOUSE_UCONTEXT

struct Context {
    ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void prepare_context(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = STACK_BYTES;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

#else

struct Context {
    void* stack_pointer;
};

#if defined(__clang__)
#define STILLHOUSE_OPAQUE naked, noinline
#else
// `noipa`: what is not visible in the body (which registers survive) must not be concluded from it.
#define STILLHOUSE_OPAQUE naked, noinline, noipa
#endif

// Only what the System V ABI lets a callee keep; the floating-point modes are the same in all fibers.
__attribute__((STILLHOUSE_OPAQUE)) static void switch_stacks(void** /* save */, void* /* load */) {
    asm volatile(
        "pushq %rbp\n\t"
        "pushq %rbx\n\t"
        "pushq %r12\n\t"
        "pushq %r13\n\t"
        "pushq %r14\n\t"
        "pushq %r15\n\t"
        "movq %rsp, (%rdi)\n\t"
        "movq %rsi, %rsp\n\t"
        "popq %r15\n\t"
        "popq %r14\n\t"
        "popq %r13\n\t"
        "popq %r12\n\t"
        "popq %rbx\n\t"
        "popq %rbp\n\t"
        "ret\n\t");
}

inline void switch_context(Context& from, Context& to) { switch_stacks(&from.stack_pointer, to.stack_pointer); }

inline void prepare_context(Context& context, unsigned char* stack, void (*entry)()) {
    // Six registers, the entry as return address, and a null above it, where `entry`'s own return address would be: that
    // leaves the stack aligned as at any call, and ends a debugger's backtrace.
    uintptr_t words[8] = {0, 0, 0, 0, 0, 0, reinterpret_cast<uintptr_t>(entry), 0};
    unsigned char* start = stack + STACK_BYTES - sizeof words;
    std::memcpy(start, words, sizeof words);
    context.stack_pointer = start;
}

#endif

// Stacks of one OS thread, kept for its next launch. They lie in chunks, with room below the lowest: who runs off a stack is
// found out at its next switch, and has until then only spoilt what is not used after that.
class Stacks {
public:
    void reserve(size_t count) {
        while (chunks.size() * CHUNK < count) {
            // Not `make_unique`, which would touch every page.
            chunks.emplace_back(new unsigned char[(CHUNK + 1) * STRIDE + 64]);
        }
    }

    unsigned char* at(size_t index) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(chunks[index / CHUNK].get()) + (index % CHUNK + 1) * STRIDE;
        return reinterpret_cast<unsigned char*>((address + 63) & ~uintptr_t{63});
    }

    static void guard(unsigned char* stack) {
        for (size_t i = 0; i < STACK_GUARD_WORDS; i++) {
            std::memcpy(stack + i * 8, &STACK_GUARD, 8);
        }
    }

    static bool intact(const unsigned char* stack) {
        uint64_t difference = 0;
        for (size_t i = 0; i < STACK_GUARD_WORDS; i++) {
            uint64_t word;
            std::memcpy(&word, stack + i * 8, 8);
            difference |= word ^ STACK_GUARD;
        }
        return difference == 0;
    }

private:
    static constexpr size_t CHUNK = 32;
    // Exactly 64 KiB would put the tops of all stacks, where they are used, into the same few sets of the CPU's caches.
    static constexpr size_t STRIDE = STACK_BYTES + 320;

    std::vector<std::unique_ptr<unsigned char[]>> chunks;
};

}  // namespace stillhouse_host
