"""Which code is compared with, and how a function of it is called without the rest of its program.

A function is cut out of its file by its place in the syntax tree, compiled under the file's own name and line numbers, and given the names
that it uses. So a trainer's method runs without lightning, hydra or flash attention, and nobody had to copy it.
"""

from __future__ import annotations

import ast
import hashlib
import pathlib
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Repository:
    """A commit of a public repository, and the paper whose code it is."""

    paper: str
    name: str
    commit: str

    @property
    def folder(self) -> str:
        """Its place below ``--theirs``."""
        return f"{self.name}@{self.commit[:7]}"


MDLM = Repository("MDLM", "kuleshov-group/mdlm", "c112c526d193436838c98d81455ee51f90309470")
BD3LM = Repository("BD3-LM", "kuleshov-group/bd3lms", "1c3e8f43d88dfbcee5ff2aa6932a9e74b31ae1d7")
GUMBEL = Repository("Gumbel Distillation", "hxixixh/gumbel-distill", "bd05b12de3cb2ff221834d807b728f71d5cc390b")
PRIME = Repository("MDM-Prime", "chen-hao-chao/mdm-prime", "17b948913d686384f26c66050858dc9ab53e2588")
PRIME2 = Repository("MDM-Prime-v2", "chen-hao-chao/mdm-prime-v2", "3237f23373593e22d9685a82afde1d19662770c0")
PGM_TEXT = Repository("PGM, text", "jdeschena/pgm", "88861937ea7318e89e015a9f51a4cca6ad59e40e")
PGM_IMAGE = Repository("PGM, images", "jdeschena/pgm", "145690f84c34edc2b64bce0eb294b4d9acd79eb7")
MEDUSA = Repository("Medusa", "FasterDecoding/Medusa", "e2a5d20c048a9b0a4092e6933c34313687422518")
DISTILLKIT = Repository("DistillKit (export)", "arcee-ai/DistillKit", "a61c2e7d25c2e990d45832e12bd8542bdee9c810")
MEGATRON = Repository("Megatron-LM (export)", "NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553")

REPOSITORIES = (MDLM, BD3LM, GUMBEL, PRIME, PRIME2, PGM_TEXT, PGM_IMAGE, MEDUSA, DISTILLKIT, MEGATRON)

WITHOUT_CODE = {
    "Gumbel Distillation, Medusa heads": "The authors' repository (hxixixh/gumbel-distill) has students of MDLM and BD3-LM and one that predicts the last n tokens of a row at once; Medusa heads are not in it. "
    "What Medusa's own code trains heads on is compared.",
    "ARMD": "The paper names no repository. Looked for by title, by both authors' names and by its terms (strictly causal, strided parallel, progressive permutation) in an "
    "index of public GitHub repositories and in a search over public source text and web pages, November 2026: none is the authors'.",
}


class NotTheirs(Exception):
    """A file is missing, or is not what its commit has."""


