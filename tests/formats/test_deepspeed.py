"""Real DeepSpeed checkpoints of every kind that is read, against what the live engine held when it saved them."""

from __future__ import annotations

import logging
import shutil
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

import ucformat
from tests.checkpoints import CountingStore, flip
from tests.formats.deepspeed_fixtures import (
    DATA,
    KINDS,
    NUMBERED,
    TWIN,
    copy_of,
    open_kind,
    parameters_with_state,
    precision,
    states_of,
    tag_of,
    weights_of,
)
from ucformat import formats
from ucformat.box import Box, flat_range, flaw
from ucformat.dtypes import DTYPES
from ucformat.errors import ChecksumError, DTypeMismatchError, MissingFileError, NamesMismatchError, NotACheckpointError
from ucformat.formats import deepspeed
from ucformat.formats.source import Source, locate
from ucformat.reshard.reading.lazy import read, read_many
from ucformat.values.tree import Opaque, decode, encode

LEFT_OUT = {"z2exclude", "z3exclude"}
"""Saved with exclude_frozen_parameters: fc1 is not in the files."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if states_of(kind)])
def test_optimizer_state_equals_the_live_one_bit_for_bit(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    for name, expected in states_of(kind).items():
        got = read(catalog, name)
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if weights_of(kind)])
def test_weights_equal_the_live_ones(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    compute = precision(kind)
    live = weights_of(kind)
    for name, expected in live.items():
        if kind in LEFT_OUT and name.startswith("model/fc1"):
            assert name not in catalog.names
        else:
            assert torch.equal(read(catalog, name).to(compute).float(), expected), name
    weights = {name for name in catalog.names if name.startswith("model/") and name != "model/scale"}
    assert {name for name in weights if name not in catalog.aliases or name in live} == {name for name in live if name in weights}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_tiled_by_its_fragments(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    for i, spec in enumerate(catalog.tensors):
        rows = catalog.fragments.rows(i)
        ndim = len(spec.shape)
        assert flaw(Box.whole(spec.shape), catalog.fragments.offset[rows, :ndim], catalog.fragments.length[rows, :ndim]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_rounded_are_the_weights(kind: str) -> None:
    """Nothing of this needs the truth files: DeepSpeed keeps both, and they must agree through our names."""
    catalog = open_kind(DATA / kind)
    masters = [name for name in catalog.names if name.endswith("/fp32") and name.startswith("optimizer/")]
    assert masters or kind in NUMBERED
    for name in masters:
        weight = read(catalog, f"model/{name.split('/')[1]}")
        assert torch.equal(read(catalog, name).to(weight.dtype), weight), name


@pytest.mark.parametrize("kind", sorted(TWIN))
def test_round_robin_equals_the_same_run_without_it(kind: str) -> None:
    shuffled, plain = open_kind(DATA / kind), open_kind(DATA / TWIN[kind])
    assert shuffled.names == plain.names
    assert all(torch.equal(read(shuffled, name), read(plain, name)) for name in plain.names)
    assert isinstance(shuffled.values, dict)
    assert isinstance(plain.values, dict)
    assert shuffled.values["optimizer"] == plain.values["optimizer"]


def uneven(size: int, parts: int) -> list[int]:
    """`parts` + 1 cuts of `size`, each part a little larger than the one before; some may be empty."""
    weights = np.cumsum([0, *range(1, parts + 1)])
    return [int(size * w) // int(weights[-1]) for w in weights]


def cuts(shape: tuple[int, ...], parts: int, how: str) -> list[list[Box]]:
    """Each rank's boxes of a tensor: rows, columns, or a range of its elements as ZeRO cuts them."""
    if how == "flat" or not shape:
        numel = int(np.prod(shape))
        marks = uneven(numel, parts)
        return [flat_range(shape, a, b) for a, b in pairwise(marks)]
    dim = 0 if how == "rows" else len(shape) - 1
    marks = uneven(shape[dim], parts)
    whole = Box.whole(shape)
    return [
        [Box((*whole.offset[:dim], a, *whole.offset[dim + 1 :]), (*shape[:dim], b - a, *shape[dim + 1 :]))]
        for a, b in pairwise(marks)
    ]


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("kind", ["z0bf16", "z1n3", "z1n12", "z2two", "z2rr", "z2alignbf16", "z3two", "z3frozen", "bf16optn3"])
def test_loads_onto_other_numbers_of_ranks(kind: str, ranks: int) -> None:
    catalog = open_kind(DATA / kind)
    for spec in catalog.tensors:
        whole = read(catalog, spec.name)
        for how in ("rows", "columns", "flat"):
            for boxes in cuts(spec.shape, ranks, how):
                for box in boxes:
                    assert torch.equal(read(catalog, spec.name, box), whole[box.slices]), f"{spec.name} {box}"


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_known_and_kept_per_parameter(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    tag = tag_of(DATA / kind).name
    assert catalog.notes.step == int(tag.removeprefix("global_step"))
    assert isinstance(catalog.values, dict)
    assert catalog.values["step"] == catalog.notes.step
    stepped = [name for name in catalog.names if name.startswith("optimizer/") and name.endswith("/step")]
    has_steps = catalog.notes.step > 0 and "sgd" not in kind
    assert {name.rpartition("/")[0] for name in stepped} == (
        {name.rpartition("/")[0] for name in catalog.names if name.startswith("optimizer/")} if has_steps else set()
    )
    for name in stepped:
        assert catalog.spec(name).shape == ()
        assert catalog.spec(name).dtype == "F32"
        # ZeRO-0 in bf16 or fp16 takes a step with zero gradients when it starts
        early = kind.startswith("z0") and precision(kind) != torch.float32
        assert float(read(catalog, name)) == catalog.notes.step + early


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NUMBERED])
def test_param_groups_hold_names_and_each_groups_own_settings(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    assert isinstance(catalog.values, dict)
    groups = catalog.values["optimizer"]["param_groups"]
    names = [name for group in groups for name in group["params"]]
    assert len(names) == len(set(names))
    owners = {name.split("/")[1] for name in catalog.names if name.startswith("optimizer/") and name.endswith("/fp32")}
    aliases = {
        name.split("/")[1] for name in catalog.aliases if not catalog.aliases[name].startswith(f"optimizer/{name.split('/')[1]}")
    }
    assert set(names) <= owners
    assert owners - set(names) <= aliases
    if len(groups) == 2 and "lr" in groups[0]:
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.01, 0.1), (0.005, 0.0)]
        ndims = [{len(catalog.spec(f"model/{name}").shape) for name in group["params"]} for group in groups]
        assert ndims == [{2}, {1}]
    elif "lr" in groups[0]:
        assert groups[0]["lr"] == 0.01
    else:
        assert "el" in kind  # DeepSpeed's elastic form saves no hyper-parameters
        assert any("hyper-parameters" in remark for remark in catalog.notes.remarks)


