"""Every error is one line and exit status 1, wrong usage is 2, and help teaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calls import Program, spawn
from ucformat.cli.app import VERBS
from ucformat.errors import MissingFileError


def test_a_conversion_needs_no_verb(ucconvert: Program, src: Path, tmp_path: Path) -> None:
    assert ucconvert(src, tmp_path / "a", "--to", "native").status == 0
    assert ucconvert("convert", src, tmp_path / "b", "--to", "native").status == 0
    assert ucconvert("--to", "native", src, tmp_path / "c").status == 0
    assert all((tmp_path / name / "ucf.json").exists() for name in "abc")


@pytest.mark.parametrize("args", [["--help"], ["-h"], *([verb, "--help"] for verb in VERBS)])
def test_help_of_every_verb(ucconvert: Program, args: list[str]) -> None:
    answer = ucconvert(*args)
    assert answer.status == 0
    assert "Usage:" in answer.out


def test_help_teaches_by_examples(ucconvert: Program) -> None:
    out = ucconvert("--help").out
    assert "Examples" in out
    assert "--to hf" in out
    assert "torchrun" in out
    assert all(verb in out for verb in VERBS)


@pytest.mark.parametrize(
    "args",
    [
        ["a"],
        ["a", "b"],
        ["a", "b", "--to"],
        ["a", "b", "--to", "hf", "--nonsense"],
        ["diff", "a"],
        ["inspect", "a", "b"],
    ],
)
def test_wrong_usage_is_status_2(ucconvert: Program, args: list[str]) -> None:
    assert ucconvert(*args).status == 2


@pytest.mark.parametrize(
    "args", [["gone", "b", "--to", "hf"], ["inspect", "gone"], ["verify", "gone"], ["diff", "gone", "gone"], ["reindex", "gone"]]
)
def test_an_error_is_one_typed_line_and_status_1(ucconvert: Program, args: list[str]) -> None:
    answer = ucconvert(*args)
    assert answer.status == 1
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("error: gone: ")
    assert "[MissingFileError]" in answer.err


def test_debug_anywhere_shows_the_traceback(ucconvert: Program) -> None:
    for args in (["--debug", "inspect", "gone"], ["inspect", "gone", "--debug"]):
        with pytest.raises(MissingFileError):
            ucconvert(*args)


def test_an_unexpected_error_has_no_traceback_either(ucconvert: Program, src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("ucformat.formats.open_named", broken)
    answer = ucconvert("inspect", src)
    assert answer.status == 1
    assert answer.err.startswith("error: RuntimeError: two lines (unexpected")


def test_it_runs_as_a_module_and_reports_errors_without_a_traceback(src: Path) -> None:
    assert spawn("--version").out.startswith("ucformat")
    answer = spawn("inspect", src.parent / "gone")
    assert answer.status == 1
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") == 1
    assert "Traceback" in spawn("inspect", src.parent / "gone", "--debug").err
