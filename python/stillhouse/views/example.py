"""What all views share: the rows they read, the keys of their random choices, and the training example they give.

::

    batch ──► Rows (numpy: ids, valid, sequence ids) ──► masks, t, weights ──► Example, in the batch's kind and device

Every choice is a function of (seed, epoch, purpose) and of ``sequence_id`` or, for times, of the place in the global batch
(:mod:`stillhouse.views.times`); never of the worker, the device, the number of ranks or what was drawn before. Masks are made on the
CPU from [B, L] columns; noise where :mod:`stillhouse.noise` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, overload

import numpy as np
import numpy.typing as npt

from ..batch import LOST, Array, ArrayT, Batch, Ragged, chosen_rows, is_torch, joined, moved, parts_of, taken
from ..batch import Rows as RowNumbers
from ..errors import ColumnError
from ..info import Info
from ..mixed import keyed_ids
from .keyed import U64, ViewError

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self, Unpack

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class NoiseOptions(TypedDict, total=False):
    """Options of :func:`stillhouse.noise.replay`, without the positions, which the example knows, and the device."""

    draw: int
    out: Literal["softmax", "gumbel", "gaussian", "uniform"]
    temperature: float
    info: Info | None
    dtype: Any
    threads: int | None
    backend: Literal["rust", "torch", "triton"] | None


@dataclass(frozen=True, eq=False)
class Example(Generic[ArrayT]):
    """One batch of training examples: which positions are predicted, from what, and how much each counts.

    ========== ================= ===========================================================================
    input_ids  [B, L] integer    the context x^{−I}: the tokens, with ``mask_id`` at the targets
    targets    [B, L] bool       I, the positions to predict; never padding
    t          [B] float32       the time of each row, exactly the number that the masks were drawn with
    weights    [B, L] float32    weight of each token in the loss, w(t) in I and 0 outside
    valid      [B, L] bool       false on padding
    ========== ================= ===========================================================================

    The loss is Σ weights · (−log p(x^I | x^{−I}, ξ^I)). Arrays are of the batch's kind (numpy or torch) and device.
    Subclasses say where they differ. For type checkers an example is ``Example[torch.Tensor]`` or of numpy arrays, as its batch.

    ``example[2:5]``, ``example[[3, 1]]`` and ``example[mask]`` (bool [B]) are some of its rows, ``example.split(n)`` micro-batches.
    """

    batch: Batch[ArrayT]
    input_ids: ArrayT
    targets: ArrayT
    t: ArrayT
    weights: ArrayT
    valid: ArrayT

    # Not iterable: Python would else try example[0], example[1], ...
    __iter__ = None

    @property
    def rows(self) -> int:
        """B."""
        return self.batch.rows

    def target_ids(self) -> ArrayT:
        """x^I: the true tokens at the targets, row after row, [n]; in torch int64, as losses need."""
        ids: Any = self.batch["input_ids"]
        made: ArrayT = as_labels(ids[self.targets])
        return made

    def target_weights(self) -> ArrayT:
        """The weights at the targets, row after row, [n] float32."""
        weights: Any = self.weights
        made: ArrayT = weights[self.targets]
        return made

    @overload
    def noise(self, *, device: None = None, **options: Unpack[NoiseOptions]) -> ArrayT: ...
    @overload
    def noise(self, *, device: str | torch.device, **options: Unpack[NoiseOptions]) -> torch.Tensor: ...
    def noise(self, **options: Any) -> Any:
        """ξ^I: the noise at the targets, row after row, [n, V]. Options are those of :func:`stillhouse.noise.replay`."""
        return self._noise(options)

    def _noise(self, options: dict[str, Any]) -> Any:
        return replay(self.batch, self.targets, options)

    @overload
    def triplet(self, *, device: None = None, **options: Unpack[NoiseOptions]) -> tuple[ArrayT, ArrayT, ArrayT]: ...
    @overload
    def triplet(
        self, *, device: str | torch.device, **options: Unpack[NoiseOptions]
    ) -> tuple[ArrayT, torch.Tensor, ArrayT]: ...
    def triplet(self, **options: Any) -> tuple[Any, Any, Any]:
        """(x^{−I}, ξ^I, x^I), what a student of Gumbel distillation is trained on. Options are those of the noise."""
        return self.input_ids, self._noise(options), self.target_ids()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """``torch.Tensor.to`` of every array and of the batch; a type converts only floating-point arrays."""
        return self._map(lambda array: moved(array, args, kwargs), self.batch.to(*args, **kwargs))

    def pin_memory(self, device: Any = None) -> Self:
        """The same in page-locked memory; torch's ``DataLoader(pin_memory=True)`` calls it."""
        return self._map(lambda array: moved(array, (), {}).pin_memory(), self.batch.pin_memory())

    def __getitem__(self, rows: RowNumbers) -> Self:
        if isinstance(rows, (int, str)):
            raise TypeError(f"example[{rows!r}]: valid are example[2:5], integers [b] and bool [B]; fields have names")
        chosen = chosen_rows(rows, self.rows)
        return self._map(lambda array: taken(array, chosen), self.batch[chosen])

    def split(self, rows: int) -> list[Self]:
        """Micro-batches of ``rows`` rows each, the last one with the rest, without copies.

        Σ weights · loss of the micro-batches add up to that of the whole example. Divide each by the same number of the
        whole example, such as ``example.valid.sum()``, not by a number of the micro-batch.
        """
        return [self[start : start + rows] for start in parts_of(self.rows, rows)]

    @classmethod
    def concat(cls, examples: Sequence[Self]) -> Self:
        """The rows of all examples, concatenated. All must have the same settings (block size, base)."""
        if not examples:
            raise ValueError("examples: got none, valid: at least one")
        arrays: dict[str, list[Any]] = {}
        for name, first in vars(examples[0]).items():
            parts = [getattr(example, name) for example in examples]
            if _is_array(first):
                arrays[name] = parts
            elif name != "batch" and any(part != first for part in parts):
                raise ValueError(f"{name}: got {', '.join(map(str, parts))}, valid: the same in all examples")
        rows: dict[str, Any] = {name: joined(parts) for name, parts in arrays.items()}
        return replace(examples[0], batch=Batch.concat([example.batch for example in examples]), **rows)

    def _map(self, convert: Callable[[Any], Any], batch: Any) -> Self:
        """The same with every array converted; all of them have rows first."""
        arrays = {name: convert(value) for name, value in vars(self).items() if _is_array(value)}
        return replace(self, batch=batch, **arrays)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and getattr(value, "ndim", 0) > 0


