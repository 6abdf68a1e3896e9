// A block: its threads as fibers, who runs next, barriers, warp collectives, shared memory.
//
// A fiber runs until it waits for others, so an unsynchronised access is a race whose outcome is the order of the fibers.
// That order follows from the schedule seed alone: 0 is ascending, any other draws orders that differ between barriers.
#pragma once

#include <algorithm>

#include "fibers.h"

struct uint3 {
    unsigned x, y, z;
};

namespace stillhouse_host {

constexpr int DONE = 0;
constexpr int UNKNOWN_KERNEL = 1;
constexpr int DEADLOCK = 2;
constexpr int TOO_LARGE = 3;
// A shared address that is none or not aligned, a write past a shared array or the stack, an exception.
constexpr int BAD_ACCESS = 4;

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t SHARED_BYTES = 227 * 1024;
// What nvcc lets a kernel declare; more must be dynamic.
constexpr size_t STATIC_SHARED_BYTES = 48 * 1024;
constexpr size_t SHARED_ALIGN = 128;
constexpr size_t SHARED_ARRAYS = 64;
constexpr unsigned char SHARED_GUARD = 0xA7;
// So many atomics (a second or two) without a barrier, a collective or an end: a loop waits for what never comes.
constexpr uint64_t SPIN_LIMIT = 1ull << 26;
// A fiber that has done so many atomics in one go lets the others run: it may wait for one of them.
constexpr unsigned SPIN_YIELD = 256;

using Entry = void (*)(void**);

struct Copy {
    void* shared;
    const void* global;  // null: zeros
    uint64_t group;
};

// The name of what a fiber waits for: a collective's own function, or a barrier's tag.
using Meeting = const void*;

struct Warp;
using Combine = void (*)(Warp&, unsigned mask);

struct Fiber {
    Context context;
    unsigned char* stack;
    uint3 thread;
    unsigned lane;
    Warp* warp;
    Meeting meeting;
    unsigned mask;
    int predicate;
    unsigned atomics;
    uint64_t groups;
    std::vector<Copy> copies;
    // What this lane brings to a warp's collective and takes from it.
    alignas(16) unsigned char in[64];
    alignas(16) unsigned char out[32];
};

struct Warp {
    Fiber* lanes;
    unsigned exist;
    unsigned ready;
    unsigned meeting;
};

class Engine;
// A plain pointer, so that reading it needs no check of whether it was constructed.
static thread_local Engine* engine = nullptr;

class Engine {
public:
    Fiber* fiber = nullptr;
    uint3 block_index{};
    uint3 block_size{};
    uint3 grid_size{};

    int launch(Entry kernel, const uint32_t grid[3], const uint32_t block[3], size_t dynamic, void** arguments, uint64_t seed) {
        const uint64_t size = uint64_t{block[0]} * block[1] * block[2];
        if (block[0] > MAX_THREADS || block[1] > MAX_THREADS || block[2] > MAX_THREADS || size > MAX_THREADS || dynamic > SHARED_BYTES) {
            return TOO_LARGE;
        }
        const uint64_t blocks = uint64_t{grid[0]} * grid[1] * grid[2];
        // CUDA's own bounds, so that what runs here can be launched there.
        if (size == 0 || blocks == 0 || grid[0] > 0x7fffffffu || grid[1] > 0xffffu || grid[2] > 0xffffu) {
            return TOO_LARGE;
        }
        entry = kernel;
        args = arguments;
        threads = static_cast<unsigned>(size);
        dynamic_bytes = dynamic;
        schedule = seed;
        grid_size = {grid[0], grid[1], grid[2]};
        block_size = {block[0], block[1], block[2]};
        reserve();
        // Blocks are independent, so their order is the seed's too: a rotation, forwards or backwards.
        const uint64_t first = seed == 0 ? 0 : mix(seed ^ 0xb10cull) % blocks;
        const bool backwards = seed != 0 && (mix(seed) & 1) != 0;
        for (uint64_t i = 0; i < blocks; i++) {
            const uint64_t step = backwards ? blocks - 1 - i : i;
            const int result = run_block((first + step) % blocks);
            if (result != DONE) {
                return result;
            }
        }
        return DONE;
    }

