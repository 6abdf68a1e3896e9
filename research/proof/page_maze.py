"""The maze's part of the page."""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
from page_parts import (
    ROOT,
    Page,
    Plot,
    binomial,
    counted,
    machine_of,
    made_of,
    mean_and_half,
    of_students,
    shown,
    table,
)

OTHERS = {
    "maze-constant": "Full size, 200 epochs at a constant rate, as the paper trains",
    "maze-small": "Small, at a constant rate (students and teacher narrower, fewer epochs, higher learning rate)",
}
"""Results of other settings, by file, and their title: what `make maze RUN=...` makes."""
PASSES = (1, 2, 4, 8, 16)
PAPER = {"epochs": 200, "batch": 256, "lr": 3e-4}
"""How the paper trains (appendix E.1)."""


def maze(page: Page) -> None:
    page.say(
        "## The maze of the Gumbel paper (Table 7)",
        "`make maze`. Claim: noise that was stored once and replayed teaches nearly as much as noise that the live teacher gives anew in each step (how nearly: below the table), and more "
        "than none, most of all in few passes.",
    )
    page.warn(
        f"Maze: on the open map an MDLM without noise that has learned everything finds {one_pass_limit():.1f} % in one pass (all positions independent of each "
        f"other; computed), and {', '.join(f'{rate:.0f}' for rate in perfect()[1:])} % in 2, 4, 8 and 16 by the students' ancestral sampler (simulated with the exact shares of the 2,000 walks, 4,000 paths each; a row of the tables). The paper's "
        "53 % in one pass cannot be had with these walks, and its 64 to 94 % in more not by this sampler (one that unmasks equally many tokens in each pass does better in many): its map, its set of paths or its sampler must be another. Only the "
        "order of the rows compares."
    )
    whole = page.read("maze.json")
    if whole is None:
        page.say("**Missing:** there is no docs/proof/maze.json yet; `make maze` makes it.")
        page.warn("The maze of full size has not been run to its end: no figure of Table 7 is claimed here.")
    else:
        maze_of(page, whole, "maze", "Full size")
        beside_the_paper(page, whole)
    for stem, title in OTHERS.items():
        found = page.read(f"{stem}.json")
        if found is not None:
            maze_of(page, found, stem, title, f"`make maze RUN={stem}`: ")


def one_pass_limit() -> float:
    """Valid paths, in %, of the best model that draws all positions of a walk independently of each other: a perfect MDLM in one pass.

    It draws each position from that position's share in the 2,000 walks; the valid walks are few enough to add up.
    """
    grid = imported_grid()
    rows = [grid.text_of(walk).split() for walk in grid.walks()]
    learned = rows[: grid.PATHS]
    shares = [Counter(row[i] for row in learned) for i in range(grid.LONGEST)]
    return 100 * sum(math.prod(share[word] / len(learned) for share, word in zip(shares, row)) for row in rows)


@functools.cache
def perfect() -> tuple[float, ...]:
    """Valid paths, in %, of a student without noise that knows the 2,000 walks exactly, in 1, 2, 4, 8, 16 passes: of one pass exactly, of the others in 4,000 paths each by
    the sampler of the students.

    It draws each masked position from that position's share in the walks that agree with what is there; where none does, in all walks.
    """
    grid = imported_grid()
    ids = {word: i for i, word in enumerate(grid.VOCABULARY)}
    rows = [[grid.BOS, *(ids[word] for word in grid.text_of(walk).split()), grid.EOS] for walk in grid.walks()]
    walks = np.eye(len(ids), dtype=np.float32)[np.array(rows[: grid.PATHS])].reshape(grid.PATHS, -1)
    made = [one_pass_limit()]
    for passes in PASSES[1:]:
        random = np.random.default_rng(passes)
        tokens = np.full((4000, grid.LENGTH), -1)
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
    """What the teachers themselves write; results from before a teacher's fingerprint was kept name it `teacher`."""
    hits = [*([found["teacher"]] if "teacher" in found else []), *found.get("teachers", {}).values()]
    who = (
        "the teacher itself"
        if len(hits) == 1
        else f"the {len(hits)} teachers themselves (a new work folder trains a new one)"
    )
    return f"{who}: {', '.join(binomial(valid, found['paths']) for valid in hits)}"


