// For tests: the words and exponentials of a stream, so that the device's bits can be held against the CPU's.

// Grid: any; writes e of the entries below `vocab`, their words, and e_0 behind them.
NOISE_KERNEL(exponentials, 256, 1)(unsigned key0, unsigned key1, unsigned position, unsigned long long sequence, unsigned vocab, float* out,
                                   unsigned* words) {
    const Stream stream = stream_of(make_uint2(key0, key1), position, sequence);
    for (unsigned k = blockIdx.x * blockDim.x + threadIdx.x; k < vocab; k += gridDim.x * blockDim.x) {
        const uint4 four = philox(stream, k / 4);
        const unsigned word = k % 4 == 0 ? four.x : k % 4 == 1 ? four.y : k % 4 == 2 ? four.z : four.w;
        out[k] = exponential_from_word(word);
        words[k] = word;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        out[vocab] = auxiliary_exponential(stream);
    }
}
NOISE_EXPORT(exponentials)
