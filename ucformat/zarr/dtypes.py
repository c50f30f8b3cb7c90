"""Data types of zarr: its own, those of zarr-extensions for bfloat16 and float8, and bits for what has neither.

zarr has no classes for the extensions; `register` adds them, on top of ml_dtypes, so that arrays hold numbers.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasItemSize
from zarr.dtype import ZDType

from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.reshard.reading.numbers import in_numpy

EXTENSIONS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
"""Dtypes that zarr-extensions names as ml_dtypes does."""


@dataclass(frozen=True, kw_only=True)
class MlFloat(ZDType[Any, Any], HasItemSize):
    """A floating-point type of ml_dtypes; one subclass for each."""

    native: ClassVar[np.dtype[Any]]

    @property
    def item_size(self) -> int:
        return self.native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> MlFloat:
        if dtype == cls.native:
            return cls()
        raise DataTypeValidationError(f"{dtype} is not {cls.native}")

    def to_native_dtype(self) -> np.dtype[Any]:
        return self.native

    @classmethod
    def _from_json_v2(cls, data: Any) -> MlFloat:
        raise DataTypeValidationError(f"zarr v2 has no {cls.native}: {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> MlFloat:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")

    def to_json(self, zarr_format: Any) -> Any:
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.generic))

    def cast_scalar(self, data: object) -> Any:
        return self.native.type(data)

    def default_scalar(self) -> Any:
        return self.native.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        return self.native.type(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        number = float(np.asarray(data, dtype=self.native).astype(np.float32))
        return number if np.isfinite(number) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(number), "NaN")


@cache
def register() -> None:
    """Make zarr know the extensions. Raises UnsupportedError where ml_dtypes is not installed."""
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise UnsupportedError("zarr", "bfloat16 and float8 need ml_dtypes: pip install ml_dtypes") from error
    from zarr.core.dtype import data_type_registry

    for name in EXTENSIONS:
        known = DTYPES[name].torch_name
        native = np.dtype(getattr(ml_dtypes, known))
        members = {"native": native, "dtype_cls": type(native), "_zarr_v3_name": known, "__module__": __name__}
        data_type_registry.register(known, type(f"Ml_{known}", (MlFloat,), members))


def data_type(dtype: str) -> str:
    """The `data_type` of an array with items of a dtype: unsigned integers for what zarr has no name for."""
    if dtype in EXTENSIONS:
        return DTYPES[dtype].torch_name
    native = in_numpy(dtype)
    return str(DTYPES[dtype].numpy if native is None else native)


def is_bits(dtype: str) -> bool:
    """Whether arrays hold the bits of items, since zarr has no such numbers."""
    return dtype not in EXTENSIONS and in_numpy(dtype) is None


def fill_value(dtype: str) -> object:
    """Zero, as metadata has it."""
    native = in_numpy(dtype)
    kind = "u" if native is None else native.kind
    return 0.0 if dtype in EXTENSIONS or kind == "f" else [0.0, 0.0] if kind == "c" else False if kind == "b" else 0
