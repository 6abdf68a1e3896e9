"""Data sets for PyTorch trainers: shuffled over many shards, dealt to ranks and workers, resumed exactly in mid-epoch.

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

The order of an epoch depends on the data set, the seed and the epoch alone. Global batch n is the next ``world_size × batch_size``
rows of it; rank r takes every ``world_size``-th, beginning with the r-th; workers take whole batches in turn. So after any batch
the rows given out are a prefix of the epoch, and its length is all the state there is. No shard belongs to a rank or worker: none is
idle, and nothing must be divisible by anything. Where the rows of an epoch do not fill the last global batch, ranks get batches that
differ by one row at most; that batch is left out where some rank would get nothing of it, so that ranks step together (see ``drop_last``).

An epoch is over when its last batch is given out: loops that take ``len(loader)`` batches and loops that go on to the end
come to the next one alike. ``len`` is that of a whole epoch, in mid-epoch too; ``loader.remaining`` is what is left.

:class:`MixtureDataset` gives several data sets as one, in given proportions; :class:`TokenBatchDataset` batches of so many tokens. Both are
:class:`StreamingShardDataset` in all that is said here.

``DataLoader`` of this module counts what it has given out, and is what Lightning, accelerate and Hugging Face's Trainer get; the plain
one of torch works too (``batch_size=None``, or
``batch_sampler=ds.batch_sampler`` for :class:`ShardDataset`), with ``batch.state`` as the state after each batch, and so does
torchdata's ``StatefulDataLoader``, whose own state resumes at the same world size and number of workers.
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
