"""What a layout file may say, and what is wrong with others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from ucformat.errors import LayoutError
from ucformat.layout import filenames
from ucformat.layout.language import Layout, read
from ucformat.layout.rules import RuleBook

ROOT = Path(__file__).parents[2] / "specs"
SCHEMA = json.loads((ROOT / "layout.schema.json").read_text())


def layout(**fields: Any) -> str:
    return json.dumps({"layout": 1, "mesh": {"pp": 2, "tp": 2}, **fields})


def test_the_example_of_the_specification_is_a_layout(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "layout.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    declared = read(tmp_path / "mine.yaml")
    assert declared.layout.ranks == 8
    (tmp_path / "mine.json").write_bytes(msgspec.json.encode(declared.layout))
    assert read(tmp_path / "mine.json").layout == declared.layout
    jsonschema.validate(yaml.safe_load(example), SCHEMA)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ("{}", "missing required field"),
        (layout(meshes=1), "unknown field"),
        (json.dumps({"layout": 2, "mesh": {"tp": 1}}), "layout"),
        (json.dumps({"layout": 1, "mesh": {}}), "there must be an axis"),
        (json.dumps({"layout": 1, "mesh": {"tp": 0}}), ">= 1"),
        (json.dumps({"layout": 1, "mesh": {"tp": 10**5, "dp": 10**5}}), "at most"),
        (layout(rules=[{"match": "w", "shard": {"ep": 0}}]), "rule 'w': the mesh has no axis 'ep'"),
        (layout(rules=[{"match": "w", "shard": {"tp": 0}, "average": ["tp"]}]), "two things of axis 'tp'"),
        (layout(rules=[{"match": "w", "parts": 2}]), "'parts' needs 'shard'"),
        (layout(rules=[{"match": "w", "shard": {"tp": 0}, "parts": [-1, -1]}]), "more than once"),
        (layout(rules=[{"match": "w", "held_by": {"tp": 0}}]), "'tp' is none"),
        (layout(rules=[{"match": "w", "held_by": {"pp": 2}}]), "coordinates 0 to 1"),
        (layout(rules=[{"match": ""}]), "an empty pattern"),
        (layout(rules=[{"match": "w", "unstack": {"dim": 0, "names": "x"}}]), "one {i}"),
        (layout(files="r{ep}.pt"), "no axis 'ep'"),
        (layout(files="../r{tp}.pt"), "inside the folder"),
        (layout(files="r{tp!r}.pt"), "a field is"),
        (layout(numbering=[{"prefix": "layers", "axis": "pp", "counts": [1]}]), "1 counts for 2"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(why)):
        read(text)


def test_yaml_that_would_grow_without_end_or_build_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for text, why in (
        ("a: &a [1]\nb: *a\n", "aliases"),
        ("a: !!python/object/apply:os.system [x]\n", "malformed"),
        ("[", "malformed"),
    ):
        file.write_text(text)
        with pytest.raises(LayoutError, match=why):
            read(file)


def test_a_rule_that_matches_nothing_and_two_that_match_one_tensor_are_named() -> None:
    book = RuleBook(read(layout(rules=[{"match": "w*"}, {"match": ["*1", "b"]}, {"match": "optimizer/w1/row"}])))
    assert book.rule("model/w2") is book.layout.rules[0]
    assert book.rule("optimizer/w2/exp_avg") is book.layout.rules[0]
    assert book.rule("optimizer/w1/row") is book.layout.rules[2]
    assert book.rule("model/other") is None
    with pytest.raises(LayoutError, match=r"rules 'w\*' and '\*1' all match tensor 'model/w1'"):
        book.rule("model/w1")
    with pytest.raises(LayoutError, match="rule 'b' matches no tensor of runs/a"):
        book.check_used("runs/a")


def test_file_names_follow_coordinates_and_ranks() -> None:
    mesh = {"pp": 2, "tp": 2}
    assert [name for _, name in filenames.files("a/{tp:02d}_{pp}.pt", mesh)] == [
        "a/00_0.pt",
        "a/01_0.pt",
        "a/00_1.pt",
        "a/01_1.pt",
    ]
    assert list(filenames.files("r{rank}", mesh))[2] == ({"pp": 1, "tp": 0}, "r2")
    assert [at for at, _ in filenames.files("t{tp}", mesh)] == [{"tp": 0}, {"tp": 1}]
    assert filenames.matcher("t{tp:02d}.pt").fullmatch("t17.pt")
    assert not filenames.matcher("t{tp:02d}.pt").fullmatch("t17xpt")


def test_the_types_and_the_schema_agree() -> None:
    tree = json.loads(
        layout(
            rules=[{"match": ["w"], "shard": {"tp": 0}, "parts": [4, [1, 1], -1]}], files=["a{tp}", {"path": "b", "at": "model"}]
        )
    )
    jsonschema.validate(tree, SCHEMA)
    assert msgspec.convert(tree, Layout).rank_files[1].at == "model"
