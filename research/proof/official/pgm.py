"""PGM: groups, weights, attention and losses of text; the complementary baseline; and the loss of images."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

import stillhouse
from stillhouse import views

from .compare import F32, Because, Comparison
from .data import Data, Student, drawn, strata
from .mdlm import Quiet
from .theirs import PGM_IMAGE, PGM_TEXT, Code, fed

V, EPS = 50_257, 1e-3


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    algo, base = Code(root, PGM_TEXT, "algo.py"), Code(root, PGM_TEXT, "trainer_base.py")
    net = Code(root, PGM_TEXT, "models/encoder_decoder.py")
    batch = data.plain
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    noise = base.cut("LogLinear", super=super)()
    drawn_alike = views.pgm.partition(batch, repair="never")
    own, t = drawn("partition_group", batch, length), drawn_alike.t.double()

    # Times.
    sampler = base.fake("Diffusion", {"_sample_t": {}}, device="cpu", antithetic_sampling=True, sampling_eps=EPS)
    place = strata("partition_t", batch).argsort()
    with fed(drawn("partition_t_row", batch, 1)[:, 0][place]):
        theirs = sampler._sample_t(rows, None)
    yield Comparison(
        "pgm: times",
        "t of each row of a batch, antithetic",
        base,
        base.at("Diffusion._sample_t"),
        "views.pgm.partition(batch).t",
        theirs,
        drawn_alike.t,
        F32,
        Because(
            base.line("Diffusion._sample_t", sets="t"),
            "t lies in [0.001, 1) there, so that 1 − t, the time of group 0, may be as small as 10^-8 and its weight as large as 10^8; here in [0.001, 0.999], so that neither weight exceeds 1,000. "
            "And the strata are turned. Scaled and sorted both are the same.",
            (theirs - EPS) / (1 - EPS),
            (drawn_alike.t[place].double() - EPS) / (1 - 2 * EPS),
        ),
    )

    # Groups.
    them = algo.fake("PartitionMDLM", {"_q_xt_partition": {}})
    with fed(own):
        theirs = them._q_xt_partition(ids, 1 - t[:, None])
    yield Comparison(
        "pgm: groups",
        "the group of each token, from the same uniforms and share",
        algo,
        algo.at("PartitionMDLM._q_xt_partition"),
        "views.pgm.partition(batch, repair='never').groups",
        theirs,
        drawn_alike.groups,
    )
    short = of_two(batch)
    few, repaired = views.pgm.partition(short, repair="never"), views.pgm.partition(short)
    with fed(drawn("partition_group", batch, 2)):
        theirs = them._q_xt_partition(ids[:, :2], 1 - few.t.double()[:, None])
    mixed = theirs.sum(1) == 1
    yield Comparison(
        "pgm: groups of very short rows",
        "the group of each of two tokens",
        algo,
        algo.at("PartitionMDLM._q_xt_partition"),
        "views.pgm.partition(batch).groups",
        theirs,
        repaired.groups,
        because=Because(
            algo.line("PartitionMDLM._q_xt_partition", sets="group_idxs"),
            f"Nothing there keeps a group from being empty: {int((~mixed).sum())} of these {rows} rows have one, whose tokens are predicted from nothing. Here one token changes its group "
            "(repair='bounded'; 'never' leaves them). Rows with two groups are the same.",
            theirs[mixed],
            repaired.groups[mixed],
        ),
    )

    # Attention.
    for kind, function in (("group", "make_group_self_attn_mask"), ("swap", "make_group_cross_attn_mask")):
        yield Comparison(
            f"pgm: attention, {kind}",
            "who sees whom, tokens in their places",
            net,
            net.at(function),
            f"views.pgm.partition(batch).attention({kind!r}, order='position')",
            net.cut(function)(drawn_alike.groups.long()),
            drawn_alike.attention(kind, order="position"),
        )
    yield from losses(algo, base, noise, batch, drawn_alike)
    yield from complementary(algo, base, noise, batch)
    yield from images(root, batch)


def of_two(batch: Any) -> Any:
    """The first two tokens of every row."""
    columns = {"input_ids": batch["input_ids"][:, :2], "sequence_id": batch["sequence_id"]}
    return stillhouse.Batch(columns, info=batch.info)


def ours_of(example: Any, logits: Any) -> Any:
    """Weight times cross-entropy of all tokens, [B, L]."""
    ids = example.batch["input_ids"].long()
    each = F.cross_entropy(logits[..., :V].flatten(0, 1), ids.flatten(), reduction="none").reshape(ids.shape)
    return example.weights.double() * each


def losses(algo: Code, base: Code, noise: Any, batch: Any, example: Any) -> Iterator[Comparison]:
    """Theirs is half of what both groups sum to."""
    ids = batch["input_ids"].long()
    length = ids.shape[1]
    student = Student(V + 1, length)
    logits = student(ids)
    # The share that their schedule has at t' is (1 − 0.001)·t'.
    t = example.t.double() / (1 - EPS)
    them = algo.fake(
        "PartitionMDLM",
        {"nll": {"utils": Quiet}, "_q_xt_partition": {}, "_process_model_output": {}},
        T=0,
        noise=noise,
        mask_index=V,
        neg_infinity=-1e6,
        loss_type="elbo",
        post_process_mode="efficient+fp64",
    )
    them._sigma_from_alphat = lambda alpha: -torch.log(alpha)
    them._sample_t = lambda n, step: t
    per_token = algo.fake("MDLM", {"nll_per_token": {}}).nll_per_token
    them.nll_per_token = per_token
    them.forward = lambda x, sigma, groups: them._process_model_output(logits.clone(), x, sigma)
    own = drawn("partition_group", batch, length)
    with fed(own):
        theirs = them.nll(ids, None, train_mode=True)
    ours = ours_of(example, logits)
    other = 1 - t[:, None]
    # Of group 0 their share is that of 1 − t', which is not one less the share of t'.
    of_zero = (1 - example.t.double()[:, None]) / other
    accounted = torch.where(example.groups, (1 - EPS) * ours, of_zero * ours) / 2
    yield Comparison(
        "pgm: loss of each token, training",
        "weight times cross-entropy of a keyed student, by token",
        algo,
        algo.at("PartitionMDLM.nll"),
        "views.pgm.partition(batch, repair='never').weights / 2",
        theirs,
        ours / 2,
        F32,
        Because(
            base.line("LogLinear.forward", sets="t"),
            "At one share m of group 1 their t is m/(1 − 0.001), and the weights are 1/t and 1/(1 − t); ours are 1/m and 1/(1 − m). With their t in the weights ours is theirs.",
            theirs,
            accounted,
        ),
    )
    with fed(own):
        theirs = them.nll(ids, None, train_mode=False)
    yield Comparison(
        "pgm: loss of each token, evaluation",
        "weight times cross-entropy of group 1 alone (times 1 − 0.001)",
        algo,
        algo.at("PartitionMDLM.nll"),
        "views.pgm.partition(batch, repair='never').weights in group 1",
        theirs,
        torch.where(example.groups, (1 - EPS) * ours, 0.0),
        F32,
    )
    # The weights alone: a student whose every ln p is −1, and their schedule without its 0.001.
    them.noise, them._sample_t = base.cut("LogLinear", super=super)(), lambda n, step: example.t.double()
    them.noise.eps = 0.0
    them.forward = lambda x, sigma, groups: -torch.ones_like(logits)
    with fed(own):
        theirs = 2 * them.nll(ids, None, train_mode=True)
    yield Comparison(
        "pgm: weights",
        "loss weight of each token of both groups at one share",
        algo,
        algo.line("PartitionMDLM.nll", sets="nll_alpha_t"),
        "views.pgm.partition(batch).weights",
        theirs,
        views.pgm.partition(batch).weights,
        F32,
        Because(
            algo.line("PartitionMDLM.nll", sets="nll_alpha_t"),
            "Ours by default are over the probability that a token has to be in its group once no group may be empty: q(t) = t + ((1 − t)^n − t^n)/n of n tokens. Without repair they are theirs.",
            theirs,
            example.weights,
        ),
    )


def complementary(algo: Code, base: Code, noise: Any, batch: Any) -> Iterator[Comparison]:
    """MDLM on both halves: their baseline."""
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    first, second = views.mdlm.complementary(batch, mask_id=V, repair="never")
    student = Student(V + 1, length)
    t = first.t.double() / (1 - EPS)
    seen: list[Any] = []
    them = algo.fake("ComplementMDLM", {"nll": {"utils": Quiet}}, T=0, noise=noise, mask_index=V, loss_type="elbo")
    masking = base.fake("AbsorbingState", {"q_xt": {}}, mask_index=V, ignore_bos=False)
    output = algo.fake("MDLM", {"_process_model_output_orig": {}, "nll_per_token": {}}, mask_index=V, neg_infinity=-1e6)
    them.q_xt, them.nll_per_token = masking.q_xt, output.nll_per_token
    them._sigma_from_alphat, them._sample_t = lambda alpha: -torch.log(alpha), lambda n, step: t

    def forward(x: Any, sigma: Any) -> Any:
        seen.append(x)
        return output._process_model_output_orig(student(x), x, sigma)

    them.forward = forward
    with fed(drawn("partition_group", batch, length)):
        theirs = them.nll(ids, None, train_mode=True)
    yield Comparison(
        "pgm: complementary masks",
        "both halves of every row",
        algo,
        algo.line("ComplementMDLM.nll", sets="xt_complement"),
        "views.mdlm.complementary(batch, repair='never')",
        seen[-1],
        torch.cat([first.input_ids, second.input_ids]),
    )
    ours = torch.zeros(rows, length, dtype=torch.float64)
    other = (1 - first.t.double()[:, None]) / (1 - t[:, None])
    for half, scale in ((first, 1 - EPS), (second, other)):
        each = F.cross_entropy(student(half.input_ids)[..., :V].flatten(0, 1), ids.flatten(), reduction="none").reshape(
            ids.shape
        )
        ours = ours + half.weights.double() * each * scale
    yield Comparison(
        "pgm: complementary loss of each token",
        "weight times cross-entropy of a keyed student (with their t in the weights, as in training)",
        algo,
        algo.at("ComplementMDLM.nll"),
        "views.mdlm.complementary(batch, repair='never').weights / 2",
        theirs,
        ours / 2,
        F32,
    )


def images(root: pathlib.Path, batch: Any) -> Iterator[Comparison]:
    """Images of codes: how many are in group 1, and a loss without weights."""
    trainer, base = (
        Code(root, PGM_IMAGE, "trainer/cls_trainer.py"),
        Code(root, PGM_IMAGE, "trainer/abstract_trainer.py"),
    )
    tools = Code(root, PGM_IMAGE, "utils/masking_scheduler.py")
    example = views.pgm.partition(batch, repair="never")
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    own, t = drawn("partition_group", batch, length), example.t.double()
    get_mask = tools.cut("get_mask_code", math=math)
    codes = ids.reshape(rows, 4, -1)
    masks = []
    for r in (t, torch.cos(t * math.pi / 2)):
        with fed(own.reshape(codes.shape)):
            masks.append(get_mask(codes, r=r, mode="arccos", value=V)[1].reshape(rows, length))
    yield Comparison(
        "pgm: groups of images",
        "the group of each code with r = t",
        tools,
        tools.at("get_mask_code"),
        "views.pgm.partition(batch, repair='never').groups",
        masks[0],
        example.groups,
        because=Because(
            tools.line("get_mask_code", sets="val_to_mask", nth=4),
            "Images have the share arccos(r)·2/π with r uniform there, more often large than small. The view draws the share itself uniformly unless "
            "`schedule=views.ARCCOS` is asked for; our job of Table 8 stores `schedule: arccos`. At one share the groups are the same.",
            masks[1],
            example.groups,
            first=True,
        ),
    )
    logits = Student(V, length)(ids)
    criterion = base.cut("Trainer.get_loss")("cross_entropy", ignore_index=-100)
    given = SimpleNamespace(criterion=criterion)
    theirs = trainer.value("MaskGIT.train_one_epoch", "loss", self=given, pred=logits, target_code=ids)
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").reshape(ids.shape)
    yield Comparison(
        "pgm: loss of images",
        "the loss of a batch of keyed logits",
        trainer,
        trainer.line("MaskGIT.train_one_epoch", calls="criterion"),
        "Σ weights · CE / valid.sum()",
        theirs,
        ours_of(example, logits).sum() / example.valid.sum(),
        F32,
        Because(
            trainer.line("MaskGIT.train_one_epoch", calls="criterion"),
            "They train on images without weights, the mean cross-entropy of all codes. Ours are the bound's; `example.valid` in their place gives their loss.",
            theirs,
            (each * example.valid).sum() / example.valid.sum(),
            first=True,
        ),
    )
