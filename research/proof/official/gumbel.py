"""Gumbel Distillation: posterior noise of a teacher, where it goes into the student, the students' losses, and the ablations' noise."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from scipy import special

import stillhouse
from stillhouse import views

from . import bd3lm
from .compare import F32, Because, Comparison
from .data import Data, Student, drawn
from .theirs import GUMBEL, Code, fed

V = 50_257
TEACHER_APART = 1e-5
"""A tenth of what our teachers' logits may differ from transformers' (docs/teachers.md); ξ's slope in ln p lies in 0 to 1."""
TOLERANCE = 1e-3


def posterior(code: Code, batch: Any, logits: torch.Tensor) -> tuple[Any, Any]:
    """ξ of their algorithm at all positions but the first, from the uniforms that ours stand for: [B, L − 1, V]; and their ln p."""
    sample = code.cut("sample_gumbel")
    make = code.cut("get_posterior_gumbel", sample_gumbel=sample)
    # As their trainer does: no token follows the last logits.
    log_p = torch.log(logits.double().softmax(-1))[:, :-1]
    tokens = batch["input_ids"].long()[:, 1:]
    e0, e = exponentials(batch)
    with fed(torch.exp(-e0).reshape(-1, 1), torch.exp(-e).reshape(-1, V)):
        xi = make(log_p.reshape(-1, V), tokens.reshape(-1))
    return xi.reshape(log_p.shape), log_p


def exponentials(batch: Any) -> tuple[Any, Any]:
    """e_0 [B, L − 1] and e [B, L − 1, V], that the noise of these positions is made of: of the noise's own generator, by noise.prior and by ξ_x."""
    at = torch.arange(1, batch["input_ids"].shape[1]).expand(batch.rows, -1)
    info = batch.info
    e = (
        stillhouse.noise.prior(info.noise.seed, batch["sequence_id"], at, info.vocab_size, out="gumbel")
        .double()
        .neg()
        .exp()
    )
    token = batch["input_ids"].long()[:, 1:, None]
    own = stillhouse.noise.replay(batch, at, out="gumbel").double().gather(2, token)[..., 0]
    return torch.exp(-own - batch["logprob"][:, 1:].double()), e


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    tools, trainer = Code(root, GUMBEL, "utils.py"), Code(root, GUMBEL, "diffusion.py")
    rows = 4
    dense, stored = data.dense[:rows], data.replayed[:rows]
    assert torch.equal(dense["sequence_id"], stored["sequence_id"])
    at = torch.arange(1, dense["input_ids"].shape[1]).expand(rows, -1)
    xi, log_p = posterior(tools, stored, data.teacher_logits[:rows])
    where = tools.at("get_posterior_gumbel")

    exact = stillhouse.noise.replay(dense, at, out="gumbel")
    yield Comparison(
        "gumbel: posterior noise",
        "ξ of every word at every position but the first, codec dense; their teacher is transformers' GPT-2, ours our own",
        tools,
        where,
        "extract: {noise: {codec: dense}}; noise.replay(out='gumbel')",
        xi,
        exact,
        absolute=TEACHER_APART,
    )
    yield Comparison(
        "gumbel: blueprint",
        "softmax(ξ), of the token itself",
        tools,
        where,
        "noise.replay(out='softmax')",
        xi.softmax(-1).gather(2, dense["input_ids"].long()[:, 1:, None])[..., 0],
        stillhouse.noise.replay(dense, at, out="softmax").gather(2, dense["input_ids"].long()[:, 1:, None])[..., 0],
        absolute=TEACHER_APART,
    )
    far = (xi.softmax(-1) - stillhouse.noise.replay(stored, at, out="softmax")).abs().sum(-1) / 2
    yield Comparison(
        "gumbel: blueprint as it is stored",
        "total variation between their softmax(ξ) and ours of codec replay, tolerance 1e-3 (and what teachers differ)",
        tools,
        where,
        "extract: {noise: {codec: replay, tolerance: 1e-3}}; noise.replay(out='softmax')",
        torch.zeros_like(far),
        far,
        absolute=TOLERANCE + TEACHER_APART,
    )
    yield Comparison(
        "gumbel: the token wins",
        "argmax(ln p + ξ) at every position, of their noise and of ours as stored",
        tools,
        where,
        "noise.replay(out='gumbel')",
        (log_p + xi).argmax(-1),
        (log_p + stillhouse.noise.replay(stored, at, out="gumbel")).argmax(-1),
    )
    yield from priors(tools, trainer, stored, at)
    yield from ablations(trainer, xi, dense, at)
    yield from students(root, trainer, stored, xi)


