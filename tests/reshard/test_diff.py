"""Differences are found whatever the formats and layouts, and what is equal is found equal."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import bits, flip, open_native, shards_of, split_evenly, write_native
from ucformat.catalog import Catalog
from ucformat.errors import ChecksumError
from ucformat.formats import hf
from ucformat.formats.source import locate
from ucformat.reshard.diff import BATCH_BYTES, Diff, Difference, Tolerance, diff


def native(path: Path, state: dict[str, torch.Tensor], **more: Any) -> Catalog:
    return open_native(write_native(path, state, **more))


def compare(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **more: Any) -> Diff:
    return diff(native(tmp_path / "a", a), native(tmp_path / "b", b), **more)


def kinds(found: Diff) -> dict[str, str]:
    return {item.name: item.kind for item in found.differences}


def test_equal_checkpoints_of_different_layout_are_equal(tmp_path: Path) -> None:
    state = {"w": torch.randn(7, 5), "s": torch.tensor(1), "e": torch.empty(0, 2), "b": torch.tensor([True, False])}
    a = native(tmp_path / "a", state, tiling={"w": split_evenly((7, 5), 1, 3)}, shards=2)
    found = diff(a, native(tmp_path / "b", state, tiling={"w": split_evenly((7, 5), 0, 4)}))
    assert found.equal
    assert found.tensors == 4


def test_every_kind_of_difference_is_told(tmp_path: Path) -> None:
    a = {"same": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "value": torch.ones(2, 3), "left": torch.ones(1)}
    b = {"same": torch.ones(2), "shape": torch.ones(3), "dtype": torch.ones(2).half(), "right": torch.ones(1)}
    b["value"] = torch.tensor([[1.0, 1, 1], [1, 1.5, 2]])
    found = compare(tmp_path, a, b)
    assert kinds(found) == {"shape": "shape", "dtype": "dtype", "value": "values", "left": "only in a", "right": "only in b"}
    (value,) = [item for item in found.differences if item.name == "value"]
    assert value.detail == "2 of 6 items differ, first at [1, 1], largest difference 1"


def test_bits_count_without_a_tolerance(tmp_path: Path) -> None:
    zero = {"z": torch.tensor([0.0])}
    assert not compare(tmp_path / "1", zero, {"z": torch.tensor([-0.0])}).equal
    assert compare(tmp_path / "2", zero, {"z": torch.tensor([-0.0])}, tolerance=Tolerance()).equal
    nan = {"z": torch.tensor([float("nan")])}
    assert compare(tmp_path / "3", nan, nan).equal
    assert compare(tmp_path / "4", nan, nan, tolerance=Tolerance(1e-3)).equal
    assert not compare(tmp_path / "5", nan, zero, tolerance=Tolerance(1e9)).equal


def test_tolerances_are_absolute_and_relative(tmp_path: Path) -> None:
    a, b = {"w": torch.tensor([100.0, 1.0])}, {"w": torch.tensor([101.0, 1.0])}
    assert compare(tmp_path / "1", a, b, tolerance=Tolerance(atol=1.0)).equal
    assert compare(tmp_path / "2", a, b, tolerance=Tolerance(rtol=0.01)).equal
    assert not compare(tmp_path / "3", a, b, tolerance=Tolerance(atol=0.5, rtol=0.001)).equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int64, torch.complex64, torch.bool])
def test_one_item_of_any_dtype_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.ones(1000).to(dtype)
    b = torch.ones(1000)
    b[777] = 0
    found = compare(tmp_path, {"w": a}, {"w": b.to(dtype)}, tolerance=Tolerance(1e-3))
    assert found.differences[0].detail.startswith("1 of 1000 items differ, first at [777]")


def test_packed_dtypes_are_compared_by_their_bits(tmp_path: Path) -> None:
    a = torch.arange(8, dtype=torch.uint8)
    b = a.clone()
    b[3] = 99
    for number, other in enumerate((a, b)):
        found = compare(
            tmp_path / str(number),
            {"w": a.view(torch.float4_e2m1fn_x2)},
            {"w": other.view(torch.float4_e2m1fn_x2)},
            tolerance=Tolerance(1),
        )
        assert found.equal == (number == 0)


def test_numbers_may_be_compared_across_dtypes(tmp_path: Path) -> None:
    a, b = {"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.5], dtype=torch.bfloat16)}
    assert not compare(tmp_path / "1", a, b).equal
    assert compare(tmp_path / "2", a, b, any_dtype=True).equal
    assert not compare(tmp_path / "3", {"w": torch.tensor([1.0, 2.501])}, b, any_dtype=True).equal


def test_a_tied_name_that_one_side_lacks_is_a_note(tmp_path: Path) -> None:
    state = {"embed": torch.randn(4)}
    a = native(tmp_path / "a", state, aliases={"head": "embed"})
    found = diff(a, native(tmp_path / "b", state))
    assert found.equal
    assert "head is only in a, tied to embed" in found.notes[0]
    found = diff(native(tmp_path / "c", {"head": state["embed"]}), a)
    assert found.equal
    assert "embed is only in b" in found.notes[0]


def test_a_tied_name_that_the_other_side_stores_is_compared(tmp_path: Path) -> None:
    a = native(tmp_path / "a", {"embed": torch.ones(4)}, aliases={"head": "embed"})
    assert diff(a, native(tmp_path / "b", {"embed": torch.ones(4), "head": torch.ones(4)})).equal
    found = diff(a, native(tmp_path / "c", {"embed": torch.ones(4), "head": torch.zeros(4)}))
    assert kinds(found) == {"head": "values"}


def test_values_are_compared_when_asked(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    a = native(tmp_path / "a", state, values={"step": 3, "args": {"lr": 0.1, "x": (1, 2)}, "gone": 1})
    b = native(tmp_path / "b", state, values={"step": 3, "args": {"lr": 0.2, "x": [1, 2]}})
    assert diff(a, b).equal
    assert diff(a, b, values=True).differences == (
        Difference("values:args/lr", "values", "0.1 and 0.2"),
        Difference("values:args/x", "values", "(1, 2) and [1, 2]"),
        Difference("values:gone", "only in a"),
    )


def test_any_two_formats_are_compared(tmp_path: Path) -> None:
    state = {"model/w": torch.randn(3, 3), "model/b": torch.randn(3)}
    save_file({name.removeprefix("model/"): t for name, t in state.items()}, tmp_path / "x.safetensors")
    assert diff(native(tmp_path / "a", state), hf.open_catalog(locate(str(tmp_path / "x.safetensors")))).equal


def test_a_damaged_side_is_an_error_not_a_difference(tmp_path: Path) -> None:
    state = {"w": torch.zeros(100_000)}
    a, b = native(tmp_path / "a", state), native(tmp_path / "b", state)
    flip(shards_of(tmp_path / "b") / "00000.safetensors", 50_000)
    with pytest.raises(ChecksumError, match="damages w"):
        diff(a, b)


def test_many_tiny_tensors_are_compared(tmp_path: Path) -> None:
    a = {f"t{i}": torch.full((2,), float(i)) for i in range(5000)}
    b = {**a, "t4321": torch.zeros(2)}
    assert kinds(compare(tmp_path, a, b)) == {"t4321": "values"}


def test_memory_is_bounded_by_the_batch(tmp_path: Path) -> None:
    state = {"w": torch.randn(12_000_000)}
    a, b = native(tmp_path / "a", state), native(tmp_path / "b", state)
    assert bits(state["w"])[:4]
    tracemalloc.start()
    assert diff(a, b).equal
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * BATCH_BYTES  # each side's batch, and the reader's buffers
