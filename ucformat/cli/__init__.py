"""`ucconvert`: the command line. One module per verb, which calls `reshard` and prints the result.

`python -m ucformat.cli` is the same program, also under `torchrun`.
"""

from ucformat.cli.app import main

__all__ = ["main"]
