"""The page on the maze."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
from page_parts import (
    ROOT,
    Claim,
    Page,
    binomial,
    counted,
    machine_of,
    made_of,
    mean_and_half,
    of_students,
    shown,
    table,
    wilson,
)
from page_plot import Plot

Students = dict[str, list[Any]]
RUNS = {
    "maze": ("Full size", "make maze"),
    "maze-constant": ("Full size, 200 epochs at a constant rate, as in the paper", "make maze RUN=maze-constant"),
    "maze-small": ("Small students and teacher, 40 epochs, constant rate", "make maze RUN=maze-small"),
}
"""Title and command of each result, by file."""
PASSES = (1, 2, 4, 8, 16)
SIMULATED = 4000
"""Paths of a simulated ceiling."""
PAPER = {"epochs": 200, "batch": 256, "lr": 3e-4}
"""How the paper trains (appendix E.1)."""
SETTINGS = ("layers", "heads", "width", "epochs", "batch", "lr", "schedule")


def maze(page: Page) -> None:
    page.begin(
        "Maze (Gumbel Distillation, Table 7)",
        "valid paths of students with stored, fresh and no noise, by passes",
        "A student learns to write walks through a maze. This experiment tests whether stored noise teaches it as "
        "much as noise that the live teacher draws anew in each step. The paper's Table 7 has the same students, "
        "without stored noise.",
        "- `mdlm`: trained without noise.\n"
        "- `stored 1`: trained with one draw of noise per token, stored in shards and replayed.\n"
        "- `fresh`: trained with dense noise that the live teacher draws anew in each step.",
        "```sh\n"
        "make maze                      # full size, 5 seeds\n"
        "make maze RUN=maze-constant    # 200 epochs at a constant rate, as in the paper\n"
        "make maze RUN=maze-small       # small students and teacher, 5 seeds\n"
        "```",
    )
    reading_of(page)
    whole = page.read("maze.json")
    if whole is None:
        page.missing("maze.json", "make maze")
        page.warn("The maze of full size has not been run to its end. This page claims no figure of Table 7.")
    else:
        ceilings(page, whole)
        maze_of(page, whole, "maze")
        beside_the_paper(page, whole)
    others = {stem: found for stem in RUNS if stem != "maze" and (found := page.read(f"{stem}.json")) is not None}
    for stem, found in others.items():
        maze_of(page, found, stem)
    made = {**({} if whole is None else {"maze": whole}), **others}
    if made:
        rows = [
            [f"`{stem}.json`", *(f"{found['training'][name]}" for name in SETTINGS)] for stem, found in made.items()
        ]
        page.say("## Training settings of students", table(["result", *SETTINGS], rows))


def reading_of(page: Page) -> None:
    """What the tables of all runs have in common."""
    page.say(
        "## How to read the tables",
        "- Figures are valid paths in %. NFE is the number of passes of the student per path.\n"
        "- ± is the 95 % interval over seeds. With one seed, brackets hold the 95 % interval of its paths alone "
        "(Wilson).\n"
        "- `perfect, no noise` is the ceiling without noise: a student that knows the walks exactly.\n"
        "- Noise at generation comes from the prior, scaled by τ = 0.85.\n"
        "- The error bars of the plots are these intervals. Grey lines are the two ceilings: without noise, and with "
        "noise (the teacher itself).",
    )


def ceilings(page: Page, found: Any) -> None:
    """Why the levels of the paper do not compare with ours."""
    grid = imported_grid()
    paper = found["paper"]["mdlm"]
    page.warn(
        f"Ceiling without noise, one pass: a perfect MDLM finds {one_pass_limit():.1f} % on the open map, since it "
        "draws all positions independently. This figure is exact."
    )
    page.warn(
        f"Ceiling without noise, {', '.join(str(n) for n in PASSES[1:-1])} and {PASSES[-1]} passes: "
        f"{', '.join(f'{rate:.0f}' for rate in perfect()[1:])} % by the students' ancestral sampler. These figures "
        f"are simulated: {SIMULATED:,} paths each, with the exact shares of the {grid.PATHS:,} walks."
    )
    page.warn(
        f"The paper's {paper[0]:g} % in one pass is impossible with these walks. Its {paper[1]:g} to {paper[-1]:g} % "
        "in more passes are impossible with this sampler. A sampler that unmasks equally many tokens in each pass "
        "finds more in many passes. The paper's map, paths or sampler must differ: only the order of the rows "
        "compares."
    )
    page.warn(
        f"The paper names no walls of the maze. The open map has {len(grid.walks()):,} walks of at most "
        f"{grid.LONGEST} moves. The experiment uses the first {grid.PATHS:,} of a breadth-first search."
    )


def one_pass_limit() -> float:
    """Valid paths, in %, of a perfect MDLM in one pass: it draws all positions of a walk independently of each other.

    It draws each position from that position's share in the 2,000 walks; the valid walks are few enough to add up.
    """
    grid = imported_grid()
    rows = [grid.text_of(walk).split() for walk in grid.walks()]
    learned = rows[: grid.PATHS]
    shares = [Counter(row[i] for row in learned) for i in range(grid.LONGEST)]
    return 100 * sum(math.prod(share[word] / len(learned) for share, word in zip(shares, row)) for row in rows)


@functools.cache
def perfect() -> tuple[float, ...]:
    """Valid paths, in %, of a student without noise that knows the 2,000 walks exactly, in 1, 2, 4, 8, 16 passes.

    One pass is computed exactly; the others are simulated with the sampler of the students. The student draws each
    masked position from that position's share in the walks that agree with the visible tokens; where none agrees, from
    its share in all walks.
    """
    grid = imported_grid()
    ids = {word: i for i, word in enumerate(grid.VOCABULARY)}
    rows = [[grid.BOS, *(ids[word] for word in grid.text_of(walk).split()), grid.EOS] for walk in grid.walks()]
    walks = np.eye(len(ids), dtype=np.float32)[np.array(rows[: grid.PATHS])].reshape(grid.PATHS, -1)
    made = [one_pass_limit()]
    for passes in PASSES[1:]:
        random = np.random.default_rng(passes)
        tokens = np.full((SIMULATED, grid.LENGTH), -1)
        tokens[:, 0] = grid.BOS
        for left in range(passes, 0, -1):
            there = (tokens[:, :, None] == np.arange(len(ids))).astype(np.float32).reshape(len(tokens), -1)
            agrees = there @ walks.T == (tokens >= 0).sum(1, keepdims=True)
            agrees[~agrees.any(1)] = True
            counts = (agrees.astype(np.float32) @ walks).reshape(len(tokens), grid.LENGTH, -1).cumsum(2)
            drawn = (counts <= random.random(tokens.shape)[:, :, None] * counts[:, :, -1:]).sum(2)
            now = (tokens < 0) & (random.random(tokens.shape) < 1 / left)
            tokens = np.where(now, drawn, tokens)
        made.append(100 * sum(grid.is_valid(row) for row in tokens.tolist()) / len(tokens))
    return tuple(made)


def imported_grid() -> Any:
    sys.path.insert(0, str(ROOT / "research/maze"))
    try:
        return importlib.import_module("grid")
    finally:
        sys.path.pop(0)


def teachers_of(found: Any) -> str:
    """Valid paths of the teachers in %; results without a teacher's fingerprint name it `teacher`."""
    hits = hits_of_teachers(found)
    who = "The teacher itself" if len(hits) == 1 else f"The {len(hits)} teachers (a new work folder trains a new one)"
    return f"{who}: {', '.join(binomial(valid, found['paths']) for valid in hits)} %."


