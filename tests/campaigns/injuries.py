"""Slots, parity and their records on several hosts, hurt in memory: what is restored is right, or there is an error."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from tests.checkpoints import flip
from tests.snapshot.rigs.hosts import MemoryHosts, restore_on
from ucformat.errors import UcformatError


def injured(place: Path, chance: random.Random) -> tuple[list[int], int]:
    """A job that was cut off anywhere between its versions, and then lost one host or one bit.

    The hosts that are left, and the newest version that all ranks had protected.
    """
    hosts = chance.choice([[0, 1, 2], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2], [0, 1]])
    memory = MemoryHosts(place, hosts, chance.choice([2, 3, 8]))
    whole = 0
    for step in (1, 2, 3):  # the first is always protected; how far the next ones came
        taken, protected = (_some(memory.world, chance) if step > 1 else list(range(memory.world)) for _ in range(2))
        memory.take(step, taken)
        if len(taken) < memory.world:
            break
        memory.protect(protected)
        if len(protected) < memory.world:
            break
        whole = step
    memory.close()
    left = sorted(set(hosts))
    if chance.random() < 0.7:
        gone = chance.choice(left)
        shutil.rmtree(place / f"host{gone}")
        left.remove(gone)
    else:
        hurt(place, chance)
    return left, whole


def _some(world: int, chance: random.Random) -> list[int]:
    """All ranks, or now and then any of them."""
    return sorted(chance.sample(range(world), chance.randint(0, world))) if chance.random() < 0.4 else list(range(world))


def hurt(place: Path, chance: random.Random) -> None:
    """Flip a bit of a slot, a stripe or a record."""
    files = [path for path in place.rglob("*") if path.suffix in (".safetensors", ".xor", ".json")]
    path = chance.choice(sorted(file for file in files if file.stat().st_size))
    flip(path, chance.randrange(path.stat().st_size))


def injure(place: Path, chance: random.Random) -> str:
    """One trial; empty or what went wrong. One injury costs nothing that was protected; after more, nothing is made up."""
    left, whole = injured(place, chance)
    more = chance.choice([0, 0, 1, 3])
    for _ in range(more):
        hurt(place, chance)
    world = max(chance.randint(1, 4), len(left))
    try:
        found = restore_on(place, [left[i % len(left)] for i in range(world)], chance.randint(0, 1))
    except UcformatError as error:
        return "" if more else f"lost: {type(error).__name__}: {error}"
    steps = {None if restored is None else restored.step for restored, _ in found}
    if len(steps) != 1 or not all(part.is_of(restored.step if restored else 0) for restored, part in found):
        return f"wrong: {found[0][0]}"
    step = steps.pop() or 0
    return f"lost: step {step}, step {whole} was protected" if step < whole and not more else ""


class Injuries:
    """A trial in a directory of its own."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __call__(self, chance: random.Random) -> str:
        place = Path(tempfile.mkdtemp(dir=self.work))
        try:
            return injure(place, chance)
        finally:
            shutil.rmtree(place, ignore_errors=True)
