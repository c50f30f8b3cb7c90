"""Converting into the native format: the shards are spread over the ranks, rank 0 commits."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucformat.formats import owned, ownership, partial, sidecar_files, staging
from ucformat.formats.native.attempt import Attempt, Contents, Generation, commit, joined, prepare, put_shards
from ucformat.formats.native.fragments import ShardTable
from ucformat.formats.native.manifest import MANIFEST, FileRecord
from ucformat.formats.native.run import is_committed
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.target import Companions, WriteJob
from ucformat.storage.store import Store


def write(job: WriteJob) -> None:
    """Write a native checkpoint from the pieces of a job, its shards spread over the ranks of the group.

    Raises ExistsError, ConflictError, UnrepresentableError, StorageError, RankFailedError. Then nothing was committed.
    """
    group, store = job.group, job.store
    foreign = False
    with group.together(f"preparing {store.url}"):
        if group.rank == 0:
            foreign = job.overwrite and not is_committed(store) and (partial.interrupted(store) or bool(owned.held(store)))
            if not foreign:
                partial.forget(store)
    if group.broadcast(foreign):
        _write_over(job)
    else:
        _write_here(job)


def _write_here(job: WriteJob) -> None:
    """Where nothing is, or another native checkpoint."""
    group, store = job.group, job.store
    attempt: Attempt | None = None
    try:
        with group.together(f"preparing {store.url}"):
            if group.rank == 0:
                attempt = prepare(store, job.overwrite, "convert")
        generation = group.broadcast(None if attempt is None else attempt.generation)
        assert generation is not None
        tables: dict[int, list[ShardTable]] = {}
        with group.together(f"writing {store.url}"), joined(store, generation):
            tables = _write_shards(job, generation)
            if job.finish is not None:
                job.finish()
        everyone = _in_order(group.gather(tables))
        with group.together(f"committing {store.url}"):
            if attempt is not None:
                _commit(job, attempt, everyone)
    except BaseException as error:
        if attempt is not None:
            attempt.give_up(error, alone=group.size == 1)
        raise


def _write_over(job: WriteJob) -> None:
    """In place of a checkpoint of another format, which can be opened until this one is whole."""
    group = job.group
    generation = Generation(group.broadcast(ownership.new_token()))
    mine: dict[int, list[ShardTable]] = {}
    everyone: list[ShardTable] = []

    def write_mine(store: Store) -> None:
        mine.update(_write_shards(replace(job, store=store), generation))

    def commit_all(store: Store) -> None:
        claim = ownership.begin(store, "convert", token=generation.token)
        try:
            _commit(replace(job, store=store), Attempt(store, generation, claim, None), everyone)
        finally:
            claim.hold.release()

    staging.publish(job, write_mine, commit_all, MANIFEST, written=lambda: everyone.extend(_in_order(group.gather(mine))))


def _write_shards(job: WriteJob, generation: Generation) -> dict[int, list[ShardTable]]:
    """Write the share of one rank; its shards by their number."""
    tables: dict[int, list[ShardTable]] = {}
    shards = job.shards()
    for number in range(job.group.rank, len(shards), job.group.size):
        pieces, path = shards[number], functools.partial(generation.shard, number)
        tables[number] = put_shards(job.store, path, [job.targets[i] for i in pieces], job.fill_of(pieces), job.on_bytes)
    return tables


def _in_order(parts: Sequence[Mapping[int, list[ShardTable]]]) -> list[ShardTable]:
    merged = {number: held for part in parts for number, held in part.items()}
    return [table for number in sorted(merged) for table in merged[number]]


def _commit(job: WriteJob, attempt: Attempt, tables: Sequence[ShardTable]) -> None:
    commit(
        attempt,
        tables,
        Contents(job.values, job.aliases, job.notes, carry_companions(job.companions, job.store, attempt.generation, job.dtype)),
    )


def carry_companions(
    companions: Companions, store: Store, generation: Generation, dtype: str | None = None
) -> tuple[FileRecord, ...]:
    """Copy the files that travel along; their records. `dtype` as in `WriteJob`."""
    records = []
    for path in sidecar_files.carry(companions, store, generation.companions, dtype):
        data = store.read(path)
        records.append(FileRecord(path, len(data), hex_digest(data)))
    return tuple(records)