    // Shared memory of the declaration that `site` stands for: the block's first thread to come here makes it.
    void* shared_array(const void* site, size_t bytes) {
        for (size_t i = 0; i < arrays; i++) {
            if (sites[i] == site) {
                return starts[i];
            }
        }
        const size_t room = (bytes + SHARED_ALIGN - 1) / SHARED_ALIGN * SHARED_ALIGN;
        if (arrays > SHARED_ARRAYS || static_bytes + room > STATIC_SHARED_BYTES || dynamic_bytes + static_bytes + room > SHARED_BYTES) {
            fail(TOO_LARGE);
        }
        static_bytes += room;
        return add_array(site, bytes);
    }

    void* dynamic_shared() { return starts[0]; }

    bool is_shared(const void* address, size_t bytes) const {
        const unsigned char* start = static_cast<const unsigned char*>(address);
        for (size_t i = 0; i < arrays; i++) {
            if (start >= starts[i] && start + bytes <= starts[i] + sizes[i]) {
                return true;
            }
        }
        return false;
    }

    void require_shared(const void* address, size_t bytes, size_t align) {
        if (reinterpret_cast<uintptr_t>(address) % align != 0 || !is_shared(address, bytes)) {
            fail(BAD_ACCESS);
        }
    }

    // What nobody may read yet.
    void spoil(void* memory, size_t bytes) const { std::memset(memory, poison, bytes); }

    // Waits for all threads of the block at the same kind of barrier; returns what `result` is after it.
    int barrier(Meeting kind, int predicate) {
        fiber->meeting = kind;
        fiber->predicate = predicate;
        block_waiting();
        return counted;
    }

    // Waits for all lanes of `mask` with the same function; the last to come computes for all of them.
    void collective(Combine combine, unsigned mask) {
        Fiber& self = *fiber;
        Warp& warp = *self.warp;
        const unsigned bit = 1u << self.lane;
        if ((mask & bit) == 0) {
            fail(DEADLOCK);
        }
        mask &= warp.exist;
        self.meeting = reinterpret_cast<Meeting>(combine);
        self.mask = mask;
        warp.ready &= ~bit;
        warp.meeting |= bit;
        if ((mask & ~warp.meeting) == 0 && agree(warp, mask, self.meeting)) {
            combine(warp, mask);
            warp.meeting &= ~mask;
            warp.ready |= mask;
            spins = 0;
        }
        pass_on();
    }

    // A place where the device may let another thread go first.
    void preempt() {
        if (++spins > SPIN_LIMIT) {
            fail(DEADLOCK);
        }
        if (++fiber->atomics >= SPIN_YIELD || (schedule != 0 && (draw() & 3) == 0)) {
            pass_on(true);
        }
    }

    // Ends the launch; the block's fibers are never continued, so nothing on their stacks may need a destructor.
    [[noreturn]] void fail(int code) {
        outcome = code;
        switch_context(fiber->context, home);
        __builtin_unreachable();
    }

private:
    static uint64_t mix(uint64_t value) {
        value += 0x9e3779b97f4a7c15ull;
        value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
        value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
        return value ^ (value >> 31);
    }

    uint64_t draw() { return mix(random += 0x9e3779b97f4a7c15ull); }

    void reserve() {
        stacks.reserve(threads);
        if (fibers.size() < threads) {
            fibers.resize(threads);
        }
        if (arena.empty()) {
            arena.resize(SHARED_BYTES + (SHARED_ARRAYS + 3) * 2 * SHARED_ALIGN);
        }
    }

    void* add_array(const void* site, size_t bytes) {
        const size_t room = (bytes + SHARED_ALIGN - 1) / SHARED_ALIGN * SHARED_ALIGN;
        unsigned char* start = free_shared;
        sites[arrays] = site;
        starts[arrays] = start;
        sizes[arrays] = bytes;
        arrays++;
        spoil(start, bytes);
        std::memset(start + bytes, SHARED_GUARD, room + SHARED_ALIGN - bytes);
        free_shared = start + room + SHARED_ALIGN;
        return start;
    }

