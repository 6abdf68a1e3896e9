"""The recipes of examples/ inside the real frameworks: which rows each process trains on, step by step, killed and gone on with.

The weights at the end must be those of a run that nobody stopped, to the last bit.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import shared_fixtures

import stillhouse.torch as st

RUNS = pathlib.Path(__file__).with_name("framework_runs.py")
SOAK = os.environ.get("STILLHOUSE_SOAK", "0") != "0"
BATCH, SEED = 4, 3


def launch(world: int, folder: pathlib.Path, recipe: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs one after the other, each in ``world`` processes; what each of these wrote down."""
    given = json.dumps({"recipe": recipe, "folder": str(folder), "runs": runs})
    with shared_fixtures.free_ports(1) as ports:
        whole = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "TORCHELASTIC_RUN_ID": "test", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
        logs = [(folder / f"log-{rank}").open("w") for rank in range(world)]
        processes = [
            subprocess.Popen([sys.executable, RUNS, given], env={**os.environ, **whole, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=logs[rank], stderr=logs[rank])
            for rank in range(world)
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=400) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0] * world, (folder / "log-0").read_text()[-3000:]
    return [json.loads((folder / f"done-{rank}.json").read_text()) for rank in range(world)]


def dealt(
    dataset: pathlib.Path, world: int, epochs: int, batch: int = BATCH, seed: int = SEED
) -> list[list[list[list[int]]]]:
    """[rank][epoch][step] ↦ rows, from the order of the data set iterated alone."""
    whole = st.StreamingShardDataset(dataset, batch_size=batch * world, seed=seed, columns=["sequence_id"])
    ranks: list[list[list[list[int]]]] = [[] for _ in range(world)]
    for _ in range(epochs):
        steps = [b["sequence_id"].tolist() for b in whole]
        for rank in range(world):
            ranks[rank].append([rows[rank::world] for rows in steps if len(rows) >= world])
    return ranks


def flat(nested: Any) -> list[Any]:
    return [one for some in nested for one in some]