class Code:
    """One file of a repository, at its commit."""

    def __init__(self, root: pathlib.Path, repository: Repository, path: str) -> None:
        self.root, self.repository, self.path = root, repository, path
        self.file = root / repository.folder / path
        if not self.file.exists():
            raise NotTheirs(
                f"{self.file}: missing, valid: a checkout of {repository.name} at {repository.commit} (--list)"
            )
        data = self.file.read_bytes()
        checkout = root / repository.folder
        committed = ["git", "-C", str(checkout), "rev-parse", f"{repository.commit}:{path}"]
        wanted = subprocess.run(committed, capture_output=True, text=True, check=False).stdout.strip()
        got = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        if got != wanted:
            raise NotTheirs(
                f"{self.file}: got blob {got}, valid: {wanted or 'a git checkout'}, of commit {repository.commit}"
            )
        self._tree = ast.parse(data)

    def node(self, name: str) -> ast.AST:
        """A function, class or method (``Class.method``)."""
        found: ast.AST = self._tree
        for part in name.split("."):
            for child in getattr(found, "body", []):
                if getattr(child, "name", None) == part:
                    found = child
                    break
            else:
                raise NotTheirs(f"{self.path}: has no {name}")
        return found

    def at(self, name: str) -> str:
        """Where it stands: ``path:first-last``."""
        node: Any = self.node(name)
        return f"{self.path}:{node.lineno}-{node.end_lineno}"

    def line(self, name: str, *, sets: str | None = None, calls: str | None = None, nth: int = 0) -> str:
        """``path:line`` of the statement that sets a variable, or of a call, or (neither) of the nth return."""
        lines = []
        for node in ast.walk(self.node(name)):
            if sets is not None:
                targets = (
                    node.targets
                    if isinstance(node, ast.Assign)
                    else [node.target]
                    if isinstance(node, ast.AugAssign)
                    else []
                )
                if any(
                    sets in {n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in ast.walk(t)}
                    for t in targets
                ):
                    lines.append(node.lineno)
            elif calls is not None:
                if isinstance(node, ast.Call) and calls in (
                    getattr(node.func, "attr", None),
                    getattr(node.func, "id", None),
                ):
                    lines.append(node.lineno)
            elif isinstance(node, ast.Return):
                lines.append(node.lineno)
        if len(lines) <= nth:
            raise NotTheirs(f"{self.path}: {name} has no line for sets={sets} calls={calls} nth={nth}")
        return f"{self.path}:{sorted(lines)[nth]}"

    def cut(self, name: str, /, **names: Any) -> Any:
        """The function or class, with only the names it is given (and torch); decorators are left out."""
        node: Any = self.node(name)
        module = ast.parse("from __future__ import annotations")
        kept, node.decorator_list = node.decorator_list, []
        module.body.append(node)
        scope: dict[str, Any] = {
            "torch": torch,
            "nn": torch.nn,
            "F": torch.nn.functional,
            "__name__": "theirs",
            **names,
        }
        try:
            exec(compile(module, str(self.file), "exec"), scope)  # noqa: S102
        finally:
            node.decorator_list = kept
        return scope[name.split(".")[-1]]

    def constant(self, name: str, /, **names: Any) -> Any:
        """What a line of the module sets a name to."""
        for node in self._tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
                return eval(compile(ast.Expression(node.value), str(self.file), "eval"), names)
        raise NotTheirs(f"{self.path}: sets no {name}")

    def value(self, name: str, sets: str, /, **names: Any) -> Any:
        """What a function's first assignment to a name (or attribute) would give, with the names that it uses."""
        for node in ast.walk(self.node(name)):
            if isinstance(node, ast.Assign) and sets in {
                getattr(n, "attr", getattr(n, "id", "")) for t in node.targets for n in ast.walk(t)
            }:
                return eval(compile(ast.Expression(node.value), str(self.file), "eval"), {"torch": torch, **names})
        raise NotTheirs(f"{self.path}: {name} sets no {sets}")

    def fake(self, cls: str, methods: dict[str, Any], **attributes: Any) -> types.SimpleNamespace:
        """An object with some methods of a class of theirs (and the names they use), and the attributes they read."""
        made = types.SimpleNamespace(**attributes)
        for method, names in methods.items():
            setattr(made, method, types.MethodType(self.cut(f"{cls}.{method}", **names), made))
        return made


class _Fed(TorchFunctionMode):
    def __init__(self, uniforms: list[torch.Tensor]) -> None:
        self.uniforms = uniforms

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.rand, torch.rand_like):
            if not self.uniforms:
                raise AssertionError("theirs draws more uniforms than it was given")
            given = self.uniforms.pop(0)
            if func is torch.rand:
                shape = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            else:
                shape = args[0].shape
            assert tuple(shape) == tuple(given.shape), f"theirs draws {tuple(shape)}, it was given {tuple(given.shape)}"
            return given
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


@contextmanager
def fed(*uniforms: Any) -> Iterator[None]:
    """Their ``torch.rand`` gives these, in order, and all of them; what they put on a GPU stays here."""
    left = [torch.as_tensor(u) for u in uniforms]
    with _Fed(left):
        yield
    assert not left, f"theirs did not draw {len(left)} of the uniforms it was given"
