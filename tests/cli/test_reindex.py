"""`ucconvert reindex` brings back a lost index, and nothing but the one that was committed."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import flip, shards_of
from tests.cli.calls import Program


def test_a_lost_index_is_rebuilt_byte_for_byte(ucconvert: Program, src: Path) -> None:
    index = (shards_of(src) / "index.safetensors").read_bytes()
    (shards_of(src) / "index.safetensors").unlink()
    assert ucconvert("inspect", src).status == 1
    answer = ucconvert("reindex", src)
    assert answer.status == 0
    assert answer.out == f"rebuilt the index of {src}: 6 fragments\n"
    assert (shards_of(src) / "index.safetensors").read_bytes() == index
    assert ucconvert("verify", src).status == 0


def test_a_damaged_shard_header_is_refused(ucconvert: Program, src: Path) -> None:
    (shards_of(src) / "index.safetensors").unlink()
    flip(shards_of(src) / "00000.safetensors", 40)
    answer = ucconvert("reindex", src)
    assert answer.status == 1
    assert "00000.safetensors" in answer.err
    assert not (shards_of(src) / "index.safetensors").exists()


def test_only_native_checkpoints_have_an_index(ucconvert: Program, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.txt").write_text("a")
    assert "[NotACheckpointError]" in ucconvert("reindex", tmp_path / "x").err