    bool guards_intact() const {
        for (size_t i = 0; i < arrays; i++) {
            const unsigned char* end = i + 1 < arrays ? starts[i + 1] : free_shared;
            if (!std::all_of(starts[i] + sizes[i], const_cast<unsigned char*>(end), [](unsigned char byte) { return byte == SHARED_GUARD; })) {
                return false;
            }
        }
        for (unsigned i = 0; i < threads; i++) {
            if (!Stacks::intact(fibers[i].stack)) {
                return false;
            }
        }
        return true;
    }

    int run_block(uint64_t index) {
        block_index = {static_cast<unsigned>(index % grid_size.x), static_cast<unsigned>(index / grid_size.x % grid_size.y),
                       static_cast<unsigned>(index / grid_size.x / grid_size.y)};
        random = mix(schedule) ^ mix(index);
        // NaN in every format, a large negative number, a huge positive one: a maximum hides one of them, not all.
        constexpr unsigned char POISONS[3] = {0xff, 0xcb, 0x7f};
        poison = schedule == 0 ? POISONS[0] : POISONS[draw() % 3];
        const uintptr_t base = reinterpret_cast<uintptr_t>(arena.data());
        free_shared = arena.data() + ((base + SHARED_ALIGN - 1) / SHARED_ALIGN * SHARED_ALIGN - base);
        arrays = 0;
        static_bytes = 0;
        add_array(nullptr, dynamic_bytes);
        for (unsigned i = 0; i < threads; i++) {
            start_fiber(i);
        }
        const unsigned count = (threads + 31) / 32;
        for (unsigned w = 0; w < count; w++) {
            const unsigned lanes = std::min(32u, threads - w * 32);
            const unsigned all = lanes == 32 ? ~0u : (1u << lanes) - 1;
            warps[w] = {&fibers[w * 32], all, all, 0};
        }
        warp_count = count;
        waiting = 0;
        ended = 0;
        spins = 0;
        outcome = DONE;
        new_order();
        fiber = pick(false);
        switch_context(home, fiber->context);
        // A broken guard explains every other end.
        return guards_intact() ? outcome : BAD_ACCESS;
    }

    void start_fiber(unsigned index) {
        Fiber& made = fibers[index];
        made.stack = stacks.at(index);
        made.thread = {index % block_size.x, index / block_size.x % block_size.y, index / block_size.x / block_size.y};
        made.lane = index % 32;
        made.warp = &warps[index / 32];
        made.atomics = 0;
        made.groups = 0;
        made.copies.clear();
        Stacks::guard(made.stack);
        prepare_context(made.context, made.stack, run_fiber);
    }

    static void run_fiber() {
        Engine& self = *engine;
        bool thrown = false;
        try {
            self.entry(self.args);
        } catch (...) {
            thrown = true;
        }
        if (thrown) {
            self.fail(BAD_ACCESS);
        }
        self.fiber->meeting = &self.ended;
        self.ended++;
        self.spins = 0;
        self.leave();
        self.pass_on();
        __builtin_unreachable();
    }

    void leave() { fiber->warp->ready &= ~(1u << fiber->lane); }

    void block_waiting() {
        leave();
        waiting++;
        pass_on();
    }

    static bool agree(const Warp& warp, unsigned mask, Meeting meeting) {
        for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
            const Fiber& lane = warp.lanes[__builtin_ctz(rest)];
            if (lane.meeting != meeting || lane.mask != mask) {
                return false;
            }
        }
        return true;
    }

    // Continues the next fiber, which may be this one. Not inlined: its frame then lies below all of the kernel's.
    __attribute__((noinline)) void pass_on(bool yields = false) {
        Fiber* self = fiber;
        if (static_cast<unsigned char*>(__builtin_frame_address(0)) < self->stack + STACK_GUARD_WORDS * 8) {
            fail(BAD_ACCESS);
        }
        self->atomics = 0;
        Fiber* next = pick(yields);
        if (next == nullptr) {
            if (ended == threads) {
                switch_context(self->context, home);
            }
            if (waiting != threads || !release()) {
                fail(DEADLOCK);
            }
            next = pick(false);
        }
        if (next != self) {
            fiber = next;
            switch_context(self->context, next->context);
        }
    }

