"""Convert DeepSpeed runs, beside DeepSpeed's own converters: time, peak memory, size of the output.

A run of 50 million parameters in bf16 with Adam, under ZeRO-1 and ZeRO-3 on 4 ranks, and one of 3,000 tiny tensors under ZeRO-1.
They are written by ucformat in the form that DeepSpeed loads as its own. The peers are `ds_to_universal`, with as many workers as
are fastest for it (each setting is tried), and for fp32 weights `zero_to_fp32`. Conversions are processes of their own that
start on cold files and end when the output is durable; time begins when imports are done.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ucformat
from benchmarks import disk
from benchmarks.report import MB, Line, Result, arguments, child, median
from benchmarks.transformer import sized

RANKS = 4
WORKERS = ("1+1", "2+2", "4+2")
"""Processes that `ds_to_universal` extracts and merges with: those tried."""
LIMIT_MB = 300.0  # claimed for the peak over the baseline
STAGES = {"zero1": 1, "zero3": 3, "tiny": 1}
FP32 = "fp32"
"""Of `zero3`, to weights alone."""


def write_run(place: Path, name: str, shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    """A DeepSpeed run of random numbers in `place / name`; bytes of its weights, master weights and optimizer state."""
    torch.manual_seed(0)
    masters = {key: torch.randn(shape) for key, shape in shapes}
    step = torch.tensor(10.0)
    state: dict[str, Any] = {
        "model": {key: tensor.bfloat16() for key, tensor in masters.items()},
        "optimizer": {
            key: {"fp32": tensor, "exp_avg": tensor / 2, "exp_avg_sq": tensor.square(), "step": step.clone()}
            for key, tensor in masters.items()
        },
    }
    between = ucformat.save(place / f"{name}-native", state, step=10)
    report = ucformat.convert(between, place / name, "deepspeed", options={"stage": STAGES[name], "dp": RANKS})
    assert not report.left_out, report.left_out
    disk.clear(place / f"{name}-native")
    each = 12 if STAGES[name] == 3 else 14  # bytes of a parameter: ZeRO-3 keeps no rounded weights
    return each * sum(t.numel() for t in masters.values())


class Runs:
    """Measures conversions, each on cold files. Nothing is removed meanwhile: where thousands of files have just been removed,
    some file systems need much longer for the next ones.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.found = place, defaultdict[str, list[dict[str, float]]](list)
        self.sizes: dict[str, int] = {}

    def job(self, key: str, name: str, source: str, *more: str) -> None:
        target = self.place / f"{key}-{len(self.found[key])}".replace("+", "_")  # which DeepSpeed takes for a regular expression
        disk.make_cold(self.place / source)
        self.found[key].append(child("-m", "benchmarks._measured", name, str(self.place / source), str(target), *more))
        self.sizes[key] = disk.size_of(target)

    def seconds(self, key: str) -> float:
        return median([run["seconds"] for run in self.found[key]])

    def peak(self, key: str) -> float:
        return median([run["peak_mb"] for run in self.found[key]])

    def best(self, name: str, workers: Sequence[str]) -> tuple[float, str]:
        """Seconds of `ds_to_universal` with the workers that are fastest, and these."""
        return min((self.seconds(f"{name}_peer_{each}"), each) for each in workers)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    millions: float
    count: int
    rounds: int
    only: Sequence[str]
    workers: Sequence[str]

    @property
    def universal(self) -> list[str]:
        return [name for name in STAGES if name in self.only]


def measure(plan: Plan, directory: Path | None) -> Result:
    os.environ.update({"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as folder:
        place = Path(folder)
        needed = [*plan.universal, *(["zero3"] if FP32 in plan.only and "zero3" not in plan.only else [])]
        if set(needed) - {"tiny"}:
            disk.require_space(place, (50 + 60 * plan.rounds) * 1e6 * plan.millions)
        tiny: list[tuple[str, tuple[int, ...]]] = [(f"blocks.{i}.weight", (4, 4)) for i in range(plan.count)]
        payload = {name: write_run(place, name, tiny if name == "tiny" else sized(plan.millions * 14e6, 14)) for name in needed}
        runs = Runs(place)
        for _ in range(plan.rounds):
            runs.found["nothing"].append(child("-m", "benchmarks._measured", "nothing"))
            for name in plan.universal:
                runs.job(name, "convert", name, "ucp")
            if FP32 in plan.only:
                runs.job(FP32, "convert", "zero3", "hf", "--dtype", "fp32", "--select", "model/*")
                runs.job(f"{FP32}_peer", "zero_to_fp32", "zero3")
            for name in plan.universal:
                for workers in plan.workers:
                    runs.job(f"{name}_peer_{workers}", "ds_to_universal", name, *workers.split("+"))
        return result(runs, payload, plan)


def result(runs: Runs, payload: dict[str, int], plan: Plan) -> Result:
    peers = {name: runs.best(name, plan.workers) for name in plan.universal}
    ratios = {f"{name}_vs_deepspeed": peers[name][0] / runs.seconds(name) for name in plan.universal}
    base = runs.peak("nothing")
    over = {name: runs.peak(name) - base for name in plan.only}
    values = {"peak_mb_over_baseline": max(over.values())}
    values |= {f"{name}_payload_mb": nbytes / MB for name, nbytes in payload.items()}
    values |= {f"{key}_s": runs.seconds(key) for key in runs.found if key != "nothing"}
    values |= {f"{key}_peak_mb": runs.peak(key) for key in runs.found}
    lines = []
    for name, (theirs, workers) in peers.items():
        what = f"{name}: to a universal folder vs ds_to_universal ({workers} workers)"
        lines.append(Line(what, f"{runs.seconds(name):.2f} s", f"{theirs:.2f} s", ratios[f"{name}_vs_deepspeed"]))
    if FP32 in plan.only:
        ours, theirs = runs.seconds(FP32), runs.seconds(f"{FP32}_peer")
        ratios["fp32_vs_zero_to_fp32"] = theirs / ours
        lines.append(Line("zero3: to fp32 weights vs zero_to_fp32", f"{ours:.2f} s", f"{theirs:.2f} s", theirs / ours))
    worst = values["peak_mb_over_baseline"]
    lines.append(Line("worst peak over torch alone", f"{worst:.0f} MB", f"{LIMIT_MB:.0f} MB", LIMIT_MB / worst))
    if sizes := [runs.sizes[name] / payload[name] for name in plan.universal if name != "tiny"]:
        values["output_over_payload"] = max(sizes)
        lines.append(Line("largest output, by its payload", f"{max(sizes):.3f}", "1.05"))
    return Result("convert_frameworks", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=1)
    parser.add_argument("--millions", type=float, default=52.0, help="millions of parameters")
    parser.add_argument("--count", type=int, default=3000, help="tiny tensors")
    parser.add_argument("--only", nargs="+", choices=[*STAGES, FP32], default=[*STAGES, FP32], help="what to measure")
    parser.add_argument("--workers", nargs="+", default=WORKERS, help="workers of ds_to_universal, EXTRACT+MERGE: each is tried")
    args = parser.parse_args()
    plan = Plan(args.millions, args.count, args.rounds, args.only, args.workers)
    measure(plan, args.dir).publish(args.json)


if __name__ == "__main__":
    main()
