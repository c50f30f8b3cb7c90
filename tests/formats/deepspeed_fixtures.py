"""The DeepSpeed checkpoints in tests/data/deepspeed, by kind, and ways to copy and edit them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ucformat.catalog import Catalog
from ucformat.formats import deepspeed
from ucformat.formats.source import locate
from ucformat.reshard.reading.lazy import read

DATA = Path(__file__).parent.parent / "data" / "deepspeed"
PARALLEL = sorted(path.name for path in (DATA / "parallel").iterdir())
"""Runs with pipeline, tensor and expert parallelism (in the folder `parallel`)."""
KINDS = sorted(path.name for path in DATA.iterdir() if any(path.glob("global_step*")))
MORE = DATA.parent / "deepspeed_more"
"""Other models and optimizers."""
NUMBERED = {"z0", "z0two", "z0sgd", "z0frozen"}
"""ZeRO-0 in fp32: nothing proves which number is which parameter."""
TWIN = {"z2rr": "z2n2", "z2rrtwo": "z2twobf16n3"}
"""Round-robin runs → the same run without it. DeepSpeed's own dump of the former is wrong, so the latter's is the truth."""


def open_kind(path: Path) -> Catalog:
    source = locate(str(path))
    assert deepspeed.detect(source)
    return deepspeed.open_catalog(source)


def truth(kind: str) -> dict[str, torch.Tensor]:
    """`<parameter>/<state>` and `__lp__/<parameter>` (the live weights) as the engine held them when it saved."""
    file = DATA / TWIN.get(kind, kind) / "truth.safetensors"
    return load_file(file) if file.exists() else {}


def states_of(kind: str) -> dict[str, torch.Tensor]:
    """Canonical name → truth of the optimizer's tensors; those that did not exist yet (NaN in the dump) left out."""
    found = {name: tensor for name, tensor in truth(kind).items() if not name.startswith("__lp__/")}
    return {f"optimizer/{name}": tensor for name, tensor in found.items() if not tensor.isnan().any()}


def weights_of(kind: str) -> dict[str, torch.Tensor]:
    """Canonical name → the live weight, as float32."""
    return {f"model/{name[7:]}": tensor for name, tensor in truth(kind).items() if name.startswith("__lp__/")}


def tag_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name.startswith("global_step"))


def copy_of(kind: str, tmp_path: Path) -> Path:
    """A copy that may be edited; returns its run folder."""
    return Path(shutil.copytree(DATA / kind, tmp_path / kind))


class Placeholder:
    """Stands for DeepSpeed's own classes, so that torch.load and torch.save pass them on."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


_CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
)


def load(file: Path) -> Any:
    """What torch itself loads from a file: the independent witness of what it holds."""
    with torch.serialization.safe_globals([(Placeholder, name) for name in _CLASSES]):
        return torch.load(file, weights_only=True)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a file with its contents changed in place."""
    tree = load(file)
    with torch.no_grad():
        change(tree)
    torch.save(tree, file)


def optimizer_files(run: Path) -> list[Path]:
    return sorted(tag_of(run).glob("*optim_states.pt"))


def model_file(run: Path) -> Path:
    """The model file of rank 0."""
    return min(tag_of(run).glob("*model_states.pt"))


def parameters_with_state(catalog: Catalog) -> set[str]:
    return {name.split("/")[1] for name in catalog.names if name.startswith("optimizer/")}


def assert_same(run: Path, kind: str) -> None:
    """An edited copy still reads as the original does."""
    catalog = open_kind(run)
    for name, expected in states_of(kind).items():
        assert torch.equal(read(catalog, name), expected), name


def precision(kind: str) -> torch.dtype:
    """What the run computed in."""
    config = load(model_file(DATA / kind))["ds_config"]
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for key, dtype in low.items() if config.get(key, {}).get("enabled")), torch.float32)
