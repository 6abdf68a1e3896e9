"""The facts of a data set that a trainer needs: vocabulary, noise, sub-tokens, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

PERMUTATION = "permutation.npy"
"""The file beside the shards with the numbers of ids, as ``beside`` of the manifest names it."""


@dataclass(frozen=True)
class NoiseInfo:
    """How the noise of a data set was stored.

    ``codec`` is ``"replay"`` or ``"dense"``, or ``"prior"`` for text that the teacher wrote (``extract.mode: sequential``),
    whose noise is not stored because ξ_k = −ln e_k for every k. ``seed`` is that of the generator (``noise_seed`` of the manifest, u64);
    ``draws`` is D, the independent noises per token; ``tolerance`` bounds the total variation between stored and exact
    softmax(ξ) of every token (codec ``replay``; 0 for ``dense``). ``condition`` says whether argmax(l + ξ) is the observed
    token for all stored noise (data sets of older versions do not guarantee it).
    """

    codec: Literal["replay", "dense", "prior"]
    seed: int
    draws: int = 1
    tolerance: float = 0.0
    condition: bool = False


@dataclass(frozen=True)
class SubtokenInfo:
    """Base b and length ℓ of the sub-tokens (Prime): every token is ℓ digits in base b, most significant first.

    ``permutation`` int32 [C] is ``permutation.npy`` of the data set: the digits of an id are those of ``permutation[id]``.
    None: they are those of the id itself. Two permutations are compared by ``permutation_sha256``, the hash of the file.
    """

    base: int
    length: int
    permutation_sha256: str | None = None
    permutation: npt.NDArray[np.int32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Info:
    """Facts of a data set that every batch carries along.

    ``vocab_size`` is V (C in Prime's paper). ``special_tokens`` maps roles (``bos``, ``eos``, ``pad``, ``mask``) to ids,
    as far as the tokenizer has them. ``length`` is L, the positions of a row (the longest one where rows differ).
    ``context`` is what the teacher saw of a row: all earlier tokens (``"sequence"``), or only those of the same document
    (``"document"``), with positions that restart at 0.
    ``schedule_power`` says how ``partition`` was drawn: α(t) = (1 − t)^power, 1 for the linear schedule; but where ``schedule`` is
    ``"arccos"`` it was α(t) = 1 − arccos(1 − t)·2/π.
    ``block_length`` is L' where ``partition`` has a time for each block of so many tokens.
    ``sources`` has the facts of each data set of a mixture by its name, in the order of the numbers in the column ``source``; ``noise`` of a
    mixture is None where they have no noise, or each a seed of its own (replay then takes each row's own).
    """

    vocab_size: int
    length: int
    noise: NoiseInfo | None = None
    subtokens: SubtokenInfo | None = None
    schedule_power: float = 1.0
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    context: Literal["sequence", "document"] = "sequence"
    sources: Mapping[str, Info] = field(default_factory=dict)
    block_length: int | None = None
    schedule: Literal["polynomial", "arccos"] = "polynomial"

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], permutation: npt.NDArray[np.int32] | None = None) -> Info:
        """Takes the facts out of a parsed ``manifest.json``; ``permutation`` is what ``permutation.npy`` holds, where the data set has one."""
        job = manifest["job"]
        subtokens = manifest.get("subtokens")
        partitions = job.get("partitions") or {}
        tokens = manifest["tokenizer"].get("special_tokens", {})
        return cls(
            vocab_size=int(manifest["vocab_size"]),
            length=int(job["pack"]["length"]),
            noise=_noise_of(job.get("extract") or {}, manifest.get("noise_seed")),
            subtokens=None
            if subtokens is None
            else SubtokenInfo(
                int(subtokens["base"]),
                int(subtokens["length"]),
                (manifest.get("beside") or {}).get(PERMUTATION),
                permutation,
            ),
            schedule_power=float(partitions["power"]) if partitions.get("schedule") == "polynomial" else 1.0,
            special_tokens={role: int(token["id"]) for role, token in tokens.items()},
            context=(job.get("extract") or {}).get("context", "sequence"),
            block_length=partitions.get("block_length"),
            schedule="arccos" if partitions.get("schedule") == "arccos" else "polynomial",
        )


def _noise_of(extract: Mapping[str, Any], seed: Any) -> NoiseInfo | None:
    """The noise of a job with this ``extract``."""
    noise = extract.get("noise")
    if seed is None:
        return None
    if extract.get("mode") == "sequential":
        written = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **(extract.get("sequential") or {})}
        plain = written["temperature"] == 1.0 and written["top_k"] == 0 and written["top_p"] >= 1.0
        return NoiseInfo(codec="prior", seed=int(seed), condition=plain)
    if noise is None:
        return None
    return NoiseInfo(
        codec=noise["codec"],
        seed=int(seed),
        draws=int(noise["draws"]),
        tolerance=float(noise["tolerance"]) if noise["codec"] == "replay" else 0.0,
        condition=bool(noise.get("condition", False)),
    )
