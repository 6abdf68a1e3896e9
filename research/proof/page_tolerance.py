"""The page on tolerance: students of vocabularies so small that they use their noise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from page_parts import (
    Claim,
    Page,
    by_seed,
    counted,
    curves,
    mean_and_half,
    mean_of,
    of_students,
    over_seeds,
    run_of,
    shown,
    table,
)
from page_plot import Plot

MARGIN = 0.05
"""Nats per masked token that a tolerance may cost. A tolerance is judged by its whole interval."""
DEFAULT = "1e-3"
"""The default tolerance, as students name it."""
VOCABULARIES = {6: "the maze, V = 6", 28: "letters of the speeches, V = 28", 512: "pairs of letters, V = 512"}
COMMANDS = {"tolerance-28": "make methods METHODS=tolerance-28", "tolerance-512": "make methods METHODS=tolerance-512"}
Students = dict[str, list[Any]]


def tolerance(page: Page) -> None:
    """Students of small vocabularies, which use their noise."""
    page.begin(
        "Tolerance at small vocabularies",
        "what students of V = 28 and V = 512 lose by a tolerance of the stored noise, and what follows for the default",
        "This experiment measures what a student loses when its noise is stored with a tolerance. At V = 50,257 "
        "students do not use their noise after so few steps. At a small vocabulary they do within one or two minutes.",
        f"A tolerance costs less than {MARGIN:g} nats per masked token if its whole interval over seeds lies below "
        "that. Otherwise its cost is open.",
        "- `dense` and `stored T` have the same rows, masks, draws and first weights.\n"
        "- `dense, own` differs from `dense` only in first weights and order: the variation between two trainings.",
        "```sh\nmake methods METHODS='tolerance-28 tolerance-512'\n```",
    )
    files = sorted(page.results.glob("tolerance-*.json"), key=lambda file: len(file.stem))
    if not files:
        page.missing("tolerance-*.json", "make methods METHODS='tolerance-28 tolerance-512'")
        page.warn(
            "No student of a small vocabulary has been trained: what tolerance does to one that uses its noise is open."
        )
    of = {file.stem: found for file in files if (found := json.loads(file.read_text()))["students"]}
    costs = {found["training"]["vocab"]: tolerance_of(page, found, stem) for stem, found in of.items()}
    if costs:
        page.claim = default_of(page, costs)


class Cost:
    """What each tolerance costs at a vocabulary: below the margin, noticed, or open."""

    def __init__(self, by: Students) -> None:
        self.below: dict[float, str] = {}
        self.noticed: dict[float, str] = {}
        self.unknown: dict[float, str] = {}
        self.better: list[str] = []
        self.most: dict[float, float] = {}
        """The upper end of the interval of each tolerance."""
        for student, those in by.items():
            gaps = by_seed(those, by.get("dense", []), "validation") if student.startswith("stored") else []
            if gaps:
                self._judge(student.split()[1], gaps)

    def _judge(self, name: str, gaps: Sequence[float]) -> None:
        own, (mean, half) = float(name), mean_and_half(gaps)
        if math.isnan(half):
            self.unknown[own] = f"{name} (one seed: {mean:+.3f})"
            return
        self.most[own] = mean + half
        if mean + half < MARGIN:
            self.below[own] = f"{name} (at most {mean + half:+.3f})"
        elif mean - half > 0:
            self.noticed[own] = f"{name} ({mean:+.3f} ± {half:.3f})"
        else:
            self.unknown[own] = f"{name} (between {mean - half:+.3f} and {mean + half:+.3f})"
        if mean + half < 0:
            self.better.append(f"{name} ({shown(gaps, 4, sign=True)})")

    def row(self, vocab: int) -> list[str]:
        default = "below" if float(DEFAULT) in self.below else "noticed" if float(DEFAULT) in self.noticed else "open"
        cells = [", ".join(of[own] for own in sorted(of)) or "none" for of in (self.below, self.noticed, self.unknown)]
        return [str(vocab), *cells, default]


def default_of(page: Page, costs: dict[int, Cost]) -> Claim:
    """What follows for the default tolerance."""
    page.say(
        "## What follows for the default",
        f"The default tolerance is {DEFAULT}. The table judges each tolerance by the upper end of its 95 % interval "
        "over seeds, in nats per masked token.",
        table(
            ["V", f"below {MARGIN:g} nats", "noticed: interval above 0", "open", f"default, {DEFAULT}"],
            [cost.row(vocab) for vocab, cost in costs.items()],
        ),
        "Two more reasons speak for a tight default:",
        "- `stillhouse derive` loosens a data set of tight tolerance without text or teacher. Tightening one needs "
        "the teacher again.\n"
        "- Students as small as these read little of what a tolerance removes.",
        "The tables above have the bytes that a looser tolerance saves.",
    )
    claim = (
        f"A student loses less than {MARGIN:g} nats per masked token by the default tolerance {DEFAULT} (our claim; "
        "no paper measures it)"
    )
    most = {vocab: cost.most[float(DEFAULT)] for vocab, cost in costs.items() if float(DEFAULT) in cost.most}
    evidence = ", ".join(f"at most {end:+.3f} nats at V = {vocab}" for vocab, end in most.items())
    verdicts = {cost.row(vocab)[-1] for vocab, cost in costs.items()}
    verdict = "supported" if verdicts == {"below"} else "contradicted" if "noticed" in verdicts else "open"
    unknown = "; ".join(
        f"{', '.join(cost.unknown[own].split()[0] for own in sorted(cost.unknown))} at V = {vocab}"
        for vocab, cost in costs.items()
        if cost.unknown
    )
    return Claim(
        claim,
        f"upper end of the 95 % interval: {evidence or 'not measured'}",
        verdict,
        f"{f'the cost of these tolerances is open: {unknown}; ' if unknown else ''}larger vocabularies are not shown",
    )


def tolerance_of(page: Page, found: Any, stem: str) -> Cost:
    """The table of a vocabulary, and what each tolerance costs."""
    by, how = of_students(found["students"], "student"), found["training"]
    dense, name = by.get("dense", []), VOCABULARIES.get(how["vocab"], f"V = {how['vocab']}")
    page.say(
        f"## {name[0].upper()}{name[1:]}",
        f"{how['steps']:,} steps of {how['batch_size']} × {how['length']} tokens, width {how['width']}, "
        f"{how['layers']} layers. Losses are in nats per masked token of at most {how['rows']} held-out rows.",
        "Differences from `dense` are between students of the same seed. The sign ± means the 95 % interval over "
        "seeds. An interval of one seed is over rows and marked so.",
        table(
            [
                "student",
                "seeds",
                "bytes per token",
                "total variation, mean",
                "largest",
                "loss, own noise",
                "− dense, own noise",
                "− dense, both with dense noise",
                "prior noise − own noise",
            ],
            rows_of(page, found, stem, by),
        ),
    )
    if any("curve" in done for done in found["students"]):
        title = f"Tolerance, {name}: training loss{curves_of(found['students'])}"
        page.plot(f"{stem}.png", "training loss by steps", Plot(title, "step", "nats/token", curves(by)))
    scatter = by_seed(by.get("dense, own", []), dense, "validation")
    if len(scatter) > 1:
        sd = math.sqrt(sum(gap * gap for gap in scatter) / len(scatter))
        page.say(
            f"Two trainings with dense noise differ by {sd:.4f} nats (root mean square of "
            f"{counted(len(scatter), 'pair')}; {max(map(abs, scatter)):.4f} at most)."
        )
    added_seeds(page, by)
    worth = [
        mean_of(done["shown"]["prior"], done.get("targets") or [1] * len(done["batches"])) - done["validation"]
        for done in dense
    ]
    if worth:
        page.say(
            f"The margin of {MARGIN:g} nats is {100 * MARGIN * len(worth) / sum(worth):.0f} % of what noise is worth "
            "to `dense` (prior noise − own noise)."
        )
    page.runs.append(run_of(f"{stem}.json", COMMANDS.get(stem, "research/proof/methods/tolerance.py"), found))
    return cost_of(page, by, stem)


def rows_of(page: Page, found: Any, stem: str, by: Students) -> list[list[str]]:
    """A row for each student."""
    dense, rows = by.get("dense", []), []
    for student, those in by.items():
        own = student.removeprefix("stored ")
        size = found["tolerances"].get(own)
        cells = ["", "", ""]
        if size:
            cells = [f"{sum(size['bytes_per_token'].values()):.2f}", f"{size['mean']:.1e}", f"{size['largest']:.1e}"]
            if size["largest"] > float(own) * 1.01:
                page.warn(
                    f"`{stem}.json`, tolerance {own}: the total variation reaches {size['largest']:.2e}, above the "
                    "bound."
                )
        targets = those[0].get("targets") or [1] * len(those[0]["batches"])
        uses = [[a - b for a, b in zip(done["shown"]["prior"], done["batches"])] for done in those]
        gaps = ["", ""]
        if student != "dense":
            gaps = [shown(by_seed(those, dense, "validation"), 4, sign=True), shown(alike(those, dense), 4, sign=True)]
        loss = shown([done["validation"] for done in those], 4)
        rows.append([f"`{student}`", str(len(those)), *cells, loss, *gaps, over_seeds(uses, targets, 4, sign=True)])
    return rows


def added_seeds(page: Page, by: Students) -> None:
    """Which tolerances got more seeds, and what that does to their intervals."""
    most, few = (of(len(those) for those in by.values()) for of in (max, min))
    if few == most:
        return
    more = [
        student.removeprefix("stored ")
        for student, those in by.items()
        if len(those) == most and student.startswith("stored")
    ]
    page.say(
        f"Seeds {few} to {most - 1} were added for {' and '.join(more)} because the first {few} had left their cost "
        f"open. These intervals are slightly too narrow for that reason. The option is `ARGS='--first-seed {few} "
        f"--seeds {most - few} --tolerances {' '.join(more)}'`."
    )


def alike(those: list[Any], dense: list[Any]) -> list[float]:
    """What students lose beside `dense` where both see dense noise, of each seed."""
    of = {done["seed"]: done["validation"] for done in dense}
    return [
        mean_of(done["shown"]["dense"], done.get("targets") or [1] * len(done["batches"])) - of[done["seed"]]
        for done in those
        if done["seed"] in of and "dense" in done["shown"]
    ]


def cost_of(page: Page, by: Students, stem: str) -> Cost:
    """What each tolerance costs, with a warning where that is open or cannot be."""
    cost = Cost(by)
    if cost.better:
        page.warn(
            f"`{stem}.json`: students of tolerance {', '.join(cost.better)} are better than those of dense noise "
            "beyond the interval. A tolerance cannot improve a student: this is chance, or the intervals are too "
            "narrow for so few trainings."
        )
    if any(own <= float(DEFAULT) for own in cost.noticed):
        page.warn(
            f"`{stem}.json`: a student notices a tolerance of {DEFAULT} or less ({', '.join(cost.noticed.values())}); "
            f"the default is {DEFAULT}."
        )
    if cost.unknown:
        page.warn(
            f"`{stem}.json`: whether these tolerances cost a student {MARGIN:g} nats per masked token is open: "
            f"{', '.join(cost.unknown.values())}. Trainings vary too much for these seeds."
        )
    return cost


def curves_of(students: list[Any]) -> str:
    """The seeds of the curves, where these are not all seeds."""
    seeds = {done["seed"] for done in students}
    kept = {done["seed"] for done in students if "curve" in done}
    return "" if kept == seeds or not kept else f" (seed {', '.join(str(seed) for seed in sorted(kept))} alone)"
