"""Fails one I/O operation of one of two ranks after another, and looks at what comes of it. For `test_failure_matrix`.

Everything here runs in the ranks, whose own messages go over the store of torch.distributed: a collective of the product that
one rank has left out is then seen as such, and is not mistaken for one of the test's.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ucformat
from tests.campaigns.syscalls import Trap
from ucformat.errors import UcformatError
from ucformat.formats import ownership
from ucformat.storage.open import open_store

OLD, NEW = 1.0, 2.0
PATIENCE = timedelta(seconds=90)  # of a collective; a rank that waits for one in vain raises then
STUCK_S = 400.0
_TOKEN = re.compile(r"[0-9a-f]{12}")
_TRAP = Trap()  # of this process; it counts nothing until it is armed


def state(salt: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((8, 4), salt), "b": torch.full((6,), salt), "c": torch.full((3, 3), salt)}}


@dataclass(frozen=True)
class Verb:
    """What is done, where the old is and the new comes, and what stood there first."""

    name: str
    act: Callable[[Path, dist.ProcessGroup], None]
    """On every rank, below a directory."""
    entry: str
    """What the verb writes."""
    setup: Callable[[Path], None] | None = None
    """On one rank: what stands there first, beside `source`."""
    alone: bool = False
    """Only rank 0 does it."""
    writes: bool = True


def save(directory: Path, group: dist.ProcessGroup) -> None:
    ucformat.save(directory / "x", state(NEW), process_group=group)


def overwrite(directory: Path, group: dist.ProcessGroup) -> None:
    ucformat.save(directory / "x", state(NEW), overwrite=True, process_group=group)


def keep(directory: Path, group: dist.ProcessGroup) -> None:
    ucformat.save(directory / "x", state(NEW), step=3, keep=2, overwrite=True, process_group=group)


def load(directory: Path, group: dist.ProcessGroup) -> None:
    into = state(0.0)
    ucformat.load(directory / "source", into=into, process_group=group)
    assert torch.equal(into["model"]["w"], state(NEW)["model"]["w"])


def prune(directory: Path, group: dist.ProcessGroup) -> None:
    ucformat.prune(str(directory / "x"))


def converting(to: str, *, again: bool) -> Callable[[Path, dist.ProcessGroup], None]:
    def act(directory: Path, group: dist.ProcessGroup) -> None:
        ucformat.convert(str(directory / "source"), str(directory / "x"), to, overwrite=again, process_group=group)

    return act


def _old_steps(directory: Path) -> None:
    for step in (1, 2):
        ucformat.save(directory / "x", state(OLD), step=step, process_group=_ALONE[0])


def _old(directory: Path) -> None:
    ucformat.save(directory / "x", state(OLD), process_group=_ALONE[0])


def _old_of(to: str) -> Callable[[Path], None]:
    def setup(directory: Path) -> None:
        ucformat.save(directory / "old", state(OLD), process_group=_ALONE[0])
        ucformat.convert(str(directory / "old"), str(directory / "x"), to, process_group=_ALONE[0])
        shutil.rmtree(directory / "old")

    return setup


def _left_over(directory: Path) -> None:
    _old(directory)
    store = open_store(str(directory / "x"))
    claim = ownership.begin(store, "save")
    store.put(f"shards.{claim.token}/00000.safetensors", b"unfinished")
    claim.hold.release()


FORMATS = ("native", "hf", "dcp", "torchsave")
VERBS = {
    verb.name: verb
    for verb in (
        Verb("save", save, "x"),
        Verb("save-overwrite", overwrite, "x", _old),
        Verb("save-keep", keep, "x", _old_steps),
        Verb("load", load, "source", writes=False),
        Verb("prune", prune, "x", _left_over, alone=True, writes=False),
        *(Verb(f"convert-{to}", converting(to, again=False), "x") for to in FORMATS),
        *(Verb(f"convert-{to}-overwrite", converting(to, again=True), "x", _old_of(to)) for to in FORMATS),
    )
}
_ALONE: list[dist.ProcessGroup] = []


def matrix(folder: str, stride: int) -> dict[str, list[str]]:
    """What is wrong, by verb; and how much was tried, as `tried`. Called on every rank."""
    _ALONE[:] = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank() :][:1]
    run = Runs(Path(folder), stride)
    _TRAP.under = folder
    _TRAP.install(reads=True)
    for verb in VERBS.values():
        run.of(verb)
    return run.wrong


def _new_group() -> dist.ProcessGroup:
    return dist.new_group(timeout=PATIENCE)  # type: ignore[no-any-return]


@dataclass
class Runs:
    """All runs of all verbs, on one rank."""

    folder: Path
    stride: int
    wrong: dict[str, list[str]] = field(default_factory=dict)
    tried: int = 0
    group: dist.ProcessGroup = field(default_factory=_new_group)
    _asked: int = 0

    def of(self, verb: Verb) -> None:
        """Count the operations of each rank, then fail them one by one."""
        self.wrong[verb.name] = []
        scene = self.folder / f"scene-{verb.name}"
        if _rank() == 0:
            scene.mkdir()
            ucformat.save(scene / "source", state(NEW), process_group=_ALONE[0])
            if verb.setup is not None:
                verb.setup(scene)
        self.share(None)
        before = names(scene)
        directory = self._copy(scene)
        outcomes = self._act(verb, directory, -1, 0)
        assert [what for what, _, _ in outcomes] == ["ok", "ok"], outcomes
        after = names(directory)
        calls = [count for _, count, _ in outcomes]
        self.share(None)
        for victim in (0,) if verb.alone else (0, 1):
            for at in range(1 + (self.tried % self.stride), calls[victim] + 1, self.stride):
                self.tried += 1
                self._one(verb, scene, victim, at, before, after)

    def _one(self, verb: Verb, scene: Path, victim: int, at: int, before: set[str], after: set[str]) -> None:
        directory = self._copy(scene)
        outcomes = self._act(verb, directory, at, victim)
        said = [what for what, _, _ in outcomes[: 1 if verb.alone else 2]]
        wrong: list[str] = []
        if len(set(said)) > 1:
            wrong.append(f"ranks differ: {said}")
            self.group = _new_group()
        if any(what.startswith("!") for what in said):
            wrong.append(f"no error of ours: {said}")
        self.share(None)
        if _rank() == 0:
            wrong += look(verb, directory, said[0])
        again = at % 2 == 0 and verb.writes
        if again:
            self.share(None)
            repeat = self._act(verb if said[0] != "ok" else _again(verb), directory, -1, 0)
            if {what for what, _, _ in repeat} != {"ok"}:
                wrong.append(f"done again: {repeat}")
        if _rank() == 0:
            ucformat.prune(str(directory / "x"), keep=2 if verb.name == "save-keep" else None)
            wanted = after if again or said[0] == "ok" else before
            got = names(directory)
            if got != wanted and not (verb.name == "prune" and got == after):
                wrong.append(
                    f"{'done again' if again else 'pruned'}: too much {sorted(got - wanted)}, gone {sorted(wanted - got)}"
                )
        hit = next((what for _, _, what in outcomes if what), "nothing")
        self.wrong[verb.name] += [f"rank {victim}, operation {at} ({hit}), {said[0]}: {text}" for text in wrong]

    def _copy(self, scene: Path) -> Path:
        directory = self.folder / "work"
        if _rank() == 0:
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(scene, directory, symlinks=True)
        self.share(None)
        return directory

    def _act(self, verb: Verb, directory: Path, at: int, victim: int) -> list[tuple[str, int, str]]:
        """(outcome, operations, which one failed) of each rank."""
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        _TRAP.action, _TRAP.calls, _TRAP.hit = "fail", 0, ""
        _TRAP.under, _TRAP.at = str(directory), at if _rank() == victim else -1
        outcome = "ok"
        try:
            if not verb.alone or _rank() == 0:
                verb.act(directory, self.group)
        except UcformatError as error:
            outcome = type(error).__name__
        except Exception as error:
            outcome = f"! {type(error).__name__}: {error}"
        calls = _TRAP.calls
        _TRAP.at = -1
        faulthandler.cancel_dump_traceback_later()
        return self.share((outcome, calls, _TRAP.hit))

    def share(self, item: Any) -> list[Any]:
        """Every rank's item, over the store."""
        store = dist.distributed_c10d._get_default_store()
        self._asked += 1
        key = f"failures/{self._asked}"
        store.set(f"{key}/{_rank()}", pickle.dumps(item).hex())
        return [pickle.loads(bytes.fromhex(store.get(f"{key}/{rank}").decode())) for rank in range(2)]  # our own ranks'


