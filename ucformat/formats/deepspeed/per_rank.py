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


def unite(opened: Opened, held: Sequence[object], files: Sequence[str], what: str) -> object:
    """The value that all ranks hold, or a RankLocal of all their values, and a remark on `what`, when they differ."""
    values = [to_values(value, file) for value, file in zip(held, files, strict=True)]
    forms = [_form(opened, value) for value in values]
    if all(form == forms[0] for form in forms):
        return held[0]
    odd = next(rank for rank, form in enumerate(forms) if form != forms[0])
    shown = (
        f": {str(values[0])[:_SHOWN]} on rank 0, {str(values[odd])[:_SHOWN]} on rank {odd}"
        if all(isinstance(value, (bool, int, float, str)) for value in (values[0], values[odd]))
        else ""
    )
    opened.remarks.append(f"{what} differs between ranks{shown}: kept for each rank")
    return RankLocal("error", tuple({"dp": rank} for rank in range(len(values))), tuple(values))


def unite_each(opened: Opened, held: Sequence[Mapping[Any, Any]], files: Sequence[str], what: str) -> dict[Any, Any]:
    """As `unite`, for each key that any rank has; one that a rank lacks is None there."""
    keys = dict.fromkeys(key for mapping in held for key in mapping)
    return {key: unite(opened, [mapping.get(key) for mapping in held], files, f"{what} {key!r}") for key in keys}


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
