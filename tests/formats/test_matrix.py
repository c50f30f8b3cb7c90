"""The table of docs/matrix.md says what conversions do: some pairs always, all of them with UCFORMAT_MATRIX=1 (a minute)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ucformat
from tests.cli.calls import Program
from tests.formats.deepspeed_fixtures import DATA
from tests.formats.matrix import RUNS, TABLE, Matrix, all_pairs, some_pairs, text_of
from ucformat import formats
from ucformat.errors import UnsupportedError


def test_the_table_says_what_becomes_of_some_pairs(tmp_path: Path) -> None:
    sections = dict(zip(RUNS, TABLE.read_text(encoding="utf-8").split("\n## ")[1:], strict=True))
    rows = list(Matrix(tmp_path).rows(some_pairs()))
    assert len(rows) == len(some_pairs())
    for row in rows:
        assert row.line() in sections[row.run].splitlines()


@pytest.mark.skipif("UCFORMAT_MATRIX" not in os.environ, reason="takes a minute: set UCFORMAT_MATRIX=1")
def test_the_table_is_what_is_generated(tmp_path: Path) -> None:
    assert TABLE.read_text(encoding="utf-8") == text_of(list(Matrix(tmp_path).rows(all_pairs())))


def test_what_has_no_place_is_named_and_dropped_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = "optimizer/emb.weight/mu_product"
    with pytest.raises(UnsupportedError, match=rf"{lost}.*--drop"):
        ucformat.convert(DATA / "z2nadam", tmp_path / "out", "ucp")
    assert not (tmp_path / "out").exists()
    without = ucformat.convert(DATA / "z2nadam", tmp_path / "without", "ucp", exclude=["optimizer/*/mu_product"])
    assert lost in without.left_out
    answer = Program(capsys)(DATA / "z2nadam", tmp_path / "out", "--to", "ucp", "--drop", "--json")
    assert answer.status == 0
    assert lost in answer.out
    assert lost not in formats.open_catalog(str(tmp_path / "out")).names
    ucformat.convert(DATA / "z2nadam", tmp_path / "native", "native")  # which holds everything
