"""Runs of the proofs: a fresh clone makes everything anew, two runs are compared figure by figure, and nothing that one of them lacks is passed over."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from shared_fixtures import ROOT, program

TINY = ["--seeds=1", "--epochs=1", "--teacher-epochs=1", "--width=32", "--layers=1", "--paths=8", "--passes=1", "--jobs=1"]  # fmt: skip


@pytest.fixture(scope="module")
def agree() -> ModuleType:
    return import_module("agree")


def lines_of(*words: str) -> list[str]:
    """What make would run."""
    asked = ["make", "-n", "--no-print-directory", *words]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("target", ["maze", "methods", "text"])
@pytest.mark.parametrize("more", [[], ["PUBLISH=1"]])
def test_make_never_trains_into_the_published_results(target: str, more: list[str]) -> None:
    """A results file that is there is gone on with: of the published one nothing would be left to train."""
    lines = [line for line in lines_of(target, *more) if "--json" in line]
    files = [line.split("--json ")[i + 1].split()[0] for line in lines for i in range(line.count("--json "))]
    assert len(files) == {"maze": 1, "methods": 8, "text": 1}[target]
    assert all(file.startswith("demo-out/proof/") for file in files), files
    compared = [line for line in lines_of(target, *more) if "agree.py" in line]
    assert len(compared) == 1 and ("--publish" in compared[0]) == bool(more), compared


def test_a_fresh_work_folder_beside_the_published_results_trains(tmp_path: pathlib.Path) -> None:
    """The very command of `make maze`, in another folder: its students are made, the published file stays."""
    published = ROOT / "docs/proof/maze.json"
    before = published.read_bytes()
    assert len(json.loads(before)["students"]) >= 15
    line = next(line for line in lines_of("maze", f"ARGS={' '.join(TINY)}") if "maze/run.py" in line)
    words = shlex.split(line.replace("demo-out", str(tmp_path)).replace("target/debug/stillhouse", str(program())))
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "proof/maze.json").read_text())
    assert [done["variant"] for done in found["students"]] == ["mdlm", "stored 1", "fresh"]
    assert found["made"][0]["date"] and found["teacher_seed"] == 0
    assert published.read_bytes() == before
    other = [sys.executable, *words[1:], "--teacher-seed=1"]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert refused.returncode != 0 and "asked were" in refused.stderr
    del other[other.index("--json") : other.index("--json") + 2]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert refused.returncode != 0 and "holds a teacher of {'seed': 0, " in refused.stderr


def test_the_text_students_need_no_folder_of_others(tmp_path: pathlib.Path) -> None:
    """The very command of `make text` in a clone where nothing else has run."""
    tiny = "--documents=2 --tolerances 1e-3 --students mdlm --seeds=1 --steps=1 --texts=1 --rows=1 --length=16 --layers=1 --width=8"
    line = next(line for line in lines_of("text", f"ARGS={tiny}") if "text.py" in line)
    words = shlex.split(line.replace("demo-out", str(tmp_path)).replace("target/debug/stillhouse", str(program())))
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [done["student"] for done in json.loads((tmp_path / "proof/text.json").read_text())["students"]] == ["mdlm"]


def of(name: str, values: dict[int, float], **more: Any) -> dict[str, Any]:
    return {"training": {"steps": 1}, "students": [{"student": name, "seed": s, "loss_of": v, **more} for s, v in values.items()]}  # fmt: skip


def test_means_of_other_seeds_are_judged_by_the_interval_of_their_difference(agree: ModuleType) -> None:
    import numpy as np
    from scipy import stats

    ones, others = [1.0, 1.2, 0.9, 1.1], [1.4, 1.6, 1.3]
    welch = stats.ttest_ind(ones, others, equal_var=False)
    assert agree.within(ones, others) is bool(welch.pvalue >= 0.05) is False
    nearer = (np.asarray(others) - 0.2).tolist()
    assert agree.within(ones, nearer) is bool(stats.ttest_ind(ones, nearer, equal_var=False).pvalue >= 0.05) is True
    assert agree.within([1.0], others) is None
    found = agree.compared(of("a", dict(enumerate(ones))), of("a", dict(enumerate(others, 10))))
    assert (found["equal"], found["within"], found["outside"], found["which"]) == (0, 0, 1, ["a loss_of"])
    assert found["seeds"] == [[0, 1, 2, 3], [10, 11, 12]]
    found = agree.compared(of("a", {0: 1.0}), of("a", {0: 1.0, 1: 2.0}))
    assert (found["equal"], found["unknown"]) == (1, 0)
    found = agree.compared(of("a", {0: 1.0}), of("a", {0: 1.1, 1: 2.0}))
    assert (found["equal"], found["unknown"], found["shared_differ"]) == (0, 1, 1)
    found = agree.compared(of("a", {0: 1.0}), of("a", {1: 1.1}))
    assert (found["unknown"], found["shared_differ"]) == (1, 0), "no seed of both"


def test_what_one_run_lacks_is_told(
    agree: ModuleType, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "official.json").write_text('{"comparisons": []}')
    both = of("a", {0: 1.0, 1: 2.0})
    more = of("a", {0: 1.0, 1: 2.0}, extra=[0.5, 0.6])
    (first / "same.json").write_text(json.dumps(both))
    (second / "same.json").write_text(json.dumps(more))
    (first / "alone.json").write_text(json.dumps(both))
    (first / "other.json").write_text(json.dumps(both))
    (second / "other.json").write_text(json.dumps({**both, "training": {"steps": 2}}))
    assert agree.main([str(first), str(second), "--json", str(tmp_path / "agreement.json")]) == 0
    result = json.loads((tmp_path / "agreement.json").read_text())
    assert result["files"]["same"]["lacking"] == [["a extra.0", "a extra.1"], []]
    assert list(result["files"]) == ["same"]
    (second / "same.json").unlink()
    (second / "alone.json").write_text(json.dumps(both))
    assert agree.main([str(first), str(second), "--json", str(tmp_path / "agreement.json")]) == 0
    later = json.loads((tmp_path / "agreement.json").read_text())["files"]
    assert later["same"] == {**result["files"]["same"], "before": True} and "before" not in later["alone"]
    (second / "alone.json").unlink()
    assert result["not_compared"]["alone"] == "second run: no such file"
    assert "{'steps': 1}, of the second {'steps': 2}" in result["not_compared"]["other"]
    told = capsys.readouterr().out
    assert "the first run lacks 2 figures: a extra.0, a extra.1" in told and "alone: not compared" in told
    with pytest.raises(SystemExit):
        agree.main([str(first), str(second), "--only", "alone"])
    assert "got no alone" in capsys.readouterr().err


def test_a_maze_without_a_schedule_has_a_constant_rate(agree: ModuleType, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    maze = {**of("mdlm", {0: 1.0}), "experiment": "maze"}
    for folder, schedule in ((first, {"schedule": agree.CONSTANT}), (second, {})):
        folder.mkdir()
        (folder / "maze.json").write_text(json.dumps({**maze, "training": {"lr": 1.0, **schedule}}))
    assert agree.all_of(first, second)["files"]["maze"]["equal"] == 1
    (second / "maze.json").write_text(json.dumps({**maze, "training": {"lr": 1.0, "schedule": "cosine"}}))
    assert "other settings" in agree.all_of(first, second)["not_compared"]["maze"]


def test_losses_of_batches_are_one_figure(agree: ModuleType) -> None:
    student = {"validation": [1.0, 3.0], "shown": {"prior": [4.0, 6.0]}, "hits": [5, 7], "seconds": 3, "texts": 8}
    assert dict(agree.numbers(student)) == {"validation": 2.0, "shown.prior": 5.0, "hits.0": 5.0, "hits.1": 7.0}


def test_a_run_that_does_not_agree_fails_unless_it_is_published(agree: ModuleType, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, add in ((first, 0.0), (second, 9.0)):
        folder.mkdir()
        students = [{"student": "a", "seed": s + int(add), "b": s / 9 + add, "c": s / 8 + add} for s in range(3)]
        (folder / "one.json").write_text(json.dumps({"training": {}, "students": students}))
    assert agree.main([str(first), str(second)]) == 1
    assert agree.main([str(first), str(second), "--publish", "--only", "one"]) == 0
    assert (first / "one.json").read_bytes() == (second / "one.json").read_bytes()


def test_the_page_warns_of_results_that_were_run_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "agreement.json").write_text(
        json.dumps({"files": {}, "not_compared": {"some": "second run: no such file"}})
    )
    (tmp_path / "some.json").write_text(json.dumps(of("a", {0: 1.0})))
    page = import_module("page_parts").Page(tmp_path, tmp_path / "PROOF.md")
    import_module("page_agreement").agreement(page)
    assert page.first == ["some.json was run once: that a second run agrees is not shown. (second run: no such file)"]