MORE = {
    "ddp": [],
    "torchtitan_style": [],
    "accelerate_mdlm": ["--accumulate=2"],
    "lightning_mdlm": ["--accumulate=2"],
    "hf_trainer": ["--accumulate=2"],
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("recipe", MORE)
def test_recipes(recipe: str, world: int, small: Any, tmp_path: pathlib.Path) -> None:
    dataset = small("words", {})
    random = np.random.default_rng(100 * world + len(recipe))
    each = dealt(dataset, world, 9)
    length = len(each[0][0])  # batches of an epoch: 10, or 5 of which the last has one row more on rank 0
    common = [
        str(dataset),
        "--device=cpu",
        f"--batch-size={BATCH}",
        f"--seed={SEED}",
        "--width=8",
        "--layers=1",
        "--log-every=100",
    ]
    if recipe == "lightning_mdlm":
        common.append(f"--devices={world}")
    ways: dict[str, tuple[list[str], int]] = {
        "stream": ([], 5),
        "workers": (["--workers=2"], int(random.integers(2, 5))),
    }
    if recipe == "hf_trainer":  # where --map is the Trainer's own order
        ways["workers"] = (["--workers=2"], int(random.integers(2, 5)))
    else:
        ways["map"] = (["--map"], int(random.integers(2, 5)))
    if recipe == "torchtitan_style":
        ways["torchdata"] = (["--torchdata", "--workers=2"], int(random.integers(2, 5)))
        ways["torchdata map"] = (["--torchdata", "--map"], int(random.integers(2, 5)))
    if MORE[recipe]:
        ways["accumulated"] = (MORE[recipe], 2)
    if recipe == "lightning_mdlm":
        ways["validated"] = (["--validation=train"], 3)
    over = 1 + int(random.integers(0, length))
    runs: list[dict[str, Any]] = []
    begun: dict[str, int] = {}
    for way, (more, every) in ways.items():
        accumulate = 2 if way == "accumulated" else 1
        per_epoch = -(-length // accumulate)  # steps
        steps = 2 * per_epoch + -(-over // accumulate)
        argv = [*common, *more, f"--steps={steps}"]
        saving = [*argv, f"--save-every={every}", f"--checkpoint={tmp_path / way.replace(' ', '-')}"]

        def batches(step: int, accumulate: int = accumulate, per_epoch: int = per_epoch) -> int:
            return step // per_epoch * length + step % per_epoch * accumulate

        deaths = [
            every + int(random.integers(1, every + 1)),
            min(2 * every + int(random.integers(2, every + 2)), steps - 1),
        ]
        if SOAK:
            deaths = sorted({int(d) for d in random.integers(every + 1, steps, 12)})
        runs.append({"name": f"{way} whole", "argv": argv})
        begun[f"{way} whole"] = 0
        saved = 0
        for number, death in enumerate(deaths):
            name = f"{way} {number}"
            runs.append({"name": name, "argv": saving, "die_at": batches(death) - batches(saved)})
            begun[name] = batches(saved)
            saved = death // every * every
        runs.append({"name": f"{way} end", "argv": saving})
        begun[f"{way} end"] = batches(saved)
    done = launch(world, tmp_path, recipe, runs)
    for rank in range(world):
        expected = flat(each[rank])
        for run in runs:
            name, got = run["name"], done[rank][run["name"]]
            assert got["error"] == ("killed" if "die_at" in run else ""), (name, got["error"])
            start = begun[name]
            assert got["rows"] == expected[start : start + len(got["rows"])], (name, rank)
            if "die_at" in run:
                assert len(got["rows"]) == run["die_at"]
            else:
                assert got["weights"] == done[0][f"{name.rpartition(' ')[0]} whole"]["weights"], name
            assert not [said for said in got["warnings"] if "left out" in said], name
        for way in set(ways) - {"accumulated"}:
            assert done[rank][f"{way} whole"]["weights"] == done[rank]["stream whole"]["weights"]
    for epoch in range(2):  # every row once but fewer than world_size, of what was trained on in truth
        rows = flat(
            flat(done[rank]["stream whole"]["rows"][epoch * length : (epoch + 1) * length] for rank in range(world))
        )
        everything = st.ShardDataset(dataset, batch_size=1)
        assert len(set(rows)) == len(rows) and len(everything) - len(rows) < world
    assert each[0][0] != each[0][1] != each[0][2]


def test_other_numbers_of_processes(small: Any, tmp_path: pathlib.Path) -> None:
    """Saved by three processes, gone on with by two, then by one: the rows of each epoch once."""
    dataset = small("words", {})
    rows = flat(flat(dealt(dataset, 1, 9, batch=1)[0]))
    count = len(rows) // 9
    done = 0
    for world, steps in ((3, 2), (2, 4), (1, 11)):
        (tmp_path / str(world)).mkdir()
        argv = [str(dataset), "--device=cpu", f"--batch-size={BATCH}", f"--seed={SEED}", "--width=8", "--layers=1"]
        argv += [f"--steps={steps}", f"--checkpoint={tmp_path / 'saved'}"]
        got = launch(world, tmp_path / str(world), "torchtitan_style", [{"name": "run", "argv": argv}])
        assert [rank["run"]["error"] for rank in got] == [""] * world
        for turn in zip(*(rank["run"]["rows"] for rank in got), strict=True):
            together = [row for some in turn for row in some]
            assert sorted(together) == sorted(rows[done : done + len(together)])
            done += len(together)
    assert done > count, "an epoch, and some of the next"


def test_lightning_limits(small: Any, tmp_path: pathlib.Path) -> None:
    """An epoch that Lightning cuts short begins the next one at its beginning; so does one gone on with."""
    dataset = small("words", {})
    expected = [rows for epoch in dealt(dataset, 1, 4)[0] for rows in epoch[:3]]
    argv = [
        str(dataset),
        "--device=cpu",
        f"--batch-size={BATCH}",
        f"--seed={SEED}",
        "--width=8",
        "--layers=1",
        "--steps=10",
    ]
    saving = [*argv, "--save-every=2", f"--checkpoint={tmp_path / 'saved'}"]
    options = {"limit_train_batches": 3, "reload_dataloaders_every_n_epochs": 1}
    runs = [
        {"name": "whole", "argv": argv, "options": options},
        {"name": "killed", "argv": saving, "die_at": 5, "options": options},
        {"name": "end", "argv": saving, "options": options},
    ]
    (done,) = launch(1, tmp_path, "lightning_mdlm", runs)
    assert [done[name]["error"] for name in done] == ["", "killed", ""]
    assert done["whole"]["rows"] == expected[:10]
    assert done["end"]["rows"] == expected[4:10]
    assert done["end"]["weights"] == done["whole"]["weights"]


# more and fewer devices, which do not divide an epoch; `make soak` has others, too
WORLDS = [(1, 3), (3, 2), *([(1, 2), (2, 1)] if SOAK else [])]


@pytest.mark.parametrize("worlds", WORLDS)
def test_lightning_on_other_numbers_of_devices(worlds: tuple[int, int], small: Any, tmp_path: pathlib.Path) -> None:
    """Saved in mid-epoch by some devices, gone on with by others: the rows of each epoch once, but fewer than there are devices."""
    dataset = small("words", {})
    rows = flat(flat(dealt(dataset, 1, 3, batch=1)[0]))
    count, done = len(rows) // 3, 0
    steps = 0
    for number, world in enumerate(worlds):
        left = count - done
        # most of an epoch, then its rest and some of the next
        steps += left * 6 // 10 // (BATCH * world) if number == 0 else -(-left // (BATCH * world)) + 2
        (tmp_path / str(number)).mkdir()
        argv = [str(dataset), "--device=cpu", f"--batch-size={BATCH}", f"--seed={SEED}", "--width=8", "--layers=1"]
        argv += [f"--steps={steps}", "--save-every=1", f"--checkpoint={tmp_path / 'saved'}", f"--devices={world}"]
        got = launch(world, tmp_path / str(number), "lightning_mdlm", [{"name": "run", "argv": argv}])
        assert [rank["run"]["error"] for rank in got] == [""] * world
        for turn in zip(*(rank["run"]["rows"] for rank in got), strict=True):
            together = [row for some in turn for row in some]
            if done < count < done + world:  # fewer rows than devices at the end of an epoch are left out
                done = count
            assert sorted(together) == sorted(rows[done : done + len(together)])
            done += len(together)
    assert done > count, "an epoch, and some of the next"


def test_the_trainer_goes_on_with_the_same_number_of_processes_only(small: Any, tmp_path: pathlib.Path) -> None:
    """It counts the batches of its checkpoint, and those of other processes are others."""
    dataset = small("words", {})
    for number, (world, error) in enumerate(((1, ""), (2, "rows would repeat or be left out"))):
        (tmp_path / str(number)).mkdir()
        argv = [str(dataset), "--device=cpu", f"--batch-size={BATCH}", f"--seed={SEED}", "--width=8", "--layers=1"]
        argv += [f"--steps={3 + number}", "--save-every=3", f"--checkpoint={tmp_path / 'saved'}"]
        got = launch(world, tmp_path / str(number), "hf_trainer", [{"name": "run", "argv": argv}])
        for rank in got:
            assert error in rank["run"]["error"] if error else rank["run"]["error"] == "", rank["run"]["error"]


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_right_is_refused(world: int, small: Any, tmp_path: pathlib.Path) -> None:
    dataset = small("words", {})
    each = dealt(dataset, world, 2, seed=1)
    argv = [str(dataset), str(tmp_path / "traps")]
    done = launch(world, tmp_path, "framework_traps", [{"name": "traps", "argv": argv}])
    assert [rank["traps"]["error"] for rank in done] == [""] * world
    everything = sorted(flat(flat(dealt(dataset, 1, 1)[0])))
    for rank in range(world):
        results = json.loads((tmp_path / f"traps-{rank}").read_text())
        for kind in ("StreamingShardDataset", "ShardDataset"):
            assert results[f"ours {kind}"] == {"got": each[rank], "error": ""}
            length = len(each[rank][0])
            steps = [*range(4, length + 1, 4), *([length] if length % 4 else [])]
            assert results[f"accumulate {kind}"]["got"] == [steps * 2], results[f"accumulate {kind}"]
            assert "this loader continues from its state" in results[f"skip {kind}"]["error"]
        assert "stillhouse.torch.DataLoader(dataset)" in results["Trainer stream"]["error"]
        assert "stillhouse.torch.DataLoader(dataset)" in results["Trainer stream undispatched"]["error"]
        others = {name: result for name, result in results.items() if name[-1] in "02"}
        assert len(others) == 12
        for name, result in others.items():  # right, or refused with the line to write
            if world == 1 and result["got"] is not None:
                assert result["got"] == each[rank], name
            else:
                assert "Use accelerator.prepare(stillhouse.torch.DataLoader(dataset))" in result["error"], (
                    name,
                    result,
                )
        for kind, first in (
            ("StreamingShardDataset", "undispatched StreamingShardDataset"),
            ("ShardDataset", "ShardDataset"),
        ):
            if world == 1:  # these at least are right
                assert all(results[f"{first} {count}"]["got"] for count in (0, 2))
                assert "would begin epoch 0, but the data set is at epoch 1" in results[f"counted {kind}"]["error"]
                refused, rest = results[f"gone on {kind}"]["got"]
                assert "would begin epoch 0, but the data set is at epoch 1" in refused
                assert rest == each[rank][1][-len(rest) :]
    # DDP whose ranks differ by a batch, with drop_last=False: 37 rows are 3 · 12 and 1 for two ranks
    whole = flat(dealt(dataset, 1, 1, batch=6 * world, seed=1)[0])
    for rank in range(world):
        got = json.loads((tmp_path / f"traps-{rank}").read_text())["joined"]["got"]
        assert got == [rows[rank::world] for rows in whole if rows[rank::world]] and len(got) == (
            7 if world == 1 else 4 - rank
        )
    # Hugging Face's own order: every row of an epoch once, but for the last global batch (dataloader_drop_last)
    of_ranks = [json.loads((tmp_path / f"traps-{rank}").read_text())["Trainer map"]["got"] for rank in range(world)]
    steps = len(of_ranks[0]) // 2
    epochs = [sorted(flat(flat(rows[e * steps : (e + 1) * steps] for rows in of_ranks))) for e in range(2)]
    for rows in epochs:
        assert len(set(rows)) == len(rows) == len(everything) // (BATCH * world) * BATCH * world
    assert of_ranks[0][:steps] != of_ranks[0][steps:]
