"""Putting stored values where live ones are: into the same memory and the same containers where that can be."""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ucformat import values
from ucformat.errors import UnsupportedError
from ucformat.reshard.state import rng

DICTS = frozenset({dict, OrderedDict, Counter, defaultdict})
"""Types of live dicts. What makes counters and default dicts more than dicts is the live one's, and not stored."""
SEQUENCES = frozenset({list, tuple, deque})
"""Types of live sequences. A deque is stored as a list."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Stands in a tree of stored state for the tensor `name`: not read yet, or read in place."""

    name: str


class Stateful(Protocol):
    """Schedulers, samplers, loaders: whatever gives its state and takes it back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


def is_stateful(x: object) -> TypeGuard[Stateful]:
    if rng.is_generator(x):
        return True
    return not isinstance(x, type) and callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))


def state_of(x: Stateful, path: str) -> Any:
    """What `x.state_dict()` gives, or the state of a generator. Raises UnsupportedError naming `path` when it fails."""
    if rng.is_generator(x):
        return rng.state_of(x)
    try:
        return x.state_dict()
    except Exception as error:
        raise UnsupportedError(path, f"{type(x).__qualname__}.state_dict() failed: {type(error).__name__}: {error}") from error


def pending(tree: object) -> Iterator[str]:
    """Names of all that is pending in a joined tree."""
    return (x.name for x in values.nodes(tree) if isinstance(x, Pending))


def assign(live: Any, new: object) -> object:
    """`new` in the place of `live`, which keeps its identity if it is a container, or a tensor of the same shape and dtype.

    Returns what has to stand there now. Objects with state get it back; what is pending was read in place and stays.
    """
    if isinstance(new, Pending):
        return live
    if isinstance(live, torch.Tensor) and not isinstance(live, DTensor):
        return _assign_tensor(live, new)
    if isinstance(live, np.ndarray) and isinstance(new, np.ndarray):
        if live.shape != new.shape or live.dtype != new.dtype or not live.flags.writeable:
            return new
        live[...] = new
        return live
    if is_stateful(live):
        restore_state(live, new)
        return live
    if type(live) in DICTS and type(new) in {dict, OrderedDict}:
        fresh = {key: assign(live.get(key), item) for key, item in cast(dict[Any, Any], new).items()}
        live.clear()
        live.update(fresh)
        return live
    if type(live) is argparse.Namespace and type(new) is argparse.Namespace:
        assign(vars(live), vars(new))
        return live
    if type(live) is deque and type(new) is list:
        items = [assign(a, b) for a, b in zip(live, new, strict=True)] if len(live) == len(new) else new
        live.clear()
        live.extend(items)
        return live
    if type(live) is list and type(new) is list:
        live[:] = [assign(a, b) for a, b in zip(live, new, strict=True)] if len(live) == len(new) else new
        return live
    if type(live) is tuple and type(new) is tuple and len(live) == len(new):
        return tuple(assign(a, b) for a, b in zip(live, new, strict=True))
    return new


def check(live: Any, new: object, path: str) -> None:
    """Raise UnsupportedError where `assign` would have to refuse `new` or lose some of it, before anything is changed."""
    if rng.is_generator(live):
        rng.check(live, new, path)
    elif type(live) is deque and type(new) is list and live.maxlen is not None and live.maxlen < len(new):
        raise UnsupportedError(path, f"a deque of at most {live.maxlen} items here, {len(new)} are stored: make it longer")
    elif type(live) is argparse.Namespace and isinstance(new, argparse.Namespace):
        check(vars(live), vars(new), path)
    elif type(live) in DICTS and isinstance(new, dict):
        for key, item in live.items():
            if key in new:
                check(item, new[key], f"{path}/{key}")
    elif type(live) in SEQUENCES and isinstance(new, (list, tuple)) and len(live) == len(new):
        for i, (a, b) in enumerate(zip(live, new, strict=True)):
            check(a, b, f"{path}/{i}")


def _assign_tensor(live: torch.Tensor, new: object) -> object:
    with torch.no_grad():
        if isinstance(new, torch.Tensor) and new.shape == live.shape and new.dtype == live.dtype:
            return live.copy_(new)
        if type(new) in {int, float, bool} and live.numel() == 1:
            return live.fill_(cast(float, new))
    return new


def exact(state: Any) -> Any:
    """A state that `state_dict` gave, in types that values have: counters, default dicts and deques become plain."""
    if isinstance(state, (Counter, defaultdict)) or type(state) is dict:
        return {key: exact(item) for key, item in state.items()}
    if isinstance(state, deque):
        return [exact(item) for item in state]
    if type(state) in {list, tuple}:
        return type(state)(exact(item) for item in state)
    return state


def restore_state(item: Stateful, stored: object) -> None:
    """Hand `stored` to `load_state_dict`, in the container types that the object itself uses. Generators are set to it."""
    if rng.is_generator(item):
        rng.restore(item, stored)
        return
    item.load_state_dict(_like(item.state_dict(), stored))


def _like(live: Any, stored: Any) -> Any:
    """The inverse of `exact`, with the live state as the pattern."""
    if isinstance(stored, dict) and isinstance(live, dict):
        items = {key: _like(live.get(key), item) for key, item in stored.items()}
        if isinstance(live, Counter):
            return Counter(items)
        return defaultdict(live.default_factory, items) if isinstance(live, defaultdict) else type(stored)(items)
    if isinstance(stored, list) and isinstance(live, deque):
        return deque(stored, live.maxlen)
    if type(stored) in {list, tuple} and type(live) is type(stored) and len(live) == len(stored):
        return type(stored)(_like(a, b) for a, b in zip(live, stored, strict=True))
    return stored
