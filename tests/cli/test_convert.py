"""`ucconvert SRC DST --to FORMAT` says what it did, or would do, and under torchrun does it together."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import typer

from tests.checkpoints import write_native
from tests.cli.calls import Program, spawn
from ucformat.cli.screen import bytes_text, parse_size


def test_it_says_what_was_written_and_what_was_left_out(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    answer = ucconvert(src, tmp_path / "out", "--to", "hf")
    assert answer.status == 0
    assert answer.out.startswith("native → hf: 3 tensors, 208 B in ")
    assert "note: left out: optimizer/norm/exp_avg\n" in answer.err
    assert "note: values left out: args, step\n" in answer.err


def test_the_report_is_there_as_json(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    report = json.loads(ucconvert(src, tmp_path / "out", "--to", "hf", "--json").out)
    assert (report["tensors"], report["written_bytes"]) == (3, 208)
    assert report["left_out"] == ["optimizer/norm/exp_avg"]


def test_a_dry_run_tells_reads_and_writes_and_writes_nothing(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    answer = ucconvert(src, tmp_path / "out", "--to", "hf", "--max-file-size", "100B", "--dry-run")
    assert "would read 208 B from 2 files" in answer.out
    assert "would write 3 tensors, 208 B, in 3 files as hf" in answer.out
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    plan = json.loads(ucconvert(src, tmp_path / "out", "--to", "native", "--dry-run", "--json").out)
    assert plan["read_bytes"] == plan["written_bytes"] == sum(plan["writes"]) == 224
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_options_reach_the_conversion(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    assert (
        ucconvert(src, tmp_path / "a", "--to", "native", "--dtype", "bf16", "--select", "model/*", "--exclude", "*norm").status
        == 0
    )
    rows = json.loads(ucconvert("inspect", tmp_path / "a", "--json").out)["tensors"]
    assert [(row["name"], row["dtype"]) for row in rows] == [
        ("model/layers.0.w", "BF16"),
        ("model/layers.1.w", "BF16"),
        ("model/tied", "BF16"),
    ]
    assert ucconvert(src, tmp_path / "a", "--to", "native").status == 1
    assert ucconvert(src, tmp_path / "a", "--to", "native", "--overwrite").status == 0


def test_a_layout_is_given_as_text_or_as_a_file(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_text('{"mesh": {"tp": 2}, "rules": [{"match": "*.w", "tp": 1}]}')
    for number, layout in enumerate(["tp=3", str(tmp_path / "rules.json")]):
        assert ucconvert(src, tmp_path / f"{number}", "--to", "native", "--layout", layout).status == 0
    document = json.loads(ucconvert("inspect", tmp_path / "0", "--json").out)
    assert (len(document["files"]), document["mesh"]) == (3, {"tp": 3})
    document = json.loads(ucconvert("inspect", tmp_path / "1", "--json", "--fragments").out)
    assert [box["length"] for box in document["tensors"][0]["boxes"]] == [[6, 2], [6, 2]]
    answer = ucconvert(src, tmp_path / "2", "--to", "native", "--layout", "tp=x")
    assert answer.status == 1
    assert "[LayoutError]" in answer.err


@pytest.mark.parametrize("to", ["hf", "native"])
def test_ranks_share_the_work(src: Path, tmp_path: Path, ucconvert: Program, to: str) -> None:
    answer = spawn(src, tmp_path / "out", "--to", to, "--max-file-size", "100B", "--select", "model", ranks=2)
    assert answer.status == 0, answer.err
    assert answer.out.count("→") == 1
    assert "208 B in" in answer.out
    assert ucconvert("diff", src, tmp_path / "out", "--select", "model").status == 0


def test_an_error_on_all_ranks_is_told_once(src: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("x")
    answer = spawn(src, tmp_path / "used", "--to", "hf", ranks=2)
    assert answer.status == 1
    assert answer.err.count("[ExistsError]") == 1


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("500MB", 500_000_000), ("4GiB", 4 << 30), ("1.5 kB", 1500), ("2g", 2_000_000_000)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1XB", "1e3", "0.1"])
def test_what_is_no_size_is_wrong_usage(text: str, ucconvert: Program) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(text)
    assert ucconvert("a", "b", "--to", "hf", f"--max-file-size={text}").status == 2


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_234_567, "1.23 MB"), (10**18, "1e+03 PB")]
)
def test_sizes_are_told_in_three_digits(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_objects_of_unknown_classes_that_are_left_out_are_shown(ucconvert: Program, tmp_path: Path, how: list[str]) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": {"unknown": Fraction(1, 2)}}, tmp_path / "a.pt")
    answer = ucconvert(tmp_path / "a.pt", tmp_path / "out", "--to", "dcp", *how)
    assert answer.status == 0
    assert "note: left out, dcp has no place for objects of unknown classes: args/unknown (fractions.Fraction)\n" in answer.err
    answer = ucconvert(tmp_path / "a.pt", tmp_path / "again", "--to", "dcp", "--json", *how)
    assert json.loads(answer.out)["values_left_out"] == ["args/unknown (fractions.Fraction)"]


INTERRUPTED = """
import os, sys, time
from ucformat.containers import file_image
from ucformat.cli.app import run
from ucformat.reshard import convert
file_image.CHUNK_BYTES = 1 << 20
fill = convert.CatalogFill.__call__
def slow(self, parts):
    os.write(1, b"filling\\n")
    time.sleep(1.0)
    fill(self, parts)
convert.CatalogFill.__call__ = slow
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_an_interrupt_stops_at_once_and_leaves_nothing(tmp_path: Path, to: str) -> None:
    write_native(tmp_path / "src", {"model/w": torch.zeros(10 << 20)})
    args = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "src"), str(tmp_path / "out"), "--to", to]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "filling\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (130, "interrupted\n")
    assert out.count("filling") < (20 if to in ("native", "hf") else 5), "most of the 40 chunks, or 5 larger ones, were not begun"
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_places_that_can_not_be_are_refused(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/photo.jpg").write_bytes(b"jpg")
    (tmp_path / "link").symlink_to(src)
    run = tmp_path / "run"
    assert ucconvert(src, run / "step-00000001", "--to", "native").status == 0
    cases: list[tuple[Path | str, str, str]] = [
        (src, "dcp", "source and destination are the same"),
        (tmp_path / "link", "dcp", "source and destination are the same"),
        (src / "inner", "dcp", "lies inside the source"),
        (tmp_path, "dcp", "the source .* lies inside it"),
        (tmp_path / "dir", "torchsave", "is a directory"),
        (tmp_path / "dir/photo.jpg", "torchsave", "no checkpoint: it is not replaced"),
        (tmp_path / "dir/photo.jpg", "hf", "a file is in the way"),
        (run, "hf", "holds a run's checkpoints"),
        ("", "native", "an empty path"),
    ]
    for place, to, why in cases:
        answer = ucconvert(src, place, "--to", to, "--overwrite")
        assert answer.status == 1, answer.out
        assert re.fullmatch(rf"error: .*{why}.*\[\w+\]\n", answer.err), answer.err
    assert (tmp_path / "dir/photo.jpg").read_bytes() == b"jpg"
    assert ucconvert("verify", run).status == 0
    assert ucconvert("inspect", "").err == "error: an empty path: names nothing [MissingFileError]\n"
