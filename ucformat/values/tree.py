"""The value tree: everything in a state that is no tensor, beside the tensors' names.

`split` takes a nest of containers apart into values and named tensors, `join` puts it together again, `prune` leaves
parts out, `merge` makes the trees of several ranks one, `encode` and `decode` (see `codec`) are its exact JSON.
Names are paths: the keys from the root to the tensor, escaped and joined with `/`.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ucformat.errors import CoverageError, FormatError, UnrepresentableError, ValueConflictError
from ucformat.values import bytes_io
from ucformat.values.codec import MAX_DEPTH, ArrayRef, Opaque, RankLocal, TensorRef, Where, encode, has_surrogates
from ucformat.values.decoding import decode
from ucformat.values.walk import ATOMS, DICTS, SEQUENCES, changed, items, nodes, rebuilt

__all__ = [
    "MAX_DEPTH", "ArrayRef", "Opaque", "RankLocal", "TensorRef", "Where",
    "decode", "encode", "escape", "join", "join_name", "merge", "prune", "refs", "split", "split_name", "unescape",
    "unite_aliases",
]  # fmt: skip

# ---------------------------------------------------------------- names


def escape(component: str) -> str:
    """A name component without `/`: `%` becomes %25, `/` becomes %2F."""
    return component.replace("%", "%25").replace("/", "%2F")


def unescape(component: str) -> str:
    """The inverse of `escape`."""
    return component.replace("%2F", "/").replace("%25", "%")


def join_name(*parts: str) -> str:
    """The name whose components are `parts`, each escaped."""
    return "/".join(map(escape, parts))


def split_name(name: str) -> list[str]:
    """The inverse of `join_name`."""
    return [unescape(part) for part in name.split("/")]


# ---------------------------------------------------------------- split


def split(tree: object, is_tensor: Callable[[object], bool]) -> tuple[object, dict[str, Any]]:
    """Take a state apart: its values, and its tensor leaves by name.

    Tensors are what `is_tensor` accepts, and numpy arrays. A tensor that is reached through dicts with str keys alone leaves
    nothing behind, nor do dicts that held only such tensors; elsewhere a TensorRef stays, for an array always an ArrayRef.
    The order of keys is kept among values; `join` puts tensors after them. Raises UnrepresentableError for a tensor
    at the root or in a set, an array of a dtype that no tensor has, and nests deeper than MAX_DEPTH.
    """
    splitter = _Splitter(is_tensor)
    values = splitter.walk(tree, Where(), "", named=True)
    return ({} if values is _NOTHING else values), splitter.tensors


_NOTHING = object()  # what a tensor leaves behind where its name tells its place


class _Splitter:
    def __init__(self, is_tensor: Callable[[object], bool]) -> None:
        self.is_tensor = is_tensor
        self.tensors: dict[str, Any] = {}

    def walk(self, x: object, at: Where, name: str, *, named: bool) -> object:
        """The values of `x`; `named` while only dicts with str keys lie between the root and here."""
        kind = type(x)
        if kind in ATOMS:
            return x
        if kind in DICTS:
            return self._dict(cast(dict[Any, Any], x), at, name, named=named)
        if kind in SEQUENCES:
            return cast(type, kind)(self._items(cast(Sequence[object], x), at, name))
        if kind is np.ndarray:
            return ArrayRef(self._add(_storable(cast(np.ndarray[Any, Any], x), at), at, name))
        if self.is_tensor(x):
            stored = self._add(x, at, name)
            return _NOTHING if named else TensorRef(stored)
        return self._other(x, at, name)

    def _other(self, x: object, at: Where, name: str) -> object:
        if type(x) is io.BytesIO:
            return bytes_io.to_value(x)
        if type(x) is argparse.Namespace:
            return argparse.Namespace(**cast(dict[str, Any], self._dict(vars(x), at, name, named=False)))
        if type(x) is RankLocal:
            return replace(x, values=tuple(self._items(x.values, at, name, x.first)))
        if type(x) is Opaque:
            return Opaque(x.class_name, self.walk(x.state, Where(at, x.class_name), name, named=False))
        if type(x) in {set, frozenset} and any(map(self.is_tensor, cast(Iterable[object], x))):
            raise UnrepresentableError(str(at), "tensor in a set", "use a list or a dict")
        return x

    def _items(self, x: Sequence[object], at: Where, name: str, first: int = 0) -> list[object]:
        if set(map(type, x)) <= ATOMS:
            return list(x)
        return [self.walk(item, Where(at, i), _below(name, at, str(i)), named=False) for i, item in enumerate(x, first)]

    def _dict(self, x: dict[Any, Any], at: Where, name: str, *, named: bool) -> object:
        named = named and all(type(key) is str for key in x)
        out = type(x)()
        for key, item in x.items():
            component = escape(key if type(key) is str else str(key))
            value = self.walk(item, Where(at, key), _below(name, at, component), named=named)
            if value is not _NOTHING:
                out[key] = value
        return _NOTHING if x and not out and type(x) is dict else out

    def _add(self, leaf: object, at: Where, name: str) -> str:
        if at.parent is None:
            raise UnrepresentableError("", "bare tensor", "put it into a dict, so that it has a name")
        if has_surrogates(name):
            raise UnrepresentableError(str(at), "tensor below a key that is no valid text", "rename the key")
        unique, n = name, 1
        while unique in self.tensors:  # keys 1 and "1" in one dict: the placeholder tells which is which
            n += 1
            unique = f"{name}~{n}"
        self.tensors[unique] = leaf
        return unique


def _below(name: str, at: Where, component: str) -> str:
    return component if at.parent is None else f"{name}/{component}"


def _storable(x: np.ndarray[Any, Any], at: Where) -> np.ndarray[Any, Any]:
    if x.dtype.kind not in "biufc" or x.dtype.itemsize > (16 if x.dtype.kind == "c" else 8) or not x.dtype.isnative:
        raise UnrepresentableError(str(at), f"numpy array of {x.dtype}", "convert it to plain numbers in native byte order")
    return x


# ---------------------------------------------------------------- join


def join(values: object, tensors: Mapping[str, Any]) -> object:
    """Put a state together: the inverse of `split`, also for tensors that no value tree knows.

    `tensors` maps names to tensors or arrays; where an array stood, a CPU tensor comes back as one. Raises CoverageError
    for a placeholder whose tensor is not given, FormatError when a name leads through something that is no dict.
    """
    used: set[str] = set()

    def fill(x: object) -> object:
        if type(x) is TensorRef or type(x) is ArrayRef:
            if x.name not in tensors:
                raise CoverageError(x.name, None, "values")
            used.add(x.name)
            return _as_array(tensors[x.name]) if type(x) is ArrayRef else tensors[x.name]
        return bytes_io.from_value(x) or x

    tree = changed(values, fill)
    for name, leaf in tensors.items():
        if name not in used:
            tree = _insert(tree, name, leaf)
    return tree


def _as_array(leaf: Any) -> object:
    return leaf if isinstance(leaf, np.ndarray) or not hasattr(leaf, "detach") else leaf.detach().cpu().numpy()


def _insert(tree: object, name: str, leaf: object) -> object:
    """Put `leaf` where its name says, making dicts on the way."""
    parts = split_name(name)
    node = tree
    for depth, part in enumerate(parts):
        if type(node) not in DICTS:
            raise FormatError("values", f"tensor {name!r} lies below {join_name(*parts[:depth])!r}, which is no dict")
        inside = cast(dict[str, object], node)
        if depth == len(parts) - 1:
            if part in inside:
                raise FormatError("values", f"both a value and a tensor are called {name!r}")
            inside[part] = leaf
        node = inside.setdefault(part, {})
    return tree


# ---------------------------------------------------------------- prune


def prune(values: object, drop: Callable[[str, object], bool], path: str = "") -> object:
    """A copy of `values` without what `drop(path, value)` says: dicts lose the key, sequences keep their length with None."""
    held = items(values)
    if held is None:
        return values
    if type(values) is Opaque:  # its state has its path
        return rebuilt(values, [(key, prune(item, drop, path)) for key, item in held])
    named, kept = type(values) in DICTS or type(values) is argparse.Namespace, []
    for key, item in held:
        at = f"{path}/{escape(str(key))}" if path else escape(str(key))
        if not drop(at, item):
            kept.append((key, prune(item, drop, at)))
        elif not named:
            kept.append((key, None))
    return rebuilt(values, kept)


def refs(values: object, kinds: tuple[type[TensorRef | ArrayRef], ...] = (TensorRef, ArrayRef)) -> Iterator[str]:
    """Names of the tensors that have a placeholder, one of `kinds`, somewhere in `values`."""
    return (x.name for x in nodes(values) if isinstance(x, kinds))


# ---------------------------------------------------------------- merge

Held = list[tuple[int, Any]]
"""What ranks hold at one path: (rank, value), ascending."""


def merge(trees: Sequence[object], ranks: Sequence[int] | None = None) -> object:
    """One tree of the ranks' trees, in rank order. Of ranks whose trees are equal one is enough: `ranks` says which these are.

    Dicts unite their keys, lists of equal length merge by item; under a key `param_groups` lists merge by item whatever their
    length, and their `params` unite in order (stages of a pipeline hold different parameters). Rank-local items are strung
    together. Everything else must be equal, to the type and the sign of zero: otherwise ValueConflictError naming path and ranks.
    """
    return _merge(list(zip(range(len(trees)) if ranks is None else ranks, trees, strict=True)), Where())


def _merge(held: Held, at: Where) -> object:
    if all(type(x) is RankLocal for _, x in held):
        return _merge_rank_local([x for _, x in held], [rank for rank, _ in held], at)
    held = _distinct(held)
    if len(held) == 1:
        return held[0][1]
    kinds = {type(x) for _, x in held}
    if len(kinds) > 1:
        raise ValueConflictError(str(at), [rank for rank, _ in held], f"types differ ({_kinds(held)})")
    kind = kinds.pop()
    if kind in DICTS:
        return _merge_dicts(held, at, kind)
    if kind is argparse.Namespace:
        return argparse.Namespace(**_merge_dicts([(rank, vars(x)) for rank, x in held], at, dict))
    if kind is list and at.key == "param_groups":
        return [_merge_group([(rank, x[i]) for rank, x in held if i < len(x)], Where(at, i)) for i in range(_longest(held))]
    if kind in SEQUENCES and len({len(x) for _, x in held}) == 1 and not all(map(_is_flat, held)):
        return kind(_merge([(rank, x[i]) for rank, x in held], Where(at, i)) for i in range(_longest(held)))
    raise ValueConflictError(str(at), [rank for rank, _ in held])


def _merge_dicts(held: Held, at: Where, kind: type[dict[Any, Any]]) -> dict[Any, Any]:
    keys = dict.fromkeys(key for _, x in held for key in x)
    return kind((key, _merge([(rank, x[key]) for rank, x in held if key in x], Where(at, key))) for key in keys)


def _merge_group(held: Held, at: Where) -> object:
    """One parameter group of an optimizer: hyper-parameters agree, names of parameters unite."""
    if not all(type(x) is dict and type(x.get("params")) is list for _, x in held):
        return _merge(held, at)
    names = dict.fromkeys(name for _, x in held for name in x["params"])
    return _merge([(rank, {**x, "params": list(names)}) for rank, x in held], at)


def _merge_rank_local(items: Sequence[RankLocal], ranks: Sequence[int], at: Where) -> RankLocal:
    """Each rank's own value, in rank order."""
    if len({item.policy for item in items}) > 1:
        raise ValueConflictError(str(at), ranks, "policies for rank-local state differ")
    coords = [place for item in items for place in item.coords]
    return RankLocal(items[0].policy, tuple(coords), tuple(value for item in items for value in item.values))


