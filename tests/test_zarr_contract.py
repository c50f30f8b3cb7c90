"""zarr's own suite for stores, on a store that can't be written to.

Where the suite first puts keys of its own into a store, the same is asked here of keys that a checkpoint has.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("zarr with data types of other packages needs Python 3.11", allow_module_level=True)
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import _collect_aiterator
from zarr.testing.store import StoreTests

import ucformat
from specs.run_conformance import GOLDEN
from ucformat.zarr.byte_range import bounds
from ucformat.zarr.chunk_read import ChunkRead, read_all
from ucformat.zarr.store import CheckpointStore

KEYS = ("zarr.json", "boxes/zarr.json", "boxes/c/0/0/0", "zero-d/c")
READ_ONLY = "store was opened in read-only mode and does not support writing"


@pytest.mark.anyio
class TestCheckpointStore(StoreTests[CheckpointStore, Buffer]):
    store_cls = CheckpointStore
    buffer_cls = cpu.Buffer
    # writing is refused (`test_every_write_is_refused`), and there are no synchronous methods
    test_set = test_set_not_open = test_set_many = test_set_if_not_exists = test_clear = None  # type: ignore[assignment]
    test_delete = test_delete_dir = test_delete_nonexistent_key_does_not_raise = None  # type: ignore[assignment]
    test_get_sync = test_get_sync_missing = test_set_sync = None  # type: ignore[assignment]
    test_delete_sync = test_delete_sync_missing = None  # type: ignore[assignment]

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"catalog": ucformat.open(GOLDEN / "boxes" / "checkpoint").catalog}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> CheckpointStore:
        return asyncio.run(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> CheckpointStore:
        return self.store_cls(**store_kwargs)

    async def set(self, store: CheckpointStore, key: str, value: Buffer) -> None:
        raise AssertionError("a test that puts keys of its own into the store")

    async def get(self, store: CheckpointStore, key: str) -> Buffer:
        found = store._find(key, None)
        if isinstance(found, ChunkRead):
            (found,) = read_all(store._catalog, [found])  # type: ignore[assignment]
        assert isinstance(found, memoryview)
        return self.buffer_cls.from_bytes(found)

    def test_store_repr(self, store: CheckpointStore) -> None:
        assert repr(store).startswith("CheckpointStore('")

    def test_store_supports_writes(self, store: CheckpointStore) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: CheckpointStore) -> None:
        assert store.supports_listing

    def test_store_read_only(self, store: CheckpointStore) -> None:
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False  # type: ignore[misc]

    @pytest.mark.parametrize("read_only", [True, False])
    async def test_store_open_read_only(self, open_kwargs: dict[str, Any], read_only: bool) -> None:
        if read_only:
            await super().test_store_open_read_only(open_kwargs, read_only)
        else:
            with pytest.raises(ValueError, match="read-only"):
                await self.store_cls.open(**open_kwargs, read_only=False)

    async def test_every_write_is_refused(self, store: CheckpointStore) -> None:
        value = self.buffer_cls.from_bytes(b"x")
        with pytest.raises(ValueError, match=READ_ONLY):
            await store.set("k", value)
        with pytest.raises(ValueError, match=READ_ONLY):
            await store.set_if_not_exists("k", value)
        with pytest.raises(ValueError, match=READ_ONLY):
            await store.delete("zarr.json")
        with pytest.raises(NotImplementedError):  # as zarr's own stores without deletes
            await store.clear()

    async def test_serializable_store(self, store: CheckpointStore) -> None:
        other = pickle.loads(pickle.dumps(store))
        assert (other, other.read_only, other._is_open) == (store, True, True)
        for key in KEYS:
            assert (await other.get(key, default_buffer_prototype())).to_bytes() == (await self.get(store, key)).to_bytes()

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize(
        "byte_range",
        [
            None,
            RangeByteRequest(1, 4),
            RangeByteRequest(3, 3),
            RangeByteRequest(2, 1 << 40),
            OffsetByteRequest(1),
            SuffixByteRequest(1),
            SuffixByteRequest(1 << 40),
        ],
    )
    async def test_get(self, store: CheckpointStore, key: str, byte_range: ByteRequest | None) -> None:  # type: ignore[override]
        whole = (await self.get(store, key)).to_bytes()
        start, stop = bounds(len(whole), byte_range)
        found = await store.get(key, default_buffer_prototype(), byte_range)
        assert found is not None
        assert found.to_bytes() == whole[start:stop]

    async def test_get_not_open(self, store_not_open: CheckpointStore) -> None:
        assert not store_not_open._is_open
        assert await store_not_open.get("zero-d/c", default_buffer_prototype()) is not None

    async def test_get_raises(self, store: CheckpointStore) -> None:
        for key in KEYS:
            with pytest.raises(TypeError, match=r"Unexpected byte_range, got.*"):
                await store.get(key, default_buffer_prototype(), byte_range=(0, 2))  # type: ignore[arg-type]

    async def test_get_many(self, store: CheckpointStore) -> None:
        found = await _collect_aiterator(store._get_many([(key, default_buffer_prototype(), None) for key in KEYS]))
        for key, value in found:
            assert value is not None
            assert value.to_bytes() == (await self.get(store, key)).to_bytes()
        assert sorted(key for key, _ in found) == sorted(KEYS)

    @pytest.mark.parametrize("key", KEYS)
    async def test_getsize(self, store: CheckpointStore, key: str) -> None:  # type: ignore[override]
        assert await store.getsize(key) == len(await self.get(store, key))

    async def test_getsize_prefix(self, store: CheckpointStore) -> None:
        keys = await _collect_aiterator(store.list_prefix("boxes/"))
        assert await store.getsize_prefix("boxes/") == sum([len(await self.get(store, key)) for key in keys])

    @pytest.mark.parametrize(
        "ranges", [[], [("zarr.json", RangeByteRequest(0, 2))], [(key, SuffixByteRequest(2)) for key in KEYS]]
    )
    async def test_get_partial_values(self, store: CheckpointStore, ranges: list[tuple[str, ByteRequest]]) -> None:
        found = await store.get_partial_values(default_buffer_prototype(), ranges)
        for (key, part), value in zip(ranges, found, strict=True):
            expected = await store.get(key, default_buffer_prototype(), part)
            assert value is not None
            assert expected is not None
            assert value.to_bytes() == expected.to_bytes()

    async def test_exists(self, store: CheckpointStore) -> None:
        assert not await store.exists("foo")
        for key in KEYS:
            assert await store.exists(key)

    async def test_is_empty(self, store: CheckpointStore) -> None:
        assert not await store.is_empty("")
        assert not await store.is_empty("boxes")
        assert await store.is_empty("spam/")

    async def test_list(self, store: CheckpointStore) -> None:
        keys = await _collect_aiterator(store.list())
        assert len(keys) == len(set(keys))
        assert set(KEYS) <= set(keys)
        for key in keys:
            assert await store.exists(key)

    async def test_list_prefix(self, store: CheckpointStore) -> None:
        keys = await _collect_aiterator(store.list())
        for prefix in ("", "b", "boxes", "boxes/", "boxes/c", "boxes/c/", "boxes/c/0/", "zero-d/", "many", "spam"):
            found = await _collect_aiterator(store.list_prefix(prefix))
            assert sorted(found) == sorted(key for key in keys if key.startswith(prefix)), prefix

    async def test_list_empty_path(self, store: CheckpointStore) -> None:
        assert await _collect_aiterator(store.list()) == await _collect_aiterator(store.list_prefix(""))

    async def test_list_dir(self, store: CheckpointStore) -> None:
        keys = await _collect_aiterator(store.list())
        for path in ("", "boxes", "boxes/c", "boxes/c/0", "zero-d", "many blocks/c", "spam", "boxe"):
            below = f"{path}/" if path else ""
            expected = {key.removeprefix(below).split("/")[0] for key in keys if key.startswith(below)}
            for spelling in (path, below):
                assert sorted(await _collect_aiterator(store.list_dir(spelling))) == sorted(expected), spelling

    async def test_get_bytes(self, store: CheckpointStore) -> None:
        assert (
            await store._get_bytes("zero-d/c", prototype=default_buffer_prototype())
            == (await self.get(store, "zero-d/c")).to_bytes()
        )
        with pytest.raises(FileNotFoundError):
            await store._get_bytes("nonexistent_key", prototype=default_buffer_prototype())

    def test_get_bytes_sync(self, store: CheckpointStore) -> None:
        expected = asyncio.run(self.get(store, "zero-d/c")).to_bytes()
        assert store._get_bytes_sync("zero-d/c", prototype=default_buffer_prototype()) == expected

    async def test_get_json(self, store: CheckpointStore) -> None:
        found = await store._get_json("zero-d/zarr.json", prototype=default_buffer_prototype())
        assert found == json.loads((await self.get(store, "zero-d/zarr.json")).to_bytes())

    def test_get_json_sync(self, store: CheckpointStore) -> None:
        assert store._get_json_sync("zero-d/zarr.json", prototype=default_buffer_prototype())["shape"] == []