def priors(tools: Code, trainer: Code, batch: Any, at: Any) -> Iterator[Comparison]:
    """The noise of inference."""
    sample, where = tools.cut("sample_gumbel"), tools.at("sample_gumbel")
    ids = batch["sequence_id"]
    e = stillhouse.noise.prior(99, ids, at, V, out="gumbel").double().neg().exp()
    with fed(torch.exp(-e)):
        theirs = sample(tuple(e.shape), temperature=0.85)
    yield Comparison(
        "gumbel: prior noise",
        "τ·ξ of inference, τ = 0.85",
        tools,
        where,
        "noise.prior(…, temperature=0.85, out='gumbel')",
        theirs,
        stillhouse.noise.prior(99, ids, at, V, out="gumbel", temperature=0.85),
        absolute=5e-6,
    )
    # The largest and the smallest number that each can draw.
    steps = torch.tensor([0.0, 1 - 2.0**-24], dtype=torch.float32)
    with fed(steps):
        theirs = sample((2,))
    words = torch.tensor([2.0**32 - 1, 0.0], dtype=torch.float64)
    largest_and_smallest = -torch.log1p(-(words + 0.5) * 2.0**-32)
    with fed(torch.exp(-largest_and_smallest)):
        again = sample((2,))
    ours = -torch.log(largest_and_smallest)
    yield Comparison(
        "gumbel: tails of the noise",
        "smallest and largest ξ that can be drawn",
        tools,
        where,
        "docs/FORMAT.md: e = −log1p(−(w + ½)/2^32)",
        theirs,
        ours,
        F32,
        Because(
            tools.line("sample_gumbel", sets="U"),
            f"Uniforms of 24 bits and an added 1e-20: ξ ends at {float(theirs[1]):.1f} there (a row of 1,024 tokens has 5·10^7 draws), and a uniform that is 0 gives −{-float(theirs[0]):.2f}; ours has 32 bits and ends at {float(ours[1]):.1f}. "
            "From our uniforms theirs gives our numbers.",
            again,
            ours,
        ),
    )


def ablations(trainer: Code, xi: Any, dense: Any, at: Any) -> Iterator[Comparison]:
    """Gaussian and uniform noise in place of Gumbel noise (their Table 5)."""
    name = "Diffusion._forward_pass_diffusion"
    # Not asked of the whole function: the branches are two lines of it.
    generator = torch.Generator().manual_seed(1)
    ours = stillhouse.noise.replay(dense, at, out="gaussian").double()
    fresh = torch.randn(xi.shape, generator=generator, dtype=torch.float64)
    cdf = torch.exp(-torch.exp(-xi))
    near = (cdf > 1e-9) & (cdf < 1 - 1e-9)  # where f64 has digits of both tails
    yield Comparison(
        "gumbel: Gaussian noise",
        "noise of the Gaussian ablation",
        trainer,
        trainer.line(name, calls="randn_like"),
        "noise.replay(out='gaussian')",
        fresh,
        ours,
        absolute=2 * TEACHER_APART,
        because=Because(
            trainer.line(name, calls="randn_like"),
            'Their code throws the noise of the teacher away and draws Gaussian noise that knows nothing of the token, against the paper\'s §5.3 ("which we transform Gumbel into"). Ours is the '
            "paper's: the same ξ through its distribution function, equal to their ξ put through it.",
            torch.from_numpy(special.ndtri(cdf[near].numpy())),
            ours[near],
            first=True,
        ),
    )
    yield Comparison(
        "gumbel: uniform noise",
        "exp(−exp(−ξ)) of their posterior noise",
        trainer,
        trainer.line(name, sets="gumbel_noise"),
        "noise.replay(out='uniform')",
        cdf,
        stillhouse.noise.replay(dense, at, out="uniform"),
        absolute=TEACHER_APART,
    )


