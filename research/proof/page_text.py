"""The part of the page on text students at V = 50,257."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from page_parts import Page, Plot, counted, mean_of, of_students, over_seeds, ran, shown, table, trends

Students = dict[str, list[Any]]
BLIND = ("mdlm", "topk")
"""Students that are shown no noise."""
NOTICES = 0.5
"""Nats that noise of no token costs a student that goes by noise."""


def less(ones: list[float], others: list[float]) -> list[float]:
    """Differences of the same batches."""
    return [a - b for a, b in zip(ones, others, strict=True)]


def students_of(by: Students, targets: list[int]) -> tuple[list[list[str]], list[str]]:
    """A row for each student, and those that hardly go by noise."""
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
    page.say(
        "## A text student: how loose may the tolerance be?",
        "`make text`. Claim: stored noise is within its tolerance of the teacher's for every token and the observed token wins, at so many bytes; whether a student of V = 50,257 notices "
        "a tolerance is not shown, since none of these goes by noise yet. Teacher: the nano GPT-2. `dense` is the very draw that the shards hold, made of "
        "the live teacher's whole distribution; `stored T` is the same draw as stored with tolerance T. Same rows, masks, draws and first weights (`mdlm` and `topk`, which "
        "have no projection of noise, begin with other weights): between two students with noise only what tolerance takes away differs.",
    )
    found = page.read("text.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/text.json yet.")
        page.warn("No text student has been trained: what tolerance does to one is not known.")
        return
    page.say(ran(found))
    for tolerance, of in found["tolerances"].items():
        if "softmax_of_token_median" in of["variation"]:
            page.warn(
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
            page.warn(
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
        page.warn("No text student has been trained: what tolerance does to one is not known.")
        return
    targets = found["students"][0]["targets"]
    rows, idle = students_of(by, targets)
    how = found["training"]
    page.say(
        f"Students after {how['steps']} steps of {how['batch_size']} × {how['length']} tokens, width {how['width']}, {how['layers']} layers; loss in nats per masked token over "
        f"{sum(targets)} masked tokens of {how['rows']} validation rows, which are the same for all seeds. Differences from `dense`: of the students of one seed.",
        table(
            [
                "student",
                "seeds",
                "conditional: own noise",
                "− dense, own noise",
                "− dense, both shown dense noise",
                "prior noise − own noise",
                "unconditional: no noise, or the prior's",
            ],
            rows,
        ),
        "± is the 95 % interval over seeds (Student's t of one mean of each seed; batches weigh by their masked tokens). Of one seed alone it is over rows, marked so, and says nothing "
        "of other seeds. `prior noise − own noise` is what a student loses when it is shown noise of no token: how much it goes by noise at all.",
    )
    if idle:
        page.warn(
            f"Text students that hardly go by noise yet, of which therefore nothing follows on tolerance: {', '.join(idle)} when shown noise of no token."
        )
    whole = [done for done in by.get("dense", []) if "shown" in done]
    if whole:
        rows = []
        for tolerance in (name for name in whole[0]["shown"] if name != "prior"):
            gaps = [less(done["shown"][tolerance], done["validation"]) for done in whole]
            rows.append([tolerance, over_seeds(gaps, targets, 4, sign=True)])
        page.say(
            f"What the student of dense noise loses where it is shown stored noise (nats per masked token, {counted(len(whole), 'seed')}):",
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
        page.warn("No student of stored noise beside one of dense noise: what tolerance does in training is not known.")
    if fewest < 3 or how["steps"] < 1000:
        page.warn(
            f"The text students saw {how['steps']} steps and {fewest} seed{'s' if fewest > 1 else ''}: far from converged. They compare tolerances, and say nothing of quality."
        )
    written = [(name, done) for name, those in by.items() for done in those if done.get("written")]
    if not written:
        page.warn("Generative perplexity and entropy of text students were not measured.")
        return
    passes = list(written[0][1]["written"])
    rows = []
    for name, those in by.items():
        of = [done["written"] for done in those if done.get("written")]
        cells = [
            f"{shown([one[n]['perplexity'] for one in of], 0)}, {shown([one[n]['entropy_nats']['mean'] for one in of], 2)}"
            for n in passes
        ]
        rows.append([f"`{name}`", str(len(of)), *(cells if of else [""] * len(passes))])
    page.say(
        f"What they write ({how['texts']} texts each; `stillhouse score`: generative perplexity under the teacher, entropy):",
        table(["student", "seeds", *(f"NFE {n}" for n in passes)], rows),
    )
    trends(
        page,
        "text students, V = 50,257: generative perplexity of students of noise below that of MDLM (Gumbel distillation, Table 1), ln of the ratio",
        ratios(by, "stored 1e-3", "mdlm", passes),
        f"After {how['steps']} steps no student goes by its noise (the column above).",
    )
    trends(
        page,
        "text students, V = 50,257: generative perplexity of students of noise below that of token-level distillation (Gumbel distillation, Table 4), ln of the ratio",
        ratios(by, "stored 1e-3", "topk", passes),
        f"After {how['steps']} steps no student goes by its noise (the column above), while soft targets teach how often words come from the first step on: `topk` writes the most frequent words, "
        "with the lowest entropy of all, and loses most on the text itself (tables above).",
    )


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
