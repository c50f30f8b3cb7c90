"""What to do about an object that can't be stored: by its type, where more can be said than of any object."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum


def hints(x: object) -> Iterator[str]:
    """What to store in place of an object, where more can be said than of any."""
    if isinstance(x, Enum):
        yield "store its .name or .value"
    elif isinstance(x, (slice, range)):
        yield "store (x.start, x.stop, x.step)"
    elif isinstance(x, tuple) and hasattr(x, "_asdict"):
        yield "store x._asdict()"
    elif is_dataclass(x) and not isinstance(x, type):
        yield "store dataclasses.asdict(x), or give its class methods state_dict and load_state_dict"
    elif hasattr(x, "untyped_storage"):
        yield "put it into a dict, list or tuple"
    elif isinstance(x, dict):
        yield "store dict(x)"
    elif isinstance(x, (list, deque)):
        yield "store list(x)"
    elif isinstance(x, (str, int, float)):
        yield f"store it as {next(kind.__name__ for kind in (str, int, float) if isinstance(x, kind))}"
    elif hasattr(x, "get_state") or hasattr(x, "getstate") or hasattr(x, "bit_generator"):
        yield "put it into a dict or list of the state itself, or store its state"