def gaps_of(ones: list[Any], others: list[Any], i: int, paths: int) -> list[float]:
    """How far two students of one seed are apart at a number of passes, in points."""
    of = {done["seed"]: done["hits"][i] for done in others}
    return [100 * (done["hits"][i] - of[done["seed"]]) / paths for done in ones if done["seed"] in of]


def beside_the_paper(page: Page, found: Any) -> None:
    """What of the run of today's settings is not as in the paper, and how near stored noise comes to fresh noise."""
    by, passes, paths, how = (
        of_students(found["students"], "variant"),
        found["passes"],
        found["paths"],
        found["training"],
    )
    other = [f"{name} {how[name]:g} (paper: {value:g})" for name, value in PAPER.items() if how[name] != value]
    page.warn(
        f"Maze: students are not trained as in the paper: {', '.join(other)}, {how['schedule']}, and so is their teacher ({found.get('teacher_epochs', 100)} epochs; paper: 200), so that five seeds fit into two hours. As the "
        "paper trains is below."
    )
    teachers = list(found.get("teachers", {}).values())
    page.warn(
        f"Maze: all seeds share {counted(len(teachers), 'teacher')} and {'its' if len(teachers) == 1 else 'their'} one stored draw of noise: every ± is over students alone."
    )
    reached = {
        name: sum(done["hits"][-1] for done in by[name]) / len(by[name]) / paths
        for name in ("stored 1", "fresh")
        if name in by
    }
    if teachers and reached:
        below = ", ".join(
            f"`{name}` {100 * (max(teachers) / paths - rate):.0f} points" for name, rate in reached.items()
        )
        paper = found["paper"]["gumbel"][-1]
        page.warn(
            f"Maze, {passes[-1]} passes: students of noise end below their teacher ({100 * max(teachers) / paths:.1f} %): {below}; the paper's reach {paper:g} %, which is what such a teacher reaches. "
            f"{how['epochs']} epochs of 2,000 walks on a map without walls are {how['epochs'] * -(-2000 // how['batch']):,} steps, and their loss still falls (plot)."
        )
    if not all(name in by for name in ("stored 1", "fresh", "mdlm")):
        return
    near = [mean_and_half(gaps_of(by["stored 1"], by["fresh"], i, paths)) for i in range(len(passes))]
    gain = [mean_and_half(gaps_of(by["stored 1"], by["mdlm"], i, paths)) for i in range(len(passes))]
    if any(math.isnan(half) for _, half in [*near, *gain]):
        return
    worst, least = min(mean - half for mean, half in near), min(mean - half for mean, half in gain)
    apart = [f"NFE {n}: {mean:+.1f} ± {half:.1f}" for n, (mean, half) in zip(passes, near) if abs(mean) > half]
    page.say(
        f"**Stored beside fresh noise:** by the lower ends of the intervals `stored 1` trails `fresh` by {-worst:.1f} points at most at any number of passes, and is above no noise by {least:.1f} points at least (of {len(passes)} intervals of 95 % "
        "each, uncorrected)."
        + (
            f" The difference from `fresh` excludes zero at {'; '.join(apart)} ({len(apart)} of {len(passes)} intervals, not corrected for their number)."
            if apart
            else ""
        )
    )
    if apart:
        page.warn(
            f"Maze: `stored 1` − `fresh`, which should be 0, excludes it at {'; '.join(apart)} points ({len(apart)} of {len(passes)} intervals, uncorrected)."
        )


def differences(ones: list[Any], others: list[Any], passes: list[int], paths: int) -> list[str]:
    """The number of seeds, and of each number of passes how far two students of one seed are apart, in points."""
    seeds = {done["seed"] for done in others}
    return [
        str(sum(done["seed"] in seeds for done in ones)),
        *(shown(gaps_of(ones, others, i, paths), 1, sign=True) for i in range(len(passes))),
    ]


