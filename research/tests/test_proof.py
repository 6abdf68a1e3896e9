"""The pages of proofs are what their results make, their intervals are right, and exact noise is what shards store."""

from __future__ import annotations

import json
import math
import pathlib
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from shared_fixtures import ROOT


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return import_module("page")


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    return import_module("page_parts")


@pytest.fixture(scope="module")
def trends() -> ModuleType:
    return import_module("page_trends")


RAW_MAZE: dict[str, Any] = {
    "paths": 1000,
    "passes": [1, 2, 4, 8, 16],
    "teachers": {"a": 990},
    "paper": {"mdlm": [53.0] * 5, "gumbel": [82.0] * 5},
    "seconds": 1,
    "machine": {"processor": "x86_64", "cores": 2, "torch": "2"},
    "jobs": 1,
    "training": {
        "layers": 4, "heads": 4, "width": 128, "epochs": 2, "batch": 256, "lr": 1e-3, "schedule": "cosine",
    },
}  # fmt: skip


def maze_students(seed: int, **hits: int) -> list[dict[str, Any]]:
    return [
        {"variant": name.replace("_", " "), "seed": seed, "hits": [of] * 5, "loss": [1.0, 0.5]}
        for name, of in hits.items()
    ]


def test_the_pages_are_what_their_results_make(page: ModuleType) -> None:
    texts, plots = page.made(ROOT / "docs/proof", ROOT / "docs/PROOF.md")
    for file, words in texts.items():
        assert file.read_text() == words, f"{file.name}: run `make proof`"
    assert {file for file in texts if file.parent.name == "proof"} == set((ROOT / "docs/proof").glob("*.md"))
    for name in plots:  # drawn by `make proof`, with a package that is not needed here
        assert (ROOT / "docs/proof" / name).read_bytes().startswith(b"\x89PNG"), name
    assert {file.name for file in (ROOT / "docs/proof").glob("*.png")} == set(plots)


def test_the_first_page_is_short_and_names_every_page(page: ModuleType) -> None:
    texts, _ = page.made(ROOT / "docs/proof", ROOT / "docs/PROOF.md")
    first = texts[ROOT / "docs/PROOF.md"]
    assert first.count("\n") <= 150
    for name in page.PAGES:
        assert f"(proof/{name}.md)" in first.split("## Pages")[1]
    claims = [line for line in first.split("## Results")[1].split("![")[0].split("\n") if line.startswith("| ")]
    assert len(claims) == 2 + len(page.PAGES) and all(line.count(" | ") == 3 for line in claims)


def test_what_is_missing_or_against_the_paper_comes_first(page: ModuleType, tmp_path: pathlib.Path) -> None:
    texts, plots = page.made(tmp_path, tmp_path / "PROOF.md")
    assert "".join(texts.values()).count("**Missing:**") == 12 and not plots
    assert texts[tmp_path / "PROOF.md"].count("**missing**") == len(page.PAGES)
    raw = {**RAW_MAZE, "students": maze_students(0, mdlm=600, stored_1=500, fresh=900)}
    (tmp_path / "maze.json").write_text(json.dumps(raw))
    texts, plots = page.made(tmp_path, tmp_path / "PROOF.md")
    told = " ".join(texts[tmp_path / "maze.md"].split("## How to read")[0].split())
    against = "`stored 1` (50.0 %) is not above `mdlm` (60.0 %), against the paper."
    assert against in told and against in " ".join(texts[tmp_path / "PROOF.md"].split())
    assert "teaches less than fresh noise (90.0 %)" in told
    assert "`stored 1` (50.0 %) is below `mdlm` (60.0 %), against the paper." in told
    assert "epochs 2 (paper: 200), lr 0.001 (paper: 0.0003)" in told and "share 1 teacher" in told
    assert "`maze.json` has 1 seed instead of 5" in told
    assert texts[tmp_path / "PROOF.md"].count("| **open** |") == 1, "one seed has no interval"
    assert len(plots["maze.png"].series) == 3


def test_the_plot_of_the_maze_has_intervals_and_both_ceilings(
    page: ModuleType, parts: ModuleType, tmp_path: pathlib.Path
) -> None:
    students = [done for seed in (0, 1) for done in maze_students(seed, mdlm=50, stored_1=200 + 20 * seed)]
    raw = {**RAW_MAZE, "students": [*students, *maze_students(0, fresh=300)]}
    (tmp_path / "maze.json").write_text(json.dumps(raw))
    plot = page.made(tmp_path, tmp_path / "PROOF.md")[1]["maze.png"]
    mean, half = parts.mean_and_half([20.0, 22.0])
    assert plot.series["stored 1"][0] == (1.0, mean)
    assert plot.intervals["stored 1"][0] == (mean - half, mean + half)
    assert plot.intervals["fresh"][0] == parts.wilson(300, 1000), "of one seed: that of its paths"
    student, teacher = plot.ceilings.values()
    assert [rate for _, rate in student] == list(import_module("page_maze").perfect())
    assert [rate for _, rate in teacher] == [99.0, 99.0]


