"""Views in a training step that ``torch.compile`` compiles: they stay outside of its graph.

They are made by numpy in unsigned 64-bit numbers, which the compiler would trace as torch's own and fail on. ``torch.compiler.disable`` says so, and takes
seconds to import: it is asked for only where the compiler is there already.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def view(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            import torch

            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return view


def keep_out_of_graphs(*modules: types.ModuleType) -> None:
    """Wraps the public functions of modules, before anybody has them."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name[0] != "_":
                setattr(module, name, _uncompiled(value))
