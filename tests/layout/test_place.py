"""Tensors that are cut by a rule and put together by it are what they were, whatever the mesh and the rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.layout.cuts import Cut
from ucformat.layout.language import Pad, Rule, Unflatten
from ucformat.layout.place import Placed, from_shards, from_whole

MESH = {"dp": 2, "tp": 3}
COORDS = [dict(zip(MESH, at, strict=True)) for at in itertools.product(*map(range, MESH.values()))]
Array = np.ndarray[Any, np.dtype[Any]]


def _slices(at: tuple[int, ...], length: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(at, length, strict=True))


def split(whole: Array, placed: Placed) -> list[Array]:
    """Each rank's shard; padding is -1."""
    shards = [np.full(shape, -1, whole.dtype) for shape in placed.shards]
    for shard, cuts in zip(shards, placed.cuts, strict=True):
        for cut in cuts:
            shard[_slices(cut.shard, cut.length)] = whole[_slices(cut.whole, cut.length)]
    return shards


def join(shards: list[Array], placed: Placed) -> Array:
    """The whole of shards, whose copies must be equal."""
    whole = np.full(placed.shape, -2, shards[0].dtype)
    for shard, cuts in zip(shards, placed.cuts, strict=True):
        for cut in cuts:
            held = whole[_slices(cut.whole, cut.length)]
            new = shard[_slices(cut.shard, cut.length)]
            assert ((held == -2) | (held == new)).all()
            held[:] = new
    return whole


def numbered(*shape: int) -> Array:
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def rules_and_shapes(draw: st.DrawFn) -> tuple[Rule, tuple[int, ...]]:
    ndim = draw(st.integers(1, 3))
    shard = {axis: draw(st.integers(0, ndim - 1)) for axis in MESH if draw(st.booleans())}
    ranks = [math.prod(MESH[axis] for axis, d in shard.items() if d == dim) for dim in range(ndim)]
    shape = [r * draw(st.integers(1, 2)) for r in ranks]
    fields: dict[str, Any] = {}
    if len(set(shard.values())) == 1 and draw(st.booleans()):
        dim = next(iter(shard.values()))
        kind = draw(st.sampled_from(["equal", "lengths", "widths"]))
        if kind == "equal":
            fields["parts"] = draw(st.integers(1, 3))
            shape[dim] *= fields["parts"]
        elif kind == "lengths":
            fields["parts"] = [ranks[dim] * draw(st.integers(0, 2)) for _ in range(3)]
            shape[dim] = sum(fields["parts"])
        else:
            fields["parts"] = [[draw(st.integers(0, 3)) for _ in range(ranks[dim])] for _ in range(2)]
            shape[dim] = sum(map(sum, fields["parts"]))
    elif draw(st.booleans()):
        fields["uneven"] = True
        shape = [n + draw(st.integers(0, 2)) for n in shape]
    elif len(shard) > 0 and draw(st.booleans()):
        dim = next(iter(shard.values()))
        size = shape[dim] - draw(st.integers(0, ranks[dim] - 1))
        fields["pad"] = Pad(dim=dim, size=size, to=draw(st.sampled_from([None, shape[dim]])))
        shape[dim] = size
    return Rule(match="*", shard=shard, **fields), tuple(shape)


@given(rules_and_shapes())
@settings(max_examples=60, deadline=None)
def test_what_is_split_by_a_rule_is_joined_by_it(case: tuple[Rule, tuple[int, ...]]) -> None:
    rule, shape = case
    whole = numbered(*shape)
    out = from_whole(rule, MESH, COORDS, shape)
    shards = split(whole, out)
    back = from_shards(rule, MESH, COORDS, [shard.shape for shard in shards])
    assert back.shape == shape
    assert np.array_equal(join(shards, back), whole)
    assert back.padding == out.padding


