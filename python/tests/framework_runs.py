"""Runs the recipes of examples/ for test_frameworks.py, in the environment that torchrun makes, and writes down what each step trained on.

framework_runs.py JSON     {"recipe": ..., "folder": ..., "runs": [{"name": ..., "argv": [...], "die_at": step or 0, "options": {...}}]}
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pathlib
import sys
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import train_mdlm

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Killed(BaseException):
    """Stands for a signal: no framework catches it."""


def recorded(die_at: int) -> list[list[int]]:
    """The rows of each batch that a model is trained on from here on, up to the death of the process."""
    rows: list[list[int]] = []
    original = getattr(train_mdlm.loss_at, "original", train_mdlm.loss_at)

    def loss_at(model: Any, example: Any, args: Any) -> Any:
        if model.training:
            if die_at and len(rows) == die_at:
                raise Killed
            rows.append(example["sequence_id"].tolist())
        return original(model, example, args)

    loss_at.original = original  # type: ignore[attr-defined]
    train_mdlm.loss_at = loss_at
    return rows


def weights(model: Any) -> list[float]:
    """Enough of a model to see that it is not another one."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(p.detach().double().sum()) for p in full]


def run(recipe: Any, argv: list[str], die_at: int = 0, options: dict[str, Any] | None = None) -> dict[str, Any]:
    rows = recorded(die_at)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trained = weights(recipe.train(recipe.arguments(argv), **(options or {})))
            error = ""
        except Killed:
            trained, error = [], "killed"
        except Exception:  # noqa: BLE001  # it is the result
            trained, error = [], traceback.format_exc()
    gc.collect()
    return {"rows": rows, "weights": trained, "error": error, "warnings": [str(warning.message) for warning in said]}


def main(recipe: str, folder: str, runs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    # one process group for all runs, which the recipes make and end each by itself
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=RANK, world_size=WORLD)
    dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
    os.chdir(folder)
    module = importlib.import_module(recipe)
    done = {}
    for each in runs:
        name = each.pop("name")
        done[name] = run(module, **each)
        dist.barrier()
    pathlib.Path(folder, f"done-{RANK}.json").write_text(json.dumps(done))
    os._exit(0)  # whatever a killed run left behind


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
