"""Real Megatron checkpoints of every kind that is read: both forms of a run hold the same, and what torch itself reads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

import ucformat
from tests.formats.megatron_fixtures import (
    ITERATION,
    RUNS,
    catalog_of,
    edit,
    folder,
    forms,
    opened,
    rank_files,
    raw,
    tensors,
    tensors_of,
    torch_load,
)
from tests.formats.test_deepspeed import cuts
from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import FormatError, MissingFileError, NotACheckpointError, UnsafePickleError, UnsupportedError
from ucformat.formats import megatron
from ucformat.formats.source import locate
from ucformat.reshard.reading.lazy import read, read_many
from ucformat.values.codec import RankLocal

LEGACY = [run for run in RUNS if run != "fsms"]
TWINS = [(run, form) for run in LEGACY for form in forms(run) if form != "legacy"]
WRONG = ("bucket", "fully_reshardable")
"""Megatron-core wrote wrong optimizer state into it: it forgets what fills up buckets."""


def stored(catalog: Catalog, found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Canonical names → tensors of a torch_dist checkpoint by Megatron's keys, sliced as Megatron's documentation says."""
    out: dict[str, torch.Tensor] = {}
    for name in catalog.names:
        top, key, *kind = name.split("/")
        key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_").replace("local_experts.", "experts.")
        if kind:
            key = f"optimizer.state.{kind[0].replace('fp32', 'param')}.{key}"
        one = re.fullmatch(r"(.*?layers)\.(\d+)\.(.*)", key)
        if top not in ("model", "optimizer") or kind == ["step"]:
            continue
        if one is None or key in found:
            out[name] = found[key]
            continue
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", f"{one[1]}.{one[3]}")
        tensor = found[f"{expert[1]}.{expert[3]}" if expert else f"{one[1]}.{one[3]}"][int(one[2])]
        out[name] = tensor[int(expert[2])] if expert else tensor
    return out


def weights(catalog: Catalog) -> dict[str, torch.Tensor]:
    return tensors(catalog.filter(lambda name: name.startswith("model/")))


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("run", "form"), TWINS)
def test_legacy_and_distributed_forms_of_a_run_hold_the_same_bits(run: str, form: str) -> None:
    legacy, other = tensors_of(run, "legacy"), tensors_of(run, form)
    assert [n for n in legacy if n.startswith("model/")] == [n for n in other if n.startswith("model/")]
    assert any(n.startswith("optimizer/") for n in legacy) == bool(form)
    for name in legacy.keys() & other.keys():
        assert torch.equal(legacy[name], other[name]), name
    if (run, form) != WRONG:
        assert legacy.keys() == other.keys()
        assert not catalog_of(run, form).notes.remarks


@pytest.mark.parametrize("run", [run for run in RUNS if "fully_reshardable" in forms(run) and run != "bucket"])
def test_distributed_tensors_are_what_torch_reads(run: str, tmp_path: Path) -> None:
    path = folder(run, "fully_reshardable")
    found = tensors_of(run, "fully_reshardable")
    expected = stored(
        catalog_of(run, "fully_reshardable"), raw(path / ITERATION if (path / ITERATION).exists() else path, tmp_path)
    )
    assert len(expected) >= 60
    assert_equal({name: found[name] for name in expected}, expected)


def test_state_by_fragments_of_older_releases_equals_that_by_parameter() -> None:
    assert_equal(tensors_of("fsms"), tensors_of("fsms", "fully_reshardable"))


@pytest.mark.parametrize("run", LEGACY)
def test_master_weights_rounded_are_the_weights(run: str) -> None:
    for form in forms(run):
        found = tensors_of(run, form)
        masters = [name for name in found if name.endswith("/fp32")]
        assert bool(masters) == (run not in ("single", "singlemoe"))
        for name in masters:
            weight = found[f"model/{name.split('/')[1]}"]
            assert torch.equal(found[name].to(weight.dtype), weight), name


