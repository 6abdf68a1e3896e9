"""The batches: what our program makes of speeches of the shared corpus, with the nano GPT-2 where a teacher is asked; and a student that needs no training."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
from functools import cached_property
from typing import Any

import numpy as np
import torch

import stillhouse
from stillhouse.views import keyed

ROOT = pathlib.Path(__file__).resolve().parents[3]
TEACHER = ROOT / "assets/teacher-nano-gpt2"
ROWS, LENGTH, SEED = 8, 32, 42


class Data:
    """Data sets under a folder, each written by `stillhouse run` when it is first asked for."""

    def __init__(self, work: pathlib.Path, program: pathlib.Path) -> None:
        self.work, self.program = work, program
        work.mkdir(parents=True, exist_ok=True)

    @cached_property
    def texts(self) -> list[str]:
        """The beginnings of six speeches, one shorter than a row."""
        with gzip.open(ROOT / "assets/corpus/sotu-small.jsonl.gz", "rt") as lines:
            texts = [json.loads(line)["text"] for line in lines]
        return [text[:characters] for text, characters in zip(texts, (300, 90, 700, 250, 400, 600))]

    def made(self, name: str, job: dict[str, Any]) -> pathlib.Path:
        """The data set of a job over these texts."""
        output = self.work / name
        if not (output / "_SUCCESS").exists():
            corpus = self.work / "texts.jsonl"
            corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in self.texts))
            base = {
                "version": 1,
                "name": f"official-{name}",
                "seed": SEED,
                "input": {"format": "jsonl", "paths": [str(corpus)], "text": "text"},
                "tokenizer": {"path": str(TEACHER)},
                "pack": {"mode": "wrap", "length": LENGTH, "separator": "eos", "boundary": "bos_eos"},
                "output": {"path": str(output)},
            }
            whole = {key: value for key, value in {**base, **job}.items() if value is not None}
            self.call("run", "-", given=json.dumps(whole))
        return output

    def call(self, *arguments: Any, given: str | None = None) -> str:
        """Our program."""
        command = [str(self.program), *map(str, arguments)]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def batch(self, name: str, job: dict[str, Any], rows: int = ROWS) -> Any:
        """The first rows of a data set, as tensors."""
        return stillhouse.open(str(self.made(name, job)))[:rows].torch()

    @cached_property
    def plain(self) -> Any:
        """Tokens, digits, and two partitions of each row."""
        return self.batch("plain", {"subtokens": {"length": 4, "filter_table": True}, "partitions": {"views": 2}})

    @cached_property
    def padded(self) -> Any:
        """A document per row: some are short, and padded."""
        return self.batch(
            "padded", {"pack": {"mode": "pad", "length": LENGTH, "boundary": "none", "separator": "none"}}
        )

    @cached_property
    def dense(self) -> Any:
        """Noise as it was computed, a float for each word of the vocabulary."""
        noise = {"codec": "dense", "precision": "f32"}
        return self.batch("dense", {"extract": {"teacher": {"path": str(TEACHER)}, "noise": noise}})

    @cached_property
    def replayed(self) -> Any:
        """The same noise as it is stored by default, and what a job of top-k distillation stores."""
        return self.batch("replayed", REPLAYED)

    def folder_of_replayed(self) -> pathlib.Path:
        """Where it lies."""
        return self.made("replayed", REPLAYED)

    @cached_property
    def teacher_logits(self) -> torch.Tensor:
        """The nano GPT-2 by transformers, of the rows of ``dense``: [B, L, V], f32."""
        import transformers

        model = transformers.GPT2LMHeadModel.from_pretrained(str(TEACHER), dtype=torch.float32).eval()
        with torch.no_grad():
            logits: torch.Tensor = model(self.dense["input_ids"].long()).logits
        return logits


REPLAYED: dict[str, Any] = {
    "extract": {"teacher": {"path": str(TEACHER)}, "noise": {"codec": "replay", "tolerance": 1e-3}, "topk": 8}
}


def drawn(purpose: str, batch: Any, count: int, *, stream: int = 0, seed: int = 0, epoch: int = 0) -> Any:
    """The uniforms that a view draws for each row, float64 [B, count]: theirs is given these."""
    ids = batch["sequence_id"].numpy().view(np.uint64)
    return torch.from_numpy(keyed.uniforms(keyed.epoch_seed(seed, epoch), purpose, ids, count, stream))


def strata(purpose: str, batch: Any, count: int = 1, *, seed: int = 0) -> Any:
    """Which stratum each time of the batch lies in, int64 [B · count], as docs/FORMAT.md and views/times.py say."""
    from stillhouse.views import times

    ids, cells = batch["sequence_id"].numpy().view(np.uint64), batch.rows * count
    turn = keyed.below(keyed.epoch_seed(seed, 0), f"{purpose}_turn", ids[:1], cells, 0)
    return torch.from_numpy((np.arange(cells) * times.stride(cells) + turn[0]) % cells)


class Student:
    """Logits [B, n, V] out of tokens and places alone: a sum of two rows of a table, times a third. Keyed, never trained."""

    def __init__(
        self, vocab: int, length: int, *, width: int = 8, inputs: int | None = None, dtype: Any = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.of_token, self.of_place, self.out = (
            torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype)
            for n in (inputs or vocab, length, vocab)
        )

    def __call__(self, ids: Any) -> torch.Tensor:
        return (self.of_token[ids.long()] + self.of_place[: ids.shape[1]]) @ self.out.T

    def of_digits(self, digits: Any) -> torch.Tensor:
        """Of tokens as digits [B, L, ℓ]: [B, L, V]."""
        return (self.of_token[digits.long()].mean(2) + self.of_place[: digits.shape[1]]) @ self.out.T
