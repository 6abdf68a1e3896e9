"""
llama.cpp through the functions of llama-cpp-python: tokens per second of the forward pass with the logits of one token, which it cannot do
without, and with those of all tokens. Each sequence of the batch is one of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp

from . import token_ids


def main() -> None:
    spec = json.loads(sys.argv[1])
    batch, length = spec["batch"], spec["length"]
    tokens = batch * length
    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(spec["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {spec['model']}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = tokens, batch
    params.n_batch, params.n_ubatch = tokens, min(tokens, spec["ubatch"])
    params.n_threads = params.n_threads_batch = spec["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of {tokens} tokens")
    inputs = llama_cpp.llama_batch_init(tokens, 0, 1)
    inputs.n_tokens = tokens
    for at, token in enumerate(token_ids(tokens, spec["vocabulary"])):
        inputs.token[at], inputs.pos[at] = token, at % length
        inputs.n_seq_id[at], inputs.seq_id[at][0] = 1, at // length

    def seconds(all_logits: bool) -> float:
        for at in range(tokens):
            inputs.logits[at] = all_logits or at == tokens - 1
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        start = time.perf_counter()
        if status := llama_cpp.llama_decode(context, inputs):
            raise SystemExit(f"llama_decode: status {status}")
        llama_cpp.llama_synchronize(context)
        return time.perf_counter() - start

    seconds(True)
    hidden_seconds = min(seconds(False) for _ in range(spec["passes"]))
    all_seconds = min(seconds(True) for _ in range(spec["passes"]))
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    probe = llama_cpp.llama_get_logits_ith(context, tokens - 1)[:vocabulary]
    print(
        json.dumps(
            {
                "hidden": tokens / hidden_seconds,
                "with_logits": tokens / all_seconds,
                "probe": probe,
                "system": llama_cpp.llama_print_system_info().decode(),
            }
        )
    )


if __name__ == "__main__":
    main()
