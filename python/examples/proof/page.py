"""Makes docs/PROOF.md and its plots out of the raw results in docs/proof: every figure of the page comes from there.

    python page.py                     # or: --results docs/proof --page docs/PROOF.md

======================== ============================ ==========================================
result                   made by                      plots
======================== ============================ ==========================================
maze.json                ../maze/run.py               maze.svg, maze-loss.svg
maze-small.json          the same, small              maze-small.svg, maze-small-loss.svg
text.json                text.py                      text-loss.svg
noise_bytes-NAME.json    noise_bytes.py, any number
======================== ============================ ==========================================

A result that is not there is said on the page to be missing. Plots are SVG, written here, so that nothing has to be installed for them.
"""

from __future__ import annotations

import argparse
import html
import importlib
import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
COLOURS = ["#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#555555", "#00897b", "#d81b60"]
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228, 12: 2.201}
"""Student's t: the 97.5 % quantile of a mean of so many values."""


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """A mean and half of its 95 % interval; of one value the interval is unknown (NaN)."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, math.nan
    spread = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1) / n)
    return mean, T95.get(n, 1.96 + 2.6 / (n - 1)) * spread


def shown(values: Sequence[float], digits: int) -> str:
    mean, half = mean_and_half(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"


def binomial(hits: int, of: int) -> str:
    """A rate in % with Wilson's 95 % interval."""
    z, p = 1.96, hits / of
    middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = ((middle + sign * half) / (1 + z * z / of) for sign in (-1, 1))
    return f"{100 * p:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


Points = Sequence[tuple[float, float]]


def chart(title: str, across: str, up: str, series: Mapping[str, Points], log: bool = False) -> str:
    """Lines through points, as SVG; ``log`` is of the horizontal axis (base 2)."""
    width, height, left, low, right = 720, 400, 60, 50, 170

    def place(x: float) -> float:
        return math.log2(x) if log else x

    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x0, x1, y0, y1 = place(min(xs)), place(max(xs)), min(ys), max(ys)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (place(x) - x0) / (x1 - x0) * (width - left - right),
            height - low - (y - y0) / (y1 - y0) * (height - low - 40),
        )

    marks = sorted(set(xs)) if len(set(xs)) <= 8 else [min(xs) + i * (max(xs) - min(xs)) / 5 for i in range(6)]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="22" font-size="14">{html.escape(title)}</text>',
        f'<text x="{left}" y="{height - 8}">{html.escape(across)}; up: {html.escape(up)}</text>',
    ]
    for mark in marks:
        x, y = at(mark, y0)
        out.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{mark:g}</text>')
    for i in range(6):
        level = y0 + i * (y1 - y0) / 5
        x, y = at(min(xs), level)
        out.append(f'<line x1="{x:.1f}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{level:.3g}</text>')
    for i, (name, points) in enumerate(series.items()):
        colour, path = COLOURS[i % len(COLOURS)], " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{width - right + 10}" y="{50 + 18 * i}" fill="{colour}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


class Page:
    """The page as it grows, and the plots beside it."""

    def __init__(self, results: pathlib.Path, page: pathlib.Path) -> None:
        self.results, self.page = results, page
        self.first: list[str] = []
        self.parts: list[str] = []
        self.plots: dict[str, str] = {}

    def read(self, name: str) -> Any:
        file = self.results / name
        return json.loads(file.read_text()) if file.exists() else None

    def say(self, *parts: str) -> None:
        self.parts += parts

    def plot(self, name: str, what: str, svg: str) -> None:
        self.plots[name] = svg
        self.say(f"![{what}]({self.results.name}/{name})")


def of_students(students: Sequence[Any], key: str) -> dict[str, list[Any]]:
    """Students by their name, in the order in which they came."""
    names = dict.fromkeys(done[key] for done in students)
    return {name: [done for done in students if done[key] == name] for name in names}


