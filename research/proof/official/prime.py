"""MDM-Prime: bases, digits, the filter table, carry-over, masks and losses; images; and v2's numbers of ids."""

from __future__ import annotations

import io
import math
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import stillhouse
from stillhouse import views
from stillhouse.views import prime

from . import mdlm
from .bd3lm import per_token
from .compare import F32, F64, Because, Comparison
from .data import Data, Student, drawn, strata
from .theirs import PRIME, PRIME2, Code, fed

V, DIGITS, EPS = 50_257, 4, 1e-3
LENGTHS = (2, 3, 4, 6, 8)
POWER = 3.0


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    file, tools = Code(root, PRIME, "text/diffusion.py"), Code(root, PRIME, "text/utils/utils.py")
    yield from bases(Code(root, PRIME, "text/main.py"))
    batch = data.plain
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    encoder, decoder = tools.cut("encoder"), tools.cut("decoder")
    for size in LENGTHS:
        base = prime.base_of(V, size)
        theirs = encoder(ids, base, size, length)
        yield Comparison(
            f"prime: digits, ℓ = {size}",
            f"digits of every token in base {base}",
            tools,
            tools.at("encoder"),
            "views.prime.encode",
            theirs.reshape(rows, length, size),
            prime.encode(ids, base, size),
        )
    base = prime.base_of(V, DIGITS)
    y0 = encoder(ids, base, DIGITS, length)
    yield Comparison(
        "prime: digits as stored",
        f"the column of a job with ℓ = {DIGITS}",
        tools,
        tools.at("encoder"),
        "subtokens: {length: 4}",
        y0.reshape(rows, length, DIGITS),
        batch["subtokens"],
    )
    yield Comparison(
        "prime: tokens of digits",
        "ids of the stored digits",
        tools,
        tools.at("decoder"),
        "views.prime.decode",
        decoder(batch["subtokens"].long().reshape(rows, -1), base, DIGITS, length),
        prime.decode(batch["subtokens"], base, V),
    )
    made = tools.cut("create_extended_p_filter")(lambda x, n: encoder(x, base, DIGITS, n), V, DIGITS, base)
    table = np.load(io.BytesIO(stillhouse.open(str(data.work / "plain")).file("filter_table.npy")))
    yield Comparison(
        "prime: filter table",
        "which id has which digit [ℓ, b + 1, C]; their row of the mask is added where the table is used",
        tools,
        tools.at("create_extended_p_filter"),
        "subtokens: {filter_table: true}; views.prime.filter_table",
        torch.cat([made.transpose(1, 2), torch.ones(DIGITS, 1, V, dtype=torch.bool)], 1),
        table,
    )
    yield from training(root, file, tools, made, table, batch)
    yield from images(root, data)
    yield shuffled(root, ids)


def bases(main: Code) -> Iterator[Comparison]:
    """b of every ℓ and of vocabularies that are powers."""

    def of(pairs: list[tuple[int, int]]) -> list[int]:
        made = []
        for size, length in pairs:
            config = SimpleNamespace(prime=SimpleNamespace(vocab_size=size, target_length=length))
            made.append(main.value("_sample_and_save", "base", math=math, config=config))
        return made

    usual = [(c, length) for c in (50_257, 256, 30_522) for length in range(2, 9)]
    where = main.line("_sample_and_save", sets="base")
    yield Comparison(
        "prime: bases",
        "b of three vocabularies (50,257, 256, 30,522) at ℓ = 2 to 8",
        main,
        where,
        "views.prime.base_of",
        of(usual),
        [prime.base_of(*pair) for pair in usual],
    )
    powers = [(b**length, length) for b in range(2, 40) for length in range(2, 9)]
    theirs, ours = np.array(of(powers)), np.array([prime.base_of(*pair) for pair in powers])
    exact = theirs == ours
    yield Comparison(
        "prime: bases of exact powers",
        "b of vocabularies of b^ℓ ids, b = 2 to 39",
        main,
        where,
        "views.prime.base_of",
        theirs,
        ours,
        because=Because(
            where,
            f"A root in floating point, rounded up: of {len(powers)} exact powers {int((~exact).sum())} give b + 1 there, the first {powers[int(np.argmin(exact))]}. No vocabulary of the papers "
            "is one. Elsewhere both are the same.",
            theirs[exact],
            ours[exact],
        ),
    )


