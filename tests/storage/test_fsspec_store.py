"""Object stores: everything that works on a local disk works over S3's own protocol, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import ucformat
from tests.checkpoints import bits, flip, shards_of
from tests.s3.bucket import serving
from ucformat.errors import ChecksumError, ExistsError, MissingFileError, NotACheckpointError, StorageError
from ucformat.formats import native
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of this process."""
    with serving() as server:
        yield server.bucket


def _state(step: int) -> dict[str, object]:
    torch.manual_seed(step)
    return {"model": {"w": torch.randn(600, 700), "b": torch.randn(7).bfloat16()}, "step": step, "empty": {}}


def test_a_run_is_saved_pruned_and_loaded_on_s3(bucket: str) -> None:
    run = f"{bucket}/runs/a"
    for step in (1, 2, 3):
        ucformat.save(run, _state(step), step=step, keep=2)
    assert ucformat.steps(run) == [2, 3]
    live = _state(9)
    assert ucformat.load(run, into=live).step == 3
    wanted = _state(3)
    for name in ("w", "b"):
        assert bits(live["model"][name]) == bits(wanted["model"][name])  # type: ignore[index]
    assert live["step"] == 3
    rows = ucformat.open(run, step=2)["model/w"][10:20, 5]
    assert torch.equal(rows, _state(2)["model"]["w"][10:20, 5])  # type: ignore[index]


def test_a_committed_checkpoint_on_s3_is_replaced_in_one_step(bucket: str) -> None:
    path = f"{bucket}/ck"
    ucformat.save(path, _state(1))
    with pytest.raises(ExistsError):
        ucformat.save(path, _state(2))
    ucformat.save(path, _state(2), overwrite=True)
    assert ucformat.load(path)["step"] == 2
    assert [name.partition(".")[0] for name in open_store(path).list()] == ["shards", "ucf"]


def test_conversions_run_from_s3_to_s3(bucket: str) -> None:
    ucformat.save(f"{bucket}/src", _state(5))
    for to in ("hf", "dcp", "native"):
        ucformat.convert(f"{bucket}/src", f"{bucket}/out-{to}", to, select=["model/*"])
        found = ucformat.open(f"{bucket}/out-{to}")
        assert bits(found["model/w"].read()) == bits(_state(5)["model"]["w"])  # type: ignore[index]


@pytest.mark.parametrize("to", ["hf", "dcp", "torchsave", "native"])
def test_a_failed_conversion_leaves_the_checkpoint_on_s3_that_it_was_to_replace(bucket: str, to: str, tmp_path: Path) -> None:
    dst = f"{bucket}/replaced-{to}" + (".pt" if to == "torchsave" else "")
    ucformat.save(str(tmp_path / "old"), _state(1))
    ucformat.save(str(tmp_path / "new"), _state(2))
    ucformat.convert(str(tmp_path / "old"), dst, to, select=["model/*"])
    shard = next(shards_of(tmp_path / "new").glob("0*"))
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(ChecksumError):
        ucformat.convert(str(tmp_path / "new"), dst, to, select=["model/*"], overwrite=True)
    assert bits(ucformat.open(dst)["model/w"].read()) == bits(_state(1)["model"]["w"])  # type: ignore[index]
    flip(shard, shard.stat().st_size // 2)
    ucformat.convert(str(tmp_path / "new"), dst, to, select=["model/*"], overwrite=True)
    assert bits(ucformat.open(dst)["model/w"].read()) == bits(_state(2)["model"]["w"])  # type: ignore[index]
    parent, _, _ = dst.rpartition("/")
    assert not [found for found in (*open_store(parent).list(), *open_store(dst).list()) if "partial" in found]


def test_an_upload_that_breaks_off_leaves_no_object(bucket: str) -> None:
    store = open_store(f"{bucket}/broken")
    with pytest.raises(KeyError), store.writer("shards/0", 12 << 20) as writer:
        writer.write(0, np.zeros(6 << 20, dtype=np.uint8))
        raise KeyError
    assert store.list() == []
    with pytest.raises(MissingFileError):
        ucformat.open(f"{bucket}/broken")


class Plain(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A file system that can't copy by itself, as FTP and SFTP."""

    protocol = "plain"
    cp_file = AbstractFileSystem.cp_file


def test_what_a_store_can_not_copy_by_itself_is_copied_through_here() -> None:
    store = FsspecStore(Plain(), "/plain-store", "plain://plain-store")
    data = bytes(range(256)) * (40 << 10)
    store.put("a", data)
    store.copy("a", "b/c")
    assert store.read("b/c") == data
    store.remove()


def test_an_uncommitted_prefix_on_s3_is_not_a_checkpoint(bucket: str) -> None:
    ucformat.save(f"{bucket}/torn", _state(1), step=1)
    open_store(f"{bucket}/torn/step-00000001").remove("ucf.json")
    with pytest.raises(NotACheckpointError):
        ucformat.open(f"{bucket}/torn/step-00000001")
    assert native.committed_steps(open_store(f"{bucket}/torn")) == []


def test_a_bucket_that_is_not_there_is_a_storage_error(bucket: str) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        ucformat.save("s3://nowhere-at-all/x", _state(1))