def maze(page: Page) -> None:
    page.say(
        "## The maze of the Gumbel paper (Table 7)",
        "`make maze`. Claim: noise that was stored once and replayed teaches as much as noise that the live teacher gives anew in each step, and more "
        "than none, most of all in one pass.",
    )
    page.first.append(
        f"Maze: on the open map an MDLM without noise that has learned everything finds {one_pass_limit():.1f} % in one pass (all positions independent of each "
        "other; computed). The paper's 53 % cannot be had with these 2,000 walks: its map or its set of paths must be another. Only the order of the rows compares."
    )
    whole, small = page.read("maze.json"), page.read("maze-small.json")
    if whole is None:
        page.say("**Missing:** there is no docs/proof/maze.json yet; `make maze` makes it.")
        page.first.append("The maze of full size has not been run to its end: no figure of Table 7 is claimed here.")
    else:
        maze_of(page, whole, "maze", "Full size")
    if small is not None:
        maze_of(page, small, "maze-small", "Small (students and teacher narrower, fewer epochs, higher learning rate)")


def one_pass_limit() -> float:
    """Valid paths, in %, of the best model that draws all positions of a walk independently of each other: a perfect MDLM in one pass.

    It draws each position from that position's share in the 2,000 walks; the valid walks are few enough to add up.
    """
    sys.path.insert(0, str(ROOT / "python/examples/maze"))
    try:
        grid = importlib.import_module("grid")
    finally:
        sys.path.pop(0)
    rows = [grid.text_of(walk).split() for walk in grid.walks()]
    learned = rows[: grid.PATHS]
    shares = [Counter(row[i] for row in learned) for i in range(grid.LONGEST)]
    return 100 * sum(math.prod(share[word] / len(learned) for share, word in zip(shares, row)) for row in rows)


def maze_of(page: Page, found: Any, stem: str, title: str) -> None:
    """One run of the maze: table, plots, and what contradicts the paper."""
    page.say(f"### {title}")
    passes, paths, by = found["passes"], found["paths"], of_students(found["students"], "variant")
    seeds = {name: len(those) for name, those in by.items()}

    def cell(those: list[Any], i: int) -> str:
        hits = [done["hits"][i] for done in those]
        return binomial(hits[0], paths) if len(hits) == 1 else shown([100 * hit / paths for hit in hits], 1)

    rows = [[name, str(seeds[name]), *(cell(those, i) for i in range(len(passes)))] for name, those in by.items()]
    rows += [[f"paper, {name}", "", *(f"{rate:.0f}" for rate in rates)] for name, rates in found["paper"].items()]
    page.say(
        f"Valid paths in % of {paths} for each seed; the teacher itself: {binomial(found['teacher'], paths)}. ± and brackets: 95 % intervals, over seeds where "
        f"there are several, else of the {paths} paths alone (Wilson). τ = 0.85. {found['seconds']} s, {found['jobs']} students at once; "
        f"students: `{json.dumps(found['training'])}`.",
        table(["student", "seeds", *(f"NFE {n}" for n in passes)], rows),
    )
    rates = {
        name: [100 * sum(d["hits"][i] for d in those) / paths / len(those) for i in range(len(passes))]
        for name, those in by.items()
    }
    page.plot(
        f"{stem}.svg", "valid paths by passes",
        chart("Maze: valid paths", "passes (NFE)", "%", {name: list(zip(passes, y)) for name, y in rates.items()}, log=True),
    )  # fmt: skip
    curves = {name: [(i + 1.0, loss) for i, loss in enumerate(those[0]["loss"])] for name, those in by.items()}
    page.plot(
        f"{stem}-loss.svg", "training loss", chart("Maze: training loss, first seed", "epoch", "nats/token", curves)
    )
    if "mdlm" in rates:
        for name, of_name in rates.items():
            if name != "mdlm" and of_name[0] <= rates["mdlm"][0]:
                page.first.append(
                    f"Maze ({stem}.json), one pass: `{name}` ({of_name[0]:.1f} %) is not above `mdlm` ({rates['mdlm'][0]:.1f} %), against the paper."
                )
    for name, of_name in rates.items():
        if name != "mdlm" and "mdlm" in rates and of_name[-1] < rates["mdlm"][-1]:
            page.first.append(
                f"Maze ({stem}.json), {passes[-1]} passes: `{name}` ({of_name[-1]:.1f} %) is below `mdlm` ({rates['mdlm'][-1]:.1f} %), against the paper."
            )
    if "stored 1" in rates and "fresh" in rates and rates["fresh"][0] - rates["stored 1"][0] > 5:
        page.first.append(
            f"Maze ({stem}.json), one pass: one stored draw per token ({rates['stored 1'][0]:.1f} %) teaches less than fresh noise ({rates['fresh'][0]:.1f} %) over "
            f"{found['training']['epochs']} epochs: `draws: 1` is not as good as the live teacher there."
        )
    fewest = min(seeds.values())
    if fewest < 5:
        page.first.append(f"{stem}.json was run with {fewest} seed{'s' if fewest > 1 else ''} instead of 5.")


