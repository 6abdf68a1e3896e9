"""The part of the page on tolerance: students of vocabularies so small that they go by noise."""

from __future__ import annotations

import json
import math
from typing import Any

from page_parts import (
    Page,
    Plot,
    by_seed,
    counted,
    curves,
    mean_and_half,
    mean_of,
    of_students,
    over_seeds,
    ran,
    shown,
    table,
)

MARGIN = 0.05
"""Nats per masked token: what a tolerance may cost. Below it a tolerance is said to cost less than that, if the whole interval is."""
VOCABULARIES = {6: "the maze, V = 6", 28: "letters of the speeches, V = 28", 512: "pairs of letters, V = 512"}
FAIR = "− dense, both shown dense noise"


def tolerance(page: Page) -> None:
    """Students of small vocabularies, which go by noise."""
    page.say(
        "## Tolerance at small vocabularies",
        f"`make methods METHODS='tolerance-28 tolerance-512'`. Claim: what a student loses by a tolerance is below {MARGIN:g} nats per masked token where the whole interval over seeds is; where it is not, nothing is "
        "known. With V = 50,257 a student of so few steps does not go by noise; at a small vocabulary it does within one or two minutes. `dense` and `stored T` have the same rows, masks, draws and first "
        "weights; `dense, own` differs from `dense` in first weights and order alone: the scatter of trainings.",
    )
    files = sorted(page.results.glob("tolerance-*.json"), key=lambda file: len(file.stem))
    if not files:
        page.say("**Missing:** there is no docs/proof/tolerance-*.json yet.")
        page.warn(
            "No student of a small vocabulary has been trained: what tolerance does to one that goes by noise is not known."
        )
    told = [
        tolerance_of(page, found, file.stem) for file in files if (found := json.loads(file.read_text()))["students"]
    ]
    if told:
        page.say(
            "### What follows for the default",
            f"{' '.join(told)} A reason for a tight default besides: a data set of a tight tolerance is made looser without text or teacher (`stillhouse derive`), one of a loose tolerance is made "
            "tighter only by running the teacher again; and students as small as these see little of what a tolerance takes away. What a looser one saves stands in the tables above.",
        )


def tolerance_of(page: Page, found: Any, stem: str) -> str:
    """The table of a vocabulary; gives what it shows, in sentences."""
    by, how = of_students(found["students"], "student"), found["training"]
    dense, name = by.get("dense", []), VOCABULARIES.get(how["vocab"], f"V = {how['vocab']}")
    rows = []
    for student, those in by.items():
        own = student.removeprefix("stored ")
        size = found["tolerances"].get(own)
        cells = ["", "", ""]
        if size:
            cells = [f"{sum(size['bytes_per_token'].values()):.2f}", f"{size['mean']:.1e}", f"{size['largest']:.1e}"]
            if size["largest"] > float(own) * 1.01:
                page.warn(
                    f"{stem}.json, tolerance {own}: a total variation of {size['largest']:.2e} was measured, above the bound."
                )
        targets = those[0].get("targets") or [1] * len(those[0]["batches"])
        uses = [[a - b for a, b in zip(done["shown"]["prior"], done["batches"])] for done in those]
        gaps = ["", ""]
        if student != "dense":
            gaps = [shown(by_seed(those, dense, "validation"), 4, sign=True), shown(alike(those, dense), 4, sign=True)]
        rows.append([
            f"`{student}`", str(len(those)), *cells, shown([done["validation"] for done in those], 4), *gaps, over_seeds(uses, targets, 4, sign=True),
        ])  # fmt: skip
    page.say(
        f"### {name[0].upper()}{name[1:]}",
        f"{how['steps']} steps of {how['batch_size']} × {how['length']} tokens, width {how['width']}, {how['layers']} layers; nats per masked token of {how['rows']} held-out rows at most. {ran(found)} "
        "Differences from `dense`: of students of the same seed; ± is the 95 % interval over seeds where there are several, else over rows, marked so.",
        table(
            ["student", "seeds", "bytes per token", "variation, mean", "largest", "loss, own noise", "− dense, own noise", FAIR, "prior noise − own noise"],
            rows,
        ),
    )  # fmt: skip
    if any("curve" in done for done in found["students"]):
        title = f"Tolerance, {name}: training loss{curves_of(found['students'])}"
        page.plot(f"{stem}.png", "training loss by steps", Plot(title, "step", "nats/token", curves(by)))
    scatter = by_seed(by.get("dense, own", []), dense, "validation")
    if len(scatter) > 1:
        sd = math.sqrt(sum(gap * gap for gap in scatter) / len(scatter))
        page.say(
            f"Two trainings of dense noise differ by {sd:.4f} nats (root mean square of {counted(len(scatter), 'pair')}; {max(map(abs, scatter)):.4f} at most)."
        )
    most = max(len(those) for those in by.values())
    few = min(len(those) for those in by.values())
    if few < most:
        more = [
            student.removeprefix("stored ")
            for student, those in by.items()
            if len(those) == most and student.startswith("stored")
        ]
        page.say(
            f"Seeds {few} to {most - 1} were added for {' and '.join(more)} when the first {few} had left open what these cost, so that their intervals are a little too narrow "
            f"(`ARGS='--first-seed {few} --seeds {most - few} --tolerances {' '.join(more)}'`)."
        )
    worth = [
        mean_of(done["shown"]["prior"], done.get("targets") or [1] * len(done["batches"])) - done["validation"]
        for done in dense
    ]
    if worth:
        page.say(
            f"The margin of {MARGIN:g} nats is {100 * MARGIN * len(worth) / sum(worth):.0f} % of what noise is worth to `dense` (prior noise − own noise)."
        )
    return verdict(page, by, stem, how["vocab"])


