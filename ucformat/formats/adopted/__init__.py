"""Foreign checkpoints adopted in place: `ucf.json` and an index beside files that another program wrote.

No tensor is copied: the index says which box of which tensor lies where in the foreign files, as their reader found out once. So
a run of thousands of files opens as fast as a native checkpoint. The record says what each file was like; one that has changed
since is an error. specs/format.md, section 8, is the normative text.
"""

from ucformat.formats.adopted.reader import detect, open_catalog
from ucformat.formats.adopted.record import NAME
from ucformat.formats.contract import Reader

__all__ = ["READER"]

READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog)
