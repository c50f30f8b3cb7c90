"""Loading into a live state: what is reported, what may be left out, names, and that nothing is lost in silence."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.errors import DTypeMismatchError, NamesMismatchError, NotACheckpointError, StorageError, UnsupportedError


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model and some values, step 7 of a run."""
    ucformat.save(tmp_path / "run", {"model": _net(), "epoch": 3}, step=7)
    return tmp_path / "run"


def _zeroed() -> nn.Sequential:
    net = _net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    return net


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_load_reports_where_from_which_step_and_what(saved: Path) -> None:
    net = _zeroed()
    report = ucformat.load(saved, into={"model": net, "epoch": 0})
    assert (report.step, report.format, Path(report.source).name) == (7, "native", "step-00000007")
    assert report.loaded == ("model/0.bias", "model/0.weight", "model/1.bias", "model/1.weight")
    assert (report.missing, report.unexpected, report.converted, report.remarks) == ((), (), (), ())
    assert _equal(net, _net())


def test_what_is_not_loaded_is_in_the_report_and_logged_with_names(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 5))
    with caplog.at_level(logging.INFO, "ucformat"):
        report = ucformat.load(saved, into={"model": net}, allow_missing=["model/2.*"], allow_unexpected=["model/1.*", "epoch"])
    assert report.missing == ("model/2.bias", "model/2.weight")
    assert report.unexpected == ("model/1.bias", "model/1.weight", "epoch")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("left as they were: model/2.bias, model/2.weight" in text for text in warnings)
    assert any("not loaded: model/1.bias, model/1.weight, epoch" in text for text in warnings)
    assert torch.equal(net.state_dict()["0.weight"], _net().state_dict()["0.weight"])


def test_only_names_that_are_allowed_may_be_missing_or_unexpected(saved: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Identity(), nn.Linear(2, 5))
    with pytest.raises(NamesMismatchError, match=r"model/2\.bias") as caught:
        ucformat.load(saved, into={"model": net, "epoch": 0}, allow_missing=["model/2.weight"], allow_unexpected=["model/1.*"])
    assert (caught.value.missing, caught.value.unexpected) == (("model/2.bias",), ())


@pytest.mark.parametrize("allow", ["allow_missing", "allow_unexpected"])
def test_a_pattern_that_matches_no_name_is_an_error(saved: Path, allow: str) -> None:
    net: Any = _zeroed()
    options: dict[str, Any] = {allow: ["model/lora*"]}
    with pytest.raises(UnsupportedError, match=f"{allow}: no .* matches 'model/lora"):
        ucformat.load(saved, into={"model": net, "epoch": 0}, **options)
    assert not net[0].weight.any()


def test_a_pattern_may_allow_what_turns_out_to_be_there(saved: Path) -> None:
    assert ucformat.load(saved, into={"model": _zeroed(), "epoch": 0}, allow_missing=["model/*"]).missing == ()


def test_nothing_in_common_is_an_error_even_when_not_strict(saved: Path) -> None:
    other = nn.ModuleDict({"head": nn.Linear(3, 2)})
    for options in ({"strict": False}, {"allow_missing": ["*"], "allow_unexpected": ["*"]}):
        with pytest.raises(NamesMismatchError, match="no name is both wanted and stored"):
            ucformat.load(saved, into={"model": other}, **options)


