"""`python -m tests.campaigns --seconds 3600 --seed 1 [--only NAME] [--first N --count N]`: a table of tried and failed."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from tests.campaigns.damage import Damage
from tests.campaigns.faults import Faults
from tests.campaigns.fuzz import Fuzz, Pickles, pickle_seeds
from tests.campaigns.hosts import HostLosses
from tests.campaigns.injuries import Injuries
from tests.campaigns.injury_kinds import KINDS, InjuriesOfKind
from tests.campaigns.kills import Kills
from tests.campaigns.objects import Objects
from tests.campaigns.races import Races
from tests.campaigns.samples import samples
from tests.campaigns.tally import HEAD
from tests.campaigns.worker import Trial, run
from tests.campaigns.writing import Writing

SHARES = {
    "kills": 0.2,
    "damage": 0.2,
    "fuzz": 0.1,
    "pickles": 0.05,
    "faults": 0.1,
    "races": 0.05,
    "objects": 0.1,
    "injuries": 0.1,
    **{f"injuries-{kind}": 0.01 for kind in KINDS},
    "hosts": 0.1,
}
"""Campaign → its part of the time."""


def campaigns(work: Path) -> dict[str, Callable[[], Trial]]:
    """How to make each campaign's trial. What they start from is made once."""

    def folder(name: str) -> Path:
        (work / name).mkdir()
        return work / name

    good = cache(lambda: samples(folder("samples")))
    writing = cache(lambda: Writing(folder("writing")))
    return {
        "kills": lambda: Kills(writing(), folder("kills")),
        "damage": lambda: Damage(good(), folder("damage")),
        "fuzz": lambda: Fuzz(good(), folder("fuzz")),
        "pickles": lambda: Pickles(pickle_seeds(good())),
        "faults": lambda: Faults(writing(), folder("faults")),
        "races": lambda: Races(writing(), folder("races")),
        "objects": lambda: Objects(folder("objects")),
        "injuries": lambda: Injuries(folder("injuries")),
        **{f"injuries-{kind}": partial(InjuriesOfKind, kind, folder(f"injuries-{kind}")) for kind in KINDS},
        "hosts": lambda: HostLosses(folder("hosts")),
    }


def main() -> int:
    """Run the campaigns; 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600, help="time for all that is run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SHARES, action="append", help="this campaign alone; repeatable")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--count", type=int, help="number of trials")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="ucformat-campaign-", dir=memory if memory.is_dir() else None))
    good = True
    try:
        print(HEAD, flush=True)
        chosen = asked.only or list(SHARES)
        for name, make in campaigns(work).items():
            if name not in chosen:
                continue
            began = time.monotonic()
            seconds = asked.seconds * SHARES[name] / sum(SHARES[other] for other in chosen)
            tally = run(name, make(), asked.seed, seconds, first=asked.first, count=asked.count)
            print(tally.row(time.monotonic() - began), flush=True)
            for line in tally.shown:
                print(f"    --only {name} --seed {asked.seed}, {line}", flush=True)
            good = good and tally.ok
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
