"""The part of the page on the other methods: a table each, the paper's trend, and whether it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from page_parts import Page, Plot, by_seed, curves, of_students, ran, shown, table, trends
from page_text import ratios
from page_tolerance import curves_of

Students = dict[str, list[Any]]
MEASURED = ("pgm", "prime")
"""Methods whose curves are of held-out rows."""


def methods(page: Page) -> None:
    page.say(
        "## Each other method once",
        "`make methods`, or one of them: `make methods METHODS=pgm`. Claim: each method trains from our shards, from job file to student, and here stands which of its paper's trends show at this size. Each is "
        "a job file, its shards, the view of the method, and a student of about a minute on one core. Teacher, where there is one: a GPT-2 of 3 layers, trained on the same rows. ± is "
        "the 95 % interval over seeds where there are several (of the students alone: all have one teacher and one draw of noise); a trend is said to show where its interval over seeds is on the "
        "paper's side, and to be open where that interval holds 0 or where there is one seed. Intervals are not corrected for the number of trends: of twenty that are not there, one shows. "
        "Tokens are drawn from all of a student's distribution, noise of the prior at τ = 0.85; the Gumbel paper draws from the nucleus of 0.9 (appendix C.1).",
    )
    page.warn(
        "Methods and text students write without nucleus sampling, where the Gumbel paper has p = 0.9 for every model (appendix C.1), and noise at generation is scaled by τ = 0.85 without a student "
        "at τ = 1 beside it: a lower generative perplexity may be a lower entropy, which stands beside it."
    )
    for name, title, part in PARTS:
        found = page.read(f"methods-{name}.json")
        page.say(f"### {title}")
        if found is None or not found["students"]:
            page.say(f"**Missing:** there is no student in docs/proof/methods-{name}.json yet.")
            page.warn(f"Not run: {title}.")
            continue
        by, how = of_students(found["students"], "student"), found["training"]
        size = "heads on the teacher" if name == "medusa" else f"width {how['width']}, {how['layers']} layers"
        page.say(
            f"`make methods METHODS={name}`: {how['steps']} steps of {how['batch_size']} × {how['length']} tokens, V = {how['vocab']}, {size}; {ran(found)}"
        )
        part(page, found, by)
        if name == "armd":
            weak_teacher(page, found, by)
        which = "validation loss" if name in MEASURED else "training loss"
        if any("curve" in done for done in found["students"]):
            plot = Plot(f"{title}: {which}{curves_of(found['students'])}", "step", "nats/token", curves(by))
            page.plot(f"methods-{name}.png", f"{which} by steps", plot)


def weak_teacher(page: Page, found: Any, by: Students) -> None:
    """Whether students know the language better than the teacher of all methods, which judges what they write."""
    judge = found["corpus"]["perplexity"]
    if "ar" in by and (own := math.exp(sum(values(by["ar"], "orders", "S = 1")) / len(by["ar"]))) < judge:
        page.warn(
            f"Methods: the teacher that judges what is written is weaker than some that it judges: held-out perplexity {judge:.2f}, of ARMD's `ar`, which has no teacher, {own:.2f} after {found['training']['steps']} steps. Those that it "
            "teaches have bounds above it (tables). The papers' judges are far above all students."
        )


def values(those: Sequence[Any], *keys: str) -> list[float]:
    made = []
    for done in those:
        of = done
        for key in keys:
            of = of[key]
        made.append(float(of))  # type: ignore[arg-type]
    return made


def written(by: Students, which: Sequence[str]) -> list[list[str]]:
    """Rows of generative perplexity and entropy, one for each student, a column for each number of passes or streams."""
    rows = []
    for name, those in by.items():
        if all("written" in done for done in those):
            cells = []
            for n in which:
                there = [done["written"][n] for done in those if n in done["written"]]
                perplexity, entropy = ([of[kind] for of in there] for kind in ("perplexity", "entropy"))
                cells.append(f"{shown(perplexity, 2)}, {shown(entropy, 2)}" if there else "")
            rows.append([f"`{name}`", str(len(those)), *cells])
    return rows


def corpus_row(found: Any, columns: int) -> list[str]:
    of = found["corpus"]
    return ["held-out text", "", f"{of['perplexity']:.2f}, {of['entropy']:.2f}", *[""] * (columns - 1)]


def pgm(page: Page, found: Any, by: Students) -> None:
    steps = [step for step, _ in found["students"][0]["curve"]]
    rows = [
        [
            f"`{name}`",
            str(len(those)),
            f"{those[0]['parameters']:,}",
            *(shown([done["curve"][i][1] for done in those], 3) for i in range(len(steps))),
        ]
        for name, those in by.items()
    ]
    page.say(
        "Validation loss (nats per token, one bound for all: each group of the same partitions predicted from the other) by steps of equal batches. Partitions are those of the shards. `complementary` has two passes a row, one for each group, "
        "so twice the work of a step (the paper marks its row so, too).",
        table(["student", "seeds", "parameters", *(str(step) for step in steps)], rows),
    )
    trends(
        page,
        "MDLM with complementary masks below MDLM at equal steps (PGM, Table 1, LM1B), nats",
        {"": by_seed(by.get("complementary", []), by.get("mdlm", []), "validation")},
        "Both halves of a row are two rows of one text: where rows are few and short, as many other texts would teach more.",
    )
    trends(
        page,
        "PGM below MDLM with as many layers at equal steps (PGM, Table 1, LM1B), nats",
        {"": by_seed(by.get("pgm", []), by.get("mdlm", []), "validation")},
        "PGM's decoder has queries that know their position alone and half of the layers only; rows of 32 tokens leave it half a row to read, where the paper's have 128 and twelve layers. And on OWT the paper's own PGM of as many layers as MDLM is a little above it.",
    )


def prime(page: Page, found: Any, by: Students) -> None:
    rows = []
    for name, those in by.items():
        kind, digits = name.split()
        first = by.get(f"{kind} 1", []) if digits != "1" else []
        rows.append([
            f"`{name}`", str(len(those)), f"{100 * found['idle_step_ratio'][kind][digits]:.2f} %", shown(values(those, "validation"), 3),
            shown(by_seed(those, first, "validation"), 3, sign=True), f"{found['of_the_perfect'][kind][digits]:.3f}",
            shown(values(those, "bound"), 3), shown([math.exp(value) for value in values(those, "bound")], 2), shown(by_seed(those, first, "bound"), 3, sign=True),
        ])  # fmt: skip
    page.say(
        "`text ℓ` and `images ℓ`: tokens as ℓ digits; ℓ = 1 is MDLM. Images: scikit-learn's handwritten digits, 8 × 8 pixels of 16 levels. Nats per token of held-out rows; idle steps: "
        "Eq. A6 with as many steps as positions. Eq. 5 is what students are trained with and what the paper calls a bound (A15); *of the perfect* is its value for a p that knows the share of each single token "
        "(letters, or the levels of each pixel) of these rows: their entropy for ℓ = 1, less for others. The *bound* counts what a reverse step costs, the masked digits one by one by the margins of the same p; perplexity is of it.",
        table(
            ["student", "seeds", "idle steps", "Eq. 5", "− ℓ = 1", "of the perfect", "bound", "perplexity", "− ℓ = 1"],
            rows,
        ),
    )
    page.warn(
        f"MDM-Prime's Eq. 5 is no bound on −ln p for ℓ > 1, against its A15: it takes the masked digits of a token jointly, a reverse step unmasks one. Two equally likely tokens whose two digits are equal have an entropy of "
        f"{math.log(2):.3f} nats, and a perfect p has {math.log(2) / 2:.3f} by Eq. 5 (H less half of what the digits tell of each other). A lower Eq. 5 at a larger ℓ is no better likelihood by itself, here or in the paper's perplexities; "
        "the table has a bound beside it."
    )
    for kind, where, lengths, why in (
        ("text", "Table 2, OWT, by Eq. 5", ("2", "4"), "28 letters are digits of base 6 or 3 (36 or 81 strings, of which 8 or 53 are no letter), which say little of a letter before it is whole; the paper's gain is at V = 50,257, with digits of 15 to 225 values."),
        (
            "images", "Tables 3 and 4, ℓ = 2 alone", ("2",),
            ("The paper judges images by the FID of samples, here it is likelihood: another figure, on which finer steps of sampling have no bearing. It trains images without weights and with α_t = (1 − t)^3; "
            "here it is Eq. 5 with its weights and α_t = 1 − t."),
        ),
    ):  # fmt: skip
        trends(
            page, f"ℓ = {' and '.join(lengths)} below ℓ = 1 on {kind} (MDM-Prime, {where}), nats",
            {f"ℓ = {digits}": by_seed(by.get(f"{kind} {digits}", []), by.get(f"{kind} 1", []), "validation") for digits in lengths}, why,
        )  # fmt: skip
        trends(
            page, f"the same by the bound of single digits ({kind}), ℓ = {' and '.join(lengths)} below ℓ = 1, nats",
            {f"ℓ = {digits}": by_seed(by.get(f"{kind} {digits}", []), by.get(f"{kind} 1", []), "bound") for digits in lengths},
            "A perfect p has the entropy by this bound at every ℓ (the chain rule over a random order of the digits), so that no ℓ is better by itself. What lies above comes of training: more to learn in as many steps, and by Eq. 5, which is "
            "another objective.",
        )  # fmt: skip


def armd(page: Page, found: Any, by: Students) -> None:
    orders = list(by["ar"][0]["orders"]) if "ar" in by else []
    rows = []
    for name, those in by.items():
        losses = (
            [[math.exp(value) for value in values(those, "orders", order)] for order in orders]
            if "orders" in those[0]
            else None
        )
        cells = (
            [shown(of, 2) for of in losses]
            if losses
            else ["", "", "", shown([math.exp(value) for value in values(those, "validation")], 2)]
        )
        rows.append([f"`{name}`", str(len(those)), *cells])
    page.say(
        "Perplexity of held-out text by order: left to right (S = 1), S streams at a time, any order (of `mdlm`: its bound). `… + strided` is the student above it trained on for a quarter of the steps with "
        "the strided orders of the shards.",
        table(["student", "seeds", *orders], rows),
    )
    streams = [order for order in orders if order.startswith("S")]
    page.say(
        "What they write S tokens at a time (generative perplexity under the teacher, entropy):",
        table(["student", "seeds", *streams], [*written(by, streams), corpus_row(found, len(streams))]),
    )
    mdlm = {done["seed"]: done["validation"] for done in by.get("mdlm", [])}
    trends(
        page, "progressive ARMD below MDLM's bound at equal steps (ARMD, Table 2), nats",
        {"": [done["validation"] - mdlm[done["seed"]] for done in by.get("progressive", []) if done["seed"] in mdlm]},
        "MDLM's figure is a bound of any order, ARMD's the likelihood of one.",
    )  # fmt: skip
    ar = {done["seed"]: done["orders"]["S = 1"] for done in by.get("ar", [])}
    trends(
        page, "progressive ARMD below the autoregressive model at equal steps, left to right (ARMD, Table 2), nats",
        {"": [done["orders"]["S = 1"] - ar[done["seed"]] for done in by.get("progressive", []) if done["seed"] in ar]},
        "The paper's ARMD has 1M steps beside the Transformer's figure, which is another paper's; here both have the same steps, and the progressive student spends a part of them on other orders.",
    )  # fmt: skip
    after = {done["seed"]: done for done in by.get("progressive + strided", [])}
    both = [(done, after[done["seed"]]) for done in by.get("progressive", []) if done["seed"] in after]
    trends(
        page, "strided fine-tuning brings S tokens at a time nearer to one: perplexity of what is written (ARMD, Table 3), ln of the ratio to before, less that of S = 1, which more steps make better, too",
        {f"S = {s}": [gained(a, b, s, wrote) - gained(a, b, 1, wrote) for a, b in both] for s in (2, 4)},
        "The progressive student reads S streams nearly as well as one already, with rows of 32 tokens and ρ up to a quarter of them, so that fine-tuning has little to mend; 64 rows are written.",
    )  # fmt: skip
    trends(
        page, "the same by the likelihood of held-out text (ARMD, strided fine-tuning, less S = 1), nats",
        {f"S = {s}": [gained(a, b, s, lost) - gained(a, b, 1, lost) for a, b in both] for s in (2, 4)},
        "The progressive student reads S streams nearly as well as one already: what more steps give, they give at S = 1, too.",
    )  # fmt: skip
    before = {done["seed"]: done for done in by.get("ar", [])}
    tuned = [(before[done["seed"]], done) for done in by.get("ar + strided", []) if done["seed"] in before]
    if tuned:
        told = "; ".join(
            f"S = {s}: {shown([gained(a, b, s, lost) - gained(a, b, 1, lost) for a, b in tuned], 3, sign=True)}"
            for s in (2, 4)
        )
        page.say(f"The same of `ar`, which has never seen another order before (held-out text, nats): {told}.")


def lost(done: Any, streams: int) -> float:
    """−ln p of held-out text, S streams at a time."""
    return float(done["orders"][f"S = {streams}"])


def wrote(done: Any, streams: int) -> float:
    """ln of the perplexity of what is written S tokens at a time."""
    return math.log(done["written"][f"S = {streams}"]["perplexity"])


def gained(before: Any, after: Any, streams: int, of: Callable[[Any, int], float]) -> float:
    return of(after, streams) - of(before, streams)


def bd3lm(page: Page, found: Any, by: Students) -> None:
    passes = sorted({n for done in found["students"] for n in done["written"]}, key=int)
    rows = [
        [
            f"`{name}`",
            str(len(those)),
            shown(values(those, "validation"), 3),
            shown(values(those, "conditional"), 3) if "conditional" in those[0] else "",
        ]
        for name, those in by.items()
    ]
    page.say(
        "Blocks of 4 and 16, each without and with replayed noise. Bound on −ln p in nats per token of held-out rows; of students with noise under noise of the prior (a bound by Jensen's inequality), and "
        "conditional on the text's own noise, which is no bound.",
        table(["student", "seeds", "bound", "conditional"], rows),
        "What they write (generative perplexity under the teacher, entropy; NFE counts the passes of all blocks):",
        table(
            ["student", "seeds", *(f"NFE {n}" for n in passes)], [*written(by, passes), corpus_row(found, len(passes))]
        ),
    )
    trends(
        page,
        "blocks of 4 below blocks of 16 (BD3-LM; ARMD, Table 2), nats",
        {"": by_seed(by.get("4", []), by.get("16", []), "validation")},
        "A row has two blocks of 16 alone.",
    )
    for size, alone in (("4", ""), ("16", ", which has L' = 4 alone")):
        trends(
            page,
            f"generative perplexity lower with noise, L' = {size} (Gumbel distillation, Table 1{alone}), ln of the ratio",
            ratios(by, f"{size} noise", size, passes),
            f"Noise has to be learned first: after so few steps the prior's still costs these students more than no noise does (bounds above), and within a block of {size} letters there is little to agree on.",
        )


def medusa(page: Page, found: Any, by: Students) -> None:
    rows = []
    for name, those in by.items():
        for kind in ("drawn", "greedy"):
            if kind in those[0]:
                of = [done[kind] for done in those]
                heads = len(of[0]["rates"])
                rates = [shown([100 * one["rates"][j] for one in of], 1) for j in range(heads)]
                own = (
                    [shown([100 * done["right_with_own_noise"][j] for done in those], 1) for j in range(heads)]
                    if kind == "drawn"
                    else [""] * heads
                )
                rows.append(
                    [
                        f"`{name}`, head 0 {kind}",
                        str(len(of)),
                        *rates,
                        shown([one["accepted_length"] for one in of], 3),
                        *own,
                    ]
                )
    page.say(
        "Acceptance in % of the proposals that were verified (those before them accepted), typical acceptance with ε = 0.1 and δ = 1, teacher frozen; then how often a head's likeliest token is the "
        "held-out text's, in %, where `noise` sees the text's own noise.",
        table(
            [
                "heads",
                "seeds",
                "offset 1",
                "offset 2",
                "offset 3",
                "accepted length",
                "right, 1",
                "right, 2",
                "right, 3",
            ],
            rows,
        ),
    )
    of = {done["seed"]: done["drawn"]["rates"] for done in by.get("heads", [])}
    errors = {
        f"head {j + 1}": 1.96 * math.sqrt(sum(share(by.get(name, []), j) for name in ("heads", "noise")))
        for j in range(3)
    }
    right = [
        100 * sum(done["right_with_own_noise"][0] for done in by.get(name, [])) / max(1, len(by.get(name, [])))
        for name in ("noise", "heads")
    ]
    trends(
        page,
        "heads are accepted less without noise (Gumbel distillation, Table 3), share without − with",
        {
            f"head {j + 1}": [of[done["seed"]][j] - done["drawn"]["rates"][j] for done in by.get("noise", []) if done["seed"] in of]
            for j in range(3)
        },
        f"Noise does tell a head its token (head 1 finds it in {right[0]:.0f} % with the text's own noise, in {right[1]:.0f} % without), and typical acceptance does not ask for it: it takes whatever the teacher "
        "finds likely enough. A head without noise always proposes its likeliest letter, which passes more often than the one that was drawn.",
        errors,
    )  # fmt: skip
    page.say(
        "Intervals of these differences are the wider ones of those over seeds and those of the counts of proposals (binomial), as three seeds may agree by chance."
    )


def share(those: Sequence[Any], head: int) -> float:
    """The variance of a head's acceptance by the counts of all seeds."""
    verified, accepted = (sum(done["drawn"][kind][head] for done in those) for kind in ("verified", "accepted"))
    p = accepted / max(1, verified)
    return float(p * (1 - p) / max(1, verified))


