"""A million fragments: open the native index and plan one rank's reads, beside DCP's own load of its metadata.

Both describe the same checkpoint: tensors cut into row shards, one per rank of a large run. Each measurement is a process
of its own, so that its peak memory is its own too; the clock starts after the imports.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Line, Result, arguments, child, median, peak_mb

ROWS, COLUMNS = 8, 4096  # of each shard
READERS, READER = 96, 17  # the load's ranks, and the one that is planned: its rows cross the borders of the shards
MILLION = 1_000_000
LIMITS = {MILLION: (1.0, 500.0), 10 * MILLION: (2.0, 1500.0)}  # fragments → seconds and MB that are claimed
DCP_ROWS = 2 * MILLION  # more take it minutes and tens of gigabytes


def specimen(what: str, place: Path, tensors: int, shards: int) -> dict[str, float]:
    """Do one thing in this process: write one of the two checkpoints, or read it and measure that."""
    from benchmarks import plan_specimens

    if what == "write-native":
        plan_specimens.write_native(place, tensors, shards)
        return {}
    if what == "write-dcp":
        plan_specimens.write_dcp(place, tensors, shards)
        return {}
    work: Callable[[Path], int] = {
        "torch": lambda _: 0,
        "native": plan_specimens.open_and_plan,
        "dcp": plan_specimens.load_dcp_metadata,
    }[what]
    began = time.perf_counter()
    found = work(place)
    return {"seconds": time.perf_counter() - began, "peak_mb": peak_mb(), "found": found}


def measure(tensors: int, shards: int, rounds: int, directory: Path | None) -> Result:
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as place:

        def run(what: str, where: str) -> dict[str, float]:
            size = ("--tensors", str(tensors), "--shards", str(shards))
            return child("-m", "benchmarks.plan", "--specimen", what, "--dir", f"{place}/{where}", *size)

        compared = tensors * shards <= DCP_ROWS
        run("write-native", "native")
        if compared:
            run("write-dcp", "dcp")
        torch_mb = run("torch", "native")["peak_mb"]
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(run("native", "native"))
            if compared:
                theirs.append(run("dcp", "dcp"))
        index_mb = sum(path.stat().st_size for path in Path(place, "native").iterdir()) / 1e6
        dcp_index_mb = Path(place, "dcp", ".metadata").stat().st_size / 1e6 if compared else 0.0
    second, mb = median([run["seconds"] for run in ours]), median([run["peak_mb"] for run in ours])
    values = {
        "fragments": float(tensors * shards),
        "pieces_planned": ours[0]["found"],
        "open_plan_s": second,
        "peak_mb": mb,
        "peak_over_torch_mb": mb - torch_mb,
        "torch_alone_mb": torch_mb,
        "index_mb": index_mb,
    }
    ratios: dict[str, float] = {}
    lines: list[Line] = []
    if compared:
        dcp_second, dcp_mb = median([run["seconds"] for run in theirs]), median([run["peak_mb"] for run in theirs])
        values |= {"dcp_metadata_s": dcp_second, "dcp_peak_mb": dcp_mb, "dcp_metadata_mb": dcp_index_mb}
        ratios = {
            "open_plan_vs_dcp": dcp_second / second,
            "memory_vs_dcp": dcp_mb / mb,
            "size_vs_dcp": dcp_index_mb / index_mb,
        }
        lines = [
            Line("open + plan vs DCP's metadata load", f"{second:.3f} s", f"{dcp_second:.2f} s", ratios["open_plan_vs_dcp"]),
            Line(f"peak memory ({torch_mb:.0f} MB of it is torch)", f"{mb:.0f} MB", f"{dcp_mb:.0f} MB", ratios["memory_vs_dcp"]),
            Line("index size", f"{index_mb:.1f} MB", f"{dcp_index_mb:.1f} MB", ratios["size_vs_dcp"]),
        ]
    if tensors * shards in LIMITS:
        limit_s, limit_mb = LIMITS[tensors * shards]
        lines += [
            Line("time claimed for so many", f"{second:.3f} s", f"{limit_s:.0f} s", limit_s / second),
            Line("memory claimed for so many", f"{mb:.0f} MB", f"{limit_mb:.0f} MB", limit_mb / mb),
        ]
    return Result("plan", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=1000, help="of each tensor")
    parser.add_argument("--rows", type=int, help="fragments in all, instead of --tensors")
    parser.add_argument("--specimen", help="for the benchmark's own child processes")
    args = parser.parse_args()
    if args.specimen:
        json.dump(specimen(args.specimen, args.dir, args.tensors, args.shards), sys.stdout)
        return
    if args.rows:
        args.tensors = max(1, args.rows // args.shards)
    measure(args.tensors, args.shards, args.rounds, args.dir).publish(args.json)


if __name__ == "__main__":
    main()
