"""
Posterior Gumbel noise in plain PyTorch: forward pass, log-softmax in f32, and for every token the noise of the whole vocabulary given that
the token was drawn, ξ = −log(e_k + p_k·e_0), at the token itself −log(p_x·e_0). It is made and thrown away: nothing is encoded or written.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM


def noise(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[N, V] log-probabilities and N tokens drawn from them; f32."""
    shared = torch.empty(len(tokens), 1).exponential_()
    at_tokens = log_p.gather(1, tokens[:, None]).exp_().mul_(shared)
    clocks = log_p.exp().mul_(shared).add_(torch.empty_like(log_p).exponential_())
    return clocks.scatter_(1, tokens[:, None], at_tokens).log_().neg_()


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(1)
    dtype = getattr(torch, spec["dtype"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, attn_implementation="sdpa")
    shards = sorted(Path(spec["dataset"], "data").glob("*.parquet"))
    table = pq.read_table(shards, columns=["input_ids", "logprob"]).combine_chunks()
    ids, stored = (
        torch.tensor(table[name].chunk(0).flatten().to_numpy()).reshape(len(table), -1)
        for name in ("input_ids", "logprob")
    )
    ids, batch = ids.long(), spec["batch"]
    difference = 0.0
    with torch.inference_mode():
        model.base_model(ids[:batch], use_cache=False)
        start = time.perf_counter()
        for at in range(0, len(ids), batch):
            hidden = model.base_model(ids[at : at + batch], use_cache=False).last_hidden_state
            # a sequence after the other: with the logits of all at once it is slower
            for row, states in enumerate(hidden, at):
                log_p = torch.log_softmax(model.lm_head(states[:-1]).float(), -1)
                given = log_p.gather(1, ids[row, 1:, None])[:, 0]
                difference += float((given - stored[row, 1:]).abs().sum())
                noise(log_p, ids[row, 1:])
        seconds = time.perf_counter() - start
    said = {"work_seconds": seconds, "tokens": ids.numel(), "logprob_difference": difference / ids[:, 1:].numel()}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