def _again(verb: Verb) -> Verb:
    """A verb that was done, and is done once more: now something stands there."""
    acts = {"save": overwrite}
    if verb.name.startswith("convert-"):
        return Verb(verb.name, converting(verb.name.split("-")[1], again=True), verb.entry)
    return Verb(verb.name, acts.get(verb.name, verb.act), verb.entry)


def look(verb: Verb, directory: Path, said: str) -> list[str]:
    """What is wrong with what lies there now."""
    wrong = [] if ucformat.verify(directory / "source").ok else ["the source is damaged"]
    if verb.name == "save-keep":
        done = salt(directory / "x" / "step-00000003")
        if salt(directory / "x" / "step-00000002") != OLD:
            wrong.append("step 2 is damaged")
    else:
        done = salt(directory / verb.entry)
    if verb.writes:
        if said == "ok" and done != NEW:
            wrong.append(f"said ok, and holds {done}")
        if said != "ok" and done == NEW:
            wrong.append("raised, and is committed")
        if said != "ok" and verb.setup not in (None, _old_steps) and done is None:
            wrong.append("the old one is gone")
    return wrong


def salt(path: Path) -> float | None:
    """What a checkpoint holds; None where none can be read."""
    with suppress(UcformatError):
        if ucformat.verify(path).ok:
            opened = ucformat.open(path)
            values = {float(x) for name in opened for x in opened[name].read().reshape(-1)}
            assert len(values) == 1, f"{path}: mixed: {values}"
            return values.pop()
    return None


def names(directory: Path) -> set[str]:
    """All files and directories that are not empty, their tokens made alike."""
    found = [path for path in directory.rglob("*") if not path.is_dir() or any(path.iterdir())]
    return {_TOKEN.sub("T", os.path.relpath(path, directory)) for path in found}


def _rank() -> int:
    return dist.get_rank()