def test_wrong_optimizer_state_that_megatron_wrote_is_left_out_with_a_remark() -> None:
    wrong = catalog_of(*WRONG)
    assert "linear_fc1.weight" in wrong.notes.remarks[0]
    assert "optimizer/decoder.layers.0.mlp.linear_fc1.weight/exp_avg" not in wrong.names
    assert "optimizer/output_layer.weight/exp_avg" in wrong.names


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("run", "form"), [("tp2dp2", "legacy"), ("tp2dp2", "dp_reshardable"), ("moe", "legacy"), ("fsms", "")])
def test_loads_onto_other_numbers_of_ranks(run: str, form: str, ranks: int) -> None:
    whole = tensors_of(run, form)
    wanted = [
        (name, box)
        for name, tensor in whole.items()
        for how in ("rows", "flat")
        for boxes in cuts(tuple(tensor.shape), ranks, how)
        for box in boxes
    ]
    for (name, box), part in zip(wanted, read_many(catalog_of(run, form), wanted), strict=True):
        assert torch.equal(part, whole[name][box.slices]), f"{name} {box}"


def test_hyper_parameters_and_steps_go_to_parameters() -> None:
    catalog = catalog_of("moe", "legacy")
    assert isinstance(catalog.values, dict)
    groups = catalog.values["optimizer"]["param_groups"]
    assert sum(len(group["params"]) for group in groups) == len([n for n in catalog.names if n.endswith("/fp32")])
    for group in groups:
        experts = ["local_experts" in name for name in group["params"]]
        assert set(experts) <= {group["is_expert_parallel"]}
        assert all((len(catalog.spec(f"model/{name}").shape) == 1) == (group["wd_mult"] == 0) for name in group["params"])
    assert read(catalog, "optimizer/output_layer.weight/step").item() == 1.0
    assert catalog.values["args"].num_layers == 2
    assert catalog.notes.step == 10


def test_converts_to_native_with_everything(tmp_path: Path) -> None:
    source = folder("tp2dp2", "dp_reshardable")
    report = ucformat.convert(source, tmp_path / "native", "native")
    assert not report.left_out
    found = ucformat.diff(source, tmp_path / "native")
    assert found.equal


# --- layouts that only show in the bytes ------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the legacy form of a run with two tensor ranks, without optimizer state."""
    path = shutil.copytree(folder("tp2dp2", "legacy"), tmp_path / "run")
    for file in rank_files(path):
        (file.parent / "distrib_optim.pt").unlink()
        edit(file, lambda tree: tree.pop("optimizer"))
    return path


OLD = {
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "pre_mlp_layernorm.": "post_attention_norm.",
    "input_layernorm.": "input_norm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "final_layernorm.": "final_norm.",
}


def to_old_names(tree: dict[str, Any]) -> None:
    """The model as releases before Megatron-core nested and named it."""
    encoder: dict[str, Any] = {}
    language: dict[str, Any] = {"embedding": {}, "encoder": encoder}
    for name, tensor in tree["model"].items():
        if name.startswith("embedding."):
            language["embedding"]["word_embeddings"] = {"weight": tensor}
        elif name.startswith("output_layer."):
            language.setdefault("output_layer", {})[name.split(".", 1)[1]] = tensor
        else:
            short = name.removeprefix("decoder.")
            for new, old in OLD.items():
                short = short.replace(new, old)
            encoder[short] = tensor
    tree["model"] = {"language_model": language}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_rows_of_queries_keys_and_values_are_reordered_by_version(version: float, old: bool, run: Path) -> None:
    expected = weights(opened(run))

    def change(tree: dict[str, Any]) -> None:
        tree["args"].num_attention_heads, tree["args"].num_query_groups = 4, None
        for name, tensor in list(tree["model"].items()):
            if version < 2 and "linear_qkv.weight" in name:
                split = tensor[:12].view(2, 3, 2, 16)  # two heads of the rank with two rows of each kind
                moved = split.transpose(0, 1) if version < 1 else split.transpose(1, 2)
                tree["model"][name] = moved.reshape(12, 16).contiguous()
            elif "linear_qkv.weight" in name:
                tree["model"][name] = tensor[:12].contiguous()
        tree["checkpoint_version"] = version
        if old:
            to_old_names(tree)

    for file in rank_files(run):
        edit(file, change)
    qkv = {
        name: torch.cat([part[:12] for part in tensor.split(16)]) if "linear_qkv.weight" in name else tensor
        for name, tensor in expected.items()
    }
    assert_equal(weights(opened(run)), qkv)


