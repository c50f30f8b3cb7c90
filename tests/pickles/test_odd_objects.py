"""One odd object must not cost the file: it is shown by class and path, and everything else is read."""

from __future__ import annotations

import collections
import enum
import functools
import operator
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucformat
from ucformat.errors import UnsupportedError
from ucformat.pickles.unpickle import to_values, unpickle
from ucformat.values import Opaque, decode, encode


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Outer:
    class Inner:
        """A class within a class: Python pickles it as getattr(Outer, "Inner")."""

        def __init__(self) -> None:
            self.x = 1


class Node:
    """Refers to its parent, as the nodes of omegaconf do."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.value = 5

    def method(self) -> None: ...


def tree_of_nodes() -> Node:
    top = Node()
    top.children = [Node(top), Node(top)]
    return top


ODD: dict[str, Any] = {
    "object of a class within a class": Outer.Inner(),
    "class within a class": Outer.Inner,
    "partial": functools.partial(max, 1),
    "bound method": Node().method,
    "bound method of a plain value": "x".upper,
    "itemgetter": operator.itemgetter(1),
    "function": print,
    "enum in a set": {Colour.RED, Colour.GREEN},
    "enum in a frozenset": frozenset({Colour.RED}),
    "enum as key": {Colour.RED: 1, Colour.GREEN: 2},
    "enum in a key": {(Colour.RED, 1): 1, (Colour.GREEN, 1): 2},
    "OrderedDict as value": collections.OrderedDict,
    "device as value": torch.device,
    "bytes as value": bytes,
    "storage class": torch.FloatStorage,
    "rebuild function": torch._utils._rebuild_tensor_v2,
    "classes in a set": {bytes, set},
    "dtype in a set": {np.dtype("float32")},
    "parent": tree_of_nodes(),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "datetime64": np.datetime64("2020-01-01"),
    "long double": np.longdouble(1),
    "long doubles": np.ones(2, dtype=np.longdouble),
    "objects": np.array([object], dtype=object),
    "text array": np.array(["a"]),
    "type as key": {bytes: 1, int: 2},
}


def leaks(value: object) -> bool:
    """Whether an object of a class of ours (other than Opaque) is somewhere in a value."""
    if isinstance(value, Opaque):
        return leaks(value.state)
    if isinstance(value, dict):
        return any(map(leaks, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(leaks, value))
    return type(value).__module__.startswith("ucformat")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_object_is_shown_and_nothing_of_ours_is_in_it(name: str, protocol: int) -> None:
    back = to_values(unpickle(pickle.dumps({"odd": ODD[name], "good": [1]}, protocol=protocol), "f"), "f")
    assert back["good"] == [1]
    assert not leaks(back)
    if "long doubles" not in name:
        assert decode(encode(back), "f") == back


def test_stand_ins_as_keys_are_kept_apart() -> None:
    back = to_values(unpickle(pickle.dumps({Node(): 1, Node(): 2, Colour.RED: 3}), "f"), "f")
    assert sorted(back.values()) == [1, 2, 3]


def test_a_value_that_refers_to_its_parent_says_where_that_is() -> None:
    back = to_values(unpickle(pickle.dumps({"args": tree_of_nodes()}), "f"), "f")
    child = back["args"].state["state"]["children"][1]
    assert child.state["state"] == {"parent": Opaque("cycle", "args"), "children": [], "value": 5}


def test_objects_that_all_refer_to_each_other_are_shown_once() -> None:
    nodes = [Node() for _ in range(40)]
    for node in nodes:
        node.children = nodes
    encode(to_values(unpickle(pickle.dumps(nodes), "f"), "f"))


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning", "ignore:.*quantize.*:UserWarning")
def test_a_sparse_tensor_costs_only_its_own_name(tmp_path: Path) -> None:
    state = {
        "a.w": torch.arange(3.0),
        "a.sparse": torch.eye(2).to_sparse(),
        "a.csr": torch.eye(2).to_sparse_csr(),
        "a.quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    torch.save({"model": state, "list": [torch.ones(1), torch.eye(2).to_sparse()]}, tmp_path / "x.pt")
    opened = ucformat.open(str(tmp_path / "x.pt"))
    assert torch.equal(opened["model/a.w"].read(), torch.arange(3.0))
    for name, what in (("sparse", "sparse"), ("csr", "sparse"), ("quantised", "quantised")):
        with pytest.raises(UnsupportedError, match=what):
            opened[f"model/a.{name}"]
    with pytest.raises(KeyError):
        opened["model/a.other"]
    assert any("sparse" in remark for remark in opened.catalog.notes.remarks)
    loaded: Any = ucformat.load(str(tmp_path / "x.pt"))
    assert torch.equal(loaded["model"]["a.w"], torch.arange(3.0))
    assert isinstance(loaded["model"]["a.sparse"], Opaque)
    report = ucformat.convert(str(tmp_path / "x.pt"), str(tmp_path / "out"), "native")
    assert ucformat.open(str(tmp_path / "out")).keys() >= {"model/a.w", "list/0"}
    assert any("sparse" in remark for remark in report.remarks)
    report = ucformat.convert(str(tmp_path / "x.pt"), str(tmp_path / "dcp"), "dcp")
    assert any("sparse" in name for name in report.values_left_out)


class Wrapped(torch.Tensor):
    """Made of two tensors, as the quantised ones of torchao are."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        self: Wrapped = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        self.data_, self.scale = data, scale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def test_a_tensor_made_of_others_is_stored_by_its_inner_tensors(tmp_path: Path) -> None:
    wrapped = Wrapped(torch.arange(4, dtype=torch.int8), torch.tensor(0.5))
    torch.save({"model": {"w": wrapped, "b": torch.ones(1)}}, tmp_path / "x.pt")
    opened = ucformat.open(str(tmp_path / "x.pt"))
    inner = [name for name in opened if name.startswith("model/w/")]
    assert sorted(opened[name].read().tolist() for name in inner if name.endswith("data_")) == [[0, 1, 2, 3]]
    assert len(inner) == 2
    with pytest.raises(UnsupportedError, match="Wrapped"):
        opened["model/w"]


def test_an_odd_tensor_in_a_bare_state_dict_leaves_the_others_their_names(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(1), "a.odd": Wrapped(torch.ones(2), torch.ones(1))}, tmp_path / "x.pt")
    opened = ucformat.open(str(tmp_path / "x.pt"))
    assert "model/a.w" in opened
    with pytest.raises(UnsupportedError, match="Wrapped"):
        opened["model/a.odd"]


def test_dicts_that_contain_themselves_are_read(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "args": {"x": Node()}}
    state["args"]["all"] = state
    torch.save(state, tmp_path / "x.pt")
    opened = ucformat.open(str(tmp_path / "x.pt"))
    assert list(opened) == ["model/w"]


def test_nothing_of_ours_is_in_a_pickle_that_we_write(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "args": {name: value for name, value in ODD.items() if "text" not in name}}
    torch.save(state, tmp_path / "x.pt")
    ucformat.convert(str(tmp_path / "x.pt"), str(tmp_path / "y.pt"), "torchsave")
    assert b"ucformat" not in (tmp_path / "y.pt").read_bytes()
    torch.load(tmp_path / "y.pt", weights_only=True)
    ucformat.convert(str(tmp_path / "x.pt"), str(tmp_path / "dcp"), "dcp")
    assert not any(b"ucformat.pickles" in path.read_bytes() for path in (tmp_path / "dcp").iterdir() if path.is_file())
