"""DeepSpeed's universal (UCP) folders, read and written.

Master weights and optimizer state are whole tensors in files of their own. Weights in the compute dtype, buffers and frozen
weights are in the model files, which DeepSpeed copies as they are: of tensor-parallel runs these hold shards.
"""

from __future__ import annotations

from ucformat.formats import tagged
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.deepspeed import BOOKKEEPING
from ucformat.formats.deepspeed.run_state import takes
from ucformat.formats.ucp.folder import NAME, POINTER, detect
from ucformat.formats.ucp.reader import open_catalog
from ucformat.formats.ucp.writer import file_sizes, prepare, write

__all__ = ["READER", "WRITER"]

READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    bookkeeping=BOOKKEEPING,
    has_masters=True,
    owned_files=tagged.owned_files(NAME, POINTER),
)
WRITER = Writer(name=NAME, write=write, takes=takes, whole_state=True, staged=True, prepare=prepare, file_sizes=file_sizes)
