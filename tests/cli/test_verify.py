"""`ucconvert verify` exits 1 on damage and lists where it is and what it hits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import flip, shards_of
from tests.cli.calls import Program


def test_a_whole_checkpoint_is_ok(ucconvert: Program, src: Path) -> None:
    answer = ucconvert("verify", src)
    assert answer.status == 0
    assert answer.out.startswith("ok: 4 tensors, 224 B, ")


def test_damage_is_listed_with_file_bytes_and_tensors(ucconvert: Program, src: Path) -> None:
    flip(shards_of(src) / "00000.safetensors", 4096 + 3)
    answer = ucconvert("verify", src)
    assert answer.status == 1
    assert "/00000.safetensors, bytes 4096-" in answer.out
    assert "xxh3-64 does not match; damages model/" in answer.out
    assert "DAMAGED: 1 finding" in answer.out
    result = json.loads(ucconvert("verify", src, "--json").out)
    assert result["damages"][0]["start"] == 4096
    assert result["damages"][0]["tensors"]


def test_a_missing_shard_is_listed(ucconvert: Program, src: Path) -> None:
    (shards_of(src) / "00001.safetensors").unlink()
    answer = ucconvert("verify", src)
    assert answer.status == 1
    assert "00001.safetensors" in answer.out


def test_zip_entries_of_torch_files_are_checked(ucconvert: Program, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "x.pt")
    assert ucconvert("verify", tmp_path / "x.pt").status == 0
    flip(tmp_path / "x.pt", 2500)
    answer = ucconvert("verify", tmp_path / "x.pt")
    assert answer.status == 1
    assert "crc32 does not match" in answer.out


def test_a_format_without_checksums_says_so(ucconvert: Program, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    answer = ucconvert("verify", tmp_path / "model.safetensors")
    assert answer.status == 0
    assert "note: hf has no checksums for 1 file" in answer.err
