"""A timeline of the last steps in Chrome's trace format: open it in Perfetto, or make a picture of it.

    python -m ucformat.snapshot.trace rank0.json rank1.json --out timeline.png

Times are those of the host's monotonic clock, so that traces of its ranks lie on one axis.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ucformat.snapshot.schedule.clock import Span

KEPT_STEPS = 64  # steps whose spans are kept
LANES = ("compute", "idle", "copy", "wait", "persist")
"""Rows of a rank, top to bottom."""
COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#f58518",
    "W": "#e45756",
    "idle": "#eeeeee",
    "copy": "#54a24b",
    "wait": "#b279a2",
    "persist": "#9d755d",
}


@dataclass(slots=True)
class Trace:
    """Spans of one rank by lane."""

    rank: int
    steps: deque[dict[str, list[Span]]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def add(self, lane: str, spans: Iterable[Span]) -> None:
        """Put spans into the newest step."""
        if self.steps:
            self.steps[-1].setdefault(lane, []).extend(spans)

    def begin(self) -> None:
        """A new step."""
        self.steps.append({})

    def events(self) -> list[dict[str, Any]]:
        """Complete events, times in microseconds."""
        out: list[dict[str, Any]] = [
            {"ph": "M", "pid": self.rank, "name": "process_name", "args": {"name": f"rank {self.rank}"}},
            *(
                {"ph": "M", "pid": self.rank, "tid": tid, "name": "thread_name", "args": {"name": lane}}
                for tid, lane in enumerate(LANES)
            ),
        ]
        for step in self.steps:
            for lane, spans in step.items():
                out += [
                    {
                        "ph": "X",
                        "pid": self.rank,
                        "tid": LANES.index(lane),
                        "name": span.name,
                        "ts": span.start * 1e6,
                        "dur": max(0.0, (span.stop - span.start) * 1e6),
                    }
                    for span in spans
                ]
        return out

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))


def gaps(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """What lies between actions: the bubbles."""
    edges = [begin, *(edge for span in spans for edge in (span.start, span.stop)), end]
    return [Span("idle", a, b) for a, b in zip(edges[0::2], edges[1::2], strict=True) if b > a]


def picture(paths: Sequence[Path], out: Path, steps: int = 2) -> None:
    """Draw the last whole steps of several ranks' traces, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ranks = [[e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"] for path in paths]
    starts = sorted(e["ts"] for e in ranks[0] if e["name"] == "boundary")
    if not starts:
        raise ValueError(f"{paths[0]}: no step is in this trace")
    whole = starts[:-1] if len(starts) > 2 else starts  # the last step may be cut short by the run's end
    low, high = whole[max(0, len(whole) - steps - 1)], whole[-1]
    figure, axes = plt.subplots(len(ranks), 1, sharex=True, squeeze=False, figsize=(12, 1.6 * len(ranks) + 1))
    for rank, (axis, events) in enumerate(zip(axes[:, 0], ranks, strict=True)):
        for event in events:
            if low <= event["ts"] + event["dur"] and event["ts"] <= high:
                _bar(axis, LANES[event["tid"]], event, low)
        axis.set_yticks(range(3), ["wait", "copy", "compute"])
        axis.set_ylabel(f"rank {rank}")
        axis.set_xlim(0, (high - low) / 1e3)
    axes[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _bar(axis: Any, lane: str, event: dict[str, Any], origin: float) -> None:
    row = {"compute": 2, "idle": 2, "copy": 1}.get(lane, 0)
    kind = event["name"].lstrip("0123456789")[:1] if lane == "compute" else lane
    start, width = (event["ts"] - origin) / 1e3, max(event["dur"] / 1e3, 0.2)
    axis.barh(row, width, left=start, height=0.8, color=COLOURS.get(kind, "#bab0ac"), linewidth=0)
    if lane == "compute" and width > 10:
        axis.text(start + width / 2, row, event["name"], ha="center", va="center", fontsize=7, color="white")


def main() -> None:
    """The command that makes the picture."""
    parser = argparse.ArgumentParser(description="Draw the traces of a run's ranks.")
    parser.add_argument("traces", nargs="+", type=Path, help="files that Snapshotter.trace wrote, in rank order")
    parser.add_argument("--out", type=Path, required=True, help="picture to write (.png, .svg)")
    parser.add_argument("--steps", type=int, default=2, help="how many of the last steps to show")
    given = parser.parse_args()
    picture(given.traces, given.out, given.steps)


if __name__ == "__main__":
    main()
