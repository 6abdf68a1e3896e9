"""BD3-LM: the attention over [x_t, x_0], times of blocks, masks, and the loss."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from stillhouse import views

from .compare import F32, Because, Comparison
from .data import Data, Student, drawn, strata
from .mdlm import Quiet
from .theirs import BD3LM, Code, Repository, fed

V = 50_257
BLOCK = 4
CLIPPED = (0.3, 0.8)


def trainer(root: pathlib.Path, repository: Repository, length: int, block: int, **changes: Any) -> Any:
    """Their trainer; `forward` and `_sample_t` are for the caller to give."""
    file, noises = Code(root, repository, "diffusion.py"), Code(root, repository, "noise_schedule.py")
    noise = noises.cut("LogLinearNoise", Noise=noises.cut("Noise", abc=abc))()
    methods: dict[str, Any] = {
        "_subs_parameterization": {},
        "q_xt": {},
        "_resample_q_xt": {},
        "_sigma_from_p": {},
        "_sample_t": {},
        "_maybe_sub_sample": {},
        "_forward_pass_diffusion": {"utils": Quiet},
        "_loss": {"Loss": dict},
    }
    given: dict[str, Any] = {
        "mask_index": V,
        "neg_infinity": -1e6,
        "parameterization": "subs",
        "noise": noise,
        "mdlm_loss_scale": False,
        "ignore_bos": False,
        "cross_attn": True,
        "block_size": block,
        "antithetic_sampling": True,
        "training": True,
        "config": SimpleNamespace(
            model=SimpleNamespace(length=length),
            training=SimpleNamespace(resample=False),
            algo=SimpleNamespace(name="bd3lm", backbone="dit"),
        ),
    }
    return file.fake("Diffusion", methods, **{**given, **changes})


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    file, net = Code(root, BD3LM, "diffusion.py"), Code(root, BD3LM, "models/dit.py")
    batch = data.plain
    ids = batch["input_ids"].long()
    rows, length = ids.shape

    # Attention.
    mask_of = net.cut("block_diff_mask")
    queries, keys = torch.arange(2 * length)[:, None], torch.arange(2 * length)[None, :]
    for block in (BLOCK, 16):
        theirs = mask_of(None, None, queries, keys, block_size=block, n=length)
        example = views.bd3lm.mask(batch, block_size=block, mask_id=V)
        yield Comparison(
            f"bd3lm: attention, blocks of {block}",
            "who sees whom over [x_t, x_0]",
            net,
            net.at("block_diff_mask"),
            "views.bd3lm.block_attention",
            theirs,
            views.bd3lm.block_attention(length, block),
        )
        yield Comparison(
            f"bd3lm: mask_mod, blocks of {block}",
            "the same as FlexAttention asks for it",
            net,
            net.at("block_diff_mask"),
            "views.bd3lm.mask(batch).mask_mod()",
            theirs,
            example.mask_mod()(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1), queries, keys),
        )

    # Times.
    example = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V)
    blocks = length // BLOCK
    them = trainer(root, BD3LM, length, BLOCK)
    place = strata("bd3lm_t", batch, blocks)
    uniforms = drawn("bd3lm_t_row", batch, blocks).reshape(-1)
    for name, (low, high) in (("times", (1e-3, 1.0)), ("times, clipped", CLIPPED)):
        with fed(uniforms[place.argsort()].reshape(rows, blocks)):
            theirs = them._sample_t(ids.shape, "cpu", low, high)[:, ::BLOCK]
        ours = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, t_range=(low, high)).t
        yield Comparison(
            f"bd3lm: {name}",
            f"t of each block, antithetic over the batch, in [{low}, {high}]",
            file,
            file.at("Diffusion._sample_t"),
            "views.bd3lm.mask(batch, t_range=…).t",
            theirs,
            ours,
            F32,
            Because(
                file.line("Diffusion._sample_t", sets="offset_b"),
                "Blocks have neighbouring strata there; here the strata are turned and the blocks of a row spread over the interval. As a set they are the same.",
                theirs.flatten(),
                ours.flatten()[place.argsort()],
            ),
        )

    # Masks.
    own = drawn("bd3lm_mask", batch, length)
    t = example.t.double().repeat_interleave(BLOCK, 1)
    with fed(own):
        theirs = them.q_xt(ids, t)
    yield Comparison(
        "bd3lm: masked tokens",
        "x_t at a time for each block, from the same uniforms",
        file,
        file.at("Diffusion.q_xt"),
        "views.bd3lm.mask(batch).input_ids",
        theirs,
        example.input_ids,
    )
    edge = torch.full((rows, length), 0.5, dtype=torch.float64)
    with fed(edge):
        theirs = them.q_xt(ids, edge)
    with fed(edge):
        below = them.q_xt(ids, edge.nextafter(torch.tensor(0.0, dtype=torch.float64)))
    ours = torch.where(edge < torch.from_numpy(views.LINEAR.share(edge.numpy())), V, ids)
    yield Comparison(
        "bd3lm: masked tokens, a uniform that is t itself",
        "x_t where every uniform is exactly the share",
        file,
        file.at("Diffusion.q_xt"),
        "views.bd3lm.mask: u < t",
        theirs,
        ours,
        because=Because(
            file.line("Diffusion.q_xt", sets="move_indices"),
            "They mask where u ≤ t, we where u < t: of uniforms with 53 bits one in 2^53 differs. For the next smaller t both keep the token.",
            below,
            ours,
        ),
    )
    yield from losses(root, file, batch, ids, example)
    yield resampled(root, file, batch, ids)


def per_token(example: Any, logits: Any) -> Any:
    """Weight times cross-entropy at the targets, zero elsewhere: [B, L]."""
    each = F.cross_entropy(logits[..., :V][example.targets], example.target_ids(), reduction="none")
    made = torch.zeros(example.targets.shape, dtype=each.dtype)
    made[example.targets] = example.target_weights().to(each.dtype) * each
    return made


def losses(root: pathlib.Path, file: Code, batch: Any, ids: Any, example: Any) -> Iterator[Comparison]:
    """What they train on, with a student that sees both copies."""
    rows, length = ids.shape
    student = Student(V + 1, 2 * length)
    seen: list[Any] = []

    def forward(them: Any) -> Any:
        def of(x: Any, sigma: Any) -> Any:
            seen.append(x)
            return them._subs_parameterization(student(x)[:, :length], x[:, :length])

        return of

    own, place = drawn("bd3lm_mask", batch, length), drawn("bd3lm_t_row", batch, length // BLOCK)
    del place
    t = example.t.double().repeat_interleave(BLOCK, 1)
    for bos in (False, True):
        them = trainer(root, BD3LM, length, BLOCK, ignore_bos=bos)
        them.forward, them._sample_t = forward(them), lambda *_: t
        with fed(own):
            theirs = them._forward_pass_diffusion(ids, sampling_eps_min=1e-3, sampling_eps_max=1.0)
        first = torch.arange(length) == 0
        ours = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, never=first if bos else None)
        if not bos:
            yield Comparison(
                "bd3lm: input",
                "[x_t, x_0]: noised and clean tokens",
                file,
                file.line("Diffusion._forward_pass_diffusion", sets="x_input", nth=1),
                "views.bd3lm.mask(batch).noised_and_clean()",
                seen[-1],
                ours.noised_and_clean(),
            )
        logits = student(ours.noised_and_clean())[:, :length]
        yield Comparison(
            f"bd3lm: loss of each token{', BOS never masked' if bos else ''}",
            "weight times cross-entropy of a keyed student over [x_t, x_0]",
            file,
            file.at("Diffusion._forward_pass_diffusion"),
            f"views.bd3lm.mask(batch{', never=first' if bos else ''})",
            theirs,
            per_token(ours, logits),
            F32,
        )
    # Their default for blocks keeps the BOS; ours masks it unless it is told not to.
    plain = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, t=1.0)
    them = trainer(root, BD3LM, length, BLOCK, ignore_bos=True)
    them.forward, them._sample_t = forward(them), lambda *_: torch.ones(rows, length, dtype=torch.float64)
    with fed(own):
        them._forward_pass_diffusion(ids, sampling_eps_min=1e-3, sampling_eps_max=1.0)
    told = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, t=1.0, never=torch.arange(length) == 0)
    yield Comparison(
        "bd3lm: the first token",
        "x_t at t = 1",
        file,
        file.at("Diffusion._forward_pass_diffusion"),
        "views.bd3lm.mask(batch).input_ids",
        seen[-1][:, :length],
        plain.input_ids,
        because=Because(
            file.line("Diffusion._forward_pass_diffusion", sets="xt", nth=1),
            "With `algo.ignore_bos` (their default for blocks) the first token of a row is never masked. Here `never` says so: with it both are the same.",
            seen[-1][:, :length],
            told.input_ids,
        ),
    )
    # Half and more masked for certain: their weight is 1.
    narrow = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, t_range=(0.6, 1.0))
    late = narrow.t.double().repeat_interleave(BLOCK, 1)
    them = trainer(root, BD3LM, length, BLOCK)
    them.forward, them._sample_t = forward(them), lambda *_: late
    with fed(own):
        theirs = them._forward_pass_diffusion(ids, sampling_eps_min=0.6, sampling_eps_max=1.0)
    ours = per_token(narrow, student(narrow.noised_and_clean())[:, :length])
    yield Comparison(
        "bd3lm: loss, clipped above a half",
        "weight times cross-entropy with t in [0.6, 1.0]",
        file,
        file.at("Diffusion._forward_pass_diffusion"),
        "views.bd3lm.mask(batch, t_range=(0.6, 1.0))",
        theirs,
        ours,
        F32,
        Because(
            file.line("Diffusion._forward_pass_diffusion", sets="loss_scale", nth=2),
            "Above a half their weight is 1 at every t (meant for blocks of one token, all masked); ours stays 1/t, whose sum is the number of tokens for any range. "
            "Times t ours is theirs.",
            theirs,
            ours * late,
        ),
    )


def resampled(root: pathlib.Path, file: Code, batch: Any, ids: Any) -> Comparison:
    """With a clipped range their scripts draw masks again until the share of a block lies in it."""
    rows, length = ids.shape
    low, high = CLIPPED
    example = views.bd3lm.mask(batch, block_size=BLOCK, mask_id=V, t_range=CLIPPED)
    them = trainer(root, BD3LM, length, BLOCK)
    them.config.training.resample = True
    own, t = drawn("bd3lm_mask", batch, length), example.t.double().repeat_interleave(BLOCK, 1)
    again = [drawn("official_again", batch, length, seed=n) for n in range(64)]
    with fed(*([own, *again][: _rounds(own, again, t, low, high)])):
        theirs = them.q_xt(ids, t, sampling_eps_min=low, sampling_eps_max=high)
    share = (example.input_ids == V).double().reshape(rows, -1, BLOCK).mean(2)
    inside = ((share >= low) & (share <= high)).repeat_interleave(BLOCK, 1)
    return Comparison(
        "bd3lm: masks drawn again",
        f"x_t with t in {list(CLIPPED)} and `training.resample`, as their scripts train",
        file,
        file.at("Diffusion._resample_q_xt"),
        "views.bd3lm.mask(batch, t_range=(0.3, 0.8)).input_ids",
        theirs,
        example.input_ids,
        because=Because(
            file.line("Diffusion.q_xt", calls="_resample_q_xt"),
            "A block whose masked share falls outside of the range is drawn anew there, until it lies inside; here t alone is clipped, so that blocks of 4 with no masked token or with 4 "
            "of them occur. In the blocks that need no second draw both are the same.",
            theirs[inside],
            example.input_ids[inside],
            first=True,
        ),
    )


def _rounds(own: Any, again: list[Any], t: Any, low: float, high: float) -> int:
    """How often they draw until every block is inside: once, and once more for each time that one is not."""
    masked, count = own <= t, 1
    for uniforms in again:
        share = masked.double().reshape(len(t), -1, BLOCK).mean(2)
        out = (share < low) | (share > high)
        if not out.any():
            return count
        masked = torch.where(out.repeat_interleave(BLOCK, 1), uniforms <= t, masked)
        count += 1
    raise AssertionError("no end of drawing")
