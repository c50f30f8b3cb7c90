"""Weights that a conversion changes are made of the master weights, where the run kept any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucformat
from tests.formats.deepspeed_fixtures import DATA, states_of, weights_of

MIXED = ["z1bf16", "z1fp16", "z2n3bf16", "z2rrtwo", "z2twobf16n3", "z2alignbf16", "bf16opt", "z0fp16", "z0fused", "z3bf16"]


def masters_of(kind: str) -> dict[str, torch.Tensor]:
    """Parameter → the master weight that DeepSpeed itself gathered."""
    return {name.split("/")[1]: tensor for name, tensor in states_of(kind).items() if name.endswith("/fp32")}


@pytest.mark.parametrize("kind", MIXED)
def test_weights_converted_to_fp32_are_the_exact_masters(kind: str, tmp_path: Path) -> None:
    report = ucformat.convert(str(DATA / kind), str(tmp_path / "hf"), "hf", dtype="fp32")
    weights, masters = load_file(tmp_path / "hf" / "model.safetensors"), masters_of(kind)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())
    for name, master in masters.items():
        if name in weights:  # a tied name is not stored
            assert weights[name].dtype == torch.float32
            assert torch.equal(weights[name], master), name
    assert not [name for name in report.left_out if name.endswith("/fp32")]


@pytest.mark.parametrize("through", ["native", "dcp", "torchsave"])
def test_the_masters_are_taken_from_a_conversion_of_the_run_too(through: str, tmp_path: Path) -> None:
    """Formats that note where the state came from; the others have the masters all the same, as optimizer state."""
    between = tmp_path / ("between.pt" if through == "torchsave" else "between")
    ucformat.convert(str(DATA / "z1bf16"), str(between), through, exclude=["deepspeed"])
    ucformat.convert(str(between), str(tmp_path / "hf"), "hf", dtype="fp32")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    for name, master in masters_of("z1bf16").items():
        assert torch.equal(weights[name], master), name


def test_fp16_of_a_bf16_run_is_rounded_once(tmp_path: Path) -> None:
    ucformat.convert(str(DATA / "z1bf16"), str(tmp_path / "hf"), "hf", dtype="fp16")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(weights[name], master.half()) for name, master in masters_of("z1bf16").items())


def test_weights_that_keep_their_dtype_are_those_that_are_stored(tmp_path: Path) -> None:
    for dtype in (None, "bf16"):
        ucformat.convert(str(DATA / "z1bf16"), str(tmp_path / "hf"), "hf", dtype=dtype, overwrite=True)
        weights = load_file(tmp_path / "hf" / "model.safetensors")
        assert all(torch.equal(weights[name[6:]].float(), live) for name, live in weights_of("z1bf16").items())


def test_frozen_weights_have_no_master_and_are_widened(tmp_path: Path) -> None:
    report = ucformat.convert(str(DATA / "z2fp16"), str(tmp_path / "hf"), "hf", dtype="fp32")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["fc1.weight"], weights_of("z2fp16")["model/fc1.weight"])
    assert torch.equal(weights["fc2.weight"], masters_of("z2fp16")["fc2.weight"])
    assert any("made of their master weights" in remark for remark in report.remarks)
