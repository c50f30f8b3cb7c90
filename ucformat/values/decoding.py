"""Value trees out of the JSON that `codec.encode` writes: anything else is refused."""

from __future__ import annotations

import argparse
import base64
import binascii
import importlib
import json
import math
import pathlib
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np

from ucformat.errors import FormatError
from ucformat.values.codec import INT_MAX, INT_MIN, NUMPY, PATHS, ArrayRef, Opaque, RankLocal, TensorRef, TorchStandIn

_INT_DIGITS = 20  # of the longest one, with its sign
_HEX = re.compile("-?0x[0-9a-fA-F]+")
_LONG = re.compile(rb"[0-9]{19}")  # shorter integers are in range


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
    dtype, raw = np.dtype(NUMPY[name]), _bytes(data)
    _need(len(raw) == dtype.itemsize, f"{dtype.itemsize} bytes are due, not {len(raw)}")
    return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype)[0]


def _read_path(x: object) -> pathlib.PurePath:
    name, text = _items(x, str, 2)
    _need(name in PATHS, f"unknown kind of path {name!r}")
    try:
        return PATHS[name](text)
    except (NotImplementedError, RuntimeError):  # a path of another operating system: its inert twin
        return PATHS[f"Pure{name}"](text)


@cache
def _torch_dtypes() -> dict[str, object]:
    import torch

    return {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


_TORCH_FORMS = {"$dtype": re.compile("[a-z0-9_]+"), "$device": re.compile("[a-z]+(:[0-9]+)?")}


def _torch_value(tag: str, body: Any, build: Callable[[Any], object]) -> object:
    """A value of torch's; where torch is not installed, what stands for it."""
    try:
        return build(importlib.import_module("torch"))
    except ModuleNotFoundError:
        _need(tag not in _TORCH_FORMS or _TORCH_FORMS[tag].fullmatch(body) is not None, "no name of torch's")
        return TorchStandIn(tag, tuple(body) if isinstance(body, list) else body)


def _read_size(x: object) -> object:
    return _torch_value("$size", _items(x, int), lambda torch: torch.Size(x))


def _read_dtype(x: object) -> object:
    return _torch_value("$dtype", _a(str, x), lambda torch: _torch_dtypes()[cast(str, x)])


def _read_device(x: object) -> object:
    return _torch_value("$device", _a(str, x), lambda torch: torch.device(x))


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
