"""An open checkpoint from Python: numpy arrays of what it holds, its mapping, and the name it has in messages."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import ucformat
from ucformat import errors

NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


def opened(path: Path, **state: object) -> ucformat.Checkpoint:
    ucformat.save(path, state)
    return ucformat.open(path)


@pytest.mark.parametrize("kind", NARROW)
def test_a_dtype_that_numpy_lacks_comes_as_ml_dtypes_has_it_or_as_it_is_asked_for(tmp_path: Path, kind: str) -> None:
    w = torch.tensor([[0.5, 1.0, 2.0]]).to(getattr(torch, kind))
    lazy = opened(tmp_path / "ck", w=w, one=w[0, 0].clone())["w"]
    array = np.asarray(lazy)
    assert array.dtype == np.dtype(getattr(ml_dtypes, kind))
    assert array.astype(np.float32).tolist() == [[0.5, 1.0, 2.0]]
    assert np.asarray(lazy, dtype=np.float32).tolist() == [[0.5, 1.0, 2.0]]
    assert np.asarray(ucformat.open(tmp_path / "ck")["one"]).shape == ()


def test_without_ml_dtypes_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    lazy = opened(tmp_path / "ck", w=torch.ones(2, dtype=torch.bfloat16))["w"]
    with pytest.raises(errors.UnsupportedError, match=r"w: numpy has no dtype bfloat16: `\.read\(\)` gives a torch tensor"):
        np.asarray(lazy)
    assert np.asarray(lazy, dtype=np.float64).tolist() == [1.0, 1.0]


def test_packed_numbers_are_never_shown_as_bytes(tmp_path: Path) -> None:
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    lazy = opened(tmp_path / "ck", w=packed)["w"]
    for dtype in (None, np.dtype(np.float32)):
        with pytest.raises(errors.UnsupportedError, match="float4_e2m1fn_x2"):
            np.asarray(lazy, dtype=dtype)


def test_an_array_of_a_lazy_tensor_is_always_a_copy(tmp_path: Path) -> None:
    lazy = opened(tmp_path / "ck", w=torch.ones(2), c=torch.ones(2, dtype=torch.complex32))
    assert np.asarray(lazy["w"]).dtype == np.float32
    assert np.asarray(lazy["c"], dtype=np.complex64).dtype == np.complex64
    with pytest.raises(ValueError, match="always a copy"):
        lazy["w"].__array__(copy=False)


def test_values_are_those_of_a_mapping_and_the_value_tree_has_a_name_of_its_own(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "ck", w=torch.ones(2), step=3)
    assert [lazy.name for lazy in checkpoint.values()] == ["w"]
    assert [name for name, _ in checkpoint.items()] == ["w"]
    assert checkpoint.values_tree == {"step": 3}


def test_messages_about_a_single_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some.pt"
    torch.save({"model": {"w": torch.ones(2)}}, path)
    assert repr(ucformat.open(path)).startswith(f"Checkpoint({str(path)!r}")
    with pytest.raises(errors.NamesMismatchError, match=r"^[^ ]*/some\.pt: "):
        ucformat.load(path, into={"model": {"v": torch.ones(2)}})
    assert ucformat.load(path, into={"model": {"w": torch.zeros(2)}}).source == str(path)


def test_the_module_of_errors_is_part_of_the_api() -> None:
    assert "errors" in ucformat.__all__
    assert issubclass(ucformat.errors.UnsupportedError, ucformat.UcformatError)
