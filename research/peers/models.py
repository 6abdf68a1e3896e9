"""The teachers that are timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .processes import script

SMOLLM2 = ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Model:
    """A teacher in all the forms that the sides read."""

    name: str
    folder: Path
    """config.json and safetensors."""
    vocabulary: int
    job_teacher: Path | None
    """For a job: with a tokenizer. None where there is none for these weights."""
    gguf: dict[str, Path]
    """For llama.cpp, by type."""


def nano(root: Path) -> Model:
    """The repository's GPT-2 of 3.5 M parameters."""
    folder = root / "assets" / "teacher-nano-gpt2"
    return Model("nano GPT-2", folder, 50_257, folder, {})


def smollm2(root: Path, cache: Path, cores: int) -> Model:
    """SmolLM2-135M with its weights, or with random ones where those are not here; made once."""
    source = root / SMOLLM2
    real = source.exists()
    folder = cache / ("smollm2" if real else "smollm2-random")
    if not folder.exists():
        script("models", "models", {"folder": str(folder), "gguf": str(source) if real else None}, cores, cores)
    kinds = {"f16": folder / "f16.gguf", "Q8_0": folder / "q8_0.gguf"}
    name = "SmolLM2-135M" if real else "SmolLM2-135M with random weights"
    return Model(name, folder, 49_152, source if real else None, kinds)
