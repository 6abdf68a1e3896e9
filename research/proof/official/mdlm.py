"""MDLM: times, masks, weights and the loss; and how rows are packed."""

from __future__ import annotations

import abc
import itertools
import pathlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from stillhouse import views

from .compare import F32, Because, Comparison
from .data import TEACHER, Data, Student, drawn, strata
from .theirs import MDLM, Code, fed

EPS = 1e-3
V = 50_257


def schedule(code: Code) -> Any:
    """Their log-linear noise."""
    return code.cut("LogLinearNoise", Noise=code.cut("Noise", abc=abc))()


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    file, noises = Code(root, MDLM, "diffusion.py"), Code(root, MDLM, "noise_schedule.py")
    noise, batch = schedule(noises), data.plain
    ids = batch["input_ids"].long()
    rows, length = ids.shape
    example = views.mdlm.mask(batch, mask_id=V)
    t = example.t.double()

    # Times.
    uniforms = drawn("mdlm_t_row", batch, 1)[:, 0]
    place = strata("mdlm_t", batch)
    by_stratum = place.argsort()
    them = file.fake(
        "Diffusion", {"_sample_t": {}}, antithetic_sampling=True, sampling_eps=EPS, importance_sampling=False
    )
    with fed(uniforms[by_stratum]):
        theirs = them._sample_t(rows, "cpu")
    yield Comparison(
        "mdlm: times",
        "t of each row of a batch, antithetic",
        file,
        file.at("Diffusion._sample_t"),
        "views.mdlm.mask(batch).t",
        theirs,
        example.t,
        F32,
        Because(
            file.line("Diffusion._sample_t", sets="offset"),
            "Row i has stratum i there, so that the first rows have the small times; here the strata are turned and spread over the rows. As a set they are the same.",
            theirs,
            example.t[by_stratum],
        ),
    )

    # Weights.
    sigma, dsigma = noise.total_noise(t), noise.rate_noise(t)
    yield Comparison(
        "mdlm: weights",
        "loss weight of a masked token at t",
        noises,
        noises.at("LogLinearNoise.rate_noise"),
        "views.mdlm.mask(batch).weights",
        torch.where(example.targets, (dsigma / torch.expm1(sigma))[:, None], 0.0),
        example.weights,
        F32,
    )

    # Masks.
    own = drawn("mdlm_mask", batch, length)
    masking = file.fake("Diffusion", {"q_xt": {}}, mask_index=V)
    with fed(own):
        plain = masking.q_xt(ids, t[:, None])
    yield Comparison(
        "mdlm: masked tokens",
        "x_t with a given probability to be masked, from the same uniforms",
        file,
        file.at("Diffusion.q_xt"),
        "views.mdlm.mask(batch).input_ids",
        plain,
        example.input_ids,
    )
    chance = (1 - torch.exp(-sigma))[:, None]
    near = t[:, None] * (1 - EPS / 2)  # between both shares
    with fed(near.expand(rows, length)):
        theirs = masking.q_xt(ids, chance)
    at_theirs = views.mdlm.mask(batch, t=(chance[:, 0]).float(), mask_id=V)
    with fed(own):
        again = masking.q_xt(ids, at_theirs.t.double()[:, None])
    yield Comparison(
        "mdlm: share masked at t",
        "x_t at t, where a uniform lies between t and (1 − 0.001)·t",
        noises,
        noises.at("LogLinearNoise.total_noise"),
        "views.schedule.LINEAR.share(t)",
        theirs,
        torch.where(near < torch.from_numpy(views.LINEAR.share(t.numpy()))[:, None], V, ids),
        because=Because(
            noises.line("LogLinearNoise.total_noise"),
            "Their schedule masks (1 − 0.001)·t of the tokens at t and weighs them by 1/t: a thousandth less than their weights ask for. Here it is t, as the paper's α_t = 1 − t. "
            "At the same share both mask the same tokens.",
            again,
            at_theirs.input_ids,
        ),
    )

    # The loss, of tokens and of the batch.
    student = Student(V + 1, length)
    yield loss(file, noise, batch, ids, example, student)
    yield padding(file, noise, data.padded)
    yield from packing(Code(root, MDLM, "dataloader.py"), data)


