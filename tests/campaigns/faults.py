"""Storage that fails or cuts calls short, on one of two ranks: both ranks agree, nothing is damaged, the next write works."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from random import Random

import torch.distributed as dist

import ucformat
from tests.campaigns.samples import state
from tests.campaigns.syscalls import Action, Trap
from tests.campaigns.writing import NEW, OLD, Scenario, Writing
from ucformat.errors import UcformatError

_MOST_CALLS = 60  # of one rank in a save; a number beyond the last call means that nothing fails


class Faults:
    """A trial: a write (or a load) on one or two ranks during which one file operation of one rank fails."""

    def __init__(self, writing: Writing, work: Path) -> None:
        self.writing, self.work = writing, work

    def __call__(self, random: Random) -> str:
        scenario = random.choice(self.writing.scenarios)
        ranks = 2 if scenario.name in ("save", "steps") and random.random() < 0.5 else 1
        loading = scenario.before is not None and random.random() < 0.3
        action: Action = random.choice(["fail", "fail", "short"])
        trap = (action, random.randrange(1, _MOST_CALLS), random.randrange(8))
        directory = Path(tempfile.mkdtemp(dir=self.work))
        try:
            if scenario.before is not None:
                shutil.copytree(scenario.before, directory, dirs_exist_ok=True)
            outcomes = self._ranks(scenario, directory, ranks, random.randrange(ranks), trap, loading=loading)
            said = f"{scenario.name}, {ranks} ranks, {trap}, {'load' if loading else 'write'}: {outcomes}"
            if any(outcome.startswith("!") for outcome in outcomes):
                return f"untyped: {said}"
            if len(set(outcomes)) > 1:
                return f"wrong: ranks differ: {said}"
            if set(outcomes) == {"ok"} and not loading and self.writing.found(scenario, directory) != NEW:
                return f"lost: said ok: {said}"
            wrong = self.writing.check(scenario, directory)
            return f"{wrong} ({said})" if wrong else ""
        finally:
            shutil.rmtree(directory)

    def _ranks(
        self, scenario: Scenario, directory: Path, ranks: int, faulty: int, trap: tuple[Action, int, int], *, loading: bool
    ) -> list[str]:
        meeting = tempfile.mktemp(dir=self.work)
        pipes = [os.pipe() for _ in range(ranks)]
        pids = []
        for rank, (_, go) in enumerate(pipes):
            pid = os.fork()
            if pid == 0:
                outcome = "! died"
                try:
                    if ranks > 1:
                        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
                    own = Trap(*trap, under=str(self.work)) if rank == faulty else None
                    outcome = self._rank(scenario, directory, own, loading=loading)
                finally:
                    with os.fdopen(go, "wb", closefd=False) as file:
                        file.write(pickle.dumps(outcome))
                    os._exit(0)
            pids.append(pid)
            os.close(go)
        outcomes = []
        for come, _ in pipes:
            with os.fdopen(come, "rb") as file:
                data = file.read()
            outcomes.append(pickle.loads(data) if data else "! died")  # our own child's
        for pid in pids:
            os.waitpid(pid, 0)
        if os.path.exists(meeting):
            os.unlink(meeting)
        return outcomes

    def _rank(self, scenario: Scenario, directory: Path, trap: Trap | None, *, loading: bool) -> str:
        if trap is not None:
            trap.install(reads=True)
        try:
            if loading:
                into = state(NEW)
                ucformat.load(str(directory / scenario.entry), into={"model": into["model"]}, strict=False)
                return "ok" if _same(into["model"], state(OLD)["model"]) else "! loaded something else"
            scenario.write(directory, NEW)
        except UcformatError as error:
            return type(error).__name__
        except Exception as error:
            return f"! {type(error).__name__}: {error} at {None if trap is None else trap.hit}"
        finally:
            if trap is not None:
                trap.at = -1
        return "ok"


def _same(a: dict[str, object], b: dict[str, object]) -> bool:
    import torch

    return all(torch.equal(a[name], b[name]) for name in a)  # type: ignore[arg-type]
