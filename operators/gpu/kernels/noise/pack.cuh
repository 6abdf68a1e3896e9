// The corrections of all draws one after another, without gaps.

// Values of one (row, draw) that there is room for.
constexpr unsigned VALUES = 1024;
constexpr unsigned SCAN_THREADS = 1024;

// Where each list begins. Grid: 1.
NOISE_KERNEL(offsets, SCAN_THREADS, 1)(const unsigned* counts, unsigned lists, unsigned* offsets) {
    SHARED(unsigned, of_warps, SCAN_THREADS / 32);
    const unsigned each = (lists + SCAN_THREADS - 1) / SCAN_THREADS;
    const unsigned first = min(threadIdx.x * each, lists), end = min(first + each, lists);
    unsigned own = 0;
    for (unsigned i = first; i < end; i++) {
        own += (counts[i] & FALL_BACK) != 0 ? 0 : counts[i];
    }
    unsigned of_warp;
    unsigned before = warp_scan(own, of_warp);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    for (unsigned warp = 0; warp < threadIdx.x / 32; warp++) {
        before += of_warps[warp];
    }
    for (unsigned i = first; i < end; i++) {
        offsets[i] = before;
        before += (counts[i] & FALL_BACK) != 0 ? 0 : counts[i];
    }
}
NOISE_EXPORT(offsets)

// Grid: lists/8; a warp for a list. What does not fit into `room` is left out.
NOISE_KERNEL(gather, 256, 4)(const unsigned* counts, const unsigned* offsets, const uint2* corrections, unsigned lists, unsigned room, uint2* out) {
    const unsigned list = blockIdx.x * 8 + threadIdx.x / 32;
    if (list >= lists || (counts[list] & FALL_BACK) != 0) {
        return;
    }
    const unsigned count = counts[list], offset = offsets[list];
    for (unsigned i = threadIdx.x % 32; i < count && offset + i < room; i += 32) {
        out[offset + i] = corrections[static_cast<size_t>(list) * VALUES + i];
    }
}
NOISE_EXPORT(gather)
