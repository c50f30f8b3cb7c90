"""`ucconvert validate`: what ucformat writes is valid, and every attack of the conformance kit is named by clause and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ucformat
from specs import run_conformance as kit
from ucformat.cli.app import run
from ucformat.errors import NotACheckpointError
from ucformat.formats.native.validate import validate
from ucformat.storage.open import open_store

ATTACKS = [attack for attack in kit.attacks() if attack["base"] != "snapshot"]


def test_golden_checkpoints_are_valid() -> None:
    for folder in sorted(kit.GOLDEN.glob("*/checkpoint")):
        if not any(folder.glob("rank-*")) or (folder / "ucf.json").exists():
            assert validate(open_store(str(folder))).violations == (), folder.parent.name


def test_what_ucformat_writes_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        state = {"w": torch.ones(700, 3), "n": torch.arange(5), "e": torch.empty(0), "b": torch.ones(3, dtype=torch.bfloat16)}
        ucformat.save(tmp_path, {**state, "x": {"lr": 0.1}}, step=step)
    assert run(["validate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "valid: 2 checkpoints\n"


def test_every_attack_is_named_by_clause_and_file(tmp_path: Path) -> None:
    wrong = []
    for attack in ATTACKS:
        folder = tmp_path / attack["name"]
        kit.materialise(attack, folder)
        if attack["clause"] == "file.commit":
            with pytest.raises(NotACheckpointError):
                validate(open_store(str(folder)))
            continue
        found = validate(open_store(str(folder))).violations
        clauses = {attack["clause"]} if attack["clause"] != "run.no-fallback" else {"envelope.digest", "file.missing"}
        place = "" if attack["clause"] in {"rebuild.agree", "rebuild.tile"} else attack["file"]
        if not any(one.clause in clauses and place in one.file for one in found):
            wrong.append((attack["name"], attack["about"], [str(one).removeprefix(str(folder)) for one in found]))
    assert wrong == []


def test_all_violations_are_listed_with_their_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ucformat.save(tmp_path, {"w": torch.arange(200_000), "x": torch.ones(3)})
    (shard,) = tmp_path.glob("shards.*/0*")
    with shard.open("r+b") as file:
        for at in (5000, 300_000, 1_000_000):
            file.seek(at)
            file.write(b"\xff\xfe\xfd")
    assert run(["validate", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["violations"]
    assert [
        (one["clause"], one["start"] <= at < one["stop"]) for one, at in zip(found, (5000, 300_000, 1_000_000), strict=True)
    ] == [("block.digest", True)] * 3
