"""Reading pickles and torch.save files without executing anything: restricted unpickling, tensors as places in files.

A name in a pickle becomes one of our own builders (plain values, numpy numbers, tensors), or an inert stand-in that
records how it would have been called, or an error when no honest checkpoint has it. Readers of torch.save, DCP and
DeepSpeed build on `open_torch_zip` and `unpickle`.
"""

from __future__ import annotations

import argparse
import functools
import io
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ucformat.containers.zip_read import Peek, ZipEntry, without_prefix, zip_entries
from ucformat.dtypes import DTYPES
from ucformat.errors import ChecksumError, FormatError, UcformatError, UnsafePickleError, UnsupportedError, brief
from ucformat.pickles.containers import PickledDict, PickledSet, allowance, checked_key
from ucformat.pickles.inert import Inert, InertType, inert_class, is_hostile
from ucformat.pickles.plain import to_values
from ucformat.pickles.precheck import Scan, scan
from ucformat.pickles.tensors import TENSORS, RefusedTensor, StoredStorage, StoredTensor, storage_type
from ucformat.pickles.values import PickledArray, PickledDType, values
from ucformat.storage.store import Store

__all__ = [
    "Inert",
    "InertType",
    "Peek",
    "PickledDict",
    "RefusedTensor",
    "StoredStorage",
    "StoredTensor",
    "TorchFile",
    "ZipEntry",
    "open_torch_zip",
    "read_entry",
    "to_values",
    "unpickle",
    "zip_entries",
]

_MAX_PICKLE_BYTES = 2 << 30  # the metadata of a DCP with ten million chunks; decoding takes a multiple of it
_FINISHED_DEPTH = 200  # levels that are looked through for what is incomplete: deeper ones are not read


@functools.cache
def _builders() -> dict[str, object]:
    return {**values(), **TENSORS}


_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins", "cPickle": "pickle"}
_DEFERRED = frozenset(
    {
        *("argparse.Namespace", "builtins.set", "numpy.dtype"),
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
    }
)
"""Names whose objects are complete only after the whole pickle is read."""
_FRESH: tuple[Callable[[], object], ...] = (PickledDict, PickledSet)


class _Lookup:
    """Looks names up in our tables; never imports, never calls what it does not own."""

    def __init__(self, found: Scan, file: str, persistent: Callable[[object], object] | None) -> None:
        fresh = (make() for make in map(_FRESH.__getitem__, found.fresh))
        super().__init__(io.BytesIO(found.data), encoding="utf-8", buffers=fresh)  # type: ignore[call-arg]
        self._file, self._persistent = file, persistent
        self.deferred = 1 in found.fresh

    def find_class(self, module: str, name: str) -> Any:
        module = _PYTHON2.get(module, module)
        full = f"{module}.{name}"
        self.deferred = self.deferred or full in _DEFERRED
        known = _builders().get(full)
        if known is not None:
            return known
        if is_hostile(module, name):
            raise UnsafePickleError(self._file, full)
        return inert_class(full)

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise ValueError("it refers to records outside itself")
        return self._persistent(pid)


class _Unpickler(_Lookup, pickle.Unpickler):  # noqa: TID251  # this is the restricted one that the ban points to
    """The decoder in C. It takes every empty dict and set from us (see `precheck`), so that we see keys before it hashes."""


