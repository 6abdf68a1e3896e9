"""The comparison with official code, as far as it goes without that code: its results as they are kept, its page, how it cuts, feeds and judges."""

from __future__ import annotations

import json
import pathlib
import subprocess
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import ROOT, program


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads((ROOT / "docs/proof/official.json").read_text())


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return import_module("official.compare")


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return import_module("official.theirs")


def test_what_is_kept_has_no_contradiction_and_every_mistake_was_seen(found: Any, theirs: ModuleType) -> None:
    comparisons = found["comparisons"]
    assert len(comparisons) >= 40 and len({of["name"] for of in comparisons}) == len(comparisons)
    for of in comparisons:
        assert of["verdict"] in ("equal", "explained"), of["name"]
        assert of["one_wrong_entry_seen"] and np.prod(of["shape"]) >= 1 and of["theirs"] and of["ours"], of["name"]
        assert ("why" in of) == (of["verdict"] == "explained"), of["name"]
        if "why" in of:
            assert of["why"]["words"] and of["why"]["line"].rsplit(":", 1)[1].isdigit(), of["name"]
        else:
            assert of["difference"] <= of["bound"].get("absolute", np.inf), of["name"]
            assert of["relative"] <= of["bound"].get("relative", np.inf), of["name"]
    assert found["mistakes"] and all(of["seen_by"] for of in found["mistakes"])


def test_every_repository_is_compared_with_at_its_commit(found: Any, theirs: ModuleType) -> None:
    kept = {(of["repository"], of["commit"]) for of in found["comparisons"] if of["repository"]}
    wanted = {(repository.name, repository.commit) for repository in theirs.REPOSITORIES}
    assert kept == wanted == {(of["name"], of["commit"]) for of in found["repositories"]}
    without = {of["paper"]: of for of in found["without_code"]}
    assert without.keys() == theirs.WITHOUT_CODE.keys() and all(of["code"] is None for of in without.values())


def test_results_name_no_place_on_a_machine_and_keep_nothing_of_theirs(found: Any) -> None:
    text = json.dumps(found)
    assert "/work" not in text and "/tmp" not in text and "/root" not in text
    assert not any(word in text for word in ("torch.rand", "self.", "import ", "def "))


def test_the_page_tells_a_contradiction_first(found: Any, tmp_path: pathlib.Path) -> None:
    page = import_module("page")

    def made(of: Any) -> tuple[str, str, str]:
        """The first page, and the page on official code before and after its first table; lines joined."""
        (tmp_path / "official.json").write_text(json.dumps(of))
        texts, _ = page.made(tmp_path, tmp_path / "PROOF.md")
        first, section = texts[tmp_path / "official.md"].split("## Results by paper")
        return " ".join(texts[tmp_path / "PROOF.md"].split()), " ".join(first.split()), section

    front, first, section = made(found)
    assert all(f"| {of['name']} |" in section for of in found["comparisons"])
    against = [of["name"] for of in found["comparisons"] if of.get("why", {}).get("first")]
    assert against and f"against a paper or our defaults: {'; '.join(against)}." in first
    assert (
        "No code is public for: Gumbel Distillation, Medusa heads; ARMD." in first and "not detected: none" in section
    )
    assert "Authors' code, " not in front
    wrong = json.loads(json.dumps(found))
    wrong["comparisons"][0]["verdict"] = "contradiction"
    wrong["mistakes"][0]["seen_by"] = []
    front, first, _ = made(wrong)
    told = f"{wrong['comparisons'][0]['name']}: our result is not the authors'"
    assert told in first and f"Authors' code, {told}" in front
    assert f"No comparison detects these deliberate mistakes: {wrong['mistakes'][0]['mistake']}." in first


THEIRS = """
import a_package_that_is_not_there
BASE = 7

def doubled(x):
  made = x * 2
  return made

class Trainer(a_package_that_is_not_there.Module):
  @a_package_that_is_not_there.decorated
  def masked(self, x, share):
    return torch.where(torch.rand(*x.shape, device="cuda") < share, self.mask, doubled(x))
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path, theirs: ModuleType) -> tuple[pathlib.Path, Any]:
    """A repository of ours in place of theirs."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    (folder / "code.py").write_text(THEIRS)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "code.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    repository = theirs.Repository("a paper", "somebody/something", commit)
    (tmp_path / "somebody").mkdir()
    folder.rename(tmp_path / repository.folder)
    return tmp_path, repository


