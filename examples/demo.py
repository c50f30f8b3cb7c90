"""The main job on real input, in about three minutes on 2 cores: `python -m examples.demo`, or `make demo`.

(a) a real sentence-embedding model goes through four conversions and still embeds; (b) a GPT in training loses a rank
and resumes in two other layouts; (c) a pipeline that keeps every step in memory loses a rank in mid copy. Ends in a
table of what was proven; the exit code is 1 when anything was not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from examples.demo_embedding import prove_embedding_model
from examples.demo_snapshot import prove_snapshots
from examples.demo_training import prove_training
from examples.proof import DemoError, Proofs


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 140)
    proofs = Proofs(console)
    began = time.perf_counter()
    parts = (
        ("a sentence-embedding model: HF → native → DCP → native → HF", "embedding", prove_embedding_model),
        ("a GPT in training: DP2×TP2, one rank killed, resumed as DP3 and as PP2×TP2", "training", prove_training),
        ("a GPT in a 1F1B pipeline, a snapshot of every step: one rank killed in mid copy", "snapshot", prove_snapshots),
    )
    with tempfile.TemporaryDirectory(prefix="ucformat-demo-") as work:
        for title, name, prove in parts:
            console.print(f"[bold]{title}[/bold]", highlight=False)
            place = Path(work) / name
            place.mkdir()
            try:
                prove(place, proofs)
            except DemoError as error:
                console.print(escape(str(error)), highlight=False)
                proofs.check(title, "could not be run, see above", False)
    proofs.show(f"ucformat demo, {time.perf_counter() - began:.0f} s")
    return 0 if proofs.passed else 1


if __name__ == "__main__":
    sys.exit(main())
