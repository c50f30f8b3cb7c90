"""DCP checkpoints that other torch releases wrote read like those of today's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucformat

DATA = Path(__file__).parent.parent / "data" / "dcp"


@pytest.mark.parametrize("name", ["torch-2.4.1-fsdp1"])
def test_a_checkpoint_of_an_older_torch_equals_its_truth_bit_for_bit(name: str, tmp_path: Path) -> None:
    truth = load_file(DATA / name / "truth.safetensors")
    shutil.copytree(DATA / name, tmp_path / "ck", ignore=shutil.ignore_patterns("truth.*"))
    found = ucformat.open(str(tmp_path / "ck"))
    assert set(found) == set(truth)
    assert all(torch.equal(found[name][...], tensor) for name, tensor in truth.items())
    assert found.step == 5
    whole = ucformat.load(str(tmp_path / "ck"))
    assert whole["misc"] == {"a": [1, 2, {"b": "x"}], "t": (1, 2)}


def test_it_loads_into_a_live_model_and_optimizer(tmp_path: Path) -> None:
    truth = load_file(DATA / "torch-2.4.1-fsdp1" / "truth.safetensors")
    model = torch.nn.Module()
    model.up, model.down = torch.nn.Linear(16, 36), torch.nn.Linear(36, 17, bias=False)
    model.register_buffer("count", torch.tensor(0))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0, "misc": {}}
    assert ucformat.load(str(DATA / "torch-2.4.1-fsdp1"), into=state).step == 5
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, truth[f"model/{name}"])
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, truth[f"optimizer/{name}/{key}"])
