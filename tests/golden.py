"""What golden checkpoints hold. `python -m tests.golden VERSION` writes that of a new release; old ones are never rewritten."""

from __future__ import annotations

import argparse
import math
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints import split_evenly, write_native
from ucformat.catalog import Notes
from ucformat.dtypes import DTYPES
from ucformat.values.tree import ArrayRef, Opaque, RankLocal, TensorRef

FOLDER = Path(__file__).parent / "data" / "golden"
ALIASES = {"model/tied": "model/F32"}
NOTES = Notes("hf", 1234, {"dp": 2, "tp": 3}, ("made for the tests",))


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype that torch can hold, cut over shards; a scalar, an empty tensor."""
    out = {}
    for number, kind in enumerate(DTYPES.values()):
        if not kind.name.startswith("F6_"):
            raw = (torch.arange(math.prod((6, 10)) * kind.itemsize) * 7 + number).to(torch.uint8)
            out[f"model/{kind.name}"] = (raw % 2 if kind.name == "BOOL" else raw).view(kind.torch).reshape(6, 10)
    return {
        **out,
        "model/scalar": torch.tensor(2.5),
        "model/empty": torch.empty(0, 3),
        "rng/0": torch.arange(5),
        "list/1": torch.ones(2),
    }


def values() -> object:
    """Every kind of value."""
    return {
        "step": 1234,
        "plain": [None, True, -1, 2**70, 1.5, -0.0, math.inf, "text", "\ud800", b"\x00\xff", 1 + 2j],
        "nested": {0: (1, [2]), "$odd": {}, (): set(), frozenset({1}): OrderedDict(b=1, a=2)},
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        "args": argparse.Namespace(lr=0.1, path=Path("a/b").as_posix()),
        "numpy": [np.float32(0.1), np.int8(-3)],
        "rng": RankLocal("error", ({"dp": 0}, None), (TensorRef("rng/0"), 7)),
        "list": [1, ArrayRef("list/1")],
        "opaque": Opaque("a.B", {"x": 1}),
    }


def write(version: str) -> None:
    found = tensors()
    tiling = {name: split_evenly((6, 10), 1, 3) for name, tensor in found.items() if tensor.shape == (6, 10) and "F4" not in name}
    write_native(FOLDER / version, found, tiling, 2, values(), ALIASES, NOTES)


if __name__ == "__main__":
    write(sys.argv[1])
