// Signals of a row: each file signals/NAME.cuh has the kernel of operators/signals/src/NAME.rs, which defines its values and bounds.
//
//   logits ─► a read for each temperature that is not 1 ─► log_partitions
//        ├──► a read ─► entropy
//        ├──► a read: sums of q by blocks of 1,024 ─► draws by inversion ─► sampled_logits
//   top-k └─► how many hold the mass ─► a read: ln of what all others hold ─► top_p

// Entries of a block of sums.
constexpr unsigned SUMMED = 1024;
#ifdef STILLHOUSE_BROKEN_TAIL
constexpr unsigned LEFT_OUT = 1;
#else
constexpr unsigned LEFT_OUT = 0;
#endif

// A kernel of a signal. Grid: rows. `constants` and `count` are those of `SignalKernel`. `inputs`, `scratch` and `out` have the bytes per row
// that it states, row after row. `top_tokens` and `top_logprobs` [rows, top_count] hold the most likely tokens of each row, descending.
#define SIGNAL_KERNEL(name, blocks) \
    NOISE_KERNEL(name, THREADS, blocks)( \
        [[maybe_unused]] const float* logits, \
        [[maybe_unused]] unsigned long long stride, \
        [[maybe_unused]] unsigned vocab, \
        [[maybe_unused]] const RowState* states, \
        [[maybe_unused]] const unsigned char* constants, \
        [[maybe_unused]] unsigned count, \
        [[maybe_unused]] const unsigned char* inputs, \
        [[maybe_unused]] unsigned char* scratch, \
        [[maybe_unused]] const unsigned* top_tokens, \
        [[maybe_unused]] const float* top_logprobs, \
        [[maybe_unused]] unsigned top_count, \
        [[maybe_unused]] unsigned char* out)

// exp((l − max)·factor), 0 below −60 as everywhere.
__device__ __forceinline__ float power_of(const RowState& state, float logit, float factor) {
    return exp_f32(mul(sub(logit, state.max), factor));
}
