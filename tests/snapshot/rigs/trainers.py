"""A trainer to be killed: `python -m tests.snapshot.rigs.trainers <slots> <url> <steps…>` persists its
steps and goes on for ever.

It prints its keeper's process id, and a line once that has all orders.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.snapshot.rigs.keeping import make_slots, options, take
from ucformat.snapshot.keeper.client import Keeper


def main() -> None:
    directory, url, *steps = sys.argv[1:]
    slots = make_slots(Path(directory))
    keeper = Keeper(options(Path(directory), url))
    keeper.start()
    if os.fork() == 0:  # a data loader's worker, which inherits the pipes and outlives the trainer
        time.sleep(float(os.environ["WORKER_S"]))
        os._exit(0)
    print(keeper.pid, flush=True)
    for step in map(int, steps):
        assert keeper.hash_and_maybe_persist(take(slots, step).index, step, persist=True)
    print("ordered", flush=True)
    while True:
        keeper.poll()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
