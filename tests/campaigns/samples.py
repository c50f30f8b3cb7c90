"""Small good checkpoints of every kind, as bytes, and what is in them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import ucformat
from tests.formats import megatron_fixtures
from tests.formats.deepspeed_fixtures import DATA, KINDS, tag_of
from ucformat import formats
from ucformat.reshard.reading.lazy import Checkpoint
from ucformat.values import encode

PARALLEL, UNIVERSAL = ("ep2", "pp2tiedbf16", "tp2gqabf16"), ("z2tied", "z3frozen")
MEGATRON = (("single", "legacy"), ("single", ""), ("bucket", "legacy"))

Content = dict[str, tuple[str, tuple[int, ...], bytes]]
"""name → dtype, shape, bytes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint: what to open below its directory, its files, and its content."""

    kind: str
    entry: str
    files: dict[str, bytes]
    tensors: Content
    values: bytes

    def write(self, directory: Path) -> str:
        """Put the files into a directory; the path to open."""
        for name, data in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return str(directory / self.entry) if self.entry else str(directory)


def state(salt: int = 0) -> dict[str, Any]:
    """A training state of a few KB, different for every salt."""
    generator = torch.Generator().manual_seed(salt)
    model = {
        "embed.weight": torch.randn(24, 8, generator=generator),
        "layer.weight": torch.randn(8, 8, generator=generator).bfloat16(),
        "layer.bias": torch.randn(8, generator=generator),
        "count": torch.tensor(salt),
    }
    moments = {name: {"exp_avg": t.float() * 0.5, "step": torch.tensor(3.0)} for name, t in model.items() if name != "count"}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(moments)}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "salt": salt, "args": {"a": [1, 2.5, None]}}


def content(path: str) -> tuple[Content, bytes]:
    """Everything in a checkpoint. Raises UcformatError."""
    return content_of(Checkpoint(formats.open_catalog(path)))


def content_of(opened: Checkpoint) -> tuple[Content, bytes]:
    """Everything in an open checkpoint."""
    found: Content = {}
    for name, lazy in opened.items():
        tensor = lazy.read()
        found[name] = (lazy.spec.dtype, tuple(lazy.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found, encode(opened.catalog.values)


def sample(kind: str, directory: Path, entry: str = "") -> Sample:
    """The sample whose files lie in a directory."""
    files = {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
    tensors, values = content(str(directory / entry) if entry else str(directory))
    return Sample(kind, entry, files, tensors, values)


def samples(work: Path) -> dict[str, Sample]:
    """One sample of every kind; `work` is an empty directory."""
    found: dict[str, Sample] = {}
    held = state(1)

    def add(kind: str, entry: str = "") -> None:
        found[kind] = sample(kind, work / kind, entry)

    ucformat.save(str(work / "native"), held)
    add("native")
    (work / "torchsave").mkdir()
    torch.save(held, work / "torchsave" / "x.pt")
    add("torchsave", "x.pt")
    dcp.save(held, checkpoint_id=str(work / "dcp"), no_dist=True)
    add("dcp")
    ucformat.convert(str(work / "native"), str(work / "hf"), "hf", max_file_bytes=600)
    (work / "hf" / "config.json").write_text(json.dumps({"model_type": "x", "torch_dtype": "float32", "n": [1, 2]}))
    add("hf")
    (work / "hf-bin").mkdir()
    names = list(held["model"])
    parts = {f"pytorch_model-{i + 1:05d}-of-00002.bin": names[i::2] for i in range(2)}
    for file, part in parts.items():
        torch.save({name: held["model"][name] for name in part}, work / "hf-bin" / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (work / "hf-bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    add("hf-bin")
    for kind in KINDS[::3]:
        shutil.copytree(tag_of(DATA / kind), work / f"deepspeed-{kind}")
        add(f"deepspeed-{kind}")
    for kind in PARALLEL:
        shutil.copytree(tag_of(DATA / "parallel" / kind), work / f"deepspeed-{kind}")
        add(f"deepspeed-{kind}")
    for kind in UNIVERSAL:
        shutil.copytree(DATA.parent / "ucp" / kind, work / f"ucp-{kind}")
        add(f"ucp-{kind}")
    for run, form in MEGATRON:
        shutil.copytree(megatron_fixtures.folder(run, form), work / f"megatron-{run}-{form}")
        add(f"megatron-{run}-{form}")
    return found
