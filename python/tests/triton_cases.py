"""What test_noise.py runs in processes of their own: ``interpret`` (with TRITON_INTERPRET=1) or ``compile``."""

from __future__ import annotations

import sys

import numpy as np
import torch
from noise_f64 import batch, error_of, expected
from stillhouse.noise import prior, replay

OUTS = ("softmax", "gumbel", "gaussian", "uniform")


def interpret() -> None:
    for vocab, draws, narrow in ((1, 1, True), (7, 2, False), (5003, 2, True)):
        columns = batch(vocab, draws=draws, narrow=narrow)
        for out in OUTS:
            for temperature in (1.0,) if out == "uniform" else (1.0, 0.85, 3.0):
                exact = expected(columns, out, temperature, draws - 1)
                got = replay(columns.torch(), None, draws - 1, out, temperature, backend="triton")
                worst = error_of(got, exact, out, temperature)
                assert worst < 1, (vocab, out, temperature, worst)
                for dtype in (torch.float16, torch.bfloat16) if vocab == 5003 and temperature != 3.0 else ():
                    half = replay(columns, [[0, 4]] * 3, draws - 1, out, temperature, dtype=dtype, device="cpu", backend="triton")
                    near = got[:, [0, 4]].float()
                    torch.testing.assert_close(half.float(), near, rtol=8e-3, atol=1e-7)
    unlikely = batch(300, surest=-300.0)
    for out in OUTS:
        assert error_of(replay(unlikely, out=out, backend="triton"), expected(unlikely, out), out) < 1
        plain = prior(9, [1, 2], [3, 4], 900, out=out)
        assert np.abs(prior(9, [1, 2], [3, 4], 900, out=out, backend="triton") - plain).max() < 1e-5
    assert replay(unlikely, np.zeros((3, 5), bool), backend="triton").shape == (0, 300)


def compile_for_gpus() -> None:
    import triton
    from stillhouse.noise import _triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        "out": "*fp32", "scratch": "*fp32", "key": "*i64", "low": "*i32", "high": "*i32", "position": "*i32",
        "token": "*i32", "value": "*fp32", "starts": "*i64", "index": "*i32", "added": "*fp32",
        "n": "i32", "vocab": "i32", "temperature": "fp32",
        "KIND": "constexpr", "UNIT": "constexpr", "HALF": "constexpr", "QUADS": "constexpr",
    }  # fmt: skip
    for out in ("*fp32", "*bf16"):
        for kind, unit in ((0, True), (0, False), (1, True), (2, True), (3, True)):
            half = out != "*fp32" and kind == 0
            # Triton makes a constant of a vocabulary of 1.
            small = {"vocab": 1} if out == "*fp32" and unit else {}
            constants = {**small, "KIND": kind, "UNIT": unit, "HALF": half, "QUADS": _triton._QUADS}
            source = ASTSource(fn=_triton._replay, signature={**types, "out": out, **dict.fromkeys(small, "constexpr")}, constexprs=constants)
            kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _triton._WARPS})
            assert "mul.hi.u32" in kernel.asm["ptx"] and ".local" not in kernel.asm["ptx"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