def training(root: pathlib.Path, file: Code, tools: Code, filters: Any, table: Any, batch: Any) -> Iterator[Comparison]:
    """Masks of digits, log-probabilities under carry-over, and both losses."""
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    base = prime.base_of(V, DIGITS)
    example = views.prime.mask(batch)
    own, t = drawn("prime_mask", batch, length * DIGITS), example.t.double()
    noise = mdlm.schedule(Code(root, PRIME, "text/utils/noise_schedule.py"))
    marginal = tools.cut("convert_to_marginal_filter_logit")

    def trainer(carry_over: bool, student: Student) -> Any:
        them = file.fake(
            "Diffusion",
            {
                "q_xt": {},
                "_sample_t": {},
                "_subs_prime_parameterization": {},
                "_forward_pass_diffusion": {"print_nans": mdlm.Quiet.print_nans},
            },
            config=SimpleNamespace(prime=SimpleNamespace(target_length=DIGITS)),
            mask_index_enc=base,
            mask_index=V,
            vocab_size=V,
            carry_over=carry_over,
            marginalization_fn=lambda logit, digits: marginal(logit=logit, extended_masks=filters, class_index=digits),
            wrapped_encoder=lambda x: tools.cut("encoder")(x, base, DIGITS, length),
            T=0,
            change_of_variables=False,
            importance_sampling=False,
            antithetic_sampling=True,
            sampling_eps=EPS,
            parameterization="subs",
            noise=noise,
        )
        them.forward = lambda x, sigma: them._subs_prime_parameterization(
            student.of_digits(x.reshape(len(x), -1, DIGITS)), x
        )
        return them

    student = Student(V, length, inputs=base + 1)
    them = trainer(True, student)
    place = strata("prime_t", batch).argsort()
    with fed(drawn("prime_t_row", batch, 1)[:, 0][place]):
        theirs = them._sample_t(rows, "cpu")
    yield Comparison(
        "prime: times",
        "t of each row of a batch, antithetic",
        file,
        file.at("Diffusion._sample_t"),
        "views.prime.mask(batch).t",
        theirs,
        example.t,
        F32,
        Because(
            file.line("Diffusion._sample_t", sets="offset"),
            "As of MDLM: strata in the order of the rows there, turned and spread here. As a set they are the same.",
            theirs,
            example.t[place],
        ),
    )
    with fed(own):
        theirs = them.q_xt(them.wrapped_encoder(ids), t[:, None])
    yield Comparison(
        "prime: masked digits",
        "y_t with a given probability to be masked, from the same uniforms",
        file,
        file.at("Diffusion.q_xt"),
        "views.prime.mask(batch).input_ids",
        theirs.reshape(example.input_ids.shape),
        example.input_ids,
    )
    few = slice(0, 2)
    logits = student.of_digits(example.input_ids)[few]
    theirs = marginal(logit=logits, extended_masks=filters, class_index=theirs[few])
    allowed = prime.valid_set(example.input_ids[few], torch.from_numpy(table.copy()))
    yield Comparison(
        "prime: carry-over",
        "ln p of every id at partly masked digits, −∞ outside of the valid ids; two rows",
        tools,
        tools.at("convert_to_marginal_filter_logit"),
        "views.prime.valid_set",
        theirs,
        logits.masked_fill(~allowed, float("-inf")).log_softmax(-1),
        F64,
    )
    for carry_over in (True, False):
        ours = views.prime.mask(batch, carry_over=carry_over)
        them = trainer(carry_over, student)
        them._sample_t = lambda n, device: t / (1 - EPS)
        with fed(own):
            theirs = them._forward_pass_diffusion(ids)
        logits = student.of_digits(ours.input_ids)
        if carry_over:
            allowed = prime.valid_set(ours.input_ids, torch.from_numpy(table.copy()))
            logits = logits.masked_fill(~allowed, float("-inf"))
        each = per_token(ours, logits)
        name = "with" if carry_over else "without"
        yield Comparison(
            f"prime: loss of each token, {name} carry-over",
            "weight times cross-entropy of a keyed student of digits, by token",
            file,
            file.at("Diffusion._forward_pass_diffusion"),
            f"views.prime.mask(batch, carry_over={carry_over})",
            theirs,
            each,
            F32,
            Because(
                Code(root, PRIME, "text/utils/noise_schedule.py").line("LogLinearNoise.total_noise"),
                "As of MDLM: at one share m of masked digits their weight is (1 − 0.001)/m, ours 1/m.",
                theirs,
                (1 - EPS) * each,
            ),
        )


