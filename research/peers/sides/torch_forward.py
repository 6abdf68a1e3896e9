"""transformers on PyTorch: tokens per second of the hidden states, and of these with the logits of all tokens."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from . import token_ids

# the logits of so many tokens are there at once: more than that only makes page faults
ROWS = 256


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    batch, length = spec["batch"], spec["length"]
    dtype = getattr(torch, spec["dtype"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, attn_implementation="sdpa")
    ids = torch.tensor(token_ids(batch * length, spec["vocabulary"])).reshape(batch, length)
    hidden_seconds, all_seconds = float("inf"), float("inf")
    with torch.inference_mode():
        model.base_model(ids, use_cache=False)
        for _ in range(spec["passes"]):
            start = time.perf_counter()
            hidden = model.base_model(ids, use_cache=False).last_hidden_state
            hidden_seconds = min(hidden_seconds, time.perf_counter() - start)
            for rows in hidden.flatten(0, 1).split(ROWS):
                logits = model.lm_head(rows).float()
            all_seconds = min(all_seconds, time.perf_counter() - start)
    tokens = batch * length
    said = {"hidden": tokens / hidden_seconds, "with_logits": tokens / all_seconds, "probe": logits[-1].tolist()}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
