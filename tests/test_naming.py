"""What wrappers add to names goes; what users rename goes with its optimizer state and param groups, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ucformat
from tests.cli.calls import Program
from ucformat.errors import UnsupportedError
from ucformat.naming import unwrapped


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.fc.weight", "fc.weight"),
        ("module.fc.weight", "fc.weight"),
        ("module._orig_mod.fc.weight", "fc.weight"),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("layers.0._checkpoint_wrapped_module.fc.weight", "layers.0.fc.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.fc.weight", "layers.0.fc.weight"),
        ("layers.0._orig_mod.fc.weight", "layers.0.fc.weight"),
    ],
)
def test_what_wrappers_add_to_names_is_left_out(name: str, plain: str) -> None:
    assert unwrapped([name]) == {name: plain}


def test_module_is_a_wrapper_only_where_all_names_begin_so() -> None:
    names = ["module.fc.weight", "head.weight", "encoder.module.weight"]
    assert unwrapped(names) == {name: name for name in names}


def test_names_that_would_become_one_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"both be called 'fc\.weight'"):
        unwrapped(["fc.weight", "_orig_mod.fc.weight"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = nn.Parameter(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, when it imports its compiler
def test_a_compiled_models_file_is_exported_under_the_models_names(tmp_path: Path) -> None:
    """And said so; other formats keep the names that the program knows."""
    net = torch.compile(Net())
    assert isinstance(net, nn.Module)
    torch.save({"model": net.state_dict()}, tmp_path / "net.pt")
    report = ucformat.convert(str(tmp_path / "net.pt"), str(tmp_path / "hf"), "hf")
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(Net().state_dict())
    assert any("wrappers" in remark and "model/_orig_mod.fc.bias is model/fc.bias" in remark for remark in report.remarks)
    ucformat.convert(str(tmp_path / "net.pt"), str(tmp_path / "native"), "native")
    assert "model/_orig_mod.fc.bias" in ucformat.open(str(tmp_path / "native"))


def saved(path: Path) -> str:
    net = Net()
    groups: list[dict[str, object]] = [{"params": [net.fc.weight], "lr": 0.5}, {"params": [net.fc.bias, net.head.weight]}]
    optimizer = torch.optim.AdamW(groups)
    net.head(net.fc(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    ucformat.save(str(path), {"model": net, "optimizer": optimizer, "list": [torch.ones(2)]})
    return str(path)


def test_a_renamed_parameter_takes_its_optimizer_state_and_group_along(tmp_path: Path) -> None:
    src = saved(tmp_path / "src")
    ucformat.convert(src, str(tmp_path / "out"), "native", rename=[(r"fc\.", "layers.0.")])
    old, new = ucformat.open(src), ucformat.open(str(tmp_path / "out"))
    names = {name: name.replace("fc.", "layers.0.") for name in old}
    assert set(new) == set(names.values())
    assert all(torch.equal(old[name][...], new[to][...]) for name, to in names.items())
    state = ucformat.load(str(tmp_path / "out"))
    groups = state["optimizer"]["param_groups"]  # type: ignore[index]
    assert [group["params"] for group in groups] == [["layers.0.weight"], ["layers.0.bias", "head.weight"]]


def test_renames_are_done_in_order_and_may_move_what_is_no_model(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "x.pt")
    rules = {"^model/": "raw/", "^ema/": "model/"}
    ucformat.convert(str(tmp_path / "x.pt"), str(tmp_path / "hf"), "hf", rename=rules)
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nothing=x", "no name matches 'nothing'"),
        (r"fc\.(weight|bias)=x", "would both be called 'model/x'"),
        ("(fc=x", "no regular expression"),
        (r"fc=\2", "can't take the place"),
        ("^model/fc.weight$=", "is no name"),
    ],
)
def test_a_rename_that_can_not_be_meant_is_an_error(
    rule: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = saved(tmp_path / "src")
    done = Program(capsys)(src, str(tmp_path / "out"), "--to", "native", "--rename", rule)
    assert done.status == 1
    assert message in done.err
    assert not (tmp_path / "out").exists()


def test_renames_of_the_program_are_regular_expressions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = saved(tmp_path / "src")
    done = Program(capsys)(src, str(tmp_path / "hf"), "--to", "hf", "--rename", r"(?<=/)fc\.=net.fc.", "--rename", "head=out")
    assert done.status == 0, done.err
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"net.fc.weight", "net.fc.bias", "out.weight"}
