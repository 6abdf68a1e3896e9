"""A training run that is killed again and again and goes on in another shape each time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np

import stillhouse

TRAINER = pathlib.Path(__file__).with_name("trainer.py")
KILLS = 20 if os.environ.get("STILLHOUSE_SOAK", "0") != "0" else 8


def launch(options: dict[str, Any], folder: pathlib.Path) -> bool:
    """Runs all ranks to the death of one of them, or to the end; whether that was reached."""
    errors = (folder / f"errors-{options['run']}").open("w")
    ranks = [
        subprocess.Popen([sys.executable, TRAINER, json.dumps({**options, "rank": rank})], stderr=errors)
        for rank in range(options["world"])
    ]
    try:
        victim = ranks[options["victim"]].wait(timeout=120)
        if victim == 0:
            codes = [rank.wait(timeout=120) for rank in ranks]
            assert codes == [0] * len(ranks), (folder / f"errors-{options['run']}").read_text()
            return True
        assert victim == -9, (folder / f"errors-{options['run']}").read_text()
        return False
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_every_epoch_has_every_row_once(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(3)
    checkpoint = tmp_path / "checkpoint.json"
    kept: dict[int, dict[int, list[int]]] = {}  # step ↦ rank ↦ rows, of steps that a checkpoint has
    epoch_of: dict[int, int] = {}
    kills, shapes = 0, Counter()
    for run in range(200):
        begun = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
        world, workers = 1 + run % 4, int(random.integers(0, 3))
        options = {
            "dataset": str(plain), "folder": str(tmp_path), "run": run, "world": world, "workers": workers,
            "batch_size": int(random.integers(40, 60)) * 3 // world,
            "style": str(random.choice(["map", "stream"])), "kind": str(random.choice(["ours", "torch"])),
            "die_at": begun + int(random.integers(1, 12)) if kills < KILLS else 0, "victim": int(random.integers(0, world)),
        }  # fmt: skip
        done = launch(options, tmp_path)
        saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0}
        for rank in range(world):
            for line in (tmp_path / f"log-{run}-{rank}").read_text().splitlines():
                step, epoch, rows = json.loads(line)
                if begun < step <= saved["step"]:
                    kept.setdefault(step, {})[rank] = rows
                    epoch_of[step] = epoch
        if done:
            break
        kills += 1
        shapes[world, workers] += 1
    assert kills == KILLS and len(shapes) >= KILLS * 2 // 5, shapes
    everything = Counter(stillhouse.open(plain, columns=["sequence_id"])[:]["sequence_id"].tolist())
    for epoch in range(2):
        got = Counter(
            row for step, ranks in kept.items() if epoch_of[step] == epoch for rows in ranks.values() for row in rows
        )
        assert got == everything, (
            f"epoch {epoch}: {(got - everything).total()} twice, {(everything - got).total()} lost"
        )
