"""Which formats hold what: every pair, there and back again, as a table. `python -m tests.formats.matrix` writes docs/matrix.md.

A run of DeepSpeed and one of Megatron, as these wrote them, are brought into every format that can be written. From each they go
into every other, and back; then what came back is compared with what set out, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ucformat
from tests.formats.deepspeed_fixtures import DATA
from tests.formats.megatron_fixtures import folder
from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.reshard.reading.lazy import read_many

TABLE = Path(__file__).parents[2] / "docs" / "matrix.md"
FORMATS = ("native", "dcp", "ucp", "deepspeed", "megatron", "megatron-legacy")
WRITTEN = FORMATS[:-1]
TITLES = {
    "native": "native",
    "dcp": "DCP",
    "ucp": "UCP",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron torch_dist",
    "megatron-legacy": "Megatron legacy",
}
RUNS = {
    "z2two": "a DeepSpeed run: ZeRO-2 in fp32 on 3 ranks, two param groups, a buffer",
    "z2nadam": "a DeepSpeed run: ZeRO-2 with NAdam, whose state has one number for each parameter besides",
    "tp2dp2": "a Megatron run: 2 tensor × 2 data ranks, bf16 with the distributed optimizer",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one run on its way from a format into another and back."""

    run: str
    source: str
    target: str
    weights: str
    optimizer: str
    values: str
    dropped: str

    def line(self) -> str:
        ends = f"{TITLES[self.source]} → {TITLES[self.target]}"
        return f"| {ends} | {self.weights} | {self.optimizer} | {self.values} | {self.dropped} |"


def own(run: str, form: str) -> Path | None:
    """What the framework itself wrote of a run in a format."""
    if run == "tp2dp2":
        forms = {"megatron": "dp_reshardable", "megatron-legacy": "legacy"}
        return folder(run, forms[form]) if form in forms else None
    return DATA / run if form == "deepspeed" else None


class Matrix:
    """Rows of the table; intermediate checkpoints are made once, in `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def sources(self, run: str) -> list[str]:
        """Formats that a run can be had in."""
        return [form for form in FORMATS if self.source(run, form) is not None]

    def source(self, run: str, form: str) -> Path | None:
        """A run in a format, converted from what its framework wrote where need be; None where the format can't hold it."""
        made = own(run, form)
        if made is not None or form not in WRITTEN:
            return made
        path = self._scratch / f"{run}-{form}"
        if not path.exists():
            first = own(run, "megatron-legacy" if run == "tp2dp2" else "deepspeed")
            assert first is not None
            try:
                ucformat.convert(first, path, form, drop=True)
            except UnsupportedError:
                return None
        return path

    def row(self, run: str, source: str, target: str) -> Row | None:
        """One pair, or None where the run can't be had in the source's format."""
        start = self.source(run, source)
        if start is None:
            return None
        over, back = (self._scratch / f"{run}-{source}-{target}{end}" for end in ("", "-back"))
        try:
            dropped = convert(start, over, target)
        except UnsupportedError as error:
            return Row(run, source, target, "refused", "refused", "refused", reason(error))
        convert(over, back, source if source in WRITTEN else "native")
        one, other = (formats.open_catalog(str(path)) for path in (start, back))
        return Row(
            run,
            source,
            target,
            kept(one, other, "model/"),
            kept(one, other, "optimizer/"),
            kept_values(one, other),
            dropped,
        )

    def rows(self, pairs: Iterable[tuple[str, str, str]]) -> Iterator[Row]:
        for run, source, target in pairs:
            row = self.row(run, source, target)
            if row is not None:
                yield row


def convert(source: Path, target: Path, form: str) -> str:
    """Convert; what had to be dropped."""
    try:
        ucformat.convert(source, target, form)
    except UnsupportedError as error:
        if "--drop" not in str(error):
            raise
        report = ucformat.convert(source, target, form, drop=True)
        kinds = {name.split("/")[-1] for name in report.left_out}
        return f"with `--drop`: {len(report.left_out)} × {', '.join(sorted(kinds))}"
    return ""


def reason(error: UnsupportedError) -> str:
    return str(error).partition(": ")[2].partition(":")[0]


def tensors(catalog: Catalog, top: str) -> dict[str, torch.Tensor]:
    names = [name for name in catalog.names if name.startswith(top)]
    return dict(zip(names, read_many(catalog, [(name, None) for name in names]), strict=True))


def kept(one: Catalog, other: Catalog, top: str) -> str:
    """How much of what set out came back, bit for bit."""
    expected, found = tensors(one, top), tensors(other, top)
    if not expected:
        return "none"
    same = [name for name, tensor in expected.items() if name in found and equal(tensor, found[name])]
    text = "all" if len(same) == len(expected) else f"{len(same)} of {len(expected)}"
    more = set(found) - set(expected)
    return f"{text}, and {len(more)} more" if more else text


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def kept_values(one: Catalog, other: Catalog) -> str:
    """Which values came back changed or not at all."""
    before, after = (without_order(c.values) if isinstance(c.values, dict) else {} for c in (one, other))
    odd = [str(key) for key in before if key not in after or not alike(before[key], after[key])]
    return "all" if not odd else f"but {', '.join(f'`{key}`' for key in sorted(odd))}"


def without_order(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values with parameters of a group sorted: torch_dist does not keep their order, and nothing depends on it."""
    held = values.get("optimizer")
    groups = held.get("param_groups") if isinstance(held, dict) else None
    if not isinstance(held, dict) or not isinstance(groups, list):
        return values
    return {**values, "optimizer": {**held, "param_groups": [{**g, "params": sorted(g["params"])} for g in groups]}}


def alike(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RuntimeError:  # tensors in containers
        return False


def all_pairs() -> list[tuple[str, str, str]]:
    return [(run, a, b) for run in RUNS for a in FORMATS for b in WRITTEN if a != b]


def some_pairs() -> list[tuple[str, str, str]]:
    """Every format once as the source and once as the target, of one run each, and a pair that loses something."""
    around = [("tp2dp2", a, b) for a, b in zip(FORMATS, (*FORMATS[1:-1], "dcp", "native"), strict=True)]
    return [*around, ("z2two", "deepspeed", "ucp"), ("z2two", "ucp", "native"), ("z2nadam", "deepspeed", "ucp")]


def text_of(rows: Sequence[Row]) -> str:
    """The page."""
    parts = [HEAD]
    for run, title in RUNS.items():
        lines = [row.line() for row in rows if row.run == run]
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{COLUMNS}\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


COLUMNS = "| there and back | weights | optimizer state | values | remarks |\n|---|---|---|---|---|"
HEAD = """# What goes over between formats of training state

Generated by `python -m tests.formats.matrix`, and compared with what it generates by the tests: do not edit.

Each line is a checkpoint that was converted from the first format into the second and back into the first (what was in Megatron's
legacy form, which is read only, back into native), and compared with what set out: "all" means every tensor, bit for bit, in its
dtype. Values are what is no tensor: hyper-parameters, steps, schedulers, arguments, records of the framework. Those named did not
come back as they were: records of DeepSpeed and Megatron on how a run was laid out, of which another run has others. Conversions
report what was left out. Weights or optimizer state without a place in the target are an error that names them; `--drop` leaves
them out.
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        TABLE.write_text(text_of(list(Matrix(Path(scratch)).rows(all_pairs()))), encoding="utf-8")


if __name__ == "__main__":
    main()
