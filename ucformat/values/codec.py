"""The exact JSON of value trees: `encode` (see `decoding` for the way back), and the marks a tree may hold.

What JSON lacks is written as an object with one key that starts with `$`; a dict that has such a key itself is written
as pairs, so nothing is ambiguous. Types are matched exactly: a subclass that would come back as its parent is refused.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ucformat.errors import UnrepresentableError
from ucformat.values.hints import hints

MAX_DEPTH = 128  # containers within containers: more is a cycle or an attack, and stays clear of Python's own limit
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1  # what readers in other languages hold in one integer


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands where the tensor `name` was, in places that its name alone does not tell."""

    name: str


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """Stands where a numpy array was; its items are the tensor `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class RankLocal:
    """One item of which every rank has its own: `values[i]` was held at mesh coordinates `coords[i]` (None: unknown)."""

    policy: str
    coords: tuple[dict[str, int] | None, ...]
    values: tuple[object, ...]
    first: int = 0
    """Rank of `values[0]`: each rank brings its own value alone, `values.merge` strings them together."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of a class that was not loaded: its name and the state that was stored for it."""

    class_name: str
    state: object


@dataclass(frozen=True, slots=True)
class TorchStandIn:
    """A size, dtype or device of torch, read where torch is not installed: its tag and content in JSON."""

    tag: str
    content: str | tuple[int, ...]


class Where:
    """A place in a tree, as a chain up to its root: cheap to extend, turned into text only for a message."""

    __slots__ = ("depth", "key", "parent")

    def __init__(self, parent: Where | None = None, key: object = "") -> None:
        self.parent, self.key = parent, key
        self.depth: int = 0 if parent is None else parent.depth + 1
        if self.depth > MAX_DEPTH:
            raise UnrepresentableError(f"…/{key}", f"nest of more than {MAX_DEPTH} levels", "flatten it, or break its cycle")

    def __str__(self) -> str:
        keys: list[str] = []
        at: Where | None = self
        while at is not None and at.parent is not None:
            keys.append(str(at.key))
            at = at.parent
        return "/".join(reversed(keys))


# ---------------------------------------------------------------- encode


def encode(values: object) -> bytes:
    """The UTF-8 JSON of a value tree; equal trees give equal bytes. Raises UnrepresentableError naming the path."""
    return _dump(_to_json(values, Where())).encode()


def _dump(tree: object) -> str:
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _to_json(x: object, at: Where) -> object:
    writer = _WRITERS.get(type(x))
    if writer is None and type(x).__module__ == "torch":
        writer = _torch_writers().get(type(x))
    if writer is None:
        raise UnrepresentableError(str(at), type(x).__qualname__, *hints(x))
    return writer(x, at)


def has_surrogates(text: str) -> bool:
    """Whether a string holds halves of characters, which UTF-8 can't."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _write_str(x: str, at: Where) -> object:
    return {"$str": _base64(x.encode("utf-8", "surrogatepass"))} if has_surrogates(x) else x


def _write_int(x: int, at: Where) -> object:
    return x if INT_MIN <= x <= INT_MAX else {"$int": hex(x)}


def _write_float(x: float, at: Where) -> object:
    return x if math.isfinite(x) else {"$float": repr(x)}


def _is_verbatim(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether every item is JSON as it is: long lists of names or numbers then need no work per item."""
    kinds = set(map(type, items))
    if not kinds <= {int, str, bool, float, type(None)}:
        return False
    if str in kinds and has_surrogates("\n".join(x for x in items if type(x) is str)):
        return False
    if float in kinds and not all(math.isfinite(x) for x in items if type(x) is float):
        return False
    return int not in kinds or all(INT_MIN <= x <= INT_MAX for x in items if type(x) is int)


def _write_items(x: list[Any] | tuple[Any, ...], at: Where) -> list[object]:
    if _is_verbatim(x):
        return list(x)
    return [_to_json(item, Where(at, i)) for i, item in enumerate(x)]


def _write_pairs(x: dict[Any, Any], at: Where) -> list[object]:
    return [[_to_json(key, Where(at, f"<key {key!r}>")), _to_json(item, Where(at, key))] for key, item in x.items()]


def _write_dict(x: dict[Any, Any], at: Where) -> object:
    if all(type(key) is str and not key.startswith("$") and not has_surrogates(key) for key in x):
        return {key: _to_json(item, Where(at, key)) for key, item in x.items()}
    return {"$dict": _write_pairs(x, at)}


def _write_set(x: Iterable[object], at: Where) -> list[object]:
    # by their text: sets of equal items must give equal bytes
    return sorted((_to_json(item, Where(at, "<item>")) for item in x), key=_dump)


def _write_numpy(x: np.generic, at: Where) -> object:
    return {"$numpy": [x.dtype.name, _base64(x.astype(x.dtype.newbyteorder("<")).tobytes())]}


def _write_rank_local(x: RankLocal, at: Where) -> object:
    coords = [None if place is None else _write_dict(place, at) for place in x.coords]
    body = {"policy": x.policy, "coords": coords, "values": _write_items(x.values, at)}
    return {"$rank_local": {**body, "first": x.first} if x.first else body}


def _write_opaque(x: Opaque, at: Where) -> object:
    return {"$opaque": {"class": _write_str(x.class_name, at), "state": _to_json(x.state, Where(at, x.class_name))}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


NUMPY: dict[str, type[np.generic]] = {
    name: np.dtype(name).type
    for name in [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ]
}
PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}

_WRITERS: dict[type, Callable[[Any, Where], object]] = {
    type(None): lambda x, at: x,
    bool: lambda x, at: x,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    bytes: lambda x, at: {"$bytes": _base64(x)},
    complex: lambda x, at: {"$complex": [_write_float(x.real, at), _write_float(x.imag, at)]},
    list: _write_items,
    tuple: lambda x, at: {"$tuple": _write_items(x, at)},
    dict: _write_dict,
    OrderedDict: lambda x, at: {"$ordered": _write_pairs(x, at)},
    set: lambda x, at: {"$set": _write_set(x, at)},
    frozenset: lambda x, at: {"$frozenset": _write_set(x, at)},
    argparse.Namespace: lambda x, at: {"$namespace": _write_dict(vars(x), at)},
    TensorRef: lambda x, at: {"$tensor": _write_str(x.name, at)},
    ArrayRef: lambda x, at: {"$array": _write_str(x.name, at)},
    RankLocal: _write_rank_local,
    Opaque: _write_opaque,
    TorchStandIn: lambda x, at: {x.tag: list(x.content) if isinstance(x.content, tuple) else x.content},
    **dict.fromkeys(NUMPY.values(), _write_numpy),
    **{kind: lambda x, at: {"$path": [type(x).__name__, _write_str(str(x), at)]} for kind in PATHS.values()},
}


@cache
def _torch_writers() -> dict[type, Callable[[Any, Where], object]]:
    """Those of torch's own types: apart, so that torch is not loaded for trees that have none."""
    import torch

    return {
        torch.Size: lambda x, at: {"$size": _write_items(x, at)},
        torch.dtype: lambda x, at: {"$dtype": str(x).removeprefix("torch.")},
        torch.device: lambda x, at: {"$device": str(x)},
    }
