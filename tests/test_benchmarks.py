"""Every benchmark runs at a tiny size and tells its results in the agreed form. No figure is judged here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = {
    "plan": ("--tensors", "20", "--shards", "50"),
    "save_load": ("--size", "0.01"),
    "convert": ("--size", "0.01"),
    "convert_frameworks": ("--count", "20", "--only", "tiny", "--workers", "1+1"),
    "tiny": ("--count", "40"),
    "recover": ("--size", "0.01"),
    "async_save": ("--size", "0.01"),
    "snapshot": ("--mib", "6", "--count", "20"),
    "snapshot_gpu": ("--billions", "0.01"),
    "s3": ("--size", "0.02"),
    "scale": ("--tensors", "16", "--ranks", "64", "128"),
    "zarr": ("--size", "0.03"),
}
RATIOS = {
    "plan": {"open_plan_vs_dcp"},
    "save_load": {
        "save_vs_dcp",
        "save_vs_limit",
        "load_cold_vs_dcp",
        "load_warm_vs_dcp",
        "load_vs_limit",
        "reshard_vs_plain",
        "save_vs_safetensors",
    },
    "convert": {"memory_vs_dcp", "hf_to_native_vs_cp"},
    "convert_frameworks": {"tiny_vs_deepspeed"},
    "tiny": {"save_vs_dcp", "load_vs_dcp", "size_vs_dcp", "save_vs_safetensors"},
    "async_save": {"stall_vs_dcp_async", "total_vs_dcp_async", "memory_vs_dcp_async"},
    "recover": {"memory_vs_disk", "memory_vs_dcp", "rebuild_vs_limit"},
    "snapshot": {"exposed_vs_dcp_async", "exposed_vs_dcp_best"},
    "snapshot_gpu": set(),  # nothing without a device
    "s3": {"save_vs_plain", "load_vs_plain"},
    "scale": {"second_save_vs_first"},
    "zarr": {"whole_vs_zarr", "slices_vs_zarr"},
}


def test_each_benchmark_is_tested_here() -> None:
    commands = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py") if "__main__" in path.read_text()}
    assert commands == set(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_benchmark_prints_one_json_object(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "--rounds", "1", "--dir", str(tmp_path), *TINY[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    told = json.loads(done.stdout)
    assert set(told) == {"name", "machine", "ratios", "values"}
    assert told["name"] == name
    assert told["machine"]["cores"] > 0
    assert RATIOS[name] <= set(told["ratios"])
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in told["ratios"].values())
    assert all(math.isfinite(value) for value in told["values"].values())
    assert list(tmp_path.iterdir()) == [], "a benchmark cleans up"
