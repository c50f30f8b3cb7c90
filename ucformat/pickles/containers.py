"""Dicts and sets that a pickle fills: keys are looked at before they are hashed, and copies are counted.

Hashing a tuple hashes its parts, in C and without a limit: one that is nested a million deep ends the process, and one of
forty levels whose parts are shared takes years. The same goes for copies: a hundred bytes can ask for a hundred copies of
everything before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ucformat.pickles.inert import Inert

_MAX_KEY_DEPTH = 64  # tuples within tuples in a key
_MAX_KEY_PARTS = 4096  # of one key, shared ones counted every time
_SMALL = 1 << 60  # whole numbers from 2^61 - 1 on can be chosen so that thousands have one hash
_LARGE_NUMBER_COST = 4096  # bytes that such a key counts as
_FLOOR = 16 << 20  # bytes that any pickle may have copied
_TIMES = 8  # its own length that a pickle may have copied: what is shared among honest parts is small

_left: ContextVar[list[int]] = ContextVar("ucformat_pickle_allowance")


@contextmanager
def allowance(nbytes: int) -> Iterator[None]:
    """Inside, a pickle of `nbytes` bytes is decoded: what it has copied is counted."""
    token = _left.set([_FLOOR + _TIMES * nbytes])
    try:
        yield
    finally:
        _left.reset(token)


def charge(nbytes: int) -> None:
    """Count bytes that are about to be copied. Raises ValueError when a pickle of its length has no reason to."""
    left = _left.get(None)
    if left is None:
        return
    left[0] -= nbytes
    if left[0] < 0:
        raise ValueError("it has its parts copied beyond all measure")


def checked_key(key: Any) -> Any:
    """A key or an item of a set, safe to hash. Raises ValueError for one that is nested too deeply or multiplies."""
    kind = type(key)
    if kind is str or (kind is int and -_SMALL < key < _SMALL) or isinstance(key, Inert):
        return key
    level, parts = [key], 0
    for _ in range(_MAX_KEY_DEPTH):
        nested = [part for part in level if isinstance(part, (tuple, frozenset))]
        for part in level:
            if isinstance(part, (int, float, complex)) and not -_SMALL < abs(part) < _SMALL:
                charge(_LARGE_NUMBER_COST)
        parts += sum(map(len, nested))
        if parts > _MAX_KEY_PARTS:
            raise ValueError(f"a key of more than {_MAX_KEY_PARTS} parts")
        if not nested:
            return key
        level = [part for inner in nested for part in inner]
    raise ValueError(f"a key that is nested more than {_MAX_KEY_DEPTH} deep")


class PickledDict(dict[Any, Any]):
    """A dict of the pickle; instance attributes (a state dict's `_metadata`) are kept beside it."""

    __slots__ = ("attributes",)
    attributes: object

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self, checked_key(key), value)

    def __setstate__(self, state: object) -> None:
        self.attributes = state


class PickledSet:
    """A set while its pickle is being read: the decoder would fill a real one without asking."""

    __slots__ = ("items",)
    __hash__ = None  # type: ignore[assignment]  # as a set's

    def __init__(self, items: Iterable[object] = ()) -> None:
        self.items: list[object] = [checked_key(item) for item in items]

    def add(self, item: object) -> None:
        self.items.append(checked_key(item))

    def __setstate__(self, state: object) -> None:
        raise TypeError("a set takes no state")
