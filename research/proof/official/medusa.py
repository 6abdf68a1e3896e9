"""Medusa: which token each head predicts, and how their losses are added."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from stillhouse import views

from .compare import F64, Because, Comparison
from .data import Data, Student
from .theirs import MEDUSA, Code

V, HEADS, IGNORED = 50_257, 3, -100


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    file = Code(root, MEDUSA, "medusa/train/train_legacy.py")
    where, name = file.at("CustomizedTrainer.compute_loss"), "CustomizedTrainer.compute_loss"
    batch = data.padded
    ids, valid = batch["input_ids"].long(), batch["attention_mask"]
    length = ids.shape[1]
    labels = ids.masked_fill(~valid, IGNORED)  # as their template leaves out what is no answer
    student = Student(V, length)
    logits = torch.stack([student(ids).roll(head, -1) for head in range(HEADS)])
    seen: list[Any] = []

    def criterion() -> Any:
        def of(given: Any, wanted: Any) -> Any:
            seen.append(wanted)
            return F.cross_entropy(given, wanted)

        return of

    them = file.fake(
        "CustomizedTrainer",
        {"compute_loss": {"CrossEntropyLoss": criterion, "IGNORE_TOKEN_ID": IGNORED}},
        log=lambda _: None,
    )

    class Model:
        medusa = HEADS

        def __call__(self, **_: Any) -> Any:
            return logits

    theirs = them.compute_loss(Model(), {"input_ids": ids, "attention_mask": valid, "labels": labels})
    padded = [F.pad(w.reshape(len(ids), -1), (0, 2 + i), value=IGNORED) for i, w in enumerate(seen)]
    example, following = (
        views.medusa.targets(batch, heads=HEADS, offsets="lookahead"),
        views.medusa.targets(batch, heads=HEADS + 1),
    )
    yield Comparison(
        "medusa: tokens of the heads",
        "labels of three heads at every position of padded rows, −100 where there is none",
        file,
        where,
        "views.medusa.targets(batch, heads=3, offsets='lookahead').target_ids()",
        torch.stack(padded, -1),
        example.target_ids(),
    )
    yield Comparison(
        "medusa: tokens of the heads, by default",
        "labels of the first three heads",
        file,
        file.line(name, sets="medusa_labels"),
        "views.medusa.targets(batch, heads=3).target_ids()",
        torch.stack(padded, -1),
        views.medusa.targets(batch, heads=HEADS).target_ids(),
        because=Because(
            file.line(name, sets="medusa_labels"),
            "Their head i predicts the token i + 2 places on, since the base's own head has the next one. Our default is the set {i + 1, …, i + k} of Gumbel Distillation §4.2; with one head more its "
            "heads behind the first are theirs.",
            torch.stack(padded, -1),
            following.target_ids()[..., 1:],
        ),
    )
    wanted = example.target_ids()
    each = torch.stack(
        [
            F.cross_entropy(logits[h].flatten(0, 1), wanted[..., h].flatten(), reduction="none").reshape(ids.shape)
            for h in range(HEADS)
        ],
        -1,
    )
    summed = (example.target_weights().double() * each).sum((0, 1))
    yield Comparison(
        "medusa: loss",
        "the loss of three heads over keyed logits",
        file,
        where,
        "Σ target_weights() · CE / Σ target_weights()",
        theirs,
        summed.sum() / example.weights.sum(),
        F64,
        Because(
            file.line(name, calls="loss_fct"),
            "They take the mean of each head over its own tokens and add the means. Our weights are 1 for every token of every head; each head's sum over its own number, added, is theirs.",
            theirs,
            (summed / example.weights.double().sum((0, 1))).sum(),
        ),
    )
