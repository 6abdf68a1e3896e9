// Causal attention on tensor cores (Dao 2023, "FlashAttention-2"): scores of a block of queries and 64 keys at a time, in registers.
//
//     warp w: query rows 16 M w .. 16 M (w + 1) of the block; a thread holds rows g and g + 8 of each 16 (g = lane / 4)
//     keys and values of 64 rows come by asynchronous copies, one while the products with the other are made
//
// Shared rows are one 16-byte chunk longer than D: chunks per row are odd then, so the eight rows of a fragment lie in different banks.
#pragma once

#include "work.cuh"

namespace forward {

constexpr unsigned KEYS = 64;
constexpr unsigned FLASH_WARPS = 4;
constexpr unsigned FLASH_THREADS = 32 * FLASH_WARPS;

template <typename T, int D, int M> struct Flash {
    static constexpr unsigned STRIDE = D + 8;
    static constexpr unsigned ROWS = 16 * M * FLASH_WARPS;
    // Queries stay in registers where there is room for them: for D = 96 that of three blocks is just too small.
    static constexpr bool KEEPS = M * D <= 128 && D != 96;
    static constexpr int STEPS = D / 16;

    float out[M][D / 8][4];
    float score[M][KEYS / 8][4];
    float most[M][2];
    float sum[M][2];
    unsigned kept[KEEPS ? M : 1][KEEPS ? STEPS : 1][4];

    __device__ __forceinline__ static unsigned lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static unsigned warp_row() { return threadIdx.x / 32 * 16 * M; }

    // `count` rows from row `from` of the run on; zeros beyond its end, where other runs or nobody's memory lie.
    template <unsigned COUNT>
    __device__ __forceinline__ static void fetch(T* shared, const T* rows, unsigned from, const Work<T, D>& work) {
        constexpr unsigned CHUNKS = D / 8;
        static_assert(COUNT * CHUNKS % FLASH_THREADS == 0, "every thread copies the same number of chunks");
        UNROLL
        for (unsigned i = 0; i < COUNT * CHUNKS / FLASH_THREADS; i++) {
            const unsigned chunk = i * FLASH_THREADS + threadIdx.x, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
            const bool valid = from + row < work.length;
            // The address stays within the run even where it is not read.
            const T* source = rows + size_t{valid ? from + row : 0u} * work.stride + column;
            cp_async_16_zfill(shared + row * STRIDE + column, source, valid);
        }
    }

    __device__ __forceinline__ static void query(unsigned (&a)[4], const T* q, int m, int step) {
        const unsigned row = warp_row() + 16 * m + lane() % 16, column = 16 * step + lane() / 16 * 8;
        ldmatrix_x4(a, q + row * STRIDE + column);
    }

    __device__ __forceinline__ void begin(const T* q) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int i = 0; i < D / 8; i++) {
                out[m][i][0] = out[m][i][1] = out[m][i][2] = out[m][i][3] = 0.0f;
            }
            most[m][0] = most[m][1] = -INFINITY;
            sum[m][0] = sum[m][1] = 0.0f;
            if constexpr (KEEPS) {
                UNROLL
                for (int step = 0; step < STEPS; step++) {
                    query(kept[m][step], q, m, step);
                }
            }
        }
    }

    // score = q · kᵀ.
    __device__ __forceinline__ void scores(const T* q, const T* k) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (unsigned n = 0; n < KEYS / 8; n++) {
                score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0.0f;
            }
        }
        const T* rows = k + (lane() / 16 * 8 + lane() % 8) * STRIDE + lane() / 8 % 2 * 8;
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            unsigned a[M][4];
            UNROLL
            for (int m = 0; m < M; m++) {
                if constexpr (KEEPS) {
                    a[m][0] = kept[m][step][0];
                    a[m][1] = kept[m][step][1];
                    a[m][2] = kept[m][step][2];
                    a[m][3] = kept[m][step][3];
                } else {
                    query(a[m], q, m, step);
                }
            }
            UNROLL
            for (unsigned n = 0; n < KEYS / 16; n++) {
                unsigned r[4];
                ldmatrix_x4(r, rows + n * 16 * STRIDE + 16 * step);
                const unsigned low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_m16n8k16<T>(score[m][2 * n], a[m], low);
                    mma_m16n8k16<T>(score[m][2 * n + 1], a[m], high);
                }
            }
        }
    }

    // Takes from each row the keys that come after it.
    __device__ __forceinline__ void mask(unsigned first_row, unsigned first_key) {
        UNROLL
        for (int m = 0; m < M; m++) {
            const unsigned row = first_row + 16 * m + lane() / 4;
            UNROLL
            for (unsigned n = 0; n < KEYS / 8; n++) {
                UNROLL
                for (unsigned i = 0; i < 4; i++) {
                    const unsigned key = first_key + 8 * n + lane() % 4 * 2 + i % 2;
                    if (key > row + i / 2 * 8) {
                        score[m][n][i] = -INFINITY;
                    }
                }
            }
        }
    }

    // score = 2^(scale (score - most)); what was summed under a smaller maximum shrinks. The first 64 keys hold one that every row sees,
    // so that `most` is finite from then on.
    __device__ __forceinline__ void softmax(float scale) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                float top = most[m][half];
                UNROLL
                for (unsigned n = 0; n < KEYS / 8; n++) {
                    top = fmaxf(top, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
                }
                top = quad_max(top);
                const float shrink = power_of_two((most[m][half] - top) * scale), offset = top * scale;
                most[m][half] = top;
                float total = sum[m][half] * shrink;
                UNROLL
                for (unsigned n = 0; n < KEYS / 8; n++) {
                    UNROLL
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        score[m][n][i] = power_of_two(score[m][n][i] * scale - offset);
                        total += score[m][n][i];
                    }
                }
                sum[m][half] = total;
                UNROLL
                for (int i = 0; i < D / 8; i++) {
                    out[m][i][2 * half] *= shrink;
                    out[m][i][2 * half + 1] *= shrink;
                }
            }
        }
    }

    // out += score · v: the scores of two neighbouring tiles are, rounded, a fragment as they stand.
    __device__ __forceinline__ void values(const T* v) {
        const T* rows = v + lane() % 16 * STRIDE + lane() / 16 * 8;
        UNROLL
        for (unsigned n = 0; n < KEYS / 16; n++) {
            unsigned a[M][4];
            UNROLL
            for (int m = 0; m < M; m++) {
                a[m][0] = pack_pair<T>(score[m][2 * n][0], score[m][2 * n][1]);
                a[m][1] = pack_pair<T>(score[m][2 * n][2], score[m][2 * n][3]);
                a[m][2] = pack_pair<T>(score[m][2 * n + 1][0], score[m][2 * n + 1][1]);
                a[m][3] = pack_pair<T>(score[m][2 * n + 1][2], score[m][2 * n + 1][3]);
            }
            UNROLL
            for (int step = 0; step < STEPS; step++) {
                unsigned r[4];
                ldmatrix_x4_trans(r, rows + n * 16 * STRIDE + 16 * step);
                const unsigned low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_m16n8k16<T>(out[m][2 * step], a[m], low);
                    mma_m16n8k16<T>(out[m][2 * step + 1], a[m], high);
                }
            }
        }
    }

    // Through the warp's own rows of shared memory, so that 16 bytes are written at a time.
    __device__ __forceinline__ void finish(T* shared, const Work<T, D>& work) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int half = 0; half < 2; half++) {
                const float scale = 1.0f / quad_sum(sum[m][half]);
                T* row = shared + (warp_row() + 16 * m + 8 * half + lane() / 4) * STRIDE + lane() % 4 * 2;
                UNROLL
                for (int i = 0; i < D / 8; i++) {
                    *reinterpret_cast<unsigned*>(row + 8 * i) =
                        pack_pair<T>(out[m][i][2 * half] * scale, out[m][i][2 * half + 1] * scale);
                }
            }
        }
        __syncwarp();
        constexpr unsigned CHUNKS = D / 8;
        UNROLL
        for (unsigned i = 0; i < 16 * M * CHUNKS / 32; i++) {
            const unsigned chunk = i * 32 + lane(), row = warp_row() + chunk / CHUNKS, column = chunk % CHUNKS * 8;
            if (work.first + row < work.length) {
                *reinterpret_cast<uint4*>(work.out + size_t{work.first + row} * work.out_stride + column) =
                    *reinterpret_cast<const uint4*>(shared + row * STRIDE + column);
            }
        }
    }
};

