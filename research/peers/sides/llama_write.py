"""
llama.cpp through the functions of llama-cpp-python: texts that it writes in so many sequences at once, each token sampled from the whole
softmax at temperature 1 by its own samplers (temp, dist), to the full length.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp


def main() -> None:
    spec = json.loads(sys.argv[1])
    slots, length = spec["slots"], spec["length"]
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(spec["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {spec['model']}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = slots * length, slots
    params.n_batch = params.n_ubatch = slots
    params.n_threads = params.n_threads_batch = spec["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of {slots * length} tokens")
    samplers = []
    for slot in range(slots):
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(1.0))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(42 + slot))
        samplers.append(chain)
    inputs = llama_cpp.llama_batch_init(slots, 0, 1)
    inputs.n_tokens = slots

    def write(steps: int) -> int:
        """Tokens that were written."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        last = [spec["bos"]] * slots
        for position in range(steps):
            for slot in range(slots):
                inputs.token[slot], inputs.pos[slot], inputs.logits[slot] = last[slot], position, True
                inputs.n_seq_id[slot], inputs.seq_id[slot][0] = 1, slot
            if status := llama_cpp.llama_decode(context, inputs):
                raise SystemExit(f"llama_decode: status {status}")
            last = [llama_cpp.llama_sampler_sample(samplers[slot], context, slot) for slot in range(slots)]
        return steps * slots

    write(8)  # not timed: the first pass makes its graph and touches its memory
    start = time.perf_counter()
    tokens = sum(write(length - 1) for _ in range(spec["texts"] // slots))
    print(json.dumps({"tokens": tokens, "work_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