def alike(those: list[Any], dense: list[Any]) -> list[float]:
    """What students lose beside `dense` where both are shown dense noise, of each seed."""
    of = {done["seed"]: done["validation"] for done in dense}
    return [
        mean_of(done["shown"]["dense"], done.get("targets") or [1] * len(done["batches"])) - of[done["seed"]]
        for done in those
        if done["seed"] in of and "dense" in done["shown"]
    ]


def verdict(page: Page, by: dict[str, list[Any]], stem: str, vocab: int) -> str:
    """What each tolerance costs at most, judged by the upper end of its interval: less than the margin, noticed, or not known."""
    small, noticed, unknown = [], [], []
    for student, those in by.items():
        gaps = by_seed(those, by.get("dense", []), "validation") if student.startswith("stored") else []
        if not gaps:
            continue
        own, (mean, half) = student.split()[1], mean_and_half(gaps)
        if math.isnan(half):
            unknown.append(f"{own} (one seed: {mean:+.3f})")
        elif mean + half < MARGIN:
            small.append((float(own), f"{own} (at most {mean + half:+.3f})"))
        elif mean - half > 0:
            noticed.append(f"{own} ({mean:+.3f} ± {half:.3f})")
        else:
            unknown.append(f"{own} (between {mean - half:+.3f} and {mean + half:+.3f})")
    words = [f"At V = {vocab}, by the upper end of the 95 % interval over seeds:"]
    words.append(f"below {MARGIN:g} nats per masked token are {listed([of for _, of in sorted(small)])};")
    words.append(f"noticed are {listed(noticed)}; not known are {listed(unknown)}.")
    better = [
        f"{student.split()[1]} ({shown(gaps, 4, sign=True)})"
        for student, those in by.items()
        if student.startswith("stored")
        and len(gaps := by_seed(those, by.get("dense", []), "validation")) > 1
        and (bounds := mean_and_half(gaps))[0] + bounds[1] < 0
    ]
    if better:
        page.warn(
            f"{stem}.json: students of tolerance {', '.join(better)} are better than those of dense noise beyond the interval, which the tolerance cannot do: chance, or intervals too narrow for what few trainings scatter."
        )
    if any(float(of.split()[0]) <= 1e-3 for of in noticed):
        page.warn(
            f"{stem}.json: a student notices a tolerance of 1e-3 or less ({', '.join(noticed)}); the default is 1e-3."
        )
    if unknown:
        page.warn(
            f"{stem}.json: of tolerances {', '.join(unknown)} it is not known whether they cost a student {MARGIN:g} nats per masked token: trainings scatter too much for these seeds."
        )
    words.append(f"The default, 1e-3, is {'' if any(of == 1e-3 for of, _ in small) else 'not '}among the first.")
    return " ".join(words)


def listed(of: list[str]) -> str:
    return ", ".join(of) or "none"


def curves_of(students: list[Any]) -> str:
    """Of which seeds the curves are, where they are not of all."""
    seeds = {done["seed"] for done in students}
    kept = {done["seed"] for done in students if "curve" in done}
    return "" if kept == seeds or not kept else f" (seed {', '.join(str(seed) for seed in sorted(kept))} alone)"
