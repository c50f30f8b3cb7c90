"""Megatron checkpoints are recognised, whichever folder is given, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ucformat import formats
from ucformat.errors import UnsupportedError
from ucformat.formats import megatron
from ucformat.formats.source import locate


def distributed(folder: Path, backend: str = "torch_dist") -> None:
    folder.mkdir(parents=True)
    torch.save({"iteration": 10}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))
    (folder / ".metadata").write_bytes(b"\x80\x04N.")


def legacy(folder: Path, ranks: tuple[str, ...]) -> None:
    for rank in ranks:
        (folder / rank).mkdir(parents=True)
        torch.save({"model": {"w": torch.zeros(2)}, "iteration": 10}, folder / rank / "model_optim_rng.pt")


def test_distributed_checkpoints_are_refused_by_their_backend(tmp_path: Path) -> None:
    distributed(tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    for folder in ("run", "run/iter_0000010"):
        source = locate(str(tmp_path / folder))
        assert megatron.detect(source)
        with pytest.raises(UnsupportedError, match=r"Megatron distributed checkpoint \(torch_dist\).*later release"):
            megatron.open_catalog(source)


@pytest.mark.parametrize("ranks", [("mp_rank_00",), ("mp_rank_00_000", "mp_rank_00_001"), ("mp_rank_00_000_000",)])
def test_legacy_checkpoints_are_refused(ranks: tuple[str, ...], tmp_path: Path) -> None:
    legacy(tmp_path / "iter_0000010", ranks)
    for folder in (tmp_path, tmp_path / "iter_0000010"):
        source = locate(str(folder))
        assert formats.detect(source) is megatron.READER
        with pytest.raises(UnsupportedError, match=f"{len(ranks)} model-parallel ranks"):
            formats.open_catalog(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sharded_backend": 5}', "\xff", " " * 100_000])
def test_other_files_of_that_name_are_not_megatrons(text: str, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
    assert not megatron.detect(locate(str(tmp_path)))


def test_a_single_file_is_not_megatrons(tmp_path: Path) -> None:
    legacy(tmp_path, ("mp_rank_00",))
    assert not megatron.detect(locate(str(tmp_path / "mp_rank_00" / "model_optim_rng.pt")))
