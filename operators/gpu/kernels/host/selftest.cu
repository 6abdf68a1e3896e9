// Kernels whose results are known: they test the emulation, and the same way a device. Those that break a rule say so.
#include "../portable.cuh"

namespace selftest {

// One value for each warp, then the first warp's sum of them. Without the barrier between, that is a race.
template <bool SYNCED> __device__ __forceinline__ void reduce(const float* in, float* out, unsigned n) {
    SHARED(float, partial, 32);
    float sum = 0.0f;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        sum += in[i];
    }
    UNROLL
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    const unsigned warp = threadIdx.x / 32;
    const unsigned lane = threadIdx.x % 32;
    if (lane == 0) {
        partial[warp] = sum;
    }
    if (SYNCED) {
        __syncthreads();
    }
    if (warp == 0) {
        float total = lane < blockDim.x / 32 ? partial[lane] : 0.0f;
        for (int step = 16; step > 0; step /= 2) {
            total += __shfl_down_sync(0xffffffffu, total, static_cast<unsigned>(step));
        }
        if (lane == 0) {
            out[blockIdx.x] = total;
        }
    }
}

KERNEL_BOUNDS(selftest_reduce, 512, 1)(const float* in, float* out, unsigned n) { reduce<true>(in, out, n); }
EXPORT(selftest_reduce)

// Breaks a rule: wrong for some schedules.
KERNEL_BOUNDS(selftest_reduce_race, 512, 1)(const float* in, float* out, unsigned n) { reduce<false>(in, out, n); }
EXPORT(selftest_reduce_race)

