"""Checkpoints of any format as zarr stores: every tensor is an array, bit for bit, read in chunks along its fragments."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info < (3, 11):
    pytest.skip("zarr with data types of other packages needs Python 3.11", allow_module_level=True)
import zarr
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype

import ucformat
from specs.run_conformance import GOLDEN
from tests.checkpoints import CountingStore, split_evenly, write_native
from ucformat.catalog import Catalog
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.errors import ChecksumError, UnsupportedError
from ucformat.formats.native import open_catalog
from ucformat.formats.source import Source
from ucformat.reshard.reading.lazy import Checkpoint, read_bits
from ucformat.zarr.byte_range import boxes_of_items
from ucformat.zarr.chunk_read import ChunkRead, read_all
from ucformat.zarr.layout import CHUNK_BYTES, CHUNKS, chunk_shape, node_path

GROUPS = ["basic", "dtypes", "boxes", "training", "names", "parts", "empty", "run", "snapshot"]


def bits_of(array: zarr.Array[Any]) -> bytes:
    return np.asarray(array[...]).tobytes()


@pytest.mark.parametrize("name", GROUPS)
def test_every_tensor_of_a_golden_checkpoint_is_an_array_bit_for_bit(name: str) -> None:
    opened = ucformat.open(GOLDEN / name / "checkpoint")
    root = zarr.open_group(ucformat.zarr_store(opened), mode="r")
    for tensor in opened:
        array = root[node_path(tensor)]
        assert isinstance(array, zarr.Array)
        assert array.shape == opened[tensor].shape
        assert bits_of(array) == read_bits(opened.catalog, [(tensor, None)])[0].tobytes(), tensor
    assert root.attrs["ucf:step"] == opened.step


def test_bfloat16_and_float8_are_numbers() -> None:
    opened = ucformat.open(GOLDEN / "dtypes" / "checkpoint")
    root = zarr.open_group(ucformat.zarr_store(opened), mode="r")["model"]
    assert isinstance(root, zarr.Group)
    array = root["BF16"]
    assert isinstance(array, zarr.Array)
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array[1:4, 2:7], opened["model/BF16"].numpy[1:4, 2:7])
    for name, native in (("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E8M0", "float8_e8m0fnu")):
        assert root[name].dtype == getattr(ml_dtypes, native)  # type: ignore[union-attr]
    assert root["F4"].attrs["ucf:bits"]


def test_any_format_is_a_store(tmp_path: Path) -> None:
    model = {"a.w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.int8)}
    safetensors.torch.save_file(model, tmp_path / "model.safetensors", {"format": "pt"})
    torch.save(model, tmp_path / "model.pt")
    for path in ("model.safetensors", "model.pt"):
        root = zarr.open_group(ucformat.zarr_store(tmp_path / path), mode="r")
        found = {path: array for path, array in root.members(max_depth=None) if isinstance(array, zarr.Array)}
        assert {path.rpartition("/")[2] for path in found} == {"a.w", "b"}
        assert all(np.array_equal(array[...], model[path.rpartition("/")[2]].numpy()) for path, array in found.items())


def test_chunks_follow_regular_fragments_and_are_bounded(tmp_path: Path) -> None:
    tensors = {
        "even": torch.arange(64.0).reshape(8, 8),
        "uneven": torch.arange(35.0).reshape(7, 5),
        "large": torch.zeros(4096, 1024),
    }
    tiling = {"even": split_evenly((8, 8), 0, 4), "uneven": split_evenly((7, 5), 0, 3)}
    write_native(tmp_path, tensors, tiling, shards=2)
    catalog = ucformat.open(tmp_path).catalog
    assert chunk_shape(catalog, "even") == (2, 8)
    assert chunk_shape(catalog, "uneven") == (7, 5)
    assert chunk_shape(catalog, "large") == ((16 << 20) // CHUNKS // 4096, 1024)


def test_a_slice_reads_its_chunks_only(tmp_path: Path) -> None:
    write_native(tmp_path, {"w": torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)})
    store = CountingStore(str(tmp_path))
    root = zarr.open_group(ucformat.zarr_store(Checkpoint(open_catalog(Source(store)))), mode="r")
    store.read_bytes.clear()
    array = root["w"]
    assert isinstance(array, zarr.Array)
    np.testing.assert_array_equal(array[1000:1010, :3], np.arange(1000 * 1024, 1010 * 1024).reshape(10, 1024)[:, :3])
    assert store.total <= 2 * CHUNK_BYTES


def test_a_slice_of_one_percent_reads_three_percent_and_blocks(tmp_path: Path) -> None:
    write_native(tmp_path, {"w": torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)})
    store = CountingStore(str(tmp_path))
    array = zarr.open_group(ucformat.zarr_store(Checkpoint(open_catalog(Source(store)))), mode="r")["w"]
    assert isinstance(array, zarr.Array)
    for first in (0, 1003, 4055):
        store.read_bytes.clear()
        found = array[first : first + 41]
        np.testing.assert_array_equal(found, np.arange(first * 1024, (first + 41) * 1024).reshape(41, 1024))
        assert store.total <= 0.03 * array.nbytes + 2 * BLOCK_BYTES


def test_a_byte_range_of_a_chunk_reads_its_blocks_only(tmp_path: Path) -> None:
    write_native(tmp_path, {"w": torch.arange(64 << 20, dtype=torch.int32)})
    store = CountingStore(str(tmp_path))
    zarr_store = ucformat.zarr_store(Checkpoint(open_catalog(Source(store))))
    asyncio.run(zarr_store.get("w/c/0", default_buffer_prototype(), RangeByteRequest(0, 4)))  # and the table of checksums
    store.read_bytes.clear()
    found = asyncio.run(zarr_store.get("w/c/3", default_buffer_prototype(), RangeByteRequest(4000, 4008)))
    assert found is not None
    assert np.frombuffer(found.to_bytes(), np.int32).tolist() == [3 * CHUNK_BYTES // 4 + 1000, 3 * CHUNK_BYTES // 4 + 1001]
    assert store.total < CHUNK_BYTES // 2


def test_byte_ranges_across_the_edge_of_a_tensor_are_those_of_the_padded_chunk(tmp_path: Path) -> None:
    rows = torch.arange(300 * 128, dtype=torch.float32).reshape(300, 128) + 1
    write_native(tmp_path, {"w": rows})
    zarr_store = ucformat.zarr_store(tmp_path)
    padded = np.zeros((128, 128), np.float32)
    padded[:44] = rows[256:].numpy()
    expected, edge = padded.tobytes(), 44 * 512

    async def part(request: ByteRequest | None) -> bytes:
        found = await zarr_store.get("w/c/2/0", default_buffer_prototype(), request)
        assert found is not None
        return found.to_bytes()

    assert asyncio.run(part(None)) == expected
    for first, end in ((edge - 7, edge + 9), (edge, edge + 5), (edge + 3, edge + 3000), (edge - 1500, edge), (1, 3)):
        assert asyncio.run(part(RangeByteRequest(first, end))) == expected[first:end]


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(0, 700), st.integers(0, 700))
def test_boxes_of_a_byte_range_are_its_items_in_order(shape: list[int], start: int, stop: int) -> None:
    items = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start, stop = min(start, items.size), min(stop, items.size)
    boxes = list(boxes_of_items(tuple(shape), start, stop))
    parts = [items[tuple(slice(o, o + n) for o, n in zip(box.offset, box.length, strict=True))] for box in boxes]
    assert [n for part in parts for n in part.reshape(-1)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_directory_of_many_tensors_is_listed_without_a_walk_over_chunks(tmp_path: Path) -> None:
    write_native(tmp_path, {f"layer.{i}/w": torch.zeros(2) for i in range(300)} | {"large": torch.zeros(1 << 16, 16)})
    store = ucformat.zarr_store(tmp_path)
    store._chunk_keys = None  # type: ignore[assignment, method-assign]  # a walk would fail

    async def names(path: str) -> list[str]:
        return [name async for name in store.list_dir(path)]

    assert len(asyncio.run(names(""))) == 302
    assert asyncio.run(names("layer.7")) == ["w", "zarr.json"]
    assert asyncio.run(names("large/c")) == sorted(map(str, range(64)))
    assert asyncio.run(names("large/c/63")) == ["0"]
    assert asyncio.run(names("large/c/64")) == asyncio.run(names("large/c/²")) == asyncio.run(names("nothing")) == []


def test_damage_is_an_error_and_never_a_fill_value(tmp_path: Path) -> None:
    write_native(tmp_path, {"w": torch.arange(1000.0)})
    (shard,) = tmp_path.glob("shards.*/0*")
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    array = zarr.open_group(ucformat.zarr_store(tmp_path), mode="r")["w"]
    with pytest.raises(ChecksumError):
        array[...]  # type: ignore[index]


def test_damage_of_one_chunk_fails_that_chunk_alone(tmp_path: Path) -> None:
    """Though chunks that are asked for at the same time are read as one."""
    tensors = {name: torch.arange(1 << 14, dtype=torch.float32) for name in ("x", "y", "z")}
    write_native(tmp_path, tensors, shards=3)
    store = ucformat.zarr_store(tmp_path)
    shard = sorted(tmp_path.glob("shards.*/0*"))[1]
    data = bytearray(shard.read_bytes())
    data[20000] ^= 1
    shard.write_bytes(data)

    async def story() -> list[object]:
        return await asyncio.gather(
            *(store.get(f"{name}/c/0", default_buffer_prototype()) for name in tensors), return_exceptions=True
        )

    found = asyncio.run(story())
    whole = [one.to_bytes() == tensors["x"].numpy().tobytes() for one in found if isinstance(one, Buffer)]
    assert whole == [True, True]
    assert sum(isinstance(one, ChecksumError) for one in found) == 1


def test_chunks_that_are_asked_for_together_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_native(tmp_path, {"w": torch.arange(1 << 17, dtype=torch.float32)})
    sizes: list[int] = []

    def counted(catalog: Catalog, reads: list[ChunkRead]) -> list[memoryview | Exception]:
        sizes.append(len(reads))
        return read_all(catalog, reads)

    monkeypatch.setattr("ucformat.zarr.batches.read_all", counted)
    array = zarr.open_group(ucformat.zarr_store(tmp_path), mode="r")["w"]
    assert isinstance(array, zarr.Array)
    np.testing.assert_array_equal(array[...], np.arange(1 << 17))
    assert sum(sizes) == 8
    assert len(sizes) < 8


def test_a_name_below_another_ones_tensor_is_refused(tmp_path: Path) -> None:
    write_native(tmp_path, {"a": torch.ones(2), "a/b": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="lies below"):
        ucformat.zarr_store(tmp_path)


def test_the_store_keeps_zarrs_contract() -> None:
    """What zarr's StoreTests ask of a store that can't be written to; they themselves put keys of their own into it first."""
    store, prototype = ucformat.zarr_store(GOLDEN / "boxes" / "checkpoint"), default_buffer_prototype()
    assert store == ucformat.zarr_store(GOLDEN / "boxes" / "checkpoint")
    assert store.read_only
    assert (store.supports_writes, store.supports_deletes, store.supports_listing) == (False, False, True)
    assert store.with_read_only(read_only=True) == store
    with pytest.raises(NotImplementedError):
        store.with_read_only(read_only=False)

    async def story() -> None:
        keys = [key async for key in store.list()]
        assert len(keys) == len(set(keys))
        for key in keys:
            whole = await store.get(key, prototype)
            assert whole is not None
            assert await store.exists(key)
            data = whole.to_bytes()
            parts: list[tuple[ByteRequest, bytes]] = [
                (RangeByteRequest(1, 4), data[1:4]),
                (OffsetByteRequest(1), data[1:]),
                (SuffixByteRequest(1), data[-1:]),
            ]
            found = await store.get_partial_values(prototype, [(key, part) for part, _ in parts])
            assert [one.to_bytes() for one in found if one is not None] == [expected for _, expected in parts]
        for absent in ("x", "boxes/c/9/0/0", "boxes/c/0", "boxes/c/0/0/00", "boxes/c/-1/0/0", "c/0", "boxes/zarr.json/x", ""):
            assert await store.get(absent, prototype) is None
            assert not await store.exists(absent)
        top = [name async for name in store.list_dir("")]
        assert top == [
            "boxes",
            "byte by byte",
            "many blocks",
            "zarr.json",
            "zero-d",
        ]
        assert [name async for name in store.list_dir("boxes")] == ["c", "zarr.json"]
        assert sorted([key async for key in store.list_prefix("zero-d/")]) == ["zero-d/c", "zero-d/zarr.json"]
        with pytest.raises(TypeError, match="Unexpected byte_range"):
            await store.get("zarr.json", prototype, (0, 2))  # type: ignore[arg-type]
        for write in (store.set("x", prototype.buffer.from_bytes(b"")), store.delete("zarr.json")):
            with pytest.raises(ValueError, match="read-only"):
                await write

    asyncio.run(story())
