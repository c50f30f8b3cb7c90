"""DeepSpeed's flat geometry: whatever the shapes, ranks and paddings, the boxes put every element back where it was."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucformat.formats.deepspeed_flat import (
    EvenSlices,
    Geometry,
    ParameterSlices,
    fill_buffers,
    runs_of_slice,
    share,
    slots,
    starts_of_slices,
)

Floats = NDArray[np.float64]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=6)
WORLD = st.integers(1, 9)
PADDING = -1.0  # no element has this value


def parameters(shapes: list[tuple[int, ...]]) -> dict[str, Floats]:
    """Parameters whose elements are all different."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return {
        f"p{i}": np.arange(end - math.prod(s), end, dtype=np.float64).reshape(s)
        for i, (s, end) in enumerate(zip(shapes, ends, strict=True))
    }


def shapes_of(params: dict[str, Floats]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in params.items()}


def rebuild(geometry: Geometry, buffers: list[Floats]) -> dict[str, Floats]:
    """Put the ranks' buffers back together through runs and boxes; every element must be written exactly once."""
    out = {name: np.full(shape, np.nan) for name, shape in geometry.shapes.items()}
    spread = geometry.runs([len(buffer) for buffer in buffers])
    assert spread is not None
    for buffer, runs in zip(buffers, spread, strict=True):
        for run in runs:
            boxes = list(run.boxes())
            assert len(boxes) <= max(1, 2 * len(run.shape) - 1)
            for at, box in boxes:
                assert np.isnan(out[run.name][box.slices]).all()
                out[run.name][box.slices] = buffer[at : at + box.volume].reshape(box.length)
    return out


def same(a: dict[str, Floats], b: dict[str, Floats]) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


@given(SHAPES, WORLD, st.data())
def test_even_slices_give_every_element_back_whatever_padding_is_stored(
    shapes: list[tuple[int, ...]], world: int, data: st.DataObject
) -> None:
    params = parameters(shapes)
    paddings = data.draw(st.lists(st.integers(0, 7), min_size=len(shapes), max_size=len(shapes)))
    parts = [np.concatenate([array.ravel(), np.full(pad, PADDING)]) for array, pad in zip(params.values(), paddings, strict=True)]
    flat = np.concatenate(parts)
    total, step = len(flat), data.draw(st.sampled_from([1, 2])) * world
    padded = np.concatenate([flat, np.full(-total % step, PADDING)])
    slices = np.split(padded, world)
    geometry = EvenSlices(shapes_of(params), paddings, tail=2 * world - 1)
    assert same(rebuild(geometry, slices), params)
    lean = [part[: max(0, min(len(part), total - rank * len(part)))] for rank, part in enumerate(slices)]
    assert same(rebuild(geometry, lean), params)


@given(SHAPES, WORLD)
def test_parameter_slices_give_every_element_back(shapes: list[tuple[int, ...]], world: int) -> None:
    params = parameters(shapes)
    cut = {name: np.concatenate([a.ravel(), np.full(-a.size % world, PADDING)]).reshape(world, -1) for name, a in params.items()}
    buffers = [np.concatenate([parts[rank] for parts in cut.values()]) for rank in range(world)]
    assert same(rebuild(ParameterSlices(shapes_of(params)), buffers), params)


@given(SHAPES, WORLD, st.integers(1, 20))
def test_sub_groups_are_found_from_the_sizes_of_the_buffers(shapes: list[tuple[int, ...]], world: int, limit: int) -> None:
    named = {f"p{i}": shape for i, shape in enumerate(shapes) if math.prod(shape)}
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in named.items():
        groups[-1][name] = shape
        if sum(share(math.prod(s), world) for s in groups[-1].values()) >= limit:
            groups.append({})
    groups = [group for group in groups if group]
    sizes = [sum(share(math.prod(s), world) for s in group.values()) for group in groups]
    assert fill_buffers(named, sizes, world) == groups
    if sizes:
        assert fill_buffers(named, [*sizes[:-1], sizes[-1] + 1], world) is None
        assert fill_buffers(named, sizes[:-1], world) is None


@given(SHAPES, st.integers(0, 200), st.integers(0, 200))
def test_a_run_starts_where_the_slice_does(shapes: list[tuple[int, ...]], a: int, b: int) -> None:
    placed, total = slots({f"p{i}": shape for i, shape in enumerate(shapes)})
    start, stop = sorted((min(a, total), min(b, total)))
    runs = runs_of_slice(placed, start, stop)
    assert [run.at for run in runs] == [sum(r.stop - r.start for r in runs[:i]) for i in range(len(runs))]
    assert sum(run.stop - run.start for run in runs) == stop - start


def test_slices_that_leave_a_hole_are_no_slices() -> None:
    assert starts_of_slices([4, 4, 4], 12) == [0, 4, 8]
    assert starts_of_slices([4, 4, 2], 10) == [0, 4, 8]
    assert starts_of_slices([4, 4, 0], 8) == [0, 4, 8]
    assert starts_of_slices([4, 3, 4], 11) is None
    assert starts_of_slices([4, 4, 5], 13) is None
    assert starts_of_slices([4, 4, 2], 11) is None


def test_buffers_far_larger_than_the_parameters_are_not_theirs() -> None:
    geometry = EvenSlices({"w": (4, 4)}, [0], tail=7)
    assert geometry.runs([4, 4, 4, 4]) is not None
    assert geometry.runs([8, 8, 8, 8]) is None
    assert ParameterSlices({"w": (4, 4)}).runs([8, 8, 8]) is None
