"""The page on text students at V = 50,257."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from page_parts import Claim, Page, counted, mean_of, of_students, over_seeds, run_of, shown, table
from page_plot import Plot
from page_trends import VERDICTS, trend_parts, trends

Students = dict[str, list[Any]]
BLIND = ("mdlm", "topk")
"""Students that are shown no noise."""
NOTICES = 0.5
"""Nats that prior noise costs a student that uses its noise."""
DEFAULT = "1e-3"
"""The default tolerance."""


SAMPLING = (
    "Samples are drawn without nucleus sampling; the Gumbel paper has p = 0.9 for every model (appendix C.1). Noise "
    "at generation is scaled by τ = 0.85, without a student at τ = 1 beside it. A lower generative perplexity may be "
    "a lower entropy: the tables have both."
)
"""What the samples of text students and of all methods have in common."""


def less(ones: list[float], others: list[float]) -> list[float]:
    """Differences of the same batches."""
    return [a - b for a, b in zip(ones, others, strict=True)]


def students_of(by: Students, targets: list[int]) -> tuple[list[list[str]], list[str]]:
    """A row for each student, and the students that hardly use their noise."""
    exact = {done["seed"]: done for done in by.get("dense", [])}
    rows, idle = [], []
    for name, those in by.items():
        losses = [done["validation"] for done in those]
        told = over_seeds(losses, targets, 4)
        if name in BLIND:
            rows.append([f"`{name}`", str(len(those)), "", "", "", "", told])
            continue
        prior = [done for done in those if "prior" in done.get("shown", {})]
        uses = [less(done["shown"]["prior"], done["validation"]) for done in prior]
        pairs = [(done, exact[done["seed"]]) for done in those if done["seed"] in exact and name != "dense"]
        own = [less(one["validation"], other["validation"]) for one, other in pairs]
        both = [
            less(one["shown"]["dense"], other["validation"]) for one, other in pairs if "dense" in one.get("shown", {})
        ]
        cells = [over_seeds(gaps, targets, 4, sign=True) for gaps in (own, both, uses)]
        rows.append(
            [
                f"`{name}`",
                str(len(those)),
                told,
                *cells,
                over_seeds([done["shown"]["prior"] for done in prior], targets, 4),
            ]
        )
        mean = sum(mean_of(gaps, targets) for gaps in uses) / len(uses) if uses else 0.0
        if mean < NOTICES:
            idle.append(f"`{name}` ({mean:+.2f} nats)")
    return rows, idle


def text(page: Page) -> None:
    page.begin(
        "Text students at V = 50,257",
        "how far stored noise is from dense noise at each tolerance, its bytes, and what small text students lose",
        "This experiment tests two things for the vocabulary of GPT-2. Stored noise must stay within its tolerance "
        "of the teacher's noise. The observed token must keep the argmax. Whether a student notices a tolerance "
        "remains open where it does not use its noise.",
        "The teacher is the nano GPT-2. Students have the same rows, masks, draws and first weights, so only the "
        "tolerance differs:",
        "- `dense`: noise of the live teacher's whole distribution, the same draw that the shards hold.\n"
        "- `stored T`: the same draw as stored with tolerance T.\n"
        "- `fresh`: another dense draw in every step.\n"
        "- `mdlm`: no noise. `topk`: no noise, the teacher's likeliest tokens as targets. Neither has a projection "
        "of noise, so their first weights differ.",
        "```sh\nmake text\n```",
    )
    found = page.read("text.json")
    if found is None:
        page.missing("text.json", "make text")
        page.warn("No text student has been trained: what tolerance does to one is open.")
        return
    page.runs.append(run_of("text.json", "make text", found))
    stored_noise(page, found)
    by = of_students(found["students"], "student")
    if not by:
        page.warn("No text student has been trained: what tolerance does to one is open.")
        return
    losses(page, found, by)
    samples(page, found, by)


def stored_noise(page: Page, found: Any) -> None:
    """Distance of stored from dense noise, and bytes, by tolerance."""
    for tolerance, of in found["tolerances"].items():
        if "softmax_of_token_median" in of["variation"]:
            page.warn(
                "At V = 50,257 the blueprint softmax(ξ) gives the observed token "
                f"{of['variation']['softmax_of_token_median']:.1e} at the median and "
                f"{of['variation']['softmax_of_token_mean']:.3f} in the mean. A student reads little from it early in "
                f"training (nano GPT-2, tolerance {tolerance}, {of['variation']['tokens']} tokens)."
            )
            break
    rows = []
    for tolerance, of in sorted(found["tolerances"].items(), key=lambda item: -float(item[0])):
        size, variation = of["bytes_per_token"], of["variation"]
        rows.append(
            [
                tolerance,
                f"{sum(size.values()):.2f}",
                f"{size['logprob']:.2f}",
                f"{variation['mean']:.1e}",
                f"{variation['largest']:.1e}",
                f"{100 * variation['condition']:.2f} %",
                str(variation["tokens"]),
            ]
        )
    page.say(
        "## Stored noise beside dense noise",
        "Distance is the total variation of softmax(ξ) at masked validation tokens. The dense noise comes from "
        "transformers' own forward pass in f32.",
        table(
            [
                "tolerance",
                "bytes per token",
                "of these `logprob`",
                "distance, mean",
                "distance, largest",
                "argmax(l + ξ) = x",
                "tokens",
            ],
            rows,
        ),
    )
    worst = {tolerance: of["variation"]["largest"] / float(tolerance) for tolerance, of in found["tolerances"].items()}
    kept = min((of["variation"]["condition"] for of in found["tolerances"].values()), default=0.0)
    claim = (
        "Stored noise stays within its tolerance, and the observed token keeps the argmax (Gumbel Distillation, Eq. 4)"
    )
    own = found["tolerances"].get(DEFAULT)
    if own is None:
        page.claim = Claim(claim, f"tolerance {DEFAULT} was not measured", "open", "")
        return
    page.claim = Claim(
        claim,
        f"tolerance {DEFAULT}: largest total variation {own['variation']['largest']:.1e}, argmax kept for "
        f"{100 * own['variation']['condition']:.2f} % of {own['variation']['tokens']} tokens, "
        f"{sum(own['bytes_per_token'].values()):.2f} bytes per token",
        "supported" if max(worst.values()) <= 1.01 and kept == 1 else "contradicted",
        "whether a student of this vocabulary notices a tolerance is open",
    )


def losses(page: Page, found: Any, by: Students) -> None:
    """Losses of the students, under their own noise and under others."""
    targets, how = found["students"][0]["targets"], found["training"]
    rows, idle = students_of(by, targets)
    page.say(
        "## Loss of the students",
        f"Students after {how['steps']:,} steps of {how['batch_size']} × {how['length']} tokens, width "
        f"{how['width']}, {how['layers']} layers. Losses are in nats per masked token over {sum(targets)} masked "
        f"tokens of {how['rows']} validation rows, the same for all seeds.",
        "- Differences from `dense` are between students of one seed.\n"
        "- ± is the 95 % interval over seeds (Student's t of one mean per seed; batches weigh by their masked "
        "tokens).\n"
        "- An interval of one seed is over rows, marked so, and says nothing about other seeds.\n"
        "- `prior noise − own noise` is what a student loses under noise of the prior, which knows no token: how "
        "much it uses its noise.",
        table(
            [
                "student",
                "seeds",
                "conditional: own noise",
                "− dense, own noise",
                "− dense, both with dense noise",
                "prior noise − own noise",
                "unconditional: no noise, or the prior's",
            ],
            rows,
        ),
    )
    if idle:
        page.warn(
            f"These students hardly use their noise, so nothing follows from them about tolerance: {', '.join(idle)}. "
            "The figure is what prior noise costs them."
        )
        if page.claim:
            page.claim = replace(
                page.claim,
                caveat=f"{page.claim.caveat}: after {how['steps']:,} steps {len(idle)} of "
                f"{len(by.keys() - set(BLIND))} students with noise do not use it",
            )
    whole = [done for done in by.get("dense", []) if "shown" in done]
    if whole:
        rows = []
        for tolerance in (name for name in whole[0]["shown"] if name != "prior"):
            gaps = [less(done["shown"][tolerance], done["validation"]) for done in whole]
            rows.append([tolerance, over_seeds(gaps, targets, 4, sign=True)])
        page.say(
            "What the student of dense noise loses under stored noise (nats per masked token, "
            f"{counted(len(whole), 'seed')}):",
            table(["tolerance", "loss − its own"], rows),
        )
    by_steps = {
        name: [(float(min(20 * (i + 1), how["steps"])), loss) for i, loss in enumerate(those[0]["curve"])]
        for name, those in by.items()
    }
    page.plot(
        "text-loss.png",
        "training loss of the text students",
        Plot("Text: training loss", "step", "nats/masked token", by_steps),
    )
    fewest = min(len(those) for those in by.values())
    if not any(done["student"].startswith("stored") for done in found["students"]) or not by.get("dense"):
        page.warn(
            "A student of stored noise or one of dense noise is missing: what tolerance does in training is open."
        )
    if fewest < 3 or how["steps"] < 1000:
        page.warn(
            f"The text students trained {how['steps']:,} steps with {counted(fewest, 'seed')}: far from convergence. "
            "They compare tolerances and say nothing about quality."
        )


def samples(page: Page, found: Any, by: Students) -> None:
    """Generative perplexity and entropy, and the paper's trends."""
    how = found["training"]
    written = [done for those in by.values() for done in those if done.get("written")]
    if not written:
        page.warn("Generative perplexity and entropy of text students were not measured.")
        return
    page.warn(SAMPLING)
    passes = list(written[0]["written"])
    rows = []
    for name, those in by.items():
        of = [done["written"] for done in those if done.get("written")]
        cells = [
            f"{shown([one[n]['perplexity'] for one in of], 0)}, "
            f"{shown([one[n]['entropy_nats']['mean'] for one in of], 2)}"
            for n in passes
        ]
        rows.append([f"`{name}`", str(len(of)), *(cells if of else [""] * len(passes))])
    page.say(
        "## Samples",
        f"Generative perplexity under the teacher, then entropy in nats, of {how['texts']} texts each (`stillhouse "
        "score`):",
        table(["student", "seeds", *(f"NFE {n}" for n in passes)], rows),
    )
    idle = f"After {how['steps']:,} steps no student uses its noise (column `prior noise − own noise`)."
    unit = "ln of the ratio"
    trends(
        page,
        "generative perplexity of students with noise below that of MDLM, text at V = 50,257",
        "Gumbel Distillation, Table 1",
        unit,
        ratios(by, f"stored {DEFAULT}", "mdlm", passes),
        idle,
    )
    trends(
        page,
        "generative perplexity of students with noise below that of token-level distillation, text at V = 50,257",
        "Gumbel Distillation, Table 4",
        unit,
        ratios(by, f"stored {DEFAULT}", "topk", passes),
        f"{idle} Soft targets teach word frequencies from the first step: `topk` writes the most frequent words, has "
        "the lowest entropy of all, and the highest loss on the text (tables above).",
    )
    page.say("## Trends of the paper", VERDICTS, *trend_parts(page.trends))


def ratios(by: Students, ones: str, others: str, passes: Sequence[str]) -> dict[str, list[float]]:
    """ln of the ratio of two students' generative perplexities at each number of passes, of each seed."""
    of = {done["seed"]: done["written"] for done in by.get(others, []) if done.get("written")}
    return {
        f"NFE {n}": [
            math.log(done["written"][n]["perplexity"] / of[done["seed"]][n]["perplexity"])
            for done in by.get(ones, [])
            if done["seed"] in of and n in done.get("written", {}) and n in of[done["seed"]]
        ]
        for n in passes
    }
