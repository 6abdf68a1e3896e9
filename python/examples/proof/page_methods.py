"""The part of the page on the other methods: a table each, the paper's trend, and whether it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from page_parts import Page, Plot, by_seed, counted, curves, machine_of, mean_and_half, of_students, shown, table

Students = dict[str, list[Any]]
MEASURED = ("pgm", "prime")
"""Methods whose curves are of held-out rows."""
SMALL = "These students see few steps of a small text, with weights of a few hundred thousand numbers: a trend that needs long training, long rows or a large vocabulary has no room here."


def methods(page: Page) -> None:
    page.say(
        "## Each other method once",
        "`make methods`. Each is a job file, its shards, the view of the method, and a student of about a minute on one core. Teacher, where there is one: a GPT-2 of 3 layers, trained on the same rows. ± is "
        "the 95 % interval over seeds where there are several; a trend is said to show where its interval over seeds is on the paper's side, and to be open where that interval holds 0 or where there is one "
        "seed.",
    )
    for name, title, part in PARTS:
        found = page.read(f"methods-{name}.json")
        page.say(f"### {title}")
        if found is None or not found["students"]:
            page.say(f"**Missing:** there is no student in docs/proof/methods-{name}.json yet.")
            page.warn(f"Not run: {title}.")
            continue
        by, how = of_students(found["students"], "student"), found["training"]
        seconds = sum(done["seconds"] for done in found["students"])
        size = "heads on the teacher" if name == "medusa" else f"width {how['width']}, {how['layers']} layers"
        page.say(
            f"`python python/examples/proof/methods/{name}.py`, {how['steps']} steps of {how['batch_size']} × {how['length']} tokens, V = {how['vocab']}, {size}; "
            f"{counted(len(found['students']), 'student')} in {seconds:.0f} s by the clock, one thread of a machine with other work to do ({machine_of(found)})."
        )
        part(page, found, by)
        which = "validation loss" if name in MEASURED else "training loss"
        if any("curve" in done for done in found["students"]):
            plot = Plot(f"{title}: {which}", "step", "nats/token", curves(by))
            page.plot(f"methods-{name}.png", f"{which} by steps", plot)


def trend(page: Page, words: str, gaps: Sequence[float], why: str = SMALL) -> None:
    """A trend of a paper: ``gaps`` are what should be below 0, one of each seed."""
    if not gaps:
        return
    mean, half = mean_and_half(gaps)
    told = f"{words}: {shown(gaps, 3, sign=True)} ({counted(len(gaps), 'seed')})"
    if not math.isnan(half) and mean - half > 0:
        page.say(f"Trend of the paper, **not shown**: {told}. {why}")
        page.warn(f"Against the paper: {told}.")
    elif math.isnan(half) or mean + half >= 0:
        page.say(f"Trend of the paper, **open** (on its side: {'yes' if mean < 0 else 'no'}): {told}.")
    else:
        page.say(f"Trend of the paper, **shows**: {told}.")


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
        "Validation loss (nats per token, one bound for all: each group of the same partitions predicted from the other) by steps of equal batches. Partitions are those of the shards.",
        table(["student", "seeds", "parameters", *(str(step) for step in steps)], rows),
    )
    trend(
        page,
        "MDLM with complementary masks below MDLM at equal steps (PGM, Table 1, LM1B), nats",
        by_seed(by.get("complementary", []), by.get("mdlm", []), "validation"),
    )
    trend(
        page,
        "PGM below MDLM with as many layers at equal steps (PGM, Table 1, LM1B), nats",
        by_seed(by.get("pgm", []), by.get("mdlm", []), "validation"),
    )


def prime(page: Page, found: Any, by: Students) -> None:
    rows = []
    for name, those in by.items():
        kind, digits = name.split()
        rows.append([
            f"`{name}`", str(len(those)), f"{100 * found['idle_step_ratio'][kind][digits]:.2f} %", shown(values(those, "validation"), 3),
            shown([math.exp(value) for value in values(those, "validation")], 2), shown(by_seed(those, by.get(f"{kind} 1", []), "validation"), 3, sign=True) if digits != "1" else "",
        ])  # fmt: skip
    page.say(
        "`text ℓ` and `images ℓ`: tokens as ℓ digits; ℓ = 1 is MDLM. Images: scikit-learn's handwritten digits, 8 × 8 pixels of 16 levels. Bound on −ln p in nats per token of held-out rows; idle steps: "
        "Eq. A6 with as many steps as positions.",
        table(["student", "seeds", "idle steps", "bound", "perplexity", "− ℓ = 1"], rows),
    )
    ends = (
        ("text", "2", "Table 2, OWT"),
        ("text", "4", "Table 2, OWT"),
        ("images", "2", "Tables 3 and 4, by FID"),
        ("images", "4", "Tables 3 and 4, by FID"),
    )
    for kind, digits, where in ends:
        trend(
            page,
            f"ℓ = {digits} below ℓ = 1 on {kind} (MDM-Prime, {where}), nats",
            by_seed(by.get(f"{kind} {digits}", []), by.get(f"{kind} 1", []), "validation"),
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
    trend(
        page, "progressive ARMD below MDLM's bound at equal steps (ARMD, Table 2), nats",
        [done["validation"] - mdlm[done["seed"]] for done in by.get("progressive", []) if done["seed"] in mdlm],
    )  # fmt: skip
    after = {done["seed"]: done["orders"]["S = 4"] for done in by.get("progressive + strided", [])}
    trend(
        page, "after strided fine-tuning S = 4 costs less than before (ARMD, Table 3), nats",
        [after[done["seed"]] - done["orders"]["S = 4"] for done in by.get("progressive", []) if done["seed"] in after],
    )  # fmt: skip


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
    trend(
        page,
        "blocks of 4 below blocks of 16 (BD3-LM; ARMD, Table 2), nats",
        by_seed(by.get("4", []), by.get("16", []), "validation"),
    )
    for size in ("4", "16"):
        noisy_rows(page, by, f"{size} noise", size, passes, f"with noise, L' = {size} (Gumbel distillation, Table 1)")


def noisy_rows(page: Page, by: Students, noisy: str, plain: str, passes: Sequence[str], where: str) -> None:
    """Whether noise lowers the generative perplexity at each number of passes."""
    of = {done["seed"]: done["written"] for done in by.get(plain, [])}
    for n in passes:
        gaps = [
            math.log(done["written"][n]["perplexity"] / of[done["seed"]][n]["perplexity"])
            for done in by.get(noisy, []) if done["seed"] in of and n in done["written"]
        ]  # fmt: skip
        trend(page, f"generative perplexity lower {where}, NFE {n}, ln of the ratio", gaps)


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
    for j in range(3):
        gaps = [of[done["seed"]][j] - done["drawn"]["rates"][j] for done in by.get("noise", []) if done["seed"] in of]
        trend(
            page,
            f"head {j + 1} is accepted less without noise (Gumbel distillation, Table 3), share without − with",
            gaps,
        )


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
    noisy_rows(page, by, "noise", "mdlm", passes, "with noise (Gumbel distillation, Table 4 and Figure 3)")
    noisy_rows(
        page, by, "mdlm", "topk", passes, "of MDLM than of token-level distillation (Gumbel distillation, Table 4)"
    )


PARTS: list[tuple[str, str, Callable[[Page, Any, Students], None]]] = [
    ("pgm", "PGM: complementary partitions against MDLM", pgm),
    ("prime", "MDM-Prime: ℓ = 1, 2, 4", prime),
    ("armd", "ARMD: progressive and strided orders", armd),
    ("bd3lm", "BD3-LM: blocks of 4 and 16", bd3lm),
    ("medusa", "Medusa heads", medusa),
    ("distill", "Top-k distillation", distill),
]