def as_labels(ids: Any) -> Any:
    """Ids that go into a loss: int64 in torch, whose losses take no other; in numpy as they are."""
    return ids.long() if is_torch(ids) else ids


def replay(batch: Batch, positions: Any, options: dict[str, Any]) -> Any:
    """Noise at positions; masks need no Rust core, so that it is imported only here."""
    from .. import noise

    return noise.replay(batch, positions=positions, **options)


@dataclass(frozen=True)
class Rows:
    """The columns every view reads, in numpy: ids [B, L], valid and trained [B, L] bool, sequence ids [B] uint64."""

    ids: npt.NDArray[np.integer[Any]]
    valid: Bools
    trained: Bools
    """The valid positions on which the model is trained: all, or those of the column ``loss_mask`` of conversations."""
    sequence_ids: U64
    device: torch.device | None
    """Where results go; None: they stay numpy."""

    def give(self, array: npt.NDArray[Any]) -> Any:
        """An array as the batch holds its own: numpy, or torch on its device."""
        if self.device is None:
            return array
        import torch

        array = np.ascontiguousarray(array)
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)


def rows_of(batch: Batch) -> Rows:
    """Reads the columns. What is no batch of rows is refused, with what to pass instead."""
    if not isinstance(batch, Batch):
        raise ViewError(_instead_of(batch))
    column = batch["input_ids"]
    if isinstance(column, Ragged):
        raise ViewError("input_ids: rows differ in length (`pack.remainder: keep`); valid: batch.padded()")
    device = column.device if is_torch(column) else None
    ids = to_numpy(column)
    if ids.ndim != 2:
        raise ViewError(
            f"input_ids: got shape {list(ids.shape)}, valid: [B, L]; for one row of a data set, ds[[7]] instead of ds[7]"
        )
    if "sequence_id" not in batch:
        raise ColumnError(
            f"the batch has no column 'sequence_id', the key of the views' random choices; it has {', '.join(batch)}. Keep it: "
            'ds.select_columns(["sequence_id", "input_ids"])'
        )
    mask = batch.get("attention_mask")
    valid = np.ones(ids.shape, bool) if mask is None else to_numpy(mask).astype(bool)
    loss_mask = batch.get("loss_mask")
    trained = valid if loss_mask is None else valid & to_numpy(loss_mask).astype(bool)
    sequence_ids = to_numpy(batch["sequence_id"]).astype(np.int64, copy=False).view(np.uint64)
    return Rows(ids, valid, trained, keyed_ids(batch, sequence_ids), device)