    // All threads wait at a barrier: at the same one?
    bool release() {
        const Meeting kind = fibers[0].meeting;
        int count = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].meeting != kind) {
                return false;
            }
            count += fibers[i].predicate != 0 ? 1 : 0;
        }
        for (unsigned w = 0; w < warp_count; w++) {
            warps[w].ready = warps[w].exist;
        }
        counted = count;
        waiting = 0;
        spins = 0;
        new_order();
        return true;
    }

    void new_order() {
        current_warp = 0;
        current_lane = 31;
        if (schedule != 0) {
            const uint64_t drawn = draw();
            lane_order = static_cast<unsigned>(drawn & 3);
            mixing = (drawn & 4) != 0;
            current_warp = static_cast<unsigned>((drawn >> 8) % warp_count);
        }
    }

    // Ascending is after the current lane, then round: so a fiber that yields comes last.
    Fiber* pick(bool yields) {
        if (schedule == 0) {
            const unsigned later = current_lane == 31 ? 0 : warps[current_warp].ready & (~0u << (current_lane + 1));
            if (later != 0) {
                return choose(current_warp, static_cast<unsigned>(__builtin_ctz(later)));
            }
            for (unsigned i = yields ? 1 : 0; i <= warp_count; i++) {
                const unsigned w = (current_warp + i) % warp_count;
                if (warps[w].ready != 0) {
                    return choose(w, static_cast<unsigned>(__builtin_ctz(warps[w].ready)));
                }
            }
            return nullptr;
        }
        const uint64_t drawn = draw();
        unsigned w = current_warp;
        if (warps[w].ready == 0 || (mixing && (drawn & 7) == 0)) {
            const unsigned offset = static_cast<unsigned>((drawn >> 32) % warp_count);
            unsigned i = 0;
            while (i < warp_count && warps[(offset + i) % warp_count].ready == 0) {
                i++;
            }
            if (i == warp_count) {
                return nullptr;
            }
            w = (offset + i) % warp_count;
        }
        const unsigned ready = warps[w].ready;
        switch (lane_order) {
            case 0:
                return choose(w, static_cast<unsigned>(__builtin_ctz(ready)));
            case 1:
                return choose(w, 31u - static_cast<unsigned>(__builtin_clz(ready)));
            default: {
                const unsigned turn = static_cast<unsigned>(drawn >> 8) & 31;
                const unsigned turned = turn == 0 ? ready : ready >> turn | ready << (32 - turn);
                return choose(w, (static_cast<unsigned>(__builtin_ctz(turned)) + turn) & 31);
            }
        }
    }

    Fiber* choose(unsigned warp, unsigned lane) {
        current_warp = warp;
        current_lane = lane;
        return &warps[warp].lanes[lane];
    }

    Entry entry = nullptr;
    void** args = nullptr;
    unsigned threads = 0;
    size_t dynamic_bytes = 0;
    uint64_t schedule = 0;
    uint64_t random = 0;
    unsigned char poison = 0;
    int outcome = DONE;

    Context home{};
    Stacks stacks;
    std::vector<Fiber> fibers;
    Warp warps[MAX_THREADS / 32] = {};
    unsigned warp_count = 0;
    unsigned waiting = 0;
    unsigned ended = 0;
    uint64_t spins = 0;
    int counted = 0;

    unsigned current_warp = 0;
    unsigned current_lane = 0;
    unsigned lane_order = 0;
    bool mixing = false;

    std::vector<unsigned char> arena;
    unsigned char* free_shared = nullptr;
    size_t arrays = 0;
    size_t static_bytes = 0;
    const void* sites[SHARED_ARRAYS + 1] = {};
    unsigned char* starts[SHARED_ARRAYS + 1] = {};
    size_t sizes[SHARED_ARRAYS + 1] = {};
};

}  // namespace stillhouse_host