def _distinct(held: Held) -> Held:
    """The first rank of each different value: most values are equal everywhere, and cheap to compare in one go."""
    if len(held) == 1:
        return held
    first = held[0][1]
    if type(first) in {str, int, bool, type(None)} and all(type(x) is type(first) and x == first for _, x in held):
        return held[:1]
    seen: dict[bytes, tuple[int, Any]] = {}
    for rank, x in held:
        seen.setdefault(encode(x), (rank, x))
    return list(seen.values())


def _is_flat(item: tuple[int, Sequence[object]]) -> bool:
    return set(map(type, item[1])) <= ATOMS


def _longest(held: Held) -> int:
    return max(len(x) for _, x in held)


def _kinds(held: Held) -> str:
    return ", ".join(sorted({type(x).__name__ for _, x in held}))


def unite_aliases(ranks: Iterable[tuple[int, Mapping[str, str]]]) -> dict[str, str]:
    """All ranks' aliases of tensors, from (rank, alias → name). Raises ValueConflictError when two ranks differ."""
    out: dict[str, str] = {}
    for rank, aliases in ranks:
        for alias, target in aliases.items():
            if out.setdefault(alias, target) != target:
                raise ValueConflictError(alias, [rank], f"tied to {out[alias]} and to {target}")
    return {alias: out.get(target, target) for alias, target in out.items()}
