"""Executing plans: right bytes into any destination, wrong bytes into none without an error that names them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import bits, flip, open_native, shards_of, split_evenly, write_native
from ucformat.box import Box
from ucformat.catalog import CatalogBuilder, Checks, File, StaticChecks
from ucformat.containers.checksums import digest
from ucformat.dtypes import DTYPES
from ucformat.errors import ChecksumError, DTypeMismatchError, FormatError, MissingFileError, ShapeMismatchError
from ucformat.reshard.reading.execute import DIRECT_BYTES, execute
from ucformat.reshard.reading.lazy import read
from ucformat.reshard.reading.plan import TASK_BYTES, plan, wants
from ucformat.storage.local import LocalStore


def _all_dtypes() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for kind in DTYPES.values():
        if kind.name.startswith("F6_"):
            continue  # torch has no such dtype; formats tests cover it
        for label, shape in (("matrix", (6, 10)), ("scalar", ()), ("empty", (0, 4)), ("vector", (1000,))):
            if kind.group != (1, 1) and not shape:
                continue
            raw = torch.randint(0, 2 if kind.name == "BOOL" else 256, (int(np.prod(shape)) * kind.itemsize,), dtype=torch.uint8)
            tensors[f"{kind.name}/{label}"] = raw.view(kind.torch).reshape(shape)
    return tensors


def test_every_dtype_shape_and_emptiness_round_trips(tmp_path: Path) -> None:
    tensors = _all_dtypes()
    catalog = open_native(write_native(tmp_path / "ck", tensors, shards=3))
    for name, tensor in tensors.items():
        found = read(catalog, name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert bits(found) == bits(tensor)


def test_strided_destinations_of_every_dtype_are_filled(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in _all_dtypes().items() if name.endswith("matrix")}
    tiling = {name: split_evenly((6, 10), 1, 3) for name in tensors}
    catalog = open_native(write_native(tmp_path / "ck", tensors, tiling))
    for name, tensor in tensors.items():
        wide = torch.zeros(12 * 10 * tensor.element_size(), dtype=torch.uint8).view(tensor.dtype).view(12, 10)
        execute(plan(catalog, wants(catalog, [(name, None)])), [wide[::2]])
        assert bits(wide[::2]) == bits(tensor)


def test_non_contiguous_and_transposed_tensors_save_as_their_values(tmp_path: Path) -> None:
    base = torch.randn(50, 40)
    tensors = {"t": base.t(), "step": base[::3, 1::2], "expanded": torch.randn(1, 5).expand(7, 5)}
    catalog = open_native(write_native(tmp_path / "ck", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(read(catalog, name), tensor)


def test_tensors_larger_than_a_task_go_straight_and_cut(tmp_path: Path) -> None:
    columns = 1000
    rows = 3 * TASK_BYTES // (4 * columns) + 7
    tensor = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    catalog = open_native(write_native(tmp_path / "ck", {"w": tensor, "x": torch.ones(3)}, shards=1))
    assert torch.equal(read(catalog, "w"), tensor)
    assert torch.equal(read(catalog, "w", Box((0, 3), (rows, columns - 5))), tensor[:, 3:-2])
    turned = torch.empty(columns, rows, dtype=torch.int32).t()
    execute(plan(catalog, wants(catalog, [("w", None)])), [turned])
    assert torch.equal(turned, tensor)


def test_a_cast_happens_only_when_asked(tmp_path: Path) -> None:
    tensor = torch.randn(30, 4)
    catalog = open_native(write_native(tmp_path / "ck", {"w": tensor}))
    planned = plan(catalog, wants(catalog, [("w", None)]))
    out = torch.empty(30, 4, dtype=torch.bfloat16)
    with pytest.raises(DTypeMismatchError, match="F32"):
        execute(planned, [out])
    execute(planned, [out], cast=True)
    assert torch.equal(out, tensor.bfloat16())
    with pytest.raises(ShapeMismatchError):
        execute(planned, [torch.empty(4, 30)])


def test_a_flipped_bit_anywhere_in_the_data_is_found_and_named(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(300, 300) for i in range(4)}
    store = write_native(tmp_path / "ck", tensors)
    catalog = open_native(store)
    path = shards_of(tmp_path / "ck") / "00000.safetensors"
    row = int(catalog.fragments.start[2])
    for at in (row, row + 1000, row + 300 * 300 * 4 - 1):
        flip(path, at)
        with pytest.raises(ChecksumError) as caught:
            read(catalog, "w2")
        assert "w2" in caught.value.tensors
        assert caught.value.start <= at < caught.value.stop
        assert str(path) in str(caught.value)
        flip(path, at)
    assert torch.equal(read(catalog, "w2"), tensors["w2"])


def test_small_and_large_tensors_of_one_read_go_where_they_belong(tmp_path: Path) -> None:
    """Large ones are read in place, small ones and strided ones are copied out, in reads that they share."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 2 * DIRECT_BYTES, 5, 7, DIRECT_BYTES + 1, DIRECT_BYTES, 300_000, 1, 0, 40_000]
    tensors = {
        f"w{i:02}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for i, size in enumerate(3 * sizes)
    }
    tensors["strided"] = torch.randint(0, 256, (300, 301), dtype=torch.uint8, generator=generator)
    catalog = open_native(write_native(tmp_path / "ck", tensors))
    names = [*tensors, "w06"]  # one of them twice
    dest = [torch.empty_like(tensors[name]) for name in names]
    dest[names.index("strided")] = torch.empty(301, 300, dtype=torch.uint8).t()
    execute(plan(catalog, wants(catalog, [(name, None) for name in names])), dest)
    for name, found in zip(names, dest, strict=True):
        assert torch.equal(found, tensors[name])
    part = Box((1000,), (200_000,))
    execute(
        plan(catalog, wants(catalog, [("w06", part), ("w04", None)])), cut := [torch.empty(200_000, dtype=torch.uint8), dest[4]]
    )
    assert torch.equal(cut[0], tensors["w06"][1000:201_000])
    path = shards_of(tmp_path / "ck") / "00000.safetensors"
    for row in catalog.fragments.start.tolist():
        flip(path, row)
        with pytest.raises(ChecksumError) as caught:
            execute(plan(catalog, wants(catalog, [(name, None) for name in names])), dest)
        assert caught.value.start <= row < caught.value.stop
        flip(path, row)