// Each round every thread reads its neighbour's value and overwrites its own: two barriers are needed, the second is easily
// forgotten. The sum mod 2^32 after `rounds` rounds is known.
template <bool SYNCED> __device__ __forceinline__ void rotate(unsigned* out, unsigned rounds) {
    DYNAMIC_SHARED(unsigned, ring);
    ring[threadIdx.x] = threadIdx.x;
    for (unsigned round = 0; round < rounds; round++) {
        __syncthreads();
        const unsigned next = ring[(threadIdx.x + 1) % blockDim.x];
        if (SYNCED) {
            __syncthreads();
        }
        ring[threadIdx.x] = next;
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = ring[threadIdx.x];
}

KERNEL(selftest_rotate)(unsigned* out, unsigned rounds) { rotate<true>(out, rounds); }
EXPORT(selftest_rotate)

// Breaks a rule: wrong for all schedules with more than one thread.
KERNEL(selftest_rotate_race)(unsigned* out, unsigned rounds) { rotate<false>(out, rounds); }
EXPORT(selftest_rotate_race)

// Lanes of a warp that exchange through shared memory: without `__syncwarp` a race as well.
template <bool SYNCED> __device__ __forceinline__ void neighbours(unsigned* out) {
    SHARED(unsigned, values, 32);
    const unsigned lane = threadIdx.x;
    values[lane] = lane * lane;
    if (SYNCED) {
        __syncwarp();
    }
    out[lane] = values[(lane + 31) % 32];
}

KERNEL(selftest_syncwarp)(unsigned* out) { neighbours<true>(out); }
EXPORT(selftest_syncwarp)
// Breaks a rule.
KERNEL(selftest_syncwarp_race)(unsigned* out) { neighbours<false>(out); }
EXPORT(selftest_syncwarp_race)

// d = a·b + c, fragments gathered by PTX's definition. a is 16x16, b 16x8, c and d 16x8, all row major; one warp.
__device__ __forceinline__ void store_c(float* d, const float (&c)[4]) {
    const unsigned g = threadIdx.x / 4;
    const unsigned t = threadIdx.x % 4;
    d[g * 8 + 2 * t] = c[0];
    d[g * 8 + 2 * t + 1] = c[1];
    d[(g + 8) * 8 + 2 * t] = c[2];
    d[(g + 8) * 8 + 2 * t + 1] = c[3];
}

__device__ __forceinline__ void load_c(float (&c)[4], const float* from) {
    const unsigned g = threadIdx.x / 4;
    const unsigned t = threadIdx.x % 4;
    c[0] = from[g * 8 + 2 * t];
    c[1] = from[g * 8 + 2 * t + 1];
    c[2] = from[(g + 8) * 8 + 2 * t];
    c[3] = from[(g + 8) * 8 + 2 * t + 1];
}

template <typename T> __device__ __forceinline__ void mma(const T* a, const T* b, const float* c, float* d) {
    const unsigned g = threadIdx.x / 4;
    const unsigned t = threadIdx.x % 4;
    unsigned fa[4];
    unsigned fb[2];
    float fc[4];
    UNROLL
    for (unsigned i = 0; i < 4; i++) {
        const T* pair = a + (g + (i % 2) * 8) * 16 + 2 * t + (i / 2) * 8;
        fa[i] = join_pair(pair[0], pair[1]);
    }
    UNROLL
    for (unsigned i = 0; i < 2; i++) {
        fb[i] = join_pair(b[(2 * t + i * 8) * 8 + g], b[(2 * t + i * 8 + 1) * 8 + g]);
    }
    load_c(fc, c);
    mma_m16n8k16<T>(fc, fa, fb);
    store_c(d, fc);
}

KERNEL(selftest_mma_bf16)(const bf16* a, const bf16* b, const float* c, float* d) { mma(a, b, c, d); }
EXPORT(selftest_mma_bf16)
KERNEL(selftest_mma_f16)(const f16* a, const f16* b, const float* c, float* d) { mma(a, b, c, d); }
EXPORT(selftest_mma_f16)

// The same product as kernels do it: copies to shared memory, ldmatrix, mma. `b` is read as it stands, with a transposing load;
// `bt` is its transpose and read without. Both products are written.
template <typename T> __device__ __forceinline__ void mma_shared(const T* a, const T* b, const T* bt, const float* c, float* d) {
    SHARED(T, sa, 16 * 16);
    SHARED(T, sb, 16 * 8);
    SHARED(T, sbt, 8 * 16);
    const unsigned lane = threadIdx.x;
    cp_async_16(sa + lane * 8, a + lane * 8);
    cp_async_16_zfill(sb + (lane % 16) * 8, b + (lane % 16) * 8, true);
    cp_async_16(sbt + (lane % 16) * 8, bt + (lane % 16) * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    unsigned fa[4];
    unsigned fb[2];
    float fc[4];
    // Matrices 0, 1: rows 0.. and 8.. of columns 0..; 2, 3: the same of columns 8... .
    ldmatrix_x4(fa, sa + (lane % 16) * 16 + (lane / 16) * 8);
    ldmatrix_x2_trans(fb, sb + (lane % 16) * 8);
    load_c(fc, c);
    mma_m16n8k16<T>(fc, fa, fb);
    store_c(d, fc);
    ldmatrix_x2(fb, sbt + (lane % 8) * 16 + (lane / 8 % 2) * 8);
    load_c(fc, c);
    mma_m16n8k16<T>(fc, fa, fb);
    store_c(d + 16 * 8, fc);
}

KERNEL(selftest_mma_shared_bf16)(const bf16* a, const bf16* b, const bf16* bt, const float* c, float* d) { mma_shared(a, b, bt, c, d); }
EXPORT(selftest_mma_shared_bf16)
KERNEL(selftest_mma_shared_f16)(const f16* a, const f16* b, const f16* bt, const float* c, float* d) { mma_shared(a, b, bt, c, d); }
EXPORT(selftest_mma_shared_f16)

// Four 8x8 matrices whose value is 64·matrix + 8·row + column: out[kind][register][lane], kinds x4, x4 trans, x2, x2 trans.
KERNEL(selftest_ldmatrix)(unsigned* out) {
    SHARED(unsigned short, matrices, 4 * 64);
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) {
        matrices[i] = static_cast<unsigned short>(i);
    }
    __syncthreads();
    unsigned four[4];
    unsigned two[2];
    ldmatrix_x4(four, matrices + lane * 8);
    for (unsigned i = 0; i < 4; i++) {
        out[i * 32 + lane] = four[i];
    }
    ldmatrix_x4_trans(four, matrices + lane * 8);
    for (unsigned i = 0; i < 4; i++) {
        out[128 + i * 32 + lane] = four[i];
    }
    ldmatrix_x2(two, matrices + (lane % 16) * 8);
    out[256 + lane] = two[0];
    out[288 + lane] = two[1];
    ldmatrix_x2_trans(two, matrices + (lane % 16) * 8);
    out[320 + lane] = two[0];
    out[352 + lane] = two[1];
}
EXPORT(selftest_ldmatrix)

// Breaks a rule: an address that is no multiple of 16.
KERNEL(selftest_ldmatrix_misaligned)(unsigned* out) {
    SHARED(unsigned short, matrices, 5 * 64);
    matrices[threadIdx.x] = 0;
    __syncthreads();
    unsigned two[2];
    ldmatrix_x2(two, matrices + threadIdx.x * 8 + 1);
    out[threadIdx.x] = two[0];
}
EXPORT(selftest_ldmatrix_misaligned)

// `tiles` tiles of 16 bytes a thread through two buffers: the sum of all words, tiles from `valid` on are zeros.
// PENDING 1 is right; 2 reads a tile that has not arrived.
template <int PENDING> __device__ __forceinline__ void pipeline(const uint4* in, unsigned* out, unsigned tiles, unsigned valid) {
    DYNAMIC_SHARED(uint4, buffers);
    const unsigned thread = threadIdx.x;
    const unsigned threads = blockDim.x;
    const uint4* mine = in + blockIdx.x * tiles * threads + thread;
    cp_async_16_zfill(buffers + thread, mine, 0 < valid);
    cp_async_commit();
    unsigned sum = 0;
    for (unsigned tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) {
            cp_async_16_zfill(buffers + ((tile + 1) % 2) * threads + thread, mine + (tile + 1) * threads, tile + 1 < valid);
        }
        cp_async_commit();
        cp_async_wait<PENDING>();
        __syncthreads();
        // Another thread's copy: its wait and the barrier make it visible.
        const uint4 words = buffers[(tile % 2) * threads + (thread + 1) % threads];
        sum += words.x + words.y + words.z + words.w;
        __syncthreads();
    }
    atomicAdd(out + blockIdx.x, sum);
}

