"""Save, load and resharding load of a 2-rank training state, beside torch's DCP, safetensors and the disk itself.

Every round does the same work with each peer in turn, so that a disk that drifts drifts for all. A time is that of the
slowest rank between two barriers, until everything is durable.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import disk
from benchmarks.report import GB, Line, Result, arguments, median, on_ranks

RANKS = 2
LOADS = ("load_cold", "load_warm")
RESHARDS = ("columns", "uneven")


def launch(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run the ranks under torchrun: seconds of each round by `<peer>/<what>/<s or cpu_s>`."""
    disk.require_space(args.dir or Path(tempfile.gettempdir()), 2 * args.size * GB)
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=args.dir) as place:
        how = ("--size", args.size, "--rounds", args.rounds, "--dir", place)
        times: dict[str, list[float]] = on_ranks(RANKS, "benchmarks.save_load", *how, temporary=place)
    return times


def result(times: dict[str, list[float]]) -> Result:
    """Medians, speeds and ratios."""
    nbytes = times.pop("nbytes")[0]
    rounds = {key.removesuffix("/s"): seconds for key, seconds in times.items() if key.endswith("/s")}
    second = {key: median(seconds) for key, seconds in rounds.items()}
    values: dict[str, float] = {"size_gb": nbytes / GB}
    for key, seconds in rounds.items():
        values[f"{key.replace('/', '_')}_gb_per_s"] = nbytes / second[key] / GB
        values[f"{key.replace('/', '_')}_spread"] = max(seconds) / min(seconds)
        values[f"{key.replace('/', '_')}_cpu_s_per_gb"] = median(times[f"{key}/cpu_s"]) / nbytes * GB
    ratios: dict[str, float] = {}
    for what in ("save", *LOADS):
        for peer in ("dcp", "safetensors"):
            ratios[f"{what}_vs_{peer}"] = second[f"{peer}/{what}"] / second[f"ucformat/{what}"]
    ratios["save_vs_limit"] = second["raw/save"] / second["ucformat/save"]
    ratios["load_vs_limit"] = second["raw/load_cold"] / second["ucformat/load_cold"]
    for state in ("cold", "warm"):
        plain = second[f"ucformat/load_{state}"]
        for layout in RESHARDS:
            mine = second[f"ucformat/{layout}_{state}"]
            ratios[f"reshard_{layout}_{state}_vs_plain"] = plain / mine
        ratios[f"reshard_{state}_vs_dcp"] = second[f"dcp/columns_{state}"] / second[f"ucformat/columns_{state}"]
    # The claim stands for the layout that suits us least.
    ratios["reshard_vs_plain"] = min(ratios[f"reshard_{layout}_cold_vs_plain"] for layout in RESHARDS)
    ratios["reshard_warm_vs_plain_warm"] = min(ratios[f"reshard_{layout}_warm_vs_plain"] for layout in RESHARDS)
    return Result("save_load", ratios, values, lines(nbytes, second))


def lines(nbytes: float, second: dict[str, float]) -> list[Line]:
    def speed(key: str) -> str:
        return f"{nbytes / second[key] / GB:.2f} GB/s"

    table = []
    for what in ("save", *LOADS):
        for peer in ("dcp", "safetensors", "raw"):
            if f"{peer}/{what}" in second:
                ours, other = f"ucformat/{what}", f"{peer}/{what}"
                table.append(
                    Line(f"{what.replace('_', ', ')} vs {peer}", speed(ours), speed(other), second[other] / second[ours])
                )
    for state in ("cold", "warm"):
        plain = f"ucformat/load_{state}"
        for layout in RESHARDS:
            ours = f"ucformat/{layout}_{state}"
            table.append(
                Line(f"resharded to {layout}, {state} vs plain load", speed(ours), speed(plain), second[plain] / second[ours])
            )
        ours, other = f"ucformat/columns_{state}", f"dcp/columns_{state}"
        table.append(Line(f"resharded to columns, {state} vs dcp", speed(ours), speed(other), second[other] / second[ours]))
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=2.4, help="GB of state over all ranks")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # torchrun started this process: it is a rank
        from benchmarks.save_load_ranks import measure

        measure(args.size, args.rounds, args.dir)
        return
    times: dict[str, list[float]] = defaultdict(list, launch(args))
    result(times).publish(args.json)


if __name__ == "__main__":
    main()