def maze_of(page: Page, found: Any, stem: str, title: str, command: str = "") -> None:
    """One run of the maze: table, plots, and what contradicts the paper."""
    page.say(f"### {title}")
    passes, paths, by = found["passes"], found["paths"], of_students(found["students"], "variant")
    seeds = {name: len(those) for name, those in by.items()}

    def cell(those: list[Any], i: int) -> str:
        hits = [done["hits"][i] for done in those]
        return binomial(hits[0], paths) if len(hits) == 1 else shown([100 * hit / paths for hit in hits], 1)

    rows = [[name, str(seeds[name]), *(cell(those, i) for i in range(len(passes)))] for name, those in by.items()]
    rows.append(
        ["a perfect one, no noise", "", *(f"{perfect()[PASSES.index(n)]:.1f}" if n in PASSES else "" for n in passes)]
    )
    rows += [[f"paper, {name}", "", *(f"{rate:.0f}" for rate in rates)] for name, rates in found["paper"].items()]
    page.say(
        f"{command}Valid paths in % of {paths} for each seed; {teachers_of(found)}. ± and brackets: 95 % intervals, over seeds where "
        f"there are several, else of the {paths} paths alone (Wilson). τ = 0.85. {found['seconds']} s, {counted(found['jobs'], 'student')} at once ({machine_of(found)}); "
        f"students: `{json.dumps(found['training'])}`; commit {made_of(found) or 'not recorded'}.",
        table(["student", "seeds", *(f"NFE {n}" for n in passes)], rows),
    )
    pairs = [("stored 1", "mdlm"), ("stored 1", "fresh"), ("stored 16", "stored 1")]
    apart = [[f"`{a}` − `{b}`", *differences(by[a], by[b], passes, paths)] for a, b in pairs if a in by and b in by]
    if apart:
        page.say(
            "Differences in percentage points of students of the same seed, with the 95 % interval over seeds where there are several:",
            table(["", "seeds", *(f"NFE {n}" for n in passes)], apart),
        )
    rates = {
        name: [100 * sum(d["hits"][i] for d in those) / paths / len(those) for i in range(len(passes))]
        for name, those in by.items()
    }
    page.plot(
        f"{stem}.png", "valid paths by passes",
        Plot("Maze: valid paths", "passes (NFE)", "%", {name: list(zip(passes, y)) for name, y in rates.items()}, log=True),
    )  # fmt: skip
    curves = {name: [(i + 1.0, loss) for i, loss in enumerate(those[0]["loss"])] for name, those in by.items()}
    page.plot(
        f"{stem}-loss.png", "training loss", Plot("Maze: training loss, first seed", "epoch", "nats/token", curves)
    )
    if "mdlm" in rates:
        for name, of_name in rates.items():
            if name != "mdlm" and of_name[0] <= rates["mdlm"][0]:
                page.warn(
                    f"Maze ({stem}.json), one pass: `{name}` ({of_name[0]:.1f} %) is not above `mdlm` ({rates['mdlm'][0]:.1f} %), against the paper."
                )
    below = [
        f"`{name}` ({of_name[-1]:.1f} %)"
        for name, of_name in rates.items()
        if name != "mdlm" and "mdlm" in rates and of_name[-1] < rates["mdlm"][-1]
    ]
    if below:
        page.warn(
            f"Maze ({stem}.json), {passes[-1]} passes: {' and '.join(below)} {'is' if len(below) == 1 else 'are'} below `mdlm` ({rates['mdlm'][-1]:.1f} %), against the paper. With many passes tokens that are there say more than noise, and "
            f"{found['training']['layers']} layers of width {found['training']['width']} after {found['training']['epochs']} epochs may go by noise more than by tokens, and noise at generation is the prior's, scaled by τ, which only resembles what they learned by (not measured); at full size it is not so."
        )
    if "stored 1" in rates and "fresh" in rates and rates["fresh"][0] - rates["stored 1"][0] > 5:
        page.warn(
            f"Maze ({stem}.json), one pass: one stored draw per token ({rates['stored 1'][0]:.1f} %) teaches less than fresh noise ({rates['fresh'][0]:.1f} %) over "
            f"{found['training']['epochs']} epochs: `draws: 1` is not as good as the live teacher there."
        )
    if "fresh" not in by:
        page.warn(
            f"{stem}.json has no student of fresh noise yet: `stored 1` stands there beside none that has the live teacher's."
        )
    fewest = min(seeds[name] for name in ("mdlm", "stored 1", "fresh") if name in seeds)
    if fewest < 5:
        page.warn(f"{stem}.json was run with {fewest} seed{'s' if fewest > 1 else ''} instead of 5.")
