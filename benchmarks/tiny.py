"""20,000 tiny tensors: what each costs to save and load, and how large the checkpoint gets, beside DCP and safetensors.

A single process; with tensors this small the cost is in the bookkeeping, not in the disk.
"""

from __future__ import annotations

import gc
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ucformat
from benchmarks import disk
from benchmarks.report import MB, Line, Result, arguments, median

NUMBERS = 16  # in each tensor
State = dict[str, Tensor]


def make_state(count: int) -> State:
    torch.manual_seed(0)
    return {f"layers.{i // 20}.part{i % 20}.bias": torch.randn(NUMBERS) for i in range(count)}


def save_ours(state: State, place: Path) -> None:
    ucformat.save(str(place), {"model": state}, step=1)


def load_ours(state: State, place: Path) -> None:
    ucformat.load(str(place), into={"model": state})


def save_dcp(state: State, place: Path) -> None:
    state_dict_saver.save(dict(state), checkpoint_id=place, no_dist=True)


def load_dcp(state: State, place: Path) -> None:
    state_dict_loader.load(dict(state), checkpoint_id=place, no_dist=True)


def save_safetensors(state: State, place: Path) -> None:
    place.mkdir()
    save_file(state, place / "model.safetensors")
    disk.sync(place)


def load_safetensors(state: State, place: Path) -> None:
    for name, tensor in load_file(place / "model.safetensors").items():
        state[name].copy_(tensor)


PEERS: dict[str, tuple[Callable[[State, Path], None], Callable[[State, Path], None]]] = {
    "ucformat": (save_ours, load_ours),
    "dcp": (save_dcp, load_dcp),
    "safetensors": (save_safetensors, load_safetensors),
}


def timed(work: Callable[[State, Path], None], state: State, place: Path) -> float:
    gc.collect()
    began = time.perf_counter()
    work(state, place)
    return time.perf_counter() - began


def measure(count: int, rounds: int, directory: Path | None) -> Result:
    state = make_state(count)
    truth = {name: tensor.clone() for name, tensor in state.items()}
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as folder:
        for turn in range(rounds + 1):  # the first warms up, and shows that loads load
            for name, (save, load) in PEERS.items():
                place = Path(folder) / name
                seconds = timed(save, state, place)
                for tensor in state.values() if turn == 0 else ():
                    tensor.zero_()
                loading = timed(load, state, place)
                if turn == 0 and any(not torch.equal(state[key], truth[key]) for key in truth):
                    raise RuntimeError(f"{name} did not load what it saved")
                if turn > 0:
                    found[f"{name}_save_s"].append(seconds)
                    found[f"{name}_load_s"].append(loading)
                found[f"{name}_mb"].append(disk.size_of(place) / MB)
                disk.clear(place)
    return result(count, {key: median(values) for key, values in found.items()})


def result(count: int, values: dict[str, float]) -> Result:
    ratios, lines = {}, []
    for peer in ("dcp", "safetensors"):
        for what, unit in (("save_s", "s"), ("load_s", "s"), ("mb", "MB")):
            ours, other = values[f"ucformat_{what}"], values[f"{peer}_{what}"]
            label = {"save_s": "save", "load_s": "load", "mb": "size"}[what]
            ratios[f"{label}_vs_{peer}"] = other / ours
            lines.append(Line(f"{label} vs {peer}", f"{ours:.3f} {unit}", f"{other:.3f} {unit}", other / ours))
    payload = count * NUMBERS * 4 / MB
    lines.append(Line("size vs the bytes of the numbers", f"{values['ucformat_mb']:.2f} MB", f"{payload:.2f} MB"))
    return Result("tiny", ratios, {"tensors": float(count), "payload_mb": payload, **values}, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="tensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process is meant
    measure(args.count, args.rounds, args.dir).publish(args.json)


if __name__ == "__main__":
    main()
