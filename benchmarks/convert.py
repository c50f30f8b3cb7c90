"""Convert a 2.4 GB checkpoint between formats: throughput beside a copy of its files, and peak memory.

The limit is a pipelined copy: one thread reads as our loads do, one writes as our saves do, with nothing in between. `cp` is
what the kernel does, synced. Every conversion is a process of its own that starts on cold files; its time begins when it has
imported torch and the command line, and has in it whatever else it imports (`startup_s` is a whole `ucconvert` of a tiny
Hugging Face checkpoint to native, which needs no torch). Memory is compared with an interpreter that has only
imported torch, and with PyTorch's own `dcp_to_torch_save` for the conversion that it can do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import disk
from benchmarks.report import GB, MB, Line, Result, arguments, child, median
from benchmarks.transformer import sized

FILE_BYTES = 500e6  # of each safetensors file, as large models are published
LIMIT_MB = 300.0  # claimed for the peak over the baseline
# name of the conversion: (source, target, format of the target); each source is an earlier target
CONVERSIONS = {
    "hf_to_native": ("hf", "native", "native"),
    "native_to_hf": ("native", "hf-again", "hf"),
    "native_to_dcp": ("native", "dcp", "dcp"),
    "dcp_to_native": ("dcp", "native-again", "native"),
    "dcp_to_torchsave": ("dcp", "torch-again.pt", "torchsave"),
    "torchsave_to_native": ("torch.pt", "native-third", "native"),
}


def write_sources(place: Path, nbytes: float) -> None:
    """A Hugging Face checkpoint of BF16 weights in several files, and the same by torch.save."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in sized(nbytes, 2)}
    torch.save(tensors, place / "torch.pt")
    (place / "hf").mkdir()
    parts = list(_parts(tensors))
    where: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, place / "hf" / name, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where})
    (place / "hf" / "model.safetensors.index.json").write_text(index)
    (place / "hf" / "config.json").write_text(json.dumps({"model_type": "benchmark", "torch_dtype": "bfloat16"}))


def _parts(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > FILE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


def measure(nbytes: float, rounds: int, directory: Path | None) -> Result:
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as folder:
        place = Path(folder)
        disk.require_space(place, 9 * nbytes)
        write_sources(place, nbytes)
        runs: dict[str, list[dict[str, float]]] = defaultdict(list)

        def job(key: str, name: str, source: str, target: str, *more: str) -> None:
            disk.clear(place / target)
            disk.make_cold(place / source)
            runs[key].append(child("-m", "benchmarks._measured", name, str(place / source), str(place / target), *more))

        for _ in range(rounds):
            runs["nothing"].append(child("-m", "benchmarks._measured", "nothing"))
            for key in ("copy", "limit"):
                job(key, key, "hf", "copy")
                disk.clear(place / "copy")
            for key, (source, target, form) in CONVERSIONS.items():
                job(key, "convert", source, target, form)
                if source != "hf" and target not in {"dcp", "native"}:
                    disk.clear(place / target)
            job("dcp_to_torch_save", "dcp_to_torch_save", "dcp", "peer.pt")
            disk.clear(place / "peer.pt")
        size = disk.size_of(place / "hf")
        startup = median([_startup(place) for _ in range(max(3, rounds))])
    return result(size, runs, startup)


def _startup(place: Path) -> float:
    """Seconds of a whole `ucconvert`, from the start of the process."""
    tiny, target = place / "tiny", place / "tiny-native"
    if not tiny.exists():
        tiny.mkdir()
        save_file({"weight": torch.ones(4)}, tiny / "model.safetensors", {"format": "pt"})
    disk.clear(target)
    began = time.perf_counter()
    command = [sys.executable, "-m", "ucformat.cli", str(tiny), str(target), "--to", "native"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def result(nbytes: int, runs: dict[str, list[dict[str, float]]], startup: float) -> Result:
    second = {key: median([run["seconds"] for run in done]) for key, done in runs.items()}
    peak = {key: median([run["peak_mb"] for run in done]) for key, done in runs.items()}
    over = {key: peak[key] - peak["nothing"] for key in peak}
    worst = max(over[key] for key in CONVERSIONS)
    ratios = {f"{key}_vs_limit": second["limit"] / second[key] for key in CONVERSIONS}
    ratios |= {f"{key}_vs_cp": second["copy"] / second[key] for key in CONVERSIONS}
    ratios["dcp_to_torchsave_vs_torch"] = second["dcp_to_torch_save"] / second["dcp_to_torchsave"]
    ratios["memory_vs_dcp"] = peak["dcp_to_torch_save"] / peak["dcp_to_torchsave"]
    values = {"size_gb": nbytes / GB, "startup_s": startup, "torch_alone_mb": peak["nothing"], "peak_over_baseline_mb": worst}
    values |= {f"{key}_gb_per_s": nbytes / second[key] / GB for key in second if key != "nothing"}
    for key, done in runs.items():
        if key != "nothing":
            values[f"{key}_cpu_s_per_gb"] = median([run["cpu_s"] for run in done]) / nbytes * GB
    values |= {f"{key}_over_baseline_mb": over[key] for key in over if key != "nothing"}
    lines = []
    for key in CONVERSIONS:
        ours = nbytes / second[key] / MB
        for other, words in (("limit", "a pipelined copy"), ("copy", "cp and sync")):
            theirs = nbytes / second[other] / MB
            ratio = second[other] / second[key]
            lines.append(Line(f"{key}: speed vs {words}", f"{ours:.0f} MB/s", f"{theirs:.0f} MB/s", ratio))
        lines.append(Line(f"{key}: peak over torch alone", f"{over[key]:.0f} MB", f"{LIMIT_MB:.0f} MB", LIMIT_MB / over[key]))
    ours, peer = second["dcp_to_torchsave"], second["dcp_to_torch_save"]
    lines.append(Line("DCP to torch.save: time vs PyTorch's converter", f"{ours:.1f} s", f"{peer:.1f} s", peer / ours))
    ours, peer = peak["dcp_to_torchsave"], peak["dcp_to_torch_save"]
    lines.append(Line("DCP to torch.save: peak memory", f"{ours:.0f} MB", f"{peer:.0f} MB", peer / ours))
    return Result("convert", ratios, values, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--size", type=float, default=2.4, help="GB of weights")
    args = parser.parse_args()
    measure(args.size * GB, args.rounds, args.dir).publish(args.json)


if __name__ == "__main__":
    main()
