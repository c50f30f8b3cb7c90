"""`ucconvert`: the command line. One module per verb; what a verb does lives in `reshard`, here it is only told.

`python -m ucformat.cli` is the same program, also under `torchrun`.
"""

from ucformat.cli.app import main

__all__ = ["main"]