def text(page: Page) -> None:
    page.say(
        "## A text student: how loose may the tolerance be?",
        "`python python/examples/proof/text.py --help` has the command. Teacher: the nano GPT-2, V = 50,257. `dense` is the very draw that the shards hold, made of "
        "the live teacher's whole distribution; `stored T` is the same draw as stored with tolerance T. Same rows, masks, draws and first weights (`mdlm`, which "
        "has no projection of noise, begins with other weights): between two students with noise only what tolerance takes away differs.",
    )
    found = page.read("text.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/text.json yet.")
        page.first.append("No text student has been trained: what tolerance does to one is not known.")
        return
    for tolerance, of in found["tolerances"].items():
        if "softmax_of_token_median" in of["variation"]:
            page.first.append(
                f"With V = 50,257 the blueprint softmax(ξ) gives the token itself {of['variation']['softmax_of_token_median']:.1e} at the median and "
                f"{of['variation']['softmax_of_token_mean']:.3f} in the mean (nano GPT-2, tolerance {tolerance}, {of['variation']['tokens']} tokens): a student sees "
                "little of it before it has learned much."
            )
            break
    rows = []
    for tolerance, of in sorted(found["tolerances"].items(), key=lambda item: -float(item[0])):
        size, variation = of["bytes_per_token"], of["variation"]
        kept = f"{100 * variation['condition']:.2f} %"
        cells = [
            f"{sum(size.values()):.2f}",
            f"{size['logprob']:.2f}",
            f"{variation['mean']:.1e}",
            f"{variation['largest']:.1e}",
            kept,
            str(variation["tokens"]),
        ]
        rows.append([tolerance, *cells])
        if variation["largest"] > float(tolerance) * 1.01:
            page.first.append(
                f"Tolerance {tolerance}: a total variation of {variation['largest']:.2e} was measured, above the bound."
            )
    page.say(
        "What each tolerance costs and how far stored noise is from the dense one (total variation of softmax(ξ), at masked validation tokens; the dense side "
        "is transformers' own pass in f32):",
        table(
            [
                "tolerance",
                "bytes per token",
                "of these logprob",
                "variation, mean",
                "largest",
                "argmax(l + ξ) = x",
                "tokens",
            ],
            rows,
        ),
    )
    by = of_students(found["students"], "student")
    if not by:
        page.first.append("No text student has been trained: what tolerance does to one is not known.")
        return
    uses_noise: dict[str, float] = {}
    exact = {done["seed"]: done for done in by.get("dense", [])}
    rows = []
    for name, those in by.items():
        losses = [sum(done["validation"]) / len(done["validation"]) for done in those]
        cells = [str(len(those)), shown(losses, 4), "", "", ""]
        uses = [
            a - b
            for done in those
            if "prior" in done.get("shown", {})
            for a, b in zip(done["shown"]["prior"], done["validation"])
        ]
        if uses:
            cells[4] = paired(uses)
            uses_noise[name] = sum(uses) / len(uses)
        pairs = [
            (done, exact[done["seed"]]) for done in those if done["seed"] in exact and name not in ("dense", "mdlm")
        ]
        if pairs:
            cells[2] = paired([a - b for one, other in pairs for a, b in zip(one["validation"], other["validation"])])
            both = [
                (one["shown"]["dense"], other["validation"]) for one, other in pairs if "dense" in one.get("shown", {})
            ]
            cells[3] = paired([a - b for one, other in both for a, b in zip(one, other)]) if both else ""
        rows.append([f"`{name}`", *cells])
    how = found["training"]
    page.say(
        f"Students after {how['steps']} steps of {how['batch_size']} × {how['length']} tokens, width {how['width']}, {how['layers']} layers; loss in nats per masked token over "
        f"{sum(found['students'][0]['targets'])} masked tokens of {how['rows']} validation rows. Differences from `dense`: mean and 95 % interval over batches of rows, paired.",
        table(
            [
                "student",
                "seeds",
                "loss, own noise",
                "− dense, own noise",
                "− dense, both shown dense noise",
                "prior noise − own noise",
            ],
            rows,
        ),
    )
    page.say(
        "These intervals are over validation rows alone. How far two trainings scatter by rounding is not in them; a row of `stored 1e-3`, where noise differs least, shows it. "
        "The last column is what a student loses when it is shown noise of no token: how much it goes by noise at all."
    )
    idle = [f"`{name}` ({loss:+.2f} nats)" for name, loss in uses_noise.items() if loss < 0.5]
    if idle:
        page.first.append(
            f"Text students that hardly go by noise yet, of which therefore nothing follows on tolerance: {', '.join(idle)} when shown noise of no token."
        )
    whole = [done for done in by.get("dense", []) if "shown" in done]
    if whole:
        rows = []
        for tolerance in (name for name in whole[0]["shown"] if name != "prior"):
            each = [a - b for done in whole for a, b in zip(done["shown"][tolerance], done["validation"])]
            rows.append([tolerance, paired(each)])
        page.say(
            "What the student of dense noise loses where it is shown stored noise (nats per masked token):",
            table(["tolerance", "loss − its own"], rows),
        )
    curves = {name: [(20.0 * (i + 1), loss) for i, loss in enumerate(those[0]["curve"])] for name, those in by.items()}
    page.plot(
        "text-loss.svg",
        "training loss of the text students",
        chart("Text: training loss", "step", "nats/masked token", curves),
    )
    fewest = min(len(those) for those in by.values())
    if not any(done["student"].startswith("stored") for done in found["students"]) or not exact:
        page.first.append(
            "No student of stored noise beside one of dense noise: what tolerance does in training is not known."
        )
    if fewest < 3 or how["steps"] < 1000:
        page.first.append(
            f"The text students saw {how['steps']} steps and {fewest} seed{'s' if fewest > 1 else ''}: far from converged. They compare tolerances, and say nothing of quality."
        )
    written = [(name, done) for name, those in by.items() for done in those if done.get("written")]
    if not written:
        page.first.append("Generative perplexity and entropy of text students were not measured.")
        return
    rows = [
        [f"`{name}`", str(done["seed"]), n, f"{of['perplexity']:.0f}", f"{of['entropy']:.2f}"]
        for name, done in written
        for n, of in done["written"].items()
    ]
    page.say("What they write (`stillhouse score`):", table(["student", "seed", "NFE", "perplexity", "entropy"], rows))


