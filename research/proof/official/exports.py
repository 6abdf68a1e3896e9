"""DistillKit and Megatron-LM read what `stillhouse export` writes of our teacher's top k, and their losses of it are what the data set says."""

from __future__ import annotations

import glob
import hashlib
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tarfile
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import stillhouse

from .compare import F32, Comparison
from .data import LENGTH, Data, Student
from .theirs import DISTILLKIT, MEGATRON, Code

V = 50_257
NOTHING = -1000.0


def comparisons(root: pathlib.Path, data: Data) -> Iterator[Comparison]:
    source = data.folder_of_replayed()
    batch = stillhouse.open(str(source))[:].torch()
    yield from distillkit(root, data, source, batch)
    yield from megatron(root, data, source, batch)


def said(batch: Any) -> list[Any]:
    """What the teacher said of the next token at every position but the last: ids and ln p, [B, L − 1, k]."""
    return [batch["topk_index"][:, 1:].long(), batch["topk_logprob"][:, 1:].clamp(min=NOTHING)]


def exported(data: Data, source: pathlib.Path, name: str, *options: Any) -> pathlib.Path:
    """A fresh export."""
    place = data.work / name
    shutil.rmtree(place, ignore_errors=True)
    data.call("export", source, place, *options)
    return place


@contextmanager
def imported(folder: pathlib.Path, *names: str) -> Iterator[list[Any]]:
    """Modules of a checkout, gone again afterwards."""
    sys.path.insert(0, str(folder))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == names[0].split(".")[0]]:
            del sys.modules[name]


def distillkit(root: pathlib.Path, data: Data, source: pathlib.Path, batch: Any) -> Iterator[Comparison]:
    import yaml

    compressor, losses = (
        Code(root, DISTILLKIT, "distillkit/compression/compressor.py"),
        Code(root, DISTILLKIT, "distillkit/lossfuncs/kl.py"),
    )
    for path in ("bitpack", "config", "legacy", "monotonic_logprobs"):
        Code(root, DISTILLKIT, f"distillkit/compression/{path}.py")
    place = exported(data, source, "distillkit", "--format", "distillkit")
    settings = yaml.safe_load((place / "compression_config.yaml").read_text())
    table = pa.concat_tables([pq.read_table(file) for file in sorted((place / "data").glob("train-*.parquet"))])
    names = (
        "distillkit.compression.compressor",
        "distillkit.compression.config",
        "distillkit.lossfuncs.kl",
        "distillkit.missing_probability",
    )
    with imported(compressor.file.parents[2], *names) as (packing, config, kl, missing):
        reader = packing.LogprobCompressor(config=config.DistributionQuantizationConfig(**settings))
        rows = [
            reader.decompress_to_sparse(
                {key: torch.tensor(row[key]) for key in ("compressed_logprobs", "bytepacked_indices")}
            )
            for row in table.to_pylist()
        ]
        ids, values = (torch.stack(of) for of in zip(*rows))
        our_ids, our_values = said(batch)
        where = compressor.at("LogprobCompressor.decompress_to_sparse")
        yield Comparison(
            "exports: DistillKit's ids",
            "the eight likeliest ids of the next token, unpacked",
            compressor,
            where,
            "export --format distillkit; column topk_index",
            ids,
            our_ids,
        )
        yield Comparison(
            "exports: DistillKit's log-probabilities",
            "their ln p",
            compressor,
            where,
            "export --format distillkit; column topk_logprob",
            values,
            our_values,
        )
        logits = Student(V, LENGTH - 1)(batch["input_ids"][:, :-1]).float()
        student = logits.log_softmax(-1).gather(-1, our_ids)
        where = losses.at("sparse_kl_div_inner")
        for handling in (missing.MissingProbabilityHandling.ZERO, missing.MissingProbabilityHandling.SYMMETRIC_UNIFORM):
            theirs = torch.stack(
                [kl.sparse_kl_div(logits[[r]], ids[[r]], values[[r]], missing=handling) for r in range(len(ids))]
            )
            if handling.value == "zero":
                target = our_values.log_softmax(-1)
                ours = (target.exp() * (target - student)).sum((1, 2))
            else:
                p, q = our_values.double().exp(), student.double().exp()
                rest, other = torch.log1p(-p.sum(-1)), torch.log1p(-q.sum(-1))
                ours = (p * (our_values - student)).sum((1, 2)) + (rest.exp() * (rest - other)).sum(1)
            yield Comparison(
                f"exports: DistillKit's KL, {handling.value}",
                "forward KL of each row against a keyed student",
                losses,
                where,
                "Σ p (ln p − ln q) over topk_logprob, and the rest of both",
                theirs,
                ours,
                F32,
            )
        certain = torch.full((1, 1, 8), NOTHING)
        certain[..., 0] = 0.0
        theirs = kl.sparse_kl_div(
            logits[:1, :1], ids[:1, :1], certain, missing=missing.MissingProbabilityHandling.SYMMETRIC_UNIFORM
        )
        yield Comparison(
            "exports: DistillKit at a position that is certain",
            "whether symmetric_uniform is no number where one id has all the probability",
            losses,
            where,
            "docs/FORMAT.md, For readers of other projects",
            np.array([bool(torch.isnan(theirs))]),
            np.array([True]),
        )


