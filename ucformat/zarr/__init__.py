"""Checkpoints of any format as read-only zarr v3 hierarchies; needs the extra `zarr`. Users call `ucformat.zarr_store`."""
