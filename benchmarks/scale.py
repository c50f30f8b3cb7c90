"""What agreement between ranks costs one rank of a large job: CPU, bytes and memory of save, load and the set-up of snapshots.

The real code of a rank runs in a simulated world (`tests/world.py`), without a network: see benchmarks/README.md. Each
measurement is a process of its own. Beside it, what DCP's coordinator needs to plan a save, at sizes that it can do.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Line, Result, arguments, child, median

SIZES = (64, 1024, 16_384)
DCP_RANKS = 1024  # more take it minutes
WHAT = ("save", "load", "snapshot")


def measure(sizes: tuple[int, ...], tensors: int, rounds: int, directory: Path | None) -> dict[tuple[str, int], dict[str, float]]:
    """(layout, ranks) → medians."""
    from benchmarks.scale_worlds import LAYOUTS

    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as place:
        for number in range(rounds):
            for layout in LAYOUTS:
                for ranks in sizes:
                    size = ("--tensors", str(tensors), "--layout", layout, "--one", str(ranks))
                    found = child("-m", "benchmarks.scale", "--dir", f"{place}", *size, "--rounds", str(number))
                    runs.setdefault((layout, ranks), []).append(found)
    return {key: {name: median([run[name] for run in found]) for name in found[0]} for key, found in runs.items()}


def result(found: dict[tuple[str, int], dict[str, float]], sizes: tuple[int, ...]) -> Result:
    """The largest growth of any layout from the smallest size to the largest."""
    small, large = sizes[0], sizes[-1]
    layouts = sorted({layout for layout, _ in found})
    values: dict[str, float] = {}
    lines: list[Line] = []
    for what in WHAT:
        for unit in ("cpu_s", "sent_mb"):
            growth = {
                layout: found[layout, large][f"{what}_{unit}"] / found[layout, small][f"{what}_{unit}"] for layout in layouts
            }
            values[f"{what}_{'cpu' if unit == 'cpu_s' else 'bytes'}_growth"] = max(growth.values())
        values[f"{what}_mb_per_rank_{large}"] = max(found[layout, large][f"{what}_mb"] for layout in layouts)
    for (layout, ranks), row in found.items():
        values |= {f"{layout}_{ranks}_{name}": value for name, value in row.items()}
        for what in WHAT:
            ours = f"{row[f'{what}_cpu_s'] * 1e3:.0f} ms, {row[f'{what}_sent_mb'] * 1e3:.1f} KB sent"
            peer = f"DCP plans in {row['dcp_plan_s']:.2f} s" if what == "save" and row["dcp_plan_s"] else ""
            lines.append(Line(f"{layout}, {ranks:,} ranks: {what}", ours, peer))
    first, second = (min(found[layout, large][f"{what}_cpu_s"] for layout in layouts) for what in ("save", "second_save"))
    ratios = {"second_save_vs_first": first / second}
    planned = [row["dcp_plan_s"] / row["save_cpu_s"] for row in found.values() if row["dcp_plan_s"]]
    if planned:
        ratios["plan_vs_dcp"] = median(planned)
    return Result("scale", ratios, values, lines)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES)
    parser.add_argument("--layout", help="with --one: measure this one in this process")
    parser.add_argument("--one", type=int, default=0, help="number of ranks")
    args = parser.parse_args()
    if args.one:
        from benchmarks.scale_worlds import dcp_plan
        from benchmarks.scale_worlds import measure as measure_one

        place = Path(args.dir) / f"{args.layout}-{args.one}-{args.rounds}"
        place.mkdir()
        found = measure_one(args.layout, args.one, args.tensors, place)
        found["dcp_plan_s"] = (
            dcp_plan(args.layout, args.one, args.tensors) if args.layout == "ddp" and args.one <= DCP_RANKS else 0.0
        )
        json.dump(found, sys.stdout)
        return
    sizes = tuple(sorted(args.ranks))
    result(measure(sizes, args.tensors, args.rounds, args.dir), sizes).publish(args.json)


if __name__ == "__main__":
    main()
