"""How many tokens of noise per second: stillhouse.noise beside numpy and torch as one would write them by hand.

    python research/package_peers/replay.py --vocab 50257 49152 --tokens 256 --threads 1
    python research/package_peers/replay.py --device cuda --tokens 8192

A token is a row of V values; every way makes the same f32 array [n, V] (stillhouse also others: --dtype) from
the same columns with --corrections per token. "by hand" draws fresh numbers of its library's own generator instead of Philox by
counters, as a trainer without stored noise would: it cannot replay, and is there for the cost. Best of --repeat runs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import stillhouse
from stillhouse.noise import replay


def make_batch(vocab: int, tokens: int, corrections: int) -> stillhouse.Batch:
    """One row of ``tokens`` positions."""
    rng = np.random.default_rng(0)
    offsets = np.array([0, tokens * corrections])
    index = np.sort(rng.integers(0, vocab, (tokens, corrections)), 1).reshape(-1)
    columns = {
        "sequence_id": np.array([7], np.uint64),
        "input_ids": rng.integers(0, vocab, (1, tokens), dtype=np.int32),
        "logprob": -rng.exponential(3, (1, tokens)).astype(np.float32),
        "noise_count": np.full((1, tokens), corrections, np.uint16),
        "noise_index": stillhouse.Ragged(index.astype(np.uint16 if vocab <= 65536 else np.uint32), offsets),
        "noise_logprob": stillhouse.Ragged(-rng.exponential(4, len(index)).astype(np.float16) - np.float16(1), offsets),
    }
    return stillhouse.Batch(columns, stillhouse.Info(vocab, tokens, stillhouse.NoiseInfo("replay", 42)))


def numpy_by_hand(batch: stillhouse.Batch, vocab: int, out: str) -> Any:
    """E, then softmax(ξ) or ξ, in f32 numpy: one array operation after the other."""
    x, n = batch["input_ids"][0], batch["input_ids"].shape[1]
    rng = np.random.default_rng(1)
    e = rng.standard_exponential((n, vocab), dtype=np.float32)
    e0 = rng.standard_exponential((n, 1), dtype=np.float32)
    owner = np.repeat(np.arange(n), batch["noise_count"][0])
    np.add.at(
        e, (owner, batch["noise_index"].values), np.exp(batch["noise_logprob"].values, dtype=np.float32) * e0[owner, 0]
    )
    e[np.arange(n), x] = np.exp(batch["logprob"][0]) * e0[:, 0]
    if out == "gumbel":
        return -np.log(e)
    weight = 1 / e
    return weight / weight.sum(1, keepdims=True)


def numpy_philox(batch: stillhouse.Batch, vocab: int, out: str) -> Any:
    """The same with Philox by counters, in numpy: what the reference of the format does, in f64, token by token."""
    from importlib import util
    from pathlib import Path

    path = Path(__file__).parents[2] / "tests" / "python" / "noise_reference.py"
    spec = util.spec_from_file_location("noise_reference", path)
    assert spec is not None and spec.loader is not None
    reference = util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    rows = []
    for i, x in enumerate(batch["input_ids"][0]):
        e0, e = reference.exponentials(42, 0, 7, i, vocab)
        xi = reference.decode(vocab, x, batch["logprob"][0, i], [], [], e0, e)
        rows.append((xi if out == "gumbel" else reference.softmax(xi)).astype(np.float32))
    return np.stack(rows)


def torch_by_hand(batch: stillhouse.Batch, vocab: int, out: str) -> Any:
    """As numpy_by_hand, on the device of the batch."""
    import torch

    x = batch["input_ids"][0].long()
    n, device = len(x), x.device
    # (torch's exponential_ takes five times as long on a CPU)
    e = -torch.log(torch.rand(n, vocab, device=device))
    e0 = -torch.log(torch.rand(n, device=device))
    owner = torch.repeat_interleave(torch.arange(n, device=device), batch["noise_count"][0].long())
    e.index_put_(
        (owner, batch["noise_index"].values.long()), batch["noise_logprob"].values.float().exp() * e0[owner], True
    )
    e[torch.arange(n, device=device), x] = batch["logprob"][0].exp() * e0
    xi = -e.log()
    return xi if out == "gumbel" else xi.softmax(1)


def best_of(repeat: int, run: Callable[[], Any], wait: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(repeat):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[50_257, 49_152])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--corrections", type=int, default=6, help="per token")
    parser.add_argument("--threads", type=int, default=1, help="of the core, and of torch on the CPU")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of stillhouse's output")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    import torch

    torch.set_num_threads(options.threads)
    cuda = options.device.startswith("cuda")
    wait = torch.cuda.synchronize if cuda else lambda: None
    print(
        f"{options.tokens} tokens, {options.corrections} corrections each, {options.threads} thread(s), {options.device}"
    )
    print(f"{'V':>6}  {'out':<8} {'way':<28} {'µs/token':>9} {'tokens/s':>10}")
    for vocab in options.vocab:
        numpy_batch = make_batch(vocab, options.tokens, options.corrections)
        batch = numpy_batch.torch().to(options.device)
        for out in ("softmax", "gumbel"):
            common: dict[str, Any] = {"out": out, "threads": options.threads, "dtype": options.dtype}
            ways: dict[str, Callable[[], Any]] = {}
            for backend in ("triton", "torch") if cuda else ("rust", "torch"):
                ways[f"stillhouse, {backend}"] = lambda b=backend: replay(batch, backend=b, **common)  # type: ignore[misc]
            ways["torch by hand (own generator)"] = lambda: torch_by_hand(batch, vocab, out)
            if not cuda:
                ways["numpy by hand (own generator)"] = lambda: numpy_by_hand(numpy_batch, vocab, out)
                ways["numpy, Philox (reference)"] = lambda: numpy_philox(numpy_batch, vocab, out)
            for name, run in ways.items():
                seconds = best_of(1 if "reference" in name else options.repeat, run, wait)
                each = seconds / options.tokens
                print(f"{vocab:>6}  {out:<8} {name:<28} {each * 1e6:>9.1f} {1 / each:>10,.0f}")


if __name__ == "__main__":
    main()
