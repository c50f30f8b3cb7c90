"""Packages that register formats, installed into a directory as pip leaves them; and the one of docs/extending.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ucformat.formats import registry

PAGE = Path(__file__).parents[1] / "docs/extending.md"
_FILE = re.compile(r"^```python file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_POINTS = re.compile(rf'^\[project.entry-points."{re.escape(registry.GROUP)}"\]\n((?:\S+ = "\S+"\n)+)', re.MULTILINE)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, source: str) -> None:
    """A package with one module, and an entry point `name` that leads to it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    registry.registered.cache_clear()


def files_of_page(text: str) -> dict[str, str]:
    """Name → source of the files that a page shows."""
    return dict(_FILE.findall(text))


def entry_points_of_page(text: str) -> dict[str, str]:
    """Entry point → module, as the page's pyproject.toml registers them."""
    lines = "".join(_POINTS.findall(text))
    return dict(re.findall(r'(\S+) = "(\S+)"', lines))


def install_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install what a page shows and registers, with the tests that it shows."""
    text = page.read_text()
    files = files_of_page(text)
    for name in files:
        if name.startswith("test_"):
            (folder / name).write_text(files[name])
    for name, module in entry_points_of_page(text).items():
        install(folder, monkeypatch, name, module, files[f"{module}.py"])
