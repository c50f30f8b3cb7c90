"""A declared layout cuts every tensor into boxes that tile it, whatever the mesh."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat import box as boxes
from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.errors import LayoutError
from ucformat.formats.target import OutputBox
from ucformat.reshard.selection.mesh_layout import MeshLayout, Rule, cut, parse


def by_rank(text: str, **shapes: tuple[int, ...]) -> list[dict[str, str]]:
    """For each rank, name → box as text."""
    pieces, ranks = cut(parse(text), [TensorSpec(name, "F32", shape) for name, shape in shapes.items()])
    return [{pieces[i].name: str(pieces[i].box) for i in held} for held in ranks]


def assert_tiles(spec: TensorSpec, pieces: list[OutputBox]) -> None:
    mine = [piece.box for piece in pieces if piece.name == spec.name]
    offset = boxes.pad([box.offset for box in mine], len(spec.shape), 0)
    length = boxes.pad([box.length for box in mine], len(spec.shape), 1)
    assert mine
    assert boxes.flaw(Box.whole(spec.shape), offset, length) is None


def test_without_rules_every_axis_cuts_dimension_0_the_first_outermost() -> None:
    assert by_rank("dp=2,tp=2", w=(8, 3)) == [
        {"w": "[0:2, 0:3]"},
        {"w": "[2:4, 0:3]"},
        {"w": "[4:6, 0:3]"},
        {"w": "[6:8, 0:3]"},
    ]


def test_uneven_cuts_are_those_of_torch_chunk_and_empty_ones_vanish() -> None:
    assert by_rank("dp=4", w=(5,)) == [{"w": "[0:2]"}, {"w": "[2:4]"}, {"w": "[4:5]"}, {}]
    assert by_rank("dp=4", w=(2,)) == [{"w": "[0:1]"}, {"w": "[1:2]"}, {}, {}]


def test_scalars_and_empty_tensors_have_one_owner() -> None:
    ranks = by_rank("dp=3", s=(), e=(0, 4))
    assert sorted(name for held in ranks for name in held) == ["e", "s"]


def test_a_rule_cuts_other_dimensions_and_replicates_over_axes_it_leaves_out() -> None:
    text = json.dumps({"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "*.wo", "tp": 1}, {"match": "norm"}]})
    ranks = by_rank(text, **{"a.wo": (4, 6), "norm": (10,), "w": (4,)})
    assert sorted(held["a.wo"] for held in ranks if "a.wo" in held) == ["[0:4, 0:3]", "[0:4, 3:6]"]
    assert sum("norm" in held for held in ranks) == 1
    assert [held["w"] for held in ranks] == ["[0:1]", "[1:2]", "[2:3]", "[3:4]"]


def test_replicas_go_to_the_rank_with_the_fewest_bytes() -> None:
    text = json.dumps({"mesh": {"dp": 3}, "rules": [{"match": "*"}]})
    ranks = by_rank(text, a=(8,), b=(8,), c=(8,), d=(4,))
    assert [len(held) for held in ranks] == [2, 1, 1]


def test_a_pipeline_takes_layers_in_order() -> None:
    ranks = by_rank("pp=2", embed=(4,), **{f"layers.{i}.w": (4,) for i in range(4)})
    assert set(ranks[0]) == {"embed", "layers.0.w", "layers.1.w"}
    assert set(ranks[1]) == {"layers.2.w", "layers.3.w"}


def test_a_rule_may_name_the_stage() -> None:
    text = json.dumps({"mesh": {"pp": 2, "tp": 2}, "rules": [{"match": "head", "pp": -1, "tp": 0}]})
    assert by_rank(text, head=(4,)) == [{}, {}, {"head": "[0:2]"}, {"head": "[2:4]"}]


def test_the_first_rule_that_matches_counts() -> None:
    layout = MeshLayout({"tp": 2}, (Rule("a.*", {"tp": 1}), Rule("*", {"tp": 0})))
    pieces, _ = cut(layout, [TensorSpec("a.b", "F32", (2, 2))])
    assert [str(piece.box) for piece in pieces] == ["[0:2, 0:1]", "[0:2, 1:2]"]


@given(
    st.dictionaries(st.sampled_from(["dp", "tp", "ep", "pp"]), st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5),
    st.data(),
)
def test_any_layout_tiles_any_tensor(mesh: dict[str, int], shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    specs = [TensorSpec(f"layers.{i}.w", "F32", shape) for i, shape in enumerate(shapes)]
    rules = []
    for spec in specs:
        axes = {}
        for axis, size in mesh.items():
            limit = size if axis == "pp" else len(spec.shape)
            if limit and data.draw(st.booleans()):
                axes[axis] = data.draw(st.integers(-limit, limit - 1))
        if data.draw(st.booleans()):
            rules.append(Rule(spec.name, axes))
    pieces, ranks = cut(MeshLayout(mesh, tuple(rules)), specs)
    for spec in specs:
        assert_tiles(spec, pieces)
    assert sorted(i for held in ranks for i in held) == list(range(len(pieces)))
    assert len(ranks) == int(np.prod(list(mesh.values())))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dp",
        "dp=",
        "dp=0",
        "dp=-1",
        "dp=two",
        "dp=2,dp=2",
        "=2",
        "dp=1000000",
        "{",
        "{}",
        '{"mesh": 2}',
        '{"mesh": {"dp": true}}',
        '{"mesh": {"dp": 2}, "rules": {}}',
        '{"mesh": {"dp": 2}, "rules": [{}]}',
        '{"mesh": {"dp": 2}, "rules": [{"match": "*", "tp": 0}]}',
        '{"mesh": {"dp": 2}, "rules": [{"match": "*", "dp": "0"}]}',
        '{"mesh": {"dp": 2}, "other": 1}',
    ],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        parse(text)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": -3}, {"pp": 2}])
def test_a_rule_that_does_not_fit_names_the_tensor(axes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="'w'"):
        cut(MeshLayout({"tp": 2, "pp": 2}, (Rule("*", axes),)), [TensorSpec("w", "F32", (4, 4))])