KERNEL(selftest_copy)(const uint4* in, unsigned* out, unsigned tiles, unsigned valid) { pipeline<1>(in, out, tiles, valid); }
EXPORT(selftest_copy)
// Breaks a rule.
KERNEL(selftest_copy_early)(const uint4* in, unsigned* out, unsigned tiles, unsigned valid) { pipeline<2>(in, out, tiles, valid); }
EXPORT(selftest_copy_early)

// Breaks a rule: shared memory nobody wrote.
KERNEL(selftest_uninitialised)(unsigned* out) {
    SHARED(unsigned, values, 64);
    DYNAMIC_SHARED(unsigned, more);
    if (threadIdx.x != 7) {
        values[threadIdx.x] = 1;
        more[threadIdx.x] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
    out[blockDim.x + threadIdx.x] = more[threadIdx.x];
}
EXPORT(selftest_uninitialised)

// Breaks a rule: one element past the array.
KERNEL(selftest_overrun)(unsigned* out) {
    SHARED(unsigned, values, 33);
    values[threadIdx.x + 1 + threadIdx.x / 31] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
EXPORT(selftest_overrun)

// out32: add, max, min, or, a lock's counter (CAS and exchange), signed max and min; out64: add, max; outf, outd: add.
KERNEL(selftest_atomics)(unsigned* out32, unsigned long long* out64, float* outf, double* outd) {
    SHARED(unsigned, lock, 1);
    SHARED(unsigned, guarded, 1);
    const unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) {
        lock[0] = 0;
        guarded[0] = 0;
    }
    __syncthreads();
    atomicAdd(out32, id);
    atomicMax(out32 + 1, id * 7 % 1009);
    atomicMin(out32 + 2, id * 7 % 1009 + 5);
    atomicOr(out32 + 3, 1u << (id % 32));
    atomicMax(reinterpret_cast<int*>(out32 + 5), static_cast<int>(id) - 5000);
    atomicMin(reinterpret_cast<int*>(out32 + 6), -static_cast<int>(id));
    atomicAdd(out64, (1ull << 32) + id);
    atomicMax(out64 + 1, static_cast<unsigned long long>(id) << 33);
    atomicAdd(outf, 0.5f);
    atomicAdd(outd, 0.25);
    for (bool done = false; !done;) {
        if (atomicCAS(lock, 0u, 1u) == 0) {
            __threadfence_block();
            // Not atomic: the lock is what keeps the others out, also while this thread is delayed.
            volatile unsigned* shared = guarded;
            const unsigned old = shared[0];
            __threadfence_block();
            shared[0] = old + 1;
            __threadfence_block();
            atomicExch(lock, 0u);
            done = true;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(out32 + 4, guarded[0]);
    }
}
EXPORT(selftest_atomics)

// Breaks a rule: a read and a write that should be one atomic; the fence is where another thread comes between.
KERNEL(selftest_atomics_race)(unsigned* out) {
    volatile unsigned* counter = out;
    const unsigned old = counter[0];
    __threadfence();
    counter[0] = old + 1;
}
EXPORT(selftest_atomics_race)

// Break a rule: 0 some threads end before the barrier, 1 two kinds of barrier, 2 a lane that its warp's mask names is missing,
// 3 a lane outside its own mask, 4 a wait for what nobody writes, 5 two halves with different collectives.
KERNEL(selftest_divergence)(unsigned* out, unsigned how) {
    const unsigned thread = threadIdx.x;
    if (how == 0) {
        if (thread >= 40) {
            return;
        }
        __syncthreads();
    } else if (how == 1) {
        if (thread % 2 == 0) {
            __syncthreads();
        } else {
            out[0] = static_cast<unsigned>(__syncthreads_count(1));
        }
    } else if (how == 2) {
        if (thread != 5) {
            __syncwarp();
        }
    } else if (how == 3) {
        __syncwarp(thread == 5 ? 0xfu : 1u << (thread % 32));
    } else if (how == 4) {
        while (atomicAdd(out, 0u) == 0) {
        }
    } else {
        if (thread % 32 < 16) {
            __syncwarp(0xffffffffu);
        } else {
            out[1] = __ballot_sync(0xffffffffu, 1);
        }
    }
    out[2] = 1;
}
EXPORT(selftest_divergence)

// Eight words a thread: 64-bit and narrow shuffles. One block of up to 64 threads.
KERNEL(selftest_shuffles)(unsigned long long* out) {
    const unsigned thread = threadIdx.x;
    const unsigned lane = thread % 32;
    const unsigned long long value = 0x0123456700000000ull * (thread + 1) + thread;
    unsigned long long* mine = out + thread * 8;
    mine[0] = __shfl_sync(0xffffffffu, value, 3);
    mine[1] = __shfl_up_sync(0xffffffffu, value, 2u, 8);
    mine[2] = __shfl_down_sync(0xffffffffu, value, 5u, 16);
    mine[3] = __shfl_xor_sync(0xffffffffu, value, 9, 8);
    mine[4] = static_cast<unsigned long long>(__double_as_longlong(__shfl_xor_sync(0xffffffffu, static_cast<double>(thread) / 3.0, 31)));
    // The two halves of a warp by themselves.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    if (lane < 16) {
        mine[5] = static_cast<unsigned long long>(__shfl_sync(half, static_cast<int>(thread) - 100, 1, 16) + 1000);
    } else {
        mine[5] = __shfl_sync(half, thread, static_cast<int>(lane) + 1, 16);
    }
    mine[6] = __float_as_uint(__shfl_down_sync(0xffffffffu, static_cast<float>(thread), 1u));
    mine[7] = __shfl_sync(0xffffffffu, value, static_cast<int>(thread * 5 + 33));
}
EXPORT(selftest_shuffles)

// Votes of warps and of the block; the threads' numbers in three dimensions. Eight words a thread.
KERNEL(selftest_votes)(unsigned* out) {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 8;
    mine[0] = __ballot_sync(0xffffffffu, thread % 3 == 0);
    mine[1] = static_cast<unsigned>(__any_sync(0xffffffffu, thread == 33) * 2 + __all_sync(0xffffffffu, thread < 32));
    mine[2] = static_cast<unsigned>(__syncthreads_count(thread % 5 == 0));
    mine[3] = static_cast<unsigned>(__syncthreads_or(thread == 17 && block == 1) != 0) * 2 + static_cast<unsigned>(__syncthreads_and(block != 2) != 0);
    mine[4] = (threadIdx.x << 16) | (threadIdx.y << 8) | threadIdx.z;
    mine[5] = (blockIdx.x << 16) | (blockIdx.y << 8) | blockIdx.z;
    mine[6] = __umulhi(thread * 0x9e3779b9u, 0xdeadbeefu) ^ __brev(thread);
    mine[7] = static_cast<unsigned>(__popc(thread) + (__ffs(static_cast<int>(thread)) << 8) + (__clz(static_cast<int>(thread)) << 16));
}
EXPORT(selftest_votes)

template <typename T> __device__ __forceinline__ void convert(const float* in, unsigned short* narrow, float* wide, unsigned n) {
    const unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id < 65536) {
        wide[id] = to_float(from_bits<T>(static_cast<unsigned short>(id)));
    }
    if (id < n) {
        narrow[id] = to_bits(from_float<T>(in[id]));
        // The pair's conversion is another instruction.
        const unsigned pair = pack_pair<T>(in[id], 1.0f);
        narrow[n + id] = static_cast<unsigned short>(pair);
        const float2 back = unpack_pair<T>(pair);
        if (back.y != 1.0f) {
            narrow[n + id] = 0xdead;
        }
    }
}

