"""Slots that were copied from several hosts are a checkpoint like any other, also with a lost one rebuilt from parity."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucformat
from tests.checkpoints import flip
from tests.cli.calls import Program
from tests.snapshot.rigs.hosts import MemoryHosts
from tests.snapshot.rigs.parts import whole
from ucformat.errors import NotACheckpointError, UnsupportedError


@pytest.fixture
def ucconvert(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def job(place: Path, run: str = "run") -> MemoryHosts:
    """Three hosts, steps 1 and 2, both protected."""
    memory = MemoryHosts(place, [0, 1, 2], run=run)
    for step in (1, 2):
        memory.take(step)
        memory.protect()
    memory.close()
    return memory


def flatten(place: Path) -> Path:
    """All ranks in one folder."""
    for host in sorted(place.glob("host*")):
        shutil.copytree(host, place / "flat", dirs_exist_ok=True)
        shutil.rmtree(host)
    return place / "flat"


def assert_is(path: Path, step: int) -> None:
    opened = ucformat.open(path)
    assert opened.step == step
    assert torch.equal(opened["model/w"][...], whole(step))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("lost", [None, 0, 2])
def test_gathered_slots_are_inspected_verified_compared_and_converted(
    tmp_path: Path, ucconvert: Program, lost: int | None, flat: bool
) -> None:
    place = tmp_path / "gathered"
    job(place)
    if lost is not None:
        shutil.rmtree(place / f"host{lost}")
    path = flatten(place) if flat else place
    assert_is(path, 2)
    said = f"rank-0000{lost} of step 2 was rebuilt from parity"
    inspected = ucconvert("inspect", path)
    assert (inspected.status, said in inspected.err) == (0, lost is not None)
    verified = ucconvert("verify", path)
    assert (verified.status, verified.out[:2]) == (0, "ok")
    converted = ucconvert(path, tmp_path / "out", "--to", "native")
    assert converted.status == 0, converted.err
    assert (said in converted.out + converted.err) == (lost is not None)
    assert_is(tmp_path / "out", 2)
    assert ucconvert("diff", path, tmp_path / "out").status == 0
    assert torch.equal(ucformat.open(path, step=1)["model/w"][...], whole(1))


def test_a_slot_with_a_damaged_record_or_header_is_rebuilt_and_that_is_said(tmp_path: Path) -> None:
    memory = job(tmp_path)
    slot = tmp_path / "host1/rank-00001" / f"slot-{memory.last[1].index}.safetensors"
    flip(slot, 100)
    assert_is(tmp_path, 2)
    remarks = ucformat.inspect(tmp_path).remarks
    assert any("rank-00001 of step 2 was rebuilt from parity" in text for text in remarks)
    assert any("slot of rank 1 of step 2 can't be used" in text for text in remarks)
    flip(slot, 100)
    flip(slot.with_suffix(".json"), 200)
    assert_is(tmp_path, 2)


def test_damaged_bytes_of_a_slot_are_found_and_not_converted(tmp_path: Path, ucconvert: Program) -> None:
    memory = job(tmp_path / "g")
    flip(tmp_path / "g/host1/rank-00001" / f"slot-{memory.last[1].index}.safetensors", 4096 + 77_777)
    assert ucconvert("verify", tmp_path / "g").status == 1
    failed = ucconvert(tmp_path / "g", tmp_path / "out", "--to", "native")
    assert (failed.status, "[ChecksumError]" in failed.err) == (1, True)


def test_two_lost_hosts_are_an_error_that_names_the_ranks(tmp_path: Path) -> None:
    job(tmp_path)
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host2")
    with pytest.raises(NotACheckpointError, match="step 2 is incomplete: slots of ranks 0, 2 of 3"):
        ucformat.open(tmp_path)


def test_whole_snapshots_of_several_jobs_side_by_side_are_not_mixed(tmp_path: Path) -> None:
    for run in ("a", "b"):
        job(tmp_path / run, run)
        flatten(tmp_path / run)
        shutil.move(tmp_path / run / "flat", tmp_path / f"job-{run}")
        shutil.rmtree(tmp_path / run)
    with pytest.raises(UnsupportedError, match="several runs"):
        ucformat.open(tmp_path)


def test_a_damaged_slot_that_is_moved_away_is_rebuilt(tmp_path: Path) -> None:
    memory = job(tmp_path)
    slot = tmp_path / "host1/rank-00001" / f"slot-{memory.last[1].index}.safetensors"
    flip(slot, 4096 + 77_777)
    slot.unlink()
    slot.with_suffix(".json").unlink()
    assert_is(tmp_path, 2)
    assert ucformat.verify(tmp_path).ok
