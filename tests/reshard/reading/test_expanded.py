"""A file of 1.5 KB may hold a view of 1 TB: it is read in slices, and never made whole by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucformat
from ucformat.errors import UnsupportedError


@pytest.fixture
def huge(tmp_path: Path) -> str:
    torch.save({"a.w": torch.full((1,), 5.0).expand(1 << 38)}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 3000
    return str(tmp_path / "x.pt")


def test_a_slice_of_an_expanded_view_is_read(huge: str) -> None:
    assert ucformat.open(huge)["model/a.w"][1 << 37 : (1 << 37) + 3].tolist() == [5, 5, 5]


def test_an_expanded_view_is_not_made_whole(huge: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="slices"):
        ucformat.open(huge)["model/a.w"].read()
    with pytest.raises(UnsupportedError, match="slices"):
        ucformat.load(huge)
    with pytest.raises(UnsupportedError, match="slices"):
        ucformat.convert(huge, str(tmp_path / "out"), "native")
    assert not (tmp_path / "out").exists()


def test_small_expanded_views_are_read_whole(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(3, 1).expand(3, 5)}, tmp_path / "x.pt")
    assert torch.equal(ucformat.open(str(tmp_path / "x.pt"))["model/a.w"].read(), torch.ones(3, 5))
