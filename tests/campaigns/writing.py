"""What the campaigns of kills, faults and races do: saves, overwrites, runs of steps, conversions to every format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ucformat
from tests.campaigns.samples import Content, content, state
from ucformat.errors import UcformatError

OLD, NEW = 1, 2
"""Salts of what stands there and what is written."""
FORMATS = ("native", "hf", "dcp", "torchsave")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that writes, and what stood there before."""

    name: str
    before: Path | None
    """A directory that holds what stands there first; None: nothing."""
    write: Callable[[Path, int], None]
    """(directory, salt)"""
    entry: str
    """What to open below the directory."""


class Writing:
    """All scenarios, with the contents that are allowed to be found."""

    def __init__(self, work: Path) -> None:
        self.sources = {salt: work / f"source-{salt}" for salt in (OLD, NEW)}
        for salt, path in self.sources.items():
            ucformat.save(str(path), state(salt))
        self.scenarios: list[Scenario] = []
        self.contents: dict[tuple[str, int], Content] = {}
        self._add("save", "x", self._save, work)
        self._add("steps", "run", self._step, work)
        for to in FORMATS:
            self._add(to, "x.pt" if to == "torchsave" else "x", self._convert(to), work)

    def _add(self, name: str, entry: str, write: Callable[[Path, int], None], work: Path) -> None:
        old = work / f"before-{name}"
        old.mkdir()
        write(old, OLD)
        self.contents[name, OLD] = content(str(old / entry))[0]
        new = work / f"after-{name}"
        new.mkdir()
        write(new, NEW)
        self.contents[name, NEW] = content(str(new / entry))[0]
        shutil.rmtree(new)
        self.scenarios += [Scenario(name, None, write, entry), Scenario(name, old, write, entry)]

    @staticmethod
    def _save(directory: Path, salt: int) -> None:
        ucformat.save(str(directory / "x"), state(salt), overwrite=True)

    @staticmethod
    def _step(directory: Path, salt: int) -> None:
        ucformat.save(str(directory / "run"), state(salt), step=salt, keep=1, overwrite=True)

    def _convert(self, to: str) -> Callable[[Path, int], None]:
        def write(directory: Path, salt: int) -> None:
            path = directory / ("x.pt" if to == "torchsave" else "x")
            ucformat.convert(str(self.sources[salt]), str(path), to, max_file_bytes=1000, overwrite=os.path.lexists(path))

        return write

    def found(self, scenario: Scenario, directory: Path) -> int | None:
        """Which of the two contents can be read now; None when neither can. Raises ValueError for a third."""
        try:
            held, _ = content(str(directory / scenario.entry))
        except UcformatError:
            return None
        for salt in (OLD, NEW):
            if held == self.contents[scenario.name, salt]:
                return salt
        raise ValueError(f"{scenario.name}: holds neither the old nor the new, but {sorted(held)[:4]}")

    def check(self, scenario: Scenario, directory: Path) -> str:
        """What is wrong after a write that may have been interrupted; then the write is tried again."""
        try:
            now = self.found(scenario, directory)
        except ValueError as error:
            return f"wrong: {error}"
        if now is None and scenario.before is not None:
            return f"lost: {scenario.name}: neither the old nor the new can be read"
        scenario.write(directory, NEW)
        if self.found(scenario, directory) != NEW:
            return f"lost: {scenario.name}: written again, and not there"
        return ""
