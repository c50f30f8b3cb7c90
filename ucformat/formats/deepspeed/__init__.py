"""DeepSpeed checkpoints, read and written (see `writer`).

Read: ZeRO-0, 1, 2, 3 and BF16_Optimizer, with pipeline, tensor and expert parallelism. Fragments point into DeepSpeed's own
files. `model/<name>` is the weight in the compute dtype, `optimizer/<name>/fp32` the master weight; where the files hold only
one of them (ZeRO-3, ZeRO-0 in fp32), the other is its alias. Each model-parallel rank's files are read as a catalog of their
own (`shards`), and those are put together (`join`). What reads them
(`reader`) is imported once a checkpoint is one of these: every conversion asks whether it is.
"""

from __future__ import annotations

from ucformat.catalog import Catalog
from ucformat.formats import tagged, training_files
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.deepspeed import files as found_files
from ucformat.formats.deepspeed import writer
from ucformat.formats.deepspeed.run_state import takes
from ucformat.formats.source import Source

NAME = writer.NAME

BOOKKEEPING = frozenset({"deepspeed", "client", "args", "step"}) | training_files.BOOKKEEPING
"""The step is in the notes, too; schedulers and data samplers are state that goes on."""

detect = found_files.detect


def open_catalog(source: Source) -> Catalog:
    """As `reader.open_catalog`."""
    from ucformat.formats.deepspeed.reader import open_catalog as opened

    return opened(source)


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    bookkeeping=BOOKKEEPING,
    has_masters=True,
    owned_files=tagged.owned_files(NAME, writer.POINTER),
)
WRITER = Writer(
    name=NAME,
    write=writer.write,
    takes=takes,
    whole_state=True,
    staged=True,
    options=writer.OPTIONS,
    prepare=writer.prepare,
    file_sizes=writer.file_sizes,
)
