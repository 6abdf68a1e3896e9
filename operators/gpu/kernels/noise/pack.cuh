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

// Grid: lists/8; a warp for a list. What does not fit into `room` is left out. A correction has its index, of 32 bits or 16, and its value, f32
// or f16, without gaps: what is written here is what goes over the bus.
NOISE_KERNEL(gather, 256, 4)(const unsigned* counts, const unsigned* offsets, const uint2* corrections, unsigned lists, unsigned room,
                             unsigned short_index, unsigned half, unsigned short* out) {
    const unsigned list = blockIdx.x * 8 + threadIdx.x / 32;
    if (list >= lists || (counts[list] & FALL_BACK) != 0) {
        return;
    }
    const unsigned count = counts[list], offset = offsets[list];
    const unsigned words = (short_index != 0 ? 1 : 2) + (half != 0 ? 1 : 2);
    for (unsigned i = threadIdx.x % 32; i < count && offset + i < room; i += 32) {
        const uint2 correction = corrections[static_cast<size_t>(list) * VALUES + i];
        unsigned short* to = out + static_cast<size_t>(offset + i) * words;
        *to++ = static_cast<unsigned short>(correction.x);
        if (short_index == 0) {
            *to++ = static_cast<unsigned short>(correction.x >> 16);
        }
        // the search has rounded it: nothing is lost
        const unsigned value = half != 0 ? pack_pair<f16>(__uint_as_float(correction.y), 0.0f) : correction.y;
        *to++ = static_cast<unsigned short>(value);
        if (half == 0) {
            *to = static_cast<unsigned short>(value >> 16);
        }
    }
}
NOISE_EXPORT(gather)
