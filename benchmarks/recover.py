"""Restoring a 4-rank training state from the hosts' memory, whole and with a host lost, beside loading it from a cold disk.

Each rank has a host of its own: a directory on tmpfs, read by the others over TCP. Every round does the same work in turn.
A time is that of the slowest rank between two barriers. `rebuild` computes a lost slot on one core, beside XOR of as
many bytes that lie in memory already.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks import disk
from benchmarks.report import GB, Line, Result, arguments, median, on_ranks

RANKS = 4
MEMORY = Path("/dev/shm")


def launch(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run the ranks under torchrun: seconds of each round by what was done."""
    disk.require_space(args.dir or Path(tempfile.gettempdir()), 2 * args.size * GB)
    memory = MEMORY if MEMORY.is_dir() else args.dir
    with (
        tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=args.dir) as place,
        tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=memory) as slots,
    ):
        how = ("--size", args.size, "--rounds", args.rounds, "--dir", place, "--slots", slots)
        times: dict[str, list[float]] = on_ranks(RANKS, "benchmarks.recover", *how, temporary=place)
    return times


def result(times: dict[str, list[float]]) -> Result:
    """Medians and ratios."""
    nbytes, slot = times.pop("nbytes")[0], times.pop("slot_nbytes")[0]
    second = {key: median(seconds) for key, seconds in times.items()}
    values = {"size_gb": nbytes / GB, "slot_gb": slot / GB}
    for key, seconds in times.items():
        size = slot if key in ("rebuild", "xor") else nbytes
        values[f"{key}_gb_per_s"] = size / second[key] / GB
        values[f"{key}_s"], values[f"{key}_spread"] = second[key], max(seconds) / min(seconds)
    ratios = {
        "memory_vs_disk": second["disk"] / second["memory"],
        "memory_vs_dcp": second["dcp"] / second["memory"],
        "rebuilt_vs_disk": second["disk"] / second["rebuilt"],
        "rebuilt_vs_dcp": second["dcp"] / second["rebuilt"],
        "rebuild_vs_limit": second["xor"] / second["rebuild"],
    }

    def speed(key: str) -> str:
        return f"{values[f'{key}_gb_per_s']:.2f} GB/s"

    told = (
        ("from memory vs from a cold disk", "memory", "disk", "memory_vs_disk"),
        ("from memory vs DCP from a cold disk", "memory", "dcp", "memory_vs_dcp"),
        ("one of four hosts rebuilt vs from a cold disk", "rebuilt", "disk", "rebuilt_vs_disk"),
        ("one of four hosts rebuilt vs DCP from a cold disk", "rebuilt", "dcp", "rebuilt_vs_dcp"),
        ("computing a lost slot vs XOR in memory, one core", "rebuild", "xor", "rebuild_vs_limit"),
    )
    lines = [Line(what, speed(ours), speed(theirs), ratios[ratio]) for what, ours, theirs, ratio in told]
    return Result("recover", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of state over all ranks")
    parser.add_argument("--slots", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # torchrun started this process: it is a rank
        from benchmarks.recover_ranks import measure

        measure(args.size, args.rounds, args.dir, args.slots)
        return
    result(launch(args)).publish(args.json)


if __name__ == "__main__":
    main()
