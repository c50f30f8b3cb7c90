"""Two writers at one path, and readers beside them: what is there at the end is one of theirs, whole, and readers always read."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from random import Random

from tests.campaigns.writing import NEW, OLD, Scenario, Writing
from ucformat.errors import UcformatError

_LOOKS = 50  # of a reader at something that is replaced up to six times


class Races:
    """A trial: two processes write old and new to one path a few times while a third reads."""

    def __init__(self, writing: Writing, work: Path) -> None:
        self.writing, self.work = writing, work

    def __call__(self, random: Random) -> str:
        scenario = random.choice(self.writing.scenarios)
        directory = Path(tempfile.mkdtemp(dir=self.work))
        rounds, late = random.choice([1, 1, 3]), random.random() * 0.01
        try:
            if scenario.before is not None:
                shutil.copytree(scenario.before, directory, dirs_exist_ok=True)
            roles = [self._child(self._write, scenario, directory, salt, rounds, late * i) for i, salt in enumerate((OLD, NEW))]
            if scenario.before is not None and scenario.name != "steps":
                roles.append(self._child(self._read, scenario, directory, 0, 5, 0.0))
            said = [self._end(*role) for role in roles]
            told = f"{scenario.name}, old there: {scenario.before is not None}, {rounds} rounds: {said}"
            if any(outcome.startswith("!") for outcome in said):
                return f"{'wrong' if any('reader' in outcome for outcome in said) else 'untyped'}: {told}"
            try:
                now = self.writing.found(scenario, directory)
            except ValueError as error:
                return f"wrong: {error}: {told}"
            if now is None and ("ok" in said[:2] or scenario.before is not None):
                return f"lost: {told}"
            return ""
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @staticmethod
    def _child(role: object, *args: object) -> tuple[int, int]:
        come, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            outcome = "! died"
            try:
                outcome = role(*args)  # type: ignore[operator]
            except Exception as error:
                outcome = f"! {type(error).__name__}: {error}"
            finally:
                os.write(go, outcome.encode("utf-8", "replace")[:2000])
                os._exit(0)
        os.close(go)
        return pid, come

    @staticmethod
    def _end(pid: int, come: int) -> str:
        with os.fdopen(come, "rb") as file:
            data = file.read().decode()
        os.waitpid(pid, 0)
        return data or "! died"

    def _write(self, scenario: Scenario, directory: Path, salt: int, rounds: int, late: float) -> str:
        time.sleep(late)
        outcomes = []
        for _ in range(rounds):
            try:
                scenario.write(directory, salt)
                outcomes.append("ok")
            except UcformatError as error:
                outcomes.append(type(error).__name__)
        return "ok" if "ok" in outcomes else outcomes[-1]

    def _read(self, scenario: Scenario, directory: Path, salt: int, rounds: int, late: float) -> str:
        for _ in range(rounds):
            try:  # what is opened may be replaced while it is read: then there is an error, and the next look finds the new one
                if all(self.writing.found(scenario, directory) is None for _ in range(_LOOKS)):
                    return "! reader found nothing"
            except ValueError as error:
                return f"! reader: {error}"
        return "ok"
