"""The page on the other methods: a table each, the paper's trends, and whether these show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from page_parts import Claim, Page, by_seed, curves, of_students, run_of, shown, table
from page_plot import Plot
from page_text import SAMPLING, ratios
from page_tolerance import curves_of
from page_trends import VERDICTS, trend_parts, trends

Students = dict[str, list[Any]]
MEASURED = ("pgm", "prime")
"""Methods whose curves are of held-out rows."""
LN = "ln of the ratio"
Part = Callable[[Page, Any, Students], None]
"""Adds the tables and trends of a method."""


def methods(page: Page) -> None:
    page.begin(
        "One experiment for each method",
        "PGM, MDM-Prime, ARMD, BD3-LM, Medusa heads and top-k distillation: tables, plots, and the trends of each "
        "paper",
        "Each method trains from our shards: a job file, its shards, the view of the method, and a student of about "
        "a minute on one core. This page shows which trends of the papers appear at this size.",
        "```sh\n"
        "make methods                # all of them\n"
        "make methods METHODS=pgm    # one: pgm, prime, armd, bd3lm, medusa, distill\n"
        "```",
    )
    page.say(
        "## How to read the tables",
        "- The teacher, where there is one, is a GPT-2 of 3 layers, trained on the same rows.\n"
        "- ± is the 95 % interval over seeds, of students alone: all seeds share one teacher and one draw of noise.\n"
        "- Samples are drawn from the whole distribution of a student, with noise of the prior at τ = 0.85.",
        "The tables of trends have these verdicts:",
        VERDICTS,
    )
    page.warn(SAMPLING)
    missing, sizes = [], []
    for name, title, part in PARTS:
        found = page.read(f"methods-{name}.json")
        page.say(f"## {title}")
        if found is None or not found["students"]:
            page.missing(f"student in methods-{name}.json", f"make methods METHODS={name}")
            page.warn(f"Not run: {title}.")
            missing.append(title)
            continue
        method(page, found, name, title, part)
        sizes.append((found["training"]["vocab"], found["training"]["steps"]))
    page.claim = claim_of(page, missing, sizes)


def method(page: Page, found: Any, name: str, title: str, part: Part) -> None:
    """The section of a method."""
    by, how = of_students(found["students"], "student"), found["training"]
    size = "heads on the teacher" if name == "medusa" else f"width {how['width']}, {how['layers']} layers"
    page.say(f"{how['steps']} steps of {how['batch_size']} × {how['length']} tokens, V = {how['vocab']}, {size}.")
    before = len(page.trends)
    part(page, found, by)
    if page.trends[before:]:
        page.say("Trends of the paper:", *trend_parts(page.trends[before:]))
    if name == "medusa":
        page.say(
            "These intervals are the wider of two: over seeds, and of the counts of proposals (binomial). Three "
            "seeds may agree by chance."
        )
    if name == "armd":
        tuned_ar(page, by)
        weak_teacher(page, found, by)
    which = "validation loss" if name in MEASURED else "training loss"
    if any("curve" in done for done in found["students"]):
        plot = Plot(f"{title}: {which}{curves_of(found['students'])}", "step", "nats/token", curves(by))
        page.plot(f"methods-{name}.png", f"{which} by steps", plot)
    page.runs.append(run_of(f"methods-{name}.json", f"make methods METHODS={name}", found))


def claim_of(page: Page, missing: Sequence[str], sizes: Sequence[tuple[int, int]]) -> Claim | None:
    """How many trends of the papers show, without our own measures. ``sizes``: vocabularies and steps."""
    cases = [(trend, case) for trend in page.trends if not trend.is_own_measure for case in trend.cases]
    if not cases:
        return None
    counts = {
        verdict: sum(case.verdict == verdict for _, case in cases) for verdict in ("supported", "open", "contradicted")
    }
    yes = [f"{trend.claim}, {case.figure} ({trend.unit})" for trend, case in cases if case.verdict == "supported"]
    vocab, steps, seeds = (
        " to ".join(f"{value:,}" for value in sorted({min(of), max(of)}))
        for of in (*zip(*sizes), [case.seeds for _, case in cases])
    )
    caveat = f"small and short: V = {vocab}, {steps} steps, {seeds} seed{'s' * (seeds != '1')}"
    return Claim(
        "Each method trains from shards, and its paper's trends appear (PGM, Table 1; MDM-Prime, Tables 2 to 4; "
        "ARMD, Tables 2 and 3; Gumbel Distillation, Tables 1, 3 and 4)",
        f"of {len(cases)} measured differences {counts['supported']} are supported, {counts['open']} open, "
        f"{counts['contradicted']} contradicted; supported: {'; '.join(yes) or 'none'}",
        overall(counts),
        f"{caveat}; not run: {', '.join(missing)}" if missing else caveat,
    )


def overall(counts: Mapping[str, int]) -> str:
    """One verdict for all measured differences."""
    if counts["supported"]:
        return "partly supported" if counts["open"] + counts["contradicted"] else "supported"
    return "contradicted" if counts["contradicted"] else "open"


def weak_teacher(page: Page, found: Any, by: Students) -> None:
    """Whether students know the language better than the teacher of all methods, which judges their samples."""
    judge = found["corpus"]["perplexity"]
    if "ar" in by and (own := math.exp(sum(values(by["ar"], "orders", "S = 1")) / len(by["ar"]))) < judge:
        page.warn(
            "The teacher that judges the samples is weaker than some students: its held-out perplexity is "
            f"{judge:.2f}. ARMD's `ar`, which has no teacher, reaches {own:.2f} after {found['training']['steps']} "
            "steps. Students of this teacher have bounds above it (tables). The papers' judges are far above all "
            "students."
        )


def tuned_ar(page: Page, by: Students) -> None:
    """What strided fine-tuning gains for a student that has seen no other order before."""
    before = {done["seed"]: done for done in by.get("ar", [])}
    tuned = [(before[done["seed"]], done) for done in by.get("ar + strided", []) if done["seed"] in before]
    if tuned:
        told = "; ".join(
            f"S = {s}: {shown([gained(a, b, s, lost) - gained(a, b, 1, lost) for a, b in tuned], 3, sign=True)}"
            for s in (2, 4)
        )
        page.say(f"The last difference for `ar`, which has seen no other order before, in nats: {told}.")


def values(those: Sequence[Any], *keys: str) -> list[float]:
    made = []
    for done in those:
        of = done
        for key in keys:
            of = of[key]
        made.append(float(of))  # type: ignore[arg-type]
    return made


def written(by: Students, which: Sequence[str]) -> list[list[str]]:
    """Generative perplexity and entropy: a row for each student, a column for each number of passes or streams."""
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
        "Validation loss in nats per token by steps of equal batches. One bound serves all: each group of the same "
        "partitions, those of the shards, is predicted from the other.",
        "`complementary` has two passes a row, one for each group: twice the work of a step. The paper marks its row "
        "so, too.",
        table(["student", "seeds", "parameters", *(str(step) for step in steps)], rows),
    )
    trends(
        page,
        "MDLM with complementary masks below MDLM at equal steps",
        "PGM, Table 1, LM1B",
        "nats",
        {"": by_seed(by.get("complementary", []), by.get("mdlm", []), "validation")},
        "Both halves of a row come from one text. With few short rows, as many other texts would teach more.",
    )
    trends(
        page,
        "PGM below MDLM with as many layers at equal steps",
        "PGM, Table 1, LM1B",
        "nats",
        {"": by_seed(by.get("pgm", []), by.get("mdlm", []), "validation")},
        "PGM's decoder has queries that know only their position, and half of the layers. Rows of 32 tokens leave it "
        "half a row to read; the paper has rows of 128 and twelve layers. On OWT the paper's own PGM with as many "
        "layers as MDLM is slightly above it, too.",
    )


def prime(page: Page, found: Any, by: Students) -> None:
    rows = []
    for name, those in by.items():
        kind, digits = name.split()
        first = by.get(f"{kind} 1", []) if digits != "1" else []
        rows.append(
            [
                f"`{name}`",
                str(len(those)),
                f"{100 * found['idle_step_ratio'][kind][digits]:.2f} %",
                shown(values(those, "validation"), 3),
                shown(by_seed(those, first, "validation"), 3, sign=True),
                f"{found['of_the_perfect'][kind][digits]:.3f}",
                shown(values(those, "bound"), 3),
                shown([math.exp(value) for value in values(those, "bound")], 2),
                shown(by_seed(those, first, "bound"), 3, sign=True),
            ]
        )
    page.say(
        "- `text ℓ` and `images ℓ`: tokens as ℓ digits; ℓ = 1 is MDLM. Images are scikit-learn's handwritten digits, "
        "8 × 8 pixels of 16 levels.\n"
        "- Losses are nats per token of held-out rows.\n"
        "- *idle steps*: Eq. A6 with as many steps as positions.\n"
        "- *Eq. 5*: what students are trained with. The paper calls it a bound (A15).\n"
        "- *Eq. 5 of the optimum*: its value for a p that knows the share of each single token (letter, or level of "
        "a pixel) in these rows. For ℓ = 1 this is their entropy, for others less.\n"
        "- *bound*: the cost of each reverse step, the masked digits one by one under the marginals of the same p. "
        "*perplexity* is of this bound.",
        table(
            [
                "student",
                "seeds",
                "idle steps",
                "Eq. 5",
                "− ℓ = 1",
                "Eq. 5 of the optimum",
                "bound",
                "perplexity",
                "− ℓ = 1",
            ],
            rows,
        ),
    )
    page.warn(
        "For ℓ > 1 Eq. 5 of MDM-Prime is no bound on −ln p, against its A15. The loss takes the masked digits of a "
        "token jointly, but a reverse step unmasks one."
    )
    page.warn(
        f"Example: two equally likely tokens whose two digits are equal have an entropy of {math.log(2):.3f} nats. A "
        f"perfect p has {math.log(2) / 2:.3f} by Eq. 5: H minus half of the mutual information of the digits. So a "
        "lower Eq. 5 at a larger ℓ is no better likelihood by itself, here or in the paper's perplexities. The table "
        "of MDM-Prime has a bound beside it."
    )
    page.contradict("For ℓ > 1 Eq. 5 of MDM-Prime is no bound on −ln p, against its A15.")
    for kind, where, lengths, why in PRIME_TRENDS:
        below = f"ℓ = {' and '.join(lengths)} below ℓ = 1 on {kind}"
        first = by.get(f"{kind} 1", [])
        for measure in ("validation", "bound"):
            is_own = measure == "bound"
            trends(
                page,
                f"{below}, by *bound*" if is_own else below,
                "our measure" if is_own else f"MDM-Prime, {where}",
                "nats",
                {f"ℓ = {digits}": by_seed(by.get(f"{kind} {digits}", []), first, measure) for digits in lengths},
                PRIME_BOUND if is_own else why,
                is_own_measure=is_own,
            )


PRIME_TRENDS = (
    (
        "text",
        "Table 2, OWT, by Eq. 5",
        ("2", "4"),
        (
            "28 letters are digits of base 6 or 3: 36 or 81 strings, of which 8 or 53 are no letter. One digit says "
            "little about a letter. The paper's gain is at V = 50,257, with digits of 15 to 225 values."
        ),
    ),
    (
        "images",
        "Tables 3 and 4, ℓ = 2 alone",
        ("2",),
        (
            "The paper judges images by the FID of samples. This table has the likelihood, on which finer steps of "
            "sampling have no effect. The paper trains images without weights and with α_t = (1 − t)^3. These "
            "students have the weights of Eq. 5 and α_t = 1 − t."
        ),
    ),
)
"""Kind of data, the paper's table, numbers of digits, and why the trend may not show."""
PRIME_BOUND = (
    "By this bound a perfect p reaches the entropy at every ℓ (the chain rule over a random order of the digits). No "
    "ℓ is better by itself. The excess comes from training: more to learn in as many steps, and Eq. 5 is another "
    "objective."
)


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
        "Perplexity of held-out text by order: left to right (S = 1), S streams at a time, any order (for `mdlm`: "
        "its bound). `… + strided` is the student above it, trained on for a quarter of the steps with the strided "
        "orders of the shards.",
        table(["student", "seeds", *orders], rows),
    )
    streams = [order for order in orders if order.startswith("S")]
    page.say(
        "Samples of S tokens at a time: generative perplexity under the teacher, then entropy in nats:",
        table(["student", "seeds", *streams], [*written(by, streams), corpus_row(found, len(streams))]),
    )
    mdlm = {done["seed"]: done["validation"] for done in by.get("mdlm", [])}
    trends(
        page,
        "progressive ARMD below MDLM's bound at equal steps",
        "ARMD, Table 2",
        "nats",
        {"": [done["validation"] - mdlm[done["seed"]] for done in by.get("progressive", []) if done["seed"] in mdlm]},
        "MDLM's figure is a bound over all orders, ARMD's the likelihood of one.",
    )
    ar = {done["seed"]: done["orders"]["S = 1"] for done in by.get("ar", [])}
    trends(
        page,
        "progressive ARMD below the autoregressive model at equal steps, left to right",
        "ARMD, Table 2",
        "nats",
        {"": [done["orders"]["S = 1"] - ar[done["seed"]] for done in by.get("progressive", []) if done["seed"] in ar]},
        "The paper's ARMD has 1M steps, and the Transformer's figure is another paper's. Here both have the same "
        "steps, and the progressive student spends a part of them on other orders.",
    )
    after = {done["seed"]: done for done in by.get("progressive + strided", [])}
    both = [(done, after[done["seed"]]) for done in by.get("progressive", []) if done["seed"] in after]
    trends(
        page,
        "strided fine-tuning lowers the generative perplexity of S tokens at a time more than that of one",
        "ARMD, Table 3",
        "ln of the ratio of after to before, less that of S = 1",
        {f"S = {s}": [gained(a, b, s, wrote) - gained(a, b, 1, wrote) for a, b in both] for s in (2, 4)},
        "The progressive student already reads S streams nearly as well as one. Rows have 32 tokens and ρ is at most "
        "a quarter of them, so fine-tuning has little to improve. The samples are 64 rows.",
    )
    trends(
        page,
        "strided fine-tuning lowers the loss of held-out text at S more than at one",
        "ARMD, strided fine-tuning; our measure",
        "nats, less those of S = 1",
        {f"S = {s}": [gained(a, b, s, lost) - gained(a, b, 1, lost) for a, b in both] for s in (2, 4)},
        "The progressive student already reads S streams nearly as well as one: what more steps gain, they gain at S "
        "= 1, too.",
        is_own_measure=True,
    )


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
        "Blocks of 4 and 16, each without and with replayed noise. *bound* is on −ln p in nats per token of held-out "
        "rows; students with noise see noise of the prior (a bound by Jensen's inequality). *conditional* is under "
        "the text's own noise and no bound.",
        table(["student", "seeds", "bound", "conditional"], rows),
        "Samples: generative perplexity under the teacher, then entropy in nats. NFE counts the passes of all blocks.",
        table(
            ["student", "seeds", *(f"NFE {n}" for n in passes)], [*written(by, passes), corpus_row(found, len(passes))]
        ),
    )
    trends(
        page,
        "blocks of 4 below blocks of 16",
        "BD3-LM; ARMD, Table 2",
        "nats",
        {"": by_seed(by.get("4", []), by.get("16", []), "validation")},
        "A row has only two blocks of 16.",
    )
    for size, alone in (("4", ""), ("16", ", which has only L' = 4")):
        trends(
            page,
            f"generative perplexity lower with noise, L' = {size}",
            f"Gumbel Distillation, Table 1{alone}",
            LN,
            ratios(by, f"{size} noise", size, passes),
            "Students must learn to use noise first: after so few steps noise of the prior still costs more than no "
            f"noise does (bounds above). Within a block of {size} letters there is little to agree on.",
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
        "- *offset 1* to *3*: acceptance in % of the verified proposals, those whose predecessors were accepted.\n"
        "- Acceptance is typical acceptance with ε = 0.1 and δ = 1; the teacher is frozen.\n"
        "- *right*: how often, in %, a head's likeliest token is the held-out text's. Heads of `noise` see the "
        "text's own noise.",
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
        "heads are accepted less without noise",
        "Gumbel Distillation, Table 3",
        "share without − with",
        {
            f"head {j + 1}": [
                of[done["seed"]][j] - done["drawn"]["rates"][j] for done in by.get("noise", []) if done["seed"] in of
            ]
            for j in range(3)
        },
        f"Noise does tell a head its token: head 1 finds it in {right[0]:.0f} % with the text's own noise, in "
        f"{right[1]:.0f} % without. Typical acceptance does not ask for that token: it takes whatever the teacher "
        "finds likely enough. A head without noise always proposes its likeliest letter, which passes more often "
        "than the drawn one.",
        errors,
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
        f"MDLM without a teacher, taught by the {found['training']['topk']} likeliest tokens of the shards, and with "
        "replayed noise. *bound* is on −ln p in nats per token of held-out rows; `noise` sees noise of the prior. "
        "*conditional* is under the text's own noise and no bound.",
        table(["student", "seeds", "bound", "conditional"], rows),
        "Samples: generative perplexity under the teacher, then entropy in nats.",
        table(
            ["student", "seeds", *(f"NFE {n}" for n in passes)], [*written(by, passes), corpus_row(found, len(passes))]
        ),
    )
    trends(
        page,
        "generative perplexity lower with noise than that of MDLM",
        "Gumbel Distillation, Table 4 and Figure 3",
        LN,
        ratios(by, "noise", "mdlm", passes),
        "Students must learn to use noise first: noise of the prior still costs more than no noise does (bounds "
        "above).",
    )
    k, vocab = found["training"]["topk"], found["training"]["vocab"]
    soft = (
        f"The {k} likeliest of {vocab} letters are nearly the teacher's whole distribution; of 50,257 words they are "
        "not. Soft targets teach faster in so few steps. The judge of the samples is that very teacher."
    )
    reverse = " Our order is the reverse wherever there are several passes." if wrong_way(by, passes) else ""
    trends(
        page,
        "generative perplexity lower with noise than that of token-level distillation",
        "Gumbel Distillation, Table 4, its main order",
        LN,
        ratios(by, "noise", "topk", passes),
        f"{soft}{reverse}",
    )
    trends(
        page,
        "generative perplexity of MDLM lower than that of token-level distillation",
        "Gumbel Distillation, Table 4",
        LN,
        ratios(by, "mdlm", "topk", passes),
        soft,
    )


def wrong_way(by: Students, passes: Sequence[str]) -> bool:
    """Whether noise is above token-level distillation at every number of passes but one pass."""
    return all(sum(gaps) > 0 for n, gaps in ratios(by, "noise", "topk", passes).items() if gaps and n != "NFE 1")


PARTS: list[tuple[str, str, Part]] = [
    ("pgm", "PGM: complementary partitions against MDLM", pgm),
    ("prime", "MDM-Prime: ℓ = 1, 2, 4", prime),
    ("armd", "ARMD: progressive and strided orders", armd),
    ("bd3lm", "BD3-LM: blocks of 4 and 16", bd3lm),
    ("medusa", "Medusa heads", medusa),
    ("distill", "Top-k distillation", distill),
]
