"""What stands in the place of a file and is none is refused at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

import ucformat
from ucformat.errors import FormatError, MissingFileError, UcformatError
from ucformat.storage.open import open_store


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ucformat.save(str(tmp_path / "c"), {"model": {"w": torch.arange(8.0)}})
    return tmp_path / "c"


@pytest.mark.parametrize("name", ["ucf.json", "shards*/index.safetensors", "shards*/00000.safetensors"])
def test_a_fifo_in_place_of_a_file_is_refused_without_waiting(checkpoint: Path, name: str) -> None:
    path = next(checkpoint.glob(name))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UcformatError, match="FIFO"):
        ucformat.load(str(checkpoint))


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "pytorch_model.bin", "config.json"])
def test_a_path_that_is_a_fifo_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UcformatError):
        ucformat.open(str(tmp_path / name))
    with pytest.raises(UcformatError):
        ucformat.open(str(tmp_path))


def test_sockets_and_devices_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(FormatError, match="socket"):
            open_store(str(tmp_path)).reader("s")
    os.symlink("/dev/zero", tmp_path / "d")
    with pytest.raises(FormatError, match="device"):
        open_store(str(tmp_path)).reader("d")


def test_paths_that_no_file_can_have_are_missing_files() -> None:
    for path in ("a\0b", "a\ud800b"):
        with pytest.raises(MissingFileError):
            ucformat.open(path)
    with pytest.raises(UcformatError):
        open_store("/tmp").read("a\ud800b")  # nothing is written there


def test_file_names_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(2)}, tmp_path / "x.pt")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.pt")
    os.rename(tmp_path / "x.pt", odd)
    assert ucformat.open(odd)["model/a.w"].read().tolist() == [1, 1]