def test_a_damaged_checksum_table_is_not_trusted(tmp_path: Path) -> None:
    store = write_native(tmp_path / "ck", {"w": torch.randn(100)})
    catalog = open_native(store)
    path = shards_of(tmp_path / "ck") / "00000.safetensors"
    flip(path, path.stat().st_size - 4000)
    with pytest.raises(ChecksumError, match="table"):
        read(catalog, "w")


def test_a_truncated_or_missing_shard_is_named(tmp_path: Path) -> None:
    store = write_native(tmp_path / "ck", {"w": torch.randn(5000)})
    catalog = open_native(store)
    path = shards_of(tmp_path / "ck") / "00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with pytest.raises(FormatError, match=r"00000\.safetensors"):
        read(catalog, "w")
    path.unlink()
    with pytest.raises(MissingFileError, match=r"00000\.safetensors"):
        read(catalog, "w")


def _crc_catalog(tmp_path: Path, data: bytes, start: int) -> CatalogBuilder:
    (tmp_path / "f.bin").write_bytes(b"x" * start + data + b"tail")
    checks = Checks(
        "crc32",
        np.array([start]),
        np.array([start + len(data)]),
        np.array([digest("crc32", np.frombuffer(data, np.uint8))], dtype=np.uint64),
    )
    builder = CatalogBuilder(LocalStore(str(tmp_path)))
    builder.file(File("f.bin", start + len(data) + 4, StaticChecks(checks)))
    return builder


@pytest.mark.parametrize("start", [0, 1, 703])
def test_a_zip_entry_read_in_parts_is_checked_as_a_whole(tmp_path: Path, start: int) -> None:
    tensor = torch.arange(3 * TASK_BYTES // 4 + 11, dtype=torch.float32)
    builder = _crc_catalog(tmp_path, bits(tensor), start)
    builder.tensor("w", "F32", tensor.shape)
    builder.fragment("w", 0, start)
    catalog = builder.build()
    assert torch.equal(read(catalog, "w"), tensor)
    flip(tmp_path / "f.bin", start + 2 * TASK_BYTES)
    with pytest.raises(ChecksumError, match="crc32"):
        read(catalog, "w")
    assert torch.equal(read(catalog, "w", Box((0,), (10,))), tensor[:10])  # a part can't be checked: documented


def test_damage_in_unread_padding_does_not_hide_damage_elsewhere(tmp_path: Path) -> None:
    """A record of which all but its padding is wanted is still checked: the padding is read for that."""
    tensor = torch.arange(1000, dtype=torch.float32)
    builder = _crc_catalog(tmp_path, bits(tensor), 8)
    builder.tensor("w", "F32", (990,))
    builder.fragment("w", 0, 8)
    catalog = builder.build()
    assert torch.equal(read(catalog, "w"), tensor[:990])
    flip(tmp_path / "f.bin", 8 + 400)
    with pytest.raises(ChecksumError, match="crc32"):
        read(catalog, "w")


def test_unaligned_foreign_bytes_and_strides_are_honoured(tmp_path: Path) -> None:
    base = torch.randn(6, 9, dtype=torch.float64)
    builder = _crc_catalog(tmp_path, bits(base), 13)
    builder.tensor("t", "F64", (9, 6))
    builder.fragment("t", 0, 13, None, stride=(1, 9))
    catalog = builder.build()
    assert torch.equal(read(catalog, "t"), base.t())
    assert torch.equal(read(catalog, "t", Box((2, 1), (5, 3))), base.t()[2:7, 1:4])


def test_progress_counts_each_wanted_byte_once(tmp_path: Path) -> None:
    tensor = torch.randn(1500, 1500)
    catalog = open_native(write_native(tmp_path / "ck", {"w": tensor}, {"w": split_evenly((1500, 1500), 1, 3)}))
    seen: list[int] = []
    planned = plan(catalog, wants(catalog, [("w", Box((0, 100), (1500, 900)))]))
    execute(planned, [torch.empty(1500, 900)], on_bytes=seen.append)
    assert sum(seen) == 1500 * 900 * 4 == planned.nbytes
