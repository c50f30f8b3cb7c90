"""Formats of other packages: one file is enough, a broken one costs nothing, two that recognise the same are named."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ucformat
from tests.packages import PAGE, files_of_page, install, install_page
from ucformat import formats
from ucformat.cli.app import run
from ucformat.errors import AmbiguousFormatError, NotACheckpointError, UnsupportedError
from ucformat.formats import registry

HEAD = "from ucformat.formats import Reader, Writer\nfrom ucformat.formats import hf\n"


@pytest.fixture(autouse=True)
def _registry_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registry.registered.cache_clear()
    yield
    monkeypatch.undo()
    registry.registered.cache_clear()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of the format of docs/extending.md, which is installed."""
    (tmp_path / "site").mkdir()
    install_page(PAGE, tmp_path / "site", monkeypatch)
    w = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    torch.save({"model": {"w": w, "tied": w}, "step": 3, "data": (1, {2: None})}, tmp_path / "src.pt")
    ucformat.convert(tmp_path / "src.pt", tmp_path / "toy", to="toy")
    return tmp_path / "toy"


def test_a_reader_in_one_file_of_sixty_lines_works_in_every_verb(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = files_of_page(PAGE.read_text())["toy_format.py"]
    reader = source.split("def write(")[0] + source[source.index("READER = ") : source.index("WRITER = ")]
    assert len(reader.splitlines()) <= 60
    assert ucformat.open(toy)["model/w"][1:].tolist() == [[3, 4, 5]]
    state = {"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}}
    report = ucformat.load(toy, into=state, allow_unexpected=["step", "data", "model/tied"])
    assert report.format == "toy"
    assert state["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ucformat.load(toy)["data"] == (1, {2: None})
    assert ucformat.diff(toy, tmp_path / "src.pt").equal
    assert ucformat.verify(toy).ok
    ucformat.convert(toy, tmp_path / "native", to="native")
    assert ucformat.diff(toy, tmp_path / "native").equal
    assert run(["inspect", str(toy)]) == 0
    assert "toy, 1 tensor" in capsys.readouterr().out
    assert run([str(toy), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert formats.open_named(str(tmp_path / "hf"))[0] == "hf"


def test_what_is_broken_in_one_package_is_a_warning_and_costs_no_other_format(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    install(broken, monkeypatch, "no-import", "no_import", "import a_module_that_is_not_there")
    install(broken, monkeypatch, "empty", "empty_module", "")
    install(broken, monkeypatch, "wrong", "wrong_module", "READER = 3")
    install(broken, monkeypatch, "exits", "exits_module", "raise RuntimeError('at import')")
    install(broken, monkeypatch, "twice", "twice_module", HEAD + "READER = hf.READER")
    install(
        broken,
        monkeypatch,
        "raises",
        "raises_module",
        HEAD + "READER = Reader(name='raises', detect=lambda source: 1 / 0, open_catalog=None)",
    )
    with caplog.at_level(logging.WARNING, "ucformat"):
        assert sorted(ucformat.open(toy)) == ["model/tied", "model/w"]
    for name in ("no-import", "empty", "wrong", "exits", "twice"):
        assert sum(f"entry point {name!r} of {name} 1.0: skipped" in text for text in caplog.messages) == 1, caplog.text
    assert any("the reader 'raises' failed: ZeroDivisionError" in text for text in caplog.messages)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "x").write_text("x")
    with pytest.raises(NotACheckpointError, match="the reader 'raises' failed"):
        ucformat.resume(tmp_path / "foreign", into={"w": torch.zeros(1)})  # it might have been what that reader reads


def test_what_two_packages_recognise_is_an_error_that_names_both(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    same = HEAD + "import toy_format\nfrom dataclasses import replace\nREADER = replace(toy_format.READER, name='other'"
    install(other, monkeypatch, "other", "other_module", same + ")")
    with pytest.raises(AmbiguousFormatError, match="toy") as caught:
        ucformat.open(toy)
    assert sorted(caught.value.formats) == ["other", "toy"]
    with pytest.raises(AmbiguousFormatError):
        ucformat.resume(toy, into={"w": torch.zeros(1)})
    (other / "other_module.py").write_text(same + ", precedes=frozenset({'toy'}))")
    monkeypatch.delitem(sys.modules, "other_module")
    importlib.invalidate_caches()
    registry.registered.cache_clear()
    assert formats.open_named(str(toy))[0] == "other"


def test_a_format_that_can_not_be_written_is_refused_with_those_that_can(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"choose from native, hf, dcp, torchsave, .*toy"):
        ucformat.convert(toy, tmp_path / "out", to="snapshot")


def test_every_format_of_ours_is_complete() -> None:
    names = [reader.name for reader in registry.own_readers()]
    assert names == registry.known_names()
    for name in registry.writer_names():
        assert registry.writer(name).name == name
        reader = registry.reader(name)
        assert reader is not None
        assert (reader.owned_files is None) == registry.writer(name).single_file, "what can be written can be replaced"
