"""What a campaign found: how many trials, and the failures of each kind with the trials that show them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KINDS = ("lost", "wrong", "untyped", "hang", "memory", "crash")
"""Data gone; other data than was stored, without an error; an error that is not one of ucformat's; no end; more than 1 GB;
a process that died."""
_SHOWN = 20


@dataclass
class Tally:
    """Trials and failures of one campaign."""

    name: str
    tried: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def add(self, trial: int, outcome: str) -> None:
        """Count a trial; `outcome` is empty or starts with one of `KINDS`."""
        self.tried += 1
        if outcome:
            kind = outcome.split(":", 1)[0]
            self.failed[kind if kind in KINDS else "untyped"] += 1
            if len(self.shown) < _SHOWN:
                self.shown.append(f"trial {trial}: {outcome}")

    @property
    def ok(self) -> bool:
        return not self.failed

    def row(self, seconds: float) -> str:
        """A line of the table."""
        counts = "  ".join(f"{self.failed[kind]:>7}" for kind in KINDS)
        return f"{self.name:<23}  {self.tried:>8}  {counts}  {seconds:>7.0f} s"


HEAD = f"{'campaign':<23}  {'tried':>8}  " + "  ".join(f"{kind:>7}" for kind in KINDS) + f"  {'time':>9}"
