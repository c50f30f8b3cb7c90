"""DeepSpeed runs that we write: they read back the same, and the real DeepSpeed loads them as its own and trains on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucformat
from tests.formats.deepspeed_fixtures import DATA, open_kind, tag_of
from tests.formats.deepspeed_running import DeepSpeedRuns
from ucformat import formats
from ucformat.errors import UnsupportedError
from ucformat.formats.deepspeed.shuffle import shuffled, unshuffled
from ucformat.reshard.reading.lazy import read

CASES: list[tuple[str, dict[str, str | int]]] = [
    ("z2two", {}),
    ("z2two", {"stage": 3, "dp": 2}),
    ("z3two", {"stage": 1, "dp": 2}),
    ("z3two", {"dp": 4}),
    ("z2frozen", {"stage": 3, "dp": 3}),
    ("z3frozen", {"stage": "2", "dp": "5"}),
    ("z1bf16", {"stage": 3, "dp": 3}),
    ("z2tied", {"stage": 1, "dp": 13}),
    ("z3tied", {"dp": 1}),
    ("z2rr", {"dp": 3}),
    ("z2nadam", {"dp": 2}),
    ("z1fp16", {"dp": 2}),
    ("z1step0", {"dp": 3}),
    ("parallel/tp2gqabf16", {"stage": 2, "dp": 2}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_what_is_written_reads_back_the_same(kind: str, options: dict[str, str | int], tmp_path: Path) -> None:
    report = ucformat.convert(DATA / kind, tmp_path / "out", "deepspeed", options=options)
    one, other = open_kind(DATA / kind), open_kind(tmp_path / "out")
    assert other.names == one.names
    rounded = any("rounded weights are left out" in remark for remark in report.remarks)
    for name in one.names:
        expected, got = read(one, name), read(other, name)
        assert torch.equal(got.to(expected.dtype), expected), name
        assert got.dtype == expected.dtype or (rounded and name.startswith("model/")), name
    assert isinstance(one.values, dict)
    assert isinstance(other.values, dict)
    for key in ("step", "optimizer", "client", "scheduler"):
        assert other.values.get(key) == one.values.get(key), key
    if "dp" in options:
        assert other.notes.mesh == {"dp": int(options["dp"])}
    assert not report.left_out
    assert not report.values_left_out


def test_the_order_of_round_robin_is_undone_and_done_again() -> None:
    names = [str(i) for i in range(11)]
    for ranks in (1, 2, 3, 11, 20):
        assert unshuffled(shuffled(names, ranks), ranks) == names
    assert shuffled(names[:5], 2) == ["0", "2", "4", "1", "3"]


REFUSED: dict[str, tuple[str, dict[str, str | int], str]] = {
    "pipelines": ("parallel/pp2two", {}, "pipeline"),
    "experts": ("parallel/ep2", {}, "experts"),
    "another stage": ("z2two", {"stage": 4}, "ZeRO-4"),
    "no ranks": ("z2two", {"dp": 0}, "dp=0"),
    "ranks of text": ("z2two", {"dp": "many"}, "dp=many"),
    "another option": ("z2two", {"tp": 2}, "no option 'tp'"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_it_can_not_be_written_as_is_refused_by_name(what: str, tmp_path: Path) -> None:
    kind, options, word = REFUSED[what]
    with pytest.raises(UnsupportedError, match=word):
        ucformat.convert(DATA / kind, tmp_path / "out", "deepspeed", options=options)
    assert not (tmp_path / "out").exists()


def test_weights_without_an_optimizer_are_no_run(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}}, tmp_path / "plain.pt")
    with pytest.raises(UnsupportedError, match="trained"):
        ucformat.convert(tmp_path / "plain.pt", tmp_path / "out", "deepspeed")


def test_only_what_was_written_here_is_replaced(tmp_path: Path) -> None:
    ucformat.convert(DATA / "z2two", tmp_path / "out", "deepspeed")
    ucformat.convert(DATA / "z3two", tmp_path / "out", "deepspeed", overwrite=True)
    assert formats.open_named(str(tmp_path / "out"))[0] == "deepspeed"
    theirs = Path(shutil.copytree(DATA / "z1n3", tmp_path / "theirs"))
    with pytest.raises(UnsupportedError, match="never replaced"):
        ucformat.convert(DATA / "z3two", theirs, "deepspeed", overwrite=True)
    assert (tag_of(theirs) / "mp_rank_00_model_states.pt").exists()


def test_deepspeed_loads_it_as_its_own_and_trains_on_with_equal_losses(tmp_path: Path) -> None:
    def written(kind: str, **options: str | int) -> str:
        out = tmp_path / "".join([kind, *map(str, options.values())])
        ucformat.convert(DATA / kind, out, "deepspeed", options=options)
        return str(out)

    runs = DeepSpeedRuns(tmp_path, ranks=2)
    for kind, stage in (("z3two", 1), ("z3two", 2), ("z2two", 3)):
        run = written(kind, stage=stage, dp=2)
        runs.add(run=run, stage=stage, groups=2, universal=False, truth=str(DATA / kind / "truth.safetensors"))
    truth = str(DATA / "z2n3bf16" / "truth.safetensors")
    for stage, accumulate in ((1, True), (2, False), (3, False)):  # the first is BF16_Optimizer
        run = written("z2n3bf16", stage=stage, dp=2)
        runs.add(run=run, stage=stage, dtype="bf16", accumulate_fp32=accumulate, universal=False, truth=truth)
    truth = str(DATA / "z3frozen" / "truth.safetensors")
    runs.add(run=written("z3frozen", stage=3, dp=2), stage=3, frozen=True, universal=False, truth=truth)
    own = {"stage": 1, "dtype": "bf16", "universal": False}  # DeepSpeed's own files, and the same run written here
    runs.add(run=str(DATA / "z1bf16"), **own)
    runs.add(run=written("z1bf16", stage=1, dp=2), **own)
    results = runs.results()
    for result in results:
        assert result["loaded"]
        assert result["wrong"] == []
        assert result["scale"] == 1.5
        assert result["steps"] == 3
        assert result["state_steps"] == [3.0]
        assert result["client"] == {"hello": 1}
    assert [result["groups"] for result in results[:3]] == [[[0.01, 0.1], [0.005, 0.0]]] * 3
    assert results[0]["losses"] == pytest.approx(results[1]["losses"], rel=1e-6)
    assert results[4]["losses"] == pytest.approx(results[5]["losses"], rel=1e-3)
    assert results[-1]["losses"] == results[-2]["losses"]
