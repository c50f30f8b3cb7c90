"""Kills at every file operation of a write: the old checkpoint or the new one is there, whole, and the write can be repeated."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import traceback
from pathlib import Path
from random import Random

from tests.campaigns.syscalls import Action, Trap
from tests.campaigns.writing import NEW, Scenario, Writing


class Kills:
    """A trial: one scenario, killed before or after one file operation."""

    def __init__(self, writing: Writing, work: Path) -> None:
        self.writing, self.work = writing, work
        self.calls: dict[int, int] = {}
        for index in range(len(writing.scenarios)):
            self.calls[index] = self._count(index)

    def _count(self, index: int) -> int:
        come, go = os.pipe()
        directory = self._directory(self.writing.scenarios[index])
        pid = os.fork()
        if pid == 0:
            trap = Trap(under=str(self.work))
            trap.install()
            try:
                self.writing.scenarios[index].write(directory, NEW)
            finally:
                calls = trap.calls
                trap.at = -1
                os.write(go, str(calls).encode())
                os._exit(0)
        os.close(go)
        with os.fdopen(come, "rb") as file:
            calls = int(file.read())
        os.waitpid(pid, 0)
        shutil.rmtree(directory)
        return calls

    def _directory(self, scenario: Scenario) -> Path:
        directory = Path(tempfile.mkdtemp(dir=self.work))
        if scenario.before is not None:
            shutil.copytree(scenario.before, directory, dirs_exist_ok=True, symlinks=True)
        return directory

    def __call__(self, random: Random) -> str:
        index = random.randrange(len(self.writing.scenarios))
        scenario = self.writing.scenarios[index]
        at, action = random.randrange(1, self.calls[index] + 1), random.choice(["before", "after"])
        directory = self._directory(scenario)
        try:
            ended = self._run(scenario, directory, at, "before" if action == "before" else "after")
            if ended not in (0, -signal.SIGKILL):
                return f"untyped: {scenario.name} ended with {ended} at operation {at}"
            wrong = self.writing.check(scenario, directory)
            when = f"killed {action} operation {at} of {self.calls[index]}, old there: {scenario.before is not None}"
            return f"{wrong} ({when})" if wrong else ""
        finally:
            shutil.rmtree(directory)

    def _run(self, scenario: Scenario, directory: Path, at: int, action: Action) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                Trap(action, at, under=str(self.work)).install()
                scenario.write(directory, NEW)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
