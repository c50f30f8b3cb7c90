"""Planning: any tiling can be read as any other, exactly, and nothing that is not proven to be there is ever read."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import CountingStore, bits, open_native, split_evenly, write_native
from ucformat.box import Box, flat_range
from ucformat.catalog import Catalog, CatalogBuilder, File
from ucformat.errors import CoverageError, OverlapError
from ucformat.reshard.reading.lazy import read, read_many
from ucformat.reshard.reading.plan import TASK_BYTES, plan, wants

Draw = Callable[[st.SearchStrategy[int]], int]


def _cuts(draw: Draw, box: Box, depth: int) -> list[Box]:
    """A random tiling of a box by recursive guillotine cuts."""
    dims = [d for d, n in enumerate(box.length) if n > 1]
    if depth == 0 or not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    d = dims[draw(st.integers(0, len(dims) - 1))]
    at = draw(st.integers(1, box.length[d] - 1))
    low, high = list(box.length), list(box.length)
    low[d], high[d] = at, box.length[d] - at
    moved = list(box.offset)
    moved[d] += at
    return [*_cuts(draw, Box(box.offset, tuple(low)), depth - 1), *_cuts(draw, Box(tuple(moved), tuple(high)), depth - 1)]


@st.composite
def tilings(draw: Draw) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(0, 4))))
    result: list[list[Box]] = []
    for _ in range(2):
        if shape and draw(st.booleans()):
            size = math.prod(shape)
            cuts = sorted({0, size, *(draw(st.integers(0, size)) for _ in range(draw(st.integers(0, 4))))})
            result.append([b for x, y in pairwise(cuts) for b in flat_range(shape, x, y)])
        else:
            result.append(_cuts(draw, Box.whole(shape), 4))
    return shape, result[0], result[1]


@given(tilings(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_any_tiling_is_read_as_any_other_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], list[Box], list[Box]], dtype: torch.dtype, shards: int
) -> None:
    shape, saved, wanted = case
    tensor = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    store = write_native(tmp_path_factory.mktemp("t") / "ck", {"w": tensor}, {"w": saved}, shards)
    catalog = open_native(store)
    parts = read_many(catalog, [("w", box) for box in wanted])
    for box, part in zip(wanted, parts, strict=True):
        assert bits(part) == bits(tensor[box.slices])


def _catalog(tmp_path: Path, boxes: list[Box], shape: tuple[int, ...]) -> Catalog:
    """A catalog whose file does not exist: any read of it would fail with another error."""
    builder = CatalogBuilder(CountingStore(str(tmp_path)))
    file = builder.file(File("absent.bin", 1 << 30))
    builder.tensor("w", "F32", shape)
    for i, box in enumerate(boxes):
        builder.fragment("w", file, i * 4096, box)
    return builder.build()


def test_an_uncovered_region_is_an_error_before_any_read(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, [Box((0, 0), (4, 4))], (8, 4))
    with pytest.raises(CoverageError) as caught:
        read(catalog, "w")
    assert caught.value.tensor == "w"
    assert caught.value.missing == Box((4, 0), (4, 4))
    assert "[4:8, 0:4]" in str(caught.value)
    assert catalog.store.total == 0  # type: ignore[attr-defined]
    plan(catalog, wants(catalog, [("w", Box((1, 1), (3, 2)))]))


def test_overlapping_fragments_are_refused_not_chosen_from(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, [Box((0, 0), (5, 4)), Box((4, 0), (4, 4))], (8, 4))
    with pytest.raises(OverlapError, match=r"\[4:5, 0:4\]"):
        read(catalog, "w")


def test_a_hole_that_an_overlap_makes_up_for_in_volume_is_found(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, [Box((0,), (4,)), Box((2,), (4,))], (8,))
    with pytest.raises((CoverageError, OverlapError)):
        read(catalog, "w")


def test_an_unknown_name_or_a_box_outside_is_an_error(tmp_path: Path) -> None:
    catalog = _catalog(tmp_path, [Box((0,), (8,))], (8,))
    with pytest.raises(CoverageError, match="'v'"):
        wants(catalog, [("v", None)])
    with pytest.raises(CoverageError, match="stored shape"):
        wants(catalog, [("w", Box((4,), (8,)))])


def test_pieces_are_ordered_by_file_and_position(tmp_path: Path) -> None:
    tensor = torch.randn(64, 32)
    catalog = open_native(write_native(tmp_path / "ck", {"w": tensor}, {"w": split_evenly((64, 32), 1, 4)}, shards=2))
    planned = plan(catalog, wants(catalog, [("w", Box((16 * i, 0), (16, 32))) for i in range(4)]))
    keys = list(zip(catalog.fragments.file[planned.fragment].tolist(), planned.start.tolist(), strict=True))
    assert keys == sorted(keys)
    assert len(planned.want) == 16


def test_no_strided_piece_spans_more_than_a_task(tmp_path: Path) -> None:
    rows = 3 * TASK_BYTES // 4096
    builder = CatalogBuilder(CountingStore(str(tmp_path)))
    file = builder.file(File("absent.bin", rows * 4096))
    builder.tensor("w", "F32", (rows, 1024))
    builder.fragment("w", file, 0)
    catalog = builder.build()
    planned = plan(catalog, wants(catalog, [("w", Box((0, 10), (rows, 5)))]))
    assert (planned.stop - planned.start).max() <= TASK_BYTES
    assert planned.length.prod(axis=1).sum() == rows * 5


def test_a_slice_reads_only_its_blocks(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(1024, 1024) for i in range(8)}
    write_native(tmp_path / "ck", tensors, shards=2)
    store = CountingStore(str(tmp_path / "ck"))
    catalog = open_native(store)
    store.read_bytes.clear()
    rows = 245  # 3 % of 8 tensors of 1024 rows, in one tensor
    part = read(catalog, "w3", Box((100, 0), (rows, 1024)))
    assert torch.equal(part, tensors["w3"][100 : 100 + rows])
    block = 256 << 10
    table = 4096
    assert store.total <= rows * 4096 + 2 * block + table
    assert store.total <= 0.04 * catalog.nbytes


def test_planning_is_array_code_whatever_the_number_of_fragments(tmp_path: Path) -> None:
    """A million fragments give one rank a plan of just its own pieces."""
    builder = CatalogBuilder(CountingStore(str(tmp_path)))
    builder.file(File("absent.bin", 1 << 40))
    for i in range(100):
        builder.tensor(f"t{i:03d}", "F32", (10_000, 8))
    catalog = builder.build()
    per = 10_000
    tensor = np.repeat(np.arange(100, dtype=np.int32), per)
    offset = np.zeros((100 * per, 2), dtype=np.int64)
    offset[:, 0] = np.tile(np.arange(per), 100)
    length = np.ones_like(offset)
    length[:, 1] = 8
    table = type(catalog.fragments)(tensor, np.zeros_like(tensor), np.arange(100 * per, dtype=np.int64) * 32, offset, length)
    big = Catalog(catalog.tensors, table, catalog.files, catalog.store)
    planned = plan(big, wants(big, [(f"t{i:03d}", Box((70, 0), (9, 8))) for i in range(100)]))
    assert len(planned.want) == 900