def test_parts_of_a_fused_tensor_are_cut_by_themselves() -> None:
    qkv = numbered(8, 2)  # q of 4 rows, k and v of 2
    shards = split(qkv, from_whole(Rule(match="*", shard={"tp": 0}, parts=[4, 2, 2]), {"tp": 2}, [{"tp": 0}, {"tp": 1}], (8, 2)))
    assert [list(shard[:, 0] // 2) for shard in shards] == [[0, 1, 4, 6], [2, 3, 5, 7]]
    rest = from_whole(Rule(match="*", shard={"tp": 0}, parts=[4, -1, 2]), {"tp": 2}, [{"tp": 0}], (8, 2))
    assert rest.cuts[0] == from_whole(Rule(match="*", shard={"tp": 0}, parts=[4, 2, 2]), {"tp": 2}, [{"tp": 0}], (8, 2)).cuts[0]


def test_equal_parts_are_the_halves_of_a_gated_layer() -> None:
    shards = split(numbered(8), from_whole(Rule(match="*", shard={"tp": 0}, parts=2), {"tp": 2}, [{"tp": 0}, {"tp": 1}], (8,)))
    assert [list(shard) for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_stacked_tensor_is_cut_inside_each_of_what_is_stacked() -> None:
    rule = Rule(match="*", shard={"tp": 1}, unflatten=Unflatten(dim=0, sizes=[3, -1]))
    coords = [{"tp": 0}, {"tp": 1}]
    whole = numbered(12, 2)  # 3 experts of 4 rows
    shards = split(whole, out := from_whole(rule, {"tp": 2}, coords, (12, 2)))
    assert [list(shard[:, 0] // 2) for shard in shards] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    back = from_shards(rule, {"tp": 2}, coords, out.shards)
    assert np.array_equal(join(shards, back), whole)


def test_axes_that_cut_one_dimension_nest() -> None:
    shards = split(numbered(12), from_whole(Rule(match="*", shard={"tp": 0, "dp": 0}), MESH, COORDS, (12,)))
    assert [list(shard) for shard in shards] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_ranks_that_an_axis_does_not_cut_hold_copies() -> None:
    placed = from_whole(Rule(match="*", shard={"tp": 0}), MESH, COORDS, (3,))
    assert placed.cuts[:3] == placed.cuts[3:] == [[Cut((0,), (r,), (1,))] for r in range(3)]


@pytest.mark.parametrize(
    ("rule", "shape", "why"),
    [
        (Rule(match="*", shard={"tp": 0}), (4,), "4 does not divide over 3"),
        (Rule(match="*", shard={"tp": 1}), (3,), "1 dimensions, and the rule names dimension 1"),
        (Rule(match="*", shard={"tp": 0}, parts=2), (9,), "no multiple of 2 parts"),
        (Rule(match="*", shard={"tp": 0}, parts=[3, 3]), (9,), "parts are 6 long together, and it is 9"),
        (Rule(match="*", shard={"tp": 0}, parts=[[1, 1]]), (2,), "for 3 ranks"),
        (Rule(match="*", shard={"tp": 0}, pad=Pad(dim=0, size=8)), (7,), "true length of 8"),
        (Rule(match="*", unflatten=Unflatten(dim=0, sizes=[4, -1])), (6,), "does not divide"),
    ],
)
def test_a_shape_that_does_not_divide_is_refused(rule: Rule, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_whole(rule, MESH, COORDS, shape)


@pytest.mark.parametrize(
    ("rule", "shards", "why"),
    [
        (
            Rule(match="*", shard={"tp": 0}),
            [(2,), (3,), (2,)],
            "hold \\[2, 3, 2\\] along dimension 0, and should|does not divide",
        ),
        (Rule(match="*", shard={"tp": 0}), [(2, 2), (2, 3), (2, 2)], "another one"),
        (Rule(match="*"), [(2,), (3,), (2,)], "another one"),
        (Rule(match="*", shard={"tp": 0}, pad=Pad(dim=0, size=7)), [(2,), (2,), (2,)], "'pad' says 7"),
    ],
)
def test_shards_that_do_not_fit_each_other_are_refused(rule: Rule, shards: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        from_shards(rule, {"tp": 3}, [{"tp": i} for i in range(3)], shards)


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(ValueError, match="no rank holds its shard 1 along dimension 0"):
        from_shards(Rule(match="*", shard={"tp": 0}), {"tp": 3}, [{"tp": 0}, {"tp": 2}], [(2,), (2,)])
