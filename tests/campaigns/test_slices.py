"""Seconds of the campaigns, from a seed of their own: `make campaign` runs them for as long as is wanted."""

from __future__ import annotations

import subprocess
import sys

SECONDS, SEED = 15, 20
CAMPAIGNS = ("kills", "damage", "fuzz", "pickles", "faults")


def test_seconds_of_every_campaign_find_nothing() -> None:
    chosen = [arg for name in CAMPAIGNS for arg in ("--only", name)]
    command = [sys.executable, "-m", "tests.campaigns", *chosen, "--seconds", str(SECONDS), "--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert all(f"\n{name} " in done.stdout for name in CAMPAIGNS)
