"""Data sets for PyTorch trainers: shuffled over many shards, shared among ranks and workers, resumed exactly.

::

    import stillhouse.torch as st

    ds = st.StreamingShardDataset("s3://shards/owt-noise", batch_size=32, seed=1)      # or st.ShardDataset
    loader = st.DataLoader(ds, num_workers=2, pin_memory=True)
    for epoch in range(loader.epoch, 10):
        for batch in loader:                       # stillhouse.Batch of tensors [32, ...]
            ...
            if step % 1000 == 0:
                torch.save({"model": model.state_dict(), "data": loader.state_dict()}, path)

    loader.load_state_dict(saved["data"])          # same place, at any world size, batch size and number of workers

The order of an epoch depends only on the data set, the seed and the epoch. Global batch n is the next ``world_size ×
batch_size`` rows of it. Rank r takes every ``world_size``-th of these, beginning with the r-th, and workers take whole
batches in turn. So after any batch, the rows given out are a prefix of the epoch, and its length is the state.

No shard belongs to a rank or worker: none is idle, and no number must divide another. Where the rows of an epoch do not
fill the last global batch, ranks get batches that differ by at most one row. Where some rank would get no row, that
batch is left out, so that ranks step together (see ``drop_last``).

An epoch ends when its last batch is given out. The next one follows, whether the loop takes ``len(loader)`` batches or
runs to the end. ``len`` is that of a whole epoch, also in mid-epoch; ``loader.remaining`` counts the batches left.

Two more kinds of :class:`StreamingShardDataset`:

- :class:`MixtureDataset` gives several data sets as one, in given proportions.
- :class:`TokenBatchDataset` gives batches of up to ``max_tokens`` tokens.

Loaders:

- ``DataLoader`` of this module counts the batches it gives out. It is the one for Lightning, accelerate and Hugging
  Face's Trainer.
- torch's own works too, with ``batch_size=None``, or ``batch_sampler=ds.batch_sampler`` for :class:`ShardDataset`. The
  state after each batch is ``batch.state``.
- torchdata's ``StatefulDataLoader`` has its own state, which loads at the same world size and number of workers.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "stillhouse.torch needs PyTorch: pip install 'stillhouse[torch]'", name="torch"
    ) from error

from ._rows import collate
from .loader import DataLoader
from .map import BatchSampler, ShardDataset
from .mixture import MixtureDataset
from .streaming import StreamingShardDataset
from .token_batches import TokenBatchDataset

__all__ = [
    "BatchSampler",
    "DataLoader",
    "MixtureDataset",
    "ShardDataset",
    "StreamingShardDataset",
    "TokenBatchDataset",
    "collate",
]
