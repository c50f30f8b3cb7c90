"""What the process has imported from which ranks and scripts of tests are forked (see `tests.scripts.forked`).

It does nothing with any of it: threads of torch would not survive the fork.
"""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import ucformat.api
import ucformat.cli.app
import ucformat.formats.dcp
import ucformat.formats.hf
import ucformat.formats.native
import ucformat.formats.torchsave
import ucformat.snapshot.snapshotter  # noqa: F401
