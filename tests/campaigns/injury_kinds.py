"""One kind of injury a trial, on hosts whose every version is protected: stale parity, mixed versions, flipped bits."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from tests.checkpoints import flip
from tests.snapshot.rigs.hosts import MemoryHosts, restore_on
from ucformat.errors import UcformatError

KINDS = ("slot", "parity", "record", "parity-record", "stale-parity", "mixed-versions")
"""Flipped is a bit of a slot, a stripe, or their records; an older version gives its stripe or slot: bytes, record, or both."""
_FLIPPED = {"slot": "slot-*.safetensors", "parity": "parity-*.xor", "record": "slot-*.json", "parity-record": "parity-*.json"}
LAST = 4  # steps: with three slots, the last lies where the first did


def made(place: Path, chance: random.Random) -> tuple[list[int], dict[Path, bytes]]:
    """Four protected versions; the hosts, and the files of the first version, which the last has replaced."""
    hosts = chance.choice([[0, 1, 2], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2], [0, 1]])
    memory, first = MemoryHosts(place, hosts, 8), dict[Path, bytes]()
    for step in range(1, LAST + 1):
        memory.take(step)
        memory.protect()
        if step == 1:
            first = {path: path.read_bytes() for path in place.rglob("*-0.*") if path.name.startswith(("slot-", "parity-"))}
    memory.close()
    return hosts, first


def hurt(place: Path, kind: str, first: dict[Path, bytes], chance: random.Random) -> None:
    """One injury of the last version."""
    if kind in _FLIPPED:
        path = chance.choice(sorted(place.rglob(_FLIPPED[kind].replace("*", "0"))))
        flip(path, chance.randrange(path.stat().st_size))
        return
    name = "parity-0" if kind == "stale-parity" else "slot-0"
    folder = chance.choice(sorted({path.parent for path in first}))
    files = sorted(path for path in first if path.parent == folder and path.name.startswith(name))
    for path in chance.choice([files, files[:1], files[1:]]):
        path.write_bytes(first[path])


def injure(place: Path, kind: str, chance: random.Random) -> str:
    """One trial; empty or what went wrong. An injury alone costs nothing; beside a lost host, the version before at most."""
    hosts, first = made(place, chance)
    hurt(place, kind, first, chance)
    left = sorted(set(hosts))
    if also_lost := chance.random() < 0.5:
        gone = chance.choice(left)
        shutil.rmtree(place / f"host{gone}")
        left.remove(gone)
    world = max(chance.randint(1, 4), len(left))
    try:
        found = restore_on(place, [left[i % len(left)] for i in range(world)], chance.randint(0, 1))
    except UcformatError as error:
        return f"lost: {type(error).__name__}: {error}"
    steps = {None if restored is None else restored.step for restored, _ in found}
    if len(steps) != 1 or not all(restored is not None and part.is_of(restored.step) for restored, part in found):
        return f"wrong: {found[0][0]}"
    step = steps.pop() or 0
    return f"lost: step {step} of {LAST}" if step < LAST - also_lost else ""


class InjuriesOfKind:
    """A trial in a directory of its own."""

    def __init__(self, kind: str, work: Path) -> None:
        self.kind, self.work = kind, work

    def __call__(self, chance: random.Random) -> str:
        place = Path(tempfile.mkdtemp(dir=self.work))
        try:
            return injure(place, self.kind, chance)
        finally:
            shutil.rmtree(place, ignore_errors=True)
