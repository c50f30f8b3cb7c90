"""What should be alike on all ranks, and need not be: compared, and where it differs kept for each rank."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ucformat.formats.deepspeed.records import Opened, numel
from ucformat.pickles.unpickle import StoredTensor, to_values
from ucformat.values.codec import Opaque, RankLocal

_COMPARED_ITEMS = 1 << 20  # larger tensors count as different: none that belongs here is as large
_SHOWN = 60  # characters of a value in a remark


Coords = Mapping[str, int]
"""Mesh coordinates of a file: `dp`, and `pp` and `tp` where there are several."""


def unite(
    opened: Opened, held: Sequence[object], files: Sequence[str], what: str, coords: Sequence[Coords] | None = None
) -> object:
    """The value that all ranks hold, or a RankLocal of all their values, and a remark on `what`, when they differ.

    `coords` says where they were held: data-parallel ranks in order when it is None. Values that are RankLocal already are
    those of the data-parallel ranks at that place.
    """
    where = [{"dp": rank} for rank in range(len(held))] if coords is None else [dict(at) for at in coords]
    if coords is not None and any(isinstance(value, RankLocal) for value in held):
        plain = (
            value if isinstance(value, RankLocal) else to_values(value, file) for value, file in zip(held, files, strict=True)
        )
        return _joined(list(plain), where)
    values = [to_values(value, file) for value, file in zip(held, files, strict=True)]
    forms = [_form(opened, value) for value in values]
    if all(form == forms[0] for form in forms):
        return held[0]
    odd = next(rank for rank, form in enumerate(forms) if form != forms[0])
    shown = (
        f": {str(values[0])[:_SHOWN]} on rank {_rank(where[0])}, {str(values[odd])[:_SHOWN]} on rank {_rank(where[odd])}"
        if all(isinstance(value, (bool, int, float, str)) for value in (values[0], values[odd]))
        else ""
    )
    opened.remarks.append(f"{what} differs between ranks{shown}: kept for each rank")
    return RankLocal("error", tuple(where), tuple(values))


def _rank(at: Coords) -> str:
    """A place for a message: the bare number where there is only data parallelism."""
    return str(at["dp"]) if set(at) == {"dp"} else " ".join(f"{axis} {at[axis]}" for axis in at)


def _joined(held: Sequence[object], where: Sequence[dict[str, int]]) -> RankLocal:
    """One RankLocal of all places, of which some have one of their data-parallel ranks."""
    coords: list[dict[str, int] | None] = []
    values: list[object] = []
    for value, at in zip(held, where, strict=True):
        each = zip(value.coords, value.values, strict=True) if isinstance(value, RankLocal) else [(None, value)]
        for own, item in each:
            coords.append({**at, **(own or {})})
            values.append(item)
    return RankLocal("error", tuple(coords), tuple(values))


def unite_each(
    opened: Opened,
    held: Sequence[Mapping[Any, Any]],
    files: Sequence[str],
    what: str,
    coords: Sequence[Coords] | None = None,
) -> dict[Any, Any]:
    """As `unite`, for each key that any rank has; one that a rank lacks is None there."""
    keys = dict.fromkeys(key for mapping in held for key in mapping)
    return {key: unite(opened, [mapping.get(key) for mapping in held], files, f"{what} {key!r}", coords) for key in keys}


def _form(opened: Opened, value: Any) -> object:
    """A form of plain values that can be compared: floats and tensors by their bytes, so that NaN equals itself."""
    if isinstance(value, StoredTensor):
        if numel(value) > _COMPARED_ITEMS:
            return "place", value.file, value.start, value.shape
        data = opened.bytes_of([value])[0] if value.contiguous else (value.file, value.start)
        return value.dtype, value.shape, data
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, argparse.Namespace):
        return "namespace", _form(opened, vars(value))
    if isinstance(value, Opaque):
        return "opaque", value.class_name, _form(opened, value.state)
    if isinstance(value, dict):
        return "dict", [(key, _form(opened, item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_form(opened, item) for item in value]
    return type(value).__name__, value
