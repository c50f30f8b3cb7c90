"""The value tree: splitting off tensors, exact JSON, merging over ranks."""

from __future__ import annotations

import argparse
import enum
import json
import math
import pathlib
import time
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucformat.errors import CoverageError, FormatError, UnrepresentableError, ValueConflictError
from ucformat.values.tree import (
    MAX_DEPTH,
    ArrayRef,
    Opaque,
    RankLocal,
    TensorRef,
    decode,
    encode,
    escape,
    join,
    join_name,
    merge,
    split,
    split_name,
    unescape,
)


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def same(a: Any, b: Any) -> bool:
    """Equality to the type, the bits of floats, the order of dicts; tensors and arrays by content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(map(same, sorted(a, key=encode), sorted(b, key=encode)))
    if isinstance(a, argparse.Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, RankLocal):
        return a.policy == b.policy and same(a.coords, b.coords) and same(a.values, b.values)
    if isinstance(a, Opaque):
        return a.class_name == b.class_name and same(a.state, b.state)
    return repr(a) == repr(b)


# lone surrogates too: Python strings hold them
text = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["$tuple", "$", "a/b", "%2F", ""])
integers = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**400])
numbers = st.sampled_from(
    [np.float32(0.1), np.int64(-5), np.bool_(True), np.complex64(1 - 0j), np.float16(math.nan), np.uint8(7)]
)
keys = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | text | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
atoms = (
    keys
    | st.floats()
    | st.complex_numbers()
    | numbers
    | st.sampled_from(
        [
            torch.Size([2, 0]),
            torch.Size([]),
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.device("cuda", 3),
            torch.device("cpu"),
            pathlib.PurePosixPath("a/b"),
            pathlib.PureWindowsPath("c:/d"),
            pathlib.Path("x"),
            TensorRef("a/b"),
            ArrayRef("c"),
        ]
    )
)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(text, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=3)
        | st.dictionaries(text, inner, max_size=3).map(lambda d: Opaque("a.B", d))
        | st.lists(inner, min_size=1, max_size=3).map(lambda v: RankLocal("keep", ({"dp": 0}, *[None] * (len(v) - 1)), tuple(v)))
        | st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), inner, max_size=3).map(lambda d: argparse.Namespace(**d))
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(trees)
def test_any_tree_comes_back_exactly(tree: object) -> None:
    data = encode(tree)
    back = decode(data, "ucf.json")
    assert same(back, tree)
    assert encode(back) == data
    json.loads(data, parse_constant=pytest.fail)  # JSON as others understand it: no NaN literals


@pytest.mark.parametrize(
    "tree",
    [
        {0: "int key", "0": "str key", True: "bool key", None: 1, (1, "a"): 2, 1.5: 3, b"x": 4},
        {},
        (),
        [],
        set(),
        {"a": {}, "b": (), "c": None},
        {"$tuple": [1, 2]},
        {"$tuple": 1, "other": 2},
        [-0.0, 0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 0.1],
        [1, 1.0, True, "1"],
        complex(-0.0, -math.inf),
        "\ud83d\ude00",  # two halves that must not come back as one character
        "line\u2028 \x00 \x7f \U0001f600",
        {"a": [True, None, 2**64]},
    ],
    ids=repr,
)
def test_awkward_trees_come_back_exactly(tree: object) -> None:
    assert same(decode(encode(tree), "f"), tree)


def test_nan_is_kept() -> None:
    back = decode(encode([math.nan, {"x": np.float32("nan")}]), "f")
    assert isinstance(back, list)
    assert math.isnan(back[0])
    assert np.isnan(back[1]["x"])


def test_equal_sets_give_equal_bytes() -> None:
    names = [f"layer{i}" for i in range(50)]
    assert encode(set(names)) == encode({*names[::-1]})


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "leaf",
    [
        Colour.RED,
        Text("x"),
        object(),
        defaultdict(int),
        Counter("a"),
        range(3),
        print,
        int,
        torch.zeros(1),
        np.zeros(1),
        np.str_("x"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_with_its_path(leaf: object) -> None:
    with pytest.raises(UnrepresentableError) as caught:
        encode({"args": [{"mode": leaf}]})
    assert caught.value.path == "args/0/mode"


def test_a_key_that_cannot_be_written_is_refused_with_its_path() -> None:
    with pytest.raises(UnrepresentableError, match="a/<key"):
        encode({"a": {Colour.RED: 1}})


def test_nests_up_to_the_limit_come_back_and_deeper_ones_are_refused() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH):
        tree = {0: tree}
    assert decode(encode(tree), "f") == tree
    assert join(*split(tree, is_tensor)) == tree
    with pytest.raises(UnrepresentableError, match="128 levels"):
        encode({0: tree})
    with pytest.raises(UnrepresentableError, match="128 levels"):
        split({0: tree}, is_tensor)


def test_a_cycle_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(UnrepresentableError, match="cycle"):
        encode(tree)
    with pytest.raises(UnrepresentableError, match="cycle"):
        split(tree, is_tensor)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"{",
        b"[1,]",
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b'{"a": 1, "a": 2}',
        b'{"$unknown": 1}',
        b'{"$tuple": 1}',
        b'{"$tuple": [], "b": 1}',
        b'{"$tuple": [], "$tuple": []}',
        b'{"$dict": [[1]]}',
        b'{"$dict": [[1, 2], [1, 3]]}',
        b'{"$dict": [[[], 2]]}',
        b'{"$dict": {"a": 1}}',
        b'{"$set": [1, 1]}',
        b'{"$set": [[]]}',
        b'{"$set": "ab"}',
        b'{"$int": 5}',
        b'{"$int": "12"}',
        b'{"$float": "1.0"}',
        b'{"$float": null}',
        b'{"$bytes": "#"}',
        b'{"$bytes": 1}',
        b'{"$complex": [1.0]}',
        b'{"$size": [1.5]}',
        b'{"$dtype": "load"}',
        b'{"$dtype": ["float32"]}',
        b'{"$device": "nowhere:1"}',
        b'{"$numpy": ["float32", "AAA="]}',
        b'{"$numpy": ["object", "AAAA"]}',
        b'{"$path": ["Path", "a"]}',
        b'{"$namespace": [1]}',
        b'{"$namespace": {"$dict": [[1, 2]]}}',
        b'{"$rank_local": {"policy": "keep", "coords": [], "values": [1]}}',
        b'{"$rank_local": {"policy": "keep", "coords": [{"dp": "x"}], "values": [1]}}',
        b'{"$rank_local": {}}',
        b'{"$opaque": {"class": 1, "state": 2}}',
        b'{"$opaque": {"class": "a"}}',
        b'{"$tensor": 1}',
        b'"\xff"',
        b'"\x01"',
        b"\xef\xbb\xbf1",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"$tuple":[' * 100_000,
    ],
    ids=lambda data: data[:40],
)
def test_malformed_json_is_refused_naming_the_file(hostile: bytes) -> None:
    with pytest.raises(FormatError, match=r"^ucf\.json"):
        decode(hostile, "ucf.json")


def test_long_lists_of_names_and_numbers_are_fast() -> None:
    tree = {"params": [f"layers.{i}.weight" for i in range(20_000)], "order": list(range(1_000_000))}
    start = time.process_time()
    assert decode(encode(tree), "f") == tree
    assert time.process_time() - start < 5  # about 0.3 s on a quiet core


# ---------------------------------------------------------------- names


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5))
def test_names_keep_their_components(parts: list[str]) -> None:
    assert split_name(join_name(*parts)) == parts
    assert "/" not in escape(parts[0])
    assert unescape(escape(parts[0])) == parts[0]


# ---------------------------------------------------------------- split and join

valid_text = st.text(max_size=6) | st.sampled_from(["$tuple", "a/b", "%2F", ""])
with_tensors = st.recursive(
    st.integers() | text | st.builds(lambda: torch.rand(2)) | st.builds(lambda: np.arange(3, dtype=np.int16)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(valid_text, inner, max_size=3)
        | st.dictionaries(st.integers(0, 2) | st.sampled_from(["0", "1"]), inner, max_size=3)
        | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3).map(lambda d: argparse.Namespace(**d))
        | st.lists(inner, max_size=2).map(lambda v: RankLocal("keep", (None,) * len(v), tuple(v)))
        | inner.map(lambda x: Opaque("a.B", x))
    ),
    max_leaves=10,
)


def unordered(tree: Any) -> Any:
    """The tree with str keys of plain dicts sorted: their order among tensors and values is not kept."""
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {key: unordered(tree[key]) for key in sorted(tree)}
    if type(tree) in {list, tuple}:
        return type(tree)(map(unordered, tree))
    return tree


@given(st.dictionaries(valid_text, with_tensors, max_size=3))
def test_join_is_the_inverse_of_split_also_through_json(tree: dict[str, Any]) -> None:
    values, tensors = split(tree, is_tensor)
    assert all(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in tensors.values())
    through = decode(encode(values), "f")
    stored = {name: torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf for name, leaf in tensors.items()}
    assert same(unordered(join(through, stored)), unordered(tree))


def test_tensors_below_dicts_leave_nothing_and_elsewhere_a_reference() -> None:
    w, m, a = torch.zeros(1), torch.ones(1), np.arange(2)
    tree = {
        "model": {"a/b": w, "empty": {}},
        "optimizer": {"state": {0: {"exp_avg": m}}, "lr": 1},
        "only": {"tensors": {"x": w}},
        "rng": ("MT", a),
        "kept": OrderedDict(t=w),
    }
    values, tensors = split(tree, is_tensor)
    assert list(tensors) == ["model/a%2Fb", "optimizer/state/0/exp_avg", "only/tensors/x", "rng/1", "kept/t"]
    assert values == {
        "model": {"empty": {}},
        "optimizer": {"state": {0: {"exp_avg": TensorRef("optimizer/state/0/exp_avg")}}, "lr": 1},
        "rng": ("MT", ArrayRef("rng/1")),
        "kept": OrderedDict(),
    }
    assert type(values["kept"]) is OrderedDict
    assert same(unordered(join(values, tensors)), unordered(tree))


def test_keys_that_look_alike_give_tensors_different_names() -> None:
    tree = {"state": {0: torch.zeros(1), "0": torch.ones(1)}}
    values, tensors = split(tree, is_tensor)
    assert len(tensors) == 2
    assert same(join(values, tensors), tree)


def test_names_alone_are_enough_to_build_a_tree() -> None:
    w = torch.zeros(1)
    assert join({}, {"model/a.b": w, "model/c%2Fd": w}) == {"model": {"a.b": w, "c/d": w}}


def test_split_does_not_change_its_input() -> None:
    tree = {"a": [1, 2], "b": {"c": torch.zeros(1)}}
    values, _ = split(tree, is_tensor)
    assert isinstance(values, dict)
    values["a"].append(3)
    assert tree["a"] == [1, 2]
    assert "c" in tree["b"]


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(1),
        {"a": {torch.zeros(1)}},
        {"\ud800": torch.zeros(1)},
        {"a": np.array(["text"])},
        {"a": np.array([object()])},
        {"a": np.zeros(2, dtype=">i4")},
        {"a": np.zeros(2, dtype=np.longdouble)},
    ],
    ids=["root", "set", "surrogate", "text", "objects", "big-endian", "longdouble"],
)
def test_tensors_that_could_not_come_back_are_refused(tree: object) -> None:
    with pytest.raises(UnrepresentableError):
        split(tree, is_tensor)


def test_join_refuses_a_reference_without_its_tensor() -> None:
    with pytest.raises(CoverageError, match="'a/0'"):
        join({"a": [TensorRef("a/0")]}, {})


@pytest.mark.parametrize("values", [{"a": 1}, {"a": {"b": 1}}, [1]])
def test_join_refuses_a_tensor_that_collides_with_a_value(values: object) -> None:
    with pytest.raises(FormatError, match="'a/b'"):
        join(values, {"a/b": torch.zeros(1)})


# ---------------------------------------------------------------- merge


@given(trees.filter(lambda tree: "RankLocal" not in repr(tree)), st.integers(1, 4))
def test_equal_trees_merge_to_themselves(tree: object, ranks: int) -> None:
    assert same(merge([tree] * ranks), tree)


def test_ranks_of_a_pipeline_merge_by_key_and_their_parameters_unite() -> None:
    first = {"step": 7, "optimizer": {"param_groups": [{"lr": 0.1, "params": ["a", "tied"]}]}, "stage0": {"x": 1}}
    last = {
        "step": 7,
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["tied", "b"]}, {"lr": 0.2, "params": ["c"]}]},
        "stage1": {},
    }
    assert merge([first, last]) == {
        "step": 7,
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["a", "tied", "b"]}, {"lr": 0.2, "params": ["c"]}]},
        "stage0": {"x": 1},
        "stage1": {},
    }


@pytest.mark.parametrize(
    ("trees", "path", "ranks"),
    [
        ([{"a": 1}, {"a": 1}, {"a": 2}], "a", (0, 2)),
        ([{"a": 1}, {"a": 1.0}], "a", (0, 1)),
        ([{"a": 1}, {"a": True}], "a", (0, 1)),
        ([{"a": 0.0}, {"a": -0.0}], "a", (0, 1)),
        ([{"a": [1, 2]}, {"a": [1]}], "a", (0, 1)),
        ([{"a": [{"b": 1}]}, {"a": [{"b": 2}]}], "a/0/b", (0, 1)),
        ([{"a": {1}}, {"a": {2}}], "a", (0, 1)),
        ([{"o": {"param_groups": [{"lr": x, "params": ["p"]}]}} for x in (1, 2)], "o/param_groups/0/lr", (0, 1)),
    ],
    ids=str,
)
def test_values_that_differ_name_their_path_and_ranks(trees: list[object], path: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueConflictError) as caught:
        merge(trees)
    assert (caught.value.path, caught.value.ranks) == (path, ranks)


def test_rank_local_items_are_strung_together_even_when_equal() -> None:
    held = [{"rng": RankLocal("keep", ({"dp": rank},), (5,), first=rank), "step": 1} for rank in range(3)]
    assert merge(held) == {"rng": RankLocal("keep", ({"dp": 0}, {"dp": 1}, {"dp": 2}), (5, 5, 5)), "step": 1}


def test_rank_local_tensors_are_named_by_their_rank() -> None:
    values, tensors = split({"rng": RankLocal("keep", (None,), (torch.zeros(1),), first=3)}, is_tensor)
    assert list(tensors) == ["rng/3"]
    assert same(join(values, tensors), {"rng": RankLocal("keep", (None,), (torch.zeros(1),), first=3)})


def test_rank_local_items_of_different_policies_are_refused() -> None:
    with pytest.raises(ValueConflictError, match="policies"):
        merge([{"rng": RankLocal(policy, (None,), (5,), first=rank)} for rank, policy in enumerate(["keep", "modulo"])])


def test_equal_nan_merges() -> None:
    merged = merge([{"a": math.nan, "b": 1}, {"a": math.nan, "c": 2}])
    assert isinstance(merged, dict)
    assert math.isnan(merged["a"])
