"""A snapshot directory opens as a checkpoint: the newest version that all ranks hold, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

import ucformat
from tests.checkpoints import bits, flip
from tests.cli.calls import Program
from tests.snapshot.rigs.slotfill import SMALL, W, assert_is_step, hash_slot, opened, pieces, take
from ucformat import formats, values
from ucformat.containers.envelope import seal
from ucformat.errors import ChecksumError, FormatError, MissingFileError, NotACheckpointError, VersionError
from ucformat.formats import snapshot
from ucformat.formats.snapshot import SlotRecord, decode_slot, encode_slot, open_catalog, survey
from ucformat.formats.source import Source, locate
from ucformat.reshard.reading.lazy import read
from ucformat.reshard.state.walk import collect
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.storage.open import open_store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A snapshot directory."""
    return tmp_path / "job"


def _run(home: Path, steps: dict[int, tuple[int, ...]], *, hashed: bool = False) -> dict[int, Slot]:
    """Each rank takes its steps; the slot of its last one."""
    last: dict[int, Slot] = {}
    for rank, mine in steps.items():
        owned = pieces(rank, len(steps))
        with SlotSet.create(home, rank, len(steps), owned) as slots:
            for step in mine:
                slot = take(slots, owned, step)
                assert slot is not None
                if hashed:
                    assert hash_slot(slots, slot) is not None
                last[rank] = slot
    return last


def _edit(slot: Slot, **changes: object) -> None:
    """Change a record and sign it again."""
    path = Path(slot.file.record_path)
    record = msgspec.json.decode(msgspec.json.encode(decode_slot(path.read_bytes(), "r")))
    path.write_bytes(seal(json.dumps({**record, **changes}).encode()))


def test_pieces_of_all_ranks_unite_in_one_catalog(home: Path) -> None:
    _run(home, {0: (1, 2), 1: (1, 2), 2: (1, 2)})
    catalog = opened(home)
    assert assert_is_step(catalog) == 2
    assert {file.path for file in catalog.files} == {f"rank-0000{rank}/slot-1.safetensors" for rank in range(3)}
    rows = catalog.fragments.rows(catalog.find(W.name))
    assert rows.stop - rows.start == 3
    assert [spec for spec in catalog.tensors if spec.name != W.name] == sorted(SMALL, key=lambda spec: spec.name)
    assert catalog.aliases == {"model/tied": "model/w"}
    assert catalog.notes.mesh == {"dp": 3}


def test_an_incomplete_newest_version_falls_back_to_the_one_before(home: Path) -> None:
    _run(home, {0: (4, 5), 1: (3, 4)})
    catalog = opened(home)
    assert assert_is_step(catalog) == 4
    assert any("step 5 is incomplete: ranks 1 of 2" in remark for remark in catalog.notes.remarks)
    assert snapshot.complete_steps(open_store(str(home))) == [4]


def test_a_given_step_can_be_opened(home: Path) -> None:
    _run(home, {0: (4, 5), 1: (4, 5)})
    assert assert_is_step(open_catalog(locate(str(home)), step=4)) == 4
    with pytest.raises(NotACheckpointError, match="no complete version of step 6"):
        open_catalog(locate(str(home)), step=6)


def test_without_a_complete_version_the_missing_ranks_are_named(home: Path) -> None:
    _run(home, {0: (5,), 1: (4,), 2: (5,)})
    with pytest.raises(NotACheckpointError) as caught:
        formats.open_catalog(str(home))
    assert "step 5 is incomplete: ranks 1 of 3" in caught.value.why
    assert "step 4 is incomplete: ranks 0, 2 of 3" in caught.value.why


def test_slots_without_any_version_say_so(home: Path) -> None:
    with SlotSet.create(home, 0, 1, pieces()) as slots:
        with pytest.raises(NotACheckpointError, match="slots are empty"):
            formats.open_catalog(str(home))
        slots.begin()
        with pytest.raises(NotACheckpointError, match="slots are empty"):
            ucformat.open(str(home))


def test_other_directories_are_not_taken_for_snapshots(tmp_path: Path) -> None:
    for name in ("rank-00000/model.pt", "rank-0/slot-0.json", "rank-00001"):
        folder = tmp_path / name.replace("/", "_")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
        assert not snapshot.detect(locate(str(folder)))
    assert not snapshot.detect(Source(open_store(str(tmp_path)), "slot-0.json"))


def test_an_unhashed_version_opens_with_a_remark(home: Path) -> None:
    _run(home, {0: (1,), 1: (1,)})
    catalog = opened(home)
    assert [file.checks for file in catalog.files] == [None, None]
    assert "2 of 2 slots are not hashed yet: their bytes can't be verified" in catalog.notes.remarks


def test_a_hashed_version_is_verified_and_names_the_damaged_tensor(home: Path) -> None:
    slot = _run(home, {0: (1,)}, hashed=True)[0]
    catalog = opened(home)
    assert catalog.notes.remarks == ()
    assert assert_is_step(catalog) == 1
    flip(slot.path, int(slot.tensor(0).data_ptr() - slot.image.ctypes.data) + 100)
    with pytest.raises(ChecksumError) as caught:
        read(opened(home), W.name)
    assert W.name in caught.value.tensors


def test_a_damaged_table_of_checksums_is_found(home: Path) -> None:
    slot = _run(home, {0: (1,)}, hashed=True)[0]
    flip(slot.path, len(slot.image) - 1)
    with pytest.raises(ChecksumError, match="checksum table"):
        read(opened(home), W.name)


