"""Prime (Chao et al. 2025): a token is ℓ digits in base b = ⌈C^{1/ℓ}⌉, and every digit is masked on its own.

::

    C = 7, ℓ = 3, b = 2                            mask = 2 (b), t = 0.5
    x                  cat = 5                     on = 3
    digits  y_0         1  0  1                     0  1  1
    input_ids y_t       1  m  1                     m  m  1         both tokens are targets: a digit of each is hidden
    V(y_t)              {101}                       {001, 011, 101}     (111 = 7 is no token)

    L = E_t Σ_{i ∈ I} w(t) · (−log p(y_0^i | y_t, ξ^I))          (Eq. 5), p = 0 outside V(y_t^i)          (Eq. 7)

Eq. 5 takes the masked digits of a token jointly. For ℓ > 1 that is less than what reverse steps cost, which unmask one digit at a time, and no bound on −ln p:
a bound takes −ln p of each masked digit under the marginals of the same p (docs/proof/methods.md measures both).

The filter table holds one row of C truth values per digit position and digit; the AND of the rows that the digits of a
token select is V (appendix A.2.3, Fig. A2). That is the carry-over parameterization. Without it (``carry_over=False``; 900K of the
paper's 1M iterations) p is a softmax over all C tokens, so that no token is known and all are targets.

Where the job has ``subtokens: {permutation: …}`` the digits of an id are those of another number, ``batch.info.subtokens.permutation[id]``: :func:`encode`,
:func:`decode` and :func:`filter_table` take it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..batch import Array, ArrayT, Batch, is_torch
from ..info import SubtokenInfo
from .example import WITH_INFO, Bools, Example, Rows, as_labels, candidates, epoch_of, rows_of, stored_column, to_numpy
from .keyed import ViewError, epoch_seed, shuffles, uniforms
from .schedule import LINEAR, Schedule, schedule_of
from .times import Sampling, given_times, row_times

NO_TOKEN = -1
"""What :func:`decode` gives for digits that stand for no token."""


@dataclass(frozen=True, eq=False)
class DigitExample(Example[ArrayT]):
    """An :class:`~stillhouse.views.example.Example` in digits.

    ============ ==================== =====================================================================
    input_ids    [B, L, ℓ] int32      y_t: the digits, b where masked; this is x^{−I}, as partly hidden tokens are
    digits       [B, L, ℓ] int32      y_0; in torch int64, as losses need
    digit_mask   [B, L, ℓ] bool       which digits are masked
    targets      [B, L] bool          tokens with a masked digit (the others are known, and their loss is 0); all tokens
                                      without carry-over
    weights      [B, L] float32       w(t) at targets
    base, length int                  b and ℓ
    carry_over   bool                 whether p is 0 outside V, so that whole tokens are known
    ============ ==================== =====================================================================

    ``target_ids`` are tokens, [n], and ``noise`` is that of the tokens: a target is predicted over all C at once.
    """

    digits: ArrayT
    digit_mask: ArrayT
    base: int
    length: int
    carry_over: bool = True


def mask(
    batch: Batch[ArrayT],
    *,
    length: int | None = None,
    seed: int = 0,
    epoch: int | None = None,
    t: float | Array | None = None,
    eps: float = 1e-3,
    t_range: tuple[float, float] | None = None,
    view: int | None = None,
    sampling: Sampling = "antithetic",
    carry_over: bool = True,
    schedule: Schedule | str | None = None,
    never: Array | None = None,
) -> DigitExample[ArrayT]:
    """Masks digits with probability 1 − α(t) each: a :class:`DigitExample`.

    Digits are the stored column ``subtokens``; where the batch has none, or another ``length`` (ℓ) is asked for, they
    are made from the tokens. ``t``, ``eps``, ``sampling``, ``epoch``, ``never`` (of tokens): see :func:`stillhouse.views.mdlm.mask`;
    the authors' code for text draws t antithetically, that for images draws every t on its own.

    ``carry_over=False``: the targets are all tokens, whole ones too, with the weight w(t), for a p over all C tokens (leave :func:`valid_set` out);
    the masks are the same. The paper trains so for speed and evaluates with carry-over.

    The weights of a row of n tokens sum in expectation (linear schedule, eps → 0) to n·H_ℓ, H_ℓ = 1 + 1/2 + … + 1/ℓ: a token is a target with probability
    1 − (1 − t)^ℓ. Without carry-over they sum to n·ln(1/eps)/(1 − eps).

    t is drawn from [``eps``, 1), or from ``t_range``. ``view`` takes that view of the stored columns ``partition`` and ``partition_t`` instead of drawing
    (``partitions: {level: subtoken}``; group 1 is masked): with ``views: 1`` these are what ``sampling="sequence"`` and ``t_range=(eps, 1 - eps)`` draw with the
    job's seed at epoch 0.

    Purposes: ``prime_t``, ``prime_mask`` (one uniform per digit, token after token).
    """
    rows, epoch, alpha = rows_of(batch), epoch_of(batch, epoch), schedule_of(schedule, batch.info)
    digits, base = _digits(batch, rows, length)
    size, positions, count = digits.shape
    ids = rows.sequence_ids
    may_be = candidates(rows, never)
    if view is not None:
        groups, time = _stored(batch, view, digits.shape)
        hidden: Bools = groups & may_be[:, :, None]
    else:
        if t is None:
            low, high = t_range or (eps, 1.0)
            time = row_times(batch, rows, sampling, seed=seed, epoch=epoch, purpose="prime_t", low=low, high=high)
        else:
            time = given_times(t, size)
        drawn = uniforms(epoch_seed(seed, epoch), "prime_mask", ids, positions * count).reshape(digits.shape)
        hidden = (drawn < alpha.share(time)[:, None, None]) & may_be[:, :, None]
    targets: Bools = np.any(hidden, axis=2) if carry_over else may_be
    weights = np.where(targets, alpha.weight(time).astype(np.float32)[:, None], np.float32(0))
    masked = np.where(hidden, np.int32(base), digits)
    give = rows.give
    return DigitExample(
        batch,
        give(masked),
        give(targets),
        give(time),
        give(weights),
        give(rows.valid),
        as_labels(give(digits)),
        give(hidden),
        base,
        count,
        carry_over,
    )


def _stored(batch: Batch, view: int, shape: tuple[int, ...]) -> tuple[Bools, npt.NDArray[np.float32]]:
    """A stored view of groups of digits, [B, L, ℓ] bool, and its times [B] float32."""
    instead = "draw masks without `view`"
    groups = stored_column(batch, "partition", "partitions: {level: subtoken}", instead)
    times = stored_column(batch, "partition_t", "partitions: {level: subtoken}", instead)
    if groups.ndim != 4 or (groups.shape[0], *groups.shape[2:]) != shape:
        raise ViewError(
            f"partition: got shape {list(groups.shape)}, valid: [{shape[0]}, views, {shape[1]}, {shape[2]}], as `partitions: {{level: subtoken}}` stores it"
        )
    if not 0 <= view < groups.shape[1]:
        raise ViewError(f"view: got {view}, valid: 0 to {groups.shape[1] - 1}")
    return groups[:, view].astype(bool), times[:, view].astype(np.float32)


def _digits(batch: Batch, rows: Rows, length: int | None) -> tuple[npt.NDArray[np.int32], int]:
    """The digits [B, L, ℓ] int32 and the base."""
    if batch.info is None:
        raise ViewError(f"batch: has no info, which has the size of its vocabulary; valid: {WITH_INFO}")
    stored = batch.info.subtokens
    if length is None and stored is None:
        raise ViewError(
            "length: this data set stores no sub-tokens, so that ℓ must be given (the paper uses 4 for text, 2 for "
            "images), or the job file needs `subtokens: {length: 4}`"
        )
    if stored is not None and length in (None, stored.length):
        column = batch.get("subtokens")
        if column is not None:
            return to_numpy(column).astype(np.int32), stored.base
        return np.asarray(encode(rows.ids, stored.base, stored.length, _permutation(stored))), stored.base
    assert length is not None
    base = base_of(batch.info.vocab_size, length)
    return np.asarray(encode(rows.ids, base, length, _permutation(stored))), base


def _permutation(stored: SubtokenInfo | None) -> npt.NDArray[np.int32] | None:
    """The numbers that the digits of a data set are of; None for the ids themselves."""
    if stored is None or stored.permutation_sha256 is None:
        return None
    if stored.permutation is None:
        raise ViewError(
            "batch: its data set has a permutation.npy, but its info was made without it; valid: `stillhouse.open(...).info`"
        )
    return stored.permutation


def base_of(vocab_size: int, length: int) -> int:
    """b: the smallest integer with b^ℓ ≥ C. In integers, as floating-point roots are wrong at exact powers."""
    if vocab_size < 1 or length < 1:
        raise ViewError(f"vocab_size, length: got {vocab_size}, {length}, valid: 1 or more")
    low, high = 0, vocab_size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**length >= vocab_size else (middle, high)
    return high


def encode(ids: Array, base: int, length: int, permutation: Array | None = None) -> Any:
    """The digits of ids, most significant first: [...] → [..., ℓ] int32 (numpy or torch, as the ids).

    ``permutation`` [C]: those of ``permutation[id]`` instead.
    """
    values, digits = to_numpy(ids).astype(np.int64), []
    if permutation is not None:
        values = to_numpy(permutation).astype(np.int64)[values]
    for _ in range(length):
        digits.append(values % base)
        values = values // base
    return _like(np.stack(digits[::-1], axis=-1).astype(np.int32), ids)


def decode(digits: Array, base: int, vocab_size: int, permutation: Array | None = None) -> Any:
    """The ids of digits: [..., ℓ] → [...] int64; −1 where they stand for no token, a masked digit included. ``permutation``: as of :func:`encode`."""
    array = to_numpy(digits).astype(np.int64)
    ids, proper = np.zeros(array.shape[:-1], np.int64), np.ones(array.shape[:-1], bool)
    for position in range(array.shape[-1]):
        digit = array[..., position]
        proper &= (digit >= 0) & (digit < base)
        # Held at the size of the vocabulary: from there on it is no token, and it cannot overflow.
        ids = np.minimum(ids * base + digit, vocab_size)
    proper &= ids < vocab_size
    if permutation is not None:
        ids = np.argsort(to_numpy(permutation))[np.where(proper, ids, 0)]
    return _like(np.where(proper, ids, NO_TOKEN), digits)


def filter_table(vocab_size: int, length: int, permutation: Array | None = None) -> Bools:
    """Which tokens agree with a digit: bool [ℓ, b + 1, C], numpy. Row b, the mask, allows every token. ``permutation``: as of :func:`encode`.

    The ``filter_table.npy`` of a data set with ``subtokens: {filter_table: true}``, byte for byte.
    ``table[j, d, k]`` says whether digit j of token k is d. For a GPU, ``torch.from_numpy(table).to(device)``.
    Size: ℓ · (b + 1) · C bytes, 3 MB for C = 50,257 and ℓ = 4.
    """
    base = base_of(vocab_size, length)
    digits = encode(np.arange(vocab_size), base, length, permutation)
    table = digits.T[:, None, :] == np.arange(base + 1)[None, :, None]
    table[:, base, :] = True
    return np.asarray(table)


def shipped_permutation(vocab_size: int) -> npt.NDArray[np.int32]:
    """The permutation of ``subtokens: {permutation: shipped}``, int32 [C]: the same for every data set with this vocabulary.

    0 … C − 1 shuffled, purpose ``subtoken_permutation``, seed 0, sequence 0.
    """
    made: npt.NDArray[np.int32] = shuffles(0, "subtoken_permutation", np.zeros(1, np.uint64), vocab_size)[0].astype(
        np.int32
    )
    return made


def valid_set(digits: Array, table: Array) -> Any:
    """V(y): the tokens that agree with digits, masked ones (b) being free: [..., ℓ] → bool [..., C] (Eq. 7).

    ``table`` is that of :func:`filter_table`, numpy or torch as the digits. Set logits outside V to −∞. The
    result has C truth values per token; for long rows, pass only the digits of the targets,
    ``example.input_ids[example.targets]``.
    """
    lookup = digits.long() if is_torch(digits) else np.asarray(digits)  # type: ignore[union-attr]
    allowed = table[0][lookup[..., 0]]
    for position in range(1, len(table)):
        allowed = allowed & table[position][lookup[..., position]]
    return allowed


def intermediate_states(vocab_size: int, length: int) -> int:
    """(b + 1)^ℓ − (C + 1): the states of a token that are neither masked nor a token (proposition A.3)."""
    return int((base_of(vocab_size, length) + 1) ** length - (vocab_size + 1))


def idle_step_ratio(length: int, *, steps: int = 1024, positions: int = 1024, schedule: Schedule = LINEAR) -> float:
    """The expected share of sampling steps that change nothing (Eq. A6), for ℓ = ``length``.

    (1/T) Σ_{k<T} [1 − (α_{1−(k+1)/T} − α_{1−k/T})]^{L·ℓ}, T = ``steps``, L = ``positions``. The best ℓ lies near the
    elbow of this curve.
    """
    alpha = schedule.alpha(1.0 - np.arange(steps + 1) / steps)
    return float(np.mean((1.0 - np.diff(alpha)) ** (positions * length)))


def _like(array: npt.NDArray[Any], pattern: Any) -> Any:
    if not is_torch(pattern):
        return array
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(pattern.device)
