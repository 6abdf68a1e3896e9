// The tensor cores' instructions: fragments of a matrix product, loads of fragments, copies that arrive later.
#pragma once

#include "types.h"

namespace stillhouse_host {

// PTX's layout of m16n8k16, with g = lane / 4 and t = lane % 4 (a register holds two neighbours of a row of A or of a column of B):
//   A: a[0] row g, columns 2t..; a[1] row g + 8; a[2] row g, columns 2t + 8..; a[3] row g + 8, columns 2t + 8..
//   B: b[0] column g, rows 2t..; b[1] column g, rows 2t + 8..
//   C: c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3] row g + 8.
struct Fragments {
    float c[4];
    unsigned a[4];
    unsigned b[2];
};
static_assert(sizeof(Fragments) <= sizeof(Fiber::in), "a lane's fragments fit");

template <typename T> inline void mma_combine(Warp& warp, unsigned) {
    float a[16][16];
    float b[16][8];
    float c[16][8];
    const auto half = [](unsigned pair, int which) {
        return to_float(T{static_cast<uint16_t>(which == 0 ? pair & 0xffffu : pair >> 16)});
    };
    for (int lane = 0; lane < 32; lane++) {
        Fragments f;
        std::memcpy(&f, warp.lanes[lane].in, sizeof f);
        const int g = lane / 4;
        const int t = lane % 4;
        for (int i = 0; i < 4; i++) {
            const int row = g + (i & 1) * 8;
            const int column = 2 * t + (i >> 1) * 8;
            a[row][column] = half(f.a[i], 0);
            a[row][column + 1] = half(f.a[i], 1);
            c[g + (i >> 1) * 8][2 * t + (i & 1)] = f.c[i];
        }
        for (int i = 0; i < 2; i++) {
            b[2 * t + i * 8][g] = half(f.b[i], 0);
            b[2 * t + i * 8 + 1][g] = half(f.b[i], 1);
        }
    }
    // The order of the sum is ours: the device's is not documented.
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) {
                c[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        float out[4];
        for (int i = 0; i < 4; i++) {
            out[i] = c[lane / 4 + (i >> 1) * 8][2 * (lane % 4) + (i & 1)];
        }
        std::memcpy(warp.lanes[lane].out, out, sizeof out);
    }
}

// Of matrix i, lane T gets the words' pair T % 4 of row T / 4, or, transposed, of column T / 4.
template <int COUNT, bool TRANSPOSED> inline void ldmatrix_combine(Warp& warp, unsigned) {
    unsigned out[32][COUNT];
    for (int i = 0; i < COUNT; i++) {
        uint16_t matrix[8][8];
        for (int row = 0; row < 8; row++) {
            const void* address;
            std::memcpy(&address, warp.lanes[i * 8 + row].in, sizeof address);
            std::memcpy(matrix[row], address, 16);
        }
        for (int lane = 0; lane < 32; lane++) {
            const int outer = lane / 4;
            const int inner = 2 * (lane % 4);
            const unsigned low = TRANSPOSED ? matrix[inner][outer] : matrix[outer][inner];
            const unsigned high = TRANSPOSED ? matrix[inner + 1][outer] : matrix[outer][inner + 1];
            out[lane][i] = low | high << 16;
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        std::memcpy(warp.lanes[lane].out, out[lane], sizeof out[lane]);
    }
}

inline void require_full_warp() {
    if (engine->fiber->warp->exist != ~0u) {
        engine->fail(DEADLOCK);
    }
}

template <int COUNT, bool TRANSPOSED> inline void ldmatrix(unsigned (&r)[COUNT], const void* row) {
    require_full_warp();
    Fiber& self = *engine->fiber;
    // The other lanes' addresses are not read.
    if (self.lane < COUNT * 8) {
        engine->require_shared(row, 16, 16);
    }
    std::memcpy(self.in, &row, sizeof row);
    engine->collective(ldmatrix_combine<COUNT, TRANSPOSED>, ~0u);
    std::memcpy(r, self.out, sizeof r);
}

// The destination is undefined from here on; the bytes come when somebody waits for them, no earlier.
inline void start_copy(void* shared, const void* global) {
    engine->require_shared(shared, 16, 16);
    if (reinterpret_cast<uintptr_t>(global) % 16 != 0) {
        engine->fail(BAD_ACCESS);
    }
    engine->spoil(shared, 16);
    Fiber& self = *engine->fiber;
    self.copies.push_back({shared, global, self.groups});
}

inline void wait_copies(uint64_t pending) {
    Fiber& self = *engine->fiber;
    auto copy = self.copies.begin();
    while (copy != self.copies.end() && copy->group + pending < self.groups) {
        if (copy->global != nullptr) {
            std::memcpy(copy->shared, copy->global, 16);
        } else {
            std::memset(copy->shared, 0, 16);
        }
        ++copy;
    }
    self.copies.erase(self.copies.begin(), copy);
}

}  // namespace stillhouse_host

template <typename T> inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    stillhouse_host::require_full_warp();
    stillhouse_host::Fiber& self = *stillhouse_host::engine->fiber;
    std::memcpy(self.in, c, sizeof c);
    std::memcpy(self.in + offsetof(stillhouse_host::Fragments, a), a, sizeof a);
    std::memcpy(self.in + offsetof(stillhouse_host::Fragments, b), b, sizeof b);
    stillhouse_host::engine->collective(stillhouse_host::mma_combine<T>, ~0u);
    std::memcpy(c, self.out, sizeof c);
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row) { stillhouse_host::ldmatrix<4, false>(r, row); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { stillhouse_host::ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2(unsigned (&r)[2], const void* row) { stillhouse_host::ldmatrix<2, false>(r, row); }
inline void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) { stillhouse_host::ldmatrix<2, true>(r, row); }

inline void cp_async_16(void* shared, const void* global) {
    if (global == nullptr) {
        stillhouse_host::engine->fail(stillhouse_host::BAD_ACCESS);
    }
    stillhouse_host::start_copy(shared, global);
}
inline void cp_async_16_zfill(void* shared, const void* global, bool valid) {
    if (valid) {
        cp_async_16(shared, global);
    } else {
        stillhouse_host::start_copy(shared, nullptr);
    }
}
inline void cp_async_commit() { stillhouse_host::engine->fiber->groups++; }
template <int N> inline void cp_async_wait() { stillhouse_host::wait_copies(N); }
