"""Documents in packed rows: against loops over the offsets, and FlexAttention against dense masks."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import stillhouse
from stillhouse import Batch, ColumnError, Info, Ragged, StillhouseError, documents
from stillhouse.views import bd3lm

L = 8
# where segments begin in each row, and how many of its tokens are no padding
OFFSETS = [[0, 4, 7], [0], [0, 1, 2, 5], [0, 3], [0]]
VALID = [8, 8, 8, 4, 3]
Maker = Callable[[str, dict[str, Any]], pathlib.Path]


def batch_of(context: str = "document", padding: bool = True, kind: str = "numpy") -> Batch[Any]:
    rows = range(5) if padding else range(3)
    columns = {
        "sequence_id": np.arange(len(rows), dtype=np.uint64),
        "input_ids": np.arange(len(rows) * L, dtype=np.int32).reshape(-1, L),
        "document_offsets": Ragged(
            np.concatenate([OFFSETS[row] for row in rows]).astype(np.int32),
            np.cumsum([0] + [len(OFFSETS[row]) for row in rows]),
        ),
    }
    if padding:
        columns["attention_mask"] = np.arange(L) < np.array(VALID)[:, None]
    made = Batch(columns, Info(100, L, special_tokens={"mask": 99}, context=context))  # type: ignore[arg-type]
    return made.torch() if kind == "torch" else made


def ragged_of(kind: str = "numpy") -> Batch[Any]:
    """The same rows without their padding."""
    batch = batch_of()
    values = batch["input_ids"][batch["attention_mask"]]
    columns = {**batch, "input_ids": Ragged(values, np.cumsum([0, *VALID]))}
    del columns["attention_mask"]
    made = Batch(columns, batch.info)
    return made.torch() if kind == "torch" else made


def segment(row: int, position: int) -> int:
    """By the definition: how many segments begin at or before the position, padding being none."""
    return -1 if position >= VALID[row] else sum(offset <= position for offset in OFFSETS[row]) - 1


def sees(row: int, query: int, key: int, causal: bool) -> bool:
    same = segment(row, query) == segment(row, key) and segment(row, query) >= 0
    return same and (key <= query or not causal)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_segments_and_positions_by_the_definition(kind: str) -> None:
    batch = batch_of(kind=kind)
    found = documents.segments(batch)
    assert found.tolist() == [[segment(row, i) for i in range(L)] for row in range(5)]
    positions = documents.position_ids(batch)
    wanted = [[i - max(offset for offset in OFFSETS[row] if offset <= i) for i in range(L)] for row in range(5)]
    assert positions.tolist() == wanted
    assert str(found.dtype).removeprefix("torch.") == "int32"
    assert positions.dtype == (torch.int64 if kind == "torch" else np.int32)
    ragged = ragged_of(kind)
    assert [row.tolist() for row in documents.segments(ragged)] == [
        [segment(row, i) for i in range(VALID[row])] for row in range(5)
    ]
    assert [row.tolist() for row in documents.position_ids(ragged)] == [wanted[r][: VALID[r]] for r in range(5)]


def test_positions_begin_anew_where_the_job_says_so() -> None:
    along = [list(range(L))] * 5
    assert documents.position_ids(batch_of("sequence")).tolist() == along
    assert documents.position_ids(batch_of("document"), context="sequence").tolist() == along
    restarted = documents.position_ids(batch_of("document")).tolist()
    assert documents.position_ids(batch_of("sequence"), context="document").tolist() == restarted != along
    lost = Batch(dict(batch_of()))
    with pytest.raises(StillhouseError, match=r"context: not given, and the batch has no facts"):
        documents.position_ids(lost)
    assert documents.position_ids(lost, context="document").tolist() == restarted
    with pytest.raises(ValueError, match=r"context: got 'row', valid: 'sequence', 'document'"):
        documents.cu_seqlens(batch_of(), context="row")  # type: ignore[arg-type]


@pytest.mark.parametrize("context", ["document", "sequence"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_cu_seqlens_are_bounds_of_the_flattened_batch(kind: str, context: Any) -> None:
    begins = {row: OFFSETS[row] if context == "document" else [0] for row in range(5)}
    wanted = [row * L + o for row in range(5) for o in [*begins[row], *([VALID[row]] if VALID[row] < L else [])]]
    cu, longest = documents.cu_seqlens(batch_of(kind=kind), context=context)
    assert cu.tolist() == [*wanted, 5 * L] and longest == 8
    assert str(cu.dtype).removeprefix("torch.") == "int32"
    starts = np.cumsum([0, *VALID])
    cu, longest = documents.cu_seqlens(ragged_of(kind), context=context)
    assert cu.tolist() == [*(int(starts[row]) + o for row in range(5) for o in begins[row]), sum(VALID)]
    assert longest == max(np.diff(cu)) == 8
    cu, longest = documents.cu_seqlens(batch_of(kind=kind)[:1])
    assert (cu.tolist(), longest) == ([0, 4, 7, 8], 4)


def test_attention_by_lengths_is_attention_by_masks() -> None:
    """What a kernel for lengths does, written as a loop over them, against the dense mask: equal where no padding is."""
    batch = batch_of(kind="torch")
    query, key, value = torch.randn(3, 5, 1, L, 16, generator=torch.Generator().manual_seed(1))
    cu, longest = documents.cu_seqlens(batch)
    q, k, v = (x[:, 0].reshape(5 * L, 16) for x in (query, key, value))
    parts = [slice(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
    assert max(part.stop - part.start for part in parts) == longest
    for causal in (False, True):
        each = [F.scaled_dot_product_attention(q[None, p], k[None, p], v[None, p], is_causal=causal)[0] for p in parts]
        mask = documents.document_mask(batch, causal=causal)
        dense = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        valid = batch["attention_mask"]
        torch.testing.assert_close(torch.cat(each).reshape(5, L, 16)[valid], dense[:, 0][valid])
        assert (dense[:, 0][~valid] == 0).all()  # rows without a true entry


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_masks_by_the_definition(causal: bool, padding: bool) -> None:
    wanted = [
        [[sees(row, q, k, causal) for k in range(L)] for q in range(L)] for row in (range(5) if padding else range(3))
    ]
    for kind in ("numpy", "torch"):
        mask = documents.document_mask(batch_of(padding=padding, kind=kind), causal=causal)
        assert mask.tolist() == wanted
        assert str(mask.dtype).removeprefix("torch.") == "bool"
    rows = documents.document_mask(batch_of(padding=padding), causal=causal, context="sequence")
    valid = np.arange(L) < np.array(VALID if padding else VALID[:3])[:, None]
    both = valid[:, :, None] & valid[:, None, :]
    np.testing.assert_array_equal(rows, both & (np.tri(L, dtype=bool) if causal else True))


def attended(mod: Any, batch: int, length: int, dense: torch.Tensor) -> None:
    """FlexAttention with the block mask of a `mask_mod` gives what attention with the dense mask gives."""
    blocks = create_block_mask(mod, B=batch, H=None, Q_LEN=length, KV_LEN=length, device="cpu", BLOCK_SIZE=4)
    index = torch.arange(length)
    made = mod(torch.arange(batch)[:, None, None], torch.tensor(0), index[None, :, None], index[None, None, :])
    assert torch.equal(made, dense)
    query, key, value = torch.randn(3, batch, 2, length, 16, generator=torch.Generator().manual_seed(2))
    out = flex_attention(query, key, value, block_mask=blocks)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=dense[:, None])
    torch.testing.assert_close(out, expected)
    # and the blocks themselves say where something is: no block is left out that holds a true entry
    some = dense.reshape(batch, length // 4, 4, length // 4, 4).any(dim=4).any(dim=2)
    assert torch.equal(blocks.to_dense()[:, 0].bool(), some)


@pytest.mark.filterwarnings("ignore")  # flex_attention without torch.compile says that it is slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context", ["document", "sequence"])
def test_flex_attention(causal: bool, context: Any) -> None:
    batch = batch_of(kind="torch")
    mod = documents.mask_mod(batch, causal=causal, context=context)
    attended(mod, 5, L, documents.document_mask(batch, causal=causal, context=context))


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_of_block_diffusion_within_documents() -> None:
    batch = batch_of(kind="torch")
    for size in (1, 3, 4, 8):
        example = bd3lm.mask(batch, block_size=size)
        attended(example.mask_mod(), 5, 2 * L, example.attention())
        joined = and_masks(example.mask_mod(), documents.mask_mod(batch, copies=2))
        attended(joined, 5, 2 * L, example.attention() & documents.document_mask(batch).repeat(1, 2, 2))
    with pytest.raises(TypeError, match="arrays of numpy"):
        bd3lm.mask(batch_of(), block_size=4).mask_mod()


def test_what_is_refused() -> None:
    batch = batch_of()
    without = Batch({name: column for name, column in batch.items() if name != "document_offsets"}, batch.info)
    for make in (documents.segments, documents.cu_seqlens, documents.document_mask):
        with pytest.raises(ColumnError, match=r"no column 'document_offsets'.*must be among the columns that are read"):
            make(without)  # type: ignore[operator]
    assert documents.position_ids(without, context="sequence").tolist() == [list(range(L))] * 5
    for make in (documents.document_mask, documents.mask_mod):
        with pytest.raises(ColumnError, match=r"rows differ in length.*batch.padded\(\)"):
            make(ragged_of("torch"))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"valid: tensors \(batch.torch\(\)\)"):
        documents.mask_mod(batch)
    with pytest.raises(ValueError, match="copies: got 0"):
        documents.mask_mod(batch.torch(), copies=0)
    for offsets, got in (([[1, 2]], 1), ([[0, 3, 3]], 3), ([[0, 5, 2]], 2), ([[0, 8]], 8)):
        bad = Batch(
            {**batch[:1], "document_offsets": Ragged(np.array(offsets[0]), np.array([0, len(offsets[0])]))}, batch.info
        )
        with pytest.raises(ColumnError, match=rf"document_offsets: got {got} in row 0.*ascending from 0, below 8"):
            documents.segments(bad)
    with pytest.raises(ColumnError, match=r"got 1 rows, valid: 5"):
        documents.segments(batch | {"document_offsets": batch["document_offsets"][:1]})


def test_a_row_is_the_same_in_any_batch() -> None:
    batch = batch_of()
    for index in ([3], [4, 0, 4], slice(1, 4)):
        np.testing.assert_array_equal(documents.segments(batch[index]), documents.segments(batch)[index])
        np.testing.assert_array_equal(documents.position_ids(batch[index]), documents.position_ids(batch)[index])
    assert documents.segments(batch[[]]).shape == (0, L)
    assert documents.cu_seqlens(batch[[]]).cu_seqlens.tolist() == [0]


@pytest.mark.parametrize("context", ["sequence", "document"])
def test_documents_of_a_data_set(small: Maker, context: str) -> None:
    """A job's own words: the context it was run with decides where ids begin anew."""
    ds = stillhouse.open(small(f"context-{context}", {"extract": {"context": context}}))
    assert ds.info.context == context
    batch = ds[:16]
    numbers, positions = documents.segments(batch), documents.position_ids(batch)
    for row, offsets in enumerate(batch["document_offsets"]):
        begins = offsets.tolist() if context == "document" else [0]
        assert np.flatnonzero(positions[row] == 0).tolist() == begins
        assert np.flatnonzero(np.diff(numbers[row], prepend=-1)).tolist() == offsets.tolist()
    assert len(documents.cu_seqlens(batch).cu_seqlens) == len(batch["document_offsets"].values) + 1


@pytest.mark.parametrize(("mode", "remainder"), [("pad", "drop"), ("wrap", "pad"), ("wrap", "keep")])
def test_padding_of_a_data_set(small: Maker, mode: str, remainder: str) -> None:
    path = small(f"rows-{mode}-{remainder}", {"pack": {"mode": mode, "remainder": remainder}, "partitions": None, "subtokens": None})  # fmt: skip
    batch = stillhouse.open(path)[:]
    cu, longest = documents.cu_seqlens(batch)
    padded = batch.padded()
    valid = padded["attention_mask"] if "attention_mask" in padded else np.ones(padded["input_ids"].shape, bool)
    tokens = valid.sum() if remainder == "keep" else valid.size
    assert cu[-1] == tokens and longest <= 24 and (np.diff(cu) > 0).all()
    mask = documents.document_mask(padded)
    # a token sees its segment: the sizes of the segments are the numbers of true entries
    sizes = mask.sum(axis=2)
    assert ((sizes > 0) == valid).all()
    segments = documents.segments(padded)
    for row in range(0, batch.rows, 7):
        for number in range(segments[row].max() + 1):
            inside = segments[row] == number
            assert (sizes[row][inside] == inside.sum()).all()
