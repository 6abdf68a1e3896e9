// ln p of each candidate. Constants: the candidates (unsigned). Output: a float each.
SIGNAL_KERNEL(candidate_logprobs, 3) {
    const RowState state = states[blockIdx.x];
    if (state.broken != 0) {
        return;
    }
    const float* row = logits + blockIdx.x * stride;
    const unsigned* candidates = reinterpret_cast<const unsigned*>(constants);
    float* to = reinterpret_cast<float*>(out) + static_cast<size_t>(blockIdx.x) * count;
    for (unsigned i = threadIdx.x; i < count; i += THREADS) {
        to[i] = static_cast<float>(logprob_of(state, row[candidates[i]]));
    }
}
NOISE_EXPORT(candidate_logprobs)