def test_old_order_of_rows_without_the_number_of_heads_is_refused(run: Path) -> None:
    for file in rank_files(run):
        edit(file, lambda tree: (tree.pop("args"), tree.update(checkpoint_version=0)))
    with pytest.raises(UnsupportedError, match="num_attention_heads"):
        opened(run)


@pytest.mark.parametrize("kind", ["grouped", "stacked"])
@pytest.mark.parametrize("which", ["moe", "moeetp"])
def test_experts_are_the_same_however_their_layers_keep_them(kind: str, which: str, tmp_path: Path) -> None:
    path = shutil.copytree(folder(which, "legacy"), tmp_path / "run")

    def change(tree: dict[str, Any]) -> None:
        model = tree["model"]
        for prefix in sorted({name.split("local_experts")[0] for name in model if "local_experts" in name}):
            for layer in ("linear_fc1", "linear_fc2"):
                held = [model.pop(f"{prefix}local_experts.{e}.{layer}.weight") for e in range(2)]
                if kind == "grouped":
                    model.update({f"{prefix}{layer}.weight{e}": tensor for e, tensor in enumerate(held)})
                else:
                    flat = torch.stack([tensor.T for tensor in held])
                    shape = (16, -1) if layer == "linear_fc1" else (-1, 16)
                    model[f"{prefix}weight{layer[-1]}"] = flat.reshape(shape).contiguous()

    for file in rank_files(path):
        (file.parent / "distrib_optim.pt").unlink()
        edit(file, change)
    assert_equal(weights(opened(path)), weights(catalog_of(which, "legacy")))


def test_layer_norms_have_one_name_whether_fused_or_not(run: Path) -> None:
    expected = weights(opened(run))

    def change(tree: dict[str, Any]) -> None:
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        for name in list(tree["model"]):
            for plain, fused in names.items():
                if plain in name:
                    tree["model"][name.replace(plain, fused)] = tree["model"].pop(name)

    for file in rank_files(run):
        edit(file, change)
    assert_equal(weights(opened(run)), expected)