def refuse_loss_mask(batch: Batch, view: str) -> None:
    """For views whose targets are all tokens of a row: on conversations they would train on prompts. What is no batch, rows_of refuses."""
    if isinstance(batch, Batch) and "loss_mask" in batch:
        raise ViewError(
            f"{view} predicts every token, and this batch has a loss_mask, which excludes prompts; valid: views.mdlm.mask, "
            "views.bd3lm.mask or views.prime.mask, which keep to it, or a batch without the column (select_columns)"
        )


WITH_INFO = "stillhouse.Batch(columns, info=ds.info)"
"""What to write where a batch does not know its data set."""


def _instead_of(got: object) -> str:
    """What to pass instead of something that is no batch."""
    usual = "ds[[7]], ds[:32], or a batch of a stillhouse.torch loader"
    if not isinstance(got, Mapping) or "input_ids" not in got:
        return f"batch: got {_article(type(got).__name__)}, valid: a stillhouse.Batch: {usual}"
    kind, ids = _article(type(got).__name__), got["input_ids"]
    if np.ndim(ids) == 1 and not isinstance(ids, Ragged):
        return f"batch: got one row, {kind}, valid: a stillhouse.Batch, such as ds[[7]] instead of ds[7]; for columns [B, L]: {WITH_INFO}"
    return f"batch: got {kind}, which does not know its data set, valid: a stillhouse.Batch: {WITH_INFO}, or {usual}"


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def to_numpy(value: Any) -> npt.NDArray[Any]:
    """An array on the CPU."""
    return np.asarray(value.detach().cpu().numpy() if is_torch(value) else value)


def stored_column(batch: Batch, column: str, section: str, instead: str) -> npt.NDArray[Any]:
    """A column that an optional section of the job file makes, in numpy."""
    if column not in batch:
        raise ColumnError(
            f"the batch has no column {column!r}; it has {', '.join(batch) or 'none'}. A job makes it with `{section}` "
            f"in its job file; {instead}"
        )
    return to_numpy(batch[column])


def mask_id_of(batch: Batch, mask_id: int | None) -> int:
    """The id that stands for a masked token."""
    if mask_id is not None:
        return mask_id
    if batch.info is not None and "mask" in batch.info.special_tokens:
        return batch.info.special_tokens["mask"]
    if batch.info is None:
        raise ViewError(f"mask_id: the batch has no info, which names the mask token; valid: {WITH_INFO}, or an id")
    raise ViewError(
        "mask_id: the tokenizer of this data set has no mask token; give an id, commonly a new one "
        f"(vocab_size, {batch.info.vocab_size} here)"
    )


def epoch_of(batch: Batch, epoch: int | None) -> int:
    """The epoch an argument gives, else that of the batch's global batch or state, else 0."""
    if epoch is not None:
        return epoch
    if batch.global_batch is not None:
        return batch.global_batch.epoch
    if batch.info is None and batch.state is None:
        raise ViewError(f"epoch: not given, and {LOST}; or pass epoch=")
    return int((batch.state or {}).get("epoch", 0))


def candidates(rows: Rows, never: Array | None) -> Bools:
    """Positions that may become targets, [B, L]: no padding, none that ``loss_mask`` leaves out or ``never`` excludes."""
    if never is None:
        return rows.trained
    excluded = to_numpy(never).astype(bool)
    try:
        return np.asarray(rows.trained & ~np.broadcast_to(excluded, rows.valid.shape))
    except ValueError:
        raise ViewError(f"never: got shape {list(excluded.shape)}, valid: {list(rows.valid.shape)} or [L]") from None
