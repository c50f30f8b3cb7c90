"""Saves that do not wait: the state of the moment is stored, whole or not at all, and nothing is lost without a word."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ucformat
from tests.checkpoints import bits
from tests.reshard.ranks import on_ranks
from tests.scripts import Script
from ucformat.dtypes import DTYPES
from ucformat.errors import ExistsError, StorageError, UcformatError
from ucformat.reshard import pending
from ucformat.storage.local import LocalStore
from ucformat.storage.store import Writer

SHAPE = (64, 1000)


def state_of(step: int) -> dict[str, object]:
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + step
    return {
        "w": distribute_tensor(whole, init_device_mesh("cpu", (2,)), (Shard(0),)),
        "columns": distribute_tensor(whole, init_device_mesh("cpu", (2,)), (Shard(1),)),
        "step": step,
    }


def test_what_was_there_when_save_returned_is_stored_while_training_goes_on(tmp_path: Path) -> None:
    on_ranks(2, _goes_on_training_together, str(tmp_path))
    assert ucformat.steps(str(tmp_path)) == [1, 2, 3]
    for step in (1, 2, 3):
        found = ucformat.load(str(tmp_path), step=step)
        whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) + step
        assert torch.equal(found["w"], whole)  # type: ignore[arg-type]
        assert torch.equal(found["columns"], whole)  # type: ignore[arg-type]
        assert found["step"] == step
        assert ucformat.verify(str(tmp_path), step=step).ok


def _goes_on_training_together(path: str) -> None:
    last = None
    for step in (1, 2, 3):
        state = state_of(step)
        last = ucformat.save(path, state, step=step, wait=False)
        for name in ("w", "columns"):
            state[name].to_local().zero_()  # type: ignore[attr-defined]
        state["step"] = -1
        for _ in range(20):  # collectives of training, beside those of the save
            total = torch.ones(10)
            dist.all_reduce(total)
            assert total[0] == 2
    assert last is not None
    assert last.wait() == last.path
    assert last.done
    assert last.error is None


def _fails_on_rank_1(path: str) -> list[str]:
    def full(self: LocalStore, name: str, size: int) -> Writer:
        raise StorageError(name, "no space left on device")

    told = []
    ucformat.save(path, state_of(1), step=1)
    real = LocalStore.writer
    for how in ("wait", "next save", "next save that does not wait"):
        if dist.get_rank() == 1:
            LocalStore.writer = full  # type: ignore[method-assign, assignment]
        save = ucformat.save(path, state_of(2), step=2, wait=False)
        try:
            if how == "wait":
                save.wait()
            else:
                ucformat.save(path, state_of(3), step=3, wait=how == "next save")  # type: ignore[call-overload]
        except UcformatError as error:
            told.append(f"{how}: {type(error).__name__}")
            assert save.error is not None
        LocalStore.writer = real  # type: ignore[method-assign]
    ucformat.save(path, state_of(4), step=4, wait=False)  # what was raised once is not raised again
    ucformat.save(path, state_of(5), step=5)
    return told


def test_a_failure_is_raised_on_every_rank_by_wait_or_by_the_next_save(tmp_path: Path) -> None:
    expected = [f"{how}: StorageError" for how in ("wait", "next save", "next save that does not wait")]
    assert on_ranks(2, _fails_on_rank_1, str(tmp_path)) == [expected, expected]
    assert ucformat.steps(str(tmp_path)) == [1, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (1, 4, 5)]


TORN = """
import os, signal, sys, torch, ucformat
state = {"w": torch.full((8_000_000,), 1.0)}
ucformat.save(sys.argv[1], state, step=1, wait=False)
state["w"].fill_(2.0)
seen = 0
def on_bytes(n):
    global seen
    seen += n
    if seen > 16_000_000:
        os.kill(os.getpid(), signal.SIGKILL)
ucformat.save(sys.argv[1], state, step=2, wait=False, on_bytes=on_bytes).wait()
"""


def test_a_save_that_is_killed_in_the_background_is_never_loadable(tmp_path: Path) -> None:
    assert Script(TORN, tmp_path).wait() == -signal.SIGKILL
    assert ucformat.steps(str(tmp_path)) == [1]
    assert torch.equal(ucformat.load(str(tmp_path))["w"], torch.ones(8_000_000))  # type: ignore[arg-type]
    ucformat.save(str(tmp_path), {"w": torch.zeros(3)}, step=2)
    assert ucformat.steps(str(tmp_path)) == [1, 2]
    assert len(list((tmp_path / "step-00000002").iterdir())) == 2


LEAVES = """
import sys, torch, ucformat
ucformat.save(sys.argv[1], {"w": torch.ones(20_000_000)}, wait=False)
"""


def test_the_end_of_a_program_waits_for_its_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path / "out")], check=True, timeout=120)
    assert torch.equal(ucformat.load(str(tmp_path / "out"))["w"], torch.ones(20_000_000))  # type: ignore[arg-type]


def test_memory_is_taken_once_and_given_back_by_a_save_that_waits(tmp_path: Path) -> None:
    places = set()
    for step in (1, 2, 3):
        ucformat.save(str(tmp_path), {"w": torch.full((300_000,), float(step))}, step=step, wait=False)
        places.add(pending._memory._buffer.data_ptr())
    assert len(places) == 1
    ucformat.save(str(tmp_path), {"w": torch.zeros(3)}, step=4)
    assert pending._memory._buffer.nbytes == 0
    assert ucformat.steps(str(tmp_path)) == [1, 2, 3, 4]


def test_what_can_be_told_at_once_is_raised_at_once(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "x"), {"w": torch.zeros(3)})
    with pytest.raises(ExistsError):
        ucformat.save(str(tmp_path / "x"), {"w": torch.ones(3)}, wait=False)
    save = ucformat.save(str(tmp_path / "x"), {"w": torch.ones(3)}, wait=False, overwrite=True)
    assert save.wait() == str(tmp_path / "x")
    assert torch.equal(ucformat.load(str(tmp_path / "x"))["w"], torch.ones(3))  # type: ignore[arg-type]


def test_a_failure_that_nobody_asks_for_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LocalStore, name: str, size: int) -> Writer:
        raise StorageError(name, "no space left on device")

    monkeypatch.setattr(LocalStore, "writer", full)
    save = ucformat.save(str(tmp_path / "x"), {"w": torch.zeros(3)}, wait=False)
    with pytest.raises(StorageError, match="no space left"):
        save.wait()
    assert "not saved: StorageError" in caplog.text
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_tensors_of_every_dtype_and_any_strides_are_copied_bit_for_bit(tmp_path: Path) -> None:
    state = {}
    for name, kind in DTYPES.items():
        shape = (6, 4)
        raw = torch.randint(0, 2, (kind.itemsize * 24,), dtype=torch.uint8)
        state[name] = kind.empty(shape)
        flat = state[name].reshape(-1).view(torch.uint8)
        flat.copy_(raw[: len(flat)])
        if state[name].dim() == 2:
            state[f"{name} transposed"] = state[name].t()
    expected = {name: bits(tensor.clone()) for name, tensor in state.items()}
    save = ucformat.save(str(tmp_path / "x"), state, wait=False)
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8).zero_() if tensor.is_contiguous() else None
    save.wait()
    found = ucformat.load(str(tmp_path / "x"))
    assert {name: bits(found[name]) for name in state} == expected  # type: ignore[arg-type]