@pytest.mark.parametrize("kind", ["z2tied", "z3tied", "z3persist", "z2el"])
def test_tied_weights_and_their_state_are_there_once_under_both_names(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    stored = {spec.name for spec in catalog.tensors}
    names = ["model/{}", *(f"optimizer/{{}}/{state}" for state in ("fp32", "exp_avg", "exp_avg_sq", "step"))]
    for name in names:
        assert name.format("head.weight") not in stored
        assert catalog.find(name.format("head.weight")) == catalog.find(name.format("emb.weight"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("z3")])
def test_zero3_weights_and_master_weights_are_one_tensor_named_by_its_precision(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    stored = {spec.name for spec in catalog.tensors}
    low = precision(kind) != torch.float32
    for name in ("emb.weight", "ln.bias"):
        assert catalog.find(f"model/{name}") == catalog.find(f"optimizer/{name}/fp32")
        assert (f"optimizer/{name}/fp32" in stored) == low
        assert catalog.spec(f"model/{name}").dtype == "F32"
    told = "F16" if precision(kind) == torch.float16 else "BF16"
    assert any(f"computed in {told}" in remark for remark in catalog.notes.remarks) == low


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "frozen" in kind or kind == "z0bf16two"])
def test_frozen_weights_are_kept_without_optimizer_state(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    live = weights_of(kind)
    for name in ("fc1.weight", "fc1.bias"):
        assert torch.equal(read(catalog, f"model/{name}").float(), live[f"model/{name}"])
        assert name not in parameters_with_state(catalog)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_kept(kind: str) -> None:
    assert torch.equal(read(open_kind(DATA / kind), "model/scale"), torch.tensor([1.5]))


@pytest.mark.parametrize("kind", KINDS)
def test_values_keep_client_state_and_configuration_and_can_be_saved(kind: str) -> None:
    catalog = open_kind(DATA / kind)
    values = catalog.values
    assert isinstance(values, dict)
    assert values["client"] == {"iteration": catalog.notes.step, "my_client": {"hello": 1}}
    assert values["deepspeed"]["ds_version"] == "0.19.8"
    assert values["deepspeed"]["ds_config"]["train_micro_batch_size_per_gpu"] == 4
    assert decode(encode(values), "values") == values
    assert catalog.notes.origin == "deepspeed"
    assert catalog.notes.mesh == {"dp": values["deepspeed"]["dp_world_size"]}


def test_classes_of_deepspeed_are_shown_and_not_loaded() -> None:
    catalog = open_kind(DATA / "z1n3")
    assert isinstance(catalog.values, dict)
    scaler = catalog.values["deepspeed"]["optimizer"]["loss_scaler"]
    assert isinstance(scaler, Opaque)
    assert scaler.class_name == "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert any(scaler.class_name in remark for remark in catalog.notes.remarks)


def test_other_optimizers_state_is_sliced_or_copied_by_what_it_is() -> None:
    catalog = open_kind(DATA / "z2nadam")
    assert catalog.spec("optimizer/fc1.weight/exp_avg").shape == (11, 7)
    assert catalog.spec("optimizer/fc1.weight/mu_product").shape == ()
    momentum = open_kind(DATA / "z3sgd")
    assert momentum.spec("optimizer/fc1.weight/momentum_buffer").shape == (11, 7)


def test_a_damaged_byte_is_found_and_named(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    catalog = open_kind(run)
    row = catalog.fragments.rows(catalog.find("optimizer/emb.weight/fp32")).start
    path = tag_of(run) / catalog.files[catalog.fragments.file[row]].path
    flip(path, int(catalog.fragments.start[row]))
    with pytest.raises(ChecksumError, match=path.name):  # a zip has one CRC per record, checked when all of it is read
        read_many(open_kind(run), [(spec.name, None) for spec in catalog.tensors])


@pytest.mark.parametrize("name", ["run", "tag", "checkpoint-3", "pytorch_model"])
def test_any_of_its_folders_may_be_given(name: str, tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    tag = tag_of(run)
    target = {"run": run, "tag": tag}.get(name, run)
    if name == "checkpoint-3":  # Hugging Face's Trainer puts other files beside
        shutil.copy(DATA / "z1n3" / "truth.safetensors", run / "model.safetensors")
        (run / "trainer_state.json").write_text("{}")
        (run / "latest").write_text(tag.name + "\n")
    if name == "pytorch_model":  # Accelerate
        target = tag.rename(run / "pytorch_model")
        (run / "latest").write_text("pytorch_model")
    for url in {str(target), str(run)}:
        assert formats.detect(locate(url)) is deepspeed.READER
        assert torch.equal(read(formats.open_catalog(url), "optimizer/ln.bias/fp32"), states_of("z1n3")["optimizer/ln.bias/fp32"])


class Net(nn.Module):
    """The model of the training script, with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 7)
        self.fc1 = nn.Linear(7, 11)
        self.ln = nn.LayerNorm(11)
        self.fc2 = nn.Linear(11, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.register_buffer("scale", torch.tensor([9.0]))


@pytest.mark.parametrize("kind", ["z1n3", "z1n12", "z2two", "z3n3", "z3two"])
def test_a_zero_run_goes_on_in_plain_torch(kind: str) -> None:
    net, expected = Net(), states_of(kind)
    params = list(net.parameters())
    split = [[p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]] if "two" in kind else [params]
    adam = torch.optim.AdamW([{"params": part, "lr": 1.0} for part in split])
    assert ucformat.load(str(DATA / kind), into={"model": net, "optimizer": adam}).step == 3
    assert torch.equal(net.get_buffer("scale"), torch.tensor([1.5]))
    assert [group["lr"] for group in adam.param_groups] == [0.01, 0.005][: len(split)]
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.detach(), expected[f"optimizer/{name}/fp32"])
        assert adam.state[parameter]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adam.state[parameter][key], expected[f"optimizer/{name}/{key}"])


def _step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """One step of training, which fails when a state does not suit its parameter."""
    out = net.head(net.fc2(net.ln(net.fc1(net.emb(torch.arange(13))))))
    (out.float().square().mean() * net.get_buffer("scale").float()).backward()
    optimizer.step()


@pytest.mark.parametrize("through", [None, "native"])
@pytest.mark.parametrize("kind", ["z1bf16", "bf16opt"])
def test_a_module_in_fp32_goes_on_from_the_master_weights(kind: str, through: str | None, tmp_path: Path) -> None:
    """Also from a conversion of the run."""
    src = str(DATA / kind)
    if through:
        ucformat.convert(src, str(tmp_path / "out"), through)
        src = str(tmp_path / "out")
    net, expected = Net(), states_of(kind)
    adam = torch.optim.AdamW(net.parameters())
    assert ucformat.load(src, into={"model": net, "optimizer": adam}).step == 3
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.detach(), expected[f"optimizer/{name}/fp32"])
        assert torch.equal(adam.state[parameter]["exp_avg"], expected[f"optimizer/{name}/exp_avg"])
    _step(net, adam)


def test_a_module_in_bf16_goes_on_from_its_own_weights_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ucformat"), "propagate", True)  # the program turns that off for its process
    net, masters = Net().bfloat16(), states_of("z1bf16")
    net.scale = net.get_buffer("scale").float()
    adam = torch.optim.AdamW(net.parameters())
    with pytest.raises(DTypeMismatchError, match=r"exp_avg.*stored as F32, wanted as BF16"):
        ucformat.load(str(DATA / "z1bf16"), into={"model": net, "optimizer": adam})
    assert not caplog.records
    assert ucformat.load(str(DATA / "z1bf16"), into={"model": net, "optimizer": adam}, cast=True).step == 3
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.detach(), masters[f"optimizer/{name}/fp32"].bfloat16())
    assert "8 weights (model/emb.weight…) go on from their rounded values" in caplog.text
    _step(net, adam)


def test_what_goes_on_and_is_not_taken_is_still_an_error(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(NamesMismatchError) as caught:
        ucformat.load(str(DATA / "z1n3"), into={"model": net})
    assert {name.split("/")[-1] for name in caught.value.unexpected} == {"exp_avg", "exp_avg_sq", "step", "optimizer"}
    adam = torch.optim.AdamW(net.parameters())
    ucformat.load(str(DATA / "z1n3"), into={"model": net, "optimizer": adam})
    state = {"model": net, "optimizer": adam, "client": {"n": 1}, "step": 3}
    ucformat.save(str(tmp_path / "own"), state)
    with pytest.raises(NamesMismatchError, match="stored but not wanted: client, step"):  # ours, so a leftover is one
        ucformat.load(str(tmp_path / "own"), into={"model": net, "optimizer": adam})


def test_client_state_goes_where_it_is_wanted() -> None:
    net = Net()
    client = {"iteration": 0, "my_client": None}
    adam = torch.optim.AdamW(net.parameters())
    state = {"model": net, "optimizer": adam, "client": client}
    ucformat.load(str(DATA / "z1n3"), into=state)
    assert state["client"] == ucformat.load(str(DATA / "z1n3"))["client"] != {"iteration": 0, "my_client": None}


def test_object_stores_are_read_as_well() -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(DATA / "z3frozen"), "/deepspeed-run", recursive=True)
    catalog = formats.open_catalog("memory://deepspeed-run")
    for name, expected in states_of("z3frozen").items():
        assert torch.equal(read(catalog, name), expected)


def test_without_latest_the_only_tag_is_taken_and_several_are_not_chosen_from(tmp_path: Path) -> None:
    run = copy_of("z1n3", tmp_path)
    (run / "latest").unlink()
    assert open_kind(run).notes.step == 3
    shutil.copytree(run / "global_step3", run / "global_step4")
    with pytest.raises(NotACheckpointError, match="global_step4"):
        deepspeed.open_catalog(locate(str(run)))


def test_opening_and_slicing_read_a_small_part_of_the_bytes(tmp_path: Path) -> None:
    items = 3_000_000
    flat = torch.randn(items)
    torch.save(
        {
            "module": {"w": flat.view(1000, -1).bfloat16()},
            "param_shapes": [{"w": torch.Size([1000, items // 1000])}],
            "dp_world_size": 1,
            "global_steps": 1,
        },
        tmp_path / "mp_rank_00_model_states.pt",
    )
    inner = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": flat + 1}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    body = {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": [flat],
        "partition_count": [1],
        "group_paddings": [0],
    }
    torch.save({"optimizer_state_dict": body}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    store = CountingStore(str(tmp_path))
    catalog = deepspeed.open_catalog(Source(store))
    assert torch.equal(read(catalog, "optimizer/w/exp_avg", Box((10, 0), (20, 3000))), (flat + 1).view(1000, -1)[10:30])
    assert store.total < 20 * 3000 * DTYPES["F32"].itemsize + 64_000


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step7")
    assert not deepspeed.detect(locate(str(tmp_path)))
    with pytest.raises((NotACheckpointError, MissingFileError)):
        deepspeed.open_catalog(locate(str(tmp_path)))
