"""Checkpoints of well-known programs, converted and converted back, still load in their programs. Made by the programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

import ucformat

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # what stock DCP says to one process
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


def there_and_back(src: Path, dst: Path, to: str) -> None:
    """Through the native format and the other one of torch's two."""
    between = dst.parent
    ucformat.convert(str(src), str(between / "native"), "native")
    other = between / ("other" if to == "torchsave" else "other.pt")
    ucformat.convert(str(between / "native"), str(other), "dcp" if to == "torchsave" else "torchsave")
    report = ucformat.convert(str(other if to == "torchsave" else between / "native"), str(dst), to)
    assert not report.left_out
    assert not report.values_left_out


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


def alike(a: Any, b: Any) -> bool:
    """Whether two trees of values are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class Lit(lightning.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, width)
        self.register_buffer("seen", torch.ones(1))

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.net(batch).square().sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def trainer(steps: int) -> Any:
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    return lightning.Trainer(max_steps=steps, accelerator="cpu", **quiet)


def test_a_lightning_checkpoint_comes_back_to_lightning(tmp_path: Path) -> None:
    data: Any = torch.utils.data.DataLoader(list(torch.ones(8, 3)), batch_size=2)  # type: ignore[arg-type]
    first = trainer(2)
    first.fit(Lit(5), data)
    first.save_checkpoint(tmp_path / "src.ckpt")
    there_and_back(tmp_path / "src.ckpt", tmp_path / "dst.ckpt", "torchsave")
    old, new = (torch.load(tmp_path / name, weights_only=True) for name in ("src.ckpt", "dst.ckpt"))
    assert alike({**old, "state_dict": dict(old["state_dict"])}, new)
    loaded = Lit.load_from_checkpoint(tmp_path / "dst.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 5
    assert torch.equal(loaded.net.weight, old["state_dict"]["net.weight"])
    further = trainer(4)
    further.fit(Lit(5), data, ckpt_path=tmp_path / "dst.ckpt", weights_only=True)
    assert further.global_step == 4


@pytest.mark.parametrize("bare", [True, False])
def test_a_dcp_with_a_flattened_optimizer_comes_back_as_that(bare: bool, tmp_path: Path) -> None:
    """torchtitan keeps the model's tensors at the top and the optimizer flattened, others the model under its key."""
    model = net()
    optimizer = trained(model)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights = get_model_state_dict(model)
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        return {**(weights if bare else {"model": weights}), "optimizer": flat, "train_state": {"step": 7}}

    state_dict_saver.save(state(model, optimizer), checkpoint_id=tmp_path / "src", no_dist=True)
    there_and_back(tmp_path / "src", tmp_path / "dst", "dcp")
    other = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    wanted = state(other, torch.optim.AdamW(other.parameters()))
    state_dict_loader.load(wanted, checkpoint_id=tmp_path / "dst", no_dist=True)
    assert alike(wanted, state(model, optimizer))


@pytest.mark.parametrize("keys", [("model_state_dict", "optimizer_state_dict"), ("state_dict", "optimizer"), ("model", "optim")])
def test_the_usual_dicts_of_training_scripts_come_back(keys: tuple[str, str], tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model)
    state = {keys[0]: dict(model.state_dict()), keys[1]: optimizer.state_dict(), "epoch": 3, "best": (0.5, None)}
    torch.save(state, tmp_path / "src.pt")
    there_and_back(tmp_path / "src.pt", tmp_path / "dst.pt", "torchsave")
    new = torch.load(tmp_path / "dst.pt")
    assert alike(state, new)
    optimizer.load_state_dict(new[keys[1]])


def test_a_bare_state_dict_comes_back_bare(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "src.pt")
    there_and_back(tmp_path / "src.pt", tmp_path / "dst.pt", "torchsave")
    assert alike(dict(net().state_dict()), torch.load(tmp_path / "dst.pt"))