def test_a_damaged_record_or_header_gives_way_to_the_older_version(home: Path) -> None:
    for damage in ("record", "header"):
        slot = _run(home / damage, {0: (1, 2)}, hashed=True)[0]
        flip(slot.file.record_path if damage == "record" else slot.path, 60)
        catalog = opened(home / damage)
        assert assert_is_step(catalog) == 1
        assert len(catalog.notes.remarks) == 1
        assert "slot-1" in catalog.notes.remarks[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 1, "world": 2}, "is the record of rank-00001"),
        ({"rank": 1}, "rank 1 in a world of 1"),
        ({"file": "../rank-00000/slot-0.safetensors"}, "is the record of"),
        ({"size": 1 << 40}, "has "),
        ({"table_start": 1}, "do not fit"),
        ({"block_bytes": 1000}, "multiple of 4096"),
        ({"step": -1}, "malformed slot record"),
        ({"header_digest": "0" * 16}, "digest of the header"),
        ({"aliases": {"a": "nowhere"}}, "does not name a stored tensor"),
        ({"world": 1 << 62}, "more of 4611686018427387904"),
    ],
)
def test_records_that_lie_are_ignored_and_named(home: Path, changes: dict[str, object], told: str) -> None:
    slot = _run(home, {0: (3,)})[0]
    _edit(slot, **changes)
    with pytest.raises(NotACheckpointError, match=told):
        formats.open_catalog(str(home))


def test_a_record_of_a_later_format_is_refused_by_name(home: Path) -> None:
    slot = _run(home, {0: (3,)})[0]
    path = Path(slot.file.record_path)
    data = path.read_bytes().replace(b'{"ucf":"1.0"', b'{"ucf":"2.0"')
    with pytest.raises(VersionError):
        decode_slot(data, "r")
    path.write_bytes(data)
    with pytest.raises(NotACheckpointError, match="update ucformat"):
        formats.open_catalog(str(home))


def test_a_record_without_its_file_is_ignored(home: Path) -> None:
    slot = _run(home, {0: (1, 2)})[0]
    Path(slot.path).unlink()
    assert assert_is_step(opened(home)) == 1
    with pytest.raises(MissingFileError):
        snapshot.read_slot(open_store(str(home)), "rank-00000", slot.index)


def test_ranks_that_differ_in_what_they_hold_are_no_version(home: Path) -> None:
    """A rank of another job in the directory: the tensors do not fit together."""
    _run(home, {0: (1,), 1: (1,)})
    with SlotSet.create(home / "x", 1, 2, pieces(0, 2)) as slots:
        take(slots, pieces(0, 2), 1)
    (home / "rank-00001").rename(home / "y")
    (home / "x/rank-00001").rename(home / "rank-00001")
    with pytest.raises(NotACheckpointError, match=r"step 1 can't be opened: .*stored more than once"):
        formats.open_catalog(str(home))


def test_records_come_back_as_they_were() -> None:
    values = msgspec.Raw(b"{}")
    record = SlotRecord(
        "1.0", 3, 1, 2, "slot-0.safetensors", 12288, 4096, 8192, 4096, "a" * 16, values, coords={"dp": 1}, run="r"
    )
    again = decode_slot(encode_slot(record), "r")
    assert msgspec.json.encode(again) == msgspec.json.encode(record)
    assert again.same_version(record)
    with pytest.raises(FormatError, match="malformed"):
        decode_slot(encode_slot(record)[:-9], "r")


def test_the_survey_lists_all_versions_newest_first(home: Path) -> None:
    _run(home, {0: (4, 5), 1: (3, 4)})
    versions, ignored = survey(open_store(str(home)))
    assert [(version.step, version.complete, version.missing()) for version in versions] == [
        (5, False, [1]),
        (4, True, []),
        (3, False, [0]),
    ]
    assert ignored == []


def _training(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def _snapshot(home: Path, state: dict[str, object], step: int) -> None:
    collected = collect(state)
    owned = [(piece.spec, piece.box) for piece in collected.pieces]
    with SlotSet.create(home, 0, 1, owned) as slots:
        slot = slots.begin()
        assert slot is not None
        for i, piece in enumerate(collected.pieces):
            slot.tensor(i).copy_(piece.view)
        slots.commit(slot, step, values.encode(collected.values), collected.aliases, collected.mesh, collected.coords)


def test_a_training_state_is_restored_by_load(home: Path) -> None:
    state = _training(1)
    _snapshot(home, state, 1)
    other = _training(2)
    assert ucformat.load(str(home), into=other).step == 1
    for mine, found in zip(collect(state).pieces, collect(other).pieces, strict=True):
        assert bits(mine.view) == bits(found.view), mine.spec.name
    assert values.encode(collect(other).values) == values.encode(collect(state).values)
    assert other["step"] == 1


def test_snapshots_convert_and_inspect_and_verify(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(capsys)
    _run(home, {0: (1, 2), 1: (1, 2)}, hashed=True)
    shown = program("inspect", home)
    assert shown.status == 0, shown.err
    assert "snapshot, step 2, mesh dp2" in shown.out
    assert program("verify", home).status == 0
    made = program("convert", home, tmp_path / "native", "--to", "native")
    assert made.status == 0, made.err
    name, catalog = formats.open_named(str(tmp_path / "native"))
    assert name == "native"
    assert catalog.notes.origin == "snapshot"
    assert_is_step(catalog)
    assert program("diff", home, tmp_path / "native").status == 0