def test_what_is_not_sharded_may_lie_among_the_sharded_objects(tmp_path: Path) -> None:
    source = folder("tp2dp2", "fully_reshardable") / ITERATION
    found = {key: value for key, value in raw(source, tmp_path).items() if isinstance(value, torch.Tensor)}
    state = {**found, "common_state/shard_0_1": [torch_load(source / "common.pt")]}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "new", planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    (tmp_path / "new" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    old, new = opened(source), formats.open_catalog(str(tmp_path / "new"))
    assert new.notes.origin == "megatron"
    assert old.names == new.names
    assert old.values == new.values


def test_state_of_optimizers_that_are_not_distributed_is_read_by_parameter() -> None:
    assert catalog_of("nodist", "legacy").names == catalog_of("tp2dp2", "legacy").names  # the same model


def test_random_numbers_are_kept_for_each_rank(run: Path) -> None:
    for number, file in enumerate(rank_files(run)):
        state = [{"torch_rng_state": torch.full((4,), number, dtype=torch.uint8)}]
        edit(file, lambda tree, held=state: tree.update(rng_state=held))  # type: ignore[misc]  # mypy can't infer a default's type
    catalog = opened(run)
    assert isinstance(catalog.values, dict)
    kept = catalog.values["rng"]
    assert isinstance(kept, RankLocal)
    assert [coords["tp"] for coords in kept.coords if coords] == [0, 1]
    assert [read(catalog, name).tolist() for name in catalog.names if name.startswith("rng/")] == [[0] * 4, [1] * 4]


# --- what is refused, by name ----------------------------------------------------------------------------------------


def test_missing_ranks_are_named(run: Path) -> None:
    shutil.rmtree(rank_files(run)[1].parent)
    with pytest.raises(MissingFileError, match="mp_rank_01"):
        opened(run)


def test_a_missing_expert_rank_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(folder("moeetp", "legacy"), tmp_path / "run")
    for file in rank_files(path):
        if file.parent.name.endswith("_001"):
            shutil.rmtree(file.parent)
    with pytest.raises(MissingFileError, match=r"mp_rank_\*_001"):
        opened(path)


def test_ranks_that_have_drifted_apart_are_refused(run: Path) -> None:
    edit(rank_files(run)[1], lambda tree: tree["model"]["decoder.final_layernorm.weight"].add_(1))
    with pytest.raises(FormatError, match=r"final_layernorm\.weight must be the same"):
        opened(run)


def test_tied_embeddings_that_differ_are_refused(tmp_path: Path) -> None:
    path = shutil.copytree(folder("tie", "legacy"), tmp_path / "run")
    edit(rank_files(path)[1], lambda tree: tree["model"]["output_layer.weight"].add_(1))
    with pytest.raises(FormatError, match="tied"):
        opened(path)


def test_a_wrong_number_of_layers_is_refused(run: Path) -> None:
    for file in rank_files(run):
        edit(file, lambda tree: setattr(tree["args"], "num_layers", 3))
    with pytest.raises(FormatError, match=r"2 layers.*3"):
        opened(run)


def test_a_parameter_that_no_rule_knows_is_refused_where_it_would_have_to_be_joined(run: Path) -> None:
    for file in rank_files(run):
        edit(file, lambda tree: tree["model"].update({"decoder.layers.0.mixer.in_proj.weight": torch.ones(4, 4)}))
    with pytest.raises(UnsupportedError, match=r"mixer\.in_proj\.weight"):
        opened(run)


def test_optimizer_state_of_another_model_is_refused(tmp_path: Path) -> None:
    path = shutil.copytree(folder("tp2dp2", "legacy"), tmp_path / "run")
    edit(rank_files(path)[0], lambda tree: tree["model"]["decoder.layers.1.mlp.linear_fc2.weight"].mul_(2))
    with pytest.raises(FormatError, match="master weights"):
        opened(path)


def test_the_second_number_of_a_folder_is_a_stage_or_an_expert_rank_by_what_is_in_it(tmp_path: Path) -> None:
    for which in ("tie", "singlemoe"):
        path = shutil.copytree(folder(which, "legacy"), tmp_path / which)
        for file in rank_files(path):
            edit(file, lambda tree: tree.pop("args"))
        assert_equal(weights(opened(path)), weights(catalog_of(which, "legacy")))


def test_a_tracker_that_leads_nowhere_is_an_error_that_names_both(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    with pytest.raises(MissingFileError, match=r"iter_0000020.*iter_0000010"):
        opened(run)
    (run / "latest_checkpointed_iteration.txt").unlink()
    shutil.copytree(run / ITERATION, run / "iter_0000020")
    with pytest.raises(NotACheckpointError, match="give one of these folders"):
        opened(run)


def test_other_backends_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(UnsupportedError, match="zarr"):
        opened(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("print('ran')",)


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt", "common.pt"])
def test_pickles_that_would_run_code_are_refused(file: str, tmp_path: Path) -> None:
    form = "fully_reshardable" if file == "common.pt" else "legacy"
    path = shutil.copytree(folder("tp2dp2", form), tmp_path / "run")
    target = next(path.rglob(file))
    torch.save({"model": {"w": Harmful()}}, target)
    with pytest.raises(UnsafePickleError):
        opened(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sharded_backend": 5}', "\xff", " " * 100_000])
def test_other_files_of_that_name_are_not_megatrons(text: str, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text(text, encoding="latin-1")
    assert not megatron.detect(locate(str(tmp_path)))


def test_a_single_file_is_not_megatrons(run: Path) -> None:
    assert not megatron.detect(locate(str(rank_files(run)[0])))


def test_a_run_whose_optimizer_files_are_gone_says_so(tmp_path: Path) -> None:
    path = shutil.copytree(folder("tp2dp2", "legacy"), tmp_path / "run")
    for file in path.rglob("distrib_optim.pt"):
        file.unlink()
    catalog = opened(path)
    assert not any(name.startswith("optimizer/") for name in catalog.names)
    assert any("no rank has a distrib_optim.pt" in remark for remark in catalog.notes.remarks)
