"""Parts of ranks make one checkpoint, the same as `ucformat.save` writes, or none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import ucformat
from tests.checkpoints import bits, flip, open_native
from tests.snapshot.rigs.keeping import RUN, assert_persisted, hashed, make_slots
from ucformat.errors import ChecksumError, CoverageError, FormatError, MissingFileError, RankFailedError, ValueConflictError
from ucformat.formats import native
from ucformat.snapshot.keeper import contributions, slot_copy
from ucformat.snapshot.keeper.contributions import Answers, Contribution, Refusal
from ucformat.storage.open import open_store
from ucformat.storage.store import Store


def hand_in(run: Store, directory: Path, rank: int, world: int, step: int = 5, token: str = RUN) -> Contribution:
    """One rank's part of a version in fresh slots."""
    store = run.sub(native.step_name(step))
    with make_slots(directory, rank, world, run=token) as slots:
        held = hashed(slots, step)
        path = contributions.shard_path(rank, token)
        slot_copy.copy_slot(held, store, path, lambda: None)
        part = contributions.make_part(held, path)
        contributions.put_part(store, token, part)
    return part


def commit(store: Store, parts: list[Contribution]) -> None:
    contributions.commit_parts(contributions.begin(store, RUN), 5, parts)


def test_parts_of_two_ranks_make_the_checkpoint_that_save_would_have_made(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    store = run.sub(native.step_name(5))
    for rank in (1, 0):
        hand_in(run, tmp_path / "slots", rank, 2)
    assert contributions.answers(store, RUN) == Answers(frozenset({0, 1}), frozenset())
    contributions.commit_parts(
        contributions.begin(store, RUN), 5, [contributions.read_part(store, RUN, rank, 5) for rank in (0, 1)]
    )
    assert_persisted(tmp_path / "run", 5)
    mine = ucformat.open(str(tmp_path / "run"))
    state = ucformat.load(str(tmp_path / "run"))
    ucformat.save(str(tmp_path / "saved"), state, step=5)
    saved = ucformat.open(str(tmp_path / "saved"))
    assert sorted(mine) == sorted(saved)
    assert all(bits(mine[name][...]) == bits(saved[name][...]) for name in mine)
    assert mine.catalog.values == saved.catalog.values
    assert mine.catalog.notes.step == saved.catalog.notes.step == 5
    assert native.reindex(store) == len(mine.catalog.fragments)


def test_committing_twice_gives_the_same_checkpoint(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    part = hand_in(run, tmp_path / "slots", 0, 1)
    for _ in range(2):
        commit(run.sub(native.step_name(5)), [part])
        assert_persisted(tmp_path / "run", 5)


def test_a_part_of_another_start_of_the_job_is_not_there(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    hand_in(run, tmp_path / "slots", 1, 2, token="before")
    assert contributions.answers(run.sub(native.step_name(5)), RUN) == Answers(frozenset(), frozenset())


def test_versions_of_two_starts_are_never_one_checkpoint(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    both = [hand_in(run, tmp_path / "slots", 0, 2), hand_in(run, tmp_path / "slots", 1, 2, token="before")]
    with pytest.raises(RankFailedError, match="rank 1: took it in run 'before', not 'run-1'"):
        commit(run.sub(native.step_name(5)), both)


def test_parts_that_make_no_whole_are_not_committed(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    store = run.sub(native.step_name(5))
    both = [hand_in(run, tmp_path / "slots", rank, 2) for rank in (0, 1)]
    with pytest.raises(RankFailedError, match="handed in a part of 2 ranks"):
        commit(store, both[:1])
    with pytest.raises(CoverageError, match="model/w"):
        commit(store, [msgspec.structs.replace(both[0], world=1)])
    with pytest.raises(ValueConflictError, match="step"):
        contributions.commit_parts(
            contributions.begin(store, RUN), 5, [both[0], msgspec.structs.replace(both[1], values=msgspec.Raw(b'{"step": 4}'))]
        )
    with pytest.raises(ValueConflictError, match="tied"):
        contributions.commit_parts(
            contributions.begin(store, RUN), 5, [both[0], msgspec.structs.replace(both[1], aliases={"model/tied": "model/b"})]
        )
    assert not native.is_committed(store)
    commit(store, both)
    assert open_native(store).notes.step == 5


def test_damaged_and_foreign_parts_are_refused(tmp_path: Path) -> None:
    run = open_store(str(tmp_path / "run"))
    store = run.sub(native.step_name(5))
    part = hand_in(run, tmp_path / "slots", 0, 1)
    with pytest.raises(MissingFileError):
        contributions.read_part(store, RUN, 1, 5)
    store.put(contributions.part_path(1, RUN), store.read(contributions.part_path(0, RUN)))
    with pytest.raises(FormatError, match="is of rank 0 and step 5"):
        contributions.read_part(store, RUN, 1, 5)
    with pytest.raises(FormatError, match="does not stay inside"):
        shard = msgspec.structs.replace(part.shard, file="../a")
        commit(store, [msgspec.structs.replace(part, shard=shard)])
    path = tmp_path / "run" / native.step_name(5) / contributions.part_path(0, RUN)
    flip(path, path.stat().st_size // 2)
    with pytest.raises((ChecksumError, FormatError)):
        contributions.read_part(store, RUN, 0, 5)


def test_a_refusal_says_why(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    contributions.put_part(store, RUN, Refusal(5, 3, "no space left"))
    assert contributions.answers(store, RUN) == Answers(frozenset(), frozenset({3}))
    assert contributions.read_refusal(store, RUN, 3, 5) == Refusal(5, 3, "no space left")
