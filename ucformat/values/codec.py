"""The exact JSON of value trees: `encode` and `decode`, and the marks a tree may hold.

What JSON lacks is written as an object with one key that starts with `$`; a dict that has such a key itself is written
as pairs, so nothing is ambiguous. Types are matched exactly: a subclass that would come back as its parent is refused.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import math
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from ucformat.errors import FormatError, UnrepresentableError
from ucformat.values.hints import hints

MAX_DEPTH = 128  # containers within containers: more is a cycle or an attack, and stays clear of Python's own limit
_LONG = re.compile(rb"[0-9]{19}")  # shorter integers are in range
_HEX = re.compile("-?0x[0-9a-fA-F]+")
_INT_DIGITS = 20  # of the longest one, with its sign
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


_NUMPY: dict[str, type[np.generic]] = {
    name: np.dtype(name).type
    for name in [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ]
}
_PATHS: dict[str, type[pathlib.PurePath]] = {
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
    **dict.fromkeys(_NUMPY.values(), _write_numpy),
    **{kind: lambda x, at: {"$path": [type(x).__name__, _write_str(str(x), at)]} for kind in _PATHS.values()},
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


# ---------------------------------------------------------------- decode


class _MalformedError(ValueError):
    """What is wrong with the JSON, and the clause it violates; becomes a FormatError that names the file."""

    def __init__(self, why: str, clause: str = "values.type") -> None:
        self.clause = clause
        super().__init__(why)


def decode(data: bytes, file: str) -> object:
    """The value tree of `encode`'s bytes. Raises FormatError naming `file` for anything that `encode` does not write."""
    try:
        tree: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_read_object,
            parse_int=_read_integer if _LONG.search(data) else None,  # a call per number, which most trees do without
            parse_float=_read_float,
            parse_constant=_read_constant,
        )
    except UnicodeDecodeError as error:
        raise FormatError(file, f"values are not UTF-8: {error.reason}", error.start, error.end) from error
    except json.JSONDecodeError as error:
        raise FormatError(file, f"values are not JSON: {error}") from error
    except RecursionError:
        raise FormatError(file, "values are nested too deeply", clause="values.depth") from None
    except ValueError as error:  # _MalformedError, or an integer literal beyond Python's limit on digits
        raise FormatError(file, f"values: {error}", clause=getattr(error, "clause", "values.range")) from error
    return tree


def _read_integer(text: str) -> int:
    _need(
        len(text) <= _INT_DIGITS and INT_MIN <= int(text) <= INT_MAX,
        f"number {text[:_INT_DIGITS]} is out of range",
        "values.range",
    )
    return int(text)


def _read_float(text: str) -> float:
    x = float(text)
    _need(math.isfinite(x), f"number {text} is out of range", "values.range")
    return x


def _read_constant(text: str) -> object:
    raise _MalformedError(f"{text} is no JSON", "values.nan")


def _need(condition: bool, why: str, clause: str = "values.type") -> None:
    if not condition:
        raise _MalformedError(why, clause)


def _read_object(pairs: list[tuple[str, Any]]) -> object:
    """Called for every JSON object, innermost first: a tagged one becomes its value."""
    if len(pairs) == 1 and pairs[0][0].startswith("$"):
        tag, body = pairs[0]
        reader = _READERS.get(tag)
        if reader is None:
            raise _MalformedError(f"unknown tag {tag!r}: written by a newer release?", "values.tag")
        try:
            return reader(body)
        except _MalformedError as error:
            raise _MalformedError(f"{tag}: {error}", error.clause) from error
        except (TypeError, ValueError, LookupError, RuntimeError, AttributeError) as error:
            raise _MalformedError(f"{tag}: malformed content") from error
    out = dict(pairs)
    _need(len(out) == len(pairs), f"an object has the same key twice: {sorted(key for key, _ in pairs)[:8]}", "values.twice")
    _need(not any(key.startswith("$") for key in out), "a tag with other keys beside it", "values.alone")
    return out


def _a(kind: type, x: object) -> Any:
    _need(type(x) is kind, f"a {kind.__name__} is due, not a {type(x).__name__}")
    return x


def _items(x: object, kind: type, count: int | None = None) -> list[Any]:
    items = cast(list[Any], _a(list, x))
    _need(count is None or len(items) == count, f"{count} items are due, not {len(items)}")
    for item in items:
        _a(kind, item)
    return items


