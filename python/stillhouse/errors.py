"""The errors of this package; each says which file or column, what was got, and what to do."""

from __future__ import annotations


class StillhouseError(Exception):
    """Anything this package refuses or cannot do."""


class DatasetError(StillhouseError):
    """A data set or shard that is missing, damaged, unfinished or of a newer format; the message names the file."""


class StoreError(StillhouseError):
    """An object store that refused or could not be reached; the message names the object and what to check."""


class ColumnError(StillhouseError, KeyError):
    """A column that the data set does not have, or that has another type than is needed."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""
