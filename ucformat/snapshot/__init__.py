"""The snapshot engine: every step in host memory, persisted in the background. Called by users (`Snapshotter`) and `cli` only."""
