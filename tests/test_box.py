"""Boxes: cutting flat ranges, intersecting, proving that boxes tile."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat import box as boxes
from ucformat.box import Box, clip, flat_range, flaw, volumes

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    n = math.prod(shape)
    start = draw(st.integers(0, n))
    return shape, start, draw(st.integers(start, n))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = True) -> Box:
    offset = tuple(draw(st.integers(0, max(0, n - 1))) for n in shape)
    length = tuple(draw(st.integers(0 if empty or n == 0 else 1, n - o)) for o, n in zip(offset, shape, strict=True))
    return Box(offset, length)


@given(flat_ranges())
def test_a_flat_range_is_at_most_2n_minus_1_boxes_that_hold_exactly_its_elements_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    cut = flat_range(shape, start, stop)
    assert len(cut) <= max(1, 2 * len(shape) - 1)
    index = np.arange(math.prod(shape)).reshape(shape)
    elements = [int(x) for box in cut for x in index[box.slices].ravel()]
    assert elements == list(range(start, stop))
    assert all(box.inside(shape) and box.volume > 0 for box in cut)


@given(flat_ranges())
def test_each_box_of_a_flat_range_is_contiguous(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    index = np.arange(math.prod(shape)).reshape(shape)
    for box in flat_range(shape, start, stop):
        inside = index[box.slices].ravel()
        assert (np.diff(inside) == 1).all()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_flat_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not in a tensor"):
        flat_range((2, 3), start, stop)


def test_a_flat_range_of_a_huge_tensor_is_cut_without_counting_through_it() -> None:
    shape = (1 << 20, 1 << 20, 1 << 20)
    cut = flat_range(shape, 12345, math.prod(shape) - 54321)
    assert len(cut) == 5
    assert sum(box.volume for box in cut) == math.prod(shape) - 54321 - 12345


@given(st.data())
def test_intersections_agree_with_masks_scalar_and_vectorised(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    mask = np.zeros(shape, dtype=int)
    mask[a.slices] += 1
    mask[b.slices] += 1
    common = a.intersect(b)
    assert (common.volume if common else 0) == int((mask == 2).sum())
    if common:
        assert (mask[common.slices] == 2).all()
        inner = np.arange(math.prod(shape)).reshape(shape)[a.slices][common.relative_to(a).slices]
        assert (inner == np.arange(math.prod(shape)).reshape(shape)[common.slices]).all()
    rows = [boxes.pad([x], len(shape), 0) for x in (a.offset, a.length, b.offset, b.length)]
    low, length = clip(*rows)
    if common:
        assert Box(tuple(map(int, low[0])), tuple(map(int, length[0]))) == common
        assert volumes(length)[0] == common.volume
    else:
        assert (length <= 0).any()


@given(st.data())
def test_flaw_agrees_with_counting_every_element(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    target = data.draw(boxes_in(shape, empty=False))
    held = [found for box in data.draw(st.lists(boxes_in(shape), max_size=6)) if (found := box.intersect(target)) is not None]
    check_flaw(shape, target, held)


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """Random guillotine cuts of a box."""
    cuttable = [d for d, n in enumerate(box.length) if n > 1]
    if depth == 0 or not cuttable or draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.length[d] - 1))
    low = Box(box.offset, (*box.length[:d], at, *box.length[d + 1 :]))
    high = Box(
        (*box.offset[:d], box.offset[d] + at, *box.offset[d + 1 :]), (*box.length[:d], box.length[d] - at, *box.length[d + 1 :])
    )
    return [*draw(tilings(low, depth - 1)), *draw(tilings(high, depth - 1))]


@given(st.data())
def test_any_tiling_has_no_flaw_and_losing_or_doubling_a_box_is_one(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    whole = Box.whole(shape)
    tiles = data.draw(st.permutations(data.draw(tilings(whole))))
    check_flaw(shape, whole, tiles)
    assert flaw(whole, *columns(tiles, len(shape))) is None
    i = data.draw(st.integers(0, len(tiles) - 1))
    check_flaw(shape, whole, [*tiles[:i], *tiles[i + 1 :]])
    check_flaw(shape, whole, [*tiles, tiles[i]])


def columns(held: list[Box], ndim: int) -> tuple[boxes.Ints, boxes.Ints]:
    offset, length = boxes.pad([box.offset for box in held], ndim, 0), boxes.pad([box.length for box in held], ndim, 1)
    return offset, length


def check_flaw(shape: tuple[int, ...], target: Box, held: list[Box]) -> None:
    """`flaw` finds one exactly when some element is not held once, and names a box that is really so."""
    count = np.zeros(shape, dtype=int)
    for box in held:
        count[box.slices] += 1
    found = flaw(target, *columns(held, len(shape)))
    assert (found is None) == bool((count[target.slices] == 1).all())
    if found is not None:
        assert found.box.volume > 0
        assert found.box.intersect(target) == found.box
        inside = count[found.box.slices]
        assert (inside > 1).all() if found.overlap else (inside == 0).all()


def test_empty_boxes_neither_fill_nor_overlap() -> None:
    held = [Box((0,), (4,)), Box((2,), (0,))]
    assert flaw(Box((0,), (4,)), *columns(held, 1)) is None


def test_an_empty_target_needs_nothing() -> None:
    assert flaw(Box((0, 0), (0, 3)), *columns([], 2)) is None


def test_a_grid_of_ten_thousand_boxes_is_proven_and_its_one_hole_found() -> None:
    tiles = [Box((3 * i, 5 * j), (3, 5)) for i, j in itertools.product(range(100), range(100))]
    target = Box((0, 0), (300, 500))
    assert flaw(target, *columns(tiles, 2)) is None
    hole = tiles.pop(5050)
    assert flaw(target, *columns(tiles, 2)) == boxes.Flaw(hole, overlap=False)


@pytest.mark.parametrize(
    ("box", "shape", "inside"),
    [
        (Box((0, 0), (2, 3)), (2, 3), True),
        (Box((0, 1), (2, 3)), (2, 3), False),
        (Box((-1, 0), (1, 1)), (2, 3), False),
        (Box((0, 0), (-1, 3)), (2, 3), False),
        (Box((2, 0), (0, 3)), (2, 3), True),
        (Box((0,), (2,)), (2, 3), False),
        (Box((), ()), (), True),
    ],
)
def test_inside_means_within_every_dimension(box: Box, shape: tuple[int, ...], inside: bool) -> None:
    assert box.inside(shape) is inside


def test_a_box_reads_like_slices() -> None:
    assert str(Box((0, 4), (2, 3))) == "[0:2, 4:7]"
