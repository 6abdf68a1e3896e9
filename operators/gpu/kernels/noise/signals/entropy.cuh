// The entropy. Output: a float.
SIGNAL_KERNEL(entropy, 3) {
    SHARED(double, sums, WARPS);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    double distance = 0.0;
    for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
        const float below = sub(state.max, row[i]);
        distance += static_cast<double>(mul(exp_f32(-below), below));
    }
    distance = block_sum(distance, sums);
    if (threadIdx.x == 0) {
        reinterpret_cast<float*>(out)[blockIdx.x] = static_cast<float>(positive(state.ln_z + distance / state.z));
    }
}
NOISE_EXPORT(entropy)