class _CarefulUnpickler(_Lookup, pickle._Unpickler):  # as above
    """The same in Python, for the rare pickle whose opcodes hash what is on the stack."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def load_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]  # typeshed lacks the methods of the decoder in Python
        made = PickledDict()
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[key] = value
        self.append(made)  # type: ignore[attr-defined]

    def load_frozenset(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.append(frozenset(map(checked_key, items)))  # type: ignore[attr-defined]

    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.FROZENSET[0]] = load_frozenset


def unpickle(data: bytes, file: str, persistent: Callable[[object], object] | None = None) -> Any:
    """Decode one pickle that `file` holds. Unknown classes come back as `Inert`, tensors as `StoredTensor`.

    `persistent` resolves persistent ids (storages). Raises UnsafePickleError when the pickle names something that
    could run code, FormatError when it is malformed or asks for absurd amounts of memory.
    """
    if len(data) > _MAX_PICKLE_BYTES:
        raise FormatError(file, f"a pickle of {len(data)} bytes; none needs more than {_MAX_PICKLE_BYTES}")
    found = scan(data, file)
    unpickler = (_CarefulUnpickler if found.hashes else _Unpickler)(found, file, persistent)
    try:
        with allowance(len(data)):
            tree = unpickler.load()
            return _finish(tree, {}) if unpickler.deferred else tree
    except UnsafePickleError as error:
        raise UnsafePickleError(file, error.what) from None
    except UcformatError:
        raise
    except Exception as error:  # whatever a malformed pickle makes the decoder stumble over
        raise FormatError(file, f"malformed pickle: {type(error).__name__}: {str(error)[:200]}") from error


def _finish(tree: Any, done: dict[int, Any], depth: int = 0) -> Any:
    """Replace what could be completed only now: numpy arrays and dtypes, sets, argparse namespaces. Containers in place.

    `done` maps ids to results; it also keeps cycles finite.
    """
    if id(tree) in done:
        return done[id(tree)]
    if depth > _FINISHED_DEPTH:
        return tree
    if isinstance(tree, (PickledArray, PickledDType)):
        done[id(tree)] = result = _numpy(tree)
        return result
    if isinstance(tree, dict):
        done[id(tree)] = tree
        for key, value in dict.items(tree):
            dict.__setitem__(tree, key, _finish(value, done, depth + 1))
    elif isinstance(tree, list):
        done[id(tree)] = tree
        tree[:] = [_finish(value, done, depth + 1) for value in tree]
    elif type(tree) is tuple:
        parts = tuple(_finish(value, done, depth + 1) for value in tree)
        done[id(tree)] = tree = tree if all(a is b for a, b in zip(parts, tree, strict=True)) else parts
    elif isinstance(tree, PickledSet):
        done[id(tree)] = tree = set(tree.items)
    elif isinstance(tree, Inert):
        return _finish_inert(tree, done, depth + 1)
    return tree


def _finish_inert(tree: Inert, done: dict[int, Any], depth: int) -> object:
    if tree.class_name == "argparse.Namespace":
        done[id(tree)] = space = argparse.Namespace()
        for key, value in tree.attributes.items():
            if isinstance(key, str):
                vars(space)[key] = _finish(value, done, depth)
        return space
    done[id(tree)] = tree
    tree.args = tuple(_finish(value, done, depth) for value in tree.args)
    tree.kwargs = {key: _finish(value, done, depth) for key, value in tree.kwargs.items()}
    tree.state = _finish(tree.state, done, depth)
    tree.entries = [_finish(value, done, depth) for value in tree.entries]
    tree.items = [(key, _finish(value, done, depth)) for key, value in tree.items]
    return tree


def _numpy(value: PickledArray | PickledDType) -> object:
    """The array, or a stand-in for arrays of anything but plain numbers."""
    if isinstance(value, PickledDType):
        return inert_class("numpy.dtype")(value.code, value.order)
    array = value.array()
    if array is not None:
        return array
    unread = inert_class("numpy.ndarray")()
    state = value.state if isinstance(value.state, tuple) else ()
    unread.state = tuple(part.code if isinstance(part, PickledDType) else part for part in state)
    return unread


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A torch.save zip: its decoded tree, its records ("data.pkl", "data/0", …) and its byte order."""

    tree: Any
    entries: dict[str, ZipEntry]
    byteorder: str
    file: str


def open_torch_zip(store: Store, path: str, start: int = 0, stop: int | None = None, peek: Peek | None = None) -> TorchFile:
    """Open the torch.save zip in bytes [start, stop) of a file: reads its directory and its pickle, no tensor data.

    Raises UnsupportedError for legacy (non-zip), TorchScript and big-endian files, FormatError and ChecksumError for
    damaged ones, UnsafePickleError for hostile ones.
    """
    peek = peek or Peek(store, path)
    entries = without_prefix(zip_entries(store, path, start, stop, peek), path)
    if "constants.pkl" in entries:
        raise UnsupportedError(path, "a TorchScript archive: save the module's state_dict() instead")
    if "data.pkl" not in entries:
        raise FormatError(path, "a zip, but none that torch.save writes: it has no data.pkl")
    order = read_entry(peek, path, entries["byteorder"]).decode("ascii", "replace") if "byteorder" in entries else "little"
    if order != "little":
        raise UnsupportedError(path, f"saved with byte order {order!r}: re-save it on a little-endian machine")
    data = read_entry(peek, path, entries["data.pkl"])
    tree = unpickle(data, path, lambda pid: _storage(pid, entries, path))
    return TorchFile(tree, entries, order, path)


def read_entry(peek: Peek, path: str, entry: ZipEntry) -> bytes:
    """The bytes of a small record. Raises ChecksumError when they are not those that were written."""
    if entry.size > _MAX_PICKLE_BYTES:
        raise FormatError(path, f"zip record {entry.name!r} of {entry.size} bytes is absurdly large", entry.start, entry.stop)
    data = peek.get(entry.start, entry.stop)
    if entry.crc is not None and zlib.crc32(data) != entry.crc:
        raise ChecksumError(path, entry.start, entry.stop, what=f"CRC of zip record {entry.name!r}")
    return data


def _storage(pid: object, entries: dict[str, ZipEntry], path: str) -> StoredStorage:
    """The storage that a persistent id names: ("storage", class, record number, device, items)."""
    if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
        raise ValueError(f"persistent id {brief(pid)} is no storage")
    _, kind, key, location, items = pid
    kind = storage_type(kind)
    if kind is None or not isinstance(key, str) or type(items) is not int or items < 0:
        raise ValueError(f"persistent id {brief(pid)} is no storage")
    entry = entries.get(f"data/{key}")
    if entry is None:
        raise FormatError(path, f"storage {key!r} has no record in the zip")
    nbytes = items * (1 if kind.dtype is None else DTYPES[kind.dtype].itemsize)
    if nbytes > entry.size:
        raise FormatError(path, f"storage {key!r} of {nbytes} bytes has a record of {entry.size}", entry.start, entry.stop)
    return StoredStorage(key, kind, path, entry.start, entry.size if kind.refused else nbytes, brief(location))
