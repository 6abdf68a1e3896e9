"""Opens Stillhouse data sets, feeds trainers, and turns stored noise back into what a student conditions on.

>>> import stillhouse
>>> ds = stillhouse.open("s3://shards/owt-noise")            # doctest: +SKIP
>>> xi = stillhouse.noise.replay(ds[:8], out="softmax")      # doctest: +SKIP

``stillhouse.torch`` has the data sets for a DataLoader, ``stillhouse.noise`` the replay, ``stillhouse.views`` the training examples
of each method.
"""

from typing import TYPE_CHECKING, Any

from ._core import __version__
from .batch import Batch, Ragged
from .dataset import ColumnInfo, Dataset, open
from .errors import ColumnError, DatasetError, StillhouseError, StoreError
from .info import Info, NoiseInfo, SubtokenInfo
from .mixed import by_source

if TYPE_CHECKING:
    from . import noise, torch, views

__all__ = [
    "Batch",
    "ColumnError",
    "ColumnInfo",
    "Dataset",
    "DatasetError",
    "Info",
    "NoiseInfo",
    "Ragged",
    "StillhouseError",
    "StoreError",
    "SubtokenInfo",
    "__version__",
    "by_source",
    "noise",
    "open",
    "torch",
    "views",
]


def __getattr__(name: str) -> Any:
    # torch is large and not needed to look at data, so the parts come when they are first used
    if name in ("noise", "torch", "views"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
