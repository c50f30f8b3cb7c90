"""dtypes: one table that agrees with safetensors and torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save

from ucformat.dtypes import DTYPES, DType, from_torch

deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize

NAMES_OF_OUR_OWN = {"C32", "C128"}  # no safetensors name: stored as pairs of F16 and F64


def names_of_safetensors() -> set[str]:
    """Every dtype that the installed safetensors knows: it lists them when it meets an unknown one."""
    header = b'{"a":{"dtype":"NO_SUCH","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(safetensors.SafetensorError) as caught:
        deserialize(len(header).to_bytes(8, "little") + header)
    return set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value))) - {"NO_SUCH"}


def test_every_dtype_of_safetensors_is_there_and_no_other() -> None:
    assert DTYPES.keys() - NAMES_OF_OUR_OWN == names_of_safetensors()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_torch_agrees_on_the_item_size(dtype: DType) -> None:
    assert torch.empty(1, dtype=dtype.torch).itemsize == dtype.itemsize
    assert dtype.numpy.itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_safetensors_takes_our_header_shapes_as_so_many_bytes(dtype: DType) -> None:
    shape = (4, 6)
    header_shape = dtype.header_shape(shape)
    nbytes = 24 * dtype.itemsize
    header = f'{{"a":{{"dtype":"{dtype.stored}","shape":{header_shape},"data_offsets":[0,{nbytes}]}}}}'.encode()
    ((name, entry),) = deserialize(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    assert (name, list(entry["shape"]), entry["dtype"]) == ("a", header_shape, dtype.stored)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if not d.tail], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (0, 3), (1, 2, 12)], ids=str)
def test_item_shapes_survive_the_header(dtype: DType, shape: tuple[int, ...]) -> None:
    assert dtype.item_shape(dtype.header_shape(shape)) == shape


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES.values() if d.stored == d.name and not d.name.startswith("F6_")], ids=lambda d: d.name
)
def test_safetensors_itself_stores_this_torch_dtype_under_this_name(dtype: DType) -> None:
    x = torch.zeros(2, 4, dtype=torch.uint8).view(torch.uint8).repeat(1, dtype.itemsize).view(dtype.torch)
    data = save({"a": x})
    ((_, entry),) = deserialize(data)
    assert entry["dtype"] == dtype.name
    assert list(entry["shape"]) == dtype.header_shape(x.shape)


@pytest.mark.parametrize(
    ("name", "items", "header"),
    [("F4", (3, 5), [3, 10]), ("F6_E2M3", (2, 6), [2, 8]), ("F6_E3M2", (3,), [4]), ("C32", (3,), [3, 2]), ("C128", (), [2])],
)
def test_packed_and_split_dtypes_count_numbers_in_headers(name: str, items: tuple[int, ...], header: list[int]) -> None:
    assert DTYPES[name].header_shape(items) == header


@pytest.mark.parametrize(("name", "shape"), [("F6_E2M3", (4,)), ("F6_E2M3", ()), ("F4", ())])
def test_shapes_that_are_no_whole_groups_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="last dimension"):
        DTYPES[name].header_shape(shape)


@pytest.mark.parametrize(("name", "shape"), [("F4", [3]), ("F4", []), ("F6_E3M2", [6])])
def test_header_shapes_that_are_no_whole_items_are_refused(name: str, shape: list[int]) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        DTYPES[name].item_shape(shape)


def test_every_torch_dtype_but_quantised_ones_has_its_row() -> None:
    known = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    missing = {str(x).removeprefix("torch.") for x in known} - {str(d.torch).removeprefix("torch.") for d in DTYPES.values()}
    assert not {name for name in missing if not re.match(r"q|bits|u?int[1-7]$", name)}
    assert from_torch(torch.uint8).name == "U8"
    with pytest.raises(KeyError):
        from_torch(torch.qint8)