// wide: to_float of all 65,536; narrow: from_float of `in`, and again through pack_pair.
KERNEL(selftest_convert_bf16)(const float* in, unsigned short* narrow, float* wide, unsigned n) { convert<bf16>(in, narrow, wide, n); }
EXPORT(selftest_convert_bf16)
KERNEL(selftest_convert_f16)(const float* in, unsigned short* narrow, float* wide, unsigned n) { convert<f16>(in, narrow, wide, n); }
EXPORT(selftest_convert_f16)

// How long products take here: `rounds` of them, each from its loads.
KERNEL(selftest_mma_rounds)(float* out, unsigned rounds) {
    SHARED(bf16, tile, 16 * 16);
    for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) {
        tile[i] = from_float<bf16>(static_cast<float>(i % 17) - 8.0f);
    }
    __syncthreads();
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const unsigned lane = threadIdx.x % 32;
    for (unsigned round = 0; round < rounds; round++) {
        unsigned a[4];
        unsigned b[2];
        ldmatrix_x4(a, tile + (lane % 16) * 16 + (lane / 16) * 8);
        ldmatrix_x2_trans(b, tile + (lane % 16) * 16);
        mma_m16n8k16<bf16>(c, a, b);
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
EXPORT(selftest_mma_rounds)

// As many barriers as asked for: what the host takes for them.
KERNEL(selftest_barriers)(unsigned* out, unsigned rounds) {
    unsigned sum = 0;
    for (unsigned i = 0; i < rounds; i++) {
        sum += i;
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
EXPORT(selftest_barriers)

}  // namespace selftest
