"""Opens Stillhouse data sets, feeds trainers, and replays the stored noise that a student is conditioned on.

>>> import stillhouse
>>> ds = stillhouse.open("s3://shards/owt-noise")            # doctest: +SKIP
>>> xi = stillhouse.noise.replay(ds[:8], out="softmax")      # doctest: +SKIP

- ``stillhouse.torch``: data sets for a DataLoader.
- ``stillhouse.Epochs``: the same epochs as numpy arrays; ``stillhouse.jax``: as JAX arrays.
- ``stillhouse.noise``: replays noise.
- ``stillhouse.views``: the training examples of each method.
- ``stillhouse.documents``: the document boundaries that attention over packed rows needs.
"""

from typing import TYPE_CHECKING, Any

from . import documents
from ._core import __version__
from .batch import Batch, Ragged
from .dataset import ColumnInfo, Dataset, open
from .epochs import Epochs
from .errors import ColumnError, DatasetError, StillhouseError, StoreError
from .info import Info, NoiseInfo, SubtokenInfo
from .mixed import by_source
from .place import GlobalBatch

if TYPE_CHECKING:
    from . import jax, noise, torch, views

__all__ = [
    "Batch",
    "ColumnError",
    "ColumnInfo",
    "Dataset",
    "DatasetError",
    "Epochs",
    "GlobalBatch",
    "Info",
    "NoiseInfo",
    "Ragged",
    "StillhouseError",
    "StoreError",
    "SubtokenInfo",
    "__version__",
    "by_source",
    "documents",
    "jax",
    "noise",
    "open",
    "torch",
    "views",
]


def __getattr__(name: str) -> Any:
    # torch and jax are large and not needed to look at data, so the parts come when they are first used
    if name in ("jax", "noise", "torch", "views"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