def test_prose_is_wrapped_and_nothing_else_is() -> None:
    wrap = import_module("page_wrap")
    words = "word " * 40
    assert max(len(line) for line in wrap.wrapped(words).split("\n")) <= 120
    item, other = wrap.wrapped(f"- {words}\n- one").split("\n- ")
    assert all(line.startswith("  ") for line in item.split("\n")[1:]) and other == "one"
    for verbatim in (f"| {words} |", f"## {words}", f"```sh\n{words}\n```", f"![{words}](a.png)"):
        assert wrap.wrapped(verbatim) == verbatim
    for begin in range(100, 125):  # at no width does a line begin as a list would, or a figure lose its interval
        lines = wrap.wrapped("x" * begin + " 5. - 1.0 ± 0.5 [a b](c d) `e f` # g").split("\n")
        assert not any(line.startswith(("5. ", "- ", "# ", "± ", "0.5 ", "b](", "f`")) for line in lines)


def test_intervals(parts: ModuleType) -> None:
    from scipy import stats

    values = [3.0, 5.0, 4.0, 8.0, 1.0]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    mean, half = parts.mean_and_half(values)
    assert mean - half == pytest.approx(low, abs=1e-3) and mean + half == pytest.approx(high, abs=1e-3)
    assert math.isnan(parts.mean_and_half([2.0])[1])
    wilson = stats.binomtest(987, 1000).proportion_ci(0.95, "wilson")
    assert parts.binomial(987, 1000) == f"98.7 ({100 * wilson.low:.1f} to {100 * wilson.high:.1f})"


def test_a_trend_that_few_seeds_agree_on_by_chance_is_open(
    parts: ModuleType, trends: ModuleType, tmp_path: pathlib.Path
) -> None:
    page = parts.Page(tmp_path, tmp_path / "PROOF.md")
    of = {"a": [0.02, 0.021, 0.022], "b": [-0.5, -0.6]}
    trends.trends(page, "fewer", "A paper, Table 1", "nats", of, "Reasons.", {"a": 0.062})
    table, title, reasons = trends.trend_parts(page.trends)
    assert "| fewer | A paper, Table 1 | nats | 2 to 3 |" in table
    assert "a: +0.021 ± 0.062 of 3 seeds (open, opposite sign)" in table
    assert "b: -0.550 ± 0.635 of 2 seeds (open)" in table
    assert "opposite sign" in title and reasons == "- Fewer. Reasons."
    assert page.first == ["Fewer (A paper, Table 1): open at a, opposite sign."] and not page.contradictions


def test_more_passes_of_a_perfect_student_find_more() -> None:
    maze = import_module("page_maze")
    rates = maze.perfect()
    assert rates[0] == maze.one_pass_limit()
    # two passes: half of the positions are drawn given the others, which a student without noise cannot do in one
    assert list(rates) == sorted(rates) and 3 * rates[0] < rates[1] < 25 and 75 < rates[-1] < 90


def test_dense_noise_of_the_live_teacher_is_what_the_shards_store(demo: pathlib.Path) -> None:
    """transformers' own pass and Eq. 4 against what the Rust teacher, the encoder and the replay make of the same seed."""
    import stillhouse

    text: Any = import_module("text")
    ds = stillhouse.open(str(demo))
    teacher = text.Teacher(ROOT / "assets/teacher-nano-gpt2")
    example = text.masked(ds[:1].torch(), 1)
    far = (text.stored(example) - teacher.dense(example)).abs().sum(1) / 2
    assert len(far) > 10
    assert far.max() <= 1.02 * ds.info.noise.tolerance


def test_the_same_rows_of_several_seeds_are_not_so_many_measurements(parts: ModuleType) -> None:
    """Batches that repeat for every seed say nothing more of seeds: the interval is that of one mean of each."""
    from scipy import stats

    seeds, targets = [[1.0, 2.0, 3.0], [1.4, 2.4, 3.4], [0.9, 1.9, 2.9]], [10, 10, 20]
    means = [float(np.average(batches, weights=targets)) for batches in seeds]
    half = stats.t.ppf(0.975, 2) * stats.sem(means)
    assert parts.over_seeds(seeds, targets, 3) == f"{np.mean(means):.3f} ± {half:.3f}"
    ten = [[1.0, 2.0, 3.0]] * 10
    assert parts.over_seeds(ten, targets, 3) == "2.250 ± 0.000"
    assert (
        parts.over_seeds(seeds[:1], [10, 10, 10], 3)
        == f"2.000 ± {stats.t.ppf(0.975, 2) * stats.sem([1, 2, 3]):.3f} (rows)"
    )
    assert parts.over_seeds([], targets, 3) == ""


def of_tolerance(losses: dict[str, list[float]]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{"seed": seed, "validation": value} for seed, value in enumerate(values)]
        for name, values in losses.items()
    }


