"""ucformat: checkpoints that load onto any layout, and a converter between formats.

ucformat.save("runs/a", state, step=100, keep=3)     # every rank calls; committed or absent
report = ucformat.load("runs/a", into=state)         # newest committed step, onto the layout `state` has now
report = ucformat.resume("runs/a", into=state)       # the same, or None when there is nothing yet
ucformat.open("runs/a")["model/wte.weight"][0:8]     # reads just these bytes
ucformat.convert("runs/a", "out", to="hf")
ucformat.inspect("runs/a").tensors                   # what is in it, without reading any tensor
snap = ucformat.Snapshotter(state, directory="/dev/shm/run")   # keeps every step in memory, see docs/snapshots.md
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ucformat import errors
from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from ucformat.api import convert, index, load, prune, resume, save
    from ucformat.formats.adopted.write import AdoptReport
    from ucformat.look import diff, fingerprint, inspect, latest, open, steps, verify  # noqa: A004  # the verb that users expect
    from ucformat.reshard.convert import ConvertReport
    from ucformat.reshard.diff import Diff, Difference
    from ucformat.reshard.fingerprint import Fingerprint
    from ucformat.reshard.inspect import FileInfo, FragmentInfo, Inspection, TensorInfo
    from ucformat.reshard.load import LoadReport
    from ucformat.reshard.pending import PendingSave
    from ucformat.reshard.prune import Leftover
    from ucformat.reshard.reading.lazy import Checkpoint, LazyTensor
    from ucformat.reshard.selection.mesh_layout import MeshLayout
    from ucformat.reshard.state.hf_names import hf_state
    from ucformat.reshard.state.markers import FlatShard, RankLocalItem, Shard, rank_local
    from ucformat.reshard.verify import Damage, Verification
    from ucformat.snapshot.keeper.handoff import Persist
    from ucformat.snapshot.report import SnapshotReport, StepReport
    from ucformat.snapshot.restore import Restored
    from ucformat.snapshot.snapshotter import Snapshotter
    from ucformat.values.codec import Opaque, RankLocal
    from ucformat.zarr.store import zarr_store

__all__ = [
    "save",
    "load",
    "resume",
    "open",
    "convert",
    "index",
    "steps",
    "prune",
    "latest",
    "verify",
    "diff",
    "fingerprint",
    "inspect",
    "AdoptReport",
    "PendingSave",
    "LoadReport",
    "ConvertReport",
    "MeshLayout",
    "Verification",
    "Damage",
    "Diff",
    "Difference",
    "Fingerprint",
    "Inspection",
    "TensorInfo",
    "FragmentInfo",
    "FileInfo",
    "Leftover",
    "hf_state",
    "Shard",
    "FlatShard",
    "rank_local",
    "RankLocalItem",
    "RankLocal",
    "Opaque",
    "Checkpoint",
    "LazyTensor",
    "Snapshotter",
    "Persist",
    "Restored",
    "SnapshotReport",
    "StepReport",
    "zarr_store",
    "UcformatError",
    "errors",
]
__version__ = "0.1.0"
_HOMES = {
    **dict.fromkeys(("convert", "index", "load", "prune", "resume", "save"), "api"),
    **dict.fromkeys(("diff", "fingerprint", "inspect", "latest", "open", "steps", "verify"), "look"),
    "AdoptReport": "formats.adopted.write",
    "PendingSave": "reshard.pending",
    "LoadReport": "reshard.load",
    "ConvertReport": "reshard.convert",
    **dict.fromkeys(("Damage", "Verification"), "reshard.verify"),
    **dict.fromkeys(("Diff", "Difference"), "reshard.diff"),
    "Fingerprint": "reshard.fingerprint",
    **dict.fromkeys(("FileInfo", "FragmentInfo", "Inspection", "TensorInfo"), "reshard.inspect"),
    "Leftover": "reshard.prune",
    "MeshLayout": "reshard.selection.mesh_layout",
    **dict.fromkeys(("Checkpoint", "LazyTensor"), "reshard.reading.lazy"),
    **dict.fromkeys(("FlatShard", "RankLocalItem", "Shard", "rank_local"), "reshard.state.markers"),
    "hf_state": "reshard.state.hf_names",
    **dict.fromkeys(("Opaque", "RankLocal"), "values.codec"),
    "Persist": "snapshot.keeper.handoff",
    "Restored": "snapshot.restore",
    **dict.fromkeys(("SnapshotReport", "StepReport"), "snapshot.report"),
    "Snapshotter": "snapshot.snapshotter",
    "zarr_store": "zarr.store",
}


def __getattr__(name: str) -> object:
    """What is asked for is loaded then: a keeper of snapshots needs no torch, and a checkpoint no torch pipelines."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