def hits_of_teachers(found: Any) -> list[int]:
    """Valid paths of the teachers."""
    return [*([found["teacher"]] if "teacher" in found else []), *found.get("teachers", {}).values()]


def gaps_of(ones: list[Any], others: list[Any], i: int, paths: int) -> list[float]:
    """How far two students of one seed are apart at a number of passes, in points."""
    of = {done["seed"]: done["hits"][i] for done in others}
    return [100 * (done["hits"][i] - of[done["seed"]]) / paths for done in ones if done["seed"] in of]


def beside_the_paper(page: Page, found: Any) -> None:
    """Where the run of full size differs from the paper, and how near stored noise comes to fresh noise."""
    by, passes, paths, how = (
        of_students(found["students"], "variant"),
        found["passes"],
        found["paths"],
        found["training"],
    )
    other = [f"{name} {how[name]:g} (paper: {value:g})" for name, value in PAPER.items() if how[name] != value]
    page.warn(
        f"Training differs from the paper: {', '.join(other)}, {how['schedule']}. The teacher trains "
        f"{found.get('teacher_epochs', 100)} epochs (paper: 200). Five seeds take two hours this way. `maze-constant` "
        "trains as the paper does."
    )
    teachers = hits_of_teachers(found)
    page.warn(
        f"All seeds share {counted(len(teachers), 'teacher')} and {'its' if len(teachers) == 1 else 'their'} one "
        "stored draw of noise. Intervals are over students alone."
    )
    reached = {
        name: sum(done["hits"][-1] for done in by[name]) / len(by[name]) / paths
        for name in ("stored 1", "fresh")
        if name in by
    }
    if teachers and reached:
        below = ", ".join(
            f"`{name}` by {100 * (max(teachers) / paths - rate):.0f} points" for name, rate in reached.items()
        )
        page.warn(
            f"At {passes[-1]} passes students with noise stay below their teacher ({100 * max(teachers) / paths:.1f} "
            f"%): {below}. The paper's reach {found['paper']['gumbel'][-1]:g} %, the level of such a teacher. "
            f"{how['epochs']} epochs of {imported_grid().PATHS:,} walks on a map without walls are "
            f"{how['epochs'] * -(-imported_grid().PATHS // how['batch']):,} steps, and the training loss still falls "
            "(plot)."
        )
    page.claim = stored_beside_fresh(page, found, by)


