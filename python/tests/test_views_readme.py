"""What docs/python.md says of every view: its signature, the types and shapes of what it gives, and what the weights sum to."""

from __future__ import annotations

import ast
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
from test_views_keyed import batch_of

from stillhouse import Info, SubtokenInfo, views
from stillhouse.views import armd

README = (
    (Path(__file__).resolve().parents[2] / "docs/python.md")
    .read_text()
    .partition("## Training examples")[2]
    .partition("\n## ")[0]
)
SIGNATURES = re.findall(r"^((?:mdlm|pgm|prime|bd3lm|medusa|armd)\.\w+)(\(batch.*\))$", README, re.MULTILINE)
TABLE = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in README.partition("| example of |")[2].partition("\n\n")[0].splitlines()[2:]
]
ROWS, LENGTH, DIGITS = 12_000, 24, 4


@pytest.fixture(scope="module")
def batch():
    """Rows of 24 and of 9 tokens; the stored columns of ARMD, too."""
    lengths = np.where(np.arange(ROWS) % 2, 9, LENGTH)
    info = Info(600, LENGTH, subtokens=SubtokenInfo(5, DIGITS), special_tokens={"mask": 600}, block_length=4)
    made = batch_of(rows=ROWS, length=LENGTH, lengths=lengths, vocab=600, info=info)
    order = armd.strided(made, streams=2)
    made["order"], made["block"] = order.order.astype(np.uint16), order.block.astype(np.uint16)
    blocks = views.bd3lm.mask(made, block_size=4, sampling="sequence", t_range=(1e-3, 1 - 1e-3))
    made["partition"], made["partition_t"] = blocks.targets[:, None, :], blocks.t[:, None, :]
    return made


CALLS = {
    "mdlm.mask": [lambda b: views.mdlm.mask(b)],
    "mdlm.complementary, each of two": [lambda b, i=i: views.mdlm.complementary(b)[i] for i in (0, 1)],
    "pgm.partition": [lambda b: views.pgm.partition(b)],
    "prime.mask": [lambda b: views.prime.mask(b)],
    "prime.mask, carry_over=False": [lambda b: views.prime.mask(b, carry_over=False)],
    "bd3lm.mask": [
        lambda b: views.bd3lm.mask(b, block_size=4),
        lambda b: views.bd3lm.mask(b, block_size=4, t_range=(0.3, 0.8)),
    ],
    "bd3lm.stored": [lambda b: views.bd3lm.stored(b)],
    "medusa.targets": [lambda b: views.medusa.targets(b, anchors=np.array([0, 5, 20, 22, 23]))],
    "armd.progressive": [lambda b: views.armd.progressive(b, 20_000)],
    "armd.strided": [lambda b: views.armd.strided(b), lambda b: views.armd.strided(b, per="step")],
    "armd.random": [lambda b: views.armd.random(b, steps=7)],
    "armd.masking_steps": [lambda b: views.armd.masking_steps(b, np.arange(LENGTH) % 7 + 1)],
    "armd.stored": [lambda b: views.armd.stored(b)],
}
SUMS = {  # the sum of the weights of a row of n tokens, as the table writes it
    "n": lambda n: n,
    "2 n": lambda n: 2 * n,
    "n·H_ℓ": lambda n: n * sum(1 / k for k in range(1, DIGITS + 1)),
    "n·ln(1/eps)/(1 − eps)": lambda n: n * math.log(1 / 1e-3) / (1 - 1e-3),
    "1": lambda n: 1,
}


@pytest.mark.parametrize(("name", "signature"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_signatures_are_those_of_the_functions(name, signature):
    module, function = (views.__dict__[name.partition(".")[0]], name.partition(".")[2])
    written = ast.parse(f"def f{signature}: ...").body[0].args
    real = inspect.signature(getattr(module, function)).parameters.values()
    positional = [p for p in real if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword = [p for p in real if p.kind is p.KEYWORD_ONLY]
    assert [a.arg for a in written.args] == [p.name for p in positional]
    assert [a.arg for a in written.kwonlyargs] == [p.name for p in keyword]
    without = len(positional) - len(written.defaults)
    assert all(p.default is p.empty for p in positional[:without])
    defaults = zip([*written.defaults, *written.kw_defaults], [*positional[without:], *keyword])
    for default, parameter in defaults:
        if default is None:
            assert parameter.default is parameter.empty, parameter
        elif isinstance(default, ast.Name):
            assert getattr(module, default.id) is parameter.default
        else:
            assert ast.literal_eval(default) == parameter.default, parameter


def test_every_view_is_there():
    functions = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in (views.mdlm, views.pgm, views.prime, views.bd3lm, views.medusa, views.armd)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if next(iter(inspect.signature(function).parameters), "") == "batch"
        and "Example" in function.__annotations__["return"]
    }
    assert {name for name, _ in SIGNATURES} == functions == {row[0].split("`")[1] for row in TABLE[1:]}
    assert {row[0].replace("`", "") for row in TABLE[1:]} == set(CALLS)


def arrays_of(name):
    """{array: (type, shape)} that the table gives for a view, with what holds for all."""
    cells = {row[0].replace("`", ""): row[1] for row in TABLE}
    cell = cells[name]
    base = {} if name not in CALLS else arrays_of(cell.replace("`", "")[3:] if cell.startswith("as `") else TABLE[0][0])
    return {
        **base,
        **{
            array: (kind, shape)
            for array, kind, shape in re.findall(r"`(\w+)` (\w+)(?: \[([^]]*)\])?", cell)
            if array != "prime"
        },
    }


@pytest.mark.parametrize("name", CALLS)
def test_types_shapes_and_sums_are_as_the_table_says(name, batch):
    rows, stated = batch, next(row[2] for row in TABLE[1:] if row[0].replace("`", "") == name)
    sizes = {"B": ROWS, "L": LENGTH, "ℓ": DIGITS, "P": 5, "k": 3, "blocks": LENGTH // 4, "2": 2}
    for call in CALLS[name]:
        example, tensors = call(rows), call(rows.torch())
        arrays = {key: value for key, value in vars(example).items() if hasattr(value, "dtype") or key == "t"}
        said = arrays_of(name)
        assert set(said) == set(arrays)
        for array, (kind, shape) in said.items():
            if kind == "None":
                assert arrays[array] is None
                continue
            assert arrays[array].dtype == (rows["input_ids"].dtype if kind == "ids" else kind), array
            assert arrays[array].shape == tuple(sizes[size] for size in shape.split(", ")), array
            label = "int64" if array == "digits" else arrays[array].dtype
            assert str(getattr(tensors, array).dtype) == f"torch.{label}", array
        sums = example.weights.reshape(ROWS, -1).sum(axis=1, dtype=float)
        how, said_sum = re.match(r"(mean|exactly) `([^`]+)`", stated).groups()
        if said_sum == "Σ targets":
            np.testing.assert_array_equal(sums, example.targets.reshape(ROWS, -1).sum(axis=1))
            continue
        for tokens in (LENGTH, 9):
            mine = sums[example.valid.sum(axis=1) == tokens]
            expected = SUMS[said_sum](tokens)
            if how == "exactly":
                np.testing.assert_allclose(mine, expected, rtol=1e-5)
            else:
                assert abs(mine.mean() - expected) < 4 * mine.std() / len(mine) ** 0.5 + 2e-3 * expected
                assert mine.std() > 0 and abs(mine.mean() / expected - 1) < 0.1
