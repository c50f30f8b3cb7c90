"""DeepSpeed's universal (UCP) folders, read.

Master weights and optimizer state are whole tensors in files of their own. Weights in the compute dtype, buffers and frozen
weights are in the model files, which DeepSpeed copies as they are: of tensor-parallel runs these hold shards.
"""

from __future__ import annotations

from ucformat.formats.contract import Reader
from ucformat.formats.deepspeed import BOOKKEEPING
from ucformat.formats.ucp.folder import detect
from ucformat.formats.ucp.reader import NAME, open_catalog

__all__ = ["READER"]

READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog, bookkeeping=BOOKKEEPING, has_masters=True)
