"""Checkpoints whose files are replaced while they are read: what is read is of one of them, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ucformat
from ucformat.errors import CheckpointChangedError

FORMATS = {"hf": "", "dcp": "", "torchsave": "x.pt"}


def _write(path: Path, to: str, value: float, *, overwrite: bool = False) -> None:
    native = path.parent / f"native-{value}"
    ucformat.save(native, {"model": {"w": torch.full((4096, 64), value), "b": torch.full((3,), value)}})
    ucformat.convert(str(native), str(path / FORMATS[to]) if FORMATS[to] else str(path), to, overwrite=overwrite)


@pytest.fixture(params=FORMATS)
def replaced(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[float], None]]:
    """A checkpoint, and what replaces it."""
    to = str(request.param)
    path = tmp_path / "ck"
    if FORMATS[to]:
        path.mkdir()
    _write(path, to, 1.0)
    return path / FORMATS[to] if FORMATS[to] else path, lambda value: _write(path, to, value, overwrite=True)


def test_a_slice_of_what_was_replaced_since_it_was_opened_is_an_error(replaced: tuple[Path, Callable[[float], None]]) -> None:
    path, replace = replaced
    opened = ucformat.open(path)
    assert opened["model/w"][0, 0] == 1.0
    replace(2.0)
    with pytest.raises(CheckpointChangedError, match="replaced while it was read"):
        opened["model/w"][0, 0]
    assert ucformat.open(path)["model/w"][0, 0] == 2.0


def test_a_load_of_what_is_replaced_meanwhile_is_done_again(replaced: tuple[Path, Callable[[float], None]]) -> None:
    path, replace = replaced
    values = iter((2.0,))

    def disturb(_: int) -> None:
        for value in values:  # once
            replace(value)

    live = {"w": torch.zeros(4096, 64), "b": torch.zeros(3)}
    ucformat.load(path, into={"model": live}, on_bytes=disturb)
    assert all(bool((tensor == 2.0).all()) for tensor in live.values())