class _Zstandard:
    """Their reader's zstandard, of pyarrow's codec: the size of a frame stands in its head."""

    class ZstdDecompressor:
        def decompress(self, frame: bytes) -> bytes:
            flag, single = frame[4] >> 6, frame[4] >> 5 & 1
            at = 5 + (0 if single else 1) + [0, 1, 2, 4][frame[4] & 3]
            width = {0: 1 if single else 0, 1: 2, 2: 4, 3: 8}[flag]
            size = int.from_bytes(frame[at : at + width], "little") + (256 if flag == 1 else 0)
            return bytes(pa.Codec("zstd").decompress(frame, decompressed_size=size, asbytes=True))


def megatron(root: pathlib.Path, data: Data, source: pathlib.Path, batch: Any) -> Iterator[Comparison]:
    tools = Code(root, MEGATRON, "megatron/training/distillation/utils_logits.py")
    losses = Code(root, MEGATRON, "megatron/training/distillation/cached_logits_loss.py")
    micro, ranks = 2, 2
    rows = len(batch["input_ids"]) // (micro * ranks) * micro * ranks
    blend = (["/data/speeches_text_document", "/data/other"], [0.7, 0.3])
    sizes = ("--global-batch", micro * ranks, "--micro-batch", micro, "--data-parallel", ranks)
    run = ("--seed", 1234, "--sequence-length", LENGTH, "--train-samples", rows)
    given = [word for path, share in zip(*blend) for word in ("--blend", f"{path}={share}")]
    place = exported(data, source, "megatron", "--format", "megatron-kd", *sizes, *run, *given)

    args = SimpleNamespace(seed=1234, seq_length=LENGTH, train_samples=rows)
    identifiers = tools.cut("_blend_identifiers", os=os, get_blend_and_blend_per_split=lambda _: (blend, None))
    hash_of = tools.cut(
        "compute_dataset_hash",
        get_args=lambda: args,
        OrderedDict=OrderedDict,
        json=json,
        hashlib=hashlib,
        _blend_identifiers=identifiers,
    )
    files = sorted(pathlib.Path(name) for name in glob.glob(str(place / "data/train/*.tar")))
    with tarfile.open(files[0]) as tar:
        member = tar.extractfile("_meta.json")
        assert member is not None
        ours = json.loads(member.read())["hash"]
    yield Comparison(
        "exports: Megatron-LM's hash of a run",
        "md5 that its loader compares before it reads",
        tools,
        tools.at("compute_dataset_hash"),
        "export --format megatron-kd --seed --sequence-length --train-samples --blend",
        np.frombuffer(bytes.fromhex(hash_of()[0]), np.uint8).astype(int),
        np.frombuffer(bytes.fromhex(ours), np.uint8).astype(int),
    )

    suffix = tools.constant("LOGPROBS_TAR_MEMBER_SUFFIX")
    read = tools.cut(
        "iter_logprobs_tar_entries",
        open_logit_file=lambda path, mode, **_: pathlib.Path(path).open(mode),  # noqa: SIM115
        tarfile=tarfile,
        META_TAR_MEMBER=tools.constant("META_TAR_MEMBER"),
        LOGPROBS_TAR_MEMBER_RE=tools.constant("LOGPROBS_TAR_MEMBER_RE", re=re, LOGPROBS_TAR_MEMBER_SUFFIX=suffix),
        _verify_logprobs_metadata=tools.cut("_verify_logprobs_metadata", json=json),
        LogprobsTarEntry=tools.cut("LogprobsTarEntry", NamedTuple=NamedTuple),
    )
    decode = tools.cut(
        "decode_logprobs_payload",
        HAVE_ZSTANDARD=True,
        zstandard=_Zstandard,
        io=io,
        unpack_indices=tools.cut("unpack_indices"),
    )
    named = tools.constant("BATCHED_TAR_RE", re=re)
    values, ids = torch.zeros(rows, LENGTH, 8), torch.zeros(rows, LENGTH, 8, dtype=torch.long)
    for file in files:
        found = named.match(file.name)
        assert found is not None, file
        for entry in read(str(file), start_iteration=0, expected_hash=hash_of()[0]):
            for n, (value, index) in enumerate(zip(*decode(entry.data))):
                # Micro-batch n of this rank in this iteration: its rows of the order.
                at = entry.iteration * micro * ranks + n * micro * ranks + int(found["dp"]) * micro
                values[at : at + micro], ids[at : at + micro] = value.transpose(0, 1), index.transpose(0, 1)
    our_ids, our_values = (of[:rows] for of in said(batch))
    where = tools.at("decode_logprobs_payload")
    for name, theirs, ours_ in (("ids", ids, our_ids), ("log-probabilities", values, our_values)):
        yield Comparison(
            f"exports: Megatron-LM's {name}",
            "the eight likeliest of the next token, of all micro-batches of both ranks",
            tools,
            where,
            f"export --format megatron-kd; column topk_{'index' if name == 'ids' else 'logprob'}",
            theirs[:, :-1],
            ours_,
        )
    logits = Student(V, LENGTH)(batch["input_ids"][:rows]).float()
    sentinel = tools.constant("CACHED_LOGITS_LOGPROB_SENTINEL")
    kl = losses.cut("topk_kl_div", CACHED_LOGITS_LOGPROB_SENTINEL=sentinel, dist=types.SimpleNamespace(), dist_nn=None)
    student = logits.log_softmax(-1).double()[:, :-1].gather(-1, our_ids)
    p, q = our_values.double().exp(), student.exp()
    rest, other = ((1 - of.sum(-1)).clamp(min=1e-8).log() for of in (p, q))
    ours_ = (p * (our_values - student)).sum(-1) + rest.exp() * (rest - other)
    theirs = kl(
        logits.clone().transpose(0, 1), values.transpose(0, 1), ids.transpose(0, 1), 1, 0, None, add_ghost_token=True
    )
    where = losses.at("topk_kl_div")
    yield Comparison(
        "exports: Megatron-LM's KL",
        "forward KL of every token with the rest as one more, against a keyed student",
        losses,
        where,
        "Σ p (ln p − ln q) over topk_logprob, and the rest of both",
        theirs[:, :-1],
        ours_,
        F32,
    )
    yield Comparison(
        "exports: Megatron-LM where nothing is known",
        "the loss of the last position, of whose next token no data set knows",
        losses,
        where,
        "export --format megatron-kd: −1000 everywhere",
        theirs[:, -1],
        torch.zeros(rows),
    )