class _Net:
    """Their network without its blocks: what goes into them."""

    def __init__(self, code: Code, width: int, vocab: int, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.words = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
        embedder = code.cut("GumbelNoiseEmbedder", super=super)(vocab - 1, width).double()
        with torch.no_grad():
            embedder.linear.weight.copy_(torch.randn(width, vocab - 1, generator=generator, dtype=torch.float64))
        self.noise = embedder.linear.weight.T.detach()
        self.of = SimpleNamespace(
            vocab_embed=lambda ids: self.words[ids],
            gumbel_noise_embed=embedder,
            vocab_size=vocab,
            gumbel_inject_mode="replace",
            rotary_emb=lambda x: None,
            blocks=[],
            output_layer=lambda x, c: x,
            causal=False,
            n=length,
        )
        self.forward = types.MethodType(code.cut("GumbelDIT.forward"), self.of)


def students(root: pathlib.Path, trainer: Code, batch: Any, xi: Any) -> Iterator[Comparison]:
    """Where the noise goes: in place of the embedding of every masked token, of the noised copy alone."""
    net = Code(root, GUMBEL, "models/dit_gumbel.py")
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    first = torch.arange(length) == 0
    made = _Net(net, 8, V + 1, length)
    blueprints = stillhouse.noise.replay(batch, torch.arange(1, length).expand(rows, -1), out="softmax").double()
    given = torch.log(blueprints)  # a softmax of which is ours, so that only places are compared
    for kind in ("mdlm", "bd3lm"):
        if kind == "mdlm":
            example = views.mdlm.mask(batch, mask_id=V, never=first)
            theirs_in = example.input_ids.long()
        else:
            blocks = views.bd3lm.mask(batch, block_size=4, mask_id=V, never=first)
            made.of.block_diff_mask = None  # that it is there says that both copies are seen
            example, theirs_in = blocks, blocks.noised_and_clean().long()
        with torch.no_grad():
            theirs = made.forward(theirs_in, given, None)
        context, noise, _ = example.triplet(out="softmax")
        ours = made.words[context.long()].clone()
        ours[example.targets] = noise.double() @ made.noise
        yield Comparison(
            f"gumbel: noise in the student, {kind}",
            "embeddings [B, L, 8] that go into the first block",
            net,
            net.at("GumbelDIT.forward"),
            f"views.{kind}.mask(batch, never=first).triplet(out='softmax')",
            theirs,
            ours,
            F32,
        )
    yield from losses(root, trainer, batch)
    del xi


def losses(root: pathlib.Path, file: Code, batch: Any) -> Iterator[Comparison]:
    """The loss of their students of MDLM and BD3-LM; the student here is keyed, and blind to noise."""
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    first = torch.arange(length) == 0
    own = {"mdlm": drawn("mdlm_mask", batch, length), "bd3lm": drawn("bd3lm_mask", batch, length)}
    for kind in ("mdlm", "bd3lm"):
        block = length if kind == "mdlm" else 4
        example: Any = (
            views.mdlm.mask(batch, mask_id=V, never=first)
            if kind == "mdlm"
            else views.bd3lm.mask(batch, block_size=4, mask_id=V, never=first)
        )
        student = Student(V + 1, 2 * length)
        t = example.t.double().reshape(rows, -1).repeat_interleave(block, 1)
        them = bd3lm.trainer(root, GUMBEL, length, block, ignore_bos=True, cross_attn=kind == "bd3lm")
        them._sample_t = lambda *_, t=t: t
        them.forward = lambda x, sigma, them=them, student=student: them._subs_parameterization(
            student(x)[:, :length], x[:, :length]
        )
        with fed(own[kind]):
            theirs = them._forward_pass_diffusion(ids, sampling_eps_min=1e-3, sampling_eps_max=1.0)["ce_loss"]
        sees = example.input_ids if kind == "mdlm" else example.noised_and_clean()
        yield Comparison(
            f"gumbel: loss of each token, {kind}",
            "weight times cross-entropy of a keyed student, by token",
            file,
            file.at("Diffusion._forward_pass_diffusion"),
            f"views.{kind}.mask(batch, never=first)",
            theirs,
            bd3lm.per_token(example, student(sees)[:, :length]),
            F32,
        )
