// The second read of a row, once per draw: e, w and d of every entry, their sums, the entries that may get a correction, and
// the bins of all others.
//
// A block goes through the row in chunks that all its threads share. After each, Σw so far is known to all, and an entry with
// d > target·Σw/64 goes to a list: as Σw only grows, the list has every entry that the final sum would put there. A full list
// is thinned by the sum as it is then, after that by a higher threshold; at the end, by the highest that leaves little in the bins.

constexpr unsigned GROUPS = 2;
constexpr unsigned CHUNK = THREADS * 4 * GROUPS;
constexpr unsigned LIST = 2048;
// Candidates that the search takes.
constexpr unsigned MOST = 1024;
constexpr unsigned MAY_WIN = 0x80000000u;
constexpr unsigned FALL_BACK = 0x80000000u;

// An entry that may get a correction; MAY_WIN in `index` where it would beat the observed token.
struct Entry {
    unsigned index;
    float logit, e;
};

struct Draw {
    double total_weight, rest_excess;
    unsigned count;
    unsigned broken;
};

// Per (row, draw), in device memory.
struct Found {
    Draw draw;
    RestSums rest;
    Entry entries[MOST];
};

__device__ __forceinline__ Stream stream_of(uint2 key, unsigned position, unsigned long long sequence) {
    return {key.x, key.y, position, static_cast<unsigned>(sequence), static_cast<unsigned>(sequence >> 32)};
}

__device__ __forceinline__ float scale_of(const RowState& state, float e0) {
    return static_cast<float>(static_cast<double>(e0) / state.z);
}

// p_k·e_0/Ê_k of x: what an entry must stay below.
__device__ __forceinline__ double bar_of(bool condition, double lead, double exact, float stored) {
    return condition ? (1.0 + lead) * exp(static_cast<double>(stored) - exact) : 0.0;
}

__device__ __forceinline__ float loose(double bar) { return static_cast<float>(bar * (1.0 + 1e-5)); }

struct Weights {
    float added, w, d;
};

__device__ __forceinline__ Weights weights_of(float logit, float e, float max, float scale) {
    Weights out;
    out.added = mul(exp_f32(sub(logit, max)), scale);
    const float t = __frcp_rn(mul(e, add(e, out.added)));
    out.w = mul(e, t);
    out.d = mul(out.added, t);
    return out;
}

// Shared by the threads of a block.
struct Board {
    double sums[WARPS];
    float weights[WARPS];
    unsigned counts[WARPS];
    Bins bins;
    Entry list[LIST];
};

// What all threads of a block know alike, and this thread's own sums.
struct Pass {
    Board& board;
    RestScale scale;
    float max, added_scale, bar;
    // of Σw, the threshold: the coarsest that it may end with, and now
    float coarsest, fraction;
    unsigned count = 0;
    double weight_x = 0.0;
    float running = 0.0f;
    double weight = 0.0, excess = 0.0;
    // an entry of this thread is beyond the bins; the list is full of entries that must be corrected
    bool broken = false, full = false;

    // f32 of a sum that may be as large as e^650
    static __device__ __forceinline__ float clamped(double value) { return static_cast<float>(min(value, 3e38)); }

    __device__ __forceinline__ float threshold() const { return min(mul(fraction, running), 3e38f); }

    __device__ __forceinline__ void leave(float w, float d) {
        excess += static_cast<double>(d);
        if (d >= mul(scale.lowest, w)) {
            // the division is rare; its last bits are allowed for
            broken |= !bin_entry(board.bins, scale, fmaxf(__fdividef(d, w), scale.lowest), w, d);
        }
    }

    // Drops what is no longer above the threshold from the list. Begins and ends with a barrier. A round of it writes only where all
    // have read already.
    __device__ __forceinline__ void thin() {
        const unsigned size = count;
        count = 0;
        for (unsigned first = 0; first < size; first += THREADS) {
            __syncthreads();
            Entry entry;
            bool stays = false;
            if (first + threadIdx.x < size) {
                entry = board.list[first + threadIdx.x];
                const Weights k = weights_of(entry.logit, entry.e, max, added_scale);
                stays = (entry.index & MAY_WIN) != 0 || k.d > threshold();
                if (!stays) {
                    leave(k.w, k.d);
                }
            }
            unsigned total;
            const unsigned before = block_scan(stays ? 1u : 0u, board.counts, total);
            if (stays) {
                board.list[count + before] = entry;
            }
            count += total;
        }
        __syncthreads();
    }
};

