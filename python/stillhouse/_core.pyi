from typing import Any

from numpy.typing import NDArray

__version__: str

def replay(
    columns: dict[str, NDArray[Any]],
    shape: tuple[int, int, int],
    tokens: NDArray[Any] | None,
    request: dict[str, Any],
    out: NDArray[Any],
) -> None: ...
def replay_dense(
    noise: NDArray[Any],
    shape: tuple[int, int, int],
    tokens: NDArray[Any] | None,
    request: dict[str, Any],
    out: NDArray[Any],
) -> None: ...
def prior(sequence_ids: NDArray[Any], positions: NDArray[Any], request: dict[str, Any], out: NDArray[Any]) -> None: ...
