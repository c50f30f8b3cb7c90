"""Slots that were copied from several hosts into one place, seen as one checkpoint: a slot that is lost is computed from parity.

    <directory>/rank-00000 …                    all in one folder, as they lay on the hosts
    <directory>/<any name>/rank-00000 …         or a folder for each host, whatever it is called

`folder` reads the former, with `formats.snapshot` where nothing has to be computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ucformat.catalog import Catalog
from ucformat.errors import NotACheckpointError, SnapshotChangedError, StorageError, UcformatError, UnsupportedError
from ucformat.formats import snapshot
from ucformat.formats.contract import Reader
from ucformat.formats.snapshot import DescribedShard, assemble, rank_name, rank_of
from ucformat.formats.source import Source
from ucformat.snapshot.recovery.catalog import describe_placed
from ucformat.snapshot.recovery.inventory import HostInventory, scan
from ucformat.snapshot.recovery.versions import ComputedSlot, HeldVersion, Losses, versions
from ucformat.storage.store import Store

NAME = "snapshot-hosts"
_STEP = re.compile(r"step-\d+/")
_TOLD = 4  # reasons that a message names


def _folders(store: Store) -> Iterator[str]:
    """Folders that may be those of hosts; the steps of a run are not even looked into."""
    return (name.rstrip("/") for name in store.list() if name.endswith("/") and not _STEP.fullmatch(name))


def _hosts(source: Source) -> Iterator[str]:
    """Folders in which there are slots."""
    for name in () if source.file is not None else _folders(source.store):
        has_ranks = any(rank_of(entry) is not None for entry in source.store.list(name))
        if has_ranks and snapshot.detect(Source(source.store.sub(name))):
            yield name


def detect(source: Source) -> bool:
    """Whether there is a folder of a host. Asked last, so it is no other kind of checkpoint."""
    return next(_hosts(source), None) is not None


def open_hosts(source: Source, step: int | None = None) -> Catalog:
    """The newest version, or that of `step`, that the folders of all hosts hold between them. Reads records and headers only.

    Raises NotACheckpointError when no version is whole, UnsupportedError when the folders are several snapshots.
    """
    stores = {number: source.store.sub(name) for number, name in enumerate(_hosts(source))}
    found = {number: scan(store) for number, store in stores.items()}
    runs = {version.run for one in found.values() for version in versions([one]) if version.complete and not version.computed}
    if len(runs) > 1:
        raise UnsupportedError(source.url, "its folders are whole snapshots of several runs: give the path of one of them")
    return _open(list(found.values()), stores, source.store, step)


def open_computed(store: Store, step: int | None = None) -> Catalog | None:
    """The newest version, or that of `step`, in one folder of all ranks; None unless slots of it have to be computed."""
    found = scan(store)
    whole = next((version for version in _of_step([found], Losses(), step) if version.complete), None)
    return _open([found], {0: store}, store, step) if whole is not None and whole.computed else None


def _of_step(found: Sequence[HostInventory], losses: Losses, step: int | None) -> list[HeldVersion]:
    return [version for version in versions(found, losses) if step is None or version.step == step]


def _open(found: Sequence[HostInventory], stores: Mapping[int, Store], root: Store, step: int | None) -> Catalog:
    losses, damaged = Losses(), list[str]()
    ignored = [text for one in found for text in one.ignored]
    while True:
        passed: list[str] = []
        for version in _of_step(found, losses, step):
            if version.complete:
                break
            passed.append(_incomplete(version))
        else:
            why = "; ".join([*damaged, *passed, *ignored][:_TOLD]) or "the slots are empty"
            raise NotACheckpointError(root.url, f"no complete version{'' if step is None else f' of step {step}'}: {why}")
        shards, more = _describe(version, stores, damaged)
        if shards is not None:
            return assemble(shards, root, [*map(_computed, filter(_is_computed, version.slots)), *damaged, *passed, *ignored])
        losses |= more


def _describe(
    version: HeldVersion, stores: Mapping[int, Store], damaged: list[str]
) -> tuple[list[DescribedShard] | None, Losses]:
    """All slots of a version; or None, and which of them can't be used. Raises SnapshotChangedError, StorageError."""
    shards, losses = list[DescribedShard](), Losses()
    for placed in version.slots:
        try:
            shards.append(describe_placed(placed, stores))
        except (SnapshotChangedError, StorageError):
            raise
        except UcformatError as error:
            key = frozenset({placed.slot.key})
            losses |= Losses(computed=key) if isinstance(placed, ComputedSlot) else Losses(slots=key)
            damaged.append(f"the slot of rank {placed.slot.rank} of step {version.step} can't be used: {error}")
    return (shards if len(shards) == len(version.slots) else None), losses


def _is_computed(placed: object) -> bool:
    return isinstance(placed, ComputedSlot)


def _computed(placed: object) -> str:
    assert isinstance(placed, ComputedSlot)
    kept = ", ".join(rank_name(stripe.stripe.rank) for stripe in placed.stripes)
    return f"{rank_name(placed.slot.rank)} of step {placed.slot.key.step} was rebuilt from parity in {kept}"


def _incomplete(version: HeldVersion) -> str:
    ranks = ", ".join(map(str, version.missing()))
    return f"step {version.step} is incomplete: slots of ranks {ranks} of {version.world} are not here, nor enough parity"


READER = Reader(name=NAME, detect=detect, open_catalog=open_hosts, open_step=open_hosts, detects_changes=True)
