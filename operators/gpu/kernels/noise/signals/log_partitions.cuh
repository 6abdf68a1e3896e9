// ln Σ exp(l/T) of each temperature. Constants: the temperatures (double). Output: a float each.
SIGNAL_KERNEL(log_partitions, 3) {
    SHARED(double, sums, WARPS);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const double* temperatures = reinterpret_cast<const double*>(constants);
    float* to = reinterpret_cast<float*>(out) + static_cast<size_t>(blockIdx.x) * count;
    for (unsigned t = 0; t < count; t++) {
        const double temperature = temperatures[t];
        double ln_z = state.ln_z;
        if (temperature != 1.0) {
            const float factor = static_cast<float>(1.0 / temperature);
            double sum = 0.0;
            for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
                sum += static_cast<double>(power_of(state, row[i], factor));
            }
            ln_z = log(block_sum(sum, sums));
        }
        if (threadIdx.x == 0) {
            to[t] = static_cast<float>(static_cast<double>(state.max) / temperature + ln_z);
        }
    }
}
NOISE_EXPORT(log_partitions)