def trainer(file: Code, noise: Any, student: Student, t: Any) -> Any:
    """Their trainer with our student, at given times."""
    them = file.fake(
        "Diffusion",
        {
            "_subs_parameterization": {},
            "q_xt": {},
            "_maybe_sub_sample": {},
            "_forward_pass_diffusion": {"utils": Quiet},
            "_loss": {"Loss": dict},
        },
        mask_index=V,
        neg_infinity=-1e6,
        T=0,
        change_of_variables=False,
        importance_sampling=False,
        parameterization="subs",
        config=SimpleNamespace(model=SimpleNamespace(length=student.of_place.shape[0])),
        noise=noise,
    )
    them._sample_t = lambda n, device: t
    them.forward = lambda x, sigma: them._subs_parameterization(logits=student(x), xt=x)
    return them


class Quiet:
    @staticmethod
    def print_nans(tensor: Any, name: str) -> None:
        """Theirs looks for NaN here."""
        assert not torch.isnan(tensor).any(), name


def ours_per_token(example: Any, student: Student) -> Any:
    """Σ weights · CE of a student who knows that a mask is no prediction, token by token [B, L]."""
    logits = student(example.input_ids)[:, :, :V]
    each = F.cross_entropy(logits[example.targets], example.target_ids(), reduction="none")
    made = torch.zeros(example.targets.shape, dtype=each.dtype)
    made[example.targets] = example.target_weights().double() * each
    return made


def loss(file: Code, noise: Any, batch: Any, ids: Any, example: Any, student: Student) -> Comparison:
    """What they train on, from the same masks."""
    # At the times at which their schedule masks what ours does.
    t = example.t.double() / (1 - EPS)
    them = trainer(file, noise, student, t)
    with fed(drawn("mdlm_mask", batch, ids.shape[1])):
        theirs = them._forward_pass_diffusion(ids)
    ours = ours_per_token(example, student)
    return Comparison(
        "mdlm: loss of each token",
        "weight times cross-entropy of a keyed student, by token; zero where nothing is masked",
        file,
        file.at("Diffusion._forward_pass_diffusion"),
        "views.mdlm.mask(batch): target_weights() · CE",
        theirs,
        ours,
        F32,
        Because(
            Code(file.root, MDLM, "noise_schedule.py").line("LogLinearNoise.total_noise"),
            "The masks are those of one share m. Their weight there is 1/t = (1 − 0.001)/m, ours 1/m. Times 1 − 0.001 ours is theirs.",
            theirs,
            (1 - EPS) * ours,
        ),
    )


def padding(file: Code, noise: Any, batch: Any) -> Comparison:
    """The loss of a batch with padding: the sum over tokens, divided by their number."""
    ids, valid = batch["input_ids"].long(), batch["attention_mask"]
    example = views.mdlm.mask(batch, mask_id=V)
    student = Student(V + 1, ids.shape[1])
    them = trainer(file, noise, student, example.t.double() / (1 - EPS))
    with fed(drawn("mdlm_mask", batch, ids.shape[1])):
        theirs = them._loss(ids, valid.double())["loss"]
    ours = ours_per_token(example, student).sum() / example.valid.sum() * (1 - EPS)
    return Comparison(
        "mdlm: loss of a padded batch",
        "nats per token, padding left out (times 1 − 0.001, see the loss of each token)",
        file,
        file.at("Diffusion._loss"),
        "Σ target_weights() · CE / valid.sum()",
        theirs,
        ours,
        F32,
    )


def packing(file: Code, data: Data) -> Iterator[Comparison]:
    """Documents to rows: their `wrap`."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [tokenizer.encode(text, add_special_tokens=False).ids + [end] for text in data.texts]
    grouped = file.cut("_group_texts", itertools=itertools)
    ours = data.plain["input_ids"]
    rows = grouped({"input_ids": documents}, ours.shape[1], end, end)["input_ids"]
    yield Comparison(
        "mdlm: packing",
        "ids of the rows of six documents: joined with EOS, cut, between BOS and EOS",
        file,
        file.at("_group_texts"),
        "pack: {mode: wrap, separator: eos, boundary: bos_eos}",
        rows[: len(ours)],
        ours,
    )
