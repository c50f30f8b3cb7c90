"""Stored items as numbers, without torch: exactly, in dtypes that numpy has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucformat.dtypes import DTYPES

_NATIVE = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8",
    "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8", "C128": "c16",
}  # fmt: skip
"""What numpy has itself."""
_FLOAT8: dict[str, tuple[int, int, Callable[[int], bool], Callable[[int], bool]]] = {
    "F8_E4M3": (3, 7, lambda bits: bits & 127 == 127, lambda bits: False),
    "F8_E5M2": (2, 15, lambda bits: bits & 127 > 124, lambda bits: bits & 127 == 124),
    "F8_E4M3FNUZ": (3, 8, lambda bits: bits == 128, lambda bits: False),
    "F8_E5M2FNUZ": (2, 16, lambda bits: bits == 128, lambda bits: False),
}
"""Bits of fraction, bias of the exponent, what is no number, what is infinite."""


def in_numpy(dtype: str) -> np.dtype[Any] | None:
    """The numpy dtype with the same items; None where numpy has none."""
    return np.dtype(_NATIVE[dtype]) if dtype in _NATIVE else None


def widened(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Items as an array of the narrowest numpy dtype that holds their numbers: float32 for bfloat16 and float8.

    `bits` is an array of `DType.numpy`. Raises ValueError for packed dtypes, whose items are no numbers.
    """
    if dtype in _NATIVE:
        native: NDArray[Any] = bits.view(_NATIVE[dtype])
        return native
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "C32":
        pairs = np.ascontiguousarray(bits).reshape(-1).view(np.float16).astype(np.float32)
        return pairs.view(np.complex64).reshape(bits.shape)
    if DTYPES[dtype].group != (1, 1):
        raise ValueError(f"items of {dtype} are packed numbers")
    numbers: NDArray[Any] = _table(dtype)[bits]
    return numbers


@cache
def _table(dtype: str) -> NDArray[np.float32]:
    """The numbers of all 256 bit patterns of a float8."""
    return np.array([_number(dtype, bits) for bits in range(256)], dtype=np.float32)


def _number(dtype: str, bits: int) -> float:
    if dtype == "F8_E8M0":
        return float("nan") if bits == 255 else 2.0 ** (bits - 127)
    width, bias, is_nan, is_infinite = _FLOAT8[dtype]
    if is_nan(bits):
        return float("nan")
    sign = -1.0 if bits >> 7 else 1.0
    if is_infinite(bits):
        return sign * float("inf")
    exponent, fraction = (bits & 127) >> width, (bits & ((1 << width) - 1)) / (1 << width)
    return float(sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction))
