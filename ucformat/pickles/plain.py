"""From what the unpickler built to plain values: stand-ins become `values.Opaque`, and nothing of this package stays.

One odd object costs itself, not the file: what contains itself, is nested without end or is of a class that was not loaded
becomes an `Opaque` with its class or the path that it refers to.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

from ucformat.errors import FormatError, brief
from ucformat.pickles.containers import PickledSet
from ucformat.pickles.inert import Inert, InertType
from ucformat.pickles.tensors import RefusedTensor, StorageType, StoredStorage, StoredTensor
from ucformat.pickles.values import Builder, PickledArray, PickledDType
from ucformat.values.codec import MAX_DEPTH, Opaque, RankLocal

MAX_NODES = 20_000_000  # of a decoded tree with shared parts counted every time: a small pickle can describe 10^9
_DEEPEST = MAX_DEPTH - 16  # levels: what is added around a tree must still fit
_EXPANDED = 256  # nodes of an object that is shown in every place that refers to it; of a larger one the path is shown
_TEXT_UNIT = 64  # characters or bytes that count as one node: text that is shared is written out in every place
_ATOMS = frozenset({type(None), bool, int, float, complex})
_TENSORS = (StoredTensor, StoredStorage)

CYCLE = "cycle"
"""Class name of the stand-in for a value that contains itself. Its state is the path of what it refers to."""
REFERENCE = "reference"
"""Class name of the stand-in for a large object that is shown elsewhere. Its state is the path of that."""
DEEP = "deep nest"
"""Class name of the stand-in for what lies below the deepest level that is read."""


class _Place(NamedTuple):
    """A place in the tree, as a chain up to its root."""

    above: _Place | None
    key: object
    depth: int

    def below(self, key: object, levels: int = 1) -> _Place:
        return _Place(self, key, self.depth + levels)

    def text(self) -> str:
        keys, at = [], self
        while at.above is not None:
            keys.append(at.key if isinstance(at.key, str) else brief(at.key))
            at = at.above
        return "/".join(reversed(keys)) or "/"


_ROOT = _Place(None, "", 0)


def to_values(tree: Any, file: str, max_nodes: int | None = None) -> Any:
    """The tree as plain values: stand-ins become `values.Opaque`, OrderedDicts dicts; tensors stay as they are.

    Tensors that are no dense array become an `Opaque`, too, whose class says what they are. Raises FormatError when shared
    parts multiply beyond all measure.
    """
    return _Converter(file, MAX_NODES if max_nodes is None else max_nodes).value(tree, _ROOT)


class _Converter:
    def __init__(self, file: str, max_nodes: int) -> None:
        self.file, self.max_nodes, self.left = file, max_nodes, max_nodes
        self.open: dict[int, _Place] = {}
        """Containers that are being converted, by id: to meet one again is a cycle."""
        self.seen: dict[int, tuple[_Place, int]] = {}
        """Objects that were converted: where, and how many nodes they took."""

    def spend(self, nodes: int) -> None:
        self.left -= nodes
        if self.left < 0:
            raise FormatError(self.file, f"more than {self.max_nodes} values: shared parts multiply")

    def value(self, x: Any, at: _Place) -> Any:
        self.spend(1)
        kind = type(x)
        if kind in _ATOMS:
            return x
        if kind in (str, bytes, bytearray):
            self.spend(len(x) // _TEXT_UNIT)
            return bytes(x) if kind is bytearray else x
        if isinstance(x, (Opaque, RankLocal)):
            return x  # a reader has made it of plain values; no pickle can
        if isinstance(x, (dict, list, tuple, frozenset, set, PickledSet, argparse.Namespace, Inert)):
            return self.container(x, at)
        return self.leaf(x)

    def container(self, x: Any, at: _Place) -> Any:
        if id(x) in self.open:
            return Opaque(CYCLE, self.open[id(x)].text())
        if id(x) in self.seen:
            return Opaque(REFERENCE, self.seen[id(x)][0].text())
        if at.depth > _DEEPEST:
            return Opaque(DEEP, f"more than {_DEEPEST} levels")
        self.open[id(x)], before = at, self.left
        try:
            return self.filled(x, at)
        finally:
            del self.open[id(x)]
            if isinstance(x, Inert) and before - self.left > _EXPANDED:
                self.seen[id(x)] = (at, before - self.left)

    def filled(self, x: Any, at: _Place) -> Any:
        if isinstance(x, dict):
            keys = self.keys(dict.keys(x))
            return {key: self.value(item, at.below(key)) for key, item in zip(keys, dict.values(x), strict=True)}
        if isinstance(x, argparse.Namespace):
            space = argparse.Namespace()
            vars(space).update({key: self.value(item, at.below(key)) for key, item in vars(x).items()})
            return space
        if isinstance(x, Inert):
            return self.object(x, at)
        if type(x) in (list, tuple):
            return type(x)([self.value(item, at.below(i)) for i, item in enumerate(x)])
        if isinstance(x, tuple):  # torch.Size, which holds numbers alone
            return x
        return self.set(x, at)

    def object(self, x: Inert, at: _Place) -> Opaque:
        parts = {"args": x.args, "kwargs": dict(x.kwargs), "state": x.state, "entries": [*x.entries], "items": [*x.items]}
        held = {name: part for name, part in parts.items() if not _is_nothing(part)}
        return Opaque(x.class_name, {name: self.value(part, at.below(name, 2)) for name, part in held.items()})

    def set(self, x: Any, at: _Place) -> Any:
        items = x.items if isinstance(x, PickledSet) else list(x)
        if any(isinstance(item, _TENSORS) for item in items):
            return Opaque("builtins.set", [self.value(item, at.below(i, 2)) for i, item in enumerate(items)])
        kind = frozenset if isinstance(x, frozenset) else set
        return kind(self.keys(items))

    def keys(self, found: Iterable[Any]) -> list[Any]:
        """Keys of a dict, or items of a set: as they are where they are plain, else as text, different ones kept apart."""
        out: dict[Any, None] = {}
        for key in found:
            plain = self.key(key)
            if plain in out and isinstance(plain, str):
                number = 2
                while f"{plain}~{number}" in out:
                    number += 1
                plain = f"{plain}~{number}"
            out[plain] = None
        return list(out)

    def key(self, x: Any) -> Any:
        """A key as a plain value; a stand-in (an enum member, say) as text, since it can't be looked up any more."""
        self.spend(1)
        if type(x) is str or type(x) in _ATOMS or type(x) is bytes:
            return x
        if type(x) in (tuple, frozenset):
            return type(x)([self.key(item) for item in x])
        if isinstance(x, Inert):
            args = ", ".join(map(brief, x.args)) or brief(x.state)
            return f"{x.class_name}({args})"
        if isinstance(x, InertType) and x.member:
            return f"{x.owner_name}({x.member!r})"
        leaf = self.leaf(x)
        return f"{leaf.class_name}({brief(leaf.state)})" if isinstance(leaf, Opaque) else brief(x) if leaf_of_ours(x) else leaf

    def leaf(self, x: Any) -> Any:
        """What holds nothing else. Classes and functions that the pickle names become stand-ins with their name."""
        if isinstance(x, RefusedTensor):
            return Opaque(x.kind, None)
        if isinstance(x, InertType) and x.member:
            return Opaque(x.owner_name, {"args": (x.member,)})
        if isinstance(x, InertType):
            return Opaque("builtins.type", x.class_name)
        if isinstance(x, Builder):
            return Opaque("builtins.type", x.name)
        if isinstance(x, StorageType):
            return Opaque("builtins.type", f"a torch storage of {x.dtype or 'bytes'}")
        if isinstance(x, PickledDType):
            return Opaque("numpy.dtype", brief(x.code))
        if isinstance(x, PickledArray):
            return Opaque("numpy.ndarray", None)
        if leaf_of_ours(x) and not isinstance(x, _TENSORS):
            return Opaque(type(x).__name__, None)
        return x


def leaf_of_ours(x: object) -> bool:
    """Whether something is of a class of this package, which must not get into anybody's values."""
    return type(x).__module__.partition(".")[0] == "ucformat"


def _is_nothing(part: object) -> bool:
    return part is None or (isinstance(part, (tuple, dict, list)) and not part)