def images(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    """Pixels: a file as CIFAR-10's, read by our program; t runs from masked to clean there."""
    tools, loop = Code(root, PRIME, "image/utils/utils.py"), Code(root, PRIME, "image/utils/train_loop.py")
    evaluation = Code(root, PRIME, "image/utils/eval_loop.py")
    rows, size = 4, 32
    pixels = np.random.default_rng(3).integers(0, 256, (rows, 3, size, size), dtype=np.uint8)
    folder = data.work / "cifar"
    folder.mkdir(exist_ok=True)
    labelled = np.concatenate([np.arange(rows, dtype=np.uint8)[:, None], pixels.reshape(rows, -1)], 1)
    (folder / "data_batch_1.bin").write_bytes(labelled.tobytes())
    job = {
        "input": {
            "format": "images",
            "paths": [str(folder / "data_batch_1.bin")],
            "images": {"layout": "cifar10_binary", "size": size},
        },
        "tokenizer": None,
        "pack": {"length": 3 * size * size, "separator": "none", "boundary": "none"},
        "subtokens": {"length": 2},
    }
    batch = data.batch("images", job, rows)
    samples = torch.from_numpy(pixels).long()
    y0 = tools.cut("encoder")(samples, 16, 2, 3 * size * size)
    # [B, 3·ℓ, H, W], channel by channel and digit by digit: as rows of pixels.
    theirs = y0.permute(0, 2, 3, 1).reshape(rows, -1, 2)
    yield Comparison(
        "prime: digits of images",
        "two digits of every pixel of four images of 32 × 32 × 3",
        tools,
        tools.at("encoder"),
        "input: {format: images}; subtokens: {length: 2}",
        theirs,
        batch["subtokens"],
    )
    example = views.prime.mask(batch, schedule=views.Schedule(POWER), carry_over=False)
    reverse = 1 - example.t.double()
    sigma = loop.value(
        "train_one_epoch",
        "sigma_t",
        t=reverse,
        args=SimpleNamespace(schedule_n=POWER, target_length=2),
        B=rows,
        c=3,
        H=size,
        W=size,
    )
    own = drawn("prime_mask", batch, 3 * size * size * 2).reshape(rows, size, size, 6).permute(0, 3, 1, 2)
    y_t = torch.where(own < sigma, 16, y0).permute(0, 2, 3, 1).reshape(rows, -1, 2)
    yield Comparison(
        "prime: masked digits of images",
        "y_t with α_t = (1 − t)^3 (their t is 1 − ours), from the same uniforms",
        loop,
        loop.line("train_one_epoch", sets="sigma_t"),
        "views.prime.mask(batch, schedule=Schedule(3)).input_ids",
        y_t,
        example.input_ids,
    )
    plain = views.prime.mask(batch, t=example.t, carry_over=False)
    yield Comparison(
        "prime: masked digits of images, by default",
        "y_t at the same t where nobody names a schedule (a data set of images without partitions)",
        loop,
        loop.line("train_one_epoch", sets="sigma_t"),
        "views.prime.mask(batch).input_ids",
        y_t,
        plain.input_ids,
        because=Because(
            loop.line("train_one_epoch", sets="sigma_t"),
            "α_t = (1 − t)^3 there. Such a data set of ours says no schedule, and the view takes the linear one without a word: images need `schedule=Schedule(3)`, as docs/papers.md "
            "says. With it both are the same.",
            y_t,
            example.input_ids,
            first=True,
        ),
    )
    given = SimpleNamespace(schedule_n=POWER)
    d_alpha = evaluation.value("calculate_nll_elbo", "d_alpha_t", t=reverse, args=given)
    alpha = evaluation.value("calculate_nll_elbo", "alpha_t", t=reverse, args=given)
    weights = evaluation.value("calculate_nll_elbo", "fac", alpha_t=alpha, d_alpha_t=d_alpha)
    yield Comparison(
        "prime: weights of images, evaluation",
        "loss weight at t with α_t = (1 − t)^3",
        evaluation,
        evaluation.line("calculate_nll_elbo", sets="fac"),
        "views.prime.mask(batch, schedule=Schedule(3), carry_over=False).weights",
        weights,
        example.weights[:, 0],
        F32,
    )
    logits = torch.randn(rows, 3 * size * size, 256, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ids = batch["input_ids"].long()
    each = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), ids.reshape(-1), reduction="none").reshape(
        rows, -1
    )
    theirs = loop.value("train_one_epoch", "loss", logits=logits, samples=ids)
    yield Comparison(
        "prime: loss of images, training",
        "the loss of a batch of keyed logits",
        loop,
        loop.line("train_one_epoch", calls="cross_entropy"),
        "Σ weights · CE / valid.sum()",
        theirs,
        (example.weights * each).sum() / example.valid.sum(),
        F64,
        Because(
            loop.line("train_one_epoch", calls="cross_entropy"),
            "They train on images without weights: the mean cross-entropy of all pixels, at every t; Eq. 5's weights come in when they evaluate. Ours are Eq. 5's in both; "
            "`example.valid` in their place gives their loss.",
            theirs,
            (example.valid * each).sum() / example.valid.sum(),
            first=True,
        ),
    )


def shuffled(root: pathlib.Path, ids: Any) -> Comparison:
    """v2 gives every id another number before its digits are taken."""
    file = Code(root, PRIME2, "lit_gpt/subtokenizer/layers.py")
    numbers = prime.shipped_permutation(V)
    base = prime.base_of(V, DIGITS)
    whole = torch.arange(base**DIGITS)
    whole[:V] = torch.from_numpy(numbers)
    with fed():
        layer = file.cut("BasebShufflingLayer", super=super)(base, DIGITS, perm=whole, vocab_size=V)
        theirs = layer.forward(ids)
    return Comparison(
        "prime: digits of shuffled ids (v2)",
        "digits of the number that a permutation gives each id, both from our shipped permutation",
        file,
        file.at("BasebShufflingLayer.forward"),
        "views.prime.encode(permutation=…); subtokens: {permutation: shipped}",
        theirs.reshape(*ids.shape, DIGITS),
        prime.encode(ids, base, DIGITS, numbers),
    )