def test_functions_run_without_the_rest_of_their_program(checkout: Any, theirs: ModuleType) -> None:
    code = theirs.Code(*checkout, "code.py")
    assert code.at("Trainer.masked") == "code.py:11-12" and code.line("doubled", sets="made") == "code.py:6"
    assert code.line("Trainer.masked", calls="where") == "code.py:12" and code.line("doubled") == "code.py:7"
    assert code.constant("BASE") == 7 and code.value("doubled", "made", x=4) == 8
    trainer = code.fake("Trainer", {"masked": {"doubled": code.cut("doubled")}}, mask=-1)
    with theirs.fed(torch.tensor([0.1, 0.9])):
        assert trainer.masked(torch.tensor([3, 4]), 0.5).tolist() == [-1, 8]
    with pytest.raises(AssertionError, match="did not draw 1"), theirs.fed(torch.zeros(2)):
        pass
    with pytest.raises(AssertionError, match="draws more"), theirs.fed():
        trainer.masked(torch.tensor([3, 4]), 0.5)
    with pytest.raises(AssertionError, match=r"draws \(2,\), it was given \(3,\)"), theirs.fed(torch.zeros(3)):
        trainer.masked(torch.tensor([3, 4]), 0.5)
    for missing in (lambda: code.cut("tripled"), lambda: code.line("doubled", sets="x"), lambda: code.constant("NONE")):
        with pytest.raises(theirs.NotTheirs, match=r"code\.py"):
            missing()


def test_a_file_that_is_not_its_commit_is_refused(checkout: Any, theirs: ModuleType) -> None:
    root, repository = checkout
    with pytest.raises(theirs.NotTheirs, match="missing, valid: a checkout of somebody/something"):
        theirs.Code(root, repository, "other.py")
    (root / repository.folder / "code.py").write_text(THEIRS.replace("* 2", "* 3"))
    with pytest.raises(theirs.NotTheirs, match="valid: [0-9a-f]{40}, of commit"):
        theirs.Code(root, repository, "code.py")


@pytest.mark.parametrize(
    ("ours", "bound", "absolute"),
    [
        (np.array([[True, False]]), 0.0, 0.0),
        (np.array([3, 0, -2]), 0.0, 0.0),
        (np.array([0.5, 0.0, 2.0], np.float32), 2e-6, 0.0),
        (np.zeros(4), 2e-6, 0.0),
        (torch.tensor([-1.5, 3.0], dtype=torch.float64), 0.0, 1e-3),
    ],
)
def test_one_wrong_entry_is_seen(compare: ModuleType, ours: Any, bound: float, absolute: float) -> None:
    made = compare.Comparison("a: b", "", None, "", "", ours, ours, bound, absolute=absolute, printed="a page")
    assert made.judged()["verdict"] == "equal" and compare.caught(made)


def test_what_is_no_number_or_of_another_shape_is_not_equal(compare: ModuleType) -> None:
    one, inf = np.ones(3), np.array([1.0, np.inf, 1.0])
    for theirs, ours in ((one, np.ones((3, 1))), (one, inf), (one, one * np.nan), (one[:0], one[:0])):
        assert not compare.apart(theirs, ours, 1.0, 1e9)[2]
    assert compare.apart(inf, inf, 0.0)[2] and compare.apart(one * np.nan, one * np.nan, 0.0)[2]
    assert compare.apart(one, one + 1e-9, 1e-8)[2] and not compare.apart(one, one + 1e-7, 1e-8)[2]


def test_a_line_explains_only_what_it_makes_equal(compare: ModuleType) -> None:
    one = np.ones(3)

    def verdict(theirs: Any, ours: Any, after: Any) -> Any:
        why = compare.Because("code.py:6", "words", theirs, after)
        return compare.Comparison("a: b", "", None, "", "", theirs, ours, because=why, printed="a page").judged()

    assert verdict(one, 2 * one, one)["verdict"] == "explained"
    assert verdict(one, 2 * one, 3 * one)["verdict"] == "contradiction"
    assert verdict(one, one, one)["verdict"] == "contradiction"


def test_what_needs_no_code_of_theirs_is_as_it_was_kept(found: Any, tmp_path: pathlib.Path) -> None:
    main, data = import_module("official.__main__"), import_module("official.data")
    ours = data.Data(tmp_path, program())
    made = main.judged(tmp_path, ours, ("armd",))
    assert made == [of for of in found["comparisons"] if of["paper"] == "ARMD"]
    mistakes = main.mutated(tmp_path, ours, ("armd",), made)
    assert mistakes and all(of in found["mistakes"] for of in mistakes)


def test_mistakes_are_undone() -> None:
    for mutation in import_module("official.mutations").MUTATIONS:
        right = getattr(mutation.owner, mutation.name)
        with mutation.made():
            assert getattr(mutation.owner, mutation.name) is not right
        assert getattr(mutation.owner, mutation.name) is right


def test_the_list_says_which_checkouts_are_needed(theirs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    main = import_module("official.__main__")
    assert main.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(theirs.REPOSITORIES)
    assert all(repository.commit in line for repository, line in zip(theirs.REPOSITORIES, lines))
    with pytest.raises(SystemExit):
        main.main([])
    assert "--theirs: missing" in capsys.readouterr().err
