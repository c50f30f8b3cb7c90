"""Saves of a 2-rank training state that do not wait, beside `dcp.async_save` with a thread and with a process.

Every round does the same with each peer in turn: `stall` is until the call returns (for DCP, until the state is staged), `total`
until the checkpoint is committed and durable; both of the slowest rank. `memory` is what all ranks and their children take beyond
what they had before their first save, at its highest (proportional set size, looked at every 50 ms); each peer has a run of its
own for that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks import disk
from benchmarks.report import GB, Line, Result, arguments, median, on_ranks

RANKS = 2
PEERS = ("dcp_thread", "dcp_process")


def launch(args: argparse.Namespace, rounds: int, only: str = "") -> dict[str, list[float]]:
    """Run the ranks under torchrun: figures of each round by `<peer>/<what>`, of all peers or `only` one."""
    disk.require_space(args.dir or Path(tempfile.gettempdir()), 2 * args.size * GB)
    with (
        tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=args.dir) as place,
        tempfile.TemporaryDirectory(prefix="ucf-") as short,  # DCP's process opens a socket there, whose path must be short
    ):
        how = ("--size", args.size, "--rounds", rounds, "--dir", place, "--only", only)
        figures: dict[str, list[float]] = on_ranks(RANKS, "benchmarks.async_save", *how, temporary=short)
    return figures


def result(figures: dict[str, list[float]]) -> Result:
    """Medians and ratios, against whichever of DCP's two ways is better at it."""
    nbytes = figures.pop("nbytes")[0]
    middle = {key: median(numbers) for key, numbers in figures.items()}
    values = {"size_gb": nbytes / GB, **{key.replace("/", "_"): number for key, number in middle.items()}}
    values |= {f"{key.replace('/', '_')}_spread": max(n) / min(n) for key, n in figures.items() if not key.endswith("mb")}
    ratios, lines = {}, []
    for what, unit in (("stall", "s"), ("total", "s"), ("memory", "mb")):
        ours, theirs = middle[f"ucformat/{what}_{unit}"], {peer: middle[f"{peer}/{what}_{unit}"] for peer in PEERS}
        best = min(theirs, key=lambda peer: theirs[peer])
        ratios[f"{what}_vs_dcp_async"] = theirs[best] / ours
        for peer in PEERS:
            mine, other = (f"{number:,.2f} {unit}".replace("mb", "MB") for number in (ours, theirs[peer]))
            lines.append(Line(f"{what} vs {peer.replace('_', ', ')}", mine, other, theirs[peer] / ours))
    return Result("async_save", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of state over all ranks")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # torchrun started this process: it is a rank
        from benchmarks.async_save_ranks import measure

        measure(args.size, args.rounds, args.dir, args.only)
        return
    figures = {key: numbers for key, numbers in launch(args, args.rounds).items() if not key.endswith("memory_mb")}
    for peer in ("ucformat", *PEERS):
        figures[f"{peer}/memory_mb"] = launch(args, 1, peer)[f"{peer}/memory_mb"]
    result(figures).publish(args.json)


if __name__ == "__main__":
    main()
