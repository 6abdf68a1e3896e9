"""Opens Stillhouse data sets, feeds trainers, and turns stored noise back into what a student conditions on."""

from .batch import Batch, Ragged
from .errors import ColumnError, DatasetError, StillhouseError, StoreError
from .info import Info, NoiseInfo, SubtokenInfo

__all__ = [
    "Batch",
    "ColumnError",
    "DatasetError",
    "Info",
    "NoiseInfo",
    "Ragged",
    "StillhouseError",
    "StoreError",
    "SubtokenInfo",
]
