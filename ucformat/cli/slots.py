"""`ucconvert slots [DIR]…`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, remark, say, say_json
from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from ucformat.reshard.prune import Leftover
    from ucformat.snapshot.recovery.memory import SnapshotMemory, VersionMemory

_RUN_SHOWN = 8  # of the 32 characters of a run's token


def slots(
    directories: list[str] | None = typer.Argument(
        None, metavar="[DIR]...", help="Snapshot directories; by default all that lie in memory (tmpfs)."
    ),
    prune: bool = typer.Option(False, "--prune", help="List what jobs that have ended left in DIR; with --yes, remove it."),
    yes: bool = typer.Option(False, "--yes", help="With --prune: remove what is listed. Versions in it are lost."),
    json: bool = typer.Option(False, "--json", help="Print the list as JSON."),
) -> None:
    """List the snapshots in this host's memory: run, ranks, versions, size, parity, and whether their job lives.

    With --prune --yes, remove those of jobs that have ended, unless any process of the job still works there.
    """
    from ucformat.snapshot.recovery import memory

    if yes and not prune:
        raise typer.BadParameter("--yes is for --prune")
    if prune and not directories:
        raise typer.BadParameter("--prune needs the directories: a job that is about to start again has no process")
    if not is_leader():
        return
    if prune:
        _prune(directories or (), yes=yes, json=json)
        return
    found = [memory.look(directory) for directory in directories] if directories else _look_everywhere()
    if json:
        say_json([{**_fields(one), "owners": one.owners, "nbytes": one.nbytes} for one in found])
        return
    for one in found:
        _print(one)
    say(f"{count_text(len(found), 'snapshot')}, {bytes_text(sum(one.nbytes for one in found))} of slots and parity")


def _look_everywhere() -> list[SnapshotMemory]:
    """What can be looked at; a job of another user, or one that tidies up at this moment, costs no other."""
    from ucformat.snapshot.recovery import memory

    found: list[SnapshotMemory] = []
    for directory in memory.find():
        try:
            found.append(memory.look(directory))
        except UcformatError as error:
            remark(f"left out: {error}")
    return found


def _fields(one: SnapshotMemory) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def _print(one: SnapshotMemory) -> None:
    slots_size = bytes_text(sum(rank.nbytes for rank in one.ranks))
    parity_size = sum(rank.parity_nbytes for rank in one.ranks)
    parity = f", {bytes_text(parity_size)} of parity" if parity_size else ""
    owners = f"in use by {', '.join(one.owners)}" if one.owners else "no process of the job lives"
    say(f"{one.directory}: {_ranks(tuple(rank.rank for rank in one.ranks))}, {slots_size} of slots{parity}; {owners}")
    for version in one.versions:
        say(f"  {_describe(version)}")
    if not one.versions:
        say("  no version in the slots")
    for text in one.ignored:
        remark(text)


def _describe(version: VersionMemory) -> str:
    missing = version.world - len(version.ranks)
    facts = [
        f"step {version.step}",
        f"run {version.run[:_RUN_SHOWN]}" if version.run else "",
        f"{_ranks(version.ranks)} of {version.world}" + (f" ({missing} not on this host)" if missing else ""),
        bytes_text(version.nbytes),
        "" if version.hashed == len(version.ranks) else f"{len(version.ranks) - version.hashed} without checksums yet",
        f"parity kept by {_ranks(version.parity)}" if version.parity else "",
    ]
    return ", ".join(filter(None, facts))


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}" if ranks else "no rank"


def _prune(directories: Sequence[str], *, yes: bool, json: bool) -> None:
    from ucformat.snapshot.recovery.leftovers import prune_slots

    found = [item for directory in directories for item in prune_slots(directory, dry_run=not yes)]
    if json:
        say_json(found)
        return
    print_leftovers(found, removed=yes)


def print_leftovers(found: Sequence[Leftover], *, removed: bool) -> None:
    """What was removed, or would be, and what stays."""
    free = [item for item in found if not item.in_use]
    for item in found:
        stays = " (in use or too young to tell: stays)" if item.in_use else ""
        say(f"{item.path}: {item.what}, {bytes_text(item.nbytes)}{stays}")
    done = "removed" if removed else "would remove"
    say(f"{done} {count_text(len(free), 'leftover')}, {bytes_text(sum(item.nbytes for item in free))}")
    if free and not removed:
        remark("nothing was changed: pass --yes to remove these")
