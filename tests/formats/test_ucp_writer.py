"""Universal folders that we write: they read back the same, and the real DeepSpeed resumes from them under every stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ucformat
from tests.formats.deepspeed_fixtures import DATA, Placeholder, open_kind
from tests.formats.deepspeed_running import DeepSpeedRuns
from ucformat import formats
from ucformat.errors import UnsupportedError
from ucformat.reshard.reading.lazy import read

KINDS = ["z1bf16", "z2two", "z2tied", "z2frozen", "z3two", "z3frozen", "z3tied", "z2nadam", "z1step0", "bf16optn3", "z1fp16"]
PARALLEL = ["tp2gqabf16", "pp2two", "pp2tiedbf16", "ep2bf16"]


def source(kind: str) -> Path:
    return DATA / kind if (DATA / kind).exists() else DATA / "parallel" / kind


@pytest.mark.parametrize("kind", [*KINDS, *PARALLEL])
def test_what_is_written_reads_back_the_same(kind: str, tmp_path: Path) -> None:
    report = ucformat.convert(source(kind), tmp_path / "out", "ucp", drop=kind == "z2nadam")
    one, other = open_kind(source(kind)), formats.open_catalog(str(tmp_path / "out"))
    lost = {name for name in one.names if name.endswith("/mu_product")}  # NAdam's, one number of each parameter
    assert bool(lost) == any("mu_product" in remark and "left out" in remark for remark in report.remarks)
    assert set(other.names) == set(one.names) - lost
    for name in other.names:
        expected, got = read(one, name), read(other, name)
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name
    assert isinstance(one.values, dict)
    assert isinstance(other.values, dict)
    for key in ("step", "optimizer", "client", "scheduler"):
        assert other.values.get(key) == one.values.get(key), key
    scalers = [values["deepspeed"]["optimizer"].get("loss_scaler") for values in (one.values, other.values)]
    assert scalers[0] == scalers[1]
    assert set(report.left_out) == lost
    assert not report.values_left_out


def test_it_is_no_larger_than_its_state(tmp_path: Path) -> None:
    """DeepSpeed's own folder of a ZeRO-3 run repeats rank 0's part; this one has nothing twice."""
    flat = torch.randn(600_000)
    state = {"model": {"w": flat.view(600, 1000)}, "optimizer": {"state": {"w": {"exp_avg": flat + 1, "exp_avg_sq": flat.abs()}}}}
    torch.save({"model": state["model"], "optimizer": {"state": {}, "param_groups": []}}, tmp_path / "plain.pt")
    ucformat.convert(tmp_path / "plain.pt", tmp_path / "out", "ucp")
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert size < 1.05 * flat.nbytes


def test_a_run_of_other_programs_starts_from_its_weights(tmp_path: Path) -> None:
    weights = {"w": torch.randn(3, 4).bfloat16(), "n": torch.arange(3)}
    torch.save({"model": weights}, tmp_path / "plain.pt")
    ucformat.convert(tmp_path / "plain.pt", tmp_path / "out", "ucp")
    tag = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    stored = torch.load(tag / "zero" / "w" / "fp32.pt", weights_only=True)["param"]
    assert torch.equal(stored, weights["w"].float())
    back = formats.open_catalog(str(tmp_path / "out"))
    assert back.spec("model/w").dtype == "BF16"
    assert torch.equal(read(back, "model/n"), torch.arange(3))


def test_tensor_parallel_hints_are_those_of_the_run(tmp_path: Path) -> None:
    ucformat.convert(source("tp2gqabf16"), tmp_path / "out", "ucp")
    zero = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text() / "zero"
    allowed: list[Any] = [(Placeholder, "deepspeed.checkpoint.universal_checkpoint.SubparamShape")]

    def hints(name: str) -> dict[str, Any]:
        with torch.serialization.safe_globals(allowed):
            tree = torch.load(zero / name / "fp32.pt", weights_only=True)
        return {key: value for key, value in tree.items() if key != "param"}

    assert hints("layers.0.down_proj.weight") == {"cat_dim": 1}
    assert hints("layers.0.up_proj.weight") == {"cat_dim": 0}
    fused = hints("layers.0.attn.qkv.weight")["sub_param_shape"]
    assert (fused.shape, fused.partition_dim) == (((16, 8, 8), -1), 0)


def test_only_what_was_written_here_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ucformat.convert(DATA / "z2two", out, "ucp")
    (out / "notes.txt").write_text("mine")
    ucformat.convert(DATA / "z3two", out, "ucp", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    theirs = Path(shutil.copytree(DATA.parent / "ucp" / "z2tied", tmp_path / "theirs"))
    with pytest.raises(UnsupportedError, match="never replaced"):
        ucformat.convert(DATA / "z3two", theirs, "ucp", overwrite=True)


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"a/b": torch.zeros(2)}}, tmp_path / "plain.pt")
    with pytest.raises(UnsupportedError, match="name of a file"):
        ucformat.convert(tmp_path / "plain.pt", tmp_path / "out", "ucp")
    assert not (tmp_path / "out").exists()


def test_deepspeed_resumes_under_every_stage_on_another_number_of_ranks(tmp_path: Path) -> None:
    """From 3 ranks to 2: state, steps and weights bit for bit, then two steps of training with the same losses."""
    two, low = tmp_path / "two", tmp_path / "low"
    ucformat.convert(DATA / "z3two", two, "ucp")
    ucformat.convert(DATA / "z2n3bf16", low, "ucp")
    runs = DeepSpeedRuns(tmp_path, ranks=2)
    for stage in (1, 2, 3):
        runs.add(run=str(two), stage=stage, groups=2, truth=str(DATA / "z3two" / "truth.safetensors"))
    for stage, accumulate in ((1, False), (1, True), (2, False), (3, False)):  # the second is BF16_Optimizer
        truth = str(DATA / "z2n3bf16" / "truth.safetensors")
        runs.add(run=str(low), stage=stage, dtype="bf16", accumulate_fp32=accumulate, truth=truth)
    results = runs.results()
    for result in results:
        assert result["loaded"]
        assert result["wrong"] == []
        assert result["steps"] == 3
        assert result["state_steps"] == [3.0]
        assert result["client"] == {"hello": 1}
    assert [result["groups"] for result in results[:2]] == [[[0.01, 0.1], [0.005, 0.0]]] * 2
    assert results[2]["groups"] == [[0.5, 0.3]] * 2  # DeepSpeed's ZeRO-3 has none for each group: those of the script
    assert [result["groups"] for result in results[3:]] == [[[0.01, 0.1]]] * 4
    assert results[0]["losses"] == pytest.approx(results[1]["losses"], rel=1e-6)
    assert results[2]["losses"][0] == pytest.approx(results[0]["losses"][0], rel=1e-6)
    for result in results[4:]:
        assert result["losses"] == pytest.approx(results[3]["losses"], rel=1e-3)
