"""What a load leaves in the page cache: nothing that was not there before, and all that was."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.formats import open_catalog
from ucformat.group import current
from ucformat.reshard.reading.execute import Reading
from ucformat.reshard.reading.page_cache import Wake
from ucformat.reshard.reading.plan import plan, wants
from ucformat.storage.local import LocalStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in the page cache")

MIB = 1 << 20
ROWS, COLUMNS = 6144, 2048  # of F32: 48 MiB
EDGES = 8 * MIB  # pages that the system has in hand when they are let go, and what it reads ahead


def _weights() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def _shard(folder: Path) -> Path:
    (found,) = folder.rglob("shards.*/0*")
    return found


def _resident(path: Path) -> int:
    """Bytes of a file that are in the page cache, counted in steps of 64 KiB."""
    step = 64 << 10
    store = LocalStore(str(path.parent))
    with store.reader(path.name) as reader:
        return sum(step for at in range(0, path.stat().st_size, step) if reader.is_here(at, 1))


def _make_cold(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _resident(path) > EDGES:
        pytest.skip("this file system keeps its pages")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ucformat.save(str(tmp_path / "ck"), {"w": _weights()})
    return tmp_path / "ck"


def test_a_load_leaves_no_page_in_memory_that_was_not_there(saved: Path) -> None:
    _make_cold(_shard(saved))
    ucformat.load(str(saved), into={"w": torch.empty(ROWS, COLUMNS)})
    assert _resident(_shard(saved)) <= EDGES


def test_what_was_in_memory_before_a_load_stays_there(saved: Path) -> None:
    shard = _shard(saved)
    _make_cold(shard)
    with shard.open("rb") as file:
        kept = len(file.read(24 * MIB))
    ucformat.load(str(saved), into={"w": torch.empty(ROWS, COLUMNS)})
    assert kept - 8 * MIB <= _resident(shard) <= kept + 8 * MIB


def _load(folder: str, placement: Placement) -> tuple[int, bool]:
    """Bytes in the page cache after this rank's load, and whether that brought what was saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    truth = distribute_tensor(_weights(), mesh, [placement], src_data_rank=None)
    loaded = torch.zeros_like(truth)
    assert isinstance(truth, DTensor)
    assert isinstance(loaded, DTensor)
    ucformat.load(folder, into={"w": loaded})
    dist.barrier()
    return _resident(_shard(Path(folder))), bool(torch.equal(loaded.to_local(), truth.to_local()))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=["rows", "columns", "replicas"])
def test_ranks_leave_nothing_behind_once_the_last_of_them_has_read_it(saved: Path, placement: Placement) -> None:
    _make_cold(_shard(saved))
    for resident, right in on_ranks(2, _load, str(saved), placement):
        assert right
        assert resident <= EDGES


def _hide_rank_1(folder: str) -> int:
    if dist.get_rank() == 1:
        del os.memfd_create  # what an older system or a sandbox is like
    return _load(folder, Shard(0))[0]


def test_nothing_is_let_go_while_a_rank_can_not_show_what_it_needs(saved: Path) -> None:
    _make_cold(_shard(saved))
    for resident in on_ranks(2, _hide_rank_1, str(saved)):
        assert resident >= 40 * MIB


def _in_turn(folder: str) -> list[int]:
    """One rank reads all, then the other: bytes in the page cache after each."""
    catalog = open_catalog(folder)
    reading = Reading(plan(catalog, wants(catalog, [("w", None)])), [torch.empty(ROWS, COLUMNS)])
    shard, here, group, resident = _shard(Path(folder)), reading.look(), current(), []
    dist.barrier()
    with Wake(catalog, reading.tasks, here) as wake:
        wake.join(group)
        for turn in range(group.size):
            if group.rank == turn:
                with catalog.store.reader(catalog.files[reading.tasks[0].file].path) as reader:
                    for task in reading.tasks:
                        reader.read_into(task.low, np.empty(task.high - task.low, dtype=np.uint8))
                        wake.passed(task, reader)
            dist.barrier()
            resident.append(_resident(shard))
            dist.barrier()
    return resident


def test_what_another_rank_has_still_to_read_stays_until_it_has(saved: Path) -> None:
    _make_cold(_shard(saved))
    for after_first, after_both in on_ranks(2, _in_turn, str(saved)):
        assert after_first >= 40 * MIB
        assert after_both <= EDGES
