"""Reading a checkpoint through `zarr_store`, whole and in slices, beside `ucformat.load` and arrays that zarr has sharded itself.

Both hold the same tensors, in chunks of the same lengths; zarr's carry a crc32c for each chunk, ours a digest for each block, and
both are verified. Files are in the page cache. Each kind is timed in turn, and what was read is compared once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

import ucformat
from benchmarks import disk
from benchmarks.report import GB, MB, Line, Result, arguments, median
from ucformat.reshard.reading.lazy import Checkpoint
from ucformat.zarr.layout import chunk_shape

COLUMNS = 2048
ROWS = 4096  # a tensor: 32 MiB of float32
SHARD_CHUNKS = 16  # chunks in each of zarr's shards: files of 4 to 16 MiB
SLICES = 100
Arrays = dict[str, NDArray[Any]]


def make_state(nbytes: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    count = max(1, round(nbytes / (ROWS * COLUMNS * 4)))
    return {f"layers.{i}": torch.randn(ROWS, COLUMNS) for i in range(count)}


def write_zarr(place: Path, state: dict[str, torch.Tensor], chunk: tuple[int, ...]) -> None:
    """As zarr's users write it: shards of whole chunks, checked, not compressed."""
    root = zarr.open_group(place, mode="w")
    rows = min(ROWS, chunk[0] * SHARD_CHUNKS) // chunk[0] * chunk[0]
    for name, tensor in state.items():
        codec = ShardingCodec(chunk_shape=chunk, codecs=[BytesCodec(), Crc32cCodec()])
        array = root.create_array(
            name, shape=tensor.shape, chunks=(rows, COLUMNS), dtype="float32", serializer=codec, compressors=None
        )
        array[...] = tensor.numpy()


def whole(root: zarr.Group, names: list[str]) -> Arrays:
    return {name: np.asarray(root[name][...]) for name in names}  # type: ignore[index]


def slices(root: zarr.Group, names: list[str]) -> Arrays:
    """1 % of rows at random places of random tensors."""
    chosen, found = np.random.default_rng(0), Arrays()
    for i in range(SLICES):
        name, first = names[chosen.integers(len(names))], int(chosen.integers(ROWS - ROWS // 100))
        found[f"{i}"] = np.asarray(root[name][first : first + ROWS // 100])  # type: ignore[index]
    return found


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def check(ours: Arrays, theirs: Arrays) -> None:
    if ours.keys() != theirs.keys() or any(not np.array_equal(ours[name], theirs[name]) for name in ours):
        raise RuntimeError("zarr_store and zarr's own arrays differ")


def measure(nbytes: int, rounds: int, directory: Path | None) -> Result:
    state = make_state(nbytes)
    names = [f"model/{name}" for name in state]
    with tempfile.TemporaryDirectory(prefix="ucformat-bench-", dir=directory) as folder:
        ucformat.save(f"{folder}/ours", {"model": state})
        opened: Checkpoint = ucformat.open(f"{folder}/ours")
        write_zarr(Path(folder) / "zarr", {f"model/{n}": t for n, t in state.items()}, chunk_shape(opened.catalog, names[0]))
        ours = zarr.open_group(ucformat.zarr_store(opened), mode="r")
        theirs = zarr.open_group(f"{folder}/zarr", mode="r")
        check(whole(ours, names), whole(theirs, names))  # both are in the page cache from here on
        check(slices(ours, names), slices(theirs, names))
        kinds: dict[str, Callable[[], object]] = {
            "ours_whole_s": lambda: whole(ours, names),
            "zarr_whole_s": lambda: whole(theirs, names),
            "ours_slices_s": lambda: slices(ours, names),
            "zarr_slices_s": lambda: slices(theirs, names),
            "load_s": lambda: ucformat.load(f"{folder}/ours", into={"model": state}),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds):
            for kind in list(kinds)[:: 1 if turn % 2 == 0 else -1]:
                disk.make_warm(Path(folder) / ("zarr" if kind.startswith("zarr") else "ours"))
                found[kind].append(timed(kinds[kind]))
    size = sum(tensor.nbytes for tensor in state.values())
    return result(size, {kind: median(values) for kind, values in found.items()})


def result(size: int, values: dict[str, float]) -> Result:
    ratios = {
        "whole_vs_zarr": values["zarr_whole_s"] / values["ours_whole_s"],
        "slices_vs_zarr": values["zarr_slices_s"] / values["ours_slices_s"],
        "whole_vs_load": values["load_s"] / values["ours_whole_s"],
    }
    lines = [
        Line(key, f"{values[ours]:.3f} s", f"{values[peer]:.3f} s", ratios[key])
        for key, ours, peer in (
            ("whole_vs_zarr", "ours_whole_s", "zarr_whole_s"),
            ("slices_vs_zarr", "ours_slices_s", "zarr_slices_s"),
            ("whole_vs_load", "ours_whole_s", "load_s"),
        )
    ]
    return Result("zarr", ratios, {"size_mb": size / MB, **values}, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB")
    args = parser.parse_args()
    measure(int(args.size * GB), args.rounds, args.dir).publish(args.json)


if __name__ == "__main__":
    main()
