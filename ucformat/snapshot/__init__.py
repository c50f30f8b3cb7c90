"""The snapshot engine: every step in host memory, persisted in the background. Users call `Snapshotter`; only `cli` and they may."""