def stored_beside_fresh(page: Page, found: Any, by: Students) -> Claim:
    """The differences in one sentence each, and the line of the first table."""
    passes, paths = found["passes"], found["paths"]
    claim = (
        "Stored noise teaches nearly as much as fresh noise of the live teacher, and more than none (Gumbel "
        "Distillation, Table 7)"
    )
    unknown = Claim(
        claim,
        "students or seeds are missing",
        "open",
        "an interval needs `mdlm`, `stored 1` and `fresh` with two seeds",
    )
    if not all(name in by for name in ("stored 1", "fresh", "mdlm")):
        return unknown
    near = [mean_and_half(gaps_of(by["stored 1"], by["fresh"], i, paths)) for i in range(len(passes))]
    gain = [mean_and_half(gaps_of(by["stored 1"], by["mdlm"], i, paths)) for i in range(len(passes))]
    if any(math.isnan(half) for _, half in [*near, *gain]):
        return unknown
    worst, least = min(mean - half for mean, half in near), min(mean - half for mean, half in gain)
    apart = [f"NFE {n}: {mean:+.1f} ± {half:.1f}" for n, (mean, half) in zip(passes, near) if abs(mean) > half]
    page.say(
        "### Stored noise beside fresh noise",
        f"By the lower ends of the intervals, at any number of passes ({len(passes)} intervals of 95 % each, "
        "uncorrected):",
        f"- `stored 1` trails `fresh` by {-worst:.1f} points at most.\n"
        f"- `stored 1` exceeds `mdlm` by {least:.1f} points at least.",
    )
    if apart:
        told = (
            f"`stored 1` − `fresh` should be 0, but its interval excludes 0 at {'; '.join(apart)} points "
            f"({len(apart)} of {len(passes)} intervals, uncorrected)."
        )
        page.warn(told)
        page.contradict(f"Maze: {told}")
    at = [f"{mean:+.1f} ± {half:.1f} points at NFE {n}" for n, (mean, half) in zip(passes, gain)]
    return Claim(
        claim,
        f"`stored 1` − `mdlm`: {at[0]}, {at[-1]}; `stored 1` trails `fresh` by {-worst:.1f} points at most",
        "supported" if least > 0 else "open",
        f"levels do not compare: the paper's MDLM has {found['paper']['mdlm'][0]:g} % at NFE 1, where "
        f"{one_pass_limit():.1f} % is our ceiling; one teacher, one stored draw",
    )


def differences(ones: list[Any], others: list[Any], passes: list[int], paths: int) -> list[str]:
    """The number of seeds, and for each number of passes how far two students of one seed are apart, in points."""
    seeds = {done["seed"] for done in others}
    return [
        str(sum(done["seed"] in seeds for done in ones)),
        *(shown(gaps_of(ones, others, i, paths), 1, sign=True) for i in range(len(passes))),
    ]


def maze_of(page: Page, found: Any, stem: str) -> None:
    """One run of the maze: tables, plots, and what contradicts the paper."""
    title, command = RUNS[stem]
    passes, paths, by = found["passes"], found["paths"], of_students(found["students"], "variant")

    def cell(those: list[Any], i: int) -> str:
        hits = [done["hits"][i] for done in those]
        return binomial(hits[0], paths) if len(hits) == 1 else shown([100 * hit / paths for hit in hits], 1)

    rows = [[name, str(len(those)), *(cell(those, i) for i in range(len(passes)))] for name, those in by.items()]
    ceiling = {n: perfect()[PASSES.index(n)] for n in passes if n in PASSES}
    rows.append(["perfect, no noise", "", *(f"{ceiling[n]:.1f}" if n in ceiling else "" for n in passes)])
    rows += [[f"paper, {name}", "", *(f"{rate:.0f}" for rate in rates)] for name, rates in found["paper"].items()]
    page.say(
        f"## {title}",
        f"Valid paths in % of {paths:,} paths per seed. {teachers_of(found)}",
        table(["student", "seeds", *(f"NFE {n}" for n in passes)], rows),
    )
    pairs = [("stored 1", "mdlm"), ("stored 1", "fresh"), ("stored 16", "stored 1")]
    apart = [[f"`{a}` − `{b}`", *differences(by[a], by[b], passes, paths)] for a, b in pairs if a in by and b in by]
    if apart:
        page.say(
            "Differences in percentage points between students of the same seed:",
            table(["difference", "seeds", *(f"NFE {n}" for n in passes)], apart),
        )
    plots_of(page, found, stem, by, ceiling)
    against_the_paper(page, found, stem, by)
    students = f"{len(found['students'])}, {found['jobs']} at once"
    commit = made_of(found) or "not recorded"
    page.runs.append([f"`{stem}.json`", f"`{command}`", students, f"{found['seconds']:,} s", machine_of(found), commit])


