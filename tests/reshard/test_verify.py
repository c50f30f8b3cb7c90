"""All damage is found, and said where it lies and which tensors it hits; what is whole passes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import flip, open_native, shards_of, write_native
from ucformat.box import Box
from ucformat.catalog import Catalog, CatalogBuilder, Checks, File, StaticChecks
from ucformat.containers.checksums import digest
from ucformat.formats import hf
from ucformat.formats.source import locate
from ucformat.reshard.convert import convert
from ucformat.reshard.verify import STEP_BYTES, verify
from ucformat.storage.local import LocalStore


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    state = {f"w{i}": torch.randn(100_000) for i in range(6)}
    write_native(tmp_path / "ck", state, shards=2)
    return tmp_path / "ck"


def opened(path: Path) -> Catalog:
    return open_native(LocalStore(str(path)))


def test_a_whole_checkpoint_passes_and_every_data_byte_is_checked(whole: Path) -> None:
    seen: list[int] = []
    result = verify(opened(whole), seen.append)
    assert result.ok
    assert result.tensors == 6
    assert result.checked >= result.nbytes == 2_400_000
    assert sum(seen) == result.checked


def test_every_flipped_bit_is_found_with_its_tensor(whole: Path) -> None:
    catalog = opened(whole)
    rows = {spec.name: catalog.fragments.rows(i).start for i, spec in enumerate(catalog.tensors)}
    hit = {}
    for name in ("w1", "w4"):
        file = catalog.files[int(catalog.fragments.file[rows[name]])].path
        hit[name] = (str(whole / file), int(catalog.fragments.start[rows[name]]) + 200_000)
        flip(*hit[name])
    damages = verify(catalog).damages
    assert len(damages) == 2
    for name, (file, at) in hit.items():
        (damage,) = [damage for damage in damages if damage.file == file and name in damage.tensors]
        assert damage.start is not None
        assert damage.stop is not None
        assert damage.start <= at < damage.stop


def test_a_flipped_bit_in_a_header_or_checksum_table_is_found(whole: Path) -> None:
    catalog = opened(whole)
    flip(shards_of(whole) / "00000.safetensors", 100)
    flip(shards_of(whole) / "00001.safetensors", (shards_of(whole) / "00001.safetensors").stat().st_size - 3)
    first, second = verify(catalog).damages
    assert "header" in first.what
    assert "checksum table" in second.what


def test_a_cut_off_and_a_missing_file_are_found_with_their_tensors(whole: Path) -> None:
    catalog = opened(whole)
    size = (shards_of(whole) / "00000.safetensors").stat().st_size
    os.truncate(shards_of(whole) / "00000.safetensors", size // 2)
    (shards_of(whole) / "00001.safetensors").unlink()
    damages = verify(catalog).damages
    assert any("bytes" in damage.what and damage.tensors for damage in damages)
    assert any("00001" in damage.file and len(damage.tensors) == 3 for damage in damages)


def test_holes_and_overlaps_of_every_tensor_are_listed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0" * 64)
    builder = CatalogBuilder(LocalStore(str(tmp_path)))
    file = builder.file(File("x", 64))
    for name, boxes in {"hole": [(0, 2)], "twice": [(0, 3), (2, 2)], "good": [(0, 4)]}.items():
        builder.tensor(name, "F32", (4,))
        for start, length in boxes:
            builder.fragment(name, file, 0, Box((start,), (length,)))
    damages = verify(builder.build()).damages
    assert [damage.tensors for damage in damages] == [("hole",), ("twice",)]
    assert "[2:4]" in damages[0].what


def test_zip_entries_longer_than_a_step_are_checked(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, STEP_BYTES + 12_345, dtype=np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    checks = Checks("crc32", np.array([0]), np.array([len(data)]), np.array([digest("crc32", data)], dtype=np.uint64))
    builder = CatalogBuilder(LocalStore(str(tmp_path)))
    builder.tensor("w", "U8", (len(data),))
    builder.fragment("w", builder.file(File("x", len(data), StaticChecks(checks))), 0)
    assert verify(builder.build()).ok
    flip(tmp_path / "x", STEP_BYTES + 5)
    (damage,) = verify(builder.build()).damages
    assert damage.tensors == ("w",)


def test_a_changed_or_missing_companion_is_found(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "hf/model.safetensors")
    for name in ("config.json", "tokenizer.json", "README.md"):
        (tmp_path / "hf" / name).write_text("{}")
    convert(str(tmp_path / "hf"), str(tmp_path / "ck"), "native")
    assert verify(opened(tmp_path / "ck")).ok
    (companions,) = (tmp_path / "ck").glob("companions.*")
    flip(companions / "config.json", 0)
    (companions / "README.md").unlink()
    assert sorted(Path(damage.file).name for damage in verify(opened(tmp_path / "ck")).damages) == ["README.md", "config.json"]


def test_a_format_without_checksums_says_so(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    result = verify(hf.open_catalog(locate(str(tmp_path))))
    assert result.ok
    assert result.unchecked == ("model.safetensors",)
