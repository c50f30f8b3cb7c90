"""Which steps of a run are committed, whatever a back end that writes files in place leaves of a write that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ucformat
from tests.checkpoints import flip, write_native
from tests.snapshot.rigs import slotfill
from tests.snapshot.rigs.keeping import assert_persisted, ends, hashed, make_slots, options, persist_all
from ucformat.containers.envelope import seal
from ucformat.errors import NotACheckpointError, UcformatError
from ucformat.formats import native
from ucformat.formats.native.run import is_cut_short
from ucformat.snapshot.keeper.messages import Persisted

RECORD = seal(msgspec.json.encode({"values": {"a": [1, 2.5, "xé"], "b": True}, "rest": [{}, None]}))


def live() -> dict[str, Any]:
    return {"w": torch.zeros(3)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of two steps."""
    for step in (10, 20):
        write_native(tmp_path / native.step_name(step), {"w": torch.full((3,), float(step))})
    return tmp_path


@pytest.mark.parametrize("kept", [0, 1, 90, -1, -2])
def test_a_step_whose_record_was_not_written_to_its_end_is_not_committed(
    run: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    record = run / "step-00000020" / "ucf.json"
    whole = record.read_bytes()
    record.write_bytes(whole[:kept])
    last = 20 if kept == -1 else 10  # without its newline alone, nothing is missing
    assert ucformat.latest(str(run)) == last
    assert ucformat.steps(str(run)) == [10, 20][: last // 10]
    state = live()
    assert ucformat.resume(str(run), into=state) is not None
    assert state["w"].tolist() == [last] * 3
    if last == 20:
        return
    assert caplog.text.count("counts as not committed") == 1
    with pytest.raises(NotACheckpointError, match="empty or cut short"):
        ucformat.open(str(run), step=20)
    ucformat.save(str(run), {"w": torch.full((3,), 21.0)}, step=20)
    assert ucformat.open(str(run))["w"][...].tolist() == [21.0] * 3


def test_a_damaged_record_is_no_interrupted_write(run: Path) -> None:
    record = run / "step-00000020" / "ucf.json"
    whole = record.read_bytes()
    for at in (0, 5, len(whole) // 2, len(whole) - 3, len(whole) - 2, len(whole) - 1):
        flip(record, at)
        assert ucformat.latest(str(run)) == 20
        with pytest.raises(UcformatError):
            ucformat.resume(str(run), into=live())
        record.write_bytes(whole)


def test_every_beginning_of_a_record_is_known_as_one() -> None:
    assert [length for length in range(len(RECORD) - 1) if not is_cut_short(RECORD[:length])] == []
    assert not is_cut_short(RECORD)


def test_a_keeper_writes_the_step_of_an_interrupted_write(tmp_path: Path) -> None:
    with make_slots(tmp_path / "slots") as slots:
        held = hashed(slots, 7)
        (tmp_path / "run" / "step-00000007").mkdir(parents=True)
        (tmp_path / "run" / "step-00000007" / "ucf.json").write_bytes(b'{"ucf":"1.0","dig')
        assert ends(persist_all(options(tmp_path / "slots", tmp_path / "run"), held)) == [(Persisted, 7)]
    assert_persisted(tmp_path / "run", 7)
    assert slotfill.W.name in ucformat.open(str(tmp_path / "run"))
