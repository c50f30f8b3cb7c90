"""Snapshots of every step of a 2-rank pipeline: what they cost training, beside `dcp.async_save` on the same state.

Blocks of steps with and without snapshots alternate in the same run; figures are medians. Compute is timed waits, which leave
the processor free as a device's work does, or real matrix products on the processor that also copies.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.report import Line, Result, arguments, on_ranks

RANKS = 2
KINDS = ("1f1b_timed", "interleaved_timed", "1f1b_matmul", "interleaved_matmul")


def launch(args: argparse.Namespace) -> dict[str, float]:
    """Run the ranks under torchrun; what they measured."""
    memory = args.dir or Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=memory) as place:
        how = ("--mib", args.mib, "--rounds", args.rounds, "--count", args.count, "--dir", place)
        told: dict[str, float] = on_ranks(RANKS, "benchmarks.snapshot", *how, temporary=place)
    return told


def result(told: dict[str, float]) -> Result:
    """Ratios, and the table."""
    values = {key.removesuffix("_spill").removesuffix("_long"): value for key, value in told.items()}
    waited = values["waited_ms_1f1b_timed"]
    asynchronous, best = values["dcp_async_ms_1f1b_timed"], values["dcp_best_ms_1f1b_timed"]
    ratios = {"exposed_vs_dcp_async": asynchronous / waited, "exposed_vs_dcp_best": best / waited}
    lines = []
    for kind in KINDS:
        name = kind.replace("_", ", ")
        step, more = values[f"step_ms_{kind}"], values[f"overhead_{kind}"]
        lines.append(Line(f"{name}: longer step, than one without", f"{more:+.2f} %", f"{step:.0f} ms"))
        waits = f"{values[f'exposed_ms_{kind}']:.2f} + {values[f'boundary_ms_{kind}']:.2f} ms"
        lines.append(Line(f"{name}: waited before update + after it", waits, ""))
    lines.append(Line("wait vs dcp.async_save", f"{waited:.2f} ms", f"{asynchronous:.1f} ms", ratios["exposed_vs_dcp_async"]))
    lines.append(Line("wait vs dcp's best stager", f"{waited:.2f} ms", f"{best:.1f} ms", ratios["exposed_vs_dcp_best"]))
    measured, predicted = values["exposed_measured_ms"], values["exposed_predicted_ms"]
    lines.append(Line("small bubbles: wait measured vs predicted", f"{measured:.1f} ms", f"{predicted:.1f} ms"))
    growth = f"{values['rss_growth_mb']:+.1f} MB, tmpfs {values['tmpfs_growth_mb']:+.1f} MB"
    lines.append(Line(f"{values['snapshots']:.0f} snapshots: memory grew by", growth, ""))
    lines.append(Line("verified bit for bit", f"{values['verified']:.0f}", ""))
    return Result("snapshot", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=float, default=512, help="MiB of state per rank")
    parser.add_argument("--count", type=int, default=200, help="snapshots of the long run")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:  # torchrun started this process: it is a rank
        from benchmarks.snapshot_ranks import measure

        measure(args.mib, args.rounds, args.count, args.dir)
        return
    result(launch(args)).publish(args.json)


if __name__ == "__main__":
    main()