def test_a_tolerance_is_judged_by_the_upper_end_of_its_interval(tmp_path: pathlib.Path, parts: ModuleType) -> None:
    page = parts.Page(tmp_path, tmp_path / "PROOF.md")
    by = of_tolerance({
        "dense": [1.0, 1.0, 1.0],
        "stored 1e-3": [1.01, 1.0, 0.99],  # at most 0.025
        "stored 1e-2": [1.1, 0.9, 1.0],  # a mean of 0 and an interval that holds anything
        "stored 1e-1": [1.2, 1.21, 1.19],
        "stored 0.3": [1.0],
    })  # fmt: skip
    of = import_module("page_tolerance")
    cost = of.cost_of(page, by, "tolerance-28")
    assert cost.row(28) == [
        "28",
        "1e-3 (at most +0.025)",
        "1e-1 (+0.200 ± 0.025)",
        "1e-2 (between -0.248 and +0.248), 0.3 (one seed: +0.000)",
        "below",
    ]
    assert len(page.first) == 1 and "1e-2" in page.first[0] and "is open" in page.first[0]
    claim = of.default_of(page, {28: cost})
    assert claim.verdict == "supported" and "at most +0.025 nats at V = 28" in claim.evidence
    assert "1e-2, 0.3 at V = 28" in claim.caveat
    noticed = of.Cost(of_tolerance({"dense": [1.0, 1.0], "stored 1e-3": [1.2, 1.21]}))
    assert of.default_of(page, {28: cost, 512: noticed}).verdict == "contradicted"


def test_a_trend_with_the_opposite_sign_is_told_whether_or_not_it_is_significant(
    tmp_path: pathlib.Path, parts: ModuleType, trends: ModuleType
) -> None:
    page = parts.Page(tmp_path, tmp_path / "PROOF.md")
    of = {"x": [-1.0, -1.1, -0.9], "y": [0.1, -0.3, 0.5], "z": [1.0, 1.1, 0.9], "": []}
    trends.trends(page, "a below b", "A paper", "nats", of, "Small.")
    told = (
        "x: -1.000 ± 0.248 (**supported**); y: +0.100 ± 0.994 (open, opposite sign); "
        "z: +1.000 ± 0.248 (**contradicted**)"
    )
    table, _, reasons = trends.trend_parts(page.trends)
    assert f"| nats | 3 | {told} |" in table and reasons == "- A below b. Small."
    assert page.first == ["A below b (A paper): contradicted at z; open at y, opposite sign."]
    assert page.contradictions == ["A below b (A paper): contradicted. Difference in nats: z: +1.000 ± 0.248."]
    trends.trends(page, "c below d", "A paper", "nats", {"x": [-1.0, 1e-9]}, "Small.")
    assert len(page.first) == 1


def test_trends_of_methods_are_counted_without_our_own_measures(
    tmp_path: pathlib.Path, parts: ModuleType, trends: ModuleType
) -> None:
    page = parts.Page(tmp_path, tmp_path / "PROOF.md")
    trends.trends(page, "a below b", "A paper", "nats", {"": [-1.0, -1.1, -0.9]}, "")
    trends.trends(page, "c below d", "our measure", "nats", {"": [1.0, 1.1, 0.9]}, "", is_own_measure=True)
    claim = import_module("page_methods").claim_of(page, [], [(28, 600)])
    assert claim.evidence.startswith("of 1 measured differences 1 are supported, 0 open, 0 contradicted")
    assert claim.verdict == "supported"
    trends.trends(page, "e below f", "A paper", "nats", {"": [1.0, -1.1, 0.9]}, "")
    assert import_module("page_methods").claim_of(page, [], [(28, 600)]).verdict == "partly supported"


def test_codes_pay_for_what_they_do_not_know() -> None:
    """A held-out code is above the entropy of its source, and near it for many symbols; the plug-in entropy of few is below."""
    of = import_module("noise_bytes")
    draw = np.random.default_rng(0)
    source = draw.dirichlet(np.ones(256))
    entropy = float(-(source * np.log2(source)).sum())
    for many, near in ((400, 2.0), (40000, 0.02)):
        symbols = draw.choice(256, many, p=source).tolist()
        bits = of.held_out_bits(symbols, list(range(many)), 256) / many
        assert entropy - 0.02 < bits < entropy + near
        assert many > 400 or of.entropy_bits(symbols) < entropy - 0.3


def test_the_simulated_encoder_keeps_tolerance_and_condition() -> None:
    of = import_module("noise_bytes")
    draw = np.random.default_rng(1)
    for _ in range(20):
        p = draw.dirichlet(np.full(500, 0.05))
        x = int(draw.choice(500, p=p))
        e, e0 = draw.exponential(size=500), draw.exponential()
        large = e + p * e0
        large[x] = p[x] * e0
        token = of.Token(large, e, x, e0, float(np.log(p[x])))
        for bits in (0, 8, 12):
            grid = of.Grid(bits)
            found = token.encoded(grid, 1e-2, 0.001)
            if found is None:
                assert bits == 8
                continue
            index, values = found[0], grid.values(found[1])
            weights = 1 / large
            there = 1 / e
            there[x] = 1 / (large[x] * np.exp(0.001))
            there[index] = 1 / (e[index] + np.exp(values) * e0)
            assert np.abs(there / there.sum() - weights / weights.sum()).sum() / 2 <= 1e-2
            wins = np.log(p, where=p > 0, out=np.full(500, -np.inf)) + np.log(there)
            assert wins.argmax() == x
