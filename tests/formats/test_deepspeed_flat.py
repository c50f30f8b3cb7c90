"""DeepSpeed's flat geometry: whatever the shapes, ranks and paddings, the boxes put every element back where it was."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucformat.box import Box, flat_range, pad
from ucformat.formats.deepspeed.flat import (
    EvenSlices,
    Geometry,
    ParameterSlices,
    cut,
    fill_buffers,
    slice_elements,
    starts_of_slices,
)

Floats = NDArray[np.float64]
Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=6)
WORLD = st.integers(1, 9)
PADDING = -1.0  # no element has this value


def parameters(shapes: Shapes) -> dict[str, Floats]:
    """Parameters whose elements are all different."""
    items = [math.prod(shape) for shape in shapes]
    ends = np.cumsum(items)
    return {
        f"p{i}": np.arange(end - n, end, dtype=np.float64).reshape(shape)
        for i, (shape, n, end) in enumerate(zip(shapes, items, ends, strict=True))
    }


def shapes_of(params: dict[str, Floats]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in params.items()}


def rebuild(geometry: Geometry, buffers: list[Floats]) -> dict[str, Floats]:
    """Put the ranks' buffers back together box by box; every element must be written exactly once, in few boxes."""
    names = list(geometry.shapes)
    out = {name: np.full(shape, np.nan) for name, shape in geometry.shapes.items()}
    found = geometry.pieces([len(buffer) for buffer in buffers])
    assert found is not None
    for param, rank, at, offset, length in zip(found.param, found.rank, found.at, found.offset, found.length, strict=True):
        target, ndim = out[names[param]], out[names[param]].ndim
        box = Box(tuple(offset[:ndim]), tuple(length[:ndim]))
        assert box.inside(target.shape)
        assert (offset[ndim:] == 0).all()
        assert (length[ndim:] == 1).all()
        assert np.isnan(target[box.slices]).all()
        target[box.slices] = buffers[rank][at : at + box.volume].reshape(box.length)
    for (param, _), boxes in Counter(zip(found.param.tolist(), found.rank.tolist(), strict=True)).items():
        assert boxes <= max(1, 2 * out[names[param]].ndim - 1)
    return out


def same(a: dict[str, Floats], b: dict[str, Floats]) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


@given(SHAPES, WORLD, st.data())
def test_even_slices_give_every_element_back_whatever_padding_is_stored(shapes: Shapes, world: int, data: st.DataObject) -> None:
    params = parameters(shapes)
    paddings = data.draw(st.lists(st.integers(0, 7), min_size=len(shapes), max_size=len(shapes)))
    parts = [np.concatenate([array.ravel(), np.full(n, PADDING)]) for array, n in zip(params.values(), paddings, strict=True)]
    flat = np.concatenate(parts)
    total, step = len(flat), data.draw(st.sampled_from([1, 2])) * world
    slices = np.split(np.concatenate([flat, np.full(-total % step, PADDING)]), world)
    geometry = EvenSlices(shapes_of(params), paddings, tail=2 * world - 1)
    assert same(rebuild(geometry, slices), params)
    lean = [part[: max(0, min(len(part), total - rank * len(part)))] for rank, part in enumerate(slices)]
    assert same(rebuild(geometry, lean), params)


@given(SHAPES, WORLD)
def test_parameter_slices_give_every_element_back(shapes: Shapes, world: int) -> None:
    params = parameters(shapes)
    sliced = [np.concatenate([a.ravel(), np.full(-a.size % world, PADDING)]).reshape(world, -1) for a in params.values()]
    buffers = [np.concatenate([parts[rank] for parts in sliced]) for rank in range(world)]
    assert same(rebuild(ParameterSlices(shapes_of(params)), buffers), params)


@given(st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=4), st.data()), min_size=1, max_size=5))
def test_ranges_are_cut_on_arrays_as_one_by_one(rows: list[tuple[list[int], st.DataObject]]) -> None:
    ranges = [
        sorted((data.draw(st.integers(0, math.prod(shape))), data.draw(st.integers(0, math.prod(shape))))) for shape, data in rows
    ]
    ndim = max(len(shape) for shape, _ in rows)
    start, stop = np.array(ranges, dtype=np.int64).T
    row, begin, offset, length = cut(pad([shape for shape, _ in rows], ndim, 1), start, stop)
    for i, (shape, _) in enumerate(rows):
        mine = np.flatnonzero(row == i)
        mine = mine[np.argsort(begin[mine])]
        expected = flat_range(shape, *ranges[i])
        assert [Box(tuple(offset[r, : len(shape)]), tuple(length[r, : len(shape)])) for r in mine] == expected
        volumes = [box.volume for box in expected]
        assert begin[mine].tolist() == [ranges[i][0] + sum(volumes[:j]) for j in range(len(volumes))]


@given(SHAPES, WORLD, st.integers(1, 20))
def test_sub_groups_are_found_from_the_sizes_of_the_buffers(shapes: Shapes, world: int, limit: int) -> None:
    named = {f"p{i}": shape for i, shape in enumerate(shapes) if math.prod(shape)}
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in named.items():
        groups[-1][name] = shape
        if slice_elements(groups[-1], world) >= limit:
            groups.append({})
    groups = [group for group in groups if group]
    sizes = [slice_elements(group, world) for group in groups]
    assert fill_buffers(named, sizes, world) == groups
    if sizes:
        assert fill_buffers(named, [*sizes[:-1], sizes[-1] + 1], world) is None
        assert fill_buffers(named, sizes[:-1], world) is None


def test_slices_that_leave_a_hole_are_no_slices() -> None:
    assert starts_of_slices([4, 4, 4], 12) == [0, 4, 8]
    assert starts_of_slices([4, 4, 2], 10) == [0, 4, 8]
    assert starts_of_slices([4, 4, 0], 8) == [0, 4, 8]
    assert starts_of_slices([4, 3, 4], 11) is None
    assert starts_of_slices([4, 4, 5], 13) is None
    assert starts_of_slices([4, 4, 2], 11) is None


def test_buffers_far_larger_than_the_parameters_are_not_theirs() -> None:
    geometry = EvenSlices({"w": (4, 4)}, [0], tail=7)
    assert geometry.pieces([4, 4, 4, 4]) is not None
    assert geometry.pieces([8, 8, 8, 8]) is None
    assert ParameterSlices({"w": (4, 4)}).pieces([8, 8, 8]) is None


def test_many_ranks_of_many_parameters_take_no_loop_over_fragments() -> None:
    """1,000 ranks × 500 parameters: half a million runs, in the time of a few array operations."""
    geometry = ParameterSlices({f"p{i}": (64, 33) for i in range(500)})
    found = geometry.pieces([slice_elements(geometry.shapes, 1000)] * 1000)
    assert found is not None
    assert int(np.prod(found.length, axis=1).sum()) == 500 * 64 * 33
