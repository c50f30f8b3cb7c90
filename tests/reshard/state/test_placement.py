from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ucformat import box as boxes
from ucformat.box import Box
from ucformat.reshard.state.placement import (
    Cut,
    LocalPlacement,
    Split,
    clip,
    flat,
    grid,
    inner_first,
    is_even,
    shard,
    volume,
    whole,
)


def cuts_of(placements: Sequence[Placement], mesh: Sequence[int], at: Sequence[int]) -> list[Cut]:
    return [
        Cut(p.dim, mesh[axis], at[axis], getattr(p, "split_factor", 1))  # type: ignore[attr-defined]
        for axis, p in enumerate(placements)
        if not p.is_replicate()
    ]


def cover(full: torch.Tensor, ranks: Sequence[tuple[LocalPlacement, torch.Tensor]]) -> torch.Tensor:
    """Put the ranks' views where their boxes say, after checking that distinct boxes tile the tensor."""
    out = torch.full_like(full, -1)
    distinct: dict[Box, torch.Tensor] = {}
    for placed, local in ranks:
        assert placed.local == tuple(local.shape)
        for box, view in placed.views(local):
            assert torch.equal(distinct.setdefault(box, view), view)
    for box, view in distinct.items():
        out[box.slices] = view
    offset = boxes.pad([b.offset for b in distinct], full.dim(), 0)
    length = boxes.pad([b.length for b in distinct], full.dim(), 1)
    assert boxes.flaw(Box.whole(full.shape), offset, length) is None
    return out


def distribute(full: torch.Tensor, placements: Sequence[Placement], mesh: Sequence[int], at: Sequence[int]) -> torch.Tensor:
    """The local tensor at a mesh coordinate, cut by torch's own placements."""
    local = full
    for axis, p in enumerate(placements):
        if not p.is_replicate():
            local = p._split_tensor(local, mesh[axis], with_padding=False)[0][at[axis]]  # type: ignore[attr-defined]
    return local


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[Placement]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements: list[Placement] = []
    for axis in range(len(mesh)):
        dim = draw(st.integers(0, len(shape) - 1))
        factor = math.prod(mesh[axis + 1 :])
        options: list[Placement] = [Replicate(), Shard(dim)]
        if factor > 1:
            options.append(_StridedShard(dim, split_factor=factor))
        placements.append(draw(st.sampled_from(options)))
    return shape, mesh, placements


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_boxes_of_any_placements_tile_the_tensor_and_are_where_torch_puts_them(
    layout: tuple[list[int], list[int], list[Placement]],
) -> None:
    shape, mesh, placements = layout
    full = torch.arange(math.prod(shape)).view(shape)
    ranks = []
    for at in itertools.product(*map(range, mesh)):
        placed = grid(shape, cuts_of(placements, mesh, at))
        local_shape, _ = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
        assert placed.local == tuple(local_shape)
        ranks.append((placed, distribute(full, placements, mesh, at)))
    assert torch.equal(cover(full, ranks), full)


@pytest.mark.parametrize(("rows", "ranks"), [(1023, 4), (2, 4), (4096, 30), (4, 3), (1, 64), (0, 2)])
def test_uneven_and_empty_shards_cover_every_row(rows: int, ranks: int) -> None:
    full = torch.arange(rows * 2).view(rows, 2)
    chunks = [*full.chunk(ranks), *[full[:0]] * ranks][:ranks]
    placed = [grid((rows, 2), [Cut(0, ranks, r)]) for r in range(ranks)]
    assert [p.local[0] for p in placed] == [len(c) for c in chunks]
    assert torch.equal(cover(full, list(zip(placed, chunks, strict=True))), full)
    assert all(held.box.volume for p in placed for held in p.held)


def test_fsdp_over_tp_on_one_dimension_is_as_many_boxes_as_ranks() -> None:
    full = torch.arange(256 * 256).view(256, 256)
    ranks = []
    for dp, tp in itertools.product(range(2), range(2)):
        placed = grid((256, 256), [Cut(0, 2, dp, factor=2), Cut(0, 2, tp)])
        assert len(placed.held) == 1
        ranks.append((placed, full.chunk(2)[tp].chunk(2)[dp]))
    assert sum(volume(p) for p, _ in ranks) == 65536
    assert torch.equal(cover(full, ranks), full)


@pytest.mark.parametrize("rows", range(40))
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 5), (4, 3)])
def test_inner_first_gives_the_rows_that_fsdp_cuts_from_tp_shards(rows: int, dp: int, tp: int) -> None:
    full = torch.arange(rows)
    splits = [Split(0, 0, dp, factor=tp), Split(1, 0, tp)]
    order = inner_first(splits)
    assert order is not None
    for at in itertools.product(range(dp), range(tp)):
        inner = [*full.chunk(tp), *[full[:0]] * tp][at[1]]
        local = [*inner.chunk(dp), *[full[:0]] * dp][at[0]]
        placed = grid((rows,), [split.at(at) for split in order])
        assert placed.local == tuple(local.shape)
        for box, view in placed.views(local):
            assert torch.equal(full[box.slices], view)
        if is_even((rows,), splits):
            assert placed == grid((rows,), [split.at(at) for split in splits])


def test_strided_splits_with_foreign_factors_have_no_inner_order() -> None:
    assert inner_first([Split(0, 0, 2, factor=3), Split(1, 0, 2)]) is None
    assert inner_first([Split(0, 0, 2, factor=2), Split(1, 1, 2)]) is None


def test_a_strided_shard_alone_holds_several_boxes() -> None:
    placed = grid((8, 3), [Cut(0, 2, 0, factor=2)])
    assert [str(held.box) for held in placed.held] == ["[0:2, 0:3]", "[4:6, 0:3]"]
    assert placed.local == (4, 3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_flat_ranges_of_any_cut_tile_the_tensor_in_few_boxes(shape: list[int], data: st.DataObject) -> None:
    full = torch.arange(math.prod(shape)).view(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, full.numel()), max_size=4)))
    ranks = []
    for start, stop in itertools.pairwise([0, *cuts, full.numel()]):
        local = torch.cat([torch.full((3,), -7), full.reshape(-1)[start:stop]])
        placed = flat(shape, start, stop, len(local), at=3)
        assert len(placed.held) <= max(1, 2 * len(shape) - 1)
        ranks.append((placed, local))
    assert torch.equal(cover(full, ranks), full)


def test_views_share_memory_with_the_local_tensor() -> None:
    for placed, local in [
        (whole((3, 4)), torch.zeros(4, 3).t()),
        (whole(()), torch.zeros(())),
        (shard((6, 4), (2, 1), (3, 2)), torch.zeros(3, 5)[:, ::3]),
        (flat((3, 4), 2, 9, 10, at=1), torch.zeros(10)),
        (grid((8, 3), [Cut(0, 2, 1, factor=2)]), torch.zeros(4, 3)),
    ]:
        for _, view in placed.views(local):
            view.fill_(1)
        assert int(local.sum()) == volume(placed)


def test_clipping_keeps_the_common_corner() -> None:
    local = torch.arange(12).view(4, 3)
    placed = clip(shard((8, 3), (4, 0), (4, 3)), (6, 3))
    assert [(str(box), view.tolist()) for box, view in placed.views(local)] == [("[4:6, 0:3]", local[:2].tolist())]
    assert clip(shard((8, 3), (4, 0), (4, 3)), (3, 3)).held == ()