template <typename T, int D, int M>
__device__ __forceinline__ void flash(const T* qkv, T* to, const unsigned* items, const Heads& shape) {
    using Tile = Flash<T, D, M>;
    DYNAMIC_SHARED(T, shared);
    T* q = shared;
    T* k = q + Tile::ROWS * Tile::STRIDE;
    T* v = k + KEYS * Tile::STRIDE;
    const Work<T, D> work(qkv, to, items, shape);
    const unsigned keys = min(work.first + Tile::ROWS, work.length);
    // A warp's own rows, of which the last one sees the most keys.
    const unsigned first_row = work.first + Tile::warp_row(), last_row = first_row + 16 * M - 1;

    Tile::template fetch<Tile::ROWS>(q, work.q, work.first, work);
    Tile::template fetch<KEYS>(k, work.k, 0, work);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    Tile tile;
    tile.begin(q);
    for (unsigned key = 0; key < keys; key += KEYS) {
        const bool sees = key <= last_row;
        // The keys are there, and everybody is done with the values before.
        Tile::template fetch<KEYS>(v, work.v, key, work);
        cp_async_commit();
        if (sees) {
            tile.scores(q, k);
        }
        cp_async_wait<0>();
        __syncthreads();
        // The values are there, and everybody is done with the keys.
        if (key + KEYS < keys) {
            Tile::template fetch<KEYS>(k, work.k, key + KEYS, work);
            cp_async_commit();
        }
        if (sees) {
            if (key + KEYS > first_row + 1) {
                tile.mask(first_row, key);
            }
            tile.softmax(shape.scale);
            tile.values(v);
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    tile.finish(q, work);
}

}  // namespace forward