def distill(page: Page, found: Any, by: Students) -> None:
    passes = list(found["students"][0]["written"])
    rows = [
        [
            f"`{name}`",
            str(len(those)),
            shown(values(those, "validation"), 3),
            shown(values(those, "conditional"), 3) if "conditional" in those[0] else "",
        ]
        for name, those in by.items()
    ]
    page.say(
        f"MDLM without a teacher, taught by the {found['training']['topk']} likeliest tokens of the shards, and with replayed noise. Bound on −ln p in nats per token of held-out rows; of `noise` under noise of "
        "the prior, and conditional on the text's own noise, which is no bound.",
        table(["student", "seeds", "bound", "conditional"], rows),
        "What they write (generative perplexity under the teacher, entropy):",
        table(
            ["student", "seeds", *(f"NFE {n}" for n in passes)], [*written(by, passes), corpus_row(found, len(passes))]
        ),
    )
    trends(
        page,
        "generative perplexity lower with noise than of MDLM (Gumbel distillation, Table 4 and Figure 3), ln of the ratio",
        ratios(by, "noise", "mdlm", passes),
        "Noise has to be learned first: the prior's still costs more than no noise does (bounds above).",
    )
    k, vocab = found["training"]["topk"], found["training"]["vocab"]
    soft = f"The {k} likeliest of {vocab} letters are nearly the teacher's whole distribution (of 50,257 words they are not), soft targets teach faster in so few steps, and the judge of what is written is that very teacher. "
    trends(
        page,
        "generative perplexity lower with noise than of token-level distillation (Gumbel distillation, Table 4, its main order), ln of the ratio",
        ratios(by, "noise", "topk", passes),
        soft + "Our order is the other way round wherever there are several passes." if wrong_way(by, passes) else soft,
    )
    trends(
        page,
        "generative perplexity lower of MDLM than of token-level distillation (Gumbel distillation, Table 4), ln of the ratio",
        ratios(by, "mdlm", "topk", passes),
        soft.strip(),
    )


def wrong_way(by: Students, passes: Sequence[str]) -> bool:
    """Whether noise is above token-level distillation at every number of passes but one pass."""
    return all(sum(gaps) > 0 for n, gaps in ratios(by, "noise", "topk", passes).items() if gaps and n != "NFE 1")


PARTS: list[tuple[str, str, Callable[[Page, Any, Students], None]]] = [
    ("pgm", "PGM: complementary partitions against MDLM", pgm),
    ("prime", "MDM-Prime: ℓ = 1, 2, 4", prime),
    ("armd", "ARMD: progressive and strided orders", armd),
    ("bd3lm", "BD3-LM: blocks of 4 and 16", bd3lm),
    ("medusa", "Medusa heads", medusa),
    ("distill", "Top-k distillation", distill),
]