def plots_of(page: Page, found: Any, stem: str, by: Students, ceiling: dict[int, float]) -> None:
    """Valid paths with their intervals and both ceilings, and the training loss."""
    passes, paths = found["passes"], found["paths"]
    series, intervals = {}, {}
    for name, those in by.items():
        rates = [[100 * done["hits"][i] / paths for done in those] for i in range(len(passes))]
        series[name] = [(float(n), sum(of) / len(of)) for n, of in zip(passes, rates)]
        if len(those) == 1:
            intervals[name] = [wilson(hits, paths) for hits in those[0]["hits"]]
        else:
            halves = [mean_and_half(of) for of in rates]
            intervals[name] = [(mean - half, mean + half) for mean, half in halves]
    top = {"ceiling without noise: a perfect student": [(float(n), rate) for n, rate in ceiling.items()]}
    teachers = hits_of_teachers(found)
    if teachers:
        best = 100 * max(teachers) / paths
        top["ceiling with noise: the teacher"] = [(float(passes[0]), best), (float(passes[-1]), best)]
    page.plot(
        f"{stem}.png",
        "valid paths in % by passes, with 95 % intervals and both ceilings",
        Plot("Maze: valid paths, 95 % intervals", "passes (NFE)", "valid paths, %", series, True, intervals, top),
    )
    curves = {name: [(i + 1.0, loss) for i, loss in enumerate(those[0]["loss"])] for name, those in by.items()}
    page.plot(
        f"{stem}-loss.png",
        "training loss by epoch",
        Plot("Maze: training loss, first seed", "epoch", "nats/token", curves),
    )


def against_the_paper(page: Page, found: Any, stem: str, by: Students) -> None:
    """Where the order of the students is not that of the paper, and which seeds are missing."""
    passes, paths, how = found["passes"], found["paths"], found["training"]
    rates = {
        name: [100 * sum(d["hits"][i] for d in those) / paths / len(those) for i in range(len(passes))]
        for name, those in by.items()
    }
    blind = rates.get("mdlm")
    if blind:
        for name, of in rates.items():
            if name != "mdlm" and of[0] <= blind[0]:
                told = (
                    f"`{stem}`, one pass: `{name}` ({of[0]:.1f} %) is not above `mdlm` ({blind[0]:.1f} %), against "
                    "the paper."
                )
                page.warn(told)
                page.contradict(f"Maze, {told}")
        below = [f"`{name}` ({of[-1]:.1f} %)" for name, of in rates.items() if name != "mdlm" and of[-1] < blind[-1]]
        if below:
            told = (
                f"`{stem}`, {passes[-1]} passes: {' and '.join(below)} {'is' if len(below) == 1 else 'are'} below "
                f"`mdlm` ({blind[-1]:.1f} %), against the paper."
            )
            page.warn(
                f"{told} Possible reasons, none measured: {how['layers']} layers of width {how['width']} after "
                f"{how['epochs']} epochs rely more on noise than on visible tokens. Noise of the prior only resembles "
                "the training noise. At full size the effect does not occur."
            )
            page.contradict(f"Maze, {told}")
    if "stored 1" in rates and "fresh" in rates and rates["fresh"][0] - rates["stored 1"][0] > 5:
        page.warn(
            f"`{stem}`, one pass: one stored draw per token ({rates['stored 1'][0]:.1f} %) teaches less than fresh "
            f"noise ({rates['fresh'][0]:.1f} %) over {how['epochs']} epochs. `draws: 1` is not as good as the live "
            "teacher there."
        )
    if "fresh" not in by:
        page.warn(f"`{stem}.json` has no student of fresh noise yet: nothing shows what the live teacher would teach.")
    fewest = min((len(by[name]) for name in ("mdlm", "stored 1", "fresh") if name in by), default=0)
    if fewest < 5:
        page.warn(f"`{stem}.json` has {counted(fewest, 'seed')} instead of 5.")
