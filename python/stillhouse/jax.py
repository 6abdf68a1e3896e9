"""Epochs of a data set as JAX arrays: shuffled, shared among processes, on any devices, resumed exactly; without torch.

::

    import stillhouse.jax as sj

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    epochs = sj.Epochs("s3://shards/owt-noise", batch_size=32, seed=1, transform=make, sharding=sharding)
    while epochs.epoch < 10:
        for batch in epochs:                          # the result of `make`, as arrays [processes · 32, ...]
            params, loss = step(params, batch)
    save(epochs.state_dict())                         # plain numbers and strings, the same in every process
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

try:
    import jax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("stillhouse.jax needs JAX: pip install jax", name="jax") from error

import numpy as np

from . import epochs
from ._epochs_base import explicit_ranks
from .batch import Batch, NumpyArray, Ragged
from .dataset import Dataset

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Epochs"]

T = TypeVar("T")


class Epochs(epochs.Epochs[T]):
    """:class:`stillhouse.Epochs` whose batches are on JAX's devices.

    - ``rank`` and ``world_size`` are by default ``jax.process_index()`` and ``jax.process_count()``. (Call
      ``jax.distributed.initialize`` first.)
    - ``sharding`` says where arrays go. None is JAX's default device, a ``jax.Device`` another one. With a
      ``jax.sharding.Sharding`` over the first axis, the rows of all processes make one global array,
      [processes · batch_size, ...].
    - ``drop_last`` is True by default: JAX would compile anew for a batch of another shape, and processes must step
      together.
    - ``transform`` gets each :class:`~stillhouse.Batch` of numpy arrays and makes the training example, a pytree. Its
      numpy arrays go to the device. Without a transform, the arrays of the batch go there. Columns without a fixed
      shape (:class:`~stillhouse.Ragged`) and the 64-bit ``sequence_id``, which JAX would cut to 32 bits, stay numpy.

    Raises ``ValueError`` for integers that JAX would cut to 32 bits (``jax_enable_x64`` is off).
    """

    @overload
    def __init__(
        self: Epochs[Batch[Any]],
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: None = None,
        sharding: jax.sharding.Sharding | jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
        **options: Unpack[epochs.EpochOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: Callable[[Batch[NumpyArray]], T],
        sharding: jax.sharding.Sharding | jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
        **options: Unpack[epochs.EpochOptions],
    ) -> None: ...
    def __init__(
        self,
        dataset: Dataset | str | os.PathLike[str],
        *,
        batch_size: int,
        transform: Callable[[Batch[NumpyArray]], Any] | None = None,
        sharding: jax.sharding.Sharding | jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
        **options: Any,
    ) -> None:
        ranks = explicit_ranks(options.pop("rank", None), options.pop("world_size", None))
        options["rank"], options["world_size"] = ranks or (jax.process_index(), jax.process_count())
        options.setdefault("drop_last", True)
        if isinstance(sharding, jax.sharding.Sharding) and not options["drop_last"]:
            raise ValueError(
                "drop_last: got False, valid with a sharding: True, because every device must get equally many rows"
            )
        super().__init__(dataset, batch_size=batch_size, transform=transform, **options)  # type: ignore[arg-type]
        self.sharding = sharding

    def _finish(self, batch: Batch[NumpyArray]) -> Any:
        if self.transform is None:
            made = {name: column if _stays(column) else self._put(column) for name, column in batch.items()}
            return Batch(made, batch.info, batch.state, batch.global_batch)
        return jax.tree.map(
            lambda leaf: self._put(leaf) if isinstance(leaf, np.ndarray) else leaf, super()._finish(batch)
        )

    def _put(self, array: NumpyArray) -> jax.Array:
        held = jax.dtypes.canonicalize_dtype(array.dtype)
        if array.dtype.kind in "iu" and held != array.dtype:
            kept = array.astype(held)
            if not (kept == array).all():
                raise ValueError(
                    f"transform: gave {array.dtype} of values that need 64 bits, valid: 32 bits, as jax_enable_x64 is "
                    "off; leave such ids out (views and noise use them in the transform)"
                )
            array = kept
        if isinstance(self.sharding, jax.sharding.Sharding):
            made: jax.Array = jax.make_array_from_process_local_data(  # type: ignore[no-untyped-call]
                self.sharding, array
            )
            return made
        placed: jax.Array = jax.device_put(array, self.sharding)
        return placed


def _stays(column: Any) -> bool:
    return isinstance(column, Ragged) or column.dtype in (np.uint64, np.int64)
