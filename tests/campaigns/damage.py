"""Flipped bits, torn writes, truncations, lost and foreign files: what is read is right, or there is an error."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.campaigns.samples import Sample, content_of
from ucformat import formats
from ucformat.errors import UcformatError
from ucformat.reshard.reading.lazy import Checkpoint

PAGE = 4096


def damaged(random: Random, data: bytes) -> bytes:
    """The data with one thing wrong, as disks, networks and interrupted writes leave it."""
    raw = bytearray(data)
    size = len(raw)
    if not size:
        return b"\0"
    kind = random.choice(["bit", "bit", "bit", "bits", "zeros", "noise", "cut", "page", "longer", "shifted", "empty"])
    at = random.randrange(size)
    if kind == "bit":
        raw[at] ^= 1 << random.randrange(8)
    elif kind == "bits":
        for _ in range(random.randrange(2, 20)):
            raw[random.randrange(size)] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        length = min(size - at, random.choice([1, 16, 512, PAGE]))
        raw[at : at + length] = bytes(length)
    elif kind == "noise":
        length = min(size - at, random.choice([1, 16, 512]))
        raw[at : at + length] = random.randbytes(length)
    elif kind == "cut":
        del raw[at:]
    elif kind == "page":
        start, other = (random.randrange(0, size, PAGE) for _ in range(2))
        page = raw[other : other + PAGE]
        raw[start : start + len(page)] = page
    elif kind == "longer":
        raw += random.randbytes(random.choice([1, 8, PAGE]))
    elif kind == "shifted":
        raw[at:at] = random.randbytes(random.choice([1, 8]))
    else:
        raw.clear()
    return bytes(raw)


class Damage:
    """A trial: damage one file of a sample, read everything."""

    def __init__(self, samples: dict[str, Sample], work: Path) -> None:
        self.samples, self.work = samples, work

    def __call__(self, random: Random) -> str:
        sample = self.samples[random.choice(sorted(self.samples))]
        name = random.choice(sorted(sample.files))
        files = dict(sample.files)
        if random.random() < 0.05:
            del files[name]
        elif random.random() < 0.05 and sample.kind in ("native", "dcp"):  # elsewhere nothing says which file is whose
            files[name] = sample.files[random.choice(sorted(files))]
        else:
            files[name] = damaged(random, files[name])
        if files == sample.files:
            return ""
        directory = Path(tempfile.mkdtemp(dir=self.work))
        try:
            where = Sample(sample.kind, sample.entry, files, {}, b"").write(directory)
            catalog = formats.open_catalog(where)
            tensors, _ = content_of(Checkpoint(catalog))
        except UcformatError:
            return ""
        finally:
            shutil.rmtree(directory)
        return compare(sample, tensors, name, catalog.notes.remarks)


def compare(
    sample: Sample, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], name: str, remarks: Sequence[str] = ()
) -> str:
    """ "" when what was read without an error is what was stored. Formats without checksums may differ only where they say so."""
    if sample.kind == "hf":
        return ""  # safetensors has no checksums: only that errors are typed can be asked for
    for key, (dtype, shape, data) in tensors.items():
        if key in sample.tensors and sample.tensors[key] != (dtype, shape, data):
            return f"wrong: {sample.kind}: {key} differs after damage to {name}"
    missing = sample.tensors.keys() - tensors.keys()
    words = [Path(name).name, *(key.partition("/")[2] for key in sorted(missing)[:3])]
    if any(word in remark for word in words for remark in remarks):
        return ""  # said, and strict loading refuses
    if name.endswith(".metadata"):
        return ""  # DCP's metadata has no checksum: what a flipped bit takes away there, strict loading says is missing
    return f"wrong: {sample.kind}: {sorted(missing)[:3]} are gone without a word after damage to {name}" if missing else ""
