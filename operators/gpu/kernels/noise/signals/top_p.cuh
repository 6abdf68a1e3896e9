// How many of the most likely tokens hold a mass, `count` at most, and ln of the probability of all others. Constants: the mass (double).
// Output: the number (unsigned), then the logarithm (float).
SIGNAL_KERNEL(top_p, 3) {
    SHARED(double, sums, WARPS);
    SHARED(unsigned, last, 1);
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const double mass = *reinterpret_cast<const double*>(constants);
    unsigned* kept = reinterpret_cast<unsigned*>(out) + static_cast<size_t>(blockIdx.x) * 2;
    const size_t listed = static_cast<size_t>(blockIdx.x) * top_count;
    if (threadIdx.x == 0) {
        double held = 0.0;
        unsigned number = 0;
        while (number < min(top_count, count) && held < mass) {
            held += exp(static_cast<double>(top_logprobs[listed + number]));
            number++;
        }
        kept[0] = number;
        last[0] = top_tokens[listed + number - 1];
    }
    __syncthreads();
    const unsigned index = last[0];
    const float logit = row[index];
    // Summed on its own: 1 − Σ p would lose a tail of 1e-9.
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i + LEFT_OUT < vocab; i += THREADS) {
        const float other = row[i];
        sum += other < logit || (other == logit && i > index) ? static_cast<double>(power_of(state, other, 1.0f)) : 0.0;
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) {
        *reinterpret_cast<float*>(kept + 1) = static_cast<float>(log(sum) - state.ln_z);
    }
}
NOISE_EXPORT(top_p)