def test_not_strict_still_says_what_it_left(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = ucformat.load(saved, into={"model": nn.Sequential(nn.Linear(3, 2))}, strict=False)
    assert report.unexpected == ("model/1.bias", "model/1.weight", "epoch")
    assert "not loaded: model/1.bias" in caplog.text


def test_a_converted_dtype_is_reported(saved: Path) -> None:
    net = _zeroed().half()
    with pytest.raises(DTypeMismatchError):
        ucformat.load(saved, into={"model": net, "epoch": 0})
    report = ucformat.load(saved, into={"model": net, "epoch": 0}, cast=True)
    assert report.converted[0] == "model/0.bias: F32 → F16"
    assert len(report.converted) == 4


def test_names_load_renamed_and_the_error_says_which_rename(saved: Path, tmp_path: Path) -> None:
    net = nn.ModuleDict({"body": _zeroed()})
    with pytest.raises(NamesMismatchError) as caught:
        ucformat.load(saved, into={"model": net, "epoch": 0})
    rename = {"^model/": "model/body."}
    assert f"pass rename={rename!r}" in str(caught.value)
    ucformat.load(saved, into={"model": net, "epoch": 0}, rename=rename)
    assert _equal(net, _net())
    with pytest.raises(UnsupportedError, match="no name matches 'modle/'"):
        ucformat.load(saved, into={"model": net, "epoch": 0}, rename={"modle/": "model/"})
    assert "body.0.bias" in ucformat.load(saved, rename=rename)["model"]  # type: ignore[operator]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", ""])
@pytest.mark.parametrize("live", ["module", "module.", "_orig_mod.", ""])
def test_what_wrappers_add_to_names_matches_on_either_side(tmp_path: Path, prefix: str, live: str) -> None:
    truth = _net().state_dict()
    ucformat.save(tmp_path, {"model": {prefix + name: tensor for name, tensor in truth.items()}})
    net = _zeroed()
    into: Any = net if live == "module" else {live + name: tensor for name, tensor in net.state_dict().items()}
    report = ucformat.load(tmp_path, into={"model": into})
    assert _equal(net, _net())
    renamed = prefix != ("" if live == "module" else live)
    assert bool(report.remarks) == renamed
    assert not renamed or "as wrappers call them" in report.remarks[0]


def test_a_compiled_optimizer_run_loads_with_its_optimizer(tmp_path: Path) -> None:
    net: Any = _net()
    other: Any = _zeroed()
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in ((net, 0.5), (other, 0.1)))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = {id(p): f"_orig_mod.{name}" for name, p in net.named_parameters()}
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    state = {names[id(p)]: dict(held) for p, held in optimizer.state.items()}
    ucformat.save(
        tmp_path, {"model": {names[id(p)]: p for p in net.parameters()}, "optimizer": {**state, "param_groups": groups}}
    )
    report = ucformat.load(tmp_path, into={"model": other, "optimizer": fresh})
    assert "optimizer/0.weight/exp_avg" in report.loaded
    assert fresh.param_groups[0]["lr"] == 0.5
    assert torch.equal(fresh.state[other[0].weight]["exp_avg"], optimizer.state[net[0].weight]["exp_avg"])


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_resuming_is_none_only_where_nothing_is(saved: Path, tmp_path: Path) -> None:
    state = {"model": _zeroed(), "epoch": 0}
    assert ucformat.resume(tmp_path / "none", into=state) is None
    (tmp_path / "empty").mkdir()
    assert ucformat.resume(tmp_path / "empty", into=state) is None
    report = ucformat.resume(saved, into=state)
    assert report is not None
    assert (report.step, state["epoch"]) == (7, 3)


def test_a_run_with_nothing_but_a_killed_save_has_nothing_to_resume_from(saved: Path) -> None:
    (saved / "step-00000007" / "ucf.json").unlink()
    assert ucformat.resume(saved, into={"model": _zeroed(), "epoch": 0}) is None


def test_a_place_with_files_of_the_user_alone_is_said_to_hold_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.out").write_bytes(b"log")
    assert ucformat.resume(tmp_path, into={"model": _zeroed()}) is None
    assert "events.out" in caplog.text


def test_what_is_damaged_or_does_not_fit_is_never_taken_for_nothing(saved: Path) -> None:
    with pytest.raises(NamesMismatchError):
        ucformat.resume(saved, into={"model": nn.Linear(1, 1)})
    record = saved / "step-00000007" / "ucf.json"
    whole = record.read_bytes()
    record.write_bytes(whole[:-40] + b"x" + whole[-39:])
    with pytest.raises(ucformat.UcformatError) as caught:
        ucformat.resume(saved, into={"model": _zeroed(), "epoch": 0})
    assert not isinstance(caught.value, NotACheckpointError)
    record.write_bytes(whole[:-40])  # as a writer that was interrupted leaves it: see `is_cut_short`
    with pytest.raises(NotACheckpointError, match="nothing was committed"):
        ucformat.resume(saved, into={"model": _zeroed(), "epoch": 0})