__device__ __forceinline__ float4 load_four(const float* row, unsigned k, unsigned vocab, bool aligned) {
    if (aligned && k + 4 <= vocab) {
        return *reinterpret_cast<const float4*>(row + k);
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#ifdef STILLHOUSE_BROKEN_TAIL
    vocab -= vocab % 4 == 0 ? 0 : 1;
#endif
    v.x = k < vocab ? row[k] : 0.0f;
    v.y = k + 1 < vocab ? row[k + 1] : 0.0f;
    v.z = k + 2 < vocab ? row[k + 2] : 0.0f;
    v.w = k + 3 < vocab ? row[k + 3] : 0.0f;
    return v;
}

// A thread's entries of one chunk.
struct Share {
    float e[4 * GROUPS], w[4 * GROUPS], d[4 * GROUPS];
    // bits of the entries that there are, and of those that beat x without a correction
    unsigned valid, winners;

    __device__ __forceinline__ void compute(const float* row, unsigned vocab, unsigned first, unsigned x, bool aligned, const Stream& stream,
                                            const Pass& pass) {
        valid = 0;
        winners = 0;
        UNROLL
        for (unsigned g = 0; g < GROUPS; g++) {
            const unsigned k = first + g * THREADS * 4 + threadIdx.x * 4;
            if (k < vocab) {
                const float4 v = load_four(row, k, vocab, aligned);
                const uint4 words = philox(stream, k / 4);
                one(g * 4 + 0, k + 0, vocab, x, v.x, words.x, pass);
                one(g * 4 + 1, k + 1, vocab, x, v.y, words.y, pass);
                one(g * 4 + 2, k + 2, vocab, x, v.z, words.z, pass);
                one(g * 4 + 3, k + 3, vocab, x, v.w, words.w, pass);
            } else {
                UNROLL
                for (unsigned i = g * 4; i < g * 4 + 4; i++) {
                    w[i] = 0.0f;
                    d[i] = 0.0f;
                }
            }
        }
    }
    __device__ __forceinline__ void one(unsigned i, unsigned k, unsigned vocab, unsigned x, float l, unsigned word, const Pass& pass) {
        const bool in = k < vocab && k != x;
        valid |= in ? 1u << i : 0u;
        e[i] = exponential_from_word(word);
        const Weights of = weights_of(l, e[i], pass.max, pass.added_scale);
        winners |= in && mul(of.added, pass.bar) > e[i] ? 1u << i : 0u;
        w[i] = in ? of.w : 0.0f;
        d[i] = in ? of.d : 0.0f;
    }
    __device__ __forceinline__ float weight() const {
        float sum = 0.0f;
        UNROLL
        for (unsigned g = 0; g < GROUPS; g++) {
            sum = add(sum, add(add(w[4 * g], w[4 * g + 1]), add(w[4 * g + 2], w[4 * g + 3])));
        }
        return sum;
    }
    __device__ __forceinline__ unsigned above(float threshold) const {
        unsigned bits = 0;
        UNROLL
        for (unsigned i = 0; i < 4 * GROUPS; i++) {
            bits |= d[i] > threshold ? 1u << i : 0u;
        }
        return bits;
    }
};

// Puts a chunk's entries into the list or the bins. One barrier, more where the list is full.
__device__ __forceinline__ void file(Pass& pass, const Share& share, const float* row, unsigned first) {
    unsigned listed = share.winners | share.above(pass.threshold());
    unsigned total, to = block_scan(static_cast<unsigned>(__popc(listed)), pass.board.counts, total);
    for (unsigned tries = 0; pass.count + total > LIST; tries++) {
        if (tries > 64) {
            pass.full = true;
            return;
        }
        pass.fraction = tries > 0 ? min(mul(pass.fraction, 4.0f), 1e30f) : pass.fraction;
        pass.thin();
        listed = share.winners | share.above(pass.threshold());
        to = block_scan(static_cast<unsigned>(__popc(listed)), pass.board.counts, total);
    }
    to += pass.count;
    UNROLL
    for (unsigned i = 0; i < 4 * GROUPS; i++) {
        if ((listed >> i & 1) != 0) {
            const unsigned k = first + i / 4 * THREADS * 4 + threadIdx.x * 4 + i % 4;
            pass.board.list[to++] = {k | ((share.winners >> i & 1) != 0 ? MAY_WIN : 0u), row[k], share.e[i]};
        } else if ((share.valid >> i & 1) != 0) {
            pass.leave(share.w[i], share.d[i]);
        }
    }
    pass.count += total;
}

// The sum of the chunk's weights for all threads. One barrier.
__device__ __forceinline__ float chunk_weight(Board& board, float weight) {
    weight = warp_sum(weight);
    if (threadIdx.x % 32 == 0) {
        board.weights[threadIdx.x / 32] = weight;
    }
    __syncthreads();
    float sum = 0.0f;
    UNROLL
    for (unsigned warp = 0; warp < WARPS; warp++) {
        sum = add(sum, board.weights[warp]);
    }
    return sum;
}

// Raises the threshold to the highest one that leaves little enough in the rest: the fewer candidates, the faster the search.
__device__ __forceinline__ void choose_threshold(Pass& pass, double total) {
    const double rest = block_sum(pass.excess, pass.board.sums);
    for (float fraction = pass.coarsest; fraction > pass.fraction; fraction = mul(fraction, 0.25f)) {
        const float threshold = min(mul(fraction, pass.running), 3e38f);
        double below = 0.0;
        for (unsigned i = threadIdx.x; i < pass.count; i += THREADS) {
            const Entry entry = pass.board.list[i];
            const float d = weights_of(entry.logit, entry.e, pass.max, pass.added_scale).d;
            below += (entry.index & MAY_WIN) == 0 && d <= threshold ? static_cast<double>(d) : 0.0;
        }
        // a quarter of the target
        if (rest + block_sum(below, pass.board.sums) <= static_cast<double>(pass.coarsest) * 4.0 * total) {
            pass.fraction = fraction;
            break;
        }
    }
}

// Writes what the search needs.
__device__ __forceinline__ void finish_pass(Pass& pass, Found& found) {
    Board& board = pass.board;
    const double total = block_sum(pass.weight, board.sums) + pass.weight_x;
    pass.running = Pass::clamped(total);
    choose_threshold(pass, total);
    for (unsigned tries = 0; tries < 64; tries++) {
        pass.thin();
        if (pass.count <= MOST) {
            break;
        }
        pass.fraction = min(mul(pass.fraction, 2.0f), 1e30f);
    }
    const double excess = block_sum(pass.excess, board.sums);
    const bool broken = __syncthreads_or(pass.broken || pass.full) != 0 || pass.count > MOST;
    if (threadIdx.x == 0) {
        found.draw = {total, excess, broken ? 0 : pass.count, broken ? 1u : 0u};
    }
    for (unsigned i = threadIdx.x; i < pass.count && !broken; i += THREADS) {
        found.entries[i] = board.list[i];
    }
    if (threadIdx.x < BINS) {
        const unsigned b = 2 * threadIdx.x;
        const Bins& bins = board.bins;
        found.rest.weight[threadIdx.x] = (bins.weight[b + 1] * 4294967296.0 + bins.weight[b]) / static_cast<double>(pass.scale.of_weight);
        found.rest.excess[threadIdx.x] = (bins.excess[b + 1] * 4294967296.0 + bins.excess[b]) / static_cast<double>(pass.scale.of_excess);
    }
}

// Grid: draws, rows.
NOISE_KERNEL(candidates, THREADS, 2)(const float* logits, unsigned long long stride, unsigned vocab, const unsigned* tokens,
                                     const unsigned* positions, const unsigned long long* sequences, const uint2* keys, const RowState* states,
                                     const float* logprobs, double target, double lead, unsigned condition, Found* all) {
    SHARED(Board, boards, 1);
    const unsigned draw = blockIdx.x, row_index = blockIdx.y;
    Found& found = all[static_cast<size_t>(row_index) * gridDim.x + draw];
    const RowState state = states[row_index];
    if (state.broken != 0) {
        if (threadIdx.x == 0) {
            found.draw = {0.0, 0.0, 0, 1};
        }
        return;
    }
    Board& board = boards[0];
    for (unsigned i = threadIdx.x; i < 2 * BINS; i += THREADS) {
        board.bins.weight[i] = 0;
        board.bins.excess[i] = 0;
    }
    const float* row = logits + row_index * stride;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
    const unsigned x = tokens[row_index];
    const Stream stream = stream_of(keys[draw], positions[row_index], sequences[row_index]);
    const float e0 = auxiliary_exponential(stream);
    const double exact = logprob_of(state, row[x]);
    Pass pass{board, {}, state.max, scale_of(state, e0), loose(bar_of(condition != 0, lead, exact, logprobs[row_index])), 
              static_cast<float>(target / 16.0), static_cast<float>(target / 1024.0)};
    pass.weight_x = weight_of_token(exact, e0);
    pass.running = Pass::clamped(pass.weight_x);
    for (unsigned first = 0; first < vocab && !pass.full; first += CHUNK) {
        Share share;
        share.compute(row, vocab, first, x, aligned, stream, pass);
        const float weight = share.weight();
        pass.weight += static_cast<double>(weight);
        pass.running = min(add(pass.running, chunk_weight(board, weight)), 3e38f);
        if (first == 0) {
            pass.scale = {lowest_ratio(target), __fdiv_rn(UNITS, pass.running), __fdiv_rn(UNITS, mul(static_cast<float>(target), pass.running))};
        }
        file(pass, share, row, first);
    }
    finish_pass(pass, found);
}
NOISE_EXPORT(candidates)
