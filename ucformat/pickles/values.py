"""Plain Python and numpy values that the restricted unpickler may build.

Every builder here is our own code. The names in `values()` are looked up as text; a pickle never reaches a real
callable of torch or numpy through them.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from ucformat.errors import UnsafePickleError, brief
from ucformat.lazy_torch import loaded, torch
from ucformat.pickles.containers import PickledDict, PickledSet, charge, checked_key
from ucformat.pickles.inert import InertType, inert_class, inert_member

T = TypeVar("T")
MAX_EXTENT = 1 << 62  # keeps every product of sizes, strides and item sizes within int64 once it is checked


def no_state(self: object, state: object) -> NoReturn:
    raise TypeError(f"a {type(self).__name__} takes no state")


def sealed(kind: type[T]) -> type[T]:
    """Keep BUILD from writing into frozen objects through the `__setstate__` that dataclasses add."""
    kind.__setstate__ = no_state  # type: ignore[attr-defined]
    return kind


class Builder:
    """A callable that the unpickler hands out for one whitelisted name. Sealed like the stand-ins."""

    __slots__ = ("_name", "_run")
    _name: str
    _run: Callable[..., object]

    def __init__(self, name: str, run: Callable[..., object]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_run", run)

    def __call__(self, *args: object) -> object:
        return self._run(*args)

    @property
    def name(self) -> str:
        """What the pickle called: "module.name"."""
        return self._name

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("builders can't be changed")

    __setstate__ = no_state


def sizes_of(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < MAX_EXTENT for n in value):
        raise ValueError(f"{what} {brief(value)} is no tuple of sizes")
    charge(8 * len(value))
    return tuple(value)


# --- numpy ---------------------------------------------------------------------------------------------------------


_PLAIN_DTYPES = frozenset(
    ["b1", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "c8", "c16"]
)  # what has the same form on every machine, and a place in JSON


class PickledDType:
    """A numpy dtype while its pickle is being read: plain numbers only; others stay nameless and unread."""

    __slots__ = ("code", "order")

    def __init__(self, code: object) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) >= 2 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    def plain(self) -> np.dtype[Any] | None:
        """The dtype when it is one of bool, (unsigned) integers, floats and complex numbers."""
        if not isinstance(self.code, str) or self.code not in _PLAIN_DTYPES:
            return None
        try:
            return np.dtype(self.code).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]
        except TypeError:
            return None


class PickledArray:
    """A numpy array while its pickle is being read."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def array(self) -> np.ndarray[Any, Any] | None:
        """The array, native byte order, when it holds plain numbers. Raises ValueError when its sizes disagree."""
        if not (isinstance(self.state, tuple) and len(self.state) == 5):
            return None
        _, shape, kind, fortran, raw = self.state
        if not isinstance(kind, PickledDType) or kind.plain() is None or not isinstance(raw, bytes):
            return None
        return _array(raw, kind, sizes_of(shape, "array shape"), "F" if fortran else "C")


