"""`io.BytesIO` among values, as Transformer Engine's extra state: stored as class, bytes and position, and made again."""

from __future__ import annotations

import io
from typing import Any

from ucformat.values.codec import Opaque

CLASS = "_io.BytesIO"  # as pickles call it


def to_value(stream: io.BytesIO) -> Opaque:
    """What a value tree holds in its place: what unpickling one without its class gives."""
    return Opaque(CLASS, {"state": (stream.getvalue(), stream.tell(), None)})


def is_one(value: object) -> bool:
    """Whether a value stands for one. One with attributes of its own does not."""
    return _parts(value) is not None


def from_value(value: object) -> io.BytesIO | None:
    """The object that `value` stands for; None when it stands for something else."""
    parts = _parts(value)
    if parts is None:
        return None
    stream = io.BytesIO(parts[0])
    stream.seek(parts[1])
    return stream


def _parts(value: object) -> tuple[bytes, int] | None:
    if not isinstance(value, Opaque) or value.class_name != CLASS or not isinstance(value.state, dict):
        return None
    held: Any = value.state.get("state")
    if set(value.state) != {"state"} or not isinstance(held, tuple) or len(held) != 3:
        return None
    data, position, attributes = held
    plain = isinstance(data, bytes) and type(position) is int and 0 <= position < 1 << 62 and attributes is None
    return (data, position) if plain else None