def test_what_can_not_be_looked_at_is_never_taken_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")  # looking at it fails, and not since nothing is there
    with pytest.raises(StorageError):
        ucformat.resume(tmp_path / "run", into={"model": _zeroed(), "epoch": 0})


# -- verbs by path -----------------------------------------------------------------------------------------------------


def test_steps_latest_verify_and_diff_go_by_path(saved: Path, tmp_path: Path) -> None:
    ucformat.save(saved, {"model": _zeroed(), "epoch": 4}, step=8)
    assert (ucformat.steps(saved), ucformat.latest(saved)) == ([7, 8], 8)
    assert ucformat.latest(tmp_path / "none") is None
    assert ucformat.verify(saved, step=7).ok
    found = ucformat.diff(saved / "step-00000007", saved / "step-00000008")
    assert not found.equal
    assert {d.name for d in found.differences} >= {"model/0.weight", "values:epoch"}
    assert ucformat.diff(saved / "step-00000007", saved / "step-00000007").equal


def test_a_selection_loads_alone_and_onto_a_device(saved: Path) -> None:
    found = ucformat.load(saved, select=["model/0.*"], device="meta")
    assert set(found["model"]) == {"0.weight", "0.bias"}  # type: ignore[call-overload]
    assert found["model"]["0.weight"].device.type == "meta"  # type: ignore[index]
    with pytest.raises(UnsupportedError, match="no name matches"):
        ucformat.load(saved, select=["modle/*"])
    with pytest.raises(ValueError, match="allow_unexpected"):
        ucformat.load(saved, into={"model": _zeroed()}, select=["model/*"])  # type: ignore[call-overload]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (True, TypeError), (8.0, TypeError), ("8", TypeError)])
def test_a_step_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ucformat.save(tmp_path / "run", {"a": 1}, step=step)
    assert not (tmp_path / "run").exists()
    with pytest.raises(error):
        ucformat.load(tmp_path / "run", step=step)


def test_a_numpy_integer_is_a_step(tmp_path: Path) -> None:
    import numpy as np

    ucformat.save(tmp_path, {"a": 1}, step=np.int64(5))  # type: ignore[call-overload]
    assert ucformat.load(tmp_path, step=np.int32(5)) == {"a": 1}  # type: ignore[call-overload]


# -- alike on all ranks ------------------------------------------------------------------------------------------------


def _look_apart(path: str) -> str:
    where = f"{path}/{dist.get_rank()}"  # as where a mount is missing on one host
    try:
        ucformat.load(where, into={"w": torch.zeros(2)})
    except ucformat.UcformatError as error:
        return type(error).__name__
    return "loaded"


def _take_newest(path: str) -> tuple[int | None, float]:
    live = torch.zeros(2)
    return ucformat.load(path, into={"w": live}).step, live[0].item()


def _resume_here(path: str) -> int | None:
    """Rank 1 does not even see the run."""
    os.chdir(path if dist.get_rank() == 0 else "/")
    report = ucformat.resume("run" if dist.get_rank() == 0 else f"{path}/run", into={"w": torch.zeros(2)})
    return None if report is None else report.step


def test_rank_0_decides_what_a_path_means_and_all_load_that(tmp_path: Path) -> None:
    for step in (1, 2):
        ucformat.save(tmp_path / "run", {"w": torch.full((2,), float(step))}, step=step)
    assert on_ranks(2, _take_newest, str(tmp_path / "run")) == [(2, 2.0)] * 2
    for rank in range(2):
        ucformat.save(tmp_path / str(rank), {"w": torch.full((2,), float(rank))})
    assert on_ranks(2, _look_apart, str(tmp_path)) == ["loaded"] * 2
    assert on_ranks(2, _resume_here, str(tmp_path)) == [2, 2]