def _array(raw: bytes | bytearray, kind: PickledDType, shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    dtype = kind.plain()
    if dtype is None:
        raise ValueError(f"numpy arrays of {brief(kind.code)} can't be read")
    charge(len(raw))
    flat = np.frombuffer(raw, dtype=dtype).astype(dtype.newbyteorder("="))
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _np_dtype(code: object, *_: object) -> object:
    return PickledDType(code)


def _np_reconstruct(*_: object) -> object:
    return PickledArray()


def _np_scalar(kind: object, raw: object = b"") -> object:
    if not isinstance(kind, PickledDType) or kind.plain() is None or not isinstance(raw, bytes):
        return inert_class("numpy.generic")(kind, raw)
    return _array(raw, kind, (1,), "C")[0]


def _np_frombuffer(raw: object, kind: object, shape: object, order: object, *_: object) -> object:
    if not isinstance(raw, (bytes, bytearray)) or not isinstance(kind, PickledDType):
        raise ValueError("a numpy array's buffer is no bytes")
    if kind.plain() is None:
        return inert_class("numpy.ndarray")(kind, shape)
    return _array(raw, kind, sizes_of(shape, "array shape"), "F" if order == "F" else "C")


# --- plain values --------------------------------------------------------------------------------------------------


def _encode(text: object, encoding: object = "utf-8") -> object:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        return inert_class("_codecs.encode")(text, encoding)
    charge(len(text))
    return text.encode(str(encoding))


def _bytes(value: object = b"", encoding: object = "latin-1") -> bytes:
    """bytes() and bytearray() of existing bytes; of a number they would allocate at will."""
    if isinstance(value, str):
        value = _encode(value, encoding)
    if isinstance(value, list) and not value:
        return b""
    if not isinstance(value, (bytes, bytearray)):
        raise ValueError("bytes built from something that is no bytes")
    charge(len(value))
    return bytes(value)


def _complex(real: object = 0.0, imag: object = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imag, (int, float)):
        raise ValueError("complex parts are no numbers")
    return complex(real, imag)


def _items(value: object) -> Sequence[Any]:
    if isinstance(value, PickledSet):
        value = value.items
    if not isinstance(value, (list, tuple, frozenset)):
        raise ValueError("items come from something that is no list")
    charge(64 * len(value))
    return list(value)


def _ordered(pairs: object = ()) -> PickledDict:
    out = PickledDict()
    for pair in dict.items(pairs) if isinstance(pairs, dict) else _items(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError("a dict is made of something that is no pair")
        charge(64)
        out[pair[0]] = pair[1]
    return out


def _defaultdict(factory: object = None, pairs: object = ()) -> PickledDict:
    return _ordered(pairs)


def _torch_size(sizes: object = ()) -> torch.Size:
    return torch.Size(sizes_of(sizes, "torch.Size"))


def _torch_device(kind: object, index: object = None) -> object:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise ValueError("torch.device of something that is no name")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:  # a kind of device that this build of torch does not know
        return inert_class("torch.device")(kind, index)


def _path(name: str) -> Callable[..., object]:
    flavour = {"PurePosixPath": pathlib.PurePosixPath, "PureWindowsPath": pathlib.PureWindowsPath}.get(name)
    if flavour is None:
        windows = name == "WindowsPath"
        native = name == "Path" or windows == (os.name == "nt")
        foreign = pathlib.PureWindowsPath if windows else pathlib.PurePosixPath
        flavour = pathlib.Path if native else foreign

    def build(*parts: object) -> object:
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("parts of a path are no text")
        charge(sum(len(part) for part in parts if isinstance(part, str)))
        return flavour(*map(str, parts))

    return build


def _attribute(owner: object, name: object = None, *_: object) -> object:
    """How Python pickles bound methods, classes within classes, and (3.11) enum members: as getattr(owner, name)."""
    if not isinstance(name, str) or name.startswith("__"):
        raise UnsafePickleError("", "builtins.getattr")
    return inert_member(owner, name) if isinstance(owner, InertType) else inert_class("builtins.getattr")(owner, name)


def _reconstructor(kind: object, base: object = None, state: object = None) -> object:
    """Protocols 0 and 1 make objects by copyreg._reconstructor(class, base, value)."""
    return _new_object(kind) if state is None else _new_object(kind, state)


def _new_object(kind: object, *args: object) -> object:
    if isinstance(kind, Builder):
        return inert_class(kind.name)(*args)
    if not isinstance(kind, InertType):
        raise ValueError("an object of something that is no class")
    return kind(*args)


_RUNS: dict[str, Callable[..., object]] = {
    "torch.Size": _torch_size,
    "torch.device": _torch_device,
    "numpy.dtype": _np_dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _np_reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _np_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _np_frombuffer for core in ("core", "_core")},
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": lambda *args: bytearray(_bytes(*args)),
    "builtins.complex": _complex,
    "builtins.set": lambda items=(): PickledSet(_items(items)),
    "builtins.frozenset": lambda items=(): frozenset(map(checked_key, _items(items))),
    "builtins.getattr": _attribute,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    **{
        f"{module}.{name}": _path(name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath", "Path", "PurePath")
    },
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _new_object,
}


@functools.cache
def values() -> dict[str, object]:
    """What whitelisted names ("module.name") stand for."""
    dtypes = {f"torch.{name}": value for name, value in vars(loaded()).items() if isinstance(value, torch.dtype)}
    return {**{name: Builder(name, run) for name, run in _RUNS.items()}, **dtypes}