def paired(differences: list[float]) -> str:
    mean, half = mean_and_half(differences)
    return f"{mean:+.4f} ± {half:.4f}"


def noise_bytes(page: Page) -> None:
    page.say(
        "## What another coding of the corrections would save",
        "`python python/examples/proof/noise_bytes.py DATASET --tokens N --json FILE`. A simulation: entropies of ids coded by the seeded order and of coarser values; "
        "nothing of it is in the format.",
    )
    files = sorted(page.results.glob("noise_bytes-*.json"))
    if not files:
        page.say("**Missing:** there is no docs/proof/noise_bytes-*.json yet.")
        return
    rows = []
    for file in files:
        found = json.loads(file.read_text())
        now, bits = found["stored_bytes_per_token"], found["bits"]
        cells = [
            f"{found['vocab_size']:,}",
            f"{found['tolerance']:g}",
            f"{found['tokens']:,}",
            f"{found['corrections_per_token']:.2f}",
            f"{sum(now.values()):.2f}",
            f"{now['logprob']:.2f}",
            f"{bits['place']:.1f} of {bits['id']:.1f}",
        ]
        coarse = found["logprob"]
        cells += [
            f"{of['with_logprob']:.2f}, {of['with_coarse_logprob']:.2f} ({100 * of['corrections_in_f16']:.0f} %)"
            for of in found["values"].values()
        ]
        cells.append(f"{coarse['bits_wide']} bits, {coarse['bytes_per_token']:.2f} bytes")
        rows.append([file.stem.removeprefix("noise_bytes-"), *cells])
    head = [
        "data set",
        "V",
        "tolerance",
        "tokens",
        "corrections per token",
        "bytes per token today",
        "of these logprob",
        "bits of an id: by order, of plain",
    ]
    page.say(
        "Columns of values: bytes per token with ids by order and such values, first with `logprob` as it is stored today, then with a coarser one (the last column); in "
        "brackets the corrections that would stay f16, because the coarse value adds more than a tenth of the tolerance.",
        table([*head, *(f"values of {bits} bits" for bits in found["values"]), "coarser logprob"], rows),
    )
    for file in files:
        found = json.loads(file.read_text())
        if not file.stem.removeprefix("noise_bytes-").startswith("smollm2"):
            continue
        today, ways = sum(found["stored_bytes_per_token"].values()), found["values"].values()
        page.first.append(
            f"Goal of 6 bytes per token for SmolLM2 with `logprob`, {file.stem.removeprefix('noise_bytes-')}: {today:.2f} today; by the simulation "
            f"{min(of['with_logprob'] for of in ways):.2f} with coded ids and coarser values, {min(of['with_coarse_logprob'] for of in ways):.2f} with a coarser "
            "`logprob` too."
        )
        if found["tolerance"] == 1e-3 and today > 12:
            page.first.append(
                f"README says 9 to 12 bytes per token of noise at tolerance 1e-3 (BENCHMARKS.md: 11.7 with SmolLM2). This data set of SmolLM2 needs {today:.2f}; "
                "it holds few tokens, so the dictionary of ids weighs more than in large shards."
            )


def made(results: pathlib.Path, where: pathlib.Path) -> tuple[str, dict[str, str]]:
    """The page and its plots by name."""
    page = Page(results, where)
    for part in (maze, text, noise_bytes):
        part(page)
    page.first += [
        "The paper names no walls of the maze. On the open map there are 2,118 walks of at most 10 moves; the first 2,000 of a breadth-first search are used.",
        "Not run at all: PGM against MDLM, Prime, ARMD, BD3-LM, Medusa, top-k distillation, the comparison with official code.",
    ]
    head = [
        "# Proof: what students trained from our shards do",
        "Made by `python python/examples/proof/page.py` out of the JSON files in [proof](proof); no figure is typed by hand, and a change by hand is lost.",
        "## What contradicts a paper or our own words, and what is missing",
        "\n".join(f"- {line}" for line in page.first),
    ]
    return "\n\n".join([*head, *page.parts]) + "\n", page.plots


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "docs/proof")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/PROOF.md")
    args = parser.parse_args(argv)
    words, plots = made(args.results, args.page)
    args.page.write_text(words)
    for name, svg in plots.items():
        (args.results / name).write_text(svg)


if __name__ == "__main__":
    main()