def _bytes(x: object) -> bytes:
    try:
        return base64.b64decode(cast(str, _a(str, x)), validate=True)
    except binascii.Error as error:
        raise _MalformedError("not base64") from error


def _read_str(x: object) -> str:
    return _bytes(x).decode("utf-8", "surrogatepass")


def _read_int(x: object) -> int:
    text = cast(str, _a(str, x))
    _need(_HEX.fullmatch(text) is not None, "not hexadecimal")
    return int(text, 16)


def _read_nonfinite(x: object) -> float:
    _need(x in ("nan", "inf", "-inf"), "not nan, inf or -inf")
    return float(cast(str, x))


def _read_pairs(x: object, into: dict[Any, Any]) -> dict[Any, Any]:
    pairs = _items(x, list)
    for pair in pairs:
        _need(len(pair) == 2, "a pair is due")
        into[pair[0]] = pair[1]
    _need(len(into) == len(pairs), "the same key twice", "values.twice")
    return into


def _read_set(x: object) -> frozenset[Any]:
    items = cast(list[Any], _a(list, x))
    out = frozenset(items)
    _need(len(out) == len(items), "the same item twice", "values.set")
    return out


def _read_numpy(x: object) -> object:
    name, data = _items(x, str, 2)
    dtype, raw = np.dtype(_NUMPY[name]), _bytes(data)
    _need(len(raw) == dtype.itemsize, f"{dtype.itemsize} bytes are due, not {len(raw)}")
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)[0]


def _read_path(x: object) -> pathlib.PurePath:
    name, text = _items(x, str, 2)
    _need(name in _PATHS, f"unknown kind of path {name!r}")
    try:
        return _PATHS[name](text)
    except (NotImplementedError, RuntimeError):  # a path of another operating system: its inert twin
        return _PATHS[f"Pure{name}"](text)


@cache
def _torch_dtypes() -> dict[str, object]:
    import torch

    return {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def _read_size(x: object) -> object:
    import torch

    return torch.Size(_items(x, int))


def _read_dtype(x: object) -> object:
    return _torch_dtypes()[_a(str, x)]


def _read_device(x: object) -> object:
    import torch

    return torch.device(_a(str, x))


def _read_namespace(x: object) -> argparse.Namespace:
    out = argparse.Namespace()
    for key, item in cast(dict[Any, Any], _a(dict, x)).items():
        vars(out)[_a(str, key)] = item
    return out


def _read_rank_local(x: object) -> RankLocal:
    body = cast(dict[str, Any], _a(dict, x))
    _need(body.keys() - {"first"} == {"policy", "coords", "values"}, "policy, coords and values are due")
    coords, values = cast(list[Any], _a(list, body["coords"])), cast(list[Any], _a(list, body["values"]))
    _need(len(coords) == len(values), f"{len(coords)} coordinates for {len(values)} values")
    for place in coords:
        if place is not None:
            for axis, index in cast(dict[Any, Any], _a(dict, place)).items():
                _a(str, axis)
                _a(int, index)
    return RankLocal(_a(str, body["policy"]), tuple(coords), tuple(values), _a(int, body.get("first", 0)))


def _read_opaque(x: object) -> Opaque:
    body = cast(dict[str, Any], _a(dict, x))
    _need(body.keys() == {"class", "state"}, "class and state are due")
    return Opaque(_a(str, body["class"]), body["state"])


_READERS: dict[str, Callable[[Any], object]] = {
    "$str": _read_str,
    "$int": _read_int,
    "$float": _read_nonfinite,
    "$bytes": _bytes,
    "$complex": lambda x: complex(*_items(x, float, 2)),
    "$tuple": lambda x: tuple(_a(list, x)),
    "$dict": lambda x: _read_pairs(x, {}),
    "$ordered": lambda x: _read_pairs(x, OrderedDict()),
    "$set": lambda x: set(_read_set(x)),
    "$frozenset": _read_set,
    "$size": _read_size,
    "$dtype": _read_dtype,
    "$device": _read_device,
    "$namespace": _read_namespace,
    "$numpy": _read_numpy,
    "$path": _read_path,
    "$tensor": lambda x: TensorRef(_a(str, x)),
    "$array": lambda x: ArrayRef(_a(str, x)),
    "$rank_local": _read_rank_local,
    "$opaque": _read_opaque,
}

TAGS = frozenset(_READERS)
"""The keys that mark what JSON lacks."""
